/* Private side of the C API (rfaas.h).
 *
 *   program ── rfaas.h ──▶ invoke.c, map.c              calls, on dp_channel_*; they do not use the agent
 *                          request_start.c, request.c,  calls that the program does not wait for at once; waiting for several
 *                          request_many.c
 *                          shared.c, threads.c          calls of several threads in one lease
 *                          descriptor.c                 a descriptor that becomes readable when a call has ended
 *                          pieces.c                     payloads and results in several pieces
 *                          buffer.c                     registered memory
 *                          session.c, lease.c           handles: opening, closing
 *                          inspect.c                    what a program can ask of a lease
 *                          acquire.c                    how a lease gets its workers
 *                          reap.c                       destroying channels and claimants whose driver is slow
 *                          worker.c, event.c            replacing dead workers; events of a lease
 *                          init.c                       init calls of new workers
 *                          replace.c                    ending living workers
 *                          grow.c                       adding workers to a lease that was granted with fewer than it wants
 *                          failover.c                   moving a lease to another executor
 *                          cached.c, hand.c             channels of released leases, for the next lease; of any process
 *                          claim.c, claimant.c          claiming the workers of such channels without a message; on verbs
 *                          changes.c, across.c          changes of executors; leases on several executors in one call
 *                          promote.c                    from the agent's queue pairs to own ones, on verbs
 *                          table.c                      read-only data for workers
 *                          seed.c                       named seeds, from which workers start
 *                          local.c                      running functions in this process
 *                               │  ▲
 *                      requests ▼  │ replies, events     agent.c, agent_pass.c; the messages: agent_protocol.h
 *                               │  │                     agent_start.c, agent_prepare.c, environment.c: starting an agent
 *                          agent of this user and node
 *
 * A lease has a grant: the workers of one executor, and the channels to them. A lease that moves to another executor gets a new grant.
 */
#ifndef RFAAS_CLIENT_H
#define RFAAS_CLIENT_H

#include "handles.h"

#ifndef RFAAS_LIBRARY_VERSION
#define RFAAS_LIBRARY_VERSION "unknown"
#endif

/* ---- errors ---- */

/* Sets this thread's error and returns status. */
int rfaas_api_fail(int status, int started, const char *fmt, ...) __attribute__((format(printf, 3, 4), cold));
/* The same with a constant text. It formats nothing, because loops may get RFAAS_BUSY often. */
int rfaas_api_fail_const(int status, const char *text);
/* The status of this thread's last error. */
int rfaas_api_last_status(void);
/* Sets what rfaas_started returns, and leaves the error as it is. */
void rfaas_api_note_started(int started);
/* rfaas_api_fail that also sets what rfaas_function_code returns. */
int rfaas_api_fail_code(int status, int started, int32_t code, const char *fmt, ...) __attribute__((format(printf, 4, 5), cold));
/* Marks the error as that of an init call whose function is at fault. The library then does not try another worker. */
void rfaas_api_note_init_failed(void);
bool rfaas_api_init_failed(void);
/* Sets the error of a failed function: "<what> failed: <message>". The bytes of the message come from the worker and are not trusted. */
void rfaas_api_fail_function(const char *what, const void *message, uint32_t size);

/* ---- session.c ---- */

/* Protects the tables of sessions and leases. Never held during control operations. Taken before a lease's mutex. */
extern pthread_mutex_t rfaas_api_mu;
/* Returns RFAAS_OK, or RFAAS_INVALID with the error set if the library is not initialised in this process. */
int rfaas_api_down(const char *op);
int rfaas_api_bad_session(const rfaas_session *s, const char *op);
int rfaas_api_fail_dp(const char *op, const dp_error *err);
/* Returns the session's device for a provider, which it opens once. "brokered": that of the agent's queue pairs on verbs. */
int rfaas_api_session_device(rfaas_session *s, const char *provider, dp_dev **out);
/* Reports whether an operation of a session with RFAAS_SESSION_LOCAL succeeds although no agent was reached. Status and reply are those of
 * the attempt. rfaas_api_reopen repeats the operation with the next agent. */
bool rfaas_api_without_agent(const rfaas_session *s, int status, const rfaas_reply *r);
/* Records that a lease with RFAAS_LEASE_LOCAL found no executor. `took` is the time of the search in ns. After a slow failure, such as a
 * time-out, other leases of the session do not search for a while. */
