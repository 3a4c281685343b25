/* A channel with its server in a second process or thread, for the channel tests. */
#ifndef RFAAS_CTEST_SERVED_H
#define RFAAS_CTEST_SERVED_H

#include "dp_serve.h"
#include "harness.h"

/* Functions of the test servers, by index. */
enum {
    FN_ECHO,     /* copies its payload */
    FN_EMPTY,    /* touches nothing, returns the payload's size */
    FN_TOO_LARGE, /* writes and returns one byte more than the caller accepts */
    FN_FAIL,     /* fails with a message */
    FN_SLOW,     /* payload: u32 milliseconds; echoes */
    FN_CRASH,    /* SIGSEGV */
    FN_FILL,     /* payload: u32 n; returns n bytes of pattern n */
    FN_FINISH,   /* tells its server to finish; echoes */
    FN_PACE,     /* payload: u32 bytes per second, at which the worker's process then sends over tcp */
    FN_OVERRUN,  /* payload: u32 bytes written, u32 bytes returned */
    FN_SCRIBBLE, /* writes to its payload; returns nothing */
    FN_LENGTH,   /* returns how many bytes its payload has, as u32 */
    FN_FILES,    /* payload: u32, the limit of the process's descriptors from now on; returns nothing */
    FN_COUNT
};
extern const dp_function served_functions[FN_COUNT];

typedef struct served {
    dp_dev *dev;
    dp_endpoint *ep;
    dp_channel *ch;
    t_peer peer;
    dp_wait_mode mode;
} served;

/* Opens a channel of this shape whose server is a process (or a thread with a device of its own). */
void served_open(served *s, bool process, dp_wait_mode mode, uint32_t depth, uint32_t eager, uint64_t bulk);
/* Closes the client's side and waits until the server has ended by itself. */
void served_close(served *s);
/* After the server was killed: the client's side only. */
void served_close_client(served *s);
/* Starts another server for the (reset) channel. */
void served_again(served *s, bool process);

/* Lets no call of the channel use the mailbox. */
void served_by_queue_pair(dp_channel *ch);

/* One good synchronous call with `n` bytes of pattern `seed`, echoed. */
void served_echo(served *s, uint32_t n, uint32_t seed);

#endif
