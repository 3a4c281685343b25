/* Calls in flight: replies, waiting, the end. dp_submit.c starts calls. */
#include <string.h>

#include "dp_channel_impl.h"

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* for the path of every call */

#define POLL_BATCH 16
#define DUE_STEP_NS 1000000 /* step of waits while a message of a call in parts finds no room */
#define LOOK_EVERY 16 /* successful polls after which a waiter checks its deadline */

/* ---- slots ---- */

static void give_bulk(dp_channel *ch, slot *s) {
    if (s->in_at != DP_NOTHING)
        dp_bulk_give(&ch->bulk_in, s->in_at);
    if (s->out_at != DP_NOTHING)
        dp_bulk_give(&ch->bulk_out, s->out_at);
    s->in_at = s->out_at = DP_NOTHING;
}

/* Takes the bulk ranges that the call's sizes need. */
int dp_slot_take_bulk(dp_channel *ch, slot *s, uint32_t size, uint32_t capacity) {
    if (size > ch->cfg.eager &&
        dp_bulk_take(&ch->bulk_in, (uint32_t)(((uint64_t)size + 63) / DP_BULK_UNIT), &s->in_at)) {
        s->in_at = DP_NOTHING;
        return DP_BUSY;
    }
    if (capacity > ch->cfg.eager &&
        dp_bulk_take(&ch->bulk_out, (uint32_t)(((uint64_t)capacity + 63) / DP_BULK_UNIT), &s->out_at)) {
        s->out_at = DP_NOTHING;
        give_bulk(ch, s);
        return DP_BUSY;
    }
    return DP_OK;
}

static __attribute__((noinline)) void give_memory(dp_channel *ch, slot *s) {
    if (s->parts)
        dp_parts_free(ch, s);
    give_bulk(ch, s);
}

static ALWAYS_INLINE void free_slot(dp_channel *ch, uint32_t i) {
    slot *s = &ch->slots[i];
    if (__builtin_expect(s->parts || s->in_at != DP_NOTHING || s->out_at != DP_NOTHING, 0))
        give_memory(ch, s);
    s->state = SLOT_FREE;
    ch->free[ch->n_free++] = i;
}

void dp_slot_free(dp_channel *ch, uint32_t i) { free_slot(ch, i); }

/* Ends every call of a channel whose connection has ended. Abandoned calls stay fenced until the reset, because the old worker may still
 * write to their slots. */
void dp_channel_end_calls(dp_channel *ch, int status) {
    if (!dp_channel_serves(ch))
        return;
    ch->failed = status;
    ch->reserved = false;
    ch->mailbox_slot = DP_NOTHING;
    for (uint32_t i = 0; i < ch->cfg.depth; i++) {
        slot *s = &ch->slots[i];
        if (s->state == SLOT_BUSY) {
            s->state = SLOT_DONE;
            s->status = status;
            s->size = 0;
            s->started = (s->parts ? !dp_parts_started(s) : dp_qp_kept(ch->qp, i)) ? DP_NOT_STARTED : DP_MAYBE_EXECUTED;
            if (s->parts)
                dp_parts_end(ch, s);
            ch->n_busy--;
            ch->n_done++;
            ch->lane->ended++;
        } else if (s->state == SLOT_ABANDONED) {
            s->state = SLOT_FENCED;
            ch->n_abandoned--;
            ch->n_overdue -= s->overdue_since != 0;
            s->overdue_since = 0;
            ch->lane->ended++;
        }
    }
}

/* ---- replies ---- */

/* Ends a call that has its reply and was not abandoned. */
static ALWAYS_INLINE void settle_in_time(dp_channel *ch, uint32_t i) {
    slot *s = &ch->slots[i];
    if (i == ch->mailbox_slot)
        ch->mailbox_slot = DP_NOTHING;
    s->state = SLOT_DONE;
    s->started = DP_MAYBE_EXECUTED;
    ch->n_busy--;
    ch->n_done++;
    ch->lane->ended++;
    ch->stats.replies++;
}

