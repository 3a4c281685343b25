/* Calls: slots, replies, waiting, submission. */
#include <string.h>

#include "dp_channel_impl.h"

#define POLL_BATCH 16
#define LOOK_EVERY 16               /* polls that found something, until a waiter looks at the clock all the same */
#define PART_PATIENCE_NS 2000000000 /* between two messages of one payload */

/* ---- slots ---- */

static void give_bulk(dp_channel *ch, slot *s) {
    if (s->in_at != DP_NOTHING)
        dp_bulk_give(&ch->bulk_in, s->in_at);
    if (s->out_at != DP_NOTHING)
        dp_bulk_give(&ch->bulk_out, s->out_at);
    s->in_at = s->out_at = DP_NOTHING;
}

static void slot_free(dp_channel *ch, uint32_t i) {
    slot *s = &ch->slots[i];
    if (s->in_at != DP_NOTHING || s->out_at != DP_NOTHING)
        give_bulk(ch, s);
    s->state = SLOT_FREE;
    ch->free[ch->n_free++] = i;
}

/* The end of the connection is the end of every call on it; abandoned ones stay fenced until the reset, since
 * the old worker may still write to them. */
void dp_channel_end_calls(dp_channel *ch, int status) {
    if (ch->failed)
        return;
    ch->failed = status;
    ch->mail_slot = DP_NOTHING;
    for (uint32_t i = 0; i < ch->cfg.depth; i++) {
        slot *s = &ch->slots[i];
        if (s->state == SLOT_BUSY) {
            s->state = SLOT_DONE;
            s->status = status;
            s->size = 0;
            s->started = DP_MAYBE_EXECUTED;
            ch->n_busy--;
            ch->n_done++;
            ch->ep->ended++;
        } else if (s->state == SLOT_ABANDONED) {
            s->state = SLOT_FENCED;
            ch->n_abandoned--;
        }
    }
}

/* ---- replies ---- */

/* A call of ours has its reply: BUSY becomes DONE, ABANDONED becomes FREE. True when somebody waits for it. */
static inline bool settle(dp_channel *ch, uint32_t i) {
    slot *s = &ch->slots[i];
    if (i == ch->mail_slot)
        ch->mail_slot = DP_NOTHING;
    if (__builtin_expect(s->state == SLOT_ABANDONED, 0)) {
        ch->n_abandoned--;
        ch->stats.late_replies++;
        slot_free(ch, i);
        return false;
    }
    s->state = SLOT_DONE;
    s->started = DP_MAYBE_EXECUTED;
    ch->n_busy--;
    ch->n_done++;
    ch->ep->ended++;
    ch->stats.replies++;
    return true;
}

/* A status other than OK as it came from the worker. Only those that a worker may use pass. */
static void refused(slot *s, int status, uint32_t size) {
    s->status = status;
    s->size = 0;
    switch (status) {
    case DP_BAD_REQUEST:
    case DP_NO_FUNCTION:
    case DP_TOO_LARGE:
        s->started = DP_NOT_STARTED;
        break;
    case DP_FUNCTION_FAILED:
    case DP_RESULT_TOO_LARGE:
        s->size = size; /* of the message; of the result that the caller should have room for */
        break;
    default:
        s->status = DP_PROTOCOL;
    }
}

/* Looks into the mailbox. Its words are the worker's and checked. */
static inline bool take_mail(dp_channel *ch) {
    if (ch->mail_slot == DP_NOTHING)
        return false;
    slot *s = &ch->slots[ch->mail_slot];
    /* Acquire pairs with the release in the worker's post_mail(). */
    bool in_line = s->capacity <= DP_MAIL_RESULT;
    uint64_t word = __atomic_load_n(in_line ? &ch->mail->reply : &ch->mail->long_reply, __ATOMIC_ACQUIRE);
    if (dp_mail_call_id(word) != s->call_id)
        return false;
    if (!settle(ch, ch->mail_slot))
        return true;
    uint32_t size = dp_mail_result_size(word);
    int status = dp_mail_status(word);
    if (__builtin_expect(status != DP_OK, 0)) {
        refused(s, status, status == DP_RESULT_TOO_LARGE ? size : 0);
    } else if (__builtin_expect(size > s->capacity || size > DP_MAIL_MAX, 0)) {
        refused(s, DP_PROTOCOL, 0);
    } else {
        s->status = DP_OK;
        s->size = size;
        s->result = in_line ? (uint8_t *)ch->mail->result : ch->mail->more_result;
        ch->stats.bytes_out += size;
    }
    return true;
}

