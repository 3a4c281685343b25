/* The slot state machine against a model of it (model.h). Random sequences of submit, test, wait, finish, abandon,
 * failure, reset and reconnect at the client, and of right, late, repeated, forged and malformed replies of a hand-made
 * worker, by queue pair and mailbox. Everything happens on one thread, so the model knows what each call returns and which
 * state each slot is in after it.
 *
 * The seed determines a run. It is printed with a failure; RFAAS_MODEL_SEED=N repeats that run and prints each
 * step. */
#include <stdlib.h>

#include "model.h"

enum { STEPS = 60 };

/* ---- the client's steps ---- */

/* The request as the worker sees it, after a submit that succeeded. By the queue pair unless `mailbox`. */
static void receive(model *m, uint32_t i, bool mailbox, const uint8_t *in) {
    m_slot *s = &m->slots[i];
    raw *w = &m->worker;
    dp_request q = {0};
    const uint8_t *payload = end_bytes(&w->e) + dp_slot_payload(&w->l, i);
    if (mailbox) {
        dp_mailbox *b = raw_mailbox(w, true);
        uint64_t word = __atomic_load_n(&b->request, __ATOMIC_ACQUIRE);
        q = (dp_request){.generation = dp_mailbox_generation(b->sizes), .call_id = dp_mailbox_call_id(word),
                         .size = dp_mailbox_size(word), .capacity = dp_mailbox_capacity(b->sizes),
                         .function = (uint16_t)dp_mailbox_function(word), .flags = DP_REQ_EXCLUSIVE};
        CHECK_EQ(dp_mailbox_slot(b->sizes), i);
        CHECK_EQ(dp_mailbox_large(word), m->ch->mailbox_large && dp_mailbox_wants_large(s->size, s->capacity));
        payload = q.size <= DP_MAILBOX_PAYLOAD ? (const uint8_t *)b->payload : dp_mailbox_payload(b, q.size, dp_mailbox_large(word), end_bytes(&w->e) + dp_slot_payload(&w->l, i));
        m->words[0] = word;
    } else {
        bool bare;
        CHECK_EQ(raw_take(w, &q, &bare), i);
        m_told *t = &m->told[i], now = {!s->in_units && !s->out_units, s->capacity, s->function, q.call_id,
                                        q.flags & DP_REQ_EXCLUSIVE};
        CHECK_EQ(bare, t->any && now.any && t->capacity == now.capacity && t->function == now.function &&
                           t->exclusive == now.exclusive && now.id - t->id < 65536);
        *t = now;
    }
    if (q.flags & DP_REQ_BULK_IN)
        payload = end_bytes(&w->e) + dp_bulk_at(&w->l, q.in_offset);
    CHECK_EQ(q.generation, m->ch->generation);
    CHECK_EQ(q.size, s->size);
    CHECK_EQ(q.capacity, s->capacity);
    CHECK_EQ(q.function, s->function);
    CHECK_SAME(payload, in, q.size);
    CHECK_EQ(!!(q.flags & DP_REQ_BULK_IN), s->in_units != 0);
    CHECK_EQ(!!(q.flags & DP_REQ_BULK_OUT), s->out_units != 0);
    if (s->in_units)
        CHECK_EQ(q.in_offset, s->in_at);
    if (s->out_units)
        CHECK_EQ(q.out_offset, s->out_at);
    CHECK_EQ(!!(q.flags & DP_REQ_EXCLUSIVE), m_count(m, SLOT_FREE) + 1 == m->depth);
    if (m->any_call)
        CHECK_EQ(q.call_id, m->last_id + 1);
    m->any_call = true;
    m->last_id = s->id = q.call_id;
}

static void submit(model *m) {
    static const uint32_t sizes[] = {0, 8, 16, 17, 200, 256, 257, 400, 512, 513, 1000, 2048, 4096, 4097};
    static const uint32_t capacities[] = {0, 8, 24, 25, 100, 256, 300, 512, 513, 2000, 4096, 5000};
    m_slot s = {.state = SLOT_BUSY, .size = sizes[pick(m, pick(m, 2) ? 14 : 9)],
                .capacity = capacities[pick(m, pick(m, 2) ? 12 : 8)], .function = pick(m, 3)};
    uint8_t in[4097];
    fill_pattern(in, s.size, m->step);
    STEP(m, "submit %u bytes, capacity %u, function %u", s.size, s.capacity, s.function);
    bool mailbox;
    int want = m_submit(m, &s, &mailbox);
    uint32_t i = 99;
    int st = dp_channel_submit(m->ch, s.function, in, s.size, NULL, s.capacity, &i);
    CHECK_STATUS(st, want);
    if (st != DP_OK)
        return;
    CHECK_LT(i, m->depth);
    CHECK_EQ(m->slots[i].state, SLOT_FREE);
    s.mailbox = mailbox;
    m->slots[i] = s;
    m->stats.calls++;
    m->stats.bytes_in += s.size;
    m->mailbox_slot = mailbox ? (int)i : m->mailbox_slot;
    receive(m, i, mailbox, in);
}

