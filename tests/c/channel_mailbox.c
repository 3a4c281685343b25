/* The mailbox together with the queue pair, and channels at their limits: states that only an unlikely timing or a hostile peer causes. */
#include <errno.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "dp_layout.h"
#include "ends.h"
#include "served.h"

/* ---- a provider whose operations the case can take part in ---- */

static dp_ops hooked;
static const dp_ops *real;

static int hooked_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    int st = real->cq_create(dev, capacity, out, err);
    if (!st)
        (*out)->ops = &hooked;
    return st;
}

static int hooked_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    int st = real->qp_create(d, cq, attr, out, err);
    if (!st)
        (*out)->ops = &hooked;
    cq->peek = NULL;
    return st;
}

static void hook(dp_dev *dev) {
    real = dev->ops;
    hooked = *real;
    hooked.cq_create = hooked_cq_create;
    hooked.qp_create = hooked_qp_create;
    dev->ops = &hooked;
}

/* ---- a server in a thread, with functions of the case's ---- */

typedef struct local {
    served s; /* the client */
    const dp_function *table;
    uint32_t n;
    dp_server *server;
    dp_dev *server_dev;
    int (*server_poll)(dp_cq *, dp_wc *, int); /* instead of the server's own */
    int ended;
} local;

static void local_server(int sock, void *arg) {
    local *l = arg;
    dp_error err;
    dp_dev *dev;
    dp_dev_options o = quick_options();
    o.active_side_only = 1;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_name("server");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
    if (l->server_poll) {
        hook(dev);
        hooked.cq_poll = l->server_poll;
    }
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = l->s.mode}, blob, len, &l->server, &err), err);
    dp_server_set_functions(l->server, l->table, l->n);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(l->server, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    l->server_dev = dev;
    l->ended = dp_server_run(l->server);
}

/* Waits for the server's end and frees it. Before that, other threads may still stop it. */
static void local_end(local *l) {
    t_peer_join(&l->s.peer);
    dp_server_destroy(l->server);
    dp_dev_close(l->server_dev);
}

static void local_connect(local *l) {
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    t_peer_start(&l->s.peer, false, local_server, l);
    CHECK_OK_ERR(dp_channel_offer(l->s.ch, blob, &len, &err), err);
    t_send(l->s.peer.sock, &len, sizeof len);
    t_send(l->s.peer.sock, blob, len);
    t_recv(l->s.peer.sock, &len, sizeof len);
    t_recv(l->s.peer.sock, blob, len);
    CHECK_OK_ERR(dp_channel_connect(l->s.ch, blob, len, &err), err);
}