/* Ends a call that has its reply: BUSY becomes DONE, ABANDONED becomes FREE. Returns true if the call was not abandoned. */
static inline bool settle(dp_channel *ch, uint32_t i) {
    slot *s = &ch->slots[i];
    if (__builtin_expect(s->state == SLOT_ABANDONED, 0)) {
        if (i == ch->mailbox_slot)
            ch->mailbox_slot = DP_NOTHING;
        ch->n_abandoned--;
        ch->n_overdue -= s->overdue_since != 0;
        s->overdue_since = 0;
        ch->lane->ended++; /* a thread may wait for the slot */
        ch->stats.late_replies++;
        dp_slot_free(ch, i);
        return false;
    }
    settle_in_time(ch, i);
    return true;
}

/* Takes a status other than OK from the worker. A status that workers may not send becomes DP_PROTOCOL. */
static void refused(dp_channel *ch, slot *s, int status, uint32_t size) {
    s->status = status;
    s->size = 0;
    switch (status) {
    case DP_UNSUPPORTED: /* of a call in place: the worker could not map the memory */
        ch->share_again = true;
        __attribute__((fallthrough));
    case DP_BAD_REQUEST:
    case DP_NO_FUNCTION:
    case DP_TOO_LARGE:
        s->started = DP_NOT_STARTED;
        break;
    case DP_FUNCTION_FAILED:
    case DP_RESULT_TOO_LARGE:
        s->size = size; /* size of the message, or of the result that needs more room */
        break;
    default:
        s->status = DP_PROTOCOL;
    }
}

/* Polls the mailbox. The worker writes its words, so they are checked. */
static inline bool take_mailbox(dp_channel *ch) {
    if (ch->mailbox_slot == DP_NOTHING)
        return false;
    slot *s = &ch->slots[ch->mailbox_slot];
    /* Acquire pairs with the release in the worker's post_mailbox(). */
    uint32_t i = ch->mailbox_slot;
    uint64_t word = __atomic_load_n(dp_mailbox_word(ch, s->capacity), __ATOMIC_ACQUIRE);
    if (dp_mailbox_call_id(word) != s->call_id)
        return false;
    if (!settle(ch, i))
        return true;
    uint32_t size = dp_mailbox_result_size(word);
    int status = dp_mailbox_status(word);
    if (__builtin_expect(status != DP_OK, 0)) {
        refused(ch, s, status, status == DP_RESULT_TOO_LARGE ? size : 0);
    } else if (__builtin_expect(!dp_mailbox_allows(ch, s->capacity, size), 0)) {
        refused(ch, s, DP_PROTOCOL, 0);
    } else {
        s->status = DP_OK;
        s->size = size;
        s->result = dp_mailbox_result(ch, s->capacity, i);
        ch->stats.bytes_out += size;
    }
    return true;
}

/* Reads the reply, with a header or bare, for the slot that its immediate names. Returns false if it answers no call in flight. A bare
 * reply has only the tag. That is enough, because a slot has one call at a time, and no new one before the reply of the last. */
static inline bool read_reply(const dp_channel *ch, const slot *s, const uint8_t *payload, const dp_wc *wc,
                              dp_reply *h) {
    if (s->state != SLOT_BUSY && s->state != SLOT_ABANDONED)
        return false;
    if (__builtin_expect(dp_imm_bare(wc->imm), 1)) {
        *h = (dp_reply){.status = DP_OK, .size = wc->byte_len};
        return dp_imm_tag(wc->imm) == (s->call_id & 0xffff);
    }
    *h = dp_reply_load(payload - DP_REPLY_SIZE);
    return h->generation == ch->generation && h->call_id == s->call_id && dp_imm_tag(wc->imm) == (h->call_id & 0xffff);
}

/* Reports whether a reply is of the most frequent kind: a result in the slot of a call that waits for it, without a header. */
static ALWAYS_INLINE bool answers(const slot *s, const dp_wc *wc) {
    return dp_imm_bare(wc->imm) && s->state == SLOT_BUSY && dp_imm_tag(wc->imm) == (s->call_id & 0xffff) && wc->byte_len <= s->capacity &&
           s->out_at == DP_NOTHING && !s->parts;
}

