/* What every call goes through, for invoke.c, request.c and map.c. Inline: the hot path is a few
 * loads, and functions of several files are not inlined into each other otherwise. */
#ifndef RFAAS_CALL_H
#define RFAAS_CALL_H

#include "client.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* ---- entering a lease ---- */

static inline bool usable(const rfaas_lease *l) {
    return LIKELY(l != NULL && l->magic == RFAAS_LEASE_MAGIC) &&
           LIKELY(__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) == RFAAS_STATE_UP);
}

/* Notes that this thread is inside. A plain load and store: it finds most of the misuse and costs nothing. */
static inline bool enter(rfaas_lease *l) {
    if (UNLIKELY(__atomic_load_n(&l->line->busy, __ATOMIC_RELAXED)))
        return false;
    __atomic_store_n(&l->line->busy, 1, __ATOMIC_RELAXED);
    return true;
}

/* A program whose calls all end quickly never waits, and would not notice that the agent has ended. */
#define LOOK_EVERY 4096

static inline int leave(rfaas_lease *l, int status) {
    if (UNLIKELY(++l->entered % LOOK_EVERY == 0))
        rfaas_agent_look();
    __atomic_store_n(&l->line->busy, 0, __ATOMIC_RELAXED);
    /* In this order: the agent's barrier lies between its store of SOON and its look at busy, so one of the two sees the other. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (UNLIKELY(__atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) == RFAAS_AGENT_DRAIN_SOON))
        rfaas_api_finish(l);
    return status;
}

/* Whether no call is started any more. Read after enter(): the agent, which sets it, passes a barrier for all processes and then
 * looks whether a thread is inside. */
static inline bool leaving(const rfaas_lease *l) {
    return __atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) != RFAAS_AGENT_DRAIN_NOT;
}

__attribute__((cold)) int rfaas_api_wrong_thread(const char *op);

/* For operations that are no calls: RFAAS_OK and this thread is inside, or the error. */
static inline int rfaas_api_enter(rfaas_lease *l, const char *op) {
    if (!usable(l))
        return rfaas_api_bad_lease(l, op);
    return enter(l) ? RFAAS_OK : rfaas_api_wrong_thread(op);
}

static inline const char *function_name(const rfaas_lease *l, rfaas_function fn) {
    return fn < l->n_functions ? l->functions[fn] : "?";
}

/* The registered buffer that holds the whole payload, or NULL. */
static inline const dp_mem *buffer_of(const rfaas_lease *l, const void *in, size_t size) {
    for (const rfaas_buffer *b = l->buffers; UNLIKELY(b != NULL); b = b->next) {
        uintptr_t at = (uintptr_t)in - (uintptr_t)b->addr; /* wraps for what lies below */
        if (at < b->size && size <= b->size - at)
            return b->mem;
    }
    return NULL;
}

/* What a call's arguments come to. */
typedef struct call_plan {
    int64_t deadline; /* 0: none */
    int32_t worker;   /* RFAAS_ANY_WORKER or an index */
    uint32_t repeats;
    int64_t attempt; /* ns that one attempt may take; 0: no limit of its own */
    bool full_is_busy; /* a full worker that works is reason enough for RFAAS_BUSY: others' replacements are not waited for */
} call_plan;

/* Until when an attempt that begins now may last. */
static inline int64_t attempt_deadline(const call_plan *p) {
    if (LIKELY(!p->attempt))
        return p->deadline;
    int64_t until = dp_now_ns() + p->attempt;
    return p->deadline && p->deadline < until ? p->deadline : until;
}

/* A call that ended with an error (which is this thread's) is made again as often as its plan and status permit. Returns
 * the last attempt's status. */
__attribute__((cold)) int rfaas_api_repeat(rfaas_lease *l, const call_plan *p, uint32_t worker, int status, rfaas_function fn,
                                           const void *in, uint32_t in_size, void *out, uint32_t capacity, uint32_t *got);

/* Fills in the plan from options (not NULL) after checking them. */
int rfaas_api_plan_options(const rfaas_lease *l, const char *op, const rfaas_call_options *o, call_plan *p);
/* Why arguments are refused: function index, NULL with a size, too large. */
__attribute__((cold)) int rfaas_api_bad_call(rfaas_lease *l, const char *op, rfaas_function fn, const void *in,
                                             size_t in_size, const void *out, size_t capacity);
__attribute__((cold)) int rfaas_api_too_large(const rfaas_lease *l, const char *op, rfaas_function fn, size_t in_size,
                                              size_t capacity);
/* A result that was not taken: how large it is, and what there was room for. */
__attribute__((cold)) int rfaas_api_result_too_large(const rfaas_lease *l, const char *op, rfaas_function fn, uint32_t size,
                                                     uint32_t capacity);
/* Keeps what a function said when it failed: the error of this thread. */
__attribute__((cold)) void rfaas_api_keep_message(const rfaas_lease *l, rfaas_function fn, uint32_t worker,
                                                  const void *text, uint32_t size);

/* ---- request.c ---- */

/* Starts a call with arguments that were checked. The request is the caller's until rfaas_api_report or
 * rfaas_api_drop_request. */
int rfaas_api_start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in, uint32_t in_size,
                    void *out, size_t capacity, rfaas_request_slot **request);
/* Whether a request has ended, as far as is known without looking at the network. now: 0 when it has no deadline. */
bool rfaas_api_ended(rfaas_lease *l, rfaas_request_slot *r, int64_t now);
/* Sets *out_size and the error of an ended request, frees it and returns its status. */
int rfaas_api_report(rfaas_lease *l, rfaas_request_slot *r, const char *op, size_t *out_size);
/* Gives up a request, ended or not, and frees it. */
void rfaas_api_drop_request(rfaas_lease *l, rfaas_request_slot *r);

/* Sizes are 32 bits in a request header. A capacity above the lease's limit would be refused, although a caller
 * with a large buffer and a small result means no harm: it is cut to the limit. */
static inline uint32_t cut_capacity(const rfaas_lease *l, size_t capacity) {
    uint64_t limit = l->cfg.bulk > l->cfg.eager ? l->cfg.bulk : l->cfg.eager;
    if (limit > UINT32_MAX)
        limit = UINT32_MAX;
    return LIKELY(capacity <= limit) ? (uint32_t)capacity : (uint32_t)limit;
}

/* ---- choosing a worker ---- */

static inline uint32_t least_loaded(const rfaas_lease *l, uint32_t from) {
    uint32_t best = from;
    for (uint32_t i = 0, w = from; i < l->n_workers; i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        if (l->workers[w].in_flight < l->workers[best].in_flight)
            best = w;
        if (l->workers[best].in_flight == 0)
            break;
    }
    return best;
}

/* Whether a failed attempt may be made again on another worker or on a new worker in the same place. */
static inline bool next_attempt(int status, dp_started started) {
    return started == DP_NOT_STARTED && (status == DP_BUSY || dp_status_class(status) == RFAAS_CLASS_CONNECTION);
}

#endif