/* A slot in that state; sometimes, or if there is none, any slot. */
static uint32_t some_slot(model *m, slot_state a, slot_state b) {
    uint32_t start = pick(m, m->depth);
    if (pick(m, 8))
        for (uint32_t k = 0; k < m->depth; k++) {
            uint32_t i = (start + k) % m->depth;
            if (m->slots[i].state == a || m->slots[i].state == b)
                return i;
        }
    return pick(m, 16) ? start : m->depth + pick(m, 3);
}

static int64_t past(void) { return dp_now_ns() - 1; }

static void test(model *m) {
    uint32_t i = some_slot(m, SLOT_BUSY, SLOT_DONE);
    STEP(m, "test slot %u", i);
    bool in_range = i < m->depth;
    if (in_range && m->slots[i].state == SLOT_BUSY) {
        m_progress(m);
        m_reap(m);
    }
    slot_state s = in_range ? m->slots[i].state : SLOT_FREE;
    CHECK_EQ(dp_channel_test(m->ch, i), s == SLOT_DONE ? 1 : s == SLOT_BUSY ? 0 : (int)DP_INVALID);
}

static void wait_for(model *m) {
    uint32_t i = some_slot(m, SLOT_BUSY, SLOT_DONE);
    STEP(m, "wait for slot %u, deadline passed", i);
    int want = DP_INVALID;
    if (i < m->depth) {
        const m_slot *s = &m->slots[i];
        m_mailbox(m);
        if (s->state == SLOT_BUSY)
            m_progress(m);
        if (s->state == SLOT_BUSY)
            m_reap(m);
        want = s->state == SLOT_DONE ? DP_OK : s->state == SLOT_BUSY ? DP_DEADLINE : DP_INVALID;
    }
    CHECK_STATUS(dp_channel_wait(m->ch, i, past()), want);
}

static void wait_any(model *m) {
    STEP(m, "wait for any, deadline passed");
    if (m->ended == m->seen)
        m_progress(m);
    if (m->ended == m->seen)
        m_reap(m);
    CHECK_STATUS(dp_endpoint_wait_any(m->ep, past()), m->ended == m->seen ? DP_DEADLINE : DP_OK);
    m->seen = m->ended;
}

/* What a DONE call gives. */
static void check_result(const m_slot *s, int st, const uint8_t *res, uint32_t size, dp_started started) {
    CHECK_STATUS(st, s->status);
    CHECK_EQ(size, s->result);
    CHECK_EQ(started, s->started);
    if (st == DP_OK && s->fill != ANY_BYTES)
        CHECK_BYTES(res, s->fill, size);
}

static void finish(model *m) {
    uint32_t i = some_slot(m, SLOT_DONE, SLOT_DONE), size = 12345, len;
    STEP(m, "finish slot %u", i);
    uint8_t out[BULK + 64];
    dp_started started;
    memset(out, 0xA5, sizeof out);
    bool look_first = pick(m, 3) == 0;
    const void *res;
    if (look_first) {
        int st = dp_channel_result(m->ch, i, &res, &size, &started);
        if (i < m->depth && m->slots[i].state == SLOT_DONE)
            check_result(&m->slots[i], st, res, size, started);
        else
            CHECK_STATUS(st, DP_INVALID);
    }
    int st = dp_channel_finish(m->ch, i, out, &size, &started);
    if (i >= m->depth || m->slots[i].state != SLOT_DONE) {
        CHECK_STATUS(st, DP_INVALID);
        CHECK_BYTES(out, 0xA5, sizeof out);
        return;
    }
    m_slot *s = &m->slots[i];
    check_result(s, st, out, size, started);
    uint32_t written = st == DP_OK ? size : 0;
    CHECK_BYTES(out + written, 0xA5, sizeof out - written);
    if (st == DP_FUNCTION_FAILED) {
        const char *text = dp_channel_message(m->ch, &len);
        CHECK_EQ(len, size);
        if (s->fill != ANY_BYTES)
            CHECK_BYTES(text, s->fill, len);
    }
    m_free(m, s);
}

