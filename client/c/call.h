/* The steps that every call has, for invoke.c, request*.c, shared.c and map.c. They are inline functions because the hot path
 * is a few loads, and the compiler does not inline functions of other files. */
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

/* Identifies the calling thread. Never 0 or RFAAS_OWNER_NONE. */
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

/* A program whose calls all end quickly never waits. So every 4096th call looks for messages and for the end of the agent. */
#define LOOK_EVERY 4096

#define RFAAS_OWNER_NONE 1 /* identifies no thread, since thread pointers are aligned */

static inline rfaas_owner *owner_of(const rfaas_lease *l) { return __atomic_load_n(&l->owner, __ATOMIC_RELAXED); }

/* Enters a lease that this thread owns, by plain loads and stores (threads.c). Returns false if rfaas_api_join has to enter. */
static inline bool enter(rfaas_lease *l) {
    uintptr_t me = this_thread();
    rfaas_owner *o = owner_of(l);
    if (UNLIKELY(__atomic_load_n(&o->thread, __ATOMIC_RELAXED) != me))
        return false;
    __atomic_store_n(&o->busy, 1, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* orders the compiler; the other side's membarrier orders the processor */
    if (LIKELY(__atomic_load_n(&o->thread, __ATOMIC_RELAXED) == me)) {
        __atomic_store_n(&l->line->busy, 1, __ATOMIC_RELAXED); /* only now, because an earlier owner must not write it */
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        return true;
    }
    __atomic_store_n(&o->busy, 0, __ATOMIC_RELEASE);
    return false;
}

/* Reports whether several threads use the lease. For a thread inside the lease, only rfaas_api_share changes it. */
static inline bool shared(const rfaas_lease *l) { return __atomic_load_n(&l->shared, __ATOMIC_RELAXED); }

/* Enters the lease after enter() returned false. The thread becomes the owner, or one of the threads of a shared lease. Waits for an
 * owner that is inside and cannot be interrupted, until the deadline (0: without a limit). Sets the error if it fails. */
__attribute__((cold)) int rfaas_api_join(rfaas_lease *l, const char *op, int64_t deadline);
/* leave() for a shared lease. */
int rfaas_api_leave_shared(rfaas_lease *l, int status);

/* Ends the owner's use of a lease that no other thread uses. */
static inline int leave_owned(rfaas_lease *l, int status) {
    __atomic_store_n(&l->line->busy, 0, __ATOMIC_RELAXED);
    /* busy is cleared before draining is read. The agent stores SOON, passes a barrier and reads busy. So one of the two sees the
     * other's store. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (UNLIKELY(__atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) == RFAAS_AGENT_DRAIN_SOON))
        rfaas_api_finish(l);
    __atomic_store_n(&owner_of(l)->busy, 0, __ATOMIC_RELEASE);
    return status;
}

/* Leaves the lease. Every LOOK_EVERY-th time it looks at the agent. */
static inline int leave(rfaas_lease *l, int status) {
    if (UNLIKELY(shared(l)))
        return rfaas_api_leave_shared(l, status);
    uint32_t entered = __atomic_load_n(&l->entered, __ATOMIC_RELAXED) + 1; /* grow.c may change it meanwhile, to no effect */
    __atomic_store_n(&l->entered, entered, __ATOMIC_RELAXED);
    if (UNLIKELY(entered % LOOK_EVERY == 0))
        rfaas_api_look_leaving(l, status);
    return leave_owned(l, status);
}

/* leave() for an operation that is not a call and has no message for the agent. It is not counted. */
static inline int leave_uncounted(rfaas_lease *l, int status) { return shared(l) ? rfaas_api_leave_shared(l, status) : leave_owned(l, status); }

/* Returns the number of workers that the lease has. The calling thread may be outside the lease and need not hold a unit. */
static inline uint32_t rfaas_api_workers(const rfaas_lease *l) { return __atomic_load_n(&l->n_workers, __ATOMIC_RELAXED); }

/* Reports whether the lease starts no more calls. Read it after enter(): the agent sets it, passes a barrier on all processors and
 * then looks whether a thread is inside. */
static inline bool draining(const rfaas_lease *l) {
    return __atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) != RFAAS_AGENT_DRAIN_NOT;
}

/* Enters a lease for an operation that is not a call. After RFAAS_OK this thread is inside. */
static inline int rfaas_api_enter(rfaas_lease *l, const char *op) {
    if (!usable(l))
        return rfaas_api_bad_lease(l, op);
    return enter(l) ? RFAAS_OK : rfaas_api_join(l, op, 0);
}

/* ---- a lease that several threads use: threads.c ---- */

/* Enters the lease unless another thread owns it and is inside. It may become the owner. The deadline bounds a wait for an owner that has entered
 * meanwhile. */
bool rfaas_api_enter_if_free(rfaas_lease *l, const char *op, int64_t deadline);
/* Sets the number of workers. The caller owns the lease or holds all units, and then also those of the new workers. */
void rfaas_api_set_workers(rfaas_lease *l, uint32_t n);

/* The unit of dp_turns for a worker: the lane of its channel. */
static inline uint32_t unit_of(uint32_t worker) { return worker % DP_LANES_MAX; }

/* Called by the owner, inside the lease, after DP_YIELD. If another thread wants the lease, the lease is shared from then on and this
 * thread holds `unit`, unless that is RFAAS_NO_UNIT. With DP_TURN_CALL the thread also has the claim. Returns false if no
 * other thread wants the lease. */
#define RFAAS_NO_UNIT UINT32_MAX
bool rfaas_api_share(rfaas_lease *l, uint32_t unit, dp_turn_kind kind);

/* Returns "first, then second". It is valid until this thread's next error or name of a chain. */
__attribute__((cold)) const char *rfaas_api_chain_name(const rfaas_lease *l, rfaas_function chain);

static inline const char *function_name(const rfaas_lease *l, rfaas_function fn) {
    return fn < l->n_functions ? l->functions[fn] : dp_is_chain(fn) ? rfaas_api_chain_name(l, fn) : "?";
}

/* Returns the registration of the buffer that contains the whole payload, or NULL. */
static inline const dp_mem *buffer_of(const rfaas_lease *l, const void *in, size_t size) {
    for (const rfaas_buffer *b = l->buffers; UNLIKELY(b != NULL); b = b->next) {
        uintptr_t at = (uintptr_t)in - (uintptr_t)b->addr; /* wraps around for addresses below the buffer */
        if (at < b->size && size <= b->size - at)
            return b->mem;
    }
    return NULL;
}

/* The worker of this thread's last call that ended, plus 1; 0: none. */
extern _Thread_local int32_t rfaas_api_worker_of_call;

static inline void note_worker(uint32_t worker) { rfaas_api_worker_of_call = (int32_t)worker + 1; }
/* The call has run in this process. */
static inline void note_no_worker(void) { rfaas_api_worker_of_call = 0; }

/* The checked options of a call. */
typedef struct call_plan {
    int64_t deadline; /* 0: none */
    int32_t worker;   /* RFAAS_ANY_WORKER or an index */
    uint32_t repeats;
    int64_t attempt; /* longest time of one attempt, ns; 0: no limit */
    int64_t wait_until; /* when a call that has not started returns RFAAS_DEADLINE, after which the caller tries again. 0: never */
    bool kill;         /* RFAAS_CALL_KILL */
    bool in_place;        /* payload or result is in memory of rfaas_alloc, where workers of this node use it (buffer.c) */
    bool result_in_place; /* the result is */
    bool full_is_busy; /* return RFAAS_BUSY if a living worker is full, and do not wait for replacements of other workers */
    bool batch; /* dp_channel_batch; the caller owns the lease */
    size_t keep; /* rfaas_call_options.keep */
} call_plan;

/* Returns the deadline of an attempt that begins now. */
static inline int64_t attempt_deadline(const call_plan *p) {
    if (LIKELY(!p->attempt))
        return p->deadline;
    int64_t until = dp_now_ns() + p->attempt;
    return p->deadline && p->deadline < until ? p->deadline : until;
}

/* Returns the deadline of a call's waits before it starts. */
static inline int64_t start_deadline(const call_plan *p) {
    if (LIKELY(!p->wait_until))
        return p->deadline;
    return p->deadline && p->deadline < p->wait_until ? p->deadline : p->wait_until;
}

/* The checked arguments of a call. */
typedef struct rfaas_call_args {
    const call_plan *p;
    rfaas_function fn;
    const void *in;
    uint32_t in_size;
    uint32_t room; /* bytes of the result that the caller takes */
    void *out;
    rfaas_call_pieces *pieces; /* in place of in and out; NULL: those are contiguous */
} call_args;

/* ---- buffer.c ---- */

/* Checks the arguments of a call with RFAAS_CALL_IN_PLACE, and sets in_place and result_in_place of the plan. */
__attribute__((cold)) int rfaas_api_plan_in_place(rfaas_lease *l, const char *op, rfaas_function fn, call_plan *p, const void *in,
                                                  size_t in_size, const void *out, size_t capacity);
/* dp_channel_call_turn and dp_channel_submit_until for a plan with in_place. Where workers cannot use the memory in place, they copy it. */
int rfaas_api_call_in_place(const rfaas_lease *l, uint32_t w, const call_args *a, int64_t deadline, uint32_t *got, dp_started *started,
                            uint32_t *slot);
int rfaas_api_submit_in_place(const rfaas_lease *l, uint32_t w, const call_args *a, int64_t deadline, uint32_t *slot);

/* dp_channel_call_turn for any arguments. */
static inline int call_turn(const rfaas_lease *l, uint32_t w, const call_args *a, int64_t deadline, uint32_t *got, dp_started *started,
                            uint32_t *slot) {
    dp_channel *ch = l->workers[w].ch;
    if (UNLIKELY(a->pieces != NULL))
        return dp_channel_call_pieces(ch, a->fn, &a->pieces->in, a->in_size, &a->pieces->out, a->room, got, deadline, started, slot);
    if (UNLIKELY(a->p->in_place))
        return rfaas_api_call_in_place(l, w, a, deadline, got, started, slot);
    return dp_channel_call_turn(ch, a->fn, a->in, a->in_size, buffer_of(l, a->in, a->in_size), a->out, a->room, got, deadline, started,
                                slot);
}

/* dp_channel_finish for a result in one piece or in several. */
static inline int finish_call(dp_channel *ch, uint32_t slot, void *out, const rfaas_call_pieces *pieces, uint32_t *got,
                              dp_started *started) {
    if (UNLIKELY(pieces != NULL))
        return dp_channel_finish_pieces(ch, slot, &pieces->out, got, started);
    return dp_channel_finish(ch, slot, out, got, started);
}

/* Repeats a call that failed, as often as its plan and status permit. The error is this thread's. `key` names the grant in which
 * the call was made (rfaas_api_move_shared). Returns the status of the last attempt. */
__attribute__((cold)) int rfaas_api_repeat(rfaas_lease *l, const call_args *a, uint32_t worker, uint64_t key, int status, uint32_t *got);

/* Returns the deadline of options that were not checked yet; 0: none, or they are malformed. */
__attribute__((cold)) int64_t rfaas_api_deadline_of(const rfaas_call_options *o);
/* Fills in the plan from options (not NULL) after checking them. */
int rfaas_api_plan_options(const rfaas_lease *l, const char *op, const rfaas_call_options *o, call_plan *p);
/* Sets the error for arguments that are refused: a function index, NULL with a size, a size that is too large. */
__attribute__((cold)) int rfaas_api_bad_call(rfaas_lease *l, const char *op, rfaas_function fn, const void *in,
                                             size_t in_size, const void *out, size_t capacity);
__attribute__((cold)) int rfaas_api_too_large(const rfaas_lease *l, const char *op, rfaas_function fn, size_t in_size,
                                              size_t capacity);
/* Sets the error for a result larger than its capacity, which is not kept. p: the pieces of the call, or NULL. */
__attribute__((cold)) int rfaas_api_result_too_large(const rfaas_lease *l, const char *op, rfaas_function fn, uint32_t size,
                                                     uint32_t capacity, const rfaas_call_pieces *p);
/* Sets the thread's error to the message of a function that failed. */
__attribute__((cold)) void rfaas_api_keep_message(const rfaas_lease *l, rfaas_function fn, uint32_t worker,
                                                  const void *text, uint32_t size);

/* rfaas_invoke for checked arguments and a thread that is inside. *here: the function has run in this process. The error's text is set,
 * except for DP_RESULT_TOO_LARGE without *here. */
int rfaas_api_invoke(rfaas_lease *l, const call_args *a, uint32_t *got, bool *here);

/* ---- kept.c: results that are larger than the caller's memory ---- */

/* Adds memory behind the pieces of `out`, so that they have room for plan->keep bytes. Sets the error if it fails. */
int rfaas_api_keep_room(const rfaas_lease *l, const char *op, call_args *a, size_t capacity);
/* Returns RFAAS_OK if the result of a call that has succeeded fits into the caller's memory. Otherwise keeps it, and returns
 * RFAAS_RESULT_TOO_LARGE with the error set. */
int rfaas_api_keep(const rfaas_lease *l, const char *op, rfaas_function fn, const rfaas_call_pieces *p, uint32_t size);
/* Frees the thread's kept result, because a later call has ended with RFAAS_RESULT_TOO_LARGE and its result is not kept. */
void rfaas_api_forget_kept(void);

/* ---- pieces.c ---- */

/* The rest of rfaas_invoke and rfaas_iinvoke for a call with rfaas_call_options.keep. The arguments were checked. */
__attribute__((cold)) int rfaas_api_invoke_keeping(rfaas_lease *l, call_args *a, size_t capacity, size_t *out_size);
__attribute__((cold)) int rfaas_api_iinvoke_keeping(rfaas_lease *l, call_args *a, size_t capacity, rfaas_request *request);

/* ---- shared.c: for threads inside a shared lease ---- */

/* Makes one attempt of rfaas_invoke: waits for a free worker, replaces dead ones, calls, and waits for the reply. *at becomes the
 * worker. Sets the thread's error, also for DP_TOO_LARGE. */
int rfaas_api_invoke_shared(rfaas_lease *l, const call_args *a, uint32_t *got, uint32_t *at);
/* Continues an rfaas_invoke that yielded when its lease became shared. The thread holds the unit and has the claim. */
int rfaas_api_continue(rfaas_lease *l, const call_args *a, uint32_t worker, uint32_t slot, int64_t deadline, uint32_t *got);
/* Waits until a request has ended, and takes it for this thread: its id is 0 then. `held` says that the thread holds the request's
 * unit; afterwards it holds none. Fails if another thread has taken the request or the lease is released. */
int rfaas_api_await(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op, bool held);
/* rfaas_api_await without waiting. *done says whether the request has ended. If it has not, *due is its due_of(). */
int rfaas_api_look(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op, bool *done, int64_t *due);
/* Waits for one of several requests, for about a millisecond: until the deadline, the request's end, or another thread wants its worker. */
void rfaas_api_wait_a_while(rfaas_lease *l, const rfaas_request_slot *r, int64_t deadline);
/* Cancels a request and takes it for this thread. */
int rfaas_api_give_up_shared(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op);
/* No event announces a replaced worker. A thread that waits for something else checks this often. */
#define RFAAS_REPLACED_NS 1000000

/* Returns the sooner of a deadline (0: none) and `from` + ns. */
static inline int64_t rfaas_api_sooner(int64_t deadline, int64_t from, int64_t ns) {
    return !deadline || ns < deadline - from ? from + ns : deadline;
}

/* Reports whether the owner has workers that are being replaced. */
static inline bool rfaas_api_replacing(const rfaas_lease *l) {
    for (uint32_t i = 0; i < l->n_workers; i++)
        if (l->workers[i].replacing || l->workers[i].broken || l->workers[i].moving)
            return true;
    return false;
}

/* Waits until a slot may have become free, on the chosen worker or with RFAAS_ANY_WORKER on any, at most until `until` (0: no limit).
 * In a shared lease it waits on one lane, for about a millisecond; *turn selects the lane and is advanced. The caller is inside and
 * holds no unit. The lease may be shared afterwards. */
void rfaas_api_await_slot(rfaas_lease *l, int32_t worker, uint32_t *turn, int64_t until);
/* rfaas_api_await_slot for a thread that is not inside (shim.h). Returns at once if the lease has ended. */
void rfaas_api_enter_and_await_slot(rfaas_lease *l, int32_t worker, int64_t until);
/* Waits for a new grant and moves the lease to it. Registered buffers have other dp_mems afterwards. With RFAAS_LEASE_LOCAL it does not
 * wait for room: calls run in this process (RFAAS_AGENT_DRAIN_LOCAL) until there is a grant. The caller owns the lease or holds all units. */
int rfaas_api_move(rfaas_lease *l, const char *op, const call_plan *p);
/* Moves the lease (rfaas_api_move), unless another thread has moved it: then its grant no longer has this key. */
int rfaas_api_move_shared(rfaas_lease *l, const char *op, uint64_t key, const call_plan *p);
uint64_t rfaas_api_grant_key(rfaas_lease *l);

/* ---- local.c ---- */

/* Opens the lease's library in this process. */
int rfaas_api_local_load(rfaas_lease *l);
void rfaas_api_local_free(rfaas_lease *l);
/* Reports whether a lease with RFAAS_LEASE_LOCAL is opened although its search for workers ended with this status. */
bool rfaas_api_local_suits(const rfaas_lease *l, int status);
/* Prepares a lease for calls in this process and executes the init call. `why` is the reason. Functions get the same numbers as at
 * executors. */
int rfaas_api_local_open(rfaas_lease *l, const char *why);
/* Records the reason why calls run in this process. With `event`, also reports it to the program. */
void rfaas_api_local_because(rfaas_lease *l, const char *why, bool event);
/* Returns the bytes that local calls keep for a payload and for a result: the larger of `bulk` and `eager`. */
uint64_t rfaas_api_local_limit(const rfaas_lease *l);
/* Runs a function on this thread, in this process. *got is the size of its result, even if the result is too large. */
int rfaas_api_here(rfaas_lease *l, const char *op, const call_args *a, uint32_t *got);

/* ---- map.c ---- */

/* How rfaas_reduce combines the results of a map. */
typedef struct rfaas_fold {
    rfaas_combine_fn combine;
    void *arg;
} rfaas_fold;

/* rfaas_map that another thread can cancel by setting *cancelled and calling rfaas_api_interrupt. It then returns RFAAS_CANCELLED.
 * With a fold, `out` is the accumulator. */
int rfaas_api_map(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *out, size_t out_item, size_t count,
                  const rfaas_map_options *options, const rfaas_fold *fold, const uint32_t *cancelled);
/* rfaas_reduce, cancelled in the same way. */
int rfaas_api_reduce(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *accumulator, size_t out_item,
                     size_t count, int operation, int type, const rfaas_map_options *options, const uint32_t *cancelled);

/* ---- request_start.c ---- */

/* rfaas_iinvoke that waits at most wait_ns (0: no limit) before the call starts, for example for a new worker. Then it returns
 * RFAAS_DEADLINE, not started, and the caller may try again. For bindings whose calls can be cancelled (shim.h). */
int rfaas_api_iinvoke_for(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                          const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request);
/* rfaas_iinvokev with the same limit. */
int rfaas_api_iinvokev_for(rfaas_lease *l, rfaas_function fn, const rfaas_piece *in, size_t in_count, const rfaas_piece *out,
                           size_t out_count, const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request);
/* Starts a call with checked arguments. The caller owns the request until rfaas_api_report or rfaas_api_drop_request. */
int rfaas_api_start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in, uint32_t in_size,
                    void *out, size_t capacity, rfaas_request_slot **request);

