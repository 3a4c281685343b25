/* The insides of endpoints and channels: dp_channel.c makes, connects and resets them, dp_submit.c starts calls,
 * dp_call.c sees to replies and waits. */
#ifndef RFAAS_DP_CHANNEL_IMPL_H
#define RFAAS_DP_CHANNEL_IMPL_H

#include "dp_bulk.h"
#include "dp_channel.h"
#include "dp_layout.h"
#include "dp_wait.h"

#define DP_NOTHING UINT32_MAX /* no bulk range, no slot */
#define DP_PLACED (UINT32_MAX - 1) /* in place of a bulk range: the result is in shared memory */

typedef enum slot_state { SLOT_FREE, SLOT_BUSY, SLOT_DONE, SLOT_ABANDONED, SLOT_FENCED } slot_state;

typedef struct slot {
    slot_state state;
    uint32_t call_id;
    uint32_t capacity;
    uint32_t function;      /* or chain */
    int64_t overdue_since;  /* of an ABANDONED call: when its deadline passed, CLOCK_MONOTONIC ns; 0: it was given up for another reason */
    uint32_t in_at, out_at; /* bulk ranges, DP_NOTHING when none */
    uint64_t told;          /* what the last header for this slot said, dp_told(); DP_UNTOLD when there was none */
    uint32_t told_id;       /* call id of the last request, with header or bare */
    int32_t status;         /* of a DONE call */
    uint32_t size;          /* of its result */
    dp_started started;
    const uint8_t *result;
    const uint8_t *place; /* of the result, when out_at is DP_PLACED */
    struct parts *parts;  /* of a call in parts, else NULL */
} slot;

/* What a bare request repeats. Headers of calls with bulk ranges are told afresh each time. Their flags differ from those of all others,
 * so it does not matter that a capacity above DP_EAGER_MAX loses bits here. */
static inline uint64_t dp_told(uint32_t function, const dp_request *h) {
    return (uint64_t)h->capacity << 44 | (uint64_t)function << 12 | h->flags;
}
#define DP_UNTOLD UINT64_MAX /* no header says that: these flags do not exist */
_Static_assert(DP_EAGER_MAX < 1u << 19 && DP_REQ_BATCH < 1u << 11, "a told word holds capacity, chain or function, and flags");

/* A completion queue with its channels, used by one thread at a time. */
typedef struct dp_lane {
    dp_endpoint *ep;
    dp_cq *cq;
    dp_channel *channels;
    uint32_t n_channels;
    dp_waiter waiter;
    uint64_t ended, seen; /* calls that ended, and those that wait_any has reported */
    uint32_t looks;       /* polls without a result, of callers that poll repeatedly instead of waiting */
    uint32_t asked;       /* atomic: the waiter is to return DP_YIELD */
    uint32_t blocked;     /* atomic: it sleeps, or is about to */
    uint32_t interrupted; /* atomic: submits do not wait for room */
    bool posting; /* a submit waits for room in the middle of its request: nothing else is posted */
} dp_lane;

struct dp_endpoint {
    dp_dev *dev;
    dp_domain *domain;
    dp_wait_mode mode;
    uint32_t n_lanes, max_lanes; /* made, and that channels are spread over */
    uint32_t lane_capacity;
    dp_lane **lanes;
    dp_silence_fn silence_fn;
    dp_idle_fn idle_fn;
    void *idle_arg;
    void *silence_arg;
    int64_t overdue_ns; /* dp_endpoint_set_overdue */
    dp_domain *other; /* of a brokered endpoint: that of the queue pairs to which channels have moved; after dp_promotion_complete the virtual one */
};

/* What probes have seen of a worker that does not answer: dp_silence.c. */
typedef struct quiet {
    int64_t since;    /* first probe after the last answer or progress of a payload; 0: there was no probe */
    int64_t at;       /* last probe */
    int64_t listened; /* time from `since` to `at` in which this side polled */
    uint64_t answers;
    uint64_t acked, received; /* bytes of the connection at the first probe after the last answer */
    uint64_t moved;           /* bytes of payloads from then to `since` */
    int64_t told_at;
} quiet;

