/* Hand-made clients and workers that break the protocol of the mailbox. */
#include "dp_channel_impl.h"
#include "forged.h"

T_CASE(hostile_client_mailbox, "channel/hostile-client-mailbox", .providers = T_SHM) {
    t_peer p;
    raw r;
    raw_client(&r, &p);
    dp_mailbox *m = raw_mailbox(&r, false);
    const struct {
        const char *what;
        bool large;
        uint32_t generation, slot, capacity, function, size;
        int status;
    } t[] = {
        {"good", false, 77, 0, 8, FN_ECHO, 8, DP_OK},
        {"generation", false, 78, 0, 8, FN_ECHO, 8, DP_BAD_REQUEST},
        {"slot", false, 77, 8, 8, FN_ECHO, 8, DP_BAD_REQUEST},
        {"size", false, 77, 0, 8, FN_ECHO, 257, DP_BAD_REQUEST},
        {"capacity", false, 77, 0, 513, FN_ECHO, 8, DP_BAD_REQUEST},
        {"function", false, 77, 0, 8, FN_COUNT, 8, DP_NO_FUNCTION},
        {"good at the end", false, 77, 0, 24, FN_ECHO, 24, DP_OK},
        {"small, long", false, 77, 0, 256, FN_ECHO, 256, DP_OK},
        {"large", true, 77, 0, 8, FN_ECHO, 8, DP_OK},
        {"large, long", true, 77, 0, 512, FN_ECHO, 512, DP_OK},
        {"large, size", true, 77, 0, 8, FN_ECHO, 4097, DP_BAD_REQUEST},
        {"large, largest size", true, 77, 0, 300, FN_ECHO, 0x7fff, DP_BAD_REQUEST},
        {"large, slot", true, 77, 8, 300, FN_ECHO, 8, DP_BAD_REQUEST},
        {"large, last slot", true, 77, 1023, 300, FN_ECHO, 8, DP_BAD_REQUEST},
        {"large, capacity", true, 77, 0, 513, FN_ECHO, 8, DP_BAD_REQUEST},
        {"large, another slot", true, 77, 7, 300, FN_ECHO, 300, DP_OK},
        {"large, generation", true, 78, 0, 300, FN_ECHO, 300, DP_BAD_REQUEST},
        {"large, good at the end", true, 77, 0, 257, FN_ECHO, 257, DP_OK},
    };
    for (uint32_t i = 0; i < sizeof t / sizeof *t; i++) {
        t_note("%s", t[i].what);
        uint64_t *reply = t[i].capacity <= DP_MAILBOX_RESULT ? &m->reply : t[i].large && t[i].capacity > 256 ? raw_slot_reply(&r, false) : &m->long_reply;
        m->sizes = dp_mailbox_sizes(t[i].generation, t[i].slot, t[i].capacity);
        __atomic_store_n(&m->request, dp_mailbox_request(100 + i, t[i].function, t[i].size, t[i].large), __ATOMIC_RELEASE);
        dp_qp_notify(r.e.qp);
        int64_t until = dp_now_ns() + poll_ns();
        while (dp_mailbox_call_id(__atomic_load_n(reply, __ATOMIC_ACQUIRE)) != 100 + i)
            CHECKF(dp_now_ns() < until, "%s: no answer", t[i].what);
        CHECK_STATUS(dp_mailbox_status(*reply), t[i].status);
        CHECK_EQ(dp_mailbox_result_size(*reply), t[i].status ? 0 : t[i].size);
    }
    end_close(&r.e);
    int ended;
    t_recv(p.sock, &ended, sizeof ended);
    CHECK_STATUS(ended, DP_PEER_GONE);
    t_peer_join(&p);
}