/* What came, with header or bare, for the slot of its immediate; false: no reply to a call of ours. A bare reply says no
 * more than the tag, which is enough: a slot has one call at a time and none before that call's reply has come. */
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

/* Everything in an immediate and a header is the worker's word and checked. */
static void on_reply(dp_channel *ch, const dp_wc *wc) {
    uint32_t i = dp_imm_slot(wc->imm);
    /* The receive goes back before the slot can be free: credits never run short of slots. */
    if (dp_post_recv(ch->qp, NULL, 0)) {
        dp_channel_end_calls(ch, DP_CONNECTION);
        return;
    }
    if (i >= ch->cfg.depth) {
        ch->stats.strays++;
        return;
    }
    slot *s = &ch->slots[i];
    uint8_t *payload = (uint8_t *)ch->results->addr + dp_slot_payload(&ch->layout, i);
    dp_reply h;
    if (!read_reply(ch, s, payload, wc, &h)) {
        ch->stats.strays++; /* repeated, forged or of another life */
        return;
    }
    if (!settle(ch, i))
        return;
    s->result = payload;
    if (h.status == DP_OK) {
        bool in_bulk = s->out_at != DP_NOTHING;
        if (h.size > s->capacity ||
            (!dp_imm_bare(wc->imm) && wc->byte_len != DP_REPLY_SIZE + (in_bulk ? 0 : h.size))) {
            refused(s, DP_PROTOCOL, 0);
            return;
        }
        if (in_bulk)
            s->result = (uint8_t *)ch->results->addr + dp_bulk_at(&ch->layout, s->out_at);
        s->status = DP_OK;
        s->size = h.size;
        ch->stats.bytes_out += h.size;
        return;
    }
    bool has_message = h.size <= ch->cfg.eager && wc->byte_len == DP_REPLY_SIZE + h.size;
    refused(s, h.status, h.status == DP_FUNCTION_FAILED && !has_message ? 0 : h.size);
}

/* Handles what has arrived; true when there was something. */
static bool progress(dp_endpoint *ep) {
    bool mail = false;
    for (dp_channel *ch = ep->channels; ch; ch = ch->next)
        mail |= take_mail(ch);
    dp_wc wc[POLL_BATCH];
    int n = dp_cq_poll(ep->cq, wc, POLL_BATCH);
    if (n == 0)
        return mail;
    for (int k = 0; k < n; k++) {
        dp_channel *ch = wc[k].qp->user;
        if (wc[k].status == DP_OK) {
            if (wc[k].op == DP_OP_RECV_IMM && !ch->failed)
                on_reply(ch, &wc[k]);
        } else {
            int why = dp_qp_broken(ch->qp);
            dp_channel_end_calls(ch, why ? why : wc[k].status == DP_PEER_GONE ? DP_PEER_GONE : DP_CONNECTION);
        }
    }
    if (n < 0)
        for (dp_channel *ch = ep->channels; ch; ch = ch->next)
            dp_channel_end_calls(ch, DP_FATAL);
    return true;
}

/* Ends the calls of channels that another thread or the provider declared broken. What arrived before counts: a worker
 * that leaves answers first. */
static bool reap_broken(dp_endpoint *ep) {
    bool any = false;
    for (dp_channel *ch = ep->channels; ch; ch = ch->next) {
        int why = dp_qp_broken(ch->qp);
        if (why && !ch->failed) {
            progress(ep);
            dp_channel_end_calls(ch, why);
            any = true;
        }
    }
    return any;
}

/* ---- waiting ---- */

/* Abandoned calls count: their slots come back with a reply or when the peer is known to be gone. */
static void probe_all(dp_endpoint *ep, int64_t now) {
    if (now < ep->waiter.probe_at)
        return;
    ep->waiter.probe_at = now + DP_PROBE_EVERY_NS;
    for (dp_channel *ch = ep->channels; ch; ch = ch->next)
        if (!ch->failed && (ch->n_busy || ch->n_abandoned)) {
            dp_qp_probe(ch->qp);
            /* Only we write this word. A worker whose function has overwritten it has perhaps taken garbage for a request,
             * and its answer to that for ours. */
            if (ch->mail_slot != DP_NOTHING && dp_mail_call_id(__atomic_load_n(&ch->mail->request, __ATOMIC_RELAXED)) !=
                                                   ch->slots[ch->mail_slot].call_id)
                dp_qp_break(ch->qp, DP_PROTOCOL);
        }
}

