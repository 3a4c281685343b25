/* Starting calls: by the mailbox, or by the queue pair with or without a header and bulk ranges. */
#include <stdlib.h>
#include <string.h>

#include "dp_channel_impl.h"

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* the hot path has several callers, each with a copy of its own */

#define PART_PATIENCE_NS 2000000000 /* longest wait between two messages of one payload */
#define POLLED_STEP_NS 1000000      /* step of waits for room, if room depends on the peer's polling */

/* ---- by the queue pair ---- */

/* A submit that waits for room in the send queue. */
typedef struct room {
    int64_t deadline_ns; /* 0: none */
    int64_t since;       /* when the wait began; 0: it has not */
} room;

/* Makes room in a send queue that filled up in the middle of a request, which must not start again from its beginning. DP_BUSY: post
 * the same message again. After DP_DEADLINE and DP_LEASE_ENDED, the messages that were posted have no effect: no request follows them, and
 * later messages overwrite their data. */
static int make_room(dp_channel *ch, room *r) {
    int64_t now = dp_now_ns();
    if (!r->since)
        r->since = now;
    ch->lane->posting = true;
    bool polled = ch->ep->dev->caps & DP_CAP_POLLED_TARGET; /* no room is made while the worker runs a function */
    if (!dp_lane_progress(ch->lane)) {
        if (polled && now - r->since > POLLED_STEP_NS)
            dp_cq_wait(ch->lane->cq, POLLED_STEP_NS);
        ch->submitting = true;
        dp_lane_attend(ch->lane, now);
        ch->submitting = false;
    }
    ch->lane->posting = false;
    if (!ch->failed && !polled && now - r->since > PART_PATIENCE_NS)
        dp_channel_end_calls(ch, DP_CONNECTION);
    dp_cpu_pause();
    if (ch->failed)
        return DP_CONNECTION;
    if (__atomic_load_n(&ch->lane->interrupted, __ATOMIC_RELAXED))
        return DP_LEASE_ENDED;
    return r->deadline_ns && now >= r->deadline_ns ? DP_DEADLINE : DP_BUSY;
}

void dp_channel_interrupt(dp_channel *ch) { __atomic_store_n(&ch->lane->interrupted, 1, __ATOMIC_RELAXED); }

/* Writes a payload into the worker's bulk area, in messages that the device takes. The request's header must follow at once (DP_MORE). */
static int write_bulk(dp_channel *ch, const void *data, uint32_t size, uint32_t lkey, uint64_t raddr, room *r) {
    const uint8_t *p = data;
    while (size) {
        uint32_t part = size < ch->ep->dev->max_msg ? size : ch->ep->dev->max_msg;
        dp_sge sge = {p, part, lkey};
        int st = dp_post_write(ch->qp, &sge, 1, raddr, ch->peer.rkey, 0, DP_MORE);
        if (st == DP_BUSY && p != data && (st = make_room(ch, r)) == DP_BUSY)
            continue;
        if (st)
            return st;
        r->since = 0;
        p += part;
        raddr += part;
        size -= part;
    }
    return DP_OK;
}

/* Posts a request without a header. */
static ALWAYS_INLINE int post_bare(dp_channel *ch, uint32_t i, uint32_t call_id, const void *in, uint32_t size,
                            const dp_mem *reg) {
    uint64_t at = dp_slot_payload(&ch->layout, i);
    dp_sge sge = {in, size, reg ? reg->lkey : 0};
    if (ch->staging && !reg && size > ch->qp->max_inline) {
        sge = (dp_sge){(uint8_t *)ch->staging->addr + at, size, ch->staging->lkey};
        memcpy((uint8_t *)ch->staging->addr + at, in, size);
    }
    return dp_post_write_imm(ch->qp, &sge, size != 0, ch->peer.addr + at, ch->peer.rkey,
                             DP_IMM_BARE | dp_imm(i, call_id), i, ch->batch ? DP_MORE : 0);
}

