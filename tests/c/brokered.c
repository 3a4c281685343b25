#include "brokered.h"

#include <sys/socket.h>
#include <unistd.h>

#include "dp_serve.h"
#include "ends.h"

/* Counts calls, and returns the count and its payload: a call that is lost, repeated or reordered shows in the count. */
static uint32_t f_count(void *args, uint32_t n, void *res) {
    static uint64_t calls;
    calls++;
    memcpy(res, &calls, sizeof calls);
    memcpy((uint8_t *)res + sizeof calls, args, n);
    return n + sizeof calls;
}

/* Ends its server. On verbs, a server notices the end of its client late. */
static __thread dp_server *this_server;
static uint32_t f_finish(void *args, uint32_t n, void *res) {
    (void)args, (void)n, (void)res;
    dp_server_finish(this_server);
    return 0;
}

gate *the_gate;
static uint32_t f_gate(void *args, uint32_t n, void *res) {
    (void)args, (void)n, (void)res;
    __atomic_store_n(&the_gate->runs, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&the_gate->open, __ATOMIC_ACQUIRE))
        dp_cpu_pause();
    return 0;
}
static const dp_function functions[] = {f_count, f_finish, f_gate};

void brokered_worker(int sock, void *arg) {
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    dp_dev_options o = quick_options();
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    (void)arg;
    o.active_side_only = 1;
    t_name("worker");
    while (recv(sock, &len, sizeof len, MSG_WAITALL) == sizeof len && len) {
        t_recv(sock, blob, len);
        CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
        CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, blob, len, &s, &err), err);
        dp_server_set_functions(s, functions, 3);
        this_server = s;
        len = sizeof blob;
        CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
        t_send(sock, &len, sizeof len);
        t_send(sock, blob, len);
        int st = dp_server_run(s);
        CHECKF(st == DP_OK || dp_status_class(st) == 5, "the server ended with %s", dp_status_text(st));
        dp_server_destroy(s);
        dp_dev_close(dev);
    }
}

void house_open(house *h, int workers) {
    dp_error err;
    dp_dev_options o = quick_options();
    *h = (house){.n = workers};
    for (int i = 0; i < workers; i++)
        t_peer_start(&h->workers[i], true, brokered_worker, NULL);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h->dev, &err), err);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h->own, &err), err);
    CHECK_OK_ERR(dp_vqp_open(h->dev->provider, &h->virtual, &err), err);
    CHECK_OK_ERR(dp_broker_start(h->dev, &h->broker, &err), err);
}

void house_close(house *h) {
    uint32_t none = 0;
    dp_broker_stop(h->broker);
    dp_dev_close(h->virtual);
    dp_dev_close(h->own);
    dp_dev_close(h->dev);
    for (int i = 0; i < h->n; i++) {
        if (t_is_verbs()) { /* its server may run for ever, because it has had no message of its client */
            t_peer_kill(&h->workers[i]);
            continue;
        }
        t_send(h->workers[i].sock, &none, sizeof none);
        t_peer_join(&h->workers[i]);
    }
}

