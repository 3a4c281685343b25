/* An agent for tests of the C library: a thread behind a socket pair, instead of the process of agent_start.c. Its workers are
 * threads too, so that the thread sanitizer sees everything. A case ends with fake_leave. */
#ifndef RFAAS_CTEST_FAKE_AGENT_H
#define RFAAS_CTEST_FAKE_AGENT_H

#include <semaphore.h>

#include "client.h"
#include "dp_serve.h"
#include "ends.h"

enum { CLIENTS = 4, LEASES = 64, WORKERS = 2 };

typedef struct fake_worker {
    pthread_t thread;
    dp_dev *dev;
    dp_server *server;
    uint64_t pid;
    rfaas_agent_blob blob; /* its answer when it started */
    sem_t suspended;
} fake_worker;

typedef struct fake_lease {
    uint64_t key; /* 0: free */
    uint64_t session;
    bool cached; /* released, its workers wait */
    bool known; /* to the present agent */
    fake_worker workers[WORKERS];
} fake_lease;

/* State and counters of the agent. Need fake_mu while it runs. */
extern pthread_mutex_t fake_mu;
extern fake_lease fake_leases[LEASES];
extern uint32_t fake_granted, fake_replaced, fake_released, fake_resumed;
/* Behaviour of the next agent. */
extern int fake_adopts_ms, fake_reads_ms;        /* the time it takes to adopt the first lease, and before it reads at all */
extern uint32_t fake_ends_at, fake_ends;         /* at this operation the agent ends instead of answering; how many times */
extern uint32_t fake_unreached;                  /* number of further grants on tcp that name workers that have ended */
extern int fake_unreached_as;                    /* status with which connecting to them fails */
extern uint32_t fake_leaves, fake_refused;       /* such grants until the agent ends; refused steps from an earlier agent's lease */
extern int fake_loses;                           /* not 0: the next replacement does not end in time, and the lease ends just before the answer (-1) or just after it (1) */
extern uint32_t fake_uses;                       /* number of further replacements whose worker ends, and whose agent then ends before it has answered */
extern int fake_adopt_status;                    /* not 0: the next adoption is refused with it */
/* If not NULL, it is called for the first step of an acquisition that offers no cached channels. The reply then says that channels were
 * handed over. Needs fake_mu. */
extern void (*fake_hands)(uint32_t id);

/* Opens a session with the agent, and sets the options of its leases. */
rfaas_session *fake_session(rfaas_lease_options *lo);
/* Ends the agent's connection. The library then uses the next agent. */
void fake_hang_up(void);
/* Waits for the agent's thread, after the library has left it. */
void fake_leave(void);

/* All of these need fake_mu: */
fake_lease *fake_find(uint64_t key); /* NULL: the agent has no such lease */
void fake_event(const rfaas_agent_event *e);
/* Sends a HAND message with n copies of a descriptor. */
void fake_hand(uint32_t id, const rfaas_agent_hand *hand, const void *tail, size_t tail_size, int fd, uint32_t n);
void fake_death(uint64_t key, uint32_t worker, uint64_t pid);
/* Ends a cached lease of the session (0: of any) and returns its key, 0 if there is none. */
uint64_t fake_drop(uint64_t session);
void fake_dropped(uint64_t key); /* reports the end of a cached lease to the library */

/* The executor's address and node's name of every lease: 255 bytes. */
const char *fake_name(void);

#endif