/* rfaas_api_start with a payload and result in pieces. A started request owns args->pieces. */
int rfaas_api_start_pieces(rfaas_lease *l, const char *op, const call_args *args, rfaas_request_slot **request);

/* ---- request.c ---- */

/* Stores this thread's error in a request that has ended. */
void rfaas_api_keep_error(rfaas_request_slot *r);
/* rfaas_api_collect takes the outcome of an ended call from its channel. rfaas_api_abandon gives up a call that has not ended. */
void rfaas_api_collect(rfaas_lease *l, rfaas_request_slot *r);
void rfaas_api_abandon(rfaas_lease *l, rfaas_request_slot *r, int status);
/* Records whether the descriptor of the lease has become readable because this request ended. */
static inline void set_told(rfaas_request_slot *r, bool told) { __atomic_store_n(&r->told, told, __ATOMIC_RELAXED); }
/* Reports whether a shared lease has as many requests as it may have. */
bool rfaas_api_requests_full(rfaas_lease *l);
/* Sets the error that says why a request cannot be waited for. */
int rfaas_api_bad_request(rfaas_request id, const char *op);
/* Reports whether a request has ended, without polling the network. `now` is 0 if it has no deadline. */
bool rfaas_api_ended(rfaas_lease *l, rfaas_request_slot *r, int64_t now);
/* Sets *out_size and the thread's error from an ended request, frees the request and returns its status. */
int rfaas_api_report(rfaas_lease *l, rfaas_request_slot *r, const char *op, size_t *out_size);
/* Gives up a request, ended or not, and frees it. */
void rfaas_api_drop_request(rfaas_lease *l, rfaas_request_slot *r);

