/* The cases on tcp between two nodes, if TWO_NODES_NET is set; see nodes.c. Without it, these functions change nothing. */
#ifndef RFAAS_CTEST_NODES_H
#define RFAAS_CTEST_NODES_H

#include "harness.h"

/* Opens the second node. Called once, before any case. Returns false, with the reason, if there is none although TWO_NODES_NET is set. */
bool nodes_open(char *why, size_t len);
bool nodes_two(void);
/* The devices of the calling peer are on the second node. process: the peer was forked just now. */
void nodes_peer(bool process);
/* dp_dev_open for provider tcp. Of the devices of a thread that is not a peer, the first is on the first node, and the next on the one with fewer
 * devices. Devices whose options contain an address stay on the first node. */
int nodes_dev_open(const dp_dev_options *o, dp_dev **out, dp_error *err);
/* Bytes that the first node has received from the second one; 0 without a second node. */
uint64_t nodes_received(void);
/* Reports whether a connection has crossed the link since nodes_received returned `since`. */
bool nodes_crossed(uint64_t since);

#endif