/* What of a call is placed in shared memory. */
typedef struct placed {
    const dp_mem *in, *out; /* NULL: copied */
    const uint8_t *result;
} placed;

/* Posts a request with its header. Header and payload are copied to staging first if the device reads its source after the post. */
static ALWAYS_INLINE int post_request(dp_channel *ch, uint32_t i, const dp_request *h, const void *in, uint32_t size,
                        const dp_mem *reg, const placed *at, room *r) {
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
        int st = write_bulk(ch, src, size, lkey, ch->peer.addr + dp_bulk_at(&ch->layout, s->in_at), r);
        if (st)
            return st;
        size = 0;
    }
    uint32_t head = at ? DP_REQ_KEYED : h->flags & DP_REQ_BULK ? DP_REQ_LONG : DP_REQ_SHORT;
    uint64_t words[5];
    if (at)
        words[0] = dp_two(at->in ? at->in->rkey : 0, at->out ? at->out->rkey : 0);
    dp_request_pack(words + 1, h);
    const uint8_t *bytes = (const uint8_t *)words + DP_REQ_KEYED - head;
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
    for (;;) {
        int st = dp_post_write_imm(ch->qp, sge, n, raddr, ch->peer.rkey, dp_imm(i, h->call_id), i, ch->batch ? DP_MORE : 0);
        if (__builtin_expect(st != DP_BUSY || s->in_at == DP_NOTHING, 1))
            return st;
        if ((st = make_room(ch, r)) != DP_BUSY)
            return st;
    }
}

/* ---- by the mailbox ---- */

/* Reports whether a call is alone on its channel and fits into the mailbox. */
static ALWAYS_INLINE bool fits_mailbox(const dp_channel *ch, uint32_t size, const dp_mem *reg, uint32_t capacity) {
    return ch->mailbox && ch->n_free == ch->cfg.depth && size <= ch->mailbox_max && capacity <= ch->cfg.eager && !reg;
}

/* Writes a call for which fits_mailbox() is true into the mailbox, with the next call id and the next free slot. The payload is at `in`, or
 * in `pieces` if that is not NULL. It does not take the slot: mailbox_submitted() does. Returns false if a word of the mailbox has this id
 * already, from 2^32 calls ago; such a call goes by the queue pair. */
static ALWAYS_INLINE bool post_mailbox(dp_channel *ch, uint32_t function, const void *in, const dp_pieces *pieces, uint32_t size,
                                    uint32_t capacity) {
    dp_mailbox *m = ch->mailbox;
    uint32_t call_id = ch->next_call, at = ch->free[ch->n_free - 1];
    if (__builtin_expect(dp_mailbox_call_id(__atomic_load_n(dp_mailbox_word(ch, capacity), __ATOMIC_RELAXED)) == call_id ||
                             ch->mailbox_last == call_id, 0))
        return false;
    bool large = ch->mailbox_large && dp_mailbox_wants_large(size, capacity);
    uint8_t *in_slot = (uint8_t *)m - ch->layout.mailbox_at + dp_slot_payload(&ch->layout, at); /* the worker's */
    if (pieces)
        dp_gather(size <= DP_MAILBOX_PAYLOAD ? (uint8_t *)m->payload : dp_mailbox_payload(m, size, large, in_slot), pieces, size);
    else if (size <= DP_MAILBOX_PAYLOAD)
        dp_copy_small(m->payload, in, size);
    else
        dp_copy_mailbox(dp_mailbox_payload(m, size, large, in_slot), in, size);
    m->sizes = dp_mailbox_sizes(ch->generation, at, capacity);
    /* Release pairs with the acquire in the worker's take_mailbox(). */
    __atomic_store_n(&m->request, dp_mailbox_request(call_id, function, size, large), __ATOMIC_RELEASE);
    dp_qp_notify(ch->qp);
    ch->mailbox_last = ch->next_call++;
    ch->stats.calls++;
    ch->stats.bytes_in += size;
    return true;
}