/* Returns the most bytes of a payload and of a result. */
static inline uint64_t carried(const rfaas_lease *l) {
    uint64_t limit = l->cfg.bulk > l->cfg.eager ? l->cfg.bulk : l->cfg.eager;
    return l->options.bulk_max > limit ? l->options.bulk_max : limit;
}

/* Sizes are 32 bits in a request header. A capacity above the lease's limit would be refused, although a caller
 * with a large buffer and a small result means no harm: it is cut to the limit. */
static inline uint32_t cut_capacity(const rfaas_lease *l, size_t capacity) {
    if (LIKELY(capacity <= l->cfg.eager))
        return (uint32_t)capacity;
    uint64_t limit = carried(l);
    if (limit > UINT32_MAX)
        limit = UINT32_MAX;
    return capacity <= limit ? (uint32_t)capacity : (uint32_t)limit;
}

/* Returns cut_capacity, or for a result in place the capacity itself, at most UINT32_MAX. */
static inline uint32_t room_of(const rfaas_lease *l, const call_plan *p, size_t capacity) {
    if (UNLIKELY(p->result_in_place))
        return capacity <= UINT32_MAX ? (uint32_t)capacity : UINT32_MAX;
    return cut_capacity(l, capacity);
}

/* ---- choosing a worker ---- */