void rfaas_api_note_away(rfaas_session *s, int status, const char *text, int64_t took);
/* Returns the time until which leases with RFAAS_LEASE_LOCAL do not search for executors; 0: they may search. If the time is not 0 and a is
 * not NULL, *a gets the error of the last failure. */
int64_t rfaas_api_away(rfaas_session *s, rfaas_acquisition *a);
/* rfaas_api_attend accepts workers that connect through shared memory and detects workers that have ended. The library has no
 * thread for that, so every wait calls it, and polls the descriptor of rfaas_api_attend_fd (-1: there is no shm device). */
void rfaas_api_attend(void);
int rfaas_api_attend_fd(void);
/* Reports whether a worker waits for a connection that this process cannot accept, because it has no descriptor left. The descriptor
 * of rfaas_api_attend_fd is not readable then, so a wait calls rfaas_api_attend every RFAAS_STARVED_NS. */
bool rfaas_api_starved(void);
#define RFAAS_STARVED_NS 5000000

/* ---- lease.c ---- */

/* Returns the lease with a table index, or NULL. */
rfaas_lease *rfaas_api_lease_at(uint32_t index);
/* rfaas_lease_open, asking the executor `at` first. NULL: any. */
int rfaas_api_lease_open(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **lease);
/* Writes the terms of a lease as the agent gets them. */
int rfaas_api_spec(const rfaas_lease_options *o, rfaas_agent_spec *spec);
/* rfaas_api_open_library opens the library while the lease is being opened, unless that was done. Returns the status and sets the thread's error. */
int rfaas_api_open_library(rfaas_lease *l);
/* The two halves of rfaas_api_lease_open, between which the caller calls rfaas_api_acquire_step until it returns true. *l is
 * NULL after an error. If a->done is set before, the lease is not acquired: a->status is the reason. may_be_local: with RFAAS_LEASE_LOCAL,
 * calls run in this process if there are no workers. */
int rfaas_api_lease_begin(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **l, rfaas_acquisition *a);
int rfaas_api_lease_finish(rfaas_lease **l, rfaas_acquisition *a, bool may_be_local);
/* rfaas_lease_release. Fails if the lease does not belong to the session (NULL: any). */
int rfaas_api_release_of(rfaas_lease *l, const rfaas_session *of);
/* Checks the program's options and copies them with defaults filled in. `most` is the largest number of workers. */
int rfaas_api_lease_options(const rfaas_lease_options *options, uint32_t most, rfaas_lease_options *out);
/* Returns a new key for a grant of the lease. */
uint64_t rfaas_api_new_key(const rfaas_lease *l);
/* In the child of fork(): invalidates all handles. */
void rfaas_api_forget_leases(void);
/* Calls fn with every lease of the table. Some of them are not open. */
void rfaas_api_each_lease(void (*fn)(rfaas_lease *l));
/* Sets the error that says why a lease handle cannot be used, and returns RFAAS_INVALID. */
int rfaas_api_bad_lease(const rfaas_lease *l, const char *op);

/* ---- threads.c ---- */

/* Prepares a new handle, and a handle whose lease was released for the next one. */
void rfaas_api_threads_init(rfaas_lease *l);
void rfaas_api_threads_reset(rfaas_lease *l);
/* rfaas_api_enter for rfaas_lease_release. After RFAAS_OK every other thread has left, and none can enter. Fails if the lease does not
 * belong to the session `of` (NULL: any), because its handle may have been reused. */
int rfaas_api_enter_last(rfaas_lease *l, const char *op, const rfaas_session *of);
/* Wakes every thread that waits inside the lease, so that it checks again whether to wait. Any thread; the lease may be released. */
void rfaas_api_interrupt(rfaas_lease *l);
/* Keeps the other threads of a shared lease from its workers, requests and buffers until rfaas_api_put_all. The caller is inside
 * and holds no unit. Errors: RFAAS_DEADLINE, and RFAAS_LEASE_ENDED if the lease is released meanwhile. */
int rfaas_api_take_all(rfaas_lease *l, const char *op, int64_t deadline);
void rfaas_api_put_all(rfaas_lease *l);
/* For a thread that waits for replies of all workers. rfaas_api_take_long is rfaas_api_take_all without a deadline, with DP_TURN_LONG. Then
 * rfaas_api_wanted reports whether another thread wants a unit for moments, or the lease is released, and rfaas_api_others whether another
 * thread wants one in order to wait, too. */