/* A reply to a call in parts. Returns whether that is all. */
static __attribute__((noinline, cold)) bool on_part(dp_channel *ch, uint32_t i, const dp_wc *wc, dp_reply *h) {
    slot *s = &ch->slots[i];
    dp_part_reply what = dp_parts_reply(ch, s, h, dp_imm_bare(wc->imm), wc->byte_len);
    if (what == DP_PARTS_STRAY)
        ch->stats.strays++;
    if (what == DP_PARTS_GO_ON || what == DP_PARTS_STRAY)
        return true;
    if (what == DP_PARTS_LAST)
        return false;
    settle(ch, i);
    s->status = what == DP_PARTS_ENDED ? DP_OK : what == DP_PARTS_WRONG ? DP_PROTOCOL : DP_FATAL;
    if (s->status)
        s->size = 0;
    ch->stats.bytes_out += s->size;
    return true;
}

/* The worker writes immediates and headers, so every field is checked. */
static void on_reply(dp_channel *ch, const dp_wc *wc) {
    uint32_t i = dp_imm_slot(wc->imm);
    /* Post the receive again before the slot can become free, so that there is a credit for every slot. */
    if (!ch->qp->reposts && dp_post_recv(ch->qp, 0)) {
        dp_channel_end_calls(ch, DP_CONNECTION);
        return;
    }
    if (i >= ch->cfg.depth) {
        ch->stats.strays++;
        return;
    }
    slot *s = &ch->slots[i];
    uint8_t *payload = (uint8_t *)ch->results->addr + dp_slot_payload(&ch->layout, i);
    if (__builtin_expect(answers(s, wc), 1)) {
        settle_in_time(ch, i);
        s->status = DP_OK;
        s->size = wc->byte_len;
        s->result = payload;
        ch->stats.bytes_out += wc->byte_len;
        return;
    }
    dp_reply h;
    if (!read_reply(ch, s, payload, wc, &h)) {
        ch->stats.strays++; /* repeated, forged or of an earlier generation */
        return;
    }
    if (__builtin_expect(s->parts != NULL, 0) && s->state == SLOT_BUSY && on_part(ch, i, wc, &h))
        return;
    if (!settle(ch, i))
        return;
    s->result = payload;
    if (h.status == DP_OK) {
        bool in_bulk = s->out_at != DP_NOTHING;
        if (h.size > s->capacity ||
            (!dp_imm_bare(wc->imm) && wc->byte_len != DP_REPLY_SIZE + (in_bulk ? 0 : h.size))) {
            refused(ch, s, DP_PROTOCOL, 0);
            return;
        }
        if (in_bulk)
            s->result = s->out_at == DP_PLACED ? s->place : (uint8_t *)ch->results->addr + dp_bulk_at(&ch->layout, s->out_at);
        s->status = DP_OK;
        s->size = h.size;
        ch->stats.bytes_out += h.size;
        return;
    }
    bool has_message = h.size <= ch->cfg.eager && wc->byte_len == DP_REPLY_SIZE + h.size;
    refused(ch, s, h.status, h.status == DP_FUNCTION_FAILED && !has_message ? 0 : h.size);
}

/* Posts the next messages of calls in parts. */
static inline void post_due(dp_lane *lane) {
    for (dp_channel *ch = lane->channels; ch; ch = ch->next)
        if (__builtin_expect(ch->n_due, 0) && !lane->posting)
            dp_parts_post(ch);
}

