/* The executor's side of claims (internal/dataplane/dp_claim.h). It is in C, so that the workers are resumed without waiting for a goroutine. */
#ifndef RFAAS_REFLEX_H
#define RFAAS_REFLEX_H

#include "dp_claim.h"

typedef struct reflex reflex;

#define REFLEX_CELLS 64 /* most claimants of a region */

/* What is needed to resume a worker. The reflex owns the descriptor and the mapping while the line is armed. */
typedef struct reflex_worker {
    int freezer;     /* cgroup.freeze of version 2, or freezer.state of version 1 */
    int old;         /* not 0: version 1 */
    void *page;      /* the worker's page, of page_size bytes */
    dp_knock *knock; /* in it */
} reflex_worker;

/* A claim that reflex_collect returns. */
typedef struct reflex_claim {
    uint32_t line;
    int64_t ago_ns; /* since the executor saw it */
} reflex_claim;

/* Makes the reflex of a region, which is a memory file of sizeof(dp_claim_region) bytes, and starts its thread. event: an eventfd that is written
 * about a millisecond after a claim of frozen workers, and when the executor finds a line claimed that it wanted to change. The caller keeps both
 * descriptors open until reflex_free. NULL with errno after an error. */
reflex *reflex_new(int region, int event);
/* Ends the thread, and closes all lines that are armed. */
void reflex_free(reflex *r);
/* Returns the bell of the region, which stays until reflex_free. */
uint32_t *reflex_bell(reflex *r);
/* Adds the cell of a claimant on verbs. Its wishes claim the lines that were armed for the same id, which is not 0 and is never used again. The cell stays
 * until reflex_leave. Returns false if there are REFLEX_CELLS claimants. */
bool reflex_join(reflex *r, uint64_t id, dp_claim_cell *cell);
/* Forgets a claimant. When it returns, nothing refers to the cell, and nobody can claim the lines of the claimant any more. */
void reflex_leave(reflex *r, uint64_t id);
/* Prepares a line for the n workers of a lease. claimant: the only one that can claim them; 0: every process that can change the word. state:
 * DP_CLAIM_AWAKE, the workers still wait for calls; DP_CLAIM_COOLING, the caller freezes them and then calls reflex_cooled; DP_CLAIM_ARMED, they are frozen.
 * A claimant can claim them only while the state is ARMED. Takes over *workers (from malloc) and what is in it. Returns the line and sets *sequence. Returns
 * -1, and takes over nothing, if no line is free or the reflex is ending. */
int reflex_arm(reflex *r, uint64_t lease_id, int64_t client_ns, uint64_t claimant, uint32_t state, reflex_worker *workers, uint32_t n, uint64_t *sequence);
/* The caller freezes awake workers between reflex_cool and reflex_cooled. No client can claim them meanwhile. reflex_cool returns 0 if the line has
 * no awake workers (any more), for example because a client has claimed them. reflex_cooled does nothing if the line was closed. */
int reflex_cool(reflex *r, uint32_t line, uint64_t sequence);
void reflex_cooled(reflex *r, uint32_t line, uint64_t sequence);
/* Closes a line. Returns 0 if a client has claimed it, and then reflex_collect returns the claim or has already returned it. Also returns 0 if the line
 * was closed before. */
int reflex_revoke(reflex *r, uint32_t line, uint64_t sequence);
/* Takes up to `most` of the claims that clients have made before the call. Their lines are free again. */
uint32_t reflex_collect(reflex *r, reflex_claim *out, uint32_t most);
/* Frees workers that were not armed. */
void reflex_free_workers(reflex_worker *workers, uint32_t n);

#endif