int rfaas_api_take_long(rfaas_lease *l, const char *op);
bool rfaas_api_wanted(const rfaas_lease *l);
bool rfaas_api_others(const rfaas_lease *l);

/* ---- descriptor.c ---- */

/* Ends the thread of the lease's descriptor, if it has one. No thread can enter the lease. */
void rfaas_api_descriptor_free(rfaas_lease *l);

/* ---- promote.c ---- */

#define RFAAS_DUE_WORKERS 1u   /* in rfaas_lease.grows */
#define RFAAS_DUE_PROMOTION 2u
/* Prepares a lease whose grant is new: if its calls pass through the agent, it gets queue pairs of its own after the second call. */
void rfaas_api_promote_soon(rfaas_lease *l);
/* Takes the next step towards own queue pairs. The thread is inside, holds no unit, and leaves with the status. */
__attribute__((cold)) void rfaas_api_promote(rfaas_lease *l, int status);
/* Waits for the answer of a worker that was asked to move, and lets its channel use the new queue pair. RFAAS_BUSY: no answer by `until`.
 * Other errors: the channel has failed. The caller holds the worker's unit. */
__attribute__((cold)) int rfaas_api_promote_step(rfaas_lease *l, uint32_t worker, int64_t until);
/* Gives a failed channel that passes through the agent a queue pair of this process, which its reset makes ready for another worker. Does
 * nothing if the channel has one already. Sets the error. The caller holds the worker's unit. */
__attribute__((cold)) int rfaas_api_promote_broken(rfaas_lease *l, uint32_t worker);
/* Takes the answers of workers that were asked to move, before the lease is released. */
void rfaas_api_promote_settle(rfaas_lease *l);
/* Waits for the thread that makes queue pairs, and frees them if they are not used. */
void rfaas_api_promote_end(rfaas_grant *h);

/* ---- names.c ---- */

/* Sets the error for a name that the library does not have, and returns RFAAS_NO_FUNCTION. */
int rfaas_api_no_function(const rfaas_lease *l, const char *op, const char *name);

/* ---- acquire.c ---- */

rfaas_grant *rfaas_api_grant_new(const rfaas_lease *l);
/* Takes a grant away from its lease and from events, and destroys it. NULL: does nothing. */
void rfaas_api_grant_free(rfaas_lease *l, rfaas_grant *h);
/* Frees a grant and its channels. Neither a lease nor an event may still be able to find it. */
void rfaas_api_grant_destroy(rfaas_grant *h);
/* Starts to get workers for a grant of the lease. `at` is as in rfaas_acquisition. wait_ns: how long the agent waits for room. aside: the
 * agent waits before the channels are made. After they are offered, it waits no more, so the caller may wait for the outcome. */
void rfaas_api_acquire_begin(rfaas_acquisition *a, rfaas_lease *l, rfaas_grant *h, const char *at, int64_t wait_ns, bool aside);
/* Continues as far as is possible without waiting. Returns true when it is done; a->status and a->text are then set. After an
 * error the caller releases the grant's key. */
bool rfaas_api_acquire_step(rfaas_acquisition *a);
/* Waits until rfaas_api_acquire_step can make progress, at most until `until` (CLOCK_MONOTONIC ns). */
void rfaas_api_acquire_wait(const rfaas_acquisition *a, int64_t until);
/* Gives an acquisition up. The caller releases the grant's key. */
void rfaas_api_acquire_drop(rfaas_acquisition *a);
/* Releases what an executor has granted, if anything. The key is invalid then. With `wait`, returns when the executor has released it. */
int rfaas_api_release_workers(const rfaas_lease *l, uint64_t key, bool wait);
/* Writes the address of a worker's channel to blob. */
int rfaas_api_offer(rfaas_worker *w, rfaas_agent_blob *blob);
/* Connects the channel of worker i to the worker that the agent describes. */
int rfaas_api_connect_worker(rfaas_lease *l, rfaas_grant *h, uint32_t i, const rfaas_agent_worker *worker);

/* ---- hand.c ---- */

