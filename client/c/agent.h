/* The connection of this process to its agent: requests, replies, events. agent_protocol.h defines the messages. Times are
 * CLOCK_MONOTONIC ns, unless they are time-outs. */
#ifndef RFAAS_AGENT_H
#define RFAAS_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "agent_protocol.h"

#define RFAAS_AGENT_ATTEMPTS 5 /* agents that may end under one operation */

/* A request that is under way; 0: none. */
typedef uint32_t rfaas_ticket;

/* A reply. `data` has `size` bytes: the structure of the operation and what follows it. It is from malloc, and NULL after a
 * failure. */
typedef struct rfaas_reply {
    int status;
    uint32_t generation; /* of the connection that it came by */
    bool unanswered; /* no reply came in time. The agent may still carry out the request later */
    bool lost; /* the agent is gone, or none could be reached; whether it has done what was asked is unknown */
    uint32_t size;
    uint8_t *data;
    char text[RFAAS_AGENT_TEXT]; /* error text of a failure */
    /* Reply to ACQUIRE or RELEASE: channels that the agent has sent before the reply, allocated by malloc (rfaas_reply_free). */
    struct dp_packed_channel *channels;
    uint32_t n_channels, n_fds;
    int *fds;
} rfaas_reply;

/* Frees the data of a reply, and its channels and descriptors. */
void rfaas_reply_free(rfaas_reply *reply);

/* The parts of a request: a structure, the data that follows it (NULL: none), and a descriptor (-1: none) or several of them. The caller
 * keeps the descriptors. */
typedef struct rfaas_request_parts {
    const void *body;
    size_t body_size;
    const void *tail;
    size_t tail_size;
    int fd;
    const int *fds; /* n_fds of them, instead of fd */
    uint32_t n_fds;
    uint32_t to; /* generation of the only agent that gets the request; 0: any */
} rfaas_request_parts;

/* rfaas_agent_can_start reports whether an agent could run within the hard limits of this process. Otherwise `why` says what to do. */
bool rfaas_agent_can_start(char *why, size_t room);
/* rfaas_agent_prepare resets what the agent must not inherit: soft limits, CPUs, memory policy, scheduling. Called in the process that
 * is about to execute the agent. Allocates nothing. */
void rfaas_agent_prepare(void);

/* rfaas_agent_ask sends a request and waits for its reply, at most timeout_ns and a second. A reply shorter than `want` bytes is a
 * protocol error. Without a connection it connects, and starts an agent if none is running. If the agent ends before it replies, the
 * request is repeated. Sets the thread's error and returns its status. `reply` may be NULL; otherwise the caller frees reply->data.
 * Any thread, but not with a lease's mutex held. */
int rfaas_agent_ask(const char *what, uint32_t op, const rfaas_request_parts *parts, int64_t timeout_ns, size_t want,
                    rfaas_reply *reply);
/* rfaas_agent_send sends a request and does not wait for the reply. Returns 0, with the thread's error set, if it cannot be sent
 * before `until`. */
rfaas_ticket rfaas_agent_send(const char *what, uint32_t op, const rfaas_request_parts *parts, int64_t until);
/* rfaas_agent_take takes the reply of a request, and the ticket is invalid then. Returns false if there is no reply yet. */
bool rfaas_agent_take(rfaas_ticket ticket, rfaas_reply *reply);
/* Reports whether rfaas_agent_take would return true. */
bool rfaas_agent_done(rfaas_ticket ticket);
/* rfaas_agent_generation returns how many agents this process has had. The present agent knows what an earlier one has granted only
 * after rfaas_api_reopen has handed it over. */