static void local_client(local *l, const dp_dev_options *o, bool hook_it, dp_channel_config cfg) {
    dp_error err;
    CHECK_OK_ERR(dp_dev_open(t_provider(), o, &l->s.dev, &err), err);
    if (hook_it)
        hook(l->s.dev);
    CHECK_OK_ERR(dp_endpoint_create(l->s.dev, 1, cfg.depth, l->s.mode, &l->s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(l->s.ep, &cfg, &l->s.ch, &err), err);
}

static void local_close(local *l) {
    dp_server_stop(l->server); /* on verbs it does not notice the end of a client that never called */
    local_end(l);
    served_close_client(&l->s);
}

/* ---- order of the mailbox and the queue pair ---- */

static int stage; /* 1: the server's next poll is to wait; 2: it waits; 3: it may go on */

static int late_poll(dp_cq *cq, dp_wc *wc, int n) {
    int one = 1;
    if (__atomic_compare_exchange_n(&stage, &one, 2, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        while (__atomic_load_n(&stage, __ATOMIC_SEQ_CST) != 3)
            dp_cpu_pause();
    int got = real->cq_poll(cq, wc, n);
    cq->peek = NULL;
    return got;
}

static uint32_t f_echo(void *args, uint32_t n, void *res) {
    memcpy(res, args, n);
    return n;
}

static uint32_t f_overrun(void *args, uint32_t n, void *res) {
    (void)args;
    (void)n;
    memset(res, 0xEE, 2 * (1024 + DP_SLOT_ROOM));
    return 2000;
}

/* The first call is alone when it starts, so its result is made in place. It comes by the mailbox, the second one by the queue
 * pair, both after the server checked the mailbox and before it polls the queue pair. If the server executed the second call
 * first, the first one's overrun would damage its result. */
T_CASE(mailbox_first, "channel/mailbox-before-queue-pair", .providers = T_SHM) {
    static const dp_function table[] = {f_echo, f_overrun};
    local l = {.table = table, .n = 2, .server_poll = late_poll, .s.mode = DP_WAIT_HOT};
    uint8_t in[600], out[600];
    uint32_t slot[2], size;
    local_client(&l, NULL, false, (dp_channel_config){4, 1024, 0});
    local_connect(&l);
    served_echo(&l.s, 8, 1);
    __atomic_store_n(&stage, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&stage, __ATOMIC_SEQ_CST) != 2)
        dp_cpu_pause();
    fill_pattern(in, sizeof in, 5);
    CHECK_OK(dp_channel_submit(l.s.ch, 1, in, 8, NULL, 1000, &slot[0]));
    CHECK_OK(dp_channel_submit(l.s.ch, 0, in, sizeof in, NULL, sizeof in, &slot[1]));
    __atomic_store_n(&stage, 3, __ATOMIC_SEQ_CST);
    CHECK_OK(dp_channel_wait(l.s.ch, slot[1], 0));
    CHECK_OK(dp_channel_wait(l.s.ch, slot[0], 0));
    CHECK_STATUS(dp_channel_finish(l.s.ch, slot[0], NULL, NULL, NULL), DP_RESULT_TOO_LARGE);
    CHECK_OK(dp_channel_finish(l.s.ch, slot[1], out, &size, NULL));
    CHECK_EQ(size, sizeof in);
    CHECK_PATTERN(out, size, 5);
    local_close(&l);
}

/* ---- answers of a server that has left ---- */

static int blind; /* number of further polls that return nothing */

static int blind_poll(dp_cq *cq, dp_wc *wc, int n) {
    if (blind) {
        blind--;
        return 0;
    }
    int got = real->cq_poll(cq, wc, n);
    cq->peek = NULL;
    return got;
}

/* A worker answers its calls before it ends. Its answers count, in whichever order the client notices the answers and
 * the connection. */
T_CASE(answers_survive, "channel/answers-before-the-end") {
    static const dp_function table[] = {f_echo};
    for (int later = 0; later < 2; later++) {
        local l = {.table = table, .n = 1, .s.mode = DP_WAIT_HOT};
        dp_dev_options o = quick_options();
        uint8_t in[600], out[600];
        uint32_t slot[3], another, size;
        local_client(&l, &o, true, (dp_channel_config){4, 1024, 0});
        hooked.cq_poll = blind_poll;
        local_connect(&l);
        fill_pattern(in, sizeof in, 5);
        for (int i = 0; i < 3; i++)
            CHECK_OK(dp_channel_submit(l.s.ch, 0, in, sizeof in, NULL, sizeof in, &slot[i]));
        for (int i = 0; i < 3 && l.s.dev->caps & DP_CAP_SILENT_DEATH; i++) /* answers arrive only while the client polls */
            CHECK_OK(dp_channel_wait(l.s.ch, slot[i], 0));
        dp_server_finish(l.server);
        local_end(&l);
        dp_channel_fail(l.s.ch, DP_LEASE_ENDED); /* like the event of its end, if the provider does not report it */
        blind = later;
        if (later) /* a post notices it, or a test of a call */
            CHECK_EQ(dp_channel_test(l.s.ch, slot[2]), 1);
        else
            CHECK(dp_channel_submit(l.s.ch, 0, in, 64, NULL, 64, &another) != DP_OK);
        for (int i = 0; i < 3; i++) {
            CHECK_OK(dp_channel_finish(l.s.ch, slot[i], out, &size, NULL));
            CHECK_PATTERN(out, size, 5);
        }
        served_close_client(&l.s);
    }
}

/* ---- a server that always finds work ---- */

static dp_mailbox *endless;
static local *endless_server;
static uint32_t endless_calls;

static uint32_t f_again(void *args, uint32_t n, void *res) {
    (void)args;
    (void)n;
    (void)res;
    /* The request by shared memory has ordered this already, which the thread sanitizer does not know. */
    dp_mailbox *mailbox = __atomic_load_n(&endless, __ATOMIC_ACQUIRE);
    if (++endless_calls == 1000)
        dp_server_stop(endless_server->server);
    if (endless_calls < 100000) /* as a hostile client would do at this time */
        __atomic_store_n(&mailbox->request, dp_mailbox_request(endless_calls, 0, 8, false), __ATOMIC_RELEASE);
    return 0;
}

T_CASE(stop_busy, "channel/stop-while-requests-keep-coming", .providers = T_SHM) {
    static const dp_function table[] = {f_again};
    local l = {.table = table, .n = 1, .s.mode = DP_WAIT_HOT};
    static const end_opts opts = {.size = 64 << 10};
    end e;
    dp_layout lay;
    dp_side side;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    end_open(&e, &opts, NULL);
    dp_layout_set(&lay, 8, 512, 4096);
    t_peer_start(&l.s.peer, false, local_server, &l);
    CHECK_OK_ERR(dp_side_encode(e.qp, &lay, DP_ROLE_CLIENT, 77, e.mem, blob, &len, &err), err);
    t_send(l.s.peer.sock, &len, sizeof len);
    t_send(l.s.peer.sock, blob, len);
    t_recv(l.s.peer.sock, &len, sizeof len);
    t_recv(l.s.peer.sock, blob, len);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_WORKER, e.dev->provider, &side, &err), err);
    CHECK_OK_ERR(dp_qp_connect(e.qp, side.qp_blob, side.qp_len, &err), err);
    endless_server = &l;
    dp_mailbox *mailbox = dp_rkey_ptr(e.qp, side.addr + lay.mailbox_at, side.rkey, sizeof *mailbox);
    CHECK(mailbox);
    __atomic_store_n(&endless, mailbox, __ATOMIC_RELEASE);
    mailbox->sizes = dp_mailbox_sizes(77, 0, 8);
    __atomic_store_n(&mailbox->request, dp_mailbox_request(1000000, 0, 8, false), __ATOMIC_RELEASE);
    dp_qp_notify(e.qp);
    local_end(&l);
    CHECK_OK(l.ended);
    CHECK_EQ(endless_calls, 1000);
    end_close(&e);
}