static inline uint32_t in_flight(const rfaas_lease *l, uint32_t worker) {
    return __atomic_load_n(&l->workers[worker].in_flight, __ATOMIC_RELAXED);
}

/* Returns how many calls the next one on this worker would wait for. A worker that runs an overdue call ranks behind all others. The caller
 * holds no unit. */
static inline uint32_t load_of(const rfaas_lease *l, uint32_t worker) {
    uint32_t n = in_flight(l, worker);
    return LIKELY(!__atomic_load_n(&l->workers[worker].overdue, __ATOMIC_RELAXED)) || !rfaas_api_still_overdue(l, worker) ? n : n + DP_DEPTH_MAX;
}

/* Returns the time at which a request is given up: its deadline, or, without one, when its worker has run an overdue call for too long.
 * 0: never. In a shared lease the thread holds the worker's unit. */
static inline int64_t due_of(const rfaas_lease *l, const rfaas_request_slot *r) {
    const rfaas_worker *w = &l->workers[r->worker];
    return r->deadline || LIKELY(!__atomic_load_n(&w->overdue, __ATOMIC_RELAXED)) ? r->deadline : dp_channel_give_up_at(w->ch);
}

static inline void add_in_flight(rfaas_lease *l, uint32_t worker, uint32_t by) { /* by its lane's thread */
    __atomic_store_n(&l->workers[worker].in_flight, l->workers[worker].in_flight + by, __ATOMIC_RELAXED);
}

static inline uint32_t least_loaded(const rfaas_lease *l, uint32_t from) {
    uint32_t best = from;
    for (uint32_t i = 0, w = from; i < l->n_workers; i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        if (load_of(l, w) < load_of(l, best))
            best = w;
        if (load_of(l, best) == 0)
            break;
    }
    return best;
}

/* Whether a failed attempt may be made again on another worker or on a new worker in the same place. */
static inline bool next_attempt(int status, dp_started started) {
    return started == DP_NOT_STARTED && (status == DP_BUSY || dp_status_class(status) == RFAAS_CLASS_CONNECTION);
}

#endif