/* Progress for a caller who does not wait here but comes again. */
static void look(dp_endpoint *ep) {
    if (!progress(ep) && ++ep->looks % DP_LOOKS_PER_PROBE == 0)
        probe_all(ep, dp_now_ns());
    reap_broken(ep);
}

/* Blocks until something may have happened. */
static void block(dp_endpoint *ep, int64_t deadline_ns) {
    if (dp_cq_arm(ep->cq))
        return;
    if (progress(ep) || reap_broken(ep)) {
        dp_cq_disarm(ep->cq);
        return;
    }
    int64_t timeout = dp_waiter_timeout(&ep->waiter, deadline_ns);
    ep->waiter.blocked++;
    dp_cq_wait(ep->cq, timeout);
}

/* One step of waiting after a poll found nothing. DP_DEADLINE when it is too late. */
static int idle(dp_endpoint *ep, int64_t deadline_ns) {
    dp_waiter *w = &ep->waiter;
    int what = dp_waiter_spin(w);
    if (what == DP_SPIN_ON)
        return DP_OK;
    if (reap_broken(ep))
        return DP_OK;
    if (deadline_ns && w->now >= deadline_ns)
        return DP_DEADLINE;
    probe_all(ep, w->now);
    if (what == DP_SPIN_BLOCK)
        block(ep, deadline_ns);
    return DP_OK;
}

/* After a poll that found something: a worker that sends without end keeps nobody from his deadline, nor from the end of
 * another channel. True when the deadline has passed. */
static inline bool flooded(dp_endpoint *ep, uint32_t *found, int64_t deadline_ns) {
    if (++*found % LOOK_EVERY)
        return false;
    reap_broken(ep);
    return deadline_ns && dp_now_ns() >= deadline_ns;
}

static inline void begin_wait(dp_endpoint *ep) {
    dp_waiter_begin(&ep->waiter);
    if (ep->waiter.mode == DP_WAIT_HOT && !ep->waiter.shared_until)
        dp_cq_promise_hot(ep->cq, true);
}

/* The first spins of a wait for a reply on a line of its own: one look per pause at the word that will change, and at the
 * queue, since every further instruction between two looks delays the reply. Where request and reply share a line the general
 * way is better: there a look that comes too early takes the line from the worker. False: go on with that. */
static inline bool spin_for_mail(dp_channel *ch, const slot *s) {
    const dp_cq *cq = ch->ep->cq;
    const dp_waiter *w = &ch->ep->waiter;
    if (s->capacity <= DP_MAIL_RESULT || w->mode == DP_WAIT_WARM || w->shared_until || !cq->peek)
        return false;
    for (uint32_t spins = 0; spins < DP_SPINS_PER_LOOK; spins++) {
        if (dp_mail_call_id(__atomic_load_n(&ch->mail->long_reply, __ATOMIC_RELAXED)) == s->call_id)
            return take_mail(ch) && s->state == SLOT_DONE;
        if ((uint32_t)__atomic_load_n(cq->peek, __ATOMIC_RELAXED) == cq->peek_value)
            return false;
        dp_cpu_pause();
    }
    return false;
}

int dp_channel_wait(dp_channel *ch, uint32_t i, int64_t deadline_ns) {
    if (i >= ch->cfg.depth)
        return DP_INVALID;
    slot *s = &ch->slots[i];
    dp_endpoint *ep = ch->ep;
    begin_wait(ep);
    if (i == ch->mail_slot && spin_for_mail(ch, s))
        return DP_OK;
    for (uint32_t found = 0;;) {
        if (take_mail(ch) && s->state == SLOT_DONE) {
            dp_waiter_end(&ep->waiter);
            return DP_OK;
        }
        if (s->state != SLOT_BUSY) {
            dp_waiter_end(&ep->waiter);
            return s->state == SLOT_DONE ? DP_OK : DP_INVALID;
        }
        if (progress(ep)) {
            if (flooded(ep, &found, deadline_ns) && s->state == SLOT_BUSY)
                return DP_DEADLINE;
            continue;
        }
        if (idle(ep, deadline_ns))
            return DP_DEADLINE;
    }
}