/* ---- a client that always finds something ---- */

static int64_t flood_until;
static dp_qp *flooded;

static int flood_poll(dp_cq *cq, dp_wc *wc, int n) {
    (void)n;
    if (dp_now_ns() > flood_until)
        return real->cq_poll(cq, wc, n);
    *wc = (dp_wc){.qp = flooded, .op = DP_OP_RECV_IMM, .imm = dp_imm(32000, 0)};
    return 1;
}

static int flood_recv(dp_qp *qp, uint64_t wr_id) {
    return dp_now_ns() > flood_until ? real->post_recv(qp, wr_id) : DP_OK;
}

static int flood_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                           uint64_t wr_id, uint32_t flags) {
    flooded = qp;
    qp->cq->peek = NULL;
    return real->post_write_imm(qp, sge, n, raddr, rkey, imm, wr_id, flags);
}

static bool given_up; /* set by the caller of f_late */

static uint32_t f_late(void *args, uint32_t n, void *res) {
    (void)args;
    (void)n;
    (void)res;
    for (int64_t until = dp_now_ns() + poll_ns(); !__atomic_load_n(&given_up, __ATOMIC_ACQUIRE) && dp_now_ns() < until;)
        t_sleep_ms(1);
    return 0;
}

T_CASE(flood, "channel/deadline-in-a-flood", .providers = T_SHM | T_TCP, .seconds = 20) {
    static const dp_function table[] = {f_late};
    static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};
    for (int m = 0; m < 3; m++)
        for (int any = 0; any < 2; any++) {
            t_note("mode %d, %s", modes[m], any ? "wait_any" : "wait");
            local l = {.table = table, .n = 1, .s.mode = modes[m]};
            uint8_t in[400] = {0};
            uint32_t slot;
            local_client(&l, NULL, true, (dp_channel_config){4, 1024, 0});
            local_connect(&l);
            served_by_queue_pair(l.s.ch);
            hooked.cq_poll = flood_poll;
            hooked.post_recv = flood_recv;
            hooked.post_write_imm = flood_write_imm;
            int64_t t0 = dp_now_ns();
            flood_until = t0 + 5000000000;
            __atomic_store_n(&given_up, false, __ATOMIC_RELEASE);
            CHECK_OK(dp_channel_submit(l.s.ch, 0, in, sizeof in, NULL, 8, &slot));
            CHECK_STATUS(any ? dp_endpoint_wait_any(l.s.ep, t0 + 20000000) : dp_channel_wait(l.s.ch, slot, t0 + 20000000),
                         DP_DEADLINE);
            CHECKF(dp_now_ns() - t0 < 2500000000, "a deadline of 20 ms took %lld ms",
                   (long long)(dp_now_ns() - t0) / 1000000);
            flood_until = 0;
            __atomic_store_n(&given_up, true, __ATOMIC_RELEASE);
            dp_channel_abandon(l.s.ch, slot);
            local_close(&l);
        }
}