uint32_t rfaas_agent_generation(void);
/* rfaas_agent_connected reports whether there is a connection to an agent. */
bool rfaas_agent_connected(void);
/* rfaas_agent_drop gives up a request. Its reply will be dropped. Ticket 0: does nothing. */
void rfaas_agent_drop(rfaas_ticket ticket);
/* rfaas_agent_tell sends a message that has no reply. Does nothing if there is no connection. */
void rfaas_agent_tell(uint32_t op, const void *body, size_t size);
/* rfaas_agent_pass is like rfaas_agent_tell, with all parts. Returns false if the message was not sent. */
bool rfaas_agent_pass(uint32_t op, const rfaas_request_parts *parts);
/* rfaas_agent_pass if the agent has this generation, and no thread hands sessions and leases over to another one. */
bool rfaas_agent_pass_to(uint32_t generation, uint32_t op, const rfaas_request_parts *parts);
/* rfaas_agent_wait waits until a message arrives, at most until `until`, and handles it. */
void rfaas_agent_wait(int64_t until);
/* rfaas_agent_look handles messages that have arrived, and workers that connect or have ended. It does not wait, except when the
 * agent has ended: then it connects to another one and hands the leases over. */
void rfaas_agent_look(void);
/* rfaas_agent_news handles events if the shared page shows new ones. Without events it costs two loads. */
void rfaas_agent_news(void);

/* The page that the agent shares; NULL before rfaas_agent_begin. */
extern rfaas_agent_page *rfaas_agent_shared;
/* Makes the page. Returns 0 or an errno. */
int rfaas_agent_begin(void);
/* Closes the connection and unmaps the page. No other thread may be inside the library. */
void rfaas_agent_end(void);
/* Moves a new descriptor away from 0, 1 and 2, which a program may have closed and still writes to. Returns -1 with errno for -1, or when
 * there are no more; fd is closed then. */
int rfaas_agent_above_stdio(int fd);
/* Around fork(): the child has neither connection nor page. */
void rfaas_agent_before_fork(void);
void rfaas_agent_after_fork(bool child);

/* ---- environment.c ---- */

/* rfaas_agent_environment returns the variables of this process, and none in a program with more rights than the user who runs it. */
char **rfaas_agent_environment(void);
/* rfaas_agent_hello_environment returns the variables that the control plane reads, each followed by a NUL, and their size in bytes.
 * The caller frees the result. NULL: out of memory. */
char *rfaas_agent_hello_environment(size_t *size);
/* rfaas_agent_inherited returns the variables that the agent inherits: those of this process, without variables that change how the loader,
 * malloc or the Go runtime behaves. The caller frees the array, but not the strings. NULL: out of memory. */
char **rfaas_agent_inherited(void);

/* ---- agent_pass.c ---- */

/* rfaas_pass_send sends a whole message before `until`, with n_pass descriptors. Returns false if the agent has ended or does not read; the
 * caller must close the connection then. If the user has too many descriptors in flight, sends nothing and returns true. One thread at a
 * time. */
bool rfaas_pass_send(int fd, struct iovec *iov, int n, const int *pass, uint32_t n_pass, int64_t until);
/* rfaas_pass_receive is recv() without waiting, and keeps received descriptors. A read that returns descriptors ends within the message
 * that they belong to, so at most two messages have descriptors at a time. If this process has no room for all descriptors of a
 * message, it keeps none of them. One thread at a time, as for the following functions. */
ssize_t rfaas_pass_receive(int fd, void *to, size_t room);
/* Adds channels of a HAND message to a reply, with the descriptors of the first message that has some. Omits channels of another version
 * of the library, and channels with missing descriptors; the request notices that channels are missing. */
void rfaas_pass_channels(rfaas_reply *r, const uint8_t *body, uint32_t size);
/* Handles a REGION message, with the descriptors of the first message that has some. */
void rfaas_pass_region(const uint8_t *body, uint32_t size);
/* Closes the descriptors of the first message that has some, or those of all messages. */
void rfaas_pass_drop_first(void);
void rfaas_pass_drop(void);

/* ---- agent_start.c ---- */

/* rfaas_agent_reach connects to the agent's socket before `until`, and starts an agent if none is listening. Returns the descriptor,
 * or -1 with *status and text set. */
int rfaas_agent_reach(int64_t until, int *status, char text[RFAAS_AGENT_TEXT]);
/* In a child of fork(): closes what its parent was starting an agent with. */
void rfaas_agent_reach_forked(void);

/* ---- session.c ---- */

/* Opens all sessions at a new agent and hands all leases over to it. */
void rfaas_api_reopen(void);

#endif