static void mailbox_forger(int sock, void *arg) {
    (void)arg;
    raw r;
    raw_worker(&r, sock);
    dp_mailbox *m = raw_mailbox(&r, true);
    const struct {
        uint32_t id_plus;
        int status;
        uint32_t size;
    } forged[] = {
        {1, DP_OK, 8},             /* not a call of the client */
        {0, DP_OK, 9},             /* more than it accepts */
        {0, DP_LEASE_ENDED, 0},    /* a status that no worker may send */
        {0, DP_OK, 0xffff},
        {0, DP_OK, 8},             /* the correct one */
    };
    uint64_t seen = 0, word;
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        if (i == 0 || !forged[i - 1].id_plus) {
            while ((word = __atomic_load_n(&m->request, __ATOMIC_ACQUIRE)) == seen)
                dp_cpu_pause();
            seen = word;
        }
        uint32_t id = dp_mailbox_call_id(seen) + forged[i].id_plus;
        __atomic_store_n(&m->reply, dp_mailbox_reply(id, forged[i].status, forged[i].size), __ATOMIC_RELEASE);
        dp_qp_notify(r.e.qp);
        if (forged[i].id_plus)
            t_sync(sock);
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(hostile_worker_mailbox, "channel/hostile-worker-mailbox", .providers = T_SHM) {
    served s;
    served_by(&s, mailbox_forger);
    uint32_t at, size;
    uint8_t out[512];
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, "12345678", 8, NULL, 8, &at));
    CHECK_EQ(dp_channel_test(s.ch, at), 0);
    t_sync(s.peer.sock);
    CHECK_OK(dp_channel_wait(s.ch, at, 0));
    CHECK_STATUS(dp_channel_finish(s.ch, at, out, &size, NULL), DP_PROTOCOL);
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, out, 8, NULL, out, 8, &size, 0, &started), DP_PROTOCOL);
    CHECK_OK(dp_channel_call(s.ch, FN_ECHO, out, 8, NULL, out, 8, &size, 0, &started));
    CHECK_EQ(size, 8);
    CHECK_EQ(dp_channel_free_slots(s.ch), 8);
    t_sync(s.peer.sock);
    served_by_close(&s);
}

/* The mailbox holds an answer to a call that was not made yet, like a stale answer after 2^32 calls. In the third round, it holds a request with the id of
 * the next call, which the client wrote 2^32 calls ago. */
static void foreteller(int sock, void *arg) {
    (void)arg;
    raw r;
    uint64_t word;
    raw_worker(&r, sock);
    dp_mailbox *m = raw_mailbox(&r, true);
    while (!(word = __atomic_load_n(&m->request, __ATOMIC_ACQUIRE)))
        dp_cpu_pause();
    uint32_t id = dp_mailbox_call_id(word);
    __atomic_store_n(&m->reply, dp_mailbox_reply(id, DP_OK, 8), __ATOMIC_RELEASE);
    dp_qp_notify(r.e.qp);
    /* One answer each in the short and the long place. Then the client's own request is still there. */
    for (uint32_t k = 1; k <= 3; k++) {
        t_sync(sock);
        uint32_t expected = k == 3 ? id : id + k;
        if (k < 3)
            __atomic_store_n(k == 1 ? &m->reply : raw_slot_reply(&r, true), dp_mailbox_reply(expected, DP_OK, 8), __ATOMIC_RELEASE);
        t_sync(sock);
        dp_request q;
        uint32_t at = raw_take(&r, &q, NULL);
        CHECK_EQ(q.call_id, expected);
        raw_answer_bare(&r, at, 4, (int)k, DP_IMM_BARE | dp_imm(at, q.call_id));
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(stale_mailbox, "channel/stale-mailbox-word", .providers = T_SHM) {
    served s;
    served_by(&s, foreteller);
    uint32_t size;
    uint8_t out[512];
    dp_started started;
    uint32_t first = s.ch->next_call;
    CHECK_OK(dp_channel_call(s.ch, FN_ECHO, "12345678", 8, NULL, out, 8, &size, 0, &started));
    CHECK_EQ(size, 8);
    for (int k = 1; k <= 3; k++) {
        t_sync(s.peer.sock);
        t_sync(s.peer.sock);
        if (k == 3)
            s.ch->next_call = first; /* as after 2^32 calls */
        CHECK_OK(dp_channel_call(s.ch, FN_ECHO, "12345678", 8, NULL, out, k == 2 ? 300 : 8, &size, 0, &started));
        CHECK_EQ(size, 4);
        CHECK_BYTES(out, k, 4);
    }
    t_sync(s.peer.sock);
    served_by_close(&s);
}