/* ---- batches ---- */

static bool answered;   /* the client has the reply of the first call */
static uint32_t joined; /* posts that were sent together with the next one */

static int counted_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id, uint32_t flags) {
    joined += !!(flags & DP_MORE);
    return real->post_write_imm(q, sge, n, raddr, rkey, imm, wr_id, flags);
}

/* Takes longer than a call whose reply may wait. */
static uint32_t f_long(void *args, uint32_t n, void *res) {
    for (int64_t until = dp_now_ns() + 200000; dp_now_ns() < until;)
        dp_cpu_pause();
    return f_echo(args, n, res);
}

static uint32_t f_until_answered(void *args, uint32_t n, void *res) {
    for (int64_t until = dp_now_ns() + poll_ns(); !__atomic_load_n(&answered, __ATOMIC_ACQUIRE) && dp_now_ns() < until;)
        t_sleep_ms(1);
    return f_echo(args, n, res);
}

/* The reply of a long call leaves before the next function of its batch runs. */
T_CASE(long_call_in_batch, "channel/batch-long-call") {
    static const dp_function table[] = {f_long, f_until_answered};
    local l = {.table = table, .n = 2, .s.mode = DP_WAIT_ADAPTIVE};
    uint8_t in[400], out[400];
    uint32_t slot[2], size;
    local_client(&l, NULL, true, (dp_channel_config){4, 1024, 0});
    local_connect(&l);
    served_by_queue_pair(l.s.ch);
    hooked.post_write_imm = counted_write_imm;
    fill_pattern(in, sizeof in, 3);
    __atomic_store_n(&answered, false, __ATOMIC_RELEASE);
    dp_channel_batch(l.s.ch, true);
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(dp_channel_submit(l.s.ch, i, in, sizeof in, NULL, sizeof in, &slot[i]));
    CHECK_EQ(joined, 2);
    CHECK_OK(dp_channel_wait(l.s.ch, slot[0], 0));
    CHECK_EQ(dp_channel_test(l.s.ch, slot[1]), 0); /* its function waits for this thread */
    __atomic_store_n(&answered, true, __ATOMIC_RELEASE);
    CHECK_OK(dp_channel_wait(l.s.ch, slot[1], 0));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_channel_finish(l.s.ch, slot[i], out, &size, NULL));
        CHECK_PATTERN(out, size, 3);
    }
    local_close(&l);
}

/* ---- limits ---- */

/* The sizes that a channel carries do not depend on the way of a call. */
T_CASE(limits, "channel/limits-are-the-same-when-busy") {
    served s;
    uint8_t in[257] = {0};
    uint32_t ms = 20, slot, size;
    dp_started started;
    for (int bulk = 0; bulk < 2; bulk++) {
        served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 64, bulk ? 4096 : 0);
        for (uint32_t n = 63; n <= 257; n = n < 66 ? n + 1 : n + 64 - n % 64 + 1)
            for (int busy = 0; busy < 2; busy++) {
                t_note("%u bytes, %s, bulk %d", n, busy ? "busy" : "idle", bulk);
                if (busy)
                    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slot));
                CHECK_STATUS(dp_channel_call(s.ch, FN_EMPTY, in, n, NULL, NULL, 64, &size, 0, &started),
                             n > 64 ? (bulk ? DP_RESULT_TOO_LARGE : DP_TOO_LARGE) : DP_OK);
                if (busy) {
                    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
                    CHECK_OK(dp_channel_finish(s.ch, slot, NULL, NULL, NULL));
                }
            }
        served_close(&s);
    }
}

