/* Peers of the tcp provider that send malformed or forbidden frames. No frame changes memory that its peer may not write. Each
 * frame ends only its own connection. */
#include "tcp_peer.h"

#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WHOLE, READ_ONLY, WRITE_ONLY };
static const end_opts opts = {
    .size = 16384, .max_send = 8, .max_recv = 8, .regions = {{0, DP_REMOTE_READ, false}, {0, DP_REMOTE_WRITE, false}}, .n_regions = 2};

static void await_broken(end *e, int status) {
    int64_t until = dp_now_ns() + poll_ns();
    while (!dp_qp_broken(e->qp)) {
        end_drain(e);
        CHECKF(dp_now_ns() < until, "the queue pair is not broken");
        sched_yield();
    }
    CHECK_STATUS(dp_qp_broken(e->qp), status);
    if (status != DP_PEER_GONE)
        CHECK_EQ(e->qp->state, DP_QP_ERROR);
}

/* ---- frames that come in pieces ---- */

typedef struct stream {
    uint8_t bytes[512];
    size_t len;
} stream;

static void add(stream *s, const tcp_frame *f, const void *payload, size_t len) {
    memcpy(s->bytes + s->len, f, sizeof *f);
    if (len)
        memcpy(s->bytes + s->len + sizeof *f, payload, len);
    s->len += sizeof *f + len;
}

/* One request of each kind, all good. */
static stream good_stream(const card *c) {
    stream s = {.len = 0};
    const reg_ref *r = &c->regions[WHOLE];
    uint8_t data[100];
    uint64_t one = 1, swap[2] = {1, 2};
    fill_pattern(data, sizeof data, 1);
    add(&s, &(tcp_frame){.op = TCP_WRITE, .flags = TCP_WANTS_ACK, .len = 100, .rkey = r->rkey, .raddr = r->addr + 64}, data, 100);
    fill_pattern(data, sizeof data, 2);
    add(&s, &(tcp_frame){.op = TCP_WRITE_IMM, .len = 50, .imm = 99, .rkey = r->rkey, .raddr = r->addr + 256}, data, 50);
    add(&s, &(tcp_frame){.op = TCP_READ, .len = 64, .rkey = r->rkey, .raddr = r->addr + 64}, NULL, 0);
    add(&s, &(tcp_frame){.op = TCP_FETCH_ADD, .len = 8, .rkey = r->rkey, .raddr = r->addr + 512}, &one, 8);
    add(&s, &(tcp_frame){.op = TCP_COMPARE_SWAP, .len = 8, .rkey = r->rkey, .raddr = r->addr + 512}, swap, 16);
    return s;
}

T_CASE(byte_by_byte, "tcp/frames-byte-by-byte", .providers = T_TCP) {
    end e;
    rogue r;
    end_open(&e, &opts, NULL);
    rogue_join(&r, &e);
    stream s = good_stream(&r.of);
    for (size_t i = 0; i < s.len; i++) {
        t_note("byte %zu of %zu", i, s.len);
        rogue_say(&r, s.bytes + i, 1);
        end_drain(&e);
        sched_yield();
        end_drain(&e);
    }
    CHECK_EQ(end_imm(&e).imm, 99);
    struct {
        tcp_frame ack, data;
        uint8_t bytes[64];
        tcp_frame value, swapped;
    } got;
    _Static_assert(sizeof got == 4 * sizeof(tcp_frame) + 64, "no padding");
    rogue_hear(&r, &e, &got, sizeof got);
    CHECK(got.ack.op == TCP_ACK && got.data.op == TCP_DATA && got.data.len == 64 && got.value.op == TCP_VALUE && got.value.raddr == 0);
    CHECK(got.swapped.op == TCP_VALUE && got.swapped.raddr == 1);
    CHECK_PATTERN(got.bytes, 64, 1);
    CHECK_PATTERN(end_bytes(&e) + 64, 100, 1);
    CHECK_PATTERN(end_bytes(&e) + 256, 50, 2);
    CHECK_EQ(end_bytes(&e)[512], 2);
    rogue_leave(&r);
    await_broken(&e, DP_PEER_GONE);
    end_close(&e);
}

