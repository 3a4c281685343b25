/* The serving thread: requests from the queue pair and the mailbox, the functions, the replies. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "dp_parts.h"
#include "dp_serve_impl.h"

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* for the path of every call */

#define POLL_BATCH 16
/* Results up to this size are made in scratch memory and copied. They may share a pair of cache lines with the word that the client
 * polls, and then each write of the function could transfer these lines. Larger results share no lines with a polled word. Between near cores, a call of
 * 256 bytes takes 155 ns. With a limit of 256, it took 180 ns. */
#define IN_PLACE_MIN DP_MAILBOX_PAIR
#define POST_PATIENCE_NS 2000000000 /* a client that gives no credit for so long broke the protocol */
#define BRIEF_NS 10000              /* replies of longer calls do not wait for others */
#define POLLED_STEP_NS 1000000      /* step of waits for room, if room depends on the peer's polling */

static __thread dp_invocation *current_invocation;

dp_invocation *dp_current_invocation(void) { return current_invocation; }

uint32_t dp_invoke(dp_function f, void *args, uint32_t size, void *res, dp_invocation *inv) {
    inv->room = inv->capacity;
    inv->failed = 0;
    inv->message_len = 0;
    current_invocation = inv;
    uint32_t n = f(args, size, res);
    current_invocation = NULL;
    return n;
}

/* ---- replies ---- */

/* Waits for room in a full send queue, by taking completions. Arrivals are kept for the main loop. */
static int make_room(dp_server *s, int64_t *since) {
    if (__atomic_load_n(&s->stop, __ATOMIC_RELAXED) == STOP_NOW)
        return DP_CANCELLED;
    int64_t now = dp_now_ns();
    if (!*since)
        *since = now;
    bool polled = s->dev->caps & DP_CAP_POLLED_TARGET; /* there is no new room until the client polls */
    if (dp_qp_broken(s->qp) || (!polled && now - *since > POST_PATIENCE_NS))
        return DP_PROTOCOL;
    uint32_t room = s->cap_pending - s->n_pending;
    int n = room ? dp_cq_poll(s->cq, s->pending + s->n_pending, (int)room) : 0;
    if (n < 0)
        return DP_FATAL;
    s->n_pending += (uint32_t)n;
    if (polled && n == 0 && now - *since > POLLED_STEP_NS) {
        dp_cq_wait(s->cq, POLLED_STEP_NS);
        dp_qp_probe(s->qp);
    }
    dp_cpu_pause();
    return DP_OK;
}

static int post_write(dp_server *s, const void *data, uint64_t size, uint64_t raddr) {
    const uint8_t *p = data;
    int64_t since = 0;
    while (size) {
        uint32_t part = size < s->dev->max_msg ? (uint32_t)size : s->dev->max_msg;
        dp_sge sge = {p, part, s->staging ? s->staging->lkey : 0};
        int st = dp_post_write(s->qp, &sge, 1, raddr, s->client.rkey, 0, 0);
        if (st == DP_BUSY) {
            if ((st = make_room(s, &since)))
                return st;
            continue;
        }
        if (st)
            return st;
        p += part;
        raddr += part;
        size -= part;
    }
    return DP_OK;
}

/* Posts the last message of a reply after a first attempt found no room. */
static __attribute__((noinline, cold)) int post_later(dp_server *s, const dp_sge *sge, int n, uint64_t at, uint32_t imm) {
    int64_t since = 0;
    int st;
    do
        st = make_room(s, &since);
    while (!st && (st = dp_post_write_imm(s->qp, sge, n, s->client.addr + at, s->client.rkey, imm, 0, s->more)) == DP_BUSY);
    return st;
}

/* Posts the last message of a reply. */
static ALWAYS_INLINE int post_last(dp_server *s, const dp_sge *sge, int n, uint64_t at, uint32_t imm) {
    int st = dp_post_write_imm(s->qp, sge, n, s->client.addr + at, s->client.rkey, imm, 0, s->more);
    return __builtin_expect(st != DP_BUSY, 1) ? st : post_later(s, sge, n, at, imm);
}

