/* Claims: a client takes the cached workers of a released lease by one compare-and-swap, without a message.
 *
 * An executor shares a claim region with an agent on its node, one for each connection of the agent. A line of the region belongs to the workers
 * of one released lease, or of one spare lease. Its word has a state and a sequence number:
 *
 *   NONE ─▶ AWAKE ─▶ COOLING ─▶ ARMED ──┬── client ───▶ CLAIMED     the client has the lease whose id is in the line
 *             └─────────────────────────┴── executor ─▶ CLOSED      the executor ends the workers, or lends them by message
 *
 * A line begins AWAKE, COOLING or ARMED.
 *
 * On verbs, an atomic of the adapter is not atomic with respect to the executor's processors. So the region is not reachable. Instead each claimant, which is
 * a client process or the agent, has a queue pair of its own to a cell of its own. It writes the line and the sequence number into the cell's `wish`, with
 * an immediate that rings the bell, and reads `answer` until the executor has answered this wish. The executor binds each line to one claimant. It decides about
 * claims and revocations of such a line under one lock, and the line's word has no meaning. A claimant makes one claim at a time.
 *
 * AWAKE: the workers still wait for calls, and the released lease pays for that. Only the process that has released it may claim them.
 * COOLING: the workers are being frozen, or on tcp wait for their client's connection before that. Nobody can claim them. ARMED: the workers are frozen.
 *
 * Either the client or the executor succeeds, never both. A client that has claimed frozen workers rings the bell, and the executor thaws and wakes
 * them. Awake workers need no thaw. The executor books the claim later. The processes of the user can write anything into the region. So the
 * executor reads only whether a word is a claim, and keeps its own record of which lines are armed. */
#ifndef RFAAS_DP_CLAIM_H
#define RFAAS_DP_CLAIM_H

#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DP_CLAIM_MAGIC 0x31494c43u /* "CLI1" */
#define DP_CLAIM_LINES 255

enum { DP_CLAIM_NONE = 0, DP_CLAIM_ARMED = 1, DP_CLAIM_CLAIMED = 2, DP_CLAIM_CLOSED = 3, DP_CLAIM_AWAKE = 4, DP_CLAIM_COOLING = 5 };

typedef struct dp_claim_line {
    uint64_t word;      /* state, and the sequence number above its 8 bits */
    uint64_t lease_id;  /* of the lease that a claim gets */
    int64_t client_ns;  /* how long the client may use that lease, from the claim on */
    uint8_t pad[40];
} dp_claim_line;

/* The only memory of an executor that a claimant on verbs reaches. */
typedef struct dp_claim_cell {
    uint64_t wish;   /* dp_claim_wish of the line to claim; 0: none yet. Written by the claimant */
    uint64_t answer; /* the last wish with DP_CLAIM_WON or DP_CLAIM_LOST. Written by the executor */
    uint8_t pad[48];
} dp_claim_cell;

#define DP_CLAIM_WON (1ull << 63)
#define DP_CLAIM_LOST (1ull << 62)

typedef struct dp_claim_region {
    uint32_t magic, lines;
    uint32_t bell; /* futex: raised after a claim of ARMED workers */
    uint8_t pad[52];
    dp_claim_line line[DP_CLAIM_LINES];
} dp_claim_region;
_Static_assert(sizeof(dp_claim_line) == 64 && offsetof(dp_claim_region, line) == 64 && sizeof(dp_claim_region) == 16384 &&
                   sizeof(dp_claim_cell) == 64, "claim region layout");

/* The part of a worker's page through which the executor wakes a suspended worker. Both fields only grow. */
typedef struct dp_knock {
    uint32_t rung;    /* futex: raised by every thread or process that wants the serving thread's attention */
    uint32_t claimed; /* number of claims */
} dp_knock;

static inline uint64_t dp_claim_wish(uint32_t line, uint64_t sequence) { return line | sequence << 8; }

static inline uint64_t dp_claim_word(uint64_t state, uint64_t sequence) { return state | sequence << 8; }

static inline void dp_claim_ring(uint32_t *futex, int waiters) {
    __atomic_fetch_add(futex, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, futex, FUTEX_WAKE, waiters, NULL, NULL, 0);
}

/* A claim that has succeeded. */
typedef struct dp_claimed {
    uint64_t lease_id;
    int64_t client_ns; /* how long the lease may be used */
    bool awake;        /* the workers still serve the same generation; otherwise they take the next one */
} dp_claimed;

/* Claims line `line` of a region if it has this sequence number and is in state ARMED or, with `own`, in state AWAKE. Returns whether it did. own: this
 * process has released the lease. */
static inline bool dp_claim_take(dp_claim_region *r, uint32_t line, uint64_t sequence, bool own, dp_claimed *out) {
    dp_claim_line *l = &r->line[line];
    uint64_t word = __atomic_load_n(&l->word, __ATOMIC_ACQUIRE);
    bool awake = own && word == dp_claim_word(DP_CLAIM_AWAKE, sequence);
    if (!awake && word != dp_claim_word(DP_CLAIM_ARMED, sequence))
        return false;
    /* The line's other fields stay as they are while it has this sequence number. */
    *out = (dp_claimed){__atomic_load_n(&l->lease_id, __ATOMIC_RELAXED), __atomic_load_n(&l->client_ns, __ATOMIC_RELAXED), awake};
    if (!__atomic_compare_exchange_n(&l->word, &word, dp_claim_word(DP_CLAIM_CLAIMED, sequence), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return false;
    if (!awake)
        dp_claim_ring(&r->bell, 1);
    return true;
}

#endif
