/* What every call goes through, for invoke.c, request.c, shared.c and map.c. Inline: the hot path is a few
 * loads, and functions of several files are not inlined into each other otherwise. */
#ifndef RFAAS_CALL_H
#define RFAAS_CALL_H

#include "client.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* ---- entering a lease ---- */

static inline bool usable(const rfaas_lease *l) {
    return LIKELY(l != NULL && __atomic_load_n(&l->magic, __ATOMIC_RELAXED) == RFAAS_LEASE_MAGIC) &&
           LIKELY(__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) == RFAAS_STATE_UP);
}

/* Names the calling thread: never 0 nor RFAAS_OWNER_NONE. */
static inline uintptr_t this_thread(void) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_thread_pointer)
    return (uintptr_t)__builtin_thread_pointer();
#else
    return (uintptr_t)pthread_self();
#endif
#else
    return (uintptr_t)pthread_self();
#endif
}

/* A program whose calls all end quickly never waits, and would not notice that the agent has ended. */
#define LOOK_EVERY 4096

#define RFAAS_OWNER_NONE 1 /* no thread's name: it is aligned */

static inline rfaas_owner *owner_of(const rfaas_lease *l) { return __atomic_load_n(&l->owner, __ATOMIC_RELAXED); }

/* Enters a lease that this thread owns, by plain loads and stores (threads.c). False: rfaas_api_join enters. */
static inline bool enter(rfaas_lease *l) {
    uintptr_t me = this_thread();
    rfaas_owner *o = owner_of(l);
    if (UNLIKELY(__atomic_load_n(&o->thread, __ATOMIC_RELAXED) != me))
        return false;
    __atomic_store_n(&o->busy, 1, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the compiler keeps the order; the processor is the barrier's matter */
    if (LIKELY(__atomic_load_n(&o->thread, __ATOMIC_RELAXED) == me)) {
        __atomic_store_n(&l->line->busy, 1, __ATOMIC_RELAXED); /* only now: an owner that is replaced must not write there */
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        return true;
    }
    __atomic_store_n(&o->busy, 0, __ATOMIC_RELEASE);
    return false;
}

/* Whether other threads may be inside, too. Constant for a thread that is, but for rfaas_api_share. */
static inline bool shared(const rfaas_lease *l) { return __atomic_load_n(&l->shared, __ATOMIC_RELAXED); }

/* Enters the lease if enter() has not: the thread becomes its owner, or one of several threads. Waits for an owner that is inside
 * and cannot be interrupted, until the deadline (0: for ever). RFAAS_OK, or the error is set. */
__attribute__((cold)) int rfaas_api_join(rfaas_lease *l, const char *op, int64_t deadline);
/* leave() of a shared lease. */
int rfaas_api_leave_shared(rfaas_lease *l, int status);

static inline int leave(rfaas_lease *l, int status) {
    if (UNLIKELY(shared(l)))
        return rfaas_api_leave_shared(l, status);
    if (UNLIKELY(++l->entered % LOOK_EVERY == 0))
        rfaas_agent_look();
    __atomic_store_n(&l->line->busy, 0, __ATOMIC_RELAXED);
    /* In this order: the agent's barrier lies between its store of SOON and its look at busy, so one of the two sees the other. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (UNLIKELY(__atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) == RFAAS_AGENT_DRAIN_SOON))
        rfaas_api_finish(l);
    __atomic_store_n(&owner_of(l)->busy, 0, __ATOMIC_RELEASE);
    return status;
}

/* Whether no call is started any more. Read after enter(): the agent, which sets it, passes a barrier for all processes and then
 * looks whether a thread is inside. */
static inline bool leaving(const rfaas_lease *l) {
    return __atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) != RFAAS_AGENT_DRAIN_NOT;
}

/* For operations that are no calls: RFAAS_OK and this thread is inside, or the error. */
static inline int rfaas_api_enter(rfaas_lease *l, const char *op) {
    if (!usable(l))
        return rfaas_api_bad_lease(l, op);
    return enter(l) ? RFAAS_OK : rfaas_api_join(l, op, 0);
}

/* ---- a lease that several threads use: threads.c ---- */

/* The unit of dp_turns that stands for a worker: the lane of its channel. */
static inline uint32_t unit_of(uint32_t worker) { return worker % DP_LANES_MAX; }

/* After DP_YIELD, by the owner, who is inside: if other threads want the lease it is shared from here on, and this thread
 * holds the unit (with the claim: DP_TURN_CALL), without one if `unit` is RFAAS_NO_UNIT. False: nobody does. */
#define RFAAS_NO_UNIT UINT32_MAX
bool rfaas_api_share(rfaas_lease *l, uint32_t unit, dp_turn_kind kind);

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
 * the last attempt's status. key: of the home where it was made (rfaas_api_move_shared). */
__attribute__((cold)) int rfaas_api_repeat(rfaas_lease *l, const call_plan *p, uint32_t worker, uint64_t key, int status, rfaas_function fn,
                                           const void *in, uint32_t in_size, void *out, uint32_t capacity, uint32_t *got);

/* The deadline that options set, as far as they are right; 0: none. */
__attribute__((cold)) int64_t rfaas_api_deadline_of(const rfaas_call_options *o);
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

/* ---- shared.c: for a shared lease, by a thread that is inside ---- */

/* An attempt of rfaas_invoke: chooses a worker, waiting for one that is free, replaces dead ones and waits for the reply. *at: the
 * worker. The error of this thread is set, also for DP_TOO_LARGE. */
int rfaas_api_invoke_shared(rfaas_lease *l, const call_plan *p, rfaas_function fn, const void *in, uint32_t in_size, void *out,
                            uint32_t capacity, uint32_t *got, uint32_t *at);
/* Goes on with a call of rfaas_invoke that yielded when its lease was shared; the thread holds and claims the unit. */
int rfaas_api_continue(rfaas_lease *l, const call_plan *p, rfaas_function fn, uint32_t worker, uint32_t slot, int64_t deadline,
                       void *out, uint32_t capacity, uint32_t *got);
/* Waits until a request has ended, and has it for this thread alone: its id is 0 then. `held`: the thread holds its unit. RFAAS_OK, or
 * the error is set (another thread has ended it; the lease was released). No unit is held afterwards. */
int rfaas_api_await(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op, bool held);
/* One look. RFAAS_OK and *done, then as rfaas_api_await. */
int rfaas_api_look(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op, bool *done);
/* Waits for a while for one of several requests: until the deadline, or it has ended, or others want its worker. */
void rfaas_api_wait_a_while(rfaas_lease *l, const rfaas_request_slot *r, int64_t deadline);
/* Gives a request up, which is this thread's alone afterwards. */
int rfaas_api_give_up_shared(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op);
/* rfaas_api_move unless another thread has done so since the home had this key. */
int rfaas_api_move_shared(rfaas_lease *l, const char *op, uint64_t key, int64_t deadline);
uint64_t rfaas_api_home_key(rfaas_lease *l);

/* ---- request.c ---- */

/* Takes the outcome of an ended call off its channel; gives up one that has not ended. */
void rfaas_api_collect(rfaas_lease *l, rfaas_request_slot *r);
void rfaas_api_abandon(rfaas_lease *l, rfaas_request_slot *r, int status);
/* The error that a request ended with another thread's, or before: why it cannot be waited for. */
int rfaas_api_bad_request(rfaas_request id, const char *op);

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

static inline uint32_t in_flight(const rfaas_lease *l, uint32_t worker) {
    return __atomic_load_n(&l->workers[worker].in_flight, __ATOMIC_RELAXED);
}

static inline void add_in_flight(rfaas_lease *l, uint32_t worker, uint32_t by) { /* by its lane's thread */
    __atomic_store_n(&l->workers[worker].in_flight, l->workers[worker].in_flight + by, __ATOMIC_RELAXED);
}

static inline uint32_t least_loaded(const rfaas_lease *l, uint32_t from) {
    uint32_t best = from;
    for (uint32_t i = 0, w = from; i < l->n_workers; i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        if (in_flight(l, w) < in_flight(l, best))
            best = w;
        if (in_flight(l, best) == 0)
            break;
    }
    return best;
}

/* Whether a failed attempt may be made again on another worker or on a new worker in the same place. */
static inline bool next_attempt(int status, dp_started started) {
    return started == DP_NOT_STARTED && (status == DP_BUSY || dp_status_class(status) == RFAAS_CLASS_CONNECTION);
}

#endif