/* Takes the slot of the call in the mailbox, and returns it. */
static ALWAYS_INLINE uint32_t mailbox_submitted(dp_channel *ch, uint32_t function, uint32_t capacity) {
    uint32_t i = ch->free[--ch->n_free];
    slot *s = &ch->slots[i];
    s->state = SLOT_BUSY;
    s->call_id = ch->next_call - 1;
    s->function = function;
    s->capacity = capacity;
    ch->mailbox_slot = i;
    ch->n_busy++;
    return i;
}

/* ---- any call ---- */

/* Reports whether a submit that found no room waits for it. If a call is in flight, the caller waits for the end of that call instead. */
static bool only_polling_helps(const dp_channel *ch) {
    return (ch->ep->dev->caps & DP_CAP_POLLED_TARGET) && ch->n_free + 1 == ch->cfg.depth;
}

#define GATHER_KEPT (4u << 20) /* bytes of memory for gathering that a channel keeps from one call to the next */

/* Gathers a payload of slot i where the device takes it from: on shm the worker's memory, on verbs the staging memory, on tcp, whose
 * posts consume their source, memory that all calls of the channel use. *in becomes its address there, and *reg its region. */
static int gather(dp_channel *ch, uint32_t i, const dp_pieces *pieces, uint32_t size, const void **in, const dp_mem **reg) {
    const slot *s = &ch->slots[i];
    uint64_t at = s->in_at != DP_NOTHING ? dp_bulk_at(&ch->layout, s->in_at) : dp_slot_payload(&ch->layout, i);
    uint8_t *to;
    if (!size)
        return DP_OK;
    if (ch->staging) {
        to = (uint8_t *)ch->staging->addr + at;
        *reg = ch->staging;
    } else if (ch->ep->dev->caps & DP_CAP_RKEY_PTR) {
        if (!(to = dp_rkey_ptr(ch->qp, ch->peer.addr + at, ch->peer.rkey, size)))
            return DP_CONNECTION;
    } else {
        if (ch->gather_size < size) {
            free(ch->gather);
            ch->gather = malloc(size);
            ch->gather_size = ch->gather ? size : 0;
        }
        if (!(to = ch->gather))
            return DP_FATAL;
    }
    dp_gather(to, pieces, size);
    *in = to;
    return DP_OK;
}

static uint32_t place_of(const dp_mem *m, const void *at) { return (uint32_t)(((uintptr_t)at - (uintptr_t)m->addr) / DP_BULK_UNIT); }

/* Submits a call in parts, in a slot that was taken. */
static __attribute__((noinline, cold)) int submit_parts(dp_channel *ch, uint32_t i, uint32_t function, const void *in, const dp_pieces *pieces,
                                                        uint32_t size, uint32_t capacity, uint32_t *out) {
    slot *s = &ch->slots[i];
    int st = dp_parts_begin(ch, s, in, pieces, size, capacity);
    if (st == DP_BUSY) {
        dp_slot_free(ch, i);
        dp_lane_look(ch->lane); /* a late reply may free bulk memory for the next try */
        ch->stats.busy++;
        return ch->failed ? ch->failed : DP_BUSY;
    }
    if (st) {
        dp_slot_free(ch, i);
        return st;
    }
    ch->n_busy++;
    ch->stats.calls++;
    ch->stats.bytes_in += size;
    s->state = SLOT_BUSY;
    s->call_id = ch->next_call++;
    s->function = function;
    s->capacity = capacity;
    s->told = DP_UNTOLD;
    s->told_id = s->call_id;
    *out = i;
    dp_parts_post(ch);
    return DP_OK;
}

