/* Claims: the library takes the workers of a cached lease by a compare-and-swap in memory that the executor shares (dp_claim.h). The agent sends
 * the claim region's descriptor once, and the number of the line with each cached lease. The library tells the agent of a claim afterwards.
 *
 *   lease_open ── compare-and-swap, bell ──▶ executor: thaws the workers
 *        └─ CLAIMED ──▶ agent: follows the lease, renews it, reports its events
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client.h"

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

bool rfaas_api_tell_claimed(const rfaas_lease *l, const rfaas_grant *h, uint64_t cached, uint32_t by) {
    rfaas_agent_adopt req;
    uint64_t pids[RFAAS_WORKERS_MAX];
    rfaas_api_describe_grant(l, h, &req, pids);
    req.cached = cached;
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .tail = pids, .tail_size = h->n_workers * sizeof *pids, .fd = l->library_fd};
    if (by != rfaas_agent_generation())
        return false;
    rfaas_agent_pass(RFAAS_AGENT_CLAIMED, &parts); /* if the message is not sent, the next agent adopts the lease */
    return true;
}
