/* Calls over tcp with payloads larger than the sockets' and queue pairs' buffers. Meanwhile the other side does not poll for longer than
 * the time-out of a post on other providers. */
#include <stdlib.h>

#include "dp_channel_impl.h"
#include "dp_tcp_impl.h"
#include "ends.h"
#include "served.h"

enum { LARGE = 16 << 20, AWAY_MS = 2500 };

T_CASE(tcp_patience, "tcp/payload-for-a-peer-that-computes", .providers = T_TCP | T_ENCRYPT, .seconds = 40) {
    served s;
    uint8_t *in = malloc(LARGE), *out = malloc(LARGE);
    uint32_t slow, large, size, ms = AWAY_MS;
    fill_pattern(in, LARGE, 4);
    served_open(&s, true, DP_WAIT_ADAPTIVE, 2, 1024, LARGE);
    t_note("the worker runs a function");
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slow));
    int64_t start = dp_now_ns();
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, in, LARGE, NULL, LARGE, &large));
    CHECKF(dp_now_ns() - start > AWAY_MS * 500000ll, "the payload found room: nothing was tried");
    t_note("the client computes");
    t_sleep_ms(AWAY_MS);
    CHECK_OK(dp_channel_wait(s.ch, slow, 0));
    CHECK_OK(dp_channel_finish(s.ch, slow, out, &size, NULL));
    CHECK_OK(dp_channel_wait(s.ch, large, 0));
    CHECK_OK(dp_channel_finish(s.ch, large, out, &size, NULL));
    CHECK_EQ(size, LARGE);
    CHECK_SAME(out, in, LARGE);
    served_close(&s);
    free(in);
    free(out);
}

/* A payload in bulk memory and the header behind it are sent by one call. */
static const dp_ops *real_ops;
static dp_ops hooked_ops;
static uint32_t held, sent;

static int hooked_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    int st = real_ops->post_write(q, sge, n, raddr, rkey, wr_id, flags);
    held += tcp_backlog(tcp_qp_of(q)) >= sge->len;
    return st;
}

static int hooked_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                            uint32_t flags) {
    int st = real_ops->post_write_imm(q, sge, n, raddr, rkey, imm, wr_id, flags);
    sent += tcp_backlog(tcp_qp_of(q)) == 0;
    return st;
}

T_CASE(tcp_bulk_at_once, "tcp/payload-and-header-together", .providers = T_TCP | T_ENCRYPT) {
    static const uint32_t sizes[] = {1025, 8192, 30000};
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 1024, 1 << 20);
    real_ops = s.ch->qp->ops;
    hooked_ops = *real_ops;
    hooked_ops.post_write = hooked_write;
    hooked_ops.post_write_imm = hooked_write_imm;
    s.ch->qp->ops = &hooked_ops;
    for (uint32_t i = 0; i < 3; i++) {
        t_note("%u bytes", sizes[i]);
        served_echo(&s, sizes[i], i);
        CHECK_EQ(held, i + 1);
        CHECK_EQ(sent, i + 1);
    }
    s.ch->qp->ops = real_ops;
    served_close(&s);
}

/* A worker of an earlier build refuses requests with DP_REQ_BATCH, so only one that has announced it gets them. */
T_CASE(batch_announced, "tcp/batch-only-if-announced", .providers = T_TCP | T_ENCRYPT) {
    served s;
    uint8_t in[64] = {0}, out[64];
    uint32_t at, size;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 1024, 0);
    CHECK(s.ch->qp->peer_batches);
    dp_channel_batch(s.ch, true);
    for (int can = 1; can >= 0; can--) {
        s.ch->qp->peer_batches = can;
        CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, in, sizeof in, NULL, sizeof out, &at));
        CHECK_EQ(s.ch->slots[at].told & DP_REQ_BATCH, can ? DP_REQ_BATCH : 0);
        CHECK_OK(dp_channel_wait(s.ch, at, 0));
        CHECK_OK(dp_channel_finish(s.ch, at, out, &size, NULL));
    }
    served_close(&s);
}
