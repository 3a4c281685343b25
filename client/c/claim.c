/* Claims: the library takes the workers of a cached lease by a compare-and-swap in memory that the executor shares (dp_claim.h). The agent sends
 * the claim region's descriptor once, and the number of the line with each cached lease.
 *
 *   lease_open ── compare-and-swap, bell ──▶ executor: thaws the workers
 *        └─ line of the shared page
 *   later ── CLAIMED ──▶ agent: follows the lease, renews it, reports its events
 *
 * Waking the agent at once would delay the first call, because the agent runs on this node. So the library sends CLAIMED after the second
 * call (the first, if several threads use the lease), before any other message, when a call lasts some milliseconds, or when a call fails. If the
 * program does none of that, the agent finds the claim in the page. */
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

#define REPORT_AFTER_NS 1000000 /* a thread that waits for a call tells the agent of claims older than this */
#define SHORT_NS 5000000000ll     /* a claim of a shorter lease is reported at once, before it can expire */

static pthread_mutex_t unreported_mu = PTHREAD_MUTEX_INITIALIZER; /* taken before a lease's mu and the mutex of the connection */
static rfaas_lease *unreported;  /* linked by unreported_next */
int64_t rfaas_api_unreported; /* time of the first claim in the list; 0: the list is empty. Written under unreported_mu */

static void set_since(int64_t at) { __atomic_store_n(&rfaas_api_unreported, at, __ATOMIC_RELAXED); }

/* Sends CLAIMED for a lease, unless the agent has found the claim. If the message is not sent, the next agent adopts the lease. If this process ends
 * before the agent reads it, the agent finds the claim in the page. */
static void report(rfaas_lease *l) {
    rfaas_agent_adopt req;
    uint32_t by = 0, n = 0;
    pthread_mutex_lock(&l->mu);
    const rfaas_grant *h = l->grant;
    uint64_t *pids = h && h->key ? malloc(h->n_workers * sizeof *pids) : NULL; /* without memory, the agent finds the claim */
    if (pids) {
        rfaas_api_describe_grant(l, h, &req, pids);
        n = h->n_workers;
        by = h->claimed_by;
    }
    pthread_mutex_unlock(&l->mu);
    if (!pids)
        return;
    req.cached = __atomic_load_n(&l->line->claimed, __ATOMIC_ACQUIRE);
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .tail = pids, .tail_size = n * sizeof *pids, .fd = l->library_fd};
    if (req.cached)
        rfaas_agent_pass_to(by, RFAAS_AGENT_CLAIMED, &parts);
    free(pids);
}

bool rfaas_api_note_claim(rfaas_lease *l, rfaas_grant *h, uint64_t cached, uint32_t by) {
    rfaas_agent_lease_line *line = l->line;
    int64_t now = dp_now_ns();
    h->claimed_by = by;
    line->lease_id = h->lease_id;
    line->until_ns = h->until_ns;
    pthread_mutex_lock(&unreported_mu);
    __atomic_store_n(&line->claimed, cached, __ATOMIC_RELEASE);
    l->unreported_next = unreported;
    unreported = l;
    if (!rfaas_api_unreported)
        set_since(now);
    pthread_mutex_unlock(&unreported_mu);
    if (h->until_ns - now < SHORT_NS)
        rfaas_api_tell_claims();
    __atomic_store_n(&l->entered, LOOK_EVERY - 2, __ATOMIC_RELAXED); /* the second call tells the agent when it leaves the lease */
    return by == rfaas_agent_generation(); /* if another agent comes only after this, it adopts the lease */
}

void rfaas_api_tell_claims(void) {
    if (!__atomic_load_n(&rfaas_api_unreported, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&unreported_mu); /* held until the messages are sent, because another thread may release one of the leases next */
    for (rfaas_lease *l; (l = unreported);) {
        unreported = l->unreported_next;
        report(l);
    }
    set_since(0);
    pthread_mutex_unlock(&unreported_mu);
}

void rfaas_api_tell_old_claims(int64_t now) {
    int64_t since = __atomic_load_n(&rfaas_api_unreported, __ATOMIC_RELAXED);
    if (since && now - since >= REPORT_AFTER_NS)
        rfaas_api_tell_claims();
}

void rfaas_api_forget_claim(rfaas_lease *l) {
    pthread_mutex_lock(&unreported_mu);
    for (rfaas_lease **p = &unreported; *p; p = &(*p)->unreported_next)
        if (*p == l) {
            *p = l->unreported_next;
            break;
        }
    if (!unreported)
        set_since(0);
    __atomic_store_n(&l->line->claimed, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&unreported_mu);
}

void rfaas_api_forget_claims(void) {
    pthread_mutex_init(&unreported_mu, NULL);
    unreported = NULL;
    set_since(0);
}
