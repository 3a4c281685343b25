/* Channels: the client's side of an invocation. dp_serve.h is the worker's.
 *
 * An endpoint is a device, a domain and one or more lanes. A lane is a completion queue. A channel is a queue pair with
 * `depth` slots to one worker, and belongs to one lane. Slot states:
 *
 *            submit                 reply                    finish
 *   FREE ───────────────▶ BUSY ───────────────▶ DONE ─────────────────────▶ FREE
 *     ▲                    │ deadline, cancel
 *     │    reply           ▼                      channel fails: BUSY, ABANDONED ──▶ FENCED
 *     └──────────────── ABANDONED                 reconnect:     FENCED ──▶ FREE (BUSY ones after finish)
 *
 * The reply of an abandoned call lands in memory of this library, is recognised by its call id, and only
 * then is the slot free again; caller memory is written by dp_channel_finish alone, on the caller's thread.
 *
 * Threads: channels of different lanes may be used by different threads at the same time, those of one lane by one thread at a
 * time. Creating, destroying and dp_endpoint_* need all lanes. dp_channel_fail, dp_channel_ask, dp_channel_interrupt and dp_endpoint_ask
 * may be called by any thread. The first DP_LANES_MAX channels of an endpoint have a lane each; channel i shares that of channel
 * i % DP_LANES_MAX.
 */
#ifndef RFAAS_DP_CHANNEL_H
#define RFAAS_DP_CHANNEL_H

#include "dp_fabric.h"
#include "dp_pieces.h"
#include "dp_wire.h"

typedef enum dp_wait_mode {
    DP_WAIT_ADAPTIVE = 0, /* spin for a budget of about one wake-up, then block */
    DP_WAIT_HOT = 1,      /* spin; blocks only when this core is evidently shared with another runner */
    DP_WAIT_WARM = 2,     /* block at once */
} dp_wait_mode;

#define DP_LANES_MAX 64 /* bounds the descriptors of an endpoint: verbs needs two for each completion queue */

typedef struct dp_endpoint dp_endpoint;
typedef struct dp_channel dp_channel;

typedef struct dp_channel_config {
    uint32_t depth; /* 1..DP_DEPTH_MAX */
    uint32_t eager; /* bytes, rounded up to 64; 64..DP_EAGER_MAX */
    uint64_t bulk;  /* bytes, rounded up to 64; 0..DP_BULK_MAX: total of the large payloads in flight, each way */
} dp_channel_config;

/* Whether the function may have run when a call failed. */
typedef enum dp_started { DP_NOT_STARTED = 0, DP_MAYBE_EXECUTED = 1 } dp_started;

/* max_channels bounds the completion queue: the endpoint carries that many channels of depth max_depth. */
int dp_endpoint_create(dp_dev *dev, uint32_t max_channels, uint32_t max_depth, dp_wait_mode mode, dp_endpoint **out,
                       dp_error *err);
/* Its channels must have been destroyed. */
void dp_endpoint_destroy(dp_endpoint *ep);

int dp_channel_create(dp_endpoint *ep, const dp_channel_config *cfg, dp_channel **out, dp_error *err);
void dp_channel_destroy(dp_channel *ch);
/* dp_channel_offer writes the client's blob (room of DP_CHANNEL_BLOB_MAX). */
int dp_channel_offer(dp_channel *ch, void *blob, uint32_t *len, dp_error *err);
/* dp_side_encode_sizes writes the blob of a client that has no queue pair yet, for a late server (dp_serve.h). It has only the sizes of its
 * channel. blob has room for DP_CHANNEL_BLOB_MAX. */
void dp_side_encode_sizes(const dp_channel_config *cfg, dp_provider_id provider, void *blob, uint32_t *len);
/* dp_channel_hold makes an offered channel refuse calls (DP_PEER_GONE) until dp_channel_connect. */
void dp_channel_hold(dp_channel *ch);
/* dp_channel_reserve makes a connected channel refuse calls (DP_PEER_GONE), as if it had failed, until dp_channel_unreserve. Calls in flight
 * go on, and end like others. Does nothing if the channel has failed. */