static void abandon(model *m) {
    uint32_t i = some_slot(m, SLOT_BUSY, pick(m, 4) ? SLOT_BUSY : SLOT_DONE);
    STEP(m, "abandon slot %u", i);
    dp_channel_abandon(m->ch, i);
    if (i >= m->depth)
        return;
    m_slot *s = &m->slots[i];
    if (s->state == SLOT_BUSY) {
        s->state = SLOT_ABANDONED;
        m->stats.abandoned++;
    } else if (s->state == SLOT_DONE) {
        m_free(m, s);
    }
}

static void fail(model *m) {
    static const int statuses[] = {DP_CONNECTION, DP_PEER_GONE, DP_WORKER_DIED, DP_LEASE_ENDED};
    int status = statuses[pick(m, 4)];
    STEP(m, "fail with %s", dp_status_text(status));
    dp_channel_fail(m->ch, status);
    if (!m->broken)
        m->broken = status;
}

/* ---- lives ---- */

static void m_connect(model *m) {
    STEP(m, "connect");
    raw *w = &m->worker;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    end_reset(&w->e);
    memset(w->told, 0, sizeof w->told);
    memset(m->words, 0, sizeof m->words);
    CHECK_OK_ERR(dp_channel_offer(m->ch, blob, &len, &err), err);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_CLIENT, w->e.dev->provider, &w->peer, &err), err);
    w->l = w->peer.layout;
    CHECK_EQ(w->l.depth, m->depth);
    memset(end_bytes(&w->e), 0, dp_layout_large(&w->l)); /* like that of a new worker */
    w->generation = w->peer.generation;
    CHECK_OK_ERR(dp_qp_connect(w->e.qp, w->peer.qp_blob, w->peer.qp_len, &err), err);
    len = sizeof blob;
    CHECK_OK_ERR(dp_side_encode(w->e.qp, &w->l, DP_ROLE_WORKER, w->generation, w->e.mem, blob, &len, &err), err);
    CHECK_OK_ERR(dp_channel_connect(m->ch, blob, len, &err), err);
    if (pick(m, 2))
        dp_channel_find_mailbox(m->ch, false); /* as with a worker of an earlier version */
    m->connected = true;
    m->lost = 0;
    m->any_call = false;
    memset(m->told, 0, sizeof m->told);
    /* Ids and their tags sometimes wrap. */
    static const uint32_t near[] = {0xfffffff0, 0x0000fff0, 0x7ffffff0};
    m->ch->next_call = pick(m, 2) ? near[pick(m, 3)] + pick(m, 16) : pick(m, UINT32_MAX);
}

static void m_reset(model *m) {
    STEP(m, "reset");
    dp_error err;
    uint32_t busy = m_count(m, SLOT_BUSY), done = m_count(m, SLOT_DONE), generation = m->ch->generation;
    int st = dp_channel_reset(m->ch, &err);
    if (done || (busy && !m->failed)) {
        CHECK_STATUS(st, DP_BUSY);
        return;
    }
    CHECK_OK_ERR(st, err);
    if (!m->failed)
        m->ended += m_count(m, SLOT_ABANDONED);
    for (uint32_t i = 0; i < m->depth; i++)
        m_free(m, &m->slots[i]);
    CHECK_EQ(m->in_used | m->out_used, 0);
    m->n_pending = 0;
    m->mailbox_slot = -1;
    m->failed = m->broken = 0;
    m->connected = false;
    CHECK_NE(m->ch->generation, generation);
    m_compare(m);
    if (pick(m, 8) == 0) { /* a call before there is a worker */
        submit(m);
        m_compare(m);
        if (pick(m, 2))
            wait_any(m);
        finish(m);
        m_compare(m);
    }
    if (m->failed || m->broken) {
        m_reset(m);
        return;
    }
    m_connect(m);
}

/* The first poll may only report calls that had ended before. After the second, everything that has arrived was polled. */
static void look_twice(model *m) {
    wait_any(m);
    m_compare(m);
    wait_any(m);
    m_compare(m);
}

/* Ends all calls like a good worker and a good caller. */
static void settle_all(model *m) {
    for (uint32_t i = 0; i < m->depth; i++) {
        m_slot *s = &m->slots[i];
        if (m->n_pending == m->depth || w_unseen(m, i))
            look_twice(m);
        if ((s->state != SLOT_BUSY && s->state != SLOT_ABANDONED) || s->answered || !w_can_reply(m))
            continue;
        STEP(m, "last reply, to slot %u", i);
        s->answered = true;
        w_put(m, (m_reply){.slot = i, .tag = s->id & 0xffff, .bare = true, .fill = 9, .at = i});
    }
    look_twice(m);
    for (uint32_t i = 0; i < m->depth; i++)
        if (m->slots[i].state == SLOT_DONE) {
            CHECK_STATUS(dp_channel_finish(m->ch, i, NULL, NULL, NULL), m->slots[i].status);
            m_free(m, &m->slots[i]);
        }
    m_compare(m);
    if (!m->failed)
        CHECK_EQ(dp_channel_free_slots(m->ch), m->depth);
}