/* Sends a reply without a header: a result, to its place at offset `at`. */
static ALWAYS_INLINE int post_bare(dp_server *s, uint32_t slot, uint32_t call_id, uint64_t at, const void *data,
                            uint32_t size) {
    dp_sge sge = {data, size, 0};
    if (s->staging && size > s->qp->max_inline) {
        sge = (dp_sge){s->out + at, size, s->staging->lkey};
        if (data != sge.addr)
            memcpy(s->out + at, data, size);
    }
    return post_last(s, &sge, size != 0, at, DP_IMM_BARE | dp_imm(slot, call_id));
}

/* Sends the reply header and, unless the result is in the bulk area or in shared memory, `size` bytes of payload at `data`. */
static int post_reply(dp_server *s, uint32_t slot, const dp_reply *h, const void *data, uint32_t size) {
    uint64_t at = dp_slot_payload(&s->layout, slot);
    uint64_t words[2];
    dp_reply_pack(words, h);
    dp_sge sge[2] = {{words, DP_REPLY_SIZE, 0}, {data, size, 0}};
    int n = size ? 2 : 1;
    if (s->staging && DP_REPLY_SIZE + size > s->qp->max_inline) {
        uint8_t *place = s->out + at;
        if (size && data != place)
            memcpy(place, data, size);
        memcpy(place - DP_REPLY_SIZE, words, DP_REPLY_SIZE);
        sge[0] = (dp_sge){place - DP_REPLY_SIZE, DP_REPLY_SIZE + size, s->staging->lkey};
        n = 1;
    }
    return post_last(s, sge, n, at - DP_REPLY_SIZE, dp_imm(slot, h->call_id));
}

/* ---- requests ---- */

/* Returns the call id that ends in the immediate's tag: that of the slot's last request, or a later one. */
static inline uint32_t call_id_of(const dp_request *told, uint32_t imm) {
    return told->call_id + ((dp_imm_tag(imm) - told->call_id) & 0xffff);
}

/* Reports whether a message whose tag is that of the slot's last request repeats this request. The parts of a call have the same id. */
static __attribute__((noinline, cold)) bool is_repeated(const dp_server *s, uint32_t slot, uint32_t imm) {
    const dp_request *told = &s->headers[slot];
    if (told->generation != s->client.generation || told->flags & DP_REQ_PARTS)
        return false;
    if (dp_imm_bare(imm))
        return true;
    /* After DP_IMM_TAGS calls the tag is the same. If another request's header is in the slot already, this message came without one. */
    uint32_t id = dp_request_load((const uint8_t *)s->requests->addr + dp_slot_payload(&s->layout, slot) - DP_REQ_LONG).call_id;
    return id == told->call_id || (id & 0xffff) != dp_imm_tag(imm);
}

/* For a completion whose tag differs from that of the header in its slot. The header belongs to another request, whose completion has
 * not arrived yet. It must be neither kept nor answered. */
static __attribute__((noinline, cold)) int wrong_header(const dp_server *s, const dp_request *told, uint32_t imm, dp_request *h) {
    *h = (dp_request){.generation = s->client.generation, .call_id = call_id_of(told, imm)};
    return DP_BAD_REQUEST;
}

/* Reads and checks the header of the request in `slot`; a bare request repeats an earlier header. The header is copied once, and the
 * copy is checked and kept. 0, or the status to refuse with. A refusal is addressed to the call that the immediate names. */