void dp_channel_reserve(dp_channel *ch);
void dp_channel_unreserve(dp_channel *ch);
/* dp_channel_connect takes the worker's answer. */
int dp_channel_connect(dp_channel *ch, const void *blob, uint32_t len, dp_error *err);
/* dp_channel_reset prepares a failed (or any) channel for a new offer. DP_BUSY while calls wait to be finished. */
int dp_channel_reset(dp_channel *ch, dp_error *err);
/* Between leases: dp_channel_idle reports whether a connected channel can be cached: no call is in flight on it, and it has not failed.
 * dp_channel_next_generation gives such a channel the next generation, for an offer to the same worker, or after a claim (dp_claim.h).
 * dp_channel_resume checks that a blob, of any generation, is that worker's. Queue pair and memory stay.
 * dp_channel_expect is for the first call on a worker that is being woken, or whose core other threads may use: the wait for its reply yields,
 * and spins for longer before it sleeps. dp_channel_next_generation implies it. */
bool dp_channel_idle(const dp_channel *ch);
void dp_channel_expect(dp_channel *ch);
int dp_channel_next_generation(dp_channel *ch, dp_error *err);
int dp_channel_resume(dp_channel *ch, const void *blob, uint32_t len, dp_error *err);
/* Handing over a connected channel at rest to another process of this node, on shm. The worker does not notice. An endpoint is handed over
 * as a whole, with all its channels in the order in which they were made.
 * dp_endpoint_pack returns a descriptor, which the endpoint still owns; -1: not supported. dp_channel_pack describes a channel and fills
 * fds (room for DP_PACKED_FDS) with out->qp.n_fds descriptors, which the channel still owns. The channel can be used again unless another
 * process has unpacked it; then it may only be destroyed. Errors: those of dp_qp_pack.
 * dp_endpoint_unpack and dp_channel_unpack rebuild the endpoint and the channel from untrusted bytes and descriptors. They take over the
 * descriptors that they need and set them to -1; the caller closes the others. fds has p->qp.n_fds descriptors. The caller then calls
 * dp_channel_next_generation and sends an offer to the worker. Errors: those of dp_qp_unpack. */
#define DP_PACKED_VERSION 1u
typedef struct dp_packed_channel {
    uint32_t version; /* DP_PACKED_VERSION: of this structure and those of the provider */
    uint32_t generation, next_call;
    uint32_t rkey; /* of the worker's memory */
    uint64_t addr;
    dp_channel_config cfg;
    uint32_t blob_len; /* the worker's blob of its queue pair */
    uint8_t blob[DP_BLOB_MAX];
    dp_packed_qp qp;
} dp_packed_channel;
int dp_endpoint_pack(const dp_endpoint *ep);
int dp_endpoint_unpack(dp_dev *dev, uint32_t max_channels, uint32_t max_depth, dp_wait_mode mode, int *fd, dp_endpoint **out,
                       dp_error *err);
int dp_channel_pack(dp_channel *ch, dp_packed_channel *out, int *fds, dp_error *err);
int dp_channel_unpack(dp_endpoint *ep, const dp_packed_channel *p, int *fds, dp_channel **out, dp_error *err);
/* Moving the channels of an endpoint from virtual queue pairs (dp_vqp.h) to queue pairs of this process, one by one. The workers stay the same,
 * and so do the slots, the memory and the numbers of calls.
 *
 *   prepare:   device `dev` ── completion queues, regions, queue pairs      any thread, while calls go on
 *   ask:       no call in flight; the channel refuses calls from now on     the thread of the channel's lane, as all others below
 *   meet:      the worker has answered; the new queue pair is connected
 *   switch:    the channel uses the new queue pair; the old one is closed
 *   complete:  all channels have moved, so the endpoint uses the device     the endpoint's thread
 *   free:      what is not used any more
 *
 * Until dp_promotion_free, the caller neither destroys the endpoint nor adds channels to it. dp_promotion_prepare returns DP_UNSUPPORTED if two
 * channels share a lane.
 * dp_promotion_possible reports whether the worker can be asked now; dp_promotion_abandoned, whether calls that were given up are not answered
 * yet. dp_promotion_ask sends the request and reserves the channel. DP_BUSY: calls are in flight. dp_promotion_await waits until dp_promotion_meet
 * has an answer (DP_OK), or the deadline (DP_DEADLINE). dp_promotion_meet returns DP_BUSY if there is none yet; DP_OK: call dp_promotion_switch
 * before anything is posted; DP_UNSUPPORTED: the channel stays as it is, and takes calls again. After any other error the channel has failed.
 * dp_promotion_switch also gives a failed channel its new queue pair. It stays failed, and its reset then makes the queue pair ready for another
 * worker. The caller holds the lock that keeps other threads from the endpoint, in dp_promotion_complete too. dp_promotion_complete returns
 * false if a channel has not moved. dp_promotion_over reports whether no further channel can move. */
