/* The page that a worker shares with the executor: its statistics, its phase, and how it died. User code can write to the
 * page, so the executor trusts nothing in it. internal/zygote/page.go is the Go side. */
#ifndef RFAAS_WORKER_PAGE_H
#define RFAAS_WORKER_PAGE_H

#include <stddef.h>
#include <stdint.h>

#include "dp_serve.h"

/* Unlikely values, because a faulty function may overwrite the page. */
enum {
    DP_DEATH_NOTED = 0x44454144,  /* everything except the text is valid */
    DP_DEATH_TRACED = 0x44454145, /* the text is valid too */
};
enum { DP_DEATH_STACK_OVERFLOW = 1, DP_DEATH_BY_ITSELF = 2 /* the process sent the signal */ };

/* How user code ended the process, as far as the process itself can know. */
typedef struct dp_worker_death {
    uint32_t state;    /* written last */
    int32_t signal;    /* 0: exit() was called */
    int32_t code;      /* si_code of the signal, or the exit status */
    int32_t sys_errno; /* errno of the dying thread */
    uint64_t address;  /* si_addr */
    uint32_t sender;   /* process that sent the signal, as the worker sees it; 0: outside of its sandbox */
    uint32_t flags;    /* DP_DEATH_* */
    uint32_t text_len;
    uint32_t pad;
    /* Backtrace, innermost frame first, one line each: "price+0x1f" for the user's library, "library+0x1139" where it
     * names no symbol, "cos+0x2a (libm.so.6)" for others. */
    char text[3584];
} dp_worker_death;

#define DP_PAGE_SIZE 4096

enum {
    DP_PHASE_BEGUN = 0,
    DP_PHASE_LEASED = 1,  /* a pooled worker has its lease */
    DP_PHASE_LOADING = 2, /* the user's library is being loaded; its code may run */
    DP_PHASE_LOADED = 3,  /* the library is loaded; the client's answer may be missing */
};

/* The worker writes the page, and the executor reads it, except for `knock`, which both write. Zero at first. */
typedef struct dp_worker_page {
    dp_server_stats stats;
    uint32_t phase; /* DP_PHASE_* */
    uint32_t client_gone; /* 1: the client's process has ended. Set also while a function runs; a worker that runs none exits */
    dp_knock knock; /* wakes the suspended worker */
    uint8_t gap[240 - sizeof(dp_server_stats) - 2 * sizeof(uint32_t) - sizeof(dp_knock)];
    uint32_t begun; /* 1: the worker runs and has its descriptors; workers of earlier versions send STARTED instead and leave 0 */
    uint32_t pad;
    uint64_t overlay_ns; /* duration of laying a seed over the process, a part of that of loading the library; workers of earlier versions leave 0 */
    dp_worker_death death;
} dp_worker_page;
_Static_assert(sizeof(dp_server_stats) == 56 && offsetof(dp_server_stats, blocked_waits) == 48 &&
                   offsetof(dp_worker_page, phase) == 56 && offsetof(dp_worker_page, client_gone) == 60 && offsetof(dp_worker_page, knock) == 64 && offsetof(dp_worker_page, begun) == 240 && offsetof(dp_worker_page, overlay_ns) == 248 && offsetof(dp_worker_page, death) == 256 && offsetof(dp_worker_death, address) == 16 &&
                   offsetof(dp_worker_death, sender) == 24 && offsetof(dp_worker_death, text) == 40 &&
                   sizeof(dp_worker_page) <= DP_PAGE_SIZE,
               "worker page layout");

#endif