void brokered_channel(house *h, int worker, uint32_t depth, packed *p) {
    dp_error err;
    dp_brokered *c;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int sock = h->workers[worker].sock;
    CHECK_OK_ERR(dp_brokered_create(h->broker, &(dp_channel_config){depth, 4096, 65536}, &c, &err), err);
    CHECK_OK_ERR(dp_brokered_offer(c, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_brokered_connect(c, blob, len, &err), err);
    CHECK_OK_ERR(dp_brokered_serve(&c, &p->ch, p->fds, &err), err);
    CHECK(!c);
}

void brokered_open(house *h, packed *p, client *c, dp_wait_mode mode) {
    dp_error err;
    int page = dup(p->fds[0]);
    *c = (client){.seed = 1};
    CHECK_OK_ERR(dp_endpoint_unpack(h->virtual, 1, p->ch.cfg.depth, mode, &page, &c->ep, &err), err);
    CHECK_EQ(page, -1);
    CHECK_OK_ERR(dp_channel_unpack(c->ep, &p->ch, p->fds, &c->ch, &err), err);
    CHECK_EQ(p->fds[0], -1);
    CHECK_EQ(p->fds[1], -1);
}

void brokered_close(client *c) {
    uint32_t size;
    dp_started started;
    if (t_is_verbs() && !dp_channel_status(c->ch))
        CHECK_OK(dp_channel_call(c->ch, 1, NULL, 0, NULL, NULL, 0, &size, 0, &started));
    dp_channel_destroy(c->ch);
    dp_endpoint_destroy(c->ep);
}

void brokered_finish(client *c, uint32_t at, uint32_t n, uint32_t seed) {
    uint8_t out[70000];
    uint64_t count;
    uint32_t size = 0;
    dp_started started;
    CHECK_OK(dp_channel_wait(c->ch, at, 0));
    CHECK_OK(dp_channel_finish(c->ch, at, out, &size, &started));
    CHECK_EQ(size, n + sizeof count);
    memcpy(&count, out, sizeof count);
    CHECK_EQ(count, ++c->calls);
    CHECK_PATTERN(out + sizeof count, n, seed);
}

uint32_t brokered_submit(client *c, uint32_t n, uint32_t seed) {
    uint8_t in[70000];
    uint32_t at;
    fill_pattern(in, n, seed);
    CHECK_OK(dp_channel_submit(c->ch, 0, in, n, NULL, n + sizeof(uint64_t), &at));
    return at;
}

void brokered_call(client *c, uint32_t n) {
    uint32_t seed = c->seed++;
    brokered_finish(c, brokered_submit(c, n, seed), n, seed);
}

void brokered_stream(client *c, uint32_t window, uint32_t total) {
    uint32_t slots[64], first = c->seed, sent = 0;
    for (uint32_t done = 0; done < total; done++) {
        for (; sent < total && sent - done < window; sent++)
            slots[sent % window] = brokered_submit(c, (sent * 37) % 600, first + sent);
        brokered_finish(c, slots[done % window], (done * 37) % 600, first + done);
    }
    c->seed += total;
}

void brokered_move(dp_promotion *p, dp_channel *ch) {
    dp_error err;
    uint32_t at;
    CHECK_OK_ERR(dp_promotion_ask(p, ch, &err), err);
    CHECK_STATUS(dp_channel_submit(ch, 0, NULL, 0, NULL, 64, &at), DP_PEER_GONE); /* it takes no calls until it has moved */
    CHECK_OK(dp_promotion_await(p, ch, 0));
    CHECK_OK_ERR(dp_promotion_meet(p, ch, &err), err);
    dp_promotion_switch(p, ch);
    CHECK(!dp_channel_brokered(ch));
}

void brokered_promote(house *h, client *c) {
    dp_error err;
    dp_promotion *p;
    CHECK(dp_endpoint_brokered(c->ep));
    CHECK_OK_ERR(dp_promotion_prepare(c->ep, h->own, &p, &err), err);
    CHECK(dp_promotion_possible(p, c->ch));
    brokered_move(p, c->ch);
    CHECK(dp_promotion_over(p));
    CHECK(dp_promotion_complete(p));
    dp_promotion_free(p);
    CHECK(!dp_endpoint_brokered(c->ep));
}

void brokered_await(house *h, uint64_t want) {
    dp_broker_stats st;
    int64_t until = dp_now_ns() + (int64_t)(5e9 * t_time_scale());
    do
        dp_broker_get_stats(h->broker, &st);
    while (st.channels != want && dp_now_ns() < until);
    CHECK_EQ(st.channels, want);
}

void brokered_healthy(house *h) {
    dp_broker_stats st;
    dp_broker_get_stats(h->broker, &st);
    CHECK_EQ(st.failed, 0);
    CHECK_EQ(st.refused, 0);
}

int brokered_failed_call(client *c) {
    uint8_t in[64] = {0}, out[128];
    uint32_t size;
    dp_started started;
    return dp_channel_call(c->ch, 0, in, sizeof in, NULL, out, sizeof out, &size, dp_now_ns() + (int64_t)(20e9 * t_time_scale()), &started);
}

void brokered_replace(house *h, client *c, int worker) {
    dp_error err;
    if (dp_channel_brokered(c->ch)) {
        dp_promotion *p;
        CHECK_REFUSED(dp_channel_reset(c->ch, &err), DP_UNSUPPORTED, err);
        CHECK_OK_ERR(dp_promotion_prepare(c->ep, h->own, &p, &err), err);
        dp_promotion_switch(p, c->ch);
        dp_promotion_free(p);
        CHECK(!dp_channel_brokered(c->ch));
    }
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int sock = h->workers[worker].sock;
    CHECK_OK_ERR(dp_channel_reset(c->ch, &err), err);
    CHECK_OK_ERR(dp_channel_offer(c->ch, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_channel_connect(c->ch, blob, len, &err), err);
    c->calls = 0;
}