/* Submits a call. The payload is at `in`, or in `pieces` if that is not NULL. at: NULL if nothing is placed. */
static ALWAYS_INLINE int submit(dp_channel *ch, uint32_t function, const void *in, const dp_pieces *pieces, uint32_t size,
                                const dp_mem *reg, uint32_t capacity, const placed *at, int64_t deadline_ns, uint32_t *out) {
    if (__builtin_expect(ch->failed != 0, 0))
        return ch->failed;
    if (size && !in && !pieces)
        return DP_INVALID;
    if (__builtin_expect(dp_qp_broken(ch->qp), 0)) {
        dp_lane_reap(ch->lane);
        return ch->failed;
    }
    if (!at && fits_mailbox(ch, size, reg, capacity) && !dp_is_chain(function) && post_mailbox(ch, function, in, pieces, size, capacity)) {
        *out = mailbox_submitted(ch, function, capacity);
        return DP_OK;
    }
    uint32_t carried = at && at->in ? 0 : size, returned = at && at->out ? 0 : capacity; /* through the channel's memory */
    bool eager = carried <= ch->cfg.eager && returned <= ch->cfg.eager, parts = false;
    if (!eager && ((carried > ch->cfg.eager && carried > ch->cfg.bulk) ||
                   (returned > ch->cfg.eager && returned > ch->cfg.bulk))) {
        if (size > ch->most || capacity > ch->most)
            return DP_TOO_LARGE;
        parts = true; /* and nothing in place */
    }
    if (reg && ((const uint8_t *)in < (const uint8_t *)reg->addr ||
                (uint64_t)((const uint8_t *)in - (const uint8_t *)reg->addr) + size > reg->size))
        return DP_INVALID;
    if (!ch->n_free) {
        if (ch->n_abandoned == ch->cfg.depth)
            ch->lane->looks = DP_LOOKS_PER_PROBE - 1; /* probe here, because no thread may be waiting */
        dp_lane_look(ch->lane); /* a late reply may have freed a slot, or the connection may have ended */
        if (ch->failed)
            return ch->failed;
        if (!ch->n_free) {
            ch->stats.busy++;
            return ch->failed ? ch->failed : DP_BUSY;
        }
    }
    uint32_t i = ch->free[--ch->n_free];
    slot *s = &ch->slots[i];
    if (__builtin_expect(parts, 0))
        return submit_parts(ch, i, function, in, pieces, size, capacity, out);
    if (!eager && dp_slot_take_bulk(ch, s, carried, returned)) {
        dp_lane_look(ch->lane); /* a late reply may free bulk memory */
        if (ch->failed || dp_slot_take_bulk(ch, s, carried, returned)) {
            dp_slot_free(ch, i);
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
                            (ch->n_free + 1 == ch->cfg.depth ? DP_REQ_EXCLUSIVE : 0) | (ch->batch && ch->qp->peer_batches ? DP_REQ_BATCH : 0)),
    };
    if (at && at->in) {
        h.in_offset = place_of(at->in, in);
        h.flags |= DP_REQ_PLACED_IN;
    }
    if (at && at->out) {
        h.out_offset = place_of(at->out, at->result);
        h.flags |= DP_REQ_PLACED_OUT;
        s->out_at = DP_PLACED;
        s->place = at->result;
    }
    bool bare = !at && dp_told(function, &h) == s->told && h.call_id - s->told_id - 1 < DP_IMM_TAGS - 1;
    if (!bare) /* a bare request repeats it */
        h.then = function >> 16;
    room r = {.deadline_ns = deadline_ns};
    int st = pieces ? gather(ch, i, pieces, size, &in, &reg) : DP_OK;
    if (__builtin_expect(st == DP_OK, 1)) {
        do
            st = bare ? post_bare(ch, i, h.call_id, in, size, reg) : post_request(ch, i, &h, in, carried, reg, at, &r);
        while (__builtin_expect(st == DP_BUSY, 0) && only_polling_helps(ch) && (st = make_room(ch, &r)) == DP_BUSY);
    }
    if (__builtin_expect(st != DP_OK, 0)) {
        dp_slot_free(ch, i);
        int why = dp_qp_broken(ch->qp); /* also set if the channel is not connected, because its worker could not be replaced */
        if (st == DP_CONNECTION || why) {
            dp_lane_progress(ch->lane);
            dp_channel_end_calls(ch, why ? why : DP_CONNECTION);
            return ch->failed;
        }
        if (st == DP_BUSY) {
            ch->stats.busy++;
            dp_lane_look(ch->lane); /* also probes now and then, because no thread may be waiting */
        }
        return ch->failed ? ch->failed : st;
    }
    ch->n_busy++;
    ch->next_call++;
    ch->stats.calls++;
    ch->stats.bytes_in += size;
    s->state = SLOT_BUSY;
    s->call_id = h.call_id;
    s->function = function;
    s->capacity = capacity;
    s->told = eager && !at ? dp_told(function, &h) : DP_UNTOLD;
    s->told_id = h.call_id;
    *out = i;
    return DP_OK;
}