int dp_channel_test(dp_channel *ch, uint32_t i) {
    if (i >= ch->cfg.depth)
        return DP_INVALID;
    slot *s = &ch->slots[i];
    if (s->state == SLOT_BUSY)
        look(ch->ep);
    return s->state == SLOT_DONE ? 1 : s->state == SLOT_BUSY ? 0 : DP_INVALID;
}

int dp_endpoint_wait_any(dp_endpoint *ep, int64_t deadline_ns) {
    begin_wait(ep);
    for (uint32_t found = 0; ep->ended == ep->seen;) {
        if (progress(ep)) {
            if (flooded(ep, &found, deadline_ns) && ep->ended == ep->seen)
                return DP_DEADLINE;
            continue;
        }
        if (idle(ep, deadline_ns))
            return DP_DEADLINE;
    }
    ep->seen = ep->ended;
    dp_waiter_end(&ep->waiter);
    return DP_OK;
}

/* ---- calls ---- */

/* The send queue filled up in the middle of a request: from its start it would fill up again. DP_BUSY: post once more. */
static int make_room(dp_channel *ch, int64_t *since) {
    int64_t now = dp_now_ns();
    if (!*since)
        *since = now;
    if (!progress(ch->ep))
        reap_broken(ch->ep);
    if (!ch->failed && now - *since > PART_PATIENCE_NS)
        dp_channel_end_calls(ch, DP_CONNECTION);
    dp_cpu_pause();
    return ch->failed ? DP_CONNECTION : DP_BUSY;
}

/* Writes a payload into the worker's bulk area, in messages that the device takes. */
static int write_bulk(dp_channel *ch, const void *data, uint32_t size, uint32_t lkey, uint64_t raddr) {
    const uint8_t *p = data;
    int64_t since = 0;
    while (size) {
        uint32_t part = size < ch->ep->dev->max_msg ? size : ch->ep->dev->max_msg;
        dp_sge sge = {p, part, lkey};
        int st = dp_post_write(ch->qp, &sge, 1, raddr, ch->peer.rkey, 0, DP_MORE);
        if (st == DP_BUSY && p != data && (st = make_room(ch, &since)) == DP_BUSY)
            continue;
        if (st)
            return st;
        since = 0;
        p += part;
        raddr += part;
        size -= part;
    }
    return DP_OK;
}