struct dp_channel {
    dp_lane *lane;
    dp_endpoint *ep;
    dp_channel *next; /* of its lane */
    dp_qp *qp;
    dp_channel_config cfg;
    dp_layout layout;
    uint32_t next_call;
    /* n_busy and n_done are not adjacent: otherwise a compiler may update both by one access of 8 bytes, which waits for earlier stores of 4 bytes */
    uint32_t n_free, n_busy, n_abandoned, n_done;
    uint32_t n_overdue; /* of those abandoned */
    uint32_t *free; /* stack of free slots: the last used first, it is the warmest */
    slot *slots;
    dp_mem *results; /* slots and bulk area that the worker writes */
    dp_mem *staging; /* requests on their way, same layout; NULL when posts consume their source */
    dp_mem *mapped[2]; /* after dp_promotion_switch: keep the memory of results and staging mapped */
    uint8_t *gather; /* where tcp gathers payloads in pieces: gather_size bytes, or NULL */
    uint32_t gather_size;
    dp_bulk bulk_in, bulk_out;
    dp_mailbox *mailbox;   /* the worker's, mapped here; NULL without shared memory */
    bool mailbox_large;    /* it has the large form */
    uint32_t mailbox_max;  /* largest payload that takes the mailbox: no larger than the channel carries otherwise */
    uint32_t mailbox_last; /* call id of the last request in the mailbox. Reading it in the mailbox would transfer the cache line once more */
    uint64_t mailbox_got;  /* bytes of the last result from the mailbox */
    uint32_t mailbox_slot; /* slot of the call in the mailbox, DP_NOTHING when there is none */
    dp_side peer;
    int failed; /* status that ended it, 0 while it works */
    uint32_t generation; /* not beside next_call: a load of both together would wait until the last store to next_call has left the store buffer */
    bool held;  /* dp_channel_hold, and not connected since */
    bool reserved; /* dp_channel_reserve: `failed` only refuses new calls */
    bool submitting; /* dp_channel_submit_until waits for room */
    bool batch;      /* dp_channel_batch */
    bool lasting;    /* the payload of the present submit stays as it is until the call ends or is given up */
    uint32_t most;   /* largest payload and result in parts; 0: none */
    uint32_t n_due;  /* calls in parts whose next message is to be posted */
    bool share_again; /* the worker has not mapped memory that it was told about */
    dp_channel_stats stats;
    quiet quiet;
    uint32_t message_len; /* of the last DP_FUNCTION_FAILED */
    char message[DP_FAILURE_TEXT + DP_FAILURE_TAIL];
};

/* Reports whether calls in flight can still end with a reply. */
static inline bool dp_channel_serves(const dp_channel *ch) { return !ch->failed || ch->reserved; }

/* Ends every call of the channel with this status; the first one stays. Abandoned slots are fenced until the reset,
 * since the old worker may still write to them. The endpoint's thread. */
void dp_channel_end_calls(dp_channel *ch, int status);

/* Finds the mailbox of the worker that the queue pair is connected to. large: use the large form if the worker has it. */
void dp_channel_find_mailbox(dp_channel *ch, bool large);

/* Submits DP_REQ_MOVE with a blob. The result is a blob, too. Otherwise as dp_channel_submit. */
int dp_channel_submit_move(dp_channel *ch, const void *blob, uint32_t size, uint32_t *out);

/* ---- dp_parts.c ---- */

/* Makes a call in parts of a slot that was taken: its ranges, and a copy of its payload unless that lasts. DP_BUSY, DP_FATAL: dp_slot_free
 * undoes it. */