static inline int read_request(dp_server *s, uint32_t slot, const dp_wc *wc, dp_request *h) {
    const dp_layout *l = &s->layout;
    dp_request *told = &s->headers[slot];
    uint32_t head, where;
    if (__builtin_expect(dp_imm_bare(wc->imm), 1)) {
        head = 0;
        /* Copy before the stores: a copy after them would wait until they have left the store buffer. */
        *h = dp_request_load(told);
        told->call_id = h->call_id = call_id_of(h, wc->imm);
        told->size = h->size = wc->byte_len;
        where = h->flags & (DP_REQ_BULK | DP_REQ_PLACED | DP_REQ_PARTS);
        if (where)
            return DP_BAD_REQUEST; /* bulk ranges and places are good for one call */
    } else {
        *h = dp_request_load((const uint8_t *)s->requests->addr + dp_slot_payload(l, slot) - DP_REQ_LONG);
        if (__builtin_expect((h->call_id & 0xffff) != dp_imm_tag(wc->imm), 0))
            return wrong_header(s, told, wc->imm, h);
        *told = *h;
        where = h->flags & (DP_REQ_BULK | DP_REQ_PLACED | DP_REQ_PARTS);
        head = !where ? DP_REQ_SHORT : where & (DP_REQ_PLACED | DP_REQ_PARTS) ? DP_REQ_KEYED : DP_REQ_LONG;
    }
    /* Where no header has come, generation is 0, which no channel has. */
    if (h->generation != s->client.generation ||
        (h->flags & ~(DP_REQ_BULK | DP_REQ_PLACED | DP_REQ_PARTS | DP_REQ_EXCLUSIVE | DP_REQ_BATCH)))
        return DP_BAD_REQUEST;
    if (__builtin_expect(where & DP_REQ_PARTS, 0)) {
        if ((h->flags != DP_REQ_PART_IN && h->flags != DP_REQ_PART_OUT) || wc->byte_len != head)
            return DP_BAD_REQUEST;
        return h->function < s->n_functions && h->then <= s->n_functions ? DP_OK : DP_NO_FUNCTION; /* dp_serve_parts.c checks the rest */
    }
    if (where & (DP_REQ_BULK_IN | DP_REQ_PLACED_IN)) {
        uint64_t at = (uint64_t)h->in_offset * DP_BULK_UNIT;
        if (wc->byte_len != head || (where & DP_REQ_BULK_IN && (at > l->bulk || h->size > l->bulk - at)))
            return DP_BAD_REQUEST;
    } else if (h->size > l->eager || wc->byte_len != head + h->size) {
        return DP_BAD_REQUEST;
    }
    if (where & (DP_REQ_BULK_OUT | DP_REQ_PLACED_OUT)) {
        uint64_t at = (uint64_t)h->out_offset * DP_BULK_UNIT;
        if (where & DP_REQ_BULK_OUT && (at > l->bulk || h->capacity > l->bulk - at))
            return DP_BAD_REQUEST;
    } else if (h->capacity > l->eager) {
        return DP_BAD_REQUEST;
    }
    return h->function < s->n_functions ? DP_OK : DP_NO_FUNCTION; /* execute_chain() checks h->then */
}

/* The word before the long form of a request's header. */
static uint64_t first_word(const dp_server *s, uint32_t slot) {
    return *(const volatile uint64_t *)((const uint8_t *)s->requests->addr + dp_slot_payload(&s->layout, slot) - DP_REQ_KEYED);
}

/* Finds the shared memory of the payload and of the result of a request with a placed flag. *args is not changed if the payload is not
 * placed, and *result is NULL if the result is not. The payload is mapped read-only. 0, or the status to refuse with. */
static __attribute__((noinline)) int find_places(dp_server *s, uint32_t slot, const dp_request *h, void **args, uint8_t **result) {
    uint64_t keys = first_word(s, slot);
    bool in = h->flags & DP_REQ_PLACED_IN, out = h->flags & DP_REQ_PLACED_OUT;
    if ((in && h->flags & DP_REQ_BULK_IN) || (out && h->flags & DP_REQ_BULK_OUT))
        return DP_BAD_REQUEST;
    if (in)
        *args = dp_qp_shared_ptr(s->qp, (uint32_t)keys, (uint64_t)h->in_offset * DP_BULK_UNIT, h->size, DP_SHARED_READ);
    if (out)
        *result = dp_qp_shared_ptr(s->qp, (uint32_t)(keys >> 32), (uint64_t)h->out_offset * DP_BULK_UNIT, h->capacity, DP_SHARED_WRITE);
    if (in && out) /* the second search may have unmapped what the first one found */
        *args = dp_qp_shared_ptr(s->qp, (uint32_t)keys, (uint64_t)h->in_offset * DP_BULK_UNIT, h->size, DP_SHARED_READ | DP_SHARED_KNOWN);
    return (in && !*args) || (out && !*result) ? DP_UNSUPPORTED : DP_OK;
}

/* ---- functions ---- */

/* Lets the call fail with a text of the worker. */
static __attribute__((noinline, cold, format(printf, 2, 3))) void fail_text(dp_invocation *inv, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(inv->message, DP_FAILURE_TEXT + 1, format, ap);
    va_end(ap);
    inv->failed = 1;
    inv->code = 0;
    inv->message_len = n < 0 ? 0 : n < DP_FAILURE_TEXT ? (uint32_t)n : DP_FAILURE_TEXT;
}