T_CASE(cut, "tcp/frames-cut-at-every-byte", .providers = T_TCP, .seconds = 30) {
    end e;
    end_open(&e, &opts, NULL);
    size_t len = 1;
    for (size_t at = 0; at < len; at++) {
        rogue r;
        memset(end_bytes(&e), 0, e.mem->size);
        rogue_join(&r, &e);
        stream s = good_stream(&r.of);
        len = s.len;
        t_note("cut after %zu of %zu", at, len);
        rogue_say(&r, s.bytes, at);
        if (at % 2)
            end_drain(&e); /* this side has read a part before it sees the end */
        rogue_leave(&r);
        await_broken(&e, DP_PEER_GONE);
        CHECK_BYTES(end_bytes(&e), 0, 64);
        CHECK_BYTES(end_bytes(&e) + 164, 0, 92);
        CHECK_BYTES(end_bytes(&e) + 306, 0, 206);
        CHECK_BYTES(end_bytes(&e) + 520, 0, e.mem->size - 520);
        CHECK_EQ(e.received.tail - e.received.head, at >= 24 + 100 + 24 + 50); /* the whole write-with-immediate, or none */
        end_reset(&e);
    }
    end_close(&e);
}

/* Data that a peer sent before it ended is still delivered, and the receive of each completion can be posted again: a worker may answer and
 * exit at once. The same holds if a post notices the end first, by a failed send. */
static void last_words(bool by_post) {
    end e;
    rogue r;
    end_open(&e, &opts, NULL);
    rogue_join(&r, &e);
    dp_sge s = local_sge(&e, 0, 8);
    CHECK_OK(dp_post_write(e.qp, &s, 1, 0x10000, 7, 5, DP_SIGNALED));
    for (uint32_t i = 0; i < 8; i++)
        rogue_say(&r, &(tcp_frame){.op = TCP_WRITE_IMM, .imm = i}, sizeof(tcp_frame));
    rogue_leave(&r);
    for (int64_t until = dp_now_ns() + poll_ns(); !dp_qp_broken(e.qp);) {
        if (by_post)
            dp_post_write(e.qp, &s, 1, 0x10000, 7, 6, 0);
        else
            CHECK_EQ(dp_cq_poll(e.cq, NULL, 0), 0);
        CHECK(dp_now_ns() < until);
    }
    CHECK_STATUS(dp_qp_broken(e.qp), DP_PEER_GONE);
    for (uint32_t i = 0; i < 8; i++)
        CHECK_EQ(end_imm(&e).imm, i); /* posts a receive */
    dp_wc wc;
    CHECK(end_poll_sent(&e, &wc, poll_ns()));
    CHECK_STATUS(wc.status, DP_PEER_GONE);
    CHECK_EQ(e.qp->state, DP_QP_ERROR);
    CHECK_STATUS(dp_post_recv(e.qp, 1), DP_CONNECTION);
    end_close(&e);
}

T_CASE(last_words_polled, "tcp/last-words", .providers = T_TCP) { last_words(false); }
T_CASE(last_words_posted, "tcp/last-words-after-a-failed-post", .providers = T_TCP) { last_words(true); }

/* ---- frames that are sent together ---- */

/* Posts with DP_MORE wait for the next post, and then go with it. A poll without completions and arming the queue send them too. */
T_CASE(together, "tcp/posts-together", .providers = T_TCP) {
    end e;
    rogue r;
    end_open(&e, &opts, NULL);
    rogue_join(&r, &e);
    dp_sge s = local_sge(&e, 0, 8);
    for (int way = 0; way < 3; way++) {
        struct {
            tcp_frame f;
            uint64_t data;
        } got[4];
        t_note("way %d", way);
        for (uint64_t i = 0; i < 3; i++) {
            CHECK_OK(dp_post_write(e.qp, &s, 1, 0x10000, 7, i, DP_MORE));
            CHECK_EQ(recv(r.fd, got, sizeof got, MSG_DONTWAIT), -1);
        }
        if (way == 0)
            CHECK_OK(dp_post_write(e.qp, &s, 1, 0x10000, 7, 3, 0));
        else if (way == 1)
            CHECK_EQ(dp_cq_poll(e.cq, &(dp_wc){0}, 1), 0);
        else
            CHECK_OK(dp_cq_arm(e.cq));
        CHECK_EQ(tcp_backlog(tcp_qp_of(e.qp)), 0);
        rogue_hear(&r, &e, got, (way ? 3 : 4) * sizeof *got);
    }
    rogue_leave(&r);
    end_close(&e);
}