/* Hands over the channels of a grant at rest to the agent, before the release. If that fails, the reply to the release says so. */
void rfaas_api_hand_over(rfaas_grant *h);
/* Makes the endpoint and the channels of a grant from the descriptors of a reply, in the order of rfaas_api_hand_over. Takes over descriptors. After
 * an error the grant may have some of them. */
int rfaas_api_unpack_channels(rfaas_lease *l, rfaas_grant *h, const char *provider, const rfaas_reply *r);
/* Makes the channels of a grant that the agent has handed over, ready to be offered. provider: that of the candidate. Takes over descriptors of
 * the reply. Returns false if the channels cannot be used; the grant may have some of them then. */
bool rfaas_api_take_over(rfaas_lease *l, rfaas_grant *h, const char *provider, const rfaas_reply *r);

/* Describes a lease's grant for an agent that is to follow it. pids has room for n_workers. */
void rfaas_api_describe_grant(const rfaas_lease *l, const rfaas_grant *h, rfaas_agent_adopt *req, uint64_t *pids);

/* ---- claim.c ---- */

/* Maps a claim region that the agent has sent. The caller keeps the descriptor. */
void rfaas_api_take_region(const uint8_t *body, uint32_t size, int fd);
/* Forgets all regions. No other thread may be inside the library. */
void rfaas_api_forget_regions(void);
/* Claims the workers of a cached grant. by: generation of the agent that has sent the claim. own: this process has released the grant. Returns
 * true, and sets *out, if the workers now belong to this process. */
bool rfaas_api_claim_workers(const rfaas_agent_claim *claim, uint32_t by, bool own, dp_claimed *out);
/* Records a claim for the lease's grant, which is its first one. The agent is told later, or at once if the lease is short. cached: key of the cached
 * grant, or that of the new one if the agent had sent the channels. by: generation of the agent that has cached it. Returns false if that agent has
 * ended. */
bool rfaas_api_note_claim(rfaas_lease *l, rfaas_grant *h, uint64_t cached, uint32_t by);
/* Not 0: the agent may not know some claim. Atomic. */
extern int64_t rfaas_api_unreported;
/* Sends CLAIMED for every claim that the agent does not know, and waits for no reply. Blocks up to a second if the agent reads nothing. Call it
 * without any mutex held. */
void rfaas_api_tell_claims(void);
/* rfaas_api_tell_claims if one of the claims is old. now: CLOCK_MONOTONIC, ns */
void rfaas_api_tell_old_claims(int64_t now);
/* Forgets the lease's claim, because the lease is being released, or adopted by the next agent. */
void rfaas_api_forget_claim(rfaas_lease *l);
/* In the child of fork(): forgets all of them. */
void rfaas_api_forget_claims(void);

/* ---- claimant.c ---- */

/* Reports whether the session is a claimant of the executor of a lease that is being released, on verbs. Makes it one if that is worth it. Then it waits for
 * the agent and the executor, three seconds at most. */
bool rfaas_api_claimant_ready(rfaas_lease *l);
/* Takes the reply to a release whose workers are cached. asked: the release had KEEP_OWN. by: generation of the agent. */
void rfaas_api_claimant_answered(rfaas_session *s, const char *executor, const rfaas_agent_released *r, bool asked, uint32_t by);
/* Claims the workers of a cached grant over the session's own queue pair. Returns true, and sets *out, if they now belong to this process. Otherwise the
 * caller asks for them by message: the claim may have succeeded, and the agent settles that. Blocks for 0.6 s at most, and while another thread of the
 * session claims. */
bool rfaas_api_claim_own(rfaas_session *s, const rfaas_grant *h, dp_claimed *out);
/* Destroys all claimants of a session, before its devices are closed. */
void rfaas_api_claimants_close(rfaas_session *s);

/* ---- cached.c ---- */

/* Gives the lease's new grant the channels and the workers of a cached grant that suits it and can be claimed. Returns the cached grant's key; 0:
 * there is no such grant. Sets *by to the generation of the agent that has cached it. */
uint64_t rfaas_api_adopt_claimed(rfaas_lease *l, rfaas_grant *h, const char *at, uint32_t *by);
/* Releases the lease's grant, or caches it for the next lease with the same terms. If it is cached, the lease has no grant and no
 * buffers any more. */
int rfaas_api_release_grant(rfaas_lease *l);
/* Moves the channels of a cached grant that suits the lease to h, ready to be offered. Returns the cached grant's key; 0: there is
 * none. */
