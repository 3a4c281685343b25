/* Internals of control connections, for dp_raw.c and dp_raw_serve.c. */
#ifndef RFAAS_DP_RAW_IMPL_H
#define RFAAS_DP_RAW_IMPL_H

#include <pthread.h>

#include "dp_raw.h"

struct dp_raw {
    dp_cq *cq;
    dp_qp *qp;
    dp_mem *scratch;
    uint32_t piece, pieces; /* reads and writes that are waited for: bytes of one, and reads at a time */
    pthread_mutex_t lock; /* with a server: everything below, and all use of cq and qp */
    uint64_t next_id;     /* of the next post; odd ones are not waited for */
    uint32_t posted;      /* writes that were posted, */
    uint32_t reaped;      /* and those of them that have completed */
    int status;           /* what ended the connection */
    dp_raw_server *server; /* NULL: none */
    uint64_t event;        /* names the connection in epoll */
    int watched;           /* events that epoll watches for */
    uint32_t *bell;        /* futex that is rung after operations of the peer; NULL: none */
};

/* Records why the connection is over, and returns it. */
int dp_raw_over(dp_raw *r, int status);
/* Takes all completions, and executes operations of the peer. *done counts the completions of posts that are waited for, which come in
 * order. Returns 0 or a status. */
int dp_raw_drain(dp_raw *r, uint32_t *done);
/* With a server: has epoll watch for the events that the connection needs now. Under r->lock. */
void dp_raw_watch(dp_raw *r);
/* Ends serving. Afterwards the server's thread does not use r. */
void dp_raw_unserve(dp_raw *r);

#endif
