/* Leases of a C program, and the bare wake-ups of which a lease on frozen workers consists. */
#ifndef RFAAS_FROMC_H
#define RFAAS_FROMC_H

#include <stdint.h>

#include "rfaas.h"

typedef struct fromc_terms {
    const char *library, *function;
    uint32_t workers, flags, wait_mode;
    uint64_t bulk;
    int64_t rest_ns; /* before the request */
} fromc_terms;

typedef struct fromc_times {
    int64_t leased, total; /* ns from the lease's request until the lease is open, and until the first result */
    rfaas_worker_start start; /* of the first worker */
} fromc_times;

/* Opens a session with an executor. Returns a status. */
int fromc_session(const char *executor, const char *provider, const char *secret, rfaas_session **s);
void fromc_close(rfaas_session *s);
/* Sleeps for rest_ns, then opens a lease and makes one call without a payload. Returns a status; *lease is NULL after an error. */
int fromc_lease(rfaas_session *s, const fromc_terms *terms, fromc_times *times, rfaas_lease **lease);
/* Sets *ns to the time of the release. Returns a status. */
int fromc_release(rfaas_lease *lease, int64_t *ns);

typedef struct fromc_chain fromc_chain;

/* Starts a thread and a process on `cpu`, which wait for futex wake-ups. Returns NULL with errno after an error. */
fromc_chain *fromc_chain_new(int cpu);
int fromc_chain_process(const fromc_chain *c);
/* One round: sleeps for 5 ms, so that processors without work halt. Then it wakes the thread, and returns the time until the answer in ns, or -1 if
 * no answer comes within a second. freezer is the descriptor of a control group's freezer (old: of version 1), or -1. Without a freezer, the thread
 * answers. With one, the process must be frozen: the thread thaws it and wakes it, and the process answers. */
int64_t fromc_chain_round(fromc_chain *c, int freezer, int old);
/* Ends the thread and the process, and frees c. The process must not be frozen. */
void fromc_chain_free(fromc_chain *c);

#endif