/* Handles completions. Returns true if there were any. */
bool dp_lane_progress(dp_lane *lane) {
    bool mailbox = false;
    for (dp_channel *ch = lane->channels; ch; ch = ch->next)
        mailbox |= take_mailbox(ch);
    dp_wc wc[POLL_BATCH];
    int n = dp_cq_poll(lane->cq, wc, POLL_BATCH);
    if (n == 0) {
        post_due(lane);
        return mailbox;
    }
    for (int k = 0; k < n; k++) {
        dp_channel *ch = wc[k].qp->user;
        if (wc[k].status == DP_OK) {
            if (wc[k].op == DP_OP_RECV_IMM && dp_channel_serves(ch))
                on_reply(ch, &wc[k]);
        } else {
            int why = dp_qp_broken(ch->qp);
            dp_channel_end_calls(ch, why ? why : wc[k].status == DP_PEER_GONE ? DP_PEER_GONE : DP_CONNECTION);
        }
    }
    if (n < 0)
        for (dp_channel *ch = lane->channels; ch; ch = ch->next)
            dp_channel_end_calls(ch, DP_FATAL);
    post_due(lane);
    return true;
}

/* Ends the calls of channels that another thread or the provider declared broken. Handles replies that arrived before, because a worker
 * that ends regularly answers first. */
bool dp_lane_reap(dp_lane *lane) {
    bool any = false;
    for (dp_channel *ch = lane->channels; ch; ch = ch->next) {
        int why = dp_qp_broken(ch->qp);
        if (why && dp_channel_serves(ch)) {
            dp_lane_progress(lane);
            dp_channel_end_calls(ch, why);
            any = true;
        }
    }
    return any;
}

/* ---- waiting ---- */

/* Makes progress for a caller that polls and does not wait here. */
void dp_lane_look(dp_lane *lane) {
    if (!dp_lane_progress(lane) && ++lane->looks % DP_LOOKS_PER_PROBE == 0)
        dp_lane_probe(lane, dp_now_ns());
    dp_lane_reap(lane);
}

void dp_channel_look(dp_channel *ch) { dp_lane_look(ch->lane); }

/* How a waiting thread is asked to yield. The waiting thread sets `blocked` before it reads `asked`; an asking thread sets `asked` before
 * it reads `blocked`. So either the request is seen, or the asking thread wakes the waiting one. */
static bool asked(const dp_lane *lane) { return __atomic_load_n(&lane->asked, __ATOMIC_RELAXED); }

static void ask(dp_lane *lane) {
    __atomic_store_n(&lane->asked, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&lane->blocked, __ATOMIC_SEQ_CST))
        dp_cq_wake(lane->cq);
}

void dp_channel_ask(dp_channel *ch) { ask(ch->lane); }

void dp_endpoint_ask(dp_endpoint *ep) {
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        ask(ep->lanes[i]);
}

/* Accepts a request to yield, if there is one. */
static inline bool yields_now(dp_lane *lane) {
    return __builtin_expect(asked(lane), 0) && __atomic_exchange_n(&lane->asked, 0, __ATOMIC_ACQUIRE);
}

/* Blocks until something may have arrived, the deadline has passed, or another thread asks this one to yield. */
static void block(dp_lane *lane, int64_t deadline_ns, bool yields) {
    if (dp_cq_arm(lane->cq))
        return;
    if (dp_lane_progress(lane) || dp_lane_reap(lane)) {
        dp_cq_disarm(lane->cq);
        return;
    }
    int64_t timeout = dp_waiter_timeout(&lane->waiter, deadline_ns);
    for (const dp_channel *ch = lane->channels; ch; ch = ch->next)
        if (ch->n_due && timeout > DUE_STEP_NS) /* there was no room, and room alone may not end the wait */
            timeout = DUE_STEP_NS;
    if (lane->ep->idle_fn && timeout > DP_BLOCK_ATTENDED_NS) /* idle_fn must run while this thread blocks */
        timeout = DP_BLOCK_ATTENDED_NS;
    if (yields)
        __atomic_store_n(&lane->blocked, 1, __ATOMIC_SEQ_CST);
    if (yields && __atomic_load_n(&lane->asked, __ATOMIC_SEQ_CST)) {
        dp_cq_disarm(lane->cq);
    } else {
        lane->waiter.blocked++;
        dp_cq_wait(lane->cq, timeout);
    }
    if (yields)
        __atomic_store_n(&lane->blocked, 0, __ATOMIC_RELAXED);
}

