/* Claims: the library takes the workers of a cached lease by a compare-and-swap in memory that the executor shares (dp_claim.h). The agent sends
 * the claim region's descriptor once, and the number of the line with each cached lease.
 *
 *   lease_open ── compare-and-swap, bell ──▶ executor: thaws the workers
 *        └─ line of the shared page
 *   later ── CLAIMED ──▶ agent: follows the lease, renews it, reports its events
 *
 * Waking the agent at once would delay the first call, because the agent runs on this node. So the library sends CLAIMED after the second
 * call, before any other message, while a call lasts long, or when a call fails. If the program does none of that, the agent finds the claim in
 * the page. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "call.h"

#define REGIONS_MAX 64 /* of one process. The workers of further regions are not claimed */

typedef struct region {
    uint32_t number, by; /* by: generation of the agent that has sent it */
    dp_claim_region *map;
} region;

static region regions[REGIONS_MAX]; /* entries below n_regions do not change */
static uint32_t n_regions;          /* written by the thread that reads from the agent */

void rfaas_api_take_region(const uint8_t *body, uint32_t size, int fd) {
    rfaas_agent_region r;
    struct stat st;
    if (size < sizeof r || n_regions == REGIONS_MAX || fstat(fd, &st) || st.st_size != sizeof(dp_claim_region))
        return;
    memcpy(&r, body, sizeof r);
    dp_claim_region *map = mmap(NULL, sizeof *map, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (map == MAP_FAILED)
        return;
    if (map->magic != DP_CLAIM_MAGIC || map->lines != DP_CLAIM_LINES) { /* an executor of another version */
        munmap(map, sizeof *map);
        return;
    }
    regions[n_regions] = (region){r.number, rfaas_agent_generation(), map};
    __atomic_store_n(&n_regions, n_regions + 1, __ATOMIC_RELEASE);
}

void rfaas_api_forget_regions(void) {
    for (uint32_t i = 0; i < n_regions; i++)
        munmap(regions[i].map, sizeof *regions[i].map);
    n_regions = 0;
}

bool rfaas_api_claim_workers(const rfaas_agent_claim *claim, uint32_t by, bool own, dp_claimed *out) {
    if (!claim->region || !by || by != rfaas_agent_generation() || claim->line >= DP_CLAIM_LINES)
        return false;
    uint32_t n = __atomic_load_n(&n_regions, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < n; i++)
        if (regions[i].number == claim->region && regions[i].by == by)
            return dp_claim_take(regions[i].map, claim->line, claim->sequence, own, out);
    return false;
}

/* ---- telling the agent ---- */

#define TELL_NS 1000000 /* a wait for a call tells of claims that are older */

static pthread_mutex_t untold_mu = PTHREAD_MUTEX_INITIALIZER; /* taken before a lease's mu and the mutex of the connection */
static rfaas_lease *untold;    /* linked by untold_next */
static int64_t untold_since;   /* time of the first claim in the list; 0: the list is empty. Written under untold_mu */

static void set_since(int64_t at) { __atomic_store_n(&untold_since, at, __ATOMIC_RELAXED); }

/* Sends CLAIMED for a grant of a lease. If the message is not sent, the next agent adopts the lease. next: the lease has not moved to this grant
 * yet. NULL: it is the grant that the lease has. */
static void tell(rfaas_lease *l, const rfaas_grant *next, uint64_t cached) {
    rfaas_agent_adopt req;
    pthread_mutex_lock(&l->mu);
    const rfaas_grant *h = next ? next : l->grant;
    uint64_t *pids = h && h->key && h->claimed_by == rfaas_agent_generation() ? malloc(h->n_workers * sizeof *pids) : NULL;
    uint32_t n = pids ? h->n_workers : 0;
    if (pids)
        rfaas_api_describe_grant(l, h, &req, pids);
    pthread_mutex_unlock(&l->mu);
    if (!pids)
        return;
    req.cached = cached;
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .tail = pids, .tail_size = n * sizeof *pids, .fd = l->library_fd};
    rfaas_agent_pass(RFAAS_AGENT_CLAIMED, &parts);
    free(pids);
}

bool rfaas_api_note_claim(rfaas_lease *l, rfaas_grant *h, uint64_t cached, uint32_t by) {
    rfaas_agent_lease_line *line = l->line;
    h->claimed_by = by;
    if (h != l->grant) { /* the line belongs to the present grant */
        tell(l, h, cached);
        return by == rfaas_agent_generation();
    }
    line->lease_id = h->lease_id;
    line->until_ns = h->until_ns;
    pthread_mutex_lock(&untold_mu);
    __atomic_store_n(&line->claimed, cached, __ATOMIC_RELEASE);
    l->untold_next = untold;
    untold = l;
    if (!untold_since)
        set_since(dp_now_ns());
    pthread_mutex_unlock(&untold_mu);
    __atomic_fetch_add(&rfaas_agent_shared->claims, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&l->entered, LOOK_EVERY - 2, __ATOMIC_RELAXED); /* the second call tells the agent when it leaves the lease */
    return by == rfaas_agent_generation(); /* if another agent comes only after this, it adopts the lease */
}

void rfaas_api_tell_claims(void) {
    if (!__atomic_load_n(&untold_since, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&untold_mu); /* held until the messages are sent, because another thread may release one of the leases next */
    for (rfaas_lease *l; (l = untold);) {
        untold = l->untold_next;
        uint64_t cached = __atomic_exchange_n(&l->line->claimed, 0, __ATOMIC_SEQ_CST);
        if (cached)
            tell(l, NULL, cached);
    }
    set_since(0);
    pthread_mutex_unlock(&untold_mu);
}

void rfaas_api_tell_old_claims(int64_t now) {
    int64_t since = __atomic_load_n(&untold_since, __ATOMIC_RELAXED);
    if (since && now - since >= TELL_NS)
        rfaas_api_tell_claims();
}

void rfaas_api_forget_claim(rfaas_lease *l) {
    pthread_mutex_lock(&untold_mu);
    for (rfaas_lease **p = &untold; *p; p = &(*p)->untold_next)
        if (*p == l) {
            *p = l->untold_next;
            break;
        }
    if (!untold)
        set_since(0);
    __atomic_store_n(&l->line->claimed, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&untold_mu);
}

void rfaas_api_forget_claims(void) {
    pthread_mutex_init(&untold_mu, NULL);
    untold = NULL;
    set_since(0);
}