uint64_t rfaas_api_adopt_cached(const rfaas_lease *l, rfaas_grant *h, const char *at);
/* Destroys the cached grant with this key, if there is one. */
void rfaas_api_drop_cached(uint64_t key);
/* Destroys all cached grants of a session. NULL: of all sessions. */
void rfaas_api_drop_all_cached(const rfaas_session *s);
/* In the child of fork(): empties the list, and leaves the grants as they are. */
void rfaas_api_forget_cached(void);
/* Returns the number of cached grants of a session. */
uint64_t rfaas_api_cached(const rfaas_session *s);
/* Divides the workers of a lease among cached grants of the session with the same terms. Returns the number of grants, at most `most`. 0: they do not
 * have exactly as many workers. Other threads may take the grants meanwhile. */
uint32_t rfaas_api_cached_shares(const rfaas_session *s, const rfaas_agent_spec *spec, uint32_t most, rfaas_agent_share shares[]);

/* ---- reap.c ---- */

/* Destroys channels and their endpoint, which may be NULL. If the driver is slow, returns after 0.1 s, and a thread continues. */
void rfaas_api_reap(dp_endpoint *ep, dp_channel *const *channels, uint32_t n);
struct dp_raw;
/* The same for a connection, in a domain of its own. Each may be NULL. */
void rfaas_api_reap_connection(dp_dev *dev, struct dp_raw *conn, dp_domain *domain);
/* Closes a device without users. If threads still destroy something on the device, the last one closes it. */
void rfaas_api_reap_device(dp_dev *dev);
/* Waits for all threads, at most 1 s. */
void rfaas_api_reap_finish(void);
void rfaas_api_reap_before_fork(void);
void rfaas_api_reap_after_fork(bool child);

/* ---- worker.c ---- */

/* Handles an event of the agent. Any thread, but not with a lease's mutex held. */
void rfaas_api_take_event(const rfaas_agent_event *e, const char *details);
/* rfaas_api_repair replaces a worker whose channel failed, and waits for the new one until the deadline (CLOCK_MONOTONIC ns; 0:
 * the session's time-out). After RFAAS_DEADLINE the replacement continues. The caller owns the lease or holds the worker's
 * unit. */
int rfaas_api_repair(rfaas_lease *l, uint32_t worker, int64_t deadline);
/* rfaas_api_repair without waiting. RFAAS_BUSY: the new worker has not started yet, or executes the init call. */
int rfaas_api_begin_repair(rfaas_lease *l, uint32_t worker);
/* rfaas_api_begin_repair that waits until the executor has ended the old worker and started the new one, at most for the session's time-out. */
int rfaas_api_end_worker(rfaas_lease *l, uint32_t worker);
/* Notes that the deadline of a call on the worker has passed. */
void rfaas_api_note_overdue(rfaas_lease *l, uint32_t worker);
/* Reports whether the worker still runs a call whose deadline has passed. The caller owns the lease or holds the worker's unit. */
bool rfaas_api_overdue(rfaas_lease *l, uint32_t worker);
/* rfaas_api_overdue for a thread inside the lease that holds no unit. Returns true if another thread holds the worker's unit. */
__attribute__((cold)) bool rfaas_api_still_overdue(const rfaas_lease *l, uint32_t worker);
/* Writes "; worker 2 still runs ..." to text if the worker runs an overdue call, else "". The caller owns the lease or holds the worker's
 * unit. */
void rfaas_api_overdue_text(rfaas_lease *l, uint32_t worker, char *text, size_t room);
/* Returns RFAAS_OK while the lease lasts, else RFAAS_LEASE_ENDED with the reason as the error's text. */
int rfaas_api_fail_ended(rfaas_lease *l, const char *op);
/* Sets the error of a call that ended with `status`. If the worker died, waits up to 0.9 s for the event that says how. Returns the
 * status, or the reason if the event has a more precise one: RFAAS_WORKER_DIED, RFAAS_TIME_LIMIT, RFAAS_MEMORY_LIMIT or
 * RFAAS_LEASE_ENDED. A call that was not started because the lease has ended gets RFAAS_LEASE_ENDED, even if its executor is lost. */