/* One step of waiting after a poll found nothing. Returns DP_DEADLINE after the deadline. */
static int idle(dp_lane *lane, int64_t deadline_ns, bool yields) {
    dp_waiter *w = &lane->waiter;
    int what = dp_waiter_spin(w);
    if (what == DP_SPIN_ON)
        return DP_OK;
    if (lane->ep->idle_fn)
        lane->ep->idle_fn(lane->ep->idle_arg, w->now, false);
    if (dp_lane_reap(lane))
        return DP_OK;
    if (deadline_ns && w->now >= deadline_ns)
        return DP_DEADLINE;
    if (yields && yields_now(lane))
        return DP_YIELD;
    dp_lane_probe(lane, w->now);
    if (what == DP_SPIN_BLOCK)
        block(lane, deadline_ns, yields);
    return DP_OK;
}

/* Called after a poll that found something, so that a worker that sends without end delays neither the caller's deadline nor the end of
 * another channel. Returns true if the deadline has passed. */
static inline bool flooded(dp_lane *lane, uint32_t *found, int64_t deadline_ns) {
    if (++*found % LOOK_EVERY)
        return false;
    dp_lane_reap(lane);
    return deadline_ns && dp_now_ns() >= deadline_ns;
}

/* The first spins of a wait for a reply that has a cache line of its own. They read only the word that will change, and the queue, once
 * per pause, because every further instruction delays the reply. If request and reply share a line, the general wait is better, because
 * a read that comes too early takes the line from the worker. Returns false if the general wait must follow. */
static inline bool spin_for_mailbox(dp_channel *ch, const slot *s) {
    const dp_cq *cq = ch->lane->cq;
    const dp_waiter *w = &ch->lane->waiter;
    if (s->capacity <= DP_MAILBOX_RESULT || w->mode == DP_WAIT_WARM || w->shared_until || !cq->peek)
        return false;
    const uint64_t *reply = dp_mailbox_word(ch, s->capacity);
    for (uint32_t spins = 0; spins < DP_SPINS_PER_LOOK; spins++) {
        if (dp_mailbox_call_id(__atomic_load_n(reply, __ATOMIC_RELAXED)) == s->call_id)
            return take_mailbox(ch) && s->state == SLOT_DONE;
        if ((uint32_t)__atomic_load_n(cq->peek, __ATOMIC_RELAXED) == cq->peek_value)
            return false;
        dp_cpu_pause();
    }
    return false;
}

int dp_lane_wait(dp_channel *ch, uint32_t i, int64_t deadline_ns, bool yields, bool others) {
    if (i >= ch->cfg.depth)
        return DP_INVALID;
    slot *s = &ch->slots[i];
    dp_lane *lane = ch->lane;
    uint64_t ended = lane->ended;
    dp_begin_wait(lane);
    if (i == ch->mailbox_slot && spin_for_mailbox(ch, s))
        return DP_OK;
    for (uint32_t found = 0;;) {
        if (take_mailbox(ch) && s->state == SLOT_DONE) {
            dp_waiter_end(&lane->waiter);
            return DP_OK;
        }
        if (s->state != SLOT_BUSY) {
            dp_waiter_end(&lane->waiter);
            return s->state == SLOT_DONE ? DP_OK : DP_INVALID;
        }
        if (dp_lane_progress(lane)) {
            if (flooded(lane, &found, deadline_ns) && s->state == SLOT_BUSY)
                return DP_DEADLINE;
            if (__builtin_expect(others, 0) && lane->ended != ended && s->state == SLOT_BUSY)
                return DP_YIELD;
            continue;
        }
        int st = idle(lane, deadline_ns || !ch->n_overdue ? deadline_ns : dp_channel_give_up_at(ch), yields);
        if (st)
            return st;
    }
}

int dp_channel_wait(dp_channel *ch, uint32_t i, int64_t deadline_ns) {
    return dp_lane_wait(ch, i, deadline_ns, false, false);
}

int dp_channel_wait_turn(dp_channel *ch, uint32_t i, int64_t deadline_ns, bool others) {
    return dp_lane_wait(ch, i, deadline_ns, true, others);
}