/* The bulk range of an abandoned call becomes free although nothing waits. */
T_CASE(bulk_abandoned, "channel/bulk-room-after-abandoned-call") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 64, 1024);
    served_by_queue_pair(s.ch);
    uint8_t buf[1024] = {1200 & 0xff, 1200 >> 8}; /* ms, longer than a machine pauses */
    uint32_t size, slot;
    dp_started started;
    CHECK_STATUS(dp_channel_call(s.ch, FN_SLOW, buf, 1024, NULL, buf, 8, &size, dp_now_ns() + 5000000, &started),
                 DP_DEADLINE);
    int st;
    int64_t until = dp_now_ns() + poll_ns();
    do
        st = dp_channel_submit(s.ch, FN_ECHO, buf, 1024, NULL, 1024, &slot);
    while (st == DP_BUSY && dp_now_ns() < until);
    CHECK_OK(st);
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_OK(dp_channel_finish(s.ch, slot, buf, &size, NULL));
    CHECK_EQ(size, 1024);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    served_close(&s);
}

/* The same while the channel breaks. */
T_CASE(bulk_broken, "channel/bulk-room-on-a-broken-channel") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 64, 1024);
    served_by_queue_pair(s.ch);
    uint8_t buf[1024] = {200};
    uint32_t slot, other;
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, buf, 1024, NULL, 8, &slot));
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, buf, 1024, NULL, 8, &other), DP_BUSY);
    dp_channel_fail(s.ch, DP_LEASE_ENDED);
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, buf, 1024, NULL, 8, &other), DP_LEASE_ENDED);
    CHECK_STATUS(dp_channel_finish(s.ch, slot, NULL, NULL, NULL), DP_LEASE_ENDED);
    t_peer_kill(&s.peer);
    served_close_client(&s);
}

/* A payload of more messages than the send queue holds. */
static int small_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                       uint32_t flags) {
    static int posts;
    return ++posts % 8 ? real->post_write(qp, sge, n, raddr, rkey, wr_id, flags) : DP_BUSY;
}

T_CASE(many_parts, "channel/payload-of-many-messages") {
    static const dp_function table[] = {f_echo};
    local l = {.table = table, .n = 1};
    dp_dev_options o = quick_options();
    uint32_t n = 200 << 10;
    uint8_t *in = malloc(n), *out = malloc(n);
    fill_pattern(in, n, 3);
    local_client(&l, &o, true, (dp_channel_config){2, 64, 1 << 20});
    if (!t_is_verbs()) /* its queue takes any number of writes; other queues are sometimes full */
        hooked.post_write = small_write;
    l.s.dev->max_msg = 4096;
    local_connect(&l);
    for (int i = 0; i < 3; i++) {
        uint32_t slot, size;
        int st, tries = 0;
        do
            st = dp_channel_submit(l.s.ch, 0, in, n, NULL, n, &slot);
        while (st == DP_BUSY && tries++ < 1000);
        CHECK_OK(st);
        CHECK_OK(dp_channel_wait(l.s.ch, slot, 0));
        CHECK_OK(dp_channel_finish(l.s.ch, slot, out, &size, NULL));
        CHECK_EQ(size, n);
        CHECK_PATTERN(out, n, 3);
    }
    free(in);
    free(out);
    local_close(&l);
}

/* ---- resets that fail ---- */

T_CASE(reset_fails, "channel/reset-without-descriptors", .providers = T_SHM) {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 64, 0);
    uint32_t ms = 1200, size, slot;
    dp_started started;
    dp_error err;
    CHECK_STATUS(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, &ms, 4, &size, dp_now_ns() + 5000000, &started),
                 DP_DEADLINE); /* by the mailbox, and not answered */
    struct rlimit old, none;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = old;
    none.rlim_cur = 3;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    dp_cq *cq;
    dp_error cq_err;
    int cq_st = dp_cq_create(s.dev, 8, &cq, &cq_err);
    int st = dp_channel_reset(s.ch, &err);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
    CHECK_STATUS(st, DP_FATAL);
    CHECK_EQ(err.sys_errno, EMFILE);
    CHECK_STATUS(cq_st, DP_FATAL);
    CHECK_EQ(cq_err.sys_errno, EMFILE);
    CHECK_NE(dp_channel_status(s.ch), DP_OK);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(dp_status_class(dp_channel_submit(s.ch, FN_ECHO, "12345678", 8, NULL, 8, &slot)), 5);
    CHECK_STATUS(dp_endpoint_wait_any(s.ep, dp_now_ns() + 1000000), DP_OK); /* the abandoned call */
    CHECK_STATUS(dp_endpoint_wait_any(s.ep, dp_now_ns() + 1000000), DP_DEADLINE);
    CHECK_OK_ERR(dp_channel_reset(s.ch, &err), err);
    t_peer_join(&s.peer);
    served_again(&s, false);
    served_echo(&s, 8, 1);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    served_close(&s);
}
