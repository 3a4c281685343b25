/* A provider in plain memory, for fuzzing what stands on the fabric: one queue pair, a peer that is the target's own code,
 * and every region an allocation of its own, so that the address sanitizer watches its ends. */
#ifndef RFAAS_FUZZ_FABRIC_H
#define RFAAS_FUZZ_FABRIC_H

#include "dp_fabric.h"
#include "fuzz.h"

enum { FABRIC_RKEY = 0x11 };
#define FABRIC_BASE 0x7f0011223340ull /* where the peer's region begins, as it says */

typedef struct fabric {
    dp_dev dev;
    dp_qp *qp;
    uint8_t *peer; /* its region; what the side under test may write, and nothing else */
    uint64_t peer_size;
    uint32_t recvs; /* posted and not consumed */
    uint32_t busy;  /* so many posts find no room */
    /* Called by each poll: stores completions, returns how many. */
    int (*poll)(void *arg, dp_wc *wc, int n);
    /* Called by each write with immediate that the side under test posted. May be NULL. */
    void (*on_imm)(void *arg, uint32_t imm, uint64_t raddr, uint64_t len);
    void *arg;
} fabric;

/* caps as in dp_dev; a message has at most max_msg bytes. The provider says it is shm with DP_CAP_RKEY_PTR, else verbs. */
void fabric_init(fabric *f, uint32_t caps, uint32_t max_msg);

#endif