/* A function that returns more than its capacity asks for more room. It may have written beyond the capacity, so the guard is not checked. */
static __attribute__((noinline, cold)) void fail_overrun(dp_invocation *inv, uint32_t size) {
    fail_text(inv, "it wrote beyond the %u bytes of room for its result, and returned %u: write at most rfaas_result_capacity() bytes",
              inv->capacity, size);
}

typedef struct outcome {
    int status;
    uint32_t size;
    uint8_t *res;
    uint64_t at; /* offset of the result's place in the client's region */
    bool in_place;
    bool placed; /* res is neither in the client's region nor scratch */
} outcome;

/* Runs a function whose result has `room` bytes at res, of which the caller accepts inv->capacity. Returns the result's size. */
static ALWAYS_INLINE uint32_t run(dp_server *s, uint32_t function, void *args, uint32_t size, uint8_t *res, uint64_t room, dp_invocation *inv) {
    inv->room = room > UINT32_MAX ? UINT32_MAX : (uint32_t)room;
    inv->failed = 0;
    inv->message_len = 0;
    current_invocation = inv;
    bool guarded = set_guard(res, inv->capacity, room);
    __atomic_store_n(&s->stats->running, (s->stats->calls + 1) << 16 | function, __ATOMIC_RELAXED);
    uint32_t got = s->functions[function](args, size, res);
    current_invocation = NULL;
    if (__builtin_expect(guarded && guard_damaged(res, inv->capacity) && got <= inv->capacity, 0))
        fail_overrun(inv, got);
    s->stats->calls++;
    return got;
}

/* Runs the function that makes the result. It writes directly to the result's place if no other result lies behind it (the client says
 * so), and otherwise to scratch memory, so that a result larger than announced damages nothing. place: another place for the result,
 * with `place_room` bytes, or NULL. */
static ALWAYS_INLINE void execute(dp_server *s, uint32_t slot, const dp_request *h, uint32_t function, void *args, uint32_t size, uint8_t *place,
                           uint64_t place_room, dp_invocation *inv, outcome *o) {
    const dp_layout *l = &s->layout;
    o->at = h->flags & DP_REQ_BULK_OUT ? dp_bulk_at(l, h->out_offset) : dp_slot_payload(l, slot);
    o->in_place = (h->flags & DP_REQ_EXCLUSIVE) && h->capacity > IN_PLACE_MIN;
    o->res = o->in_place ? s->out + o->at : s->scratch;
    uint64_t room = o->in_place ? dp_layout_reply(l) - o->at : s->scratch_size; /* nothing else is behind the bulk area */
    o->placed = place != NULL;
    if (__builtin_expect(o->placed, 0)) {
        o->res = place;
        room = place_room;
    }
    inv->capacity = h->capacity;
    o->size = run(s, function, args, size, o->res, room, inv);
    s->stats->bytes_in += h->size;
    if (__builtin_expect(inv->failed != 0, 0)) {
        s->stats->failed++;
        o->status = DP_FUNCTION_FAILED;
    } else if (__builtin_expect(o->size > h->capacity, 0)) {
        s->stats->failed++;
        o->status = DP_RESULT_TOO_LARGE;
    } else {
        s->stats->bytes_out += o->size;
        o->status = DP_OK;
    }
}

/* ---- chains ---- */

/* Notes in the client's slot that the second function begins. Without room in the send queue it leaves this out: only an error's text
 * depends on it. */
static void note_second(dp_server *s, uint32_t slot, uint32_t call_id) {
    dp_sge sge = {&call_id, DP_SLOT_NOTE, 0};
    dp_post_write(s->qp, &sge, 1, s->client.addr + (uint64_t)slot * s->layout.stride, s->client.rkey, 0, 0);
}

/* Runs the first function of a chain. Returns the size of its result, which is in s->between, or sets inv->failed. */
static uint32_t run_first(dp_server *s, const dp_request *h, void *args, dp_invocation *inv) {
    uint64_t most = s->layout.eager > s->layout.bulk ? s->layout.eager : s->layout.bulk;
    inv->which = DP_CHAIN_FIRST;
    inv->capacity = most > UINT32_MAX ? UINT32_MAX : (uint32_t)most;
    if (!s->between && !(s->between = dp_server_scratch(s->scratch_size))) {
        fail_text(inv, "there is no memory for a result of up to %u bytes, which the second function would get: lease more memory, or a smaller bulk area",
                  inv->capacity);
        return 0;
    }
    uint32_t got = run(s, h->function, args, h->size, s->between, s->scratch_size, inv);
    if (!inv->failed && got > inv->capacity)
        fail_text(inv, "its result has %u bytes, and in this lease a chain passes on at most %u: lease a larger bulk area", got, inv->capacity);
    return got;
}

