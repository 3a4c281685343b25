/* Shared by the harness and the runner. Cases need only harness.h. */
#ifndef RFAAS_CTEST_RUNNER_H
#define RFAAS_CTEST_RUNNER_H

#include "harness.h"

enum { EXIT_FAILED = 1, EXIT_SKIPPED = 77, EXIT_NO_DEVICE = 78, SLOTS = 256 };

/* The last CHECK of one thread of the case, in memory shared by the runner and its descendants. File names are literals of the
 * same program, so the runner can follow the pointers. */
typedef struct t_slot {
    pid_t pid, tid;
    const char *file;
    int line;
    uint64_t checks; /* that the thread has made */
    char name[24];
    char note[120];
} t_slot;

typedef struct t_board {
    uint32_t claimed;
    uint32_t failed;
    char skip[200];
    t_slot slots[SLOTS];
} t_board;

typedef struct t_run {
    t_case *cases; /* by name */
    t_board *board;
    const char *provider;
    bool encrypt; /* --encrypt */
    uint64_t seed;
} t_run;

extern t_run this_run;

/* Claims a slot for this thread. */
t_slot *t_claim_slot(void);
/* This thread's slot, or NULL. Async-signal-safe. */
const t_slot *t_my_slot(void);
const char *t_base_name(const char *file); /* "?" for NULL */

#endif