/* Takes bulk ranges for the call as its sizes ask. */
static int take_bulk(dp_channel *ch, slot *s, uint32_t size, uint32_t capacity) {
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

/* Posts a request that is its payload and nothing else. */
static inline int post_bare(dp_channel *ch, uint32_t i, uint32_t call_id, const void *in, uint32_t size,
                            const dp_mem *reg) {
    uint64_t at = dp_slot_payload(&ch->layout, i);
    dp_sge sge = {in, size, reg ? reg->lkey : 0};
    if (ch->staging && !reg && size > ch->qp->max_inline) {
        sge = (dp_sge){(uint8_t *)ch->staging->addr + at, size, ch->staging->lkey};
        memcpy((uint8_t *)ch->staging->addr + at, in, size);
    }
    return dp_post_write_imm(ch->qp, &sge, size != 0, ch->peer.addr + at, ch->peer.rkey,
                             DP_IMM_BARE | dp_imm(i, call_id), i, 0);
}

/* Posts the request; the header on the stack and the payload where it lies, or both from staging when the
 * device reads its source later. */
static inline int post_request(dp_channel *ch, uint32_t i, const dp_request *h, const void *in, uint32_t size,
                        const dp_mem *reg) {
    const slot *s = &ch->slots[i];
    uint8_t *stage = ch->staging ? (uint8_t *)ch->staging->addr + dp_slot_payload(&ch->layout, i) : NULL;
    if (s->in_at != DP_NOTHING) {
        const void *src = in;
        uint32_t lkey = reg ? reg->lkey : 0;
        if (stage && !reg) {
            uint8_t *copy = (uint8_t *)ch->staging->addr + dp_bulk_at(&ch->layout, s->in_at);
            memcpy(copy, in, size);
            src = copy;
            lkey = ch->staging->lkey;
        }
        int st = write_bulk(ch, src, size, lkey, ch->peer.addr + dp_bulk_at(&ch->layout, s->in_at));
        if (st)
            return st;
        size = 0;
    }
    uint32_t head = h->flags & (DP_REQ_BULK_IN | DP_REQ_BULK_OUT) ? DP_REQ_LONG : DP_REQ_SHORT;
    uint64_t words[4];
    dp_request_pack(words, h);
    const uint8_t *bytes = (const uint8_t *)words + DP_REQ_LONG - head;
    dp_sge sge[2] = {{bytes, head, 0}, {in, size, reg ? reg->lkey : 0}};
    int n = size ? 2 : 1;
    if (stage && head + size > ch->qp->max_inline) {
        memcpy(stage - head, bytes, head);
        sge[0] = (dp_sge){stage - head, head, ch->staging->lkey};
        if (size && !reg) {
            memcpy(stage, in, size);
            sge[0].len += size;
            n = 1;
        }
    }
    uint64_t raddr = ch->peer.addr + dp_slot_payload(&ch->layout, i) - head;
    for (int64_t since = 0;;) {
        int st = dp_post_write_imm(ch->qp, sge, n, raddr, ch->peer.rkey, dp_imm(i, h->call_id), i, 0);
        if (__builtin_expect(st != DP_BUSY || s->in_at == DP_NOTHING, 1))
            return st;
        if ((st = make_room(ch, &since)) != DP_BUSY)
            return st;
    }
}

/* Starts a call by the mailbox. The caller has checked that nothing else is under way and that it fits. False: a word
 * of the mailbox carries this call's id already, as one 2^32 calls old may; the queue pair knows no such words. */
static inline bool submit_mail(dp_channel *ch, uint32_t function, const void *in, uint32_t size, uint32_t capacity,
                               uint32_t *out) {
    dp_mailbox *m = ch->mail;
    uint32_t call_id = ch->next_call;
    const uint64_t *reply = capacity <= DP_MAIL_RESULT ? &m->reply : &m->long_reply;
    if (__builtin_expect(dp_mail_call_id(__atomic_load_n(reply, __ATOMIC_RELAXED)) == call_id ||
                             dp_mail_call_id(__atomic_load_n(&m->request, __ATOMIC_RELAXED)) == call_id, 0))
        return false;
    uint32_t i = ch->free[--ch->n_free];
    slot *s = &ch->slots[i];
    ch->next_call++;
    s->state = SLOT_BUSY;
    s->call_id = call_id;
    s->capacity = capacity;
    ch->mail_slot = i;
    ch->n_busy++;
    ch->stats.calls++;
    ch->stats.bytes_in += size;
    if (size <= DP_MAIL_PAYLOAD)
        dp_copy_small(m->payload, in, size);
    else
        dp_copy_mail(m->more_payload, in, size);
    m->sizes = dp_mail_sizes(ch->generation, i, capacity);
    /* Release pairs with the acquire in the worker's take_mail(). */
    __atomic_store_n(&m->request, dp_mail_request(call_id, function, size), __ATOMIC_RELEASE);
    dp_qp_notify(ch->qp);
    *out = i;
    return true;
}

int dp_channel_submit(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg,
                      uint32_t capacity, uint32_t *out) {
    if (__builtin_expect(ch->failed != 0, 0))
        return ch->failed;
    if (function > UINT16_MAX)
        return DP_NO_FUNCTION;
    if (size && !in)
        return DP_INVALID;
    if (__builtin_expect(dp_qp_broken(ch->qp), 0)) {
        reap_broken(ch->ep);
        return ch->failed;
    }
    if (ch->mail && ch->n_free == ch->cfg.depth && size <= ch->mail_max && capacity <= ch->cfg.eager && !reg &&
        submit_mail(ch, function, in, size, capacity, out))
        return DP_OK;
    bool eager = size <= ch->cfg.eager && capacity <= ch->cfg.eager;
    if (!eager && ((size > ch->cfg.eager && size > ch->cfg.bulk) ||
                   (capacity > ch->cfg.eager && capacity > ch->cfg.bulk)))
        return DP_TOO_LARGE;
    if (reg && ((const uint8_t *)in < (const uint8_t *)reg->addr ||
                (uint64_t)((const uint8_t *)in - (const uint8_t *)reg->addr) + size > reg->size))
        return DP_INVALID;
    if (!ch->n_free) {
        look(ch->ep); /* a late reply may have freed one, and the end of the connection may have come behind it */
        if (ch->failed)
            return ch->failed;
        if (!ch->n_free) {
            ch->stats.busy++;
            return ch->failed ? ch->failed : DP_BUSY;
        }
    }
    uint32_t i = ch->free[--ch->n_free];
    slot *s = &ch->slots[i];
    if (!eager && take_bulk(ch, s, size, capacity)) {
        look(ch->ep); /* a late reply may give room back */
        if (ch->failed || take_bulk(ch, s, size, capacity)) {
            slot_free(ch, i);
            ch->stats.busy++;
            return ch->failed ? ch->failed : DP_BUSY;
        }
    }
    dp_request h = {
        .in_offset = s->in_at != DP_NOTHING ? s->in_at : 0,
        .out_offset = s->out_at != DP_NOTHING ? s->out_at : 0,
        .generation = ch->generation,
        .call_id = ch->next_call,
        .size = size,
        .capacity = capacity,
        .function = (uint16_t)function,
        .flags = (uint16_t)((s->in_at != DP_NOTHING ? DP_REQ_BULK_IN : 0) | (s->out_at != DP_NOTHING ? DP_REQ_BULK_OUT : 0) |
                            (ch->n_free + 1 == ch->cfg.depth ? DP_REQ_EXCLUSIVE : 0)),
    };
    bool bare = dp_told(&h) == s->told && h.call_id - s->told_id - 1 < DP_IMM_TAGS - 1;
    int st = bare ? post_bare(ch, i, h.call_id, in, size, reg) : post_request(ch, i, &h, in, size, reg);
    if (__builtin_expect(st != DP_OK, 0)) {
        slot_free(ch, i);
        int why = dp_qp_broken(ch->qp); /* also of one that is not connected, since replacing its worker failed */
        if (st == DP_CONNECTION || why) {
            progress(ch->ep);
            dp_channel_end_calls(ch, why ? why : DP_CONNECTION);
            return ch->failed;
        }
        if (st == DP_BUSY) {
            ch->stats.busy++;
            progress(ch->ep);
        }
        return st;
    }
    ch->n_busy++;
    ch->next_call++;
    ch->stats.calls++;
    ch->stats.bytes_in += size;
    s->state = SLOT_BUSY;
    s->call_id = h.call_id;
    s->capacity = capacity;
    s->told = eager ? dp_told(&h) : DP_UNTOLD;
    s->told_id = h.call_id;
    *out = i;
    return DP_OK;
}

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
    if (st == DP_OK && out) {
        if (s->size <= DP_MAIL_RESULT)
            dp_copy_small(out, s->result, s->size);
        else
            dp_copy_mail(out, s->result, s->size);
    }
    ch->n_done--;
    slot_free(ch, i);
    return st;
}