/* Skips ids, as if calls had been made in other slots. */
static void skip_ids(model *m) {
    static const uint32_t far[] = {1, 1000, 65533, 65534, 65535, 65536, 1u << 31};
    uint32_t n = far[pick(m, 7)];
    STEP(m, "%u call ids later", n);
    m->ch->next_call += n;
    m->last_id += n;
}

static void one_step(model *m) {
    uint32_t what = pick(m, 100);
    if (m->failed && what >= 60 && pick(m, 2)) {
        m_reset(m);
        return;
    }
    if (what < 26)
        submit(m);
    else if (what < 46)
        w_reply(m);
    else if (what < 54)
        test(m);
    else if (what < 62)
        wait_for(m);
    else if (what < 65)
        wait_any(m);
    else if (what < 77)
        finish(m);
    else if (what < 84)
        abandon(m);
    else if (what < 90)
        w_stray(m);
    else if (what < 94)
        w_repeat(m);
    else if (what < 97)
        w_odd_mailbox(m);
    else if (what < 98)
        pick(m, 2) ? fail(m) : skip_ids(m);
    else
        m_reset(m);
}

static void one_run(model *m, uint64_t seed) {
    static const uint32_t depths[] = {1, 2, 3, 8};
    dp_error err;
    m->random = m->seed = seed;
    m->step = 0;
    m->depth = depths[pick(m, 4)];
    memset(m->slots, 0, sizeof m->slots);
    memset(&m->stats, 0, sizeof m->stats);
    m->slot_word = 0;
    m->in_used = m->out_used = 0;
    m->mailbox_slot = -1;
    m->n_pending = 0;
    m->failed = m->broken = 0;
    m->ended = m->seen = m->ep->lanes[0]->ended;
    m->ep->lanes[0]->seen = m->ep->lanes[0]->ended;
    STEP(m, "create, depth %u", m->depth);
    CHECK_OK_ERR(dp_channel_create(m->ep, &(dp_channel_config){m->depth, EAGER, BULK}, &m->ch, &err), err);
    dp_cq *cq = m->ch->lane->cq;
    end_attend(cq);
    m_connect(m);
    for (m->step = 1; m->step <= STEPS; m->step++) {
        one_step(m);
        m_compare(m);
    }
    if (pick(m, 4)) {
        settle_all(m);
        if (!m->failed && !m->broken) { /* no bulk range is lost */
            uint8_t all[BULK] = {0};
            uint32_t i;
            CHECK_OK(dp_channel_submit(m->ch, 0, all, BULK, NULL, BULK, &i));
        }
    }
    end_unattend(cq);
    dp_channel_destroy(m->ch); /* in any state */
}

T_CASE(slot_model, "channel/slot-model", .seconds = 60, .verbs_seconds = 60) {
    static const end_opts opts = {.size = 64 << 10, .max_send = 32, .max_recv = 16};
    model *m = calloc(1, sizeof *m);
    CHECK(m);
    dp_error err;
    const char *only = getenv("RFAAS_MODEL_SEED");
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &m->dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(m->dev, 1, DEPTH_MAX, DP_WAIT_ADAPTIVE, &m->ep, &err), err);
    end_open(&m->worker.e, &opts, NULL);
    m->worker.client_polls = true;
    dp_layout_set(&m->worker.l, DEPTH_MAX, EAGER, BULK);
    CHECK_LE(dp_layout_large(&m->worker.l), m->worker.e.mem->size);
    m->trace = only != NULL;
    uint64_t base = only ? strtoull(only, NULL, 0) : t_random() >> 1;
    long runs = only ? 1 : t_pick(5000, 200), done = 0;
    for (int64_t until = dp_now_ns() + 10000000000; done < runs && (done == 0 || dp_now_ns() < until); done++)
        one_run(m, base + (uint64_t)done);
    printf("    %ld runs of %d steps, from RFAAS_MODEL_SEED=%llu\n", done, STEPS, (unsigned long long)base);
    end_close(&m->worker.e);
    dp_endpoint_destroy(m->ep);
    dp_dev_close(m->dev);
    free(m);
}
