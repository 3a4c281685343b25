/* A broker of virtual queue pairs, with clients, for the cases broker/... The broker, its clients and the private device are in the case's process, each
 * worker in one of its own. Not on shm and ofi: their regions cannot be registered by two processes. */
#ifndef RFAAS_CTEST_BROKERED_H
#define RFAAS_CTEST_BROKERED_H

#include "dp_broker.h"
#include "dp_channel_impl.h"
#include "harness.h"

#define BROKERED (T_TCP | T_VERBS)
#define WORKERS_MAX 8

/* Of a function of the workers that says that it runs, and returns when it may. The words are shared by all processes of a case. */
typedef struct gate {
    uint32_t runs, open;
} gate;
extern gate *the_gate;

/* A broker, and the device and virtual device of a client. */
typedef struct house {
    dp_dev *dev, *own, *virtual;
    dp_broker *broker;
    t_peer workers[WORKERS_MAX];
    int n;
} house;

/* A brokered channel: its description and descriptors. */
typedef struct packed {
    dp_packed_channel ch;
    int fds[DP_PACKED_FDS];
} packed;

typedef struct client {
    dp_endpoint *ep;
    dp_channel *ch;
    uint64_t calls; /* that the worker has counted */
    uint32_t seed;
} client;

/* A worker's process, for t_peer_start(): serves one channel after the other. */
void brokered_worker(int sock, void *arg);
/* Starts the workers and the broker. */
void house_open(house *h, int workers);
void house_close(house *h);
/* Makes a channel through the broker to a worker. */
void brokered_channel(house *h, int worker, uint32_t depth, packed *p);
/* Opens a client on the channel, which owns the descriptors from then on. */
void brokered_open(house *h, packed *p, client *c, dp_wait_mode mode);
void brokered_close(client *c);
/* Finishes a call, and checks that it was executed once and in turn. */
void brokered_finish(client *c, uint32_t at, uint32_t n, uint32_t seed);
/* Submits a call with `n` bytes of pattern `seed`. */
uint32_t brokered_submit(client *c, uint32_t n, uint32_t seed);
/* One call with `n` bytes. */
void brokered_call(client *c, uint32_t n);
/* `window` calls in flight, `total` in all. */
void brokered_stream(client *c, uint32_t window, uint32_t total);
/* Asks a worker, and switches to the new queue pair. */
void brokered_move(dp_promotion *p, dp_channel *ch);
/* Moves a client with one channel to a queue pair of its own. */
void brokered_promote(house *h, client *c);
/* Waits until the broker has this many channels. */
void brokered_await(house *h, uint64_t want);
/* Checks that the broker has refused nothing and nothing has failed. */
void brokered_healthy(house *h);
/* Returns the status of a call that is expected to fail, and does so within 20 s. */
int brokered_failed_call(client *c);
/* Connects a failed channel to another worker, on a private queue pair. */
void brokered_replace(house *h, client *c, int worker);

#endif