const char *dp_channel_message(const dp_channel *ch, uint32_t *len) {
    *len = ch->message_len;
    return ch->message;
}

void dp_channel_abandon(dp_channel *ch, uint32_t i) {
    if (i >= ch->cfg.depth)
        return;
    slot *s = &ch->slots[i];
    if (s->state == SLOT_BUSY) {
        s->state = SLOT_ABANDONED;
        ch->n_busy--;
        ch->n_abandoned++;
        ch->stats.abandoned++;
    } else if (s->state == SLOT_DONE) {
        ch->n_done--;
        slot_free(ch, i);
    }
}

int dp_channel_call(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, void *out,
                    uint32_t capacity, uint32_t *out_size, int64_t deadline_ns, dp_started *started) {
    uint32_t i;
    int st = dp_channel_submit(ch, function, in, size, reg, capacity, &i);
    if (__builtin_expect(st != DP_OK, 0)) {
        *started = DP_NOT_STARTED;
        *out_size = 0;
        return st;
    }
    st = dp_channel_wait(ch, i, deadline_ns);
    if (__builtin_expect(st != DP_OK, 0)) {
        dp_channel_abandon(ch, i);
        *started = DP_MAYBE_EXECUTED;
        *out_size = 0;
        return st;
    }
    return dp_channel_finish(ch, i, out, out_size, started);
}
