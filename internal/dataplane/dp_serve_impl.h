/* Internals of a server: dp_server.c makes, connects and ends it, and passes requests of other threads to it. dp_serve.c serves calls. */
#ifndef RFAAS_DP_SERVE_IMPL_H
#define RFAAS_DP_SERVE_IMPL_H

#include <string.h>

#include "dp_layout.h"
#include "dp_serve.h"
#include "dp_wait.h"

/* Requests of another thread, in dp_server.stop. */
enum { STOP_NOW = 1, STOP_EMPTY, STOP_SUSPEND, STOP_RESUME };

/* Memory for a payload or a result in parts. */
typedef struct dp_area {
    uint8_t *at; /* NULL: none */
    uint64_t size;
} dp_area;

typedef enum dp_parts_state { DP_PARTS_NONE, DP_PARTS_ARRIVE, DP_PARTS_RAN } dp_parts_state;

/* A slot's call in parts: its payload arrives, or the function has returned and the client takes the rest of its result. */
typedef struct dp_parts {
    dp_parts_state state;
    uint16_t function;
    uint32_t then;
    uint32_t call_id;
    uint32_t size, capacity; /* of payload and result, as in each message */
    uint32_t got;            /* bytes of the payload that have arrived */
    uint32_t total;          /* bytes of the result */
    dp_area in, out;
} dp_parts;
#define DP_PART_GUARD 64 /* bytes behind a result, for the guard */

struct dp_server {
    dp_server_config cfg;
    dp_dev *dev;
    dp_domain *domain;
    dp_cq *cq;
    dp_qp *qp;
    dp_qp *other; /* of a brokered client: before DP_REQ_MOVE the second queue pair, afterwards the first one */
    bool moved;
    dp_layout layout;
    bool ahead; /* made before its client was known */
    dp_side client, next_client; /* next_client: with the address of the second queue pair */
    bool unconnected; /* dp_server_run connects, since the client needs the server's blob first */
    dp_mem *requests; /* slots and bulk area that the client writes */
    dp_parts *parts;     /* by slot */
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
    uint64_t mailbox_what, mailbox_sizes; /* its words, without the call id: dp_mailbox_predict() */
    _Alignas(DP_CACHE_LINE) uint64_t mailbox_args[8]; /* its payload, if short: copied once */
    dp_waiter waiter;
    dp_server_stats own, *stats;
    uint32_t more;     /* DP_MORE while the reply of a batch may wait for the next reply, else 0 */
    int64_t served_at; /* when the last call of a batch ended */
    dp_wc *pending; /* completions found while a post waited for room */
    uint32_t n_pending, cap_pending;
    int32_t stop;      /* atomic, futex: 0 or STOP_* */
    dp_qp *watched;    /* atomic: queue pair of which another thread notices the end of the peer; NULL: none */
    bool look;         /* atomic: that thread has noticed something */
    uint32_t next_generation; /* of the client, with STOP_RESUME */
    bool late;                /* not connected: dp_server_resume names the client */
    dp_knock *knock;          /* wakes the suspended server: own_knock, or in the page that the executor shares */
    dp_knock own_knock;
    void (*suspended_fn)(void *arg);
    void *suspended_arg;
    int64_t finish_at; /* time at which a finishing server without work ends; 0: it had work at its last poll */
};

/* ---- the guard of a result ---- */

/* Eight bytes behind the room for a result. A function that changes them has written beyond it. */
#define GUARD 0x9d31f5b6c7a2e84bull

static inline bool guard_damaged(const uint8_t *res, uint32_t capacity) {
    uint64_t found;
    memcpy(&found, res + capacity, sizeof found);
    return found != GUARD;
}

/* Returns whether there is room for the guard. Writes the guard if it is not there yet: usually the guard of the last call still is. Behind a result that is
 * made in place, the guard has a cache line of its own, which the client's processor fetches together with the last line of the result. Writing the guard
 * again would transfer this line back. */
static inline bool set_guard(uint8_t *res, uint32_t capacity, uint64_t room) {
    const uint64_t guard = GUARD;
    if (__builtin_expect(room - capacity < sizeof guard, 0))
        return false;
    if (guard_damaged(res, capacity))
        memcpy(res + capacity, &guard, sizeof guard);
    return true;
}

/* ---- between dp_server.c and dp_serve.c ---- */

/* Handles DP_REQ_MOVE. Sets *size to the bytes of the answer, which is in s->scratch. Returns the status of the request. */
int dp_server_move(dp_server *s, uint32_t slot, const dp_request *h, uint32_t arrived, uint32_t *size);
/* The answer has been posted. */
void dp_server_moved(dp_server *s);
/* Carries out the request of another thread, when the server has nothing to do. Returns true if the server is to end. */
bool dp_server_obey(dp_server *s, int32_t what);
/* Maps `size` bytes (a multiple of the page size) with an inaccessible page behind them. NULL: errno says why not. */
uint8_t *dp_server_scratch(uint64_t size);
/* Waits until an unconnected server's client has connected, or until another thread has a request. */
int dp_server_meet(dp_server *s);

/* ---- dp_serve_parts.c; word: the first of the header, which was read once ---- */

/* Copies a part of a payload. The payload is complete when the slot's `got` equals its size. 0, or the status to refuse with. */
int dp_parts_take(dp_server *s, uint32_t slot, const dp_request *h, uint64_t word);
/* Checks a request for a part of a result. 0, or the status to refuse with. */
int dp_parts_give(dp_server *s, uint32_t slot, const dp_request *h, uint64_t word);
/* The function has returned a result of `total` bytes, and the client has not taken all of it. */
void dp_parts_ran(dp_parts *p, uint32_t total);
/* The call has ended. Its memory is kept for the next one, unless it is large. */
void dp_parts_done(dp_parts *p);
/* Frees the memory. */
void dp_parts_drop(dp_parts *p);

#endif