/* execute() for a chain. Its second function gets what the first one has returned. */
static __attribute__((noinline)) void execute_chain(dp_server *s, uint32_t slot, const dp_request *h, void *args, uint8_t *place,
                                                    uint64_t place_room, dp_invocation *inv, outcome *o) {
    o->size = 0;
    o->placed = false;
    if (h->then > s->n_functions) {
        s->stats->refused++;
        o->status = DP_NO_FUNCTION;
        return;
    }
    uint32_t got = run_first(s, h, args, inv);
    if (inv->failed) {
        s->stats->failed++;
        s->stats->bytes_in += h->size;
        o->status = DP_FUNCTION_FAILED;
        return;
    }
    note_second(s, slot, h->call_id);
    inv->which = DP_CHAIN_SECOND;
    execute(s, slot, h, h->then - 1, s->between, got, place, place_room, inv, o);
}

/* Answers by the queue pair when reply() does not. */
static __attribute__((noinline)) int reply_any(dp_server *s, uint32_t slot, const dp_request *h, dp_invocation *inv, outcome *o) {
    dp_reply r = {h->generation, h->call_id, o->status, o->size};
    if (o->status == DP_FUNCTION_FAILED) {
        r.size = dp_failure_message(inv->message, inv->message_len, inv->code, h->then ? inv->which : DP_CHAIN_NONE, s->layout.eager);
        return post_reply(s, slot, &r, inv->message, r.size);
    }
    if (o->status || o->placed)
        return post_reply(s, slot, &r, NULL, 0);
    if (s->staging && !o->in_place) {
        memcpy(s->out + o->at, o->res, o->size);
        o->res = s->out + o->at;
    }
    int st = post_write(s, o->res, o->size, s->client.addr + o->at);
    return st ? st : post_reply(s, slot, &r, NULL, 0);
}

/* Answers by the queue pair. */
static ALWAYS_INLINE int reply(dp_server *s, uint32_t slot, const dp_request *h, dp_invocation *inv, outcome *o) {
    if (__builtin_expect(!o->status && !o->placed && o->size <= s->dev->max_msg, 1))
        return post_bare(s, slot, h->call_id, o->at, o->res, o->size);
    return reply_any(s, slot, h, inv, o);
}

/* ---- the mailbox ---- */

static inline void post_mailbox(dp_server *s, uint64_t *where, uint32_t call_id, int status, uint32_t size) {
    /* Release pairs with the acquire in the client's take_mailbox(). */
    __atomic_store_n(where, dp_mailbox_reply(call_id, status, size), __ATOMIC_RELEASE);
    dp_qp_notify(s->qp);
}

static int answer_mailbox(dp_server *s, uint64_t word);

/* Serves the request in the mailbox if there is a new one: 1 served, 0 none, negative: the status that ends the server. */
static inline int take_mailbox(dp_server *s) {
    if (!s->mailbox)
        return 0;
    /* Acquire pairs with the release in the client's post_mailbox(). */
    uint64_t word = __atomic_load_n(&s->mailbox->request, __ATOMIC_ACQUIRE);
    if (word == s->mailbox_seen)
        return 0;
    s->mailbox_seen = word;
    return answer_mailbox(s, word);
}

/* The first spins after a request whose payload did not fit into the request's line. The next request is probably similar, and one
 * look per pause finds it sooner than the whole loop. A request in a single line is different: a look that comes too early takes the
 * line from the client while it writes. */
static inline void spin_for_mailbox(const dp_server *s) {
    const dp_cq *cq = s->cq;
    if (!s->mailbox || dp_mailbox_size(s->mailbox_seen) <= DP_MAILBOX_PAYLOAD || s->cfg.mode == DP_WAIT_WARM || s->waiter.shared_until ||
        !cq->peek)
        return;
    for (uint32_t spins = 0; spins < DP_SPINS_PER_LOOK; spins++) {
        if (__atomic_load_n(&s->mailbox->request, __ATOMIC_RELAXED) != s->mailbox_seen ||
            (uint32_t)__atomic_load_n(cq->peek, __ATOMIC_RELAXED) == cq->peek_value)
            return;
        dp_cpu_pause();
    }
}

