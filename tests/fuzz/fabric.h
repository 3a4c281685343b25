/* A provider in plain memory, for fuzzing code above the fabric. It has one queue pair. The target's own code is the peer. Every region is a
 * separate allocation, so that the address sanitizer checks its bounds. */
#ifndef RFAAS_FUZZ_FABRIC_H
#define RFAAS_FUZZ_FABRIC_H

#include "dp_fabric.h"
#include "fuzz.h"

enum { FABRIC_RKEY = 0x11 };
#define FABRIC_BASE 0x7f0011223340ull /* address of the peer's region, as the peer announces it */

typedef struct fabric {
    dp_dev dev;
    dp_qp *qp;
    uint8_t *peer; /* the peer's region, the only memory that the side under test may write */
    uint64_t peer_size;
    uint32_t recvs; /* posted and not consumed */
    uint32_t busy;  /* number of further posts that return DP_BUSY */
    /* Called by each poll: stores completions, returns how many. */
    int (*poll)(void *arg, dp_wc *wc, int n);
    /* Called by each write with immediate that the side under test posted. May be NULL. */
    void (*on_imm)(void *arg, uint32_t imm, uint64_t raddr, uint64_t len);
    void *arg;
} fabric;

/* caps as in dp_dev; a message has at most max_msg bytes. The provider is named shm with DP_CAP_RKEY_PTR, else verbs. */
void fabric_init(fabric *f, uint32_t caps, uint32_t max_msg);

#endif