int dp_channel_submit_move(dp_channel *ch, const void *blob, uint32_t size, uint32_t *out) {
    if (ch->failed)
        return ch->failed;
    if (!ch->n_free || ch->cfg.eager < DP_CHANNEL_BLOB_MAX)
        return DP_BUSY;
    uint32_t i = ch->free[--ch->n_free];
    slot *s = &ch->slots[i];
    room r = {0};
    dp_request h = {.generation = ch->generation, .call_id = ch->next_call, .size = size, .capacity = DP_CHANNEL_BLOB_MAX, .flags = DP_REQ_MOVE};
    int st = post_request(ch, i, &h, blob, size, NULL, NULL, &r);
    if (st) {
        dp_slot_free(ch, i);
        return st;
    }
    ch->n_busy++;
    ch->next_call++;
    s->state = SLOT_BUSY;
    s->call_id = h.call_id;
    s->function = 0;
    s->capacity = DP_CHANNEL_BLOB_MAX;
    s->told = DP_UNTOLD;
    s->told_id = h.call_id;
    *out = i;
    return DP_OK;
}

void dp_channel_batch(dp_channel *ch, bool batch) { ch->batch = batch; }

static __attribute__((noinline)) int submit_any(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, uint32_t capacity,
                                                int64_t deadline_ns, uint32_t *out) {
    return submit(ch, function, in, NULL, size, reg, capacity, NULL, deadline_ns, out);
}

/* A short path, with 100 instructions instead of 200, for a call that repeats the last one of its slot, as most calls do while others are in flight.
 * submit_any() handles all other calls, and errors. */
int dp_channel_submit_until(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, uint32_t capacity, int64_t deadline_ns,
                            uint32_t *out) {
    uint32_t call_id = ch->next_call, n = ch->n_free;
    if (__builtin_expect(n - 1 >= ch->cfg.depth - 1 || ch->failed || reg || !in || size > ch->cfg.eager || dp_qp_broken(ch->qp), 0))
        return submit_any(ch, function, in, size, reg, capacity, deadline_ns, out);
    uint32_t i = ch->free[n - 1];
    slot *s = &ch->slots[i];
    const dp_request like = {.capacity = capacity, .flags = ch->batch && ch->qp->peer_batches ? DP_REQ_BATCH : 0};
    if (__builtin_expect(dp_told(function, &like) != s->told || call_id - s->told_id - 1 >= DP_IMM_TAGS - 1, 0) ||
        __builtin_expect(post_bare(ch, i, call_id, in, size, NULL) != DP_OK, 0))
        return submit_any(ch, function, in, size, reg, capacity, deadline_ns, out);
    ch->n_free = n - 1;
    ch->n_busy++;
    ch->next_call = call_id + 1;
    ch->stats.calls++;
    ch->stats.bytes_in += size;
    s->state = SLOT_BUSY;
    s->call_id = s->told_id = call_id;
    s->function = function;
    s->capacity = capacity;
    *out = i;
    return DP_OK;
}

