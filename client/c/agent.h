/* The connection of this process to its agent: requests, replies, events. Messages: agent_protocol.h. */
#ifndef RFAAS_AGENT_H
#define RFAAS_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agent_protocol.h"

#define RFAAS_AGENT_ATTEMPTS 5 /* agents that may end under one operation */

/* A request that is under way; 0: none. */
typedef uint32_t rfaas_ticket;

/* data is from malloc, `size` bytes: the structure of the operation and what lies behind it. NULL after a failure. */
typedef struct rfaas_reply {
    int status;
    bool lost; /* the agent is gone, or none could be reached; whether it has done what was asked is unknown */
    uint32_t size;
    uint8_t *data;
    char text[RFAAS_AGENT_TEXT]; /* of a failure */
} rfaas_reply;

/* What a request sends: a structure, what lies behind it (NULL: nothing), and a descriptor, which stays the caller's (-1: none). */
typedef struct rfaas_request_parts {
    const void *body;
    size_t body_size;
    const void *tail;
    size_t tail_size;
    int fd;
} rfaas_request_parts;

/* rfaas_agent_ask sends a request and waits for its reply, for at most timeout_ns. A reply shorter than `want` bytes is a protocol
 * error. Connects to the agent, or starts one, if need be, and asks again when it was lost on the way. Sets the thread's error and
 * returns its status; reply may be NULL. Free reply->data. Any thread; not with a lease's mutex. */
int rfaas_agent_ask(const char *what, uint32_t op, const rfaas_request_parts *parts, int64_t timeout_ns, size_t want,
                    rfaas_reply *reply);
/* rfaas_agent_send sends a request and returns at once; 0 with the thread's error set if the agent cannot be reached until then. */
rfaas_ticket rfaas_agent_send(const char *what, uint32_t op, const rfaas_request_parts *parts, int64_t until);
/* rfaas_agent_take takes the reply of a request if it has come. The ticket is dead then. */
bool rfaas_agent_take(rfaas_ticket ticket, rfaas_reply *reply);
/* rfaas_agent_drop gives up a request; its reply is dropped when it comes. 0: nothing. */
void rfaas_agent_drop(rfaas_ticket ticket);
/* rfaas_agent_tell sends a message that has no reply. If there is no connection, nothing happens. */
void rfaas_agent_tell(uint32_t op, const void *body, size_t size);
/* rfaas_agent_wait waits until something has arrived, at most until then (CLOCK_MONOTONIC ns), and takes it in. */
void rfaas_agent_wait(int64_t until);
/* rfaas_agent_look takes in what has arrived, and attends to workers that connect or have ended, without waiting. Notices the end of the
 * agent, and connects to another one. */
void rfaas_agent_look(void);
/* rfaas_agent_news takes in events if the shared page says that there are some: a load, if there are none. */
void rfaas_agent_news(void);

/* The page that is shared with the agent, made by rfaas_agent_begin; NULL before. */
extern rfaas_agent_page *rfaas_agent_shared;
/* 0, or errno. */
int rfaas_agent_begin(void);
/* Closes the connection and unmaps the page. No other thread is inside the library. */
void rfaas_agent_end(void);
/* Moves a new descriptor away from 0, 1 and 2, which a program may have closed and still writes to. Returns -1 with errno for -1, or when
 * there are no more; fd is closed then. */
int rfaas_agent_above_stdio(int fd);
/* Around fork(): the child has neither connection nor page. */
void rfaas_agent_before_fork(void);
void rfaas_agent_after_fork(bool child);

/* The variables of this process, for the agent: none in a program that has more rights than the user who runs it. */
char **rfaas_agent_environment(void);

/* ---- agent_start.c ---- */

/* rfaas_agent_reach connects to the agent's socket, and starts an agent if nobody listens there, until then. Returns the
 * descriptor, or -1 with status and text. */
int rfaas_agent_reach(int64_t until, int *status, char text[RFAAS_AGENT_TEXT]);
/* In a child of fork(): closes what its parent was starting an agent with. */
void rfaas_agent_reach_forked(void);

/* ---- what the library does when it has another agent (session.c, lease.c) ---- */

/* Opens all sessions and hands over all leases, with rfaas_agent_ask_now. */
void rfaas_api_reopen(void);

#endif