typedef struct dp_promotion dp_promotion;
int dp_promotion_prepare(dp_endpoint *ep, dp_dev *dev, dp_promotion **out, dp_error *err);
bool dp_promotion_possible(dp_promotion *p, const dp_channel *ch);
bool dp_promotion_abandoned(const dp_channel *ch);
int dp_promotion_ask(dp_promotion *p, dp_channel *ch, dp_error *err);
int dp_promotion_await(dp_promotion *p, dp_channel *ch, int64_t until_ns);
int dp_promotion_meet(dp_promotion *p, dp_channel *ch, dp_error *err);
void dp_promotion_switch(dp_promotion *p, dp_channel *ch);
bool dp_promotion_complete(dp_promotion *p);
bool dp_promotion_over(dp_promotion *p);
void dp_promotion_free(dp_promotion *p);
/* Reports whether the endpoint, or the channel, uses virtual queue pairs. */
bool dp_endpoint_brokered(const dp_endpoint *ep);
bool dp_channel_brokered(const dp_channel *ch);
/* Reports whether the channel has failed because the broker has made no progress for 2 s. Calls that the broker had not posted are DP_NOT_STARTED. */
bool dp_channel_given_up(const dp_channel *ch);
/* dp_channel_carry permits payloads and results that are larger than `bulk`, up to `most` bytes each. They pass through the bulk area in parts,
 * so the thread that waits for such a call, or tests it, also moves its parts. 0, as at first: `bulk` is the limit. */
void dp_channel_carry(dp_channel *ch, uint64_t most);
/* dp_channel_fail ends every call of the channel with status (a connection or lease class). Any thread. */
void dp_channel_fail(dp_channel *ch, int status);
/* Returns 0, or the status with which the channel failed. */
int dp_channel_status(const dp_channel *ch);
/* dp_channel_broken returns the status of the connection, and ignores dp_channel_hold and dp_channel_reserve. */
int dp_channel_broken(const dp_channel *ch);

/* dp_channel_submit_until starts a call: function index or DP_CHAIN, payload, the most result bytes wanted. *slot names the call until
 * dp_channel_finish or abandonment. The payload may be reused when submit returns, unless it lies in `reg` (a
 * region of this endpoint's domain, or NULL): then it must stay unchanged until the call ends.
 * If the send queue fills up after a part of the request was posted, it waits for room. With DP_CAP_POLLED_TARGET it also waits if nothing
 * can be posted and no call is in flight whose end could make room. Such a wait ends at deadline_ns (CLOCK_MONOTONIC, 0: none), at the end of the
 * connection, or when an idle or silence function fails the channel. The channel can be used after DP_DEADLINE.
 * Errors are all NOT_STARTED: DP_BUSY, DP_DEADLINE, DP_TOO_LARGE, DP_INVALID, connection class. */
int dp_channel_submit_until(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg,
                            uint32_t capacity, int64_t deadline_ns, uint32_t *slot);
/* dp_channel_batch says whether the next submits belong to a batch: the caller submits them one after the other, and then waits for all
 * of them. On tcp the requests are sent together when the channel's lane next polls or waits. A worker that has announced it may hold back the reply of
 * a brief call and send it with the next one. If the worker dies before that, the call fails although its function has returned. */
void dp_channel_batch(dp_channel *ch, bool batch);
/* dp_channel_submit is dp_channel_submit_until without a deadline. */
static inline int dp_channel_submit(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg,
                                    uint32_t capacity, uint32_t *slot) {
    return dp_channel_submit_until(ch, function, in, size, reg, capacity, 0, slot);
}
/* dp_channel_submit_pieces is dp_channel_submit_until with a payload in pieces, which have `size` bytes (dp_pieces_size). The pieces may be
 * reused when submit returns. DP_FATAL: no memory to gather them. */
__attribute__((nonnull)) int dp_channel_submit_pieces(dp_channel *ch, uint32_t function, const dp_pieces *in, uint32_t size, uint32_t capacity,
                             int64_t deadline_ns, uint32_t *slot);
