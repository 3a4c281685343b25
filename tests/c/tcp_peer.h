/* A hand-made peer of a tcp queue pair: a plain socket that sends a hello and any frames. */
#ifndef RFAAS_CTEST_TCP_PEER_H
#define RFAAS_CTEST_TCP_PEER_H

#include "dp_tcp_impl.h"
#include "ends.h"

typedef struct rogue {
    int fd;
    card of; /* the end to which it is connected */
} rogue;

/* Opens a socket to the address of a card's blob. */
int rogue_dial(const card *c);
/* A hello for the queue pair of a card, from a queue pair with this token, with one region of 1 MiB at 0x10000, key 7 and all rights. */
tcp_hello rogue_hello(const card *c, const uint8_t from[DP_TCP_TOKEN_SIZE]);
/* The blob of a peer with this token that does not listen. */
tcp_blob rogue_blob(const uint8_t token[DP_TCP_TOKEN_SIZE]);
/* Connects a rogue to an end, which is in the initial state. */
void rogue_join(rogue *r, end *e);
void rogue_say(rogue *r, const void *bytes, size_t len);
/* Receives len bytes while the end polls. */
void rogue_hear(rogue *r, end *e, void *bytes, size_t len);
/* Polls the end until it closes the rogue's socket. */
void rogue_await_end(rogue *r, end *e);
void rogue_leave(rogue *r);

#endif