/* Returns the memory if it can hold a payload or result of this size, and NULL if that is to be copied. */
static const dp_mem *placeable(dp_channel *ch, const dp_mem *m, const void *at, uint32_t size) {
    uint64_t offset = m ? (uintptr_t)at - (uintptr_t)m->addr : 0; /* wraps around for addresses below it */
    bool fits = m && size >= DP_PLACE_MIN && offset <= m->size && size <= m->size - offset && offset % DP_BULK_UNIT == 0 &&
                offset / DP_BULK_UNIT <= UINT32_MAX;
    return fits && dp_qp_share(ch->qp, m) == DP_OK ? m : NULL;
}

int dp_channel_submit_placed(dp_channel *ch, uint32_t function, const void *in, uint32_t size, void *out, uint32_t capacity,
                             const dp_places *places, int64_t deadline_ns, uint32_t *i) {
    if (ch->share_again && ch->n_free == ch->cfg.depth) { /* no call in flight uses shared memory */
        dp_qp_unshare_all(ch->qp);
        ch->share_again = false;
    }
    placed at = {placeable(ch, places->in, in, size), placeable(ch, places->out, out, capacity), out};
    uint64_t carries = ch->cfg.eager > ch->cfg.bulk ? ch->cfg.eager : ch->cfg.bulk;
    if (!at.out && capacity > carries) {
        if (size <= ch->most && capacity <= ch->most)
            at.in = NULL; /* a result in parts comes with a payload in parts */
        else
            capacity = (uint32_t)carries;
    }
    if (!at.in && !at.out)
        return submit(ch, function, in, NULL, size, NULL, capacity, NULL, deadline_ns, i);
    return submit(ch, function, in, NULL, size, NULL, capacity, &at, deadline_ns, i);
}

void dp_channel_unshare(dp_channel *ch, const dp_mem *m) { dp_qp_unshare(ch->qp, m); }

int dp_channel_submit_pieces(dp_channel *ch, uint32_t function, const dp_pieces *in, uint32_t size, uint32_t capacity,
                             int64_t deadline_ns, uint32_t *out) {
    int status = submit(ch, function, NULL, in, size, NULL, capacity, NULL, deadline_ns, out);
    if (ch->gather_size > GATHER_KEPT) { /* the posts have consumed it */
        free(ch->gather);
        ch->gather = NULL;
        ch->gather_size = 0;
    }
    return status;
}

/* Calls by the mailbox. A call whose reply arrives during the first spins takes no slot. Returns true if the call has succeeded. False:
 * it is in flight in slot *i, it was not accepted, or its reply needs dp_channel_wait(). */
static ALWAYS_INLINE bool call_by_mailbox(dp_channel *ch, uint32_t function, const void *in, uint32_t size, void *out,
                                uint32_t capacity, uint32_t *out_size, uint32_t *i) {
    if (!post_mailbox(ch, function, in, NULL, size, capacity))
        return false;
    dp_begin_wait(ch->lane);
    uint32_t at = ch->free[ch->n_free - 1];
    const uint64_t *reply = dp_mailbox_word(ch, capacity);
    for (uint32_t spins = 0; spins < DP_SPINS_PER_LOOK; spins++) {
        /* Acquire pairs with the release in the worker's post_mailbox(). */
        uint64_t word = __atomic_load_n(reply, __ATOMIC_ACQUIRE);
        if (dp_mailbox_call_id(word) == ch->next_call - 1) {
            uint32_t got = (uint32_t)dp_mailbox_predict(dp_mailbox_result_size(word), &ch->mailbox_got);
            if (__builtin_expect(dp_mailbox_status(word) != DP_OK || !dp_mailbox_allows(ch, capacity, got), 0))
                break;
            if (capacity <= DP_MAILBOX_RESULT)
                dp_copy_small(out, ch->mailbox->result, got);
            else
                dp_copy_mailbox(out, dp_mailbox_result(ch, capacity, at), got);
            ch->lane->ended++;
            ch->stats.replies++;
            ch->stats.bytes_out += got;
            *out_size = got;
            return true;
        }
        dp_cpu_pause();
    }
    *i = mailbox_submitted(ch, function, capacity);
    return false;
}