int dp_parts_begin(dp_channel *ch, slot *s, const void *in, const dp_pieces *pieces, uint32_t size, uint32_t capacity);
/* Posts the messages that are due, as far as there is room. */
void dp_parts_post(dp_channel *ch);
/* What a reply means for a call in parts. */
typedef enum dp_part_reply {
    DP_PARTS_GO_ON,     /* the call continues */
    DP_PARTS_STRAY,     /* nothing: no message of the call is outstanding */
    DP_PARTS_LAST,      /* the call ends as any other with this reply */
    DP_PARTS_ENDED,     /* the call ends. The slot has the result */
    DP_PARTS_WRONG,     /* the worker violates the protocol */
    DP_PARTS_NO_MEMORY, /* there is none for the result */
} dp_part_reply;
/* arrived: bytes of the message. */
dp_part_reply dp_parts_reply(dp_channel *ch, slot *s, dp_reply *h, bool bare, uint32_t arrived);
/* Reports whether the function of a call in parts may have been executed. */
bool dp_parts_started(const slot *s);
/* Reports whether no message of the call is outstanding, so that no reply will come. */
bool dp_parts_due(const slot *s);
/* Nothing more is posted for the call. */
void dp_parts_end(dp_channel *ch, slot *s);
void dp_parts_free(dp_channel *ch, slot *s);

/* ---- dp_silence.c ---- */

/* Probes the peers of channels with calls in flight, unless that was done lately. Abandoned calls count, too: only a reply or the end of
 * the peer frees their slots. */
void dp_lane_probe(dp_lane *lane, int64_t now);
/* Looks after peers for a thread that waits for something other than a reply: runs the idle function, probes, and reaps. */
void dp_lane_attend(dp_lane *lane, int64_t now);
/* After a probe that found the connection whole, with calls under way. */
void dp_channel_listen(dp_channel *ch, int64_t now);
/* The calls that were under way are no more. */
void dp_channel_forget_silence(dp_channel *ch);

/* ---- between dp_call.c and dp_submit.c ---- */

/* Handles what has arrived; true when there was something. */
bool dp_lane_progress(dp_lane *lane);
/* Makes progress for a caller that polls and does not wait here. */
void dp_lane_look(dp_lane *lane);
/* Ends the calls of channels that another thread or the provider declared broken; true when there was one. */
bool dp_lane_reap(dp_lane *lane);
/* dp_channel_wait, or with `yields` dp_channel_wait_turn. */
int dp_lane_wait(dp_channel *ch, uint32_t slot, int64_t deadline_ns, bool yields, bool others);
/* Bulk ranges for what does not fit the slot. DP_BUSY: there is no room now, and the slot has none. */
int dp_slot_take_bulk(dp_channel *ch, slot *s, uint32_t size, uint32_t capacity);
/* The slot and its bulk ranges are free. */
void dp_slot_free(dp_channel *ch, uint32_t i);

static inline void dp_begin_wait(dp_lane *lane) {
    dp_waiter_begin(&lane->waiter);
    if (lane->waiter.mode == DP_WAIT_HOT && !lane->waiter.shared_until)
        dp_cq_promise_hot(lane->cq, true);
}

/* Reports whether the result of a call of this capacity is in the client's slot. */
static inline bool dp_mailbox_in_slot(const dp_channel *ch, uint32_t capacity) { return capacity > DP_MAILBOX_PAIR && ch->mailbox_large; }

/* The word that announces the reply to a call of this capacity. */
static inline const uint64_t *dp_mailbox_word(const dp_channel *ch, uint32_t capacity) {
    if (capacity <= DP_MAILBOX_RESULT)
        return &ch->mailbox->reply;
    return dp_mailbox_in_slot(ch, capacity) ? (const uint64_t *)(const void *)((const uint8_t *)ch->results->addr + dp_layout_reply(&ch->layout))
                                            : &ch->mailbox->long_reply;
}

/* Its result. */
static inline const uint8_t *dp_mailbox_result(const dp_channel *ch, uint32_t capacity, uint32_t i) {
    if (capacity <= DP_MAILBOX_RESULT)
        return (const uint8_t *)ch->mailbox->result;
    return dp_mailbox_in_slot(ch, capacity) ? (const uint8_t *)ch->results->addr + dp_slot_payload(&ch->layout, i) : ch->mailbox->more_result;
}

/* Reports whether a result of so many bytes may be announced for a call of this capacity. */
static inline bool dp_mailbox_allows(const dp_channel *ch, uint32_t capacity, uint32_t size) {
    return size <= capacity && (size <= DP_MAILBOX_SMALL || dp_mailbox_in_slot(ch, capacity));
}

#endif
