#include "tcp_peer.h"

#include <errno.h>
#include <sched.h>
#include <unistd.h>

int rogue_dial(const card *c) {
    tcp_blob b;
    dp_error err;
    struct sockaddr_storage at;
    CHECK_OK_ERR(tcp_blob_check(c->blob, c->blob_len, &b, &err), err);
    CHECK_EQ(b.n_addresses, 1);
    socklen_t len = tcp_address_to(&b.addresses[0], &at);
    int fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECKF(fd >= 0, "socket: %s", strerror(errno));
    CHECKF(!connect(fd, (struct sockaddr *)&at, len), "connect: %s", strerror(errno));
    dp_tcp_prepare(fd);
    return fd;
}

tcp_hello rogue_hello(const card *c, const uint8_t from[DP_TCP_TOKEN_SIZE]) {
    tcp_hello h = {.magic = DP_TCP_HELLO_MAGIC, .version = DP_TCP_VERSION, .n_regions = 1};
    memcpy(h.to, dp_tcp_blob_token(c->blob, c->blob_len), sizeof h.to);
    memcpy(h.from, from, sizeof h.from);
    h.regions[0] = (tcp_region){7, ACCESS_ALL, 0x10000, 1 << 20};
    return h;
}

tcp_blob rogue_blob(const uint8_t token[DP_TCP_TOKEN_SIZE]) {
    tcp_blob b = {.magic = DP_TCP_BLOB_MAGIC, .version = DP_TCP_VERSION, .provider = DP_PROVIDER_TCP};
    memcpy(b.token, token, sizeof b.token);
    return b;
}

static void read_all(int fd, void *bytes, size_t len) {
    for (size_t got = 0; got < len;) {
        ssize_t n = recv(fd, (char *)bytes + got, len - got, 0);
        CHECKF(n > 0, "the end closed the socket early: %s", n ? strerror(errno) : "end of stream");
        got += (size_t)n;
    }
}

void rogue_join(rogue *r, end *e) {
    uint8_t token[DP_TCP_TOKEN_SIZE];
    dp_error err;
    dp_random(token, sizeof token);
    end_card(e, &r->of);
    r->fd = rogue_dial(&r->of);
    tcp_hello h = rogue_hello(&r->of, token);
    rogue_say(r, &h, sizeof h);
    read_all(r->fd, &h, sizeof h);
    CHECK_STATUS(h.status, DP_OK);
    CHECK_SAME(h.to, token, sizeof token);
    tcp_blob b = rogue_blob(token);
    CHECK_OK_ERR(dp_qp_connect(e->qp, &b, sizeof b, &err), err);
    static const uint8_t can_batch[24] = {[8] = 1};
    CHECK(h.n_regions >= 1 && h.n_regions <= DP_EXPOSE_MAX);
    CHECK_SAME(&h.regions[h.n_regions - 1], can_batch, sizeof can_batch);
    CHECK(!e->qp->peer_batches); /* not announced by the rogue, as by earlier builds */
}

void rogue_say(rogue *r, const void *bytes, size_t len) {
    for (size_t sent = 0; sent < len;) {
        ssize_t n = send(r->fd, (const char *)bytes + sent, len - sent, MSG_NOSIGNAL);
        CHECKF(n > 0, "send: %s", strerror(errno));
        sent += (size_t)n;
    }
}

void rogue_hear(rogue *r, end *e, void *bytes, size_t len) {
    int64_t until = dp_now_ns() + poll_ns();
    for (size_t got = 0; got < len; sched_yield()) {
        end_drain(e);
        ssize_t n = recv(r->fd, (char *)bytes + got, len - got, MSG_DONTWAIT);
        CHECKF(n > 0 || (n < 0 && errno == EAGAIN), "the end closed the socket: %s", n ? strerror(errno) : "end of stream");
        got += n > 0 ? (size_t)n : 0;
        CHECKF(dp_now_ns() < until, "%zu of %zu bytes have come", got, len);
    }
}

void rogue_await_end(rogue *r, end *e) {
    int64_t until = dp_now_ns() + poll_ns();
    char bytes[4096];
    for (ssize_t n = 1; n > 0 || (n < 0 && errno == EAGAIN); sched_yield()) {
        end_drain(e);
        n = recv(r->fd, bytes, sizeof bytes, MSG_DONTWAIT);
        CHECKF(dp_now_ns() < until, "the socket stays open");
    }
}

void rogue_leave(rogue *r) {
    close(r->fd);
    r->fd = -1;
}