int rfaas_api_explain(rfaas_lease *l, const char *op, rfaas_function fn, uint32_t worker, int status, int started);
/* Finds out why worker i of a grant ended a call. Writes the reason to why ("": not known). Sets *details to the worker's backtrace and
 * output, which the caller frees, or to NULL. Returns the status of the call. */
int rfaas_api_reason(rfaas_lease *l, rfaas_grant *h, uint32_t i, int status, int started, char *why, size_t size, char **details);
/* Tells the agent that a worker does not answer. A dp_silence_fn; arg is an rfaas_grant. */
void rfaas_api_silent(void *arg, const dp_channel *ch, dp_silence silence);

/* ---- init.c ---- */

/* Checks the init call in options whose other fields are valid. */
int rfaas_api_init_check(const rfaas_lease_options *o);
/* Checks the flags about seeds, and sets RFAAS_LEASE_SEED if RFAAS_LEASE_SEED_REQUIRED is set. */
int rfaas_api_seed_check(rfaas_lease_options *o);
/* Returns how long opening the lease may take longer while its seed is made, ns. */
int64_t rfaas_api_seed_ns(const rfaas_lease *l);
/* Returns how long the library waits for the init call, ns. If the lease has a call_limit_ns, the executor enforces it. */
int64_t rfaas_api_init_patience(const rfaas_lease *l);
/* Names the seed of a lease in the first step of an acquisition. */
void rfaas_api_init_seed(const rfaas_lease *l, bool first, rfaas_agent_acquire *req);
/* Copies the init call from the lease's options; frees the copy. */
int rfaas_api_init_keep(rfaas_lease *l);
void rfaas_api_init_free(rfaas_lease *l);
/* Starts the init call on worker i of a grant, which is connected, if the lease has one and the worker has not started from a seed. The
 * worker takes no other calls until rfaas_api_init_step returns RFAAS_OK. */
int rfaas_api_init_start(rfaas_lease *l, rfaas_grant *h, uint32_t i);
/* Returns RFAAS_BUSY while the init call runs. After an error, which is set, the worker cannot be used. */
int rfaas_api_init_step(rfaas_lease *l, rfaas_grant *h, uint32_t i);
/* Waits for the init call that runs on this worker. */
void rfaas_api_init_wait(rfaas_worker *w, int64_t until);
/* Executes the init call in this process, unless that was done. */
int rfaas_api_init_here(rfaas_lease *l);

/* ---- replace.c ---- */

/* Gives up a living worker. Its calls end with RFAAS_WORKER_DIED and `why`. The executor kills it at the next repair. The caller owns the
 * lease or holds the worker's unit. */
void rfaas_api_discard(rfaas_lease *l, uint32_t worker, const char *why);
/* Requests the replacement of a worker after the deadline of a call with RFAAS_CALL_KILL, and adds that to the current error. The caller
 * owns the lease or holds the worker's unit. result_in_place: the function may write to the program's memory, so the call waits
 * until the executor has ended the old worker, at most for the session's time-out. Returns status. */
__attribute__((cold)) int rfaas_api_kill_late(rfaas_lease *l, rfaas_function fn, uint32_t worker, int status, bool result_in_place);

/* ---- grow.c ---- */

/* Records that the executor may have room for another worker of a grant. The caller holds the lease's mutex. */
void rfaas_api_note_room(rfaas_lease *l, rfaas_grant *h);
/* Requests missing workers of a growing lease, and connects the workers that the executor has granted. Does not wait. The caller is inside the lease and holds no unit. */
__attribute__((cold)) void rfaas_api_grow(rfaas_lease *l);
/* Returns whether rfaas_api_grow has something to do. */
static inline bool rfaas_api_grows(const rfaas_lease *l) { return __builtin_expect(__atomic_load_n(&l->grows, __ATOMIC_RELAXED) & RFAAS_DUE_WORKERS, 0); }
/* Calls rfaas_agent_look and rfaas_api_grow on a thread that leaves the lease with a status. */
__attribute__((cold)) void rfaas_api_look_leaving(rfaas_lease *l, int status);
/* The same for a thread that is not inside, if the lease lacks workers. Does nothing if another thread owns the lease. */
void rfaas_api_look_for_workers(rfaas_lease *l);
/* Sets the error for a worker that the lease does not have, and returns RFAAS_INVALID. */
int rfaas_api_no_worker(const rfaas_lease *l, const char *what, int worker);