static int answer_mailbox(dp_server *s, uint64_t word) {
    dp_mailbox *m = s->mailbox;
    uint64_t sizes = dp_mailbox_predict(*(const volatile uint64_t *)&m->sizes, &s->mailbox_sizes);
    uint64_t what = dp_mailbox_predict((uint32_t)word, &s->mailbox_what);
    uint32_t slot = dp_mailbox_slot(sizes);
    dp_request h = {.generation = dp_mailbox_generation(sizes), .call_id = dp_mailbox_call_id(word),
                    .size = dp_mailbox_size(what), .capacity = dp_mailbox_capacity(sizes),
                    .function = (uint16_t)dp_mailbox_function(what), .flags = DP_REQ_EXCLUSIVE};
    bool large = dp_mailbox_large(what), in_line = h.capacity <= DP_MAILBOX_RESULT;
    bool in_slot = large && h.capacity > DP_MAILBOX_PAIR;
    int refuse = h.generation != s->client.generation || h.size > dp_mailbox_most(large, s->layout.eager) || h.capacity > s->layout.eager ||
                         slot >= s->layout.depth
                     ? DP_BAD_REQUEST
                 : h.function < s->n_functions ? DP_OK
                                               : DP_NO_FUNCTION;
    uint64_t *reply_at = in_line ? &m->reply : in_slot ? (uint64_t *)(void *)(s->out + dp_layout_reply(&s->layout)) : &m->long_reply;
    if (__builtin_expect(refuse != DP_OK, 0)) {
        s->stats->refused++;
        post_mailbox(s, reply_at, h.call_id, refuse, 0);
        return 1;
    }
    void *args = dp_mailbox_payload(m, h.size, large, (uint8_t *)s->requests->addr + dp_slot_payload(&s->layout, slot));
    if (h.size <= DP_MAILBOX_PAYLOAD) {
        s->mailbox_args[0] = *(const volatile uint64_t *)&m->payload[0];
        s->mailbox_args[1] = *(const volatile uint64_t *)&m->payload[1];
        args = s->mailbox_args;
    }
    dp_invocation inv;
    outcome o;
    execute(s, slot, &h, h.function, args, h.size, NULL, 0, &inv, &o);
    if (o.status || o.size > (in_slot ? DP_MAILBOX_RESULT_MAX : DP_MAILBOX_SMALL)) {
        int st = reply(s, slot, &h, &inv, &o);
        return st ? st : 1;
    }
    uint8_t *result = in_slot ? s->out + o.at : m->more_result;
    if (in_line)
        dp_copy_small(m->result, o.res, o.size);
    else if (o.res != result)
        dp_copy_mailbox(result, o.res, o.size);
    post_mailbox(s, reply_at, h.call_id, DP_OK, o.size);
    return 1;
}

/* ---- the queue pair ---- */

/* Reports whether the reply of a call that has just ended may wait for the next reply. Only replies of brief calls may, because the next
 * function probably takes as long as this one. */
static bool brief(dp_server *s, const dp_request *h) {
    if (__builtin_expect(!(h->flags & DP_REQ_BATCH), 1))
        return false;
    int64_t now = dp_now_ns(), took = now - s->served_at;
    s->served_at = now;
    return took < BRIEF_NS;
}

/* ---- calls in parts ---- */

/* Writes a part of a result to the client's bulk area. */
static int post_part(dp_server *s, const uint8_t *data, uint32_t bytes, uint32_t out_offset) {
    uint64_t at = dp_bulk_at(&s->layout, out_offset);
    if (s->staging)
        data = memcpy(s->out + at, data, bytes);
    return post_write(s, data, bytes, s->client.addr + at);
}

/* Runs the function of a call whose payload is complete, and answers with the result, or with its size and first part. */
static int run_parts(dp_server *s, uint32_t slot, const dp_request *h, dp_parts *p) {
    bool large = h->capacity > s->layout.eager;
    dp_invocation inv;
    outcome o;
    uint8_t *place = large ? p->out.at : NULL;
    if (h->then)
        execute_chain(s, slot, h, p->in.at, place, p->out.size, &inv, &o);
    else
        execute(s, slot, h, h->function, p->in.at, h->size, place, p->out.size, &inv, &o);
    if (!large || o.status) {
        dp_parts_done(p);
        return reply(s, slot, h, &inv, &o);
    }
    uint32_t most = dp_part_max(s->layout.bulk), first = o.size < most ? o.size : most;
    int st = post_part(s, o.res, first, h->out_offset);
    if (first == o.size)
        dp_parts_done(p);
    else
        dp_parts_ran(p, o.size);
    return st ? st : reply(s, slot, h, &inv, &o);
}