int dp_channel_test(dp_channel *ch, uint32_t i) {
    if (i >= ch->cfg.depth)
        return DP_INVALID;
    slot *s = &ch->slots[i];
    if (s->state == SLOT_BUSY)
        dp_lane_look(ch->lane);
    return s->state == SLOT_DONE ? 1 : s->state == SLOT_BUSY ? 0 : DP_INVALID;
}

/* ---- waiting on all lanes ---- */

static bool any_ended(const dp_endpoint *ep) {
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        if (ep->lanes[i]->ended != ep->lanes[i]->seen)
            return true;
    return false;
}

static bool progress_all(dp_endpoint *ep) {
    bool any = false;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        any |= dp_lane_progress(ep->lanes[i]);
    return any;
}

static bool reap_all(dp_endpoint *ep) {
    bool any = false;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        any |= dp_lane_reap(ep->lanes[i]);
    return any;
}

static bool yield_all(dp_endpoint *ep) {
    bool any = false;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        any |= yields_now(ep->lanes[i]);
    return any;
}

static void say_blocked(dp_endpoint *ep, uint32_t blocked) {
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        __atomic_store_n(&ep->lanes[i]->blocked, blocked, __ATOMIC_SEQ_CST);
}

static bool any_asked(const dp_endpoint *ep) {
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        if (__atomic_load_n(&ep->lanes[i]->asked, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

/* block() on every lane. */
static void block_all(dp_endpoint *ep, int64_t deadline_ns, bool yields) {
    dp_cq *cqs[DP_LANES_MAX];
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        cqs[i] = ep->lanes[i]->cq;
    if (dp_cq_arm_many(cqs, ep->n_lanes))
        return;
    if (yields)
        say_blocked(ep, 1);
    if (!progress_all(ep) && !reap_all(ep) && !(yields && any_asked(ep))) {
        int64_t timeout = dp_waiter_timeout(&ep->lanes[0]->waiter, deadline_ns);
        if (ep->idle_fn && timeout > DP_BLOCK_ATTENDED_NS)
            timeout = DP_BLOCK_ATTENDED_NS;
        ep->lanes[0]->waiter.blocked++;
        dp_cq_wait_many(cqs, ep->n_lanes, timeout);
    } else {
        dp_cq_disarm_many(cqs, ep->n_lanes);
    }
    if (yields)
        say_blocked(ep, 0);
}

/* idle() for all lanes. The waiter of the first lane keeps the time. */
static int idle_all(dp_endpoint *ep, int64_t deadline_ns, bool yields) {
    dp_waiter *w = &ep->lanes[0]->waiter;
    int what = dp_waiter_spin(w);
    if (what == DP_SPIN_ON)
        return DP_OK;
    if (ep->idle_fn)
        ep->idle_fn(ep->idle_arg, w->now, false);
    if (reap_all(ep))
        return DP_OK;
    if (deadline_ns && w->now >= deadline_ns)
        return DP_DEADLINE;
    if (yields && yield_all(ep))
        return DP_YIELD;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        dp_lane_probe(ep->lanes[i], w->now);
    if (what == DP_SPIN_BLOCK)
        block_all(ep, deadline_ns, yields);
    return DP_OK;
}

static int wait_all_lanes(dp_endpoint *ep, int64_t deadline_ns, bool yields) {
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        dp_begin_wait(ep->lanes[i]);
    for (uint32_t found = 0; !any_ended(ep);) {
        if (progress_all(ep)) {
            if (++found % LOOK_EVERY == 0) {
                reap_all(ep);
                if (deadline_ns && dp_now_ns() >= deadline_ns && !any_ended(ep))
                    return DP_DEADLINE;
            }
            continue;
        }
        int st = idle_all(ep, deadline_ns, yields);
        if (st)
            return st;
    }
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        ep->lanes[i]->seen = ep->lanes[i]->ended;
    dp_waiter_end(&ep->lanes[0]->waiter);
    return DP_OK;
}

static int wait_lane(dp_lane *lane, int64_t deadline_ns, bool yields) {
    dp_begin_wait(lane);
    for (uint32_t found = 0; lane->ended == lane->seen;) {
        if (dp_lane_progress(lane)) {
            if (flooded(lane, &found, deadline_ns) && lane->ended == lane->seen)
                return DP_DEADLINE;
            continue;
        }
        int st = idle(lane, deadline_ns, yields);
        if (st)
            return st;
    }
    lane->seen = lane->ended;
    dp_waiter_end(&lane->waiter);
    return DP_OK;
}

static int wait_any(dp_endpoint *ep, int64_t deadline_ns, bool yields) {
    return ep->n_lanes > 1 ? wait_all_lanes(ep, deadline_ns, yields) : wait_lane(ep->lanes[0], deadline_ns, yields);
}

int dp_endpoint_sleep_turn(dp_endpoint *ep, int64_t deadline_ns) {
    dp_waiter *w = &ep->lanes[0]->waiter;
    w->now = dp_now_ns();
    progress_all(ep);
    bool any = any_ended(ep);
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        ep->lanes[i]->seen = ep->lanes[i]->ended;
    if (any || reap_all(ep))
        return DP_OK;
    if (ep->idle_fn)
        ep->idle_fn(ep->idle_arg, w->now, false);
    if (deadline_ns && w->now >= deadline_ns)
        return DP_DEADLINE;
    if (yield_all(ep))
        return DP_YIELD;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        dp_lane_probe(ep->lanes[i], w->now);
    if (ep->n_lanes > 1)
        block_all(ep, deadline_ns, true);
    else
        block(ep->lanes[0], deadline_ns, true);
    return DP_OK;
}

int dp_endpoint_wait_any(dp_endpoint *ep, int64_t deadline_ns) { return wait_any(ep, deadline_ns, false); }

int dp_endpoint_wait_turn(dp_endpoint *ep, int64_t deadline_ns) { return wait_any(ep, deadline_ns, true); }

int dp_channel_wait_some(dp_channel *ch, int64_t deadline_ns) { return wait_lane(ch->lane, deadline_ns, true); }

/* ---- the end of a call ---- */

int dp_channel_result(dp_channel *ch, uint32_t i, const void **res, uint32_t *size, dp_started *started) {
    if (i >= ch->cfg.depth || ch->slots[i].state != SLOT_DONE)
        return DP_INVALID;
    const slot *s = &ch->slots[i];
    if (res)
        *res = s->result;
    if (size)
        *size = s->size;
    if (started)
        *started = s->started;
    return s->status;
}

int dp_channel_finish(dp_channel *ch, uint32_t i, void *out, uint32_t *size, dp_started *started) {
    if (i >= ch->cfg.depth || ch->slots[i].state != SLOT_DONE)
        return DP_INVALID;
    slot *s = &ch->slots[i];
    int st = s->status;
    if (size)
        *size = s->size;
    if (started)
        *started = s->started;
    if (__builtin_expect(st == DP_FUNCTION_FAILED, 0)) {
        ch->message_len = s->size < sizeof ch->message ? s->size : sizeof ch->message;
        if (ch->message_len)
            memcpy(ch->message, s->result, ch->message_len);
    }
    if (st == DP_OK && out && out != s->result) {
        if (s->size <= DP_MAILBOX_RESULT)
            dp_copy_small(out, s->result, s->size);
        else
            dp_copy_mailbox(out, s->result, s->size);
    }
    ch->n_done--;
    free_slot(ch, i);
    return st;
}

int dp_channel_finish_pieces(dp_channel *ch, uint32_t i, const dp_pieces *out, uint32_t *size, dp_started *started) {
    const void *result;
    uint32_t got;
    if (dp_channel_result(ch, i, &result, &got, NULL) == DP_OK)
        dp_scatter(out, result, got);
    return dp_channel_finish(ch, i, NULL, size, started);
}

const char *dp_channel_message(const dp_channel *ch, uint32_t *len) {
    *len = ch->message_len;
    return ch->message;
}
