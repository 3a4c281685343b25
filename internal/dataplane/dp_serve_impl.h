/* The insides of a server: dp_server.c makes, connects, tells and ends it, dp_serve.c serves. */
#ifndef RFAAS_DP_SERVE_IMPL_H
#define RFAAS_DP_SERVE_IMPL_H

#include "dp_layout.h"
#include "dp_serve.h"
#include "dp_wait.h"

/* Requests of another thread, in dp_server.stop. */
enum { STOP_NOW = 1, STOP_EMPTY, STOP_SUSPEND, STOP_RESUME };

struct dp_server {
    dp_server_config cfg;
    dp_dev *dev;
    dp_domain *domain;
    dp_cq *cq;
    dp_qp *qp;
    dp_layout layout;
    bool ahead; /* made before its client was known */
    dp_side client;
    bool unconnected; /* dp_server_run connects, since the client needs the server's blob first */
    dp_mem *requests; /* slots and bulk area that the client writes */
    dp_request *headers; /* by slot: the last header that came, which bare requests repeat */
    dp_mem *staging;  /* results on their way, same layout; NULL when `out` is the client's memory itself */
    uint8_t *out;     /* where results are put: staging, or the client's region mapped here */
    uint8_t *scratch; /* results that must not touch anything else; an inaccessible page follows */
    uint64_t scratch_size;
    uint8_t *between; /* like scratch: what the first function of a chain returns. NULL before the first chain */
    const dp_function *functions;
    uint32_t n_functions;
    dp_mailbox *mailbox;      /* in our requests region; NULL without shared memory */
    uint64_t mailbox_seen;    /* last request word that was taken */
    _Alignas(DP_CACHE_LINE) uint64_t mailbox_args[8]; /* its payload, if short: copied once */
    dp_waiter waiter;
    dp_server_stats own, *stats;
    uint32_t more;     /* DP_MORE while the reply of a batch may wait for the next reply, else 0 */
    int64_t served_at; /* when the last call of a batch ended */
    dp_wc *pending; /* completions found while a post waited for room */
    uint32_t n_pending, cap_pending;
    int32_t stop;      /* atomic, futex: 0 or STOP_* */
    uint32_t next_generation; /* of the client, with STOP_RESUME */
    void (*suspended_fn)(void *arg);
    void *suspended_arg;
    int64_t finish_at; /* when one that is to finish and has had nothing to do ends; 0: it had something */
};

/* ---- between dp_server.c and dp_serve.c ---- */

/* Carries out the request of another thread, when the server has nothing to do. Returns true if the server is to end. */
bool dp_server_obey(dp_server *s, int32_t what);
/* Maps `size` bytes (a multiple of the page size) with an inaccessible page behind them. NULL: errno says why not. */
uint8_t *dp_server_scratch(uint64_t size);
/* Waits until an unconnected server's client has connected, or until another thread has a request. */
int dp_server_meet(dp_server *s);

#endif