static __attribute__((noinline, cold)) int handle_part(dp_server *s, uint32_t slot, const dp_request *h) {
    dp_parts *p = &s->parts[slot];
    dp_reply r = {h->generation, h->call_id, DP_OK, 0};
    uint64_t word = first_word(s, slot);
    if (h->flags & DP_REQ_PART_OUT) {
        r.status = dp_parts_give(s, slot, h, word);
        uint32_t offset = (uint32_t)word, bytes = (uint32_t)(word >> 32);
        if (!r.status) {
            int st = post_part(s, p->out.at + offset, bytes, h->out_offset);
            if (st)
                return st;
            r.size = bytes;
            if (offset + bytes == p->total)
                dp_parts_done(p);
        }
    } else {
        r.status = dp_parts_take(s, slot, h, word);
        if (!r.status && p->got == p->size)
            return run_parts(s, slot, h, p);
    }
    s->stats->refused += r.status != DP_OK;
    return post_reply(s, slot, &r, NULL, 0);
}

static __attribute__((noinline, cold)) int move(dp_server *s, uint32_t slot, const dp_request *h, uint32_t arrived) {
    uint32_t size;
    dp_reply r = {h->generation, h->call_id, dp_server_move(s, slot, h, arrived, &size), 0};
    if (r.status) {
        s->stats->refused++;
        return post_reply(s, slot, &r, NULL, 0);
    }
    int st = post_bare(s, slot, h->call_id, dp_slot_payload(&s->layout, slot), s->scratch, size);
    if (!st)
        dp_server_moved(s);
    return st;
}

/* others: more requests have arrived. */
static int handle(dp_server *s, const dp_wc *wc, bool others) {
    if (wc->status)
        return wc->qp != s->qp ? DP_OK : wc->status == DP_PEER_GONE ? DP_PEER_GONE : DP_CONNECTION;
    if (wc->op != DP_OP_RECV_IMM)
        return DP_OK;
    uint32_t slot = dp_imm_slot(wc->imm);
    if (slot >= s->layout.depth)
        return DP_PROTOCOL; /* there is no place to which a refusal could go */
    /* Post the receive again before the reply, because the client may call again as soon as it has the reply. */
    int st = s->qp->reposts ? DP_OK : dp_post_recv(s->qp, 0);
    if (st)
        return st;
    /* A repeated request is neither executed nor answered: its answer could meet that of the slot's next call. */
    if (__builtin_expect(dp_imm_tag(wc->imm) == (s->headers[slot].call_id & 0xffff), 0) && is_repeated(s, slot, wc->imm)) {
        s->stats->refused++;
        return DP_OK;
    }
    dp_request h;
    int refuse = read_request(s, slot, wc, &h);
    void *args = (uint8_t *)s->requests->addr +
                 (h.flags & DP_REQ_BULK_IN ? dp_bulk_at(&s->layout, h.in_offset) : dp_slot_payload(&s->layout, slot));
    uint8_t *place = NULL;
    if (__builtin_expect(!refuse && h.flags & DP_REQ_PLACED, 0))
        refuse = find_places(s, slot, &h, &args, &place);
    if (__builtin_expect(refuse, 0)) {
        if (h.flags == DP_REQ_MOVE && refuse == DP_BAD_REQUEST)
            return move(s, slot, &h, wc->byte_len);
        s->stats->refused++;
        dp_reply r = {h.generation, h.call_id, refuse, 0};
        return post_reply(s, slot, &r, NULL, 0);
    }
    if (__builtin_expect(h.flags & DP_REQ_PARTS, 0))
        return handle_part(s, slot, &h);
    dp_invocation inv;
    outcome o;
    uint64_t room = h.capacity; /* without a guard, because the memory behind belongs to the program */
    if (__builtin_expect(h.then != 0, 0))
        execute_chain(s, slot, &h, args, place, room, &inv, &o);
    else
        execute(s, slot, &h, h.function, args, h.size, place, room, &inv, &o);
    s->more = brief(s, &h) && others ? DP_MORE : 0;
    st = reply(s, slot, &h, &inv, &o);
    s->more = 0;
    return st;
}