/* dp_channel_submit_placed is dp_channel_submit_until with payload and result in memory of dp_mem_lend, places->in and places->out. The worker
 * uses it where it is: nothing is copied. NULL: copied. What cannot be placed is copied too: less than DP_PLACE_MIN bytes, bytes at an address
 * that is not a multiple of 64, and memory that dp_qp_share refuses. A capacity for a copied result is limited to what the channel carries; if
 * that is in parts, the payload is copied too. The payload must not change, and the result must not be used, until the slot is free again, even
 * if the call is abandoned. dp_channel_finish gets the same `out`. The worker stores results of failed calls there, too. */
#define DP_PLACE_MIN 1024 /* less is copied faster */
typedef struct dp_places {
    const dp_mem *in, *out;
} dp_places;
int dp_channel_submit_placed(dp_channel *ch, uint32_t function, const void *in, uint32_t size, void *out, uint32_t capacity,
                             const dp_places *places, int64_t deadline_ns, uint32_t *slot);
/* dp_channel_unshare makes the worker unmap memory in which calls were placed. Their slots are free. */
void dp_channel_unshare(dp_channel *ch, const dp_mem *m);
/* dp_channel_test makes progress without blocking. 1: the call ended (finish it), 0: not yet. */
int dp_channel_test(dp_channel *ch, uint32_t slot);
/* dp_channel_wait returns when the call ended or deadline_ns (CLOCK_MONOTONIC, 0: none) passed; DP_OK or DP_DEADLINE. */
int dp_channel_wait(dp_channel *ch, uint32_t slot, int64_t deadline_ns);
/* A wait that another thread may interrupt. dp_channel_wait_turn is dp_channel_wait that returns DP_YIELD, soon, when
 * dp_channel_ask or dp_endpoint_ask was called since it last did; with `others` also when another call of its lane has ended.
 * The call continues. dp_endpoint_wait_turn does the same for dp_endpoint_wait_any. */
#define DP_YIELD 1
int dp_channel_wait_turn(dp_channel *ch, uint32_t slot, int64_t deadline_ns, bool others);
int dp_endpoint_wait_turn(dp_endpoint *ep, int64_t deadline_ns);
/* dp_endpoint_sleep_turn does one step of dp_endpoint_wait_turn. It sleeps at once whatever the wait mode is, and may return DP_OK although no call
 * has ended. */
int dp_endpoint_sleep_turn(dp_endpoint *ep, int64_t deadline_ns);
/* dp_channel_wait_some is dp_endpoint_wait_turn on the channel's lane alone. */
int dp_channel_wait_some(dp_channel *ch, int64_t deadline_ns);
/* Asks the thread that waits on the channel's lane, or on any lane, to yield. Any thread; the endpoint must not be destroyed
 * meanwhile. */
void dp_channel_ask(dp_channel *ch);
void dp_endpoint_ask(dp_endpoint *ep);
/* dp_channel_interrupt makes submits on the channel's lane that wait for room, now or later, return DP_LEASE_ENDED, until
 * dp_channel_next_generation. It is for the end of a lease, because a submit whose request is posted in part cannot yield. Any thread. */
void dp_channel_interrupt(dp_channel *ch);
/* dp_channel_look makes progress on the channel's lane without blocking. */
void dp_channel_look(dp_channel *ch);
/* dp_channel_result gives the ended call's status and its result in library memory, valid until finish. */
int dp_channel_result(dp_channel *ch, uint32_t slot, const void **res, uint32_t *size, dp_started *started);
/* dp_channel_finish copies the result to out (if not NULL, at most the submitted capacity) and frees the slot.
 * Returns the call's status. */
int dp_channel_finish(dp_channel *ch, uint32_t slot, void *out, uint32_t *size, dp_started *started);
/* dp_channel_finish_pieces is dp_channel_finish with a result that is scattered to pieces. They have room for the submitted capacity. */
int dp_channel_finish_pieces(dp_channel *ch, uint32_t slot, const dp_pieces *out, uint32_t *size, dp_started *started);
/* dp_channel_message is what the function said in the last call that finished with DP_FUNCTION_FAILED: *len bytes, which dp_failure_code
 * separates into its parts. Valid until the next finish or call. */