/* ---- event.c ---- */

/* Keeps an event for the program. If there is no room, drops the oldest. Under the lease's mutex. */
void rfaas_api_keep_news(rfaas_lease *l, const rfaas_agent_event *e);
/* Tells the agent, once, that a lease on a draining node starts no more calls. The caller is inside the lease. */
__attribute__((cold)) void rfaas_api_finish(rfaas_lease *l);
/* Waits up to 0.2 s for the event that gives the reason of a drain, which the page shows first. */
void rfaas_api_await_reason(rfaas_lease *l);

/* ---- request.c ---- */

/* Ends every request in flight on a worker whose channel failed. The outcomes are kept until they are waited for. */
void rfaas_api_settle(rfaas_lease *l, uint32_t worker);

/* Collects ended requests, so that their slots are free: of all workers, and of one. */
bool rfaas_api_collect_ended(rfaas_lease *l);
void rfaas_api_collect_ended_of(rfaas_lease *l, uint32_t worker);
/* Waits for every request in flight, each until its deadline. */
void rfaas_api_drain(rfaas_lease *l);

/* ---- failover.c ---- */

/* Reports whether the lease moves when its executor is lost. */
static inline bool rfaas_api_fails_over(const rfaas_lease *l) { return l->options.flags & RFAAS_LEASE_FAILOVER; }
/* Ends the search for a new grant, and releases a grant that it has found. */
void rfaas_api_stop_seeking(rfaas_lease *l);
/* In the child of fork(): forgets the searches of the parent. */
void rfaas_api_forget_searches(void);
/* Adds the counters of a grant's channels to s. */
void rfaas_api_count(const rfaas_grant *h, rfaas_statistics *s);

/* ---- table.c ---- */

typedef struct rfaas_table rfaas_table;
/* Returns how much longer than the time-out a lease of the session may take, because executors read its tables first. */
int64_t rfaas_api_tables_ns(rfaas_session *s);
/* Publishes the session's tables to another agent. */
void rfaas_api_tables_publish(rfaas_session *s);
void rfaas_api_tables_free(rfaas_session *s);
/* In the child of fork(): closes the descriptors. */
void rfaas_api_tables_forget(rfaas_session *s);
/* Makes the session's tables those that rfaas_api_table_here finds on this thread. Returns the session before. NULL: none. */
rfaas_session *rfaas_api_tables_of(rfaas_session *s);
/* rfaas_table of rfaas_function.h, for functions in this process. */
const void *rfaas_api_table_here(const char *name, size_t *size);

/* ---- seed.c ---- */

/* Asks a new agent to renew the session's seeds. */
void rfaas_api_seeds_keep(rfaas_session *s);
/* Detaches the handles of seeds from a session that is being closed. */
void rfaas_api_seeds_close(rfaas_session *s);
/* Finds the seed that the options of a lease name. Its setup function becomes the lease's init call in the options, whose pointers refer to *found. The
 * caller frees that by rfaas_api_seed_used, also after an error. */
int rfaas_api_seed_use(rfaas_lease *l, rfaas_lease_options *o, rfaas_seed **found);
void rfaas_api_seed_used(rfaas_seed *found);

/* Writes the paths of options.bundle, made absolute. RFAAS_INVALID: they do not fit. */
int rfaas_api_bundle_paths(const char *list, char out[RFAAS_AGENT_BUNDLE]);
/* Returns how long the agent may take to hash and send the files of such a list, ns. Looks at the files for at most patience_ns. 0: that was too
 * short, or there is more than a bundle may have, which the agent refuses. */
int64_t rfaas_api_bundle_ns(const char *list, int64_t patience_ns);
/* Sets the list of paths that rfaas_api_bundle_here searches on this thread, and returns the previous list. NULL: none. */
const char *rfaas_api_bundle_of(const char *list);
/* rfaas_bundle_path for functions in this process: the path with this last name. */
const char *rfaas_api_bundle_here(const char *name);

/* ---- buffer.c ---- */

/* Registers all buffers for a new grant. */
void rfaas_api_move_buffers(rfaas_lease *l, const rfaas_grant *to);

/* Frees all buffers, or unregisters them if the memory is the caller's. */
void rfaas_api_free_buffers(rfaas_lease *l);

#endif