/* ---- the loop ---- */

/* Handles what was polled; 0 or the status that ends the server. */
static int handle_all(dp_server *s, const dp_wc *wc, int n) {
    for (int i = 0; i < n; i++) {
        int st = handle(s, &wc[i], i + 1 < n);
        if (st)
            return st;
    }
    while (s->n_pending) { /* arrived while a reply waited for room; handling may add more behind it */
        dp_wc next = s->pending[0];
        memmove(s->pending, s->pending + 1, --s->n_pending * sizeof next);
        int st = handle(s, &next, s->n_pending > 0);
        if (st)
            return st;
    }
    return DP_OK;
}

static int idle(dp_server *s) {
    dp_waiter *w = &s->waiter;
    int what = dp_waiter_spin(w);
    if (what == DP_SPIN_ON)
        return DP_OK;
    if (w->now >= w->probe_at || __atomic_load_n(&s->look, __ATOMIC_RELAXED)) {
        w->probe_at = w->now + DP_PROBE_EVERY_NS;
        __atomic_store_n(&s->look, false, __ATOMIC_SEQ_CST); /* before the probe, which may miss what comes now */
        dp_qp_probe(s->qp);
    }
    if (what == DP_SPIN_LOOK)
        return DP_OK;
    if (dp_cq_arm(s->cq))
        return DP_OK; /* nothing would end the wait */
    dp_wc wc[POLL_BATCH];
    int n = dp_cq_poll(s->cq, wc, POLL_BATCH);
    int mailbox = take_mailbox(s);
    if (mailbox < 0)
        return mailbox;
    if (n || mailbox || dp_qp_broken(s->qp) || __atomic_load_n(&s->stop, __ATOMIC_ACQUIRE) || __atomic_load_n(&s->look, __ATOMIC_ACQUIRE)) {
        dp_cq_disarm(s->cq);
        return n < 0 ? DP_FATAL : handle_all(s, wc, n);
    }
    s->stats->blocked_waits++;
    bool watched = __atomic_load_n(&s->watched, __ATOMIC_ACQUIRE) == s->qp; /* not after DP_REQ_MOVE */
    return dp_cq_wait(s->cq, watched ? DP_BLOCK_WATCHED_NS : DP_BLOCK_MAX_NS);
}

int dp_server_run(dp_server *s) {
    dp_wc wc[POLL_BATCH];
    int met = s->unconnected ? dp_server_meet(s) : DP_OK;
    if (met)
        return met == DP_CANCELLED ? DP_OK : met;
    dp_waiter_expect(&s->waiter);
    for (;;) {
        dp_waiter_begin(&s->waiter);
        if (s->waiter.mode == DP_WAIT_HOT && !s->waiter.shared_until)
            dp_cq_promise_hot(s->cq, true);
        int n = 0, mailbox;
        spin_for_mailbox(s);
        while ((mailbox = take_mailbox(s)) == 0 && (n = dp_cq_poll(s->cq, wc, POLL_BATCH)) == 0) {
            int32_t stop = __atomic_load_n(&s->stop, __ATOMIC_RELAXED);
            if (__builtin_expect(stop, 0) && dp_server_obey(s, stop))
                return DP_OK;
            int broken = dp_qp_broken(s->qp);
            if (broken)
                return broken;
            int st = idle(s);
            if (st == DP_CANCELLED)
                return DP_OK;
            if (st)
                return dp_qp_broken(s->qp) ? dp_qp_broken(s->qp) : st;
        }
        dp_waiter_end(&s->waiter);
        /* If requests have arrived by the queue pair, a request in the mailbox is older, and the poll's acquire has made it visible.
         * Serve it first: its result may be made in place, where an overrun must not reach a later call's result. */
        if (n > 0)
            mailbox = take_mailbox(s);
        int st = mailbox < 0 ? mailbox : n < 0 ? DP_FATAL : n || s->n_pending ? handle_all(s, wc, n) : DP_OK;
        s->finish_at = 0;
        if (__builtin_expect(__atomic_load_n(&s->stop, __ATOMIC_RELAXED) == STOP_NOW, 0))
            return DP_OK;
        if (__builtin_expect(st != DP_OK, 0))
            return dp_qp_broken(s->qp) ? dp_qp_broken(s->qp) : st;
    }
}