/* ---- malformed and forbidden frames ---- */

typedef struct hostile {
    const char *what;
    tcp_frame f;
    int region;  /* the region whose key and address are added */
    enum { NOTHING, WRITE_WAITS, READ_WAITS, ADD_WAITS, SWAP_WAITS } posted; /* the post of this side that waits for an answer */
} hostile;

static const hostile frames[] = {
    {"op 0", {.op = 0}, WHOLE, NOTHING},
    {"op 9", {.op = TCP_COMPARE_SWAP + 1}, WHOLE, NOTHING},
    {"op 255", {.op = 255, .len = 8}, WHOLE, NOTHING},
    {"an unknown flag", {.op = TCP_WRITE, .flags = 2, .len = 8}, WHOLE, NOTHING},
    {"a flag of a read", {.op = TCP_READ, .flags = TCP_WANTS_ACK, .len = 8}, WHOLE, NOTHING},
    {"reserved bytes", {.op = TCP_WRITE, .zero = 1, .len = 8}, WHOLE, NOTHING},
    {"write, another key", {.op = TCP_WRITE, .len = 8, .rkey = 1}, WHOLE, NOTHING},
    {"write before", {.op = TCP_WRITE, .len = 8, .raddr = (uint64_t)-4}, WHOLE, NOTHING},
    {"write across the end", {.op = TCP_WRITE, .len = 8, .raddr = 16384 - 4}, WHOLE, NOTHING},
    {"write behind", {.op = TCP_WRITE, .len = 1, .raddr = 16384}, WHOLE, NOTHING},
    {"write of 4 GiB - 1", {.op = TCP_WRITE, .len = UINT32_MAX}, WHOLE, NOTHING},
    {"write whose end wraps", {.op = TCP_WRITE_IMM, .len = UINT32_MAX, .raddr = 0x7fffffff00000000}, WHOLE, NOTHING},
    {"write to read-only", {.op = TCP_WRITE, .len = 8}, READ_ONLY, NOTHING},
    {"immediate to read-only", {.op = TCP_WRITE_IMM, .len = 8}, READ_ONLY, NOTHING},
    {"read of write-only", {.op = TCP_READ, .len = 8}, WRITE_ONLY, NOTHING},
    {"read across the end", {.op = TCP_READ, .len = 8192, .raddr = 8193}, WHOLE, NOTHING},
    {"read of more than a message", {.op = TCP_READ, .len = TCP_MAX_MSG + 1}, WHOLE, NOTHING},
    {"fetch-and-add misaligned", {.op = TCP_FETCH_ADD, .len = 8, .raddr = 4}, WHOLE, NOTHING},
    {"fetch-and-add behind", {.op = TCP_FETCH_ADD, .len = 8, .raddr = 16384}, WHOLE, NOTHING},
    {"fetch-and-add of 4 bytes", {.op = TCP_FETCH_ADD, .len = 4}, WHOLE, NOTHING},
    {"fetch-and-add of write-only", {.op = TCP_FETCH_ADD, .len = 8}, WRITE_ONLY, NOTHING},
    {"a flag of a compare-and-swap", {.op = TCP_COMPARE_SWAP, .flags = TCP_WANTS_ACK, .len = 8}, WHOLE, NOTHING},
    {"compare-and-swap, another key", {.op = TCP_COMPARE_SWAP, .len = 8, .rkey = 1}, WHOLE, NOTHING},
    {"compare-and-swap misaligned", {.op = TCP_COMPARE_SWAP, .len = 8, .raddr = 4}, WHOLE, NOTHING},
    {"compare-and-swap before", {.op = TCP_COMPARE_SWAP, .len = 8, .raddr = (uint64_t)-8}, WHOLE, NOTHING},
    {"compare-and-swap behind", {.op = TCP_COMPARE_SWAP, .len = 8, .raddr = 16384}, WHOLE, NOTHING},
    {"compare-and-swap of 4 bytes", {.op = TCP_COMPARE_SWAP, .len = 4}, WHOLE, NOTHING},
    {"compare-and-swap of 16 bytes", {.op = TCP_COMPARE_SWAP, .len = 16}, WHOLE, NOTHING},
    {"compare-and-swap of read-only", {.op = TCP_COMPARE_SWAP, .len = 8}, READ_ONLY, NOTHING},
    {"compare-and-swap of write-only", {.op = TCP_COMPARE_SWAP, .len = 8}, WRITE_ONLY, NOTHING},
    {"acknowledgement of nothing", {.op = TCP_ACK}, WHOLE, NOTHING},
    {"data nobody asked for", {.op = TCP_DATA, .len = 64}, WHOLE, NOTHING},
    {"value nobody asked for", {.op = TCP_VALUE}, WHOLE, NOTHING},
    {"data for a write", {.op = TCP_DATA, .len = 8}, WHOLE, WRITE_WAITS},
    {"value for a write", {.op = TCP_VALUE}, WHOLE, WRITE_WAITS},
    {"acknowledgement of a read", {.op = TCP_ACK}, WHOLE, READ_WAITS},
    {"less data than asked for", {.op = TCP_DATA, .len = 63}, WHOLE, READ_WAITS},
    {"more data than asked for", {.op = TCP_DATA, .len = 65}, WHOLE, READ_WAITS},
    {"value for a read", {.op = TCP_VALUE}, WHOLE, READ_WAITS},
    {"data for a fetch-and-add", {.op = TCP_DATA, .len = 8}, WHOLE, ADD_WAITS},
    {"a value with a payload", {.op = TCP_VALUE, .len = 8}, WHOLE, ADD_WAITS},
    {"data for a compare-and-swap", {.op = TCP_DATA, .len = 8}, WHOLE, SWAP_WAITS},
    {"acknowledgement of a compare-and-swap", {.op = TCP_ACK}, WHOLE, SWAP_WAITS},
    {"a value with a payload for a compare-and-swap", {.op = TCP_VALUE, .len = 8}, WHOLE, SWAP_WAITS},
};