const char *dp_channel_message(const dp_channel *ch, uint32_t *len);
/* dp_channel_abandon gives up a call: its reply will be dropped. The slot name is dead afterwards. */
void dp_channel_abandon(dp_channel *ch, uint32_t slot);
/* dp_channel_overdue is dp_channel_abandon for a call whose deadline has passed. It returns whether the function may run. */
dp_started dp_channel_overdue(dp_channel *ch, uint32_t slot);
/* dp_channel_runs_overdue reports whether the worker's oldest unanswered call is overdue (dp_channel_overdue). It sets the call's function
 * (of a chain, the function that runs) and the time at which the deadline passed. */
bool dp_channel_runs_overdue(const dp_channel *ch, uint32_t *function, int64_t *since);
/* dp_channel_give_up_at returns the time at which a wait without a deadline ends because the worker runs an overdue call. 0: no such time. */
int64_t dp_channel_give_up_at(const dp_channel *ch);
/* dp_endpoint_set_overdue sets how long after the deadline of an overdue call waits without a deadline return DP_DEADLINE. 0: never. */
void dp_endpoint_set_overdue(dp_endpoint *ep, int64_t ns);
/* dp_channel_call is submit, wait and finish in one; on the deadline it abandons the call (DP_DEADLINE, NOT_STARTED if the request was
 * not posted by then). */
int dp_channel_call(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, void *out,
                    uint32_t capacity, uint32_t *out_size, int64_t deadline_ns, dp_started *started);
/* dp_channel_call_turn is dp_channel_call that may return DP_YIELD, as dp_channel_wait_turn does: the call goes on in *slot. */
int dp_channel_call_turn(dp_channel *ch, uint32_t function, const void *in, uint32_t size, const dp_mem *reg, void *out,
                         uint32_t capacity, uint32_t *out_size, int64_t deadline_ns, dp_started *started, uint32_t *slot);
/* dp_channel_call_pieces is dp_channel_call_turn with payload and result in pieces, as dp_channel_submit_pieces and
 * dp_channel_finish_pieces take them. */
int dp_channel_call_pieces(dp_channel *ch, uint32_t function, const dp_pieces *in, uint32_t size, const dp_pieces *out, uint32_t capacity,
                           uint32_t *out_size, int64_t deadline_ns, dp_started *started, uint32_t *slot);
/* dp_channel_call_placed is dp_channel_call_turn with the memory of dp_channel_submit_placed. */
int dp_channel_call_placed(dp_channel *ch, uint32_t function, const void *in, uint32_t size, void *out, uint32_t capacity,
                           const dp_places *places, uint32_t *out_size, int64_t deadline_ns, dp_started *started, uint32_t *slot);
/* First and latest probe that found calls in flight without any reply, CLOCK_MONOTONIC ns. By then the calls must have reached the
 * worker. It runs a long function, or will never answer; its executor can tell which. */
typedef struct dp_silence {
    int64_t since, at;
} dp_silence;
/* dp_endpoint_on_silence sets fn, in place of an earlier one. The thread that uses the endpoint calls it now and then while a channel
 * is silent. fn must not use the endpoint. */
typedef void (*dp_silence_fn)(void *arg, const dp_channel *ch, dp_silence silence);
void dp_endpoint_on_silence(dp_endpoint *ep, dp_silence_fn fn, void *arg);
/* dp_endpoint_on_idle sets fn. A thread that waits on the endpoint calls it: often while it spins, every DP_BLOCK_ATTENDED_NS while it
 * blocks, and with `probe` each time that it probes peers. fn must not use the endpoint, but may let its channels fail. */
typedef void (*dp_idle_fn)(void *arg, int64_t now, bool probe);
void dp_endpoint_on_idle(dp_endpoint *ep, dp_idle_fn fn, void *arg);
/* dp_endpoint_wait_any makes progress until a call of any channel has ended since the last such wait, abandoned calls included, or
 * until the deadline. */
int dp_endpoint_wait_any(dp_endpoint *ep, int64_t deadline_ns);

typedef struct dp_channel_stats {
    uint64_t calls, replies, abandoned, late_replies, strays, busy, blocked_waits, bytes_in, bytes_out;
} dp_channel_stats;
void dp_channel_get_stats(const dp_channel *ch, dp_channel_stats *out);
uint32_t dp_channel_free_slots(const dp_channel *ch);
dp_domain *dp_endpoint_domain(dp_endpoint *ep);
/* Returns the device that must stay open until the endpoint is destroyed. */
dp_dev *dp_endpoint_device(const dp_endpoint *ep);
const dp_channel_config *dp_channel_get_config(const dp_channel *ch);

#endif