/* Waits for the end of a call that was submitted. */
static ALWAYS_INLINE int await(dp_channel *ch, uint32_t i, void *out, const dp_pieces *to, uint32_t *out_size, int64_t deadline_ns,
                               dp_started *started, bool yields, uint32_t *at) {
    int st = dp_lane_wait(ch, i, deadline_ns, yields, false);
    if (__builtin_expect(st != DP_OK, 0)) {
        *started = DP_MAYBE_EXECUTED;
        *out_size = 0;
        if (st == DP_YIELD)
            *at = i;
        else
            *started = dp_channel_overdue(ch, i);
        return st;
    }
    return to ? dp_channel_finish_pieces(ch, i, to, out_size, started) : dp_channel_finish(ch, i, out, out_size, started);
}

/* Makes a call. `from` and `to` are NULL, or the pieces in place of `in` and `out`. */
static ALWAYS_INLINE int call(dp_channel *ch, uint32_t function, const void *in, const dp_pieces *from, uint32_t size, const dp_mem *reg,
                       void *out, const dp_pieces *to, uint32_t capacity, uint32_t *out_size, int64_t deadline_ns, dp_started *started,
                       bool yields, uint32_t *at) {
    uint32_t i = DP_NOTHING;
    const dp_waiter *w = &ch->lane->waiter;
    if (!from && __builtin_expect(fits_mailbox(ch, size, reg, capacity), 1) && !ch->failed && !dp_is_chain(function) && in && out &&
        w->mode != DP_WAIT_WARM && !w->shared_until && !dp_qp_broken(ch->qp) &&
        call_by_mailbox(ch, function, in, size, out, capacity, out_size, &i)) {
        *started = DP_MAYBE_EXECUTED;
        return DP_OK;
    }
    ch->lasting = true; /* the caller waits */
    int st = from              ? dp_channel_submit_pieces(ch, function, from, size, capacity, deadline_ns, &i)
             : i == DP_NOTHING ? dp_channel_submit_until(ch, function, in, size, reg, capacity, deadline_ns, &i)
                               : DP_OK;
    ch->lasting = false;
    if (__builtin_expect(st != DP_OK, 0)) {
        *started = DP_NOT_STARTED;
        *out_size = 0;
        return st;
    }
    return await(ch, i, out, to, out_size, deadline_ns, started, yields, at);
}

int dp_channel_call(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, void *out,
                    uint32_t capacity, uint32_t *out_size, int64_t deadline_ns, dp_started *started) {
    return call(ch, function, in, NULL, size, reg, out, NULL, capacity, out_size, deadline_ns, started, false, NULL);
}

int dp_channel_call_turn(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, void *out,
                         uint32_t capacity, uint32_t *out_size, int64_t deadline_ns, dp_started *started, uint32_t *i) {
    return call(ch, function, in, NULL, size, reg, out, NULL, capacity, out_size, deadline_ns, started, true, i);
}

int dp_channel_call_pieces(dp_channel *ch, uint32_t function, const dp_pieces *in, uint32_t size, const dp_pieces *out, uint32_t capacity,
                           uint32_t *out_size, int64_t deadline_ns, dp_started *started, uint32_t *i) {
    return call(ch, function, NULL, in, size, NULL, NULL, out, capacity, out_size, deadline_ns, started, true, i);
}

int dp_channel_call_placed(dp_channel *ch, uint32_t function, const void *in, uint32_t size, void *out, uint32_t capacity,
                           const dp_places *places, uint32_t *out_size, int64_t deadline_ns, dp_started *started, uint32_t *i) {
    uint32_t at = DP_NOTHING;
    int st = dp_channel_submit_placed(ch, function, in, size, out, capacity, places, deadline_ns, &at);
    if (st) {
        *started = DP_NOT_STARTED;
        *out_size = 0;
        return st;
    }
    return await(ch, at, out, NULL, out_size, deadline_ns, started, true, i);
}