T_CASE(hostile_frames, "tcp/hostile-frames", .providers = T_TCP) {
    end e;
    end_open(&e, &opts, NULL);
    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
        const hostile *h = &frames[i];
        rogue r;
        t_note("%s", h->what);
        rogue_join(&r, &e);
        for (int k = 0; k < 3; k++)
            memset(e.regions[k]->addr, 0xEE, e.regions[k]->size);
        memset(local_bytes(&e), 0xEE, 256);
        dp_sge s = local_sge(&e, 64, h->posted >= ADD_WAITS ? 8 : 64);
        if (h->posted == WRITE_WAITS)
            CHECK_OK(dp_post_write(e.qp, &s, 1, 0x10000, 7, 5, DP_SIGNALED));
        if (h->posted == READ_WAITS)
            CHECK_OK(dp_post_read(e.qp, &s, 0x10000, 7, 5, DP_SIGNALED));
        if (h->posted == ADD_WAITS)
            CHECK_OK(dp_post_fetch_add(e.qp, &s, 0x10000, 7, 1, 5, DP_SIGNALED));
        if (h->posted == SWAP_WAITS)
            CHECK_OK(dp_post_compare_swap(e.qp, &s, 0x10000, 7, 0, 1, 5, DP_SIGNALED));
        tcp_frame f = h->f;
        uint8_t payload[128]; /* also the operands: the present value of the words, and 0 */
        memset(payload, 0xEE, sizeof payload);
        memset(payload + 8, 0, 8);
        if (f.op <= TCP_FETCH_ADD || f.op == TCP_COMPARE_SWAP) {
            f.rkey ^= r.of.regions[h->region].rkey;
            f.raddr += r.of.regions[h->region].addr;
        }
        rogue_say(&r, &f, sizeof f);
        send(r.fd, payload, sizeof payload, MSG_NOSIGNAL); /* the end may have closed it by now */
        await_broken(&e, DP_PROTOCOL);
        rogue_await_end(&r, &e);
        dp_wc wc;
        if (h->posted) {
            CHECK(end_poll_sent(&e, &wc, poll_ns()));
            CHECK_EQ(wc.wr_id, 5);
            CHECK_STATUS(wc.status, DP_CONNECTION);
        }
        end_quiet(&e, 1);
        for (int k = 0; k < 3; k++)
            CHECK_BYTES(e.regions[k]->addr, 0xEE, e.regions[k]->size);
        CHECK_BYTES(local_bytes(&e), 0xEE, 256);
        CHECK_STATUS(dp_post_write(e.qp, NULL, 0, 0, 0, 1, 0), DP_CONNECTION);
        rogue_leave(&r);
        end_reset(&e);
    }
    end_close(&e);
}

/* Valid frames with a few random bytes: the end survives them and serves the next peer. */
T_CASE(noise, "tcp/noise", .providers = T_TCP) {
    end e, f;
    end_open(&e, &opts, NULL);
    for (int i = 0; i < 200; i++) {
        rogue r;
        uint8_t bytes[400];
        t_note("round %d", i);
        rogue_join(&r, &e);
        stream s = good_stream(&r.of);
        memcpy(bytes, s.bytes, s.len < sizeof bytes ? s.len : sizeof bytes);
        for (int k = 0; k < 1 + i % 4; k++)
            bytes[t_random() % s.len] = (uint8_t)t_random();
        send(r.fd, bytes, s.len, MSG_NOSIGNAL);
        end_drain(&e);
        rogue_leave(&r);
        int64_t until = dp_now_ns() + poll_ns();
        while (!dp_qp_broken(e.qp)) {
            end_drain(&e);
            CHECKF(dp_now_ns() < until, "not broken by its peer's end");
        }
        end_reset(&e);
    }
    end_open(&f, NULL, NULL);
    ends_connect_and_write(&f, &e);
    end_close(&f);
    end_close(&e);
}

/* ---- half a frame ---- */

static void start_half(rogue *r, end *e, int region) {
    uint8_t half[24 + 1000];
    const reg_ref *at = &r->of.regions[region];
    memset(half, 0x77, sizeof half);
    memcpy(half, &(tcp_frame){.op = TCP_WRITE_IMM, .len = 8192, .rkey = at->rkey, .raddr = at->addr}, 24);
    rogue_say(r, half, sizeof half);
    int64_t until = dp_now_ns() + poll_ns();
    while (((volatile uint8_t *)e->regions[region]->addr)[999] != 0x77) {
        end_drain(e);
        CHECKF(dp_now_ns() < until, "the first half does not arrive");
    }
}

T_CASE(half_reset, "tcp/half-a-frame-and-a-reset", .providers = T_TCP) {
    end e;
    rogue r, next;
    uint8_t rest[8192];
    end_open(&e, &opts, NULL);
    rogue_join(&r, &e);
    start_half(&r, &e, WRITE_ONLY);
    end_reset(&e);
    memset(e.regions[WRITE_ONLY]->addr, 0, 8192);
    memset(rest, 0x77, sizeof rest);
    send(r.fd, rest, 7192, MSG_NOSIGNAL);
    rogue_join(&next, &e);
    stream s = good_stream(&next.of);
    rogue_say(&next, s.bytes, s.len);
    CHECK_EQ(end_imm(&e).imm, 99); /* the new connection starts with a frame of its own */
    CHECK_BYTES(e.regions[WRITE_ONLY]->addr, 0, 8192);
    rogue_await_end(&r, &e);
    rogue_leave(&r);
    rogue_leave(&next);
    end_close(&e);
}

/* dp_mem_free of an exposed region, during a frame for it and afterwards. */
T_CASE(half_free, "tcp/half-a-frame-and-a-freed-region", .providers = T_TCP) {
    for (int round = 0; round < 2; round++) {
        end e;
        rogue r;
        uint8_t rest[8192];
        end_open(&e, &opts, NULL);
        rogue_join(&r, &e);
        reg_ref at = r.of.regions[WRITE_ONLY];
        if (round == 0)
            start_half(&r, &e, WRITE_ONLY);
        dp_mem_free(e.regions[WRITE_ONLY]);
        e.n_regions--;
        memset(rest, 0x77, sizeof rest);
        if (round == 1)
            rogue_say(&r, &(tcp_frame){.op = TCP_WRITE, .len = 64, .rkey = at.rkey, .raddr = at.addr}, sizeof(tcp_frame));
        send(r.fd, rest, 7192, MSG_NOSIGNAL);
        await_broken(&e, round ? DP_PROTOCOL : DP_CONNECTION);
        rogue_leave(&r);
        end_close(&e);
    }
}

T_CASE(half_destroyed, "tcp/half-a-frame-and-no-queue-pair", .providers = T_TCP) {
    end e;
    rogue r;
    end_open(&e, &opts, NULL);
    rogue_join(&r, &e);
    start_half(&r, &e, WHOLE);
    end_close(&e);
    rogue_leave(&r);
}

/* ---- limits ---- */

/* If a peer sends requests and does not read, its connection ends before the answers take more memory than TCP_OUT_MAX. */
T_CASE(no_reader, "tcp/reads-whose-answers-nobody-takes", .providers = T_TCP) {
    static const end_opts large = {.size = TCP_MAX_MSG};
    end e;
    rogue r;
    end_open(&e, &large, NULL);
    rogue_join(&r, &e);
    tcp_frame f = {.op = TCP_READ, .len = TCP_MAX_MSG, .rkey = r.of.regions[0].rkey, .raddr = r.of.regions[0].addr};
    for (int64_t until = dp_now_ns() + poll_ns(); !dp_qp_broken(e.qp);) {
        CHECKF(dp_now_ns() < until, "read requests go on for ever");
        send(r.fd, &f, sizeof f, MSG_NOSIGNAL | MSG_DONTWAIT);
        end_drain(&e);
        CHECK_LE(tcp_qp_of(e.qp)->out_cap, 2u * TCP_OUT_MAX);
    }
    CHECK_STATUS(dp_qp_broken(e.qp), DP_PROTOCOL);
    rogue_leave(&r);
    end_close(&e);
}

/* A write-with-immediate without a receive waits, and the frames behind it wait too. A blocked wait does not spin meanwhile. */
T_CASE(held, "tcp/immediate-without-a-receive", .providers = T_TCP) {
    static const end_opts none = {.size = 16384, .no_recvs = true};
    end e;
    rogue r;
    end_open(&e, &none, NULL);
    rogue_join(&r, &e);
    stream s = good_stream(&r.of);
    rogue_say(&r, s.bytes, s.len);
    tcp_frame ack;
    rogue_hear(&r, &e, &ack, sizeof ack); /* of the first write */
    end_quiet(&e, 5);
    CHECK_BYTES(end_bytes(&e) + 256, 0, 300);
    int returns = 0;
    for (int64_t until = dp_now_ns() + 50000000; dp_now_ns() < until; returns++) {
        CHECK_OK(dp_cq_arm(e.cq));
        CHECK_OK(dp_cq_wait(e.cq, until - dp_now_ns()));
    }
    CHECKF(returns < 100, "a held frame ends the wait %d times", returns);
    end_post_recv(&e);
    CHECK_EQ(end_imm(&e).imm, 99);
    CHECK_EQ(end_bytes(&e)[512], 2);
    rogue_leave(&r);
    end_close(&e);
}
