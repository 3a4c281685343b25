/* The libraries of a process, and which parts of their memory a seed takes along. */
#ifndef RFAAS_SEED_MODULES_H
#define RFAAS_SEED_MODULES_H

#include <stdbool.h>
#include <stdint.h>

#define DP_MODULES_MAX 256
#define DP_MODULE_NAME 96

/* One loaded object. Of objects that were loaded before user code, only the name, the build and the address count: they stay the
 * process's own. */
typedef struct dp_module {
    char name[DP_MODULE_NAME]; /* last component of the path, cut */
    uint8_t build[20];         /* build id; 0 without one */
    uint64_t base;
    uint64_t data, data_size; /* whole pages: writable, and behind those that the linker makes read-only */
    /* Slots of .got.plt within the data. They hold what the linker and IFUNCs chose for this processor, so each process keeps its own. */
    uint64_t slots, slots_size;
    uint64_t tls, tls_size; /* the serving thread's block */
    uint32_t tls_id;
    uint32_t own; /* a dp_module_role */
} dp_module;

typedef enum dp_module_role {
    DP_MODULE_PROCESS,   /* of the process, which user code may use */
    DP_MODULE_OWN,       /* loaded for user code */
    DP_MODULE_UNRELATED, /* of the process, for its own purposes, such as a provider: others may have none. User code does not name it */
} dp_module_role;

typedef struct dp_modules {
    uint32_t n;
    uint32_t more; /* objects beyond DP_MODULES_MAX */
    uint32_t loaded[2]; /* from the first to before the second are objects that the process has loaded later than the program */
    dp_module list[DP_MODULES_MAX];
} dp_modules;

/* dp_modules_program notes that all loaded objects are those with which the program started. */
void dp_modules_program(void);
/* dp_modules_list lists the loaded objects in the linker's order. The first `before` ones were loaded before user code. UINT32_MAX: all, and those that
 * come later are for user code. mimalloc always counts as loaded for user code. */
void dp_modules_list(dp_modules *m, uint32_t before);
/* dp_modules_touch_tls makes the serving thread's blocks of all own objects, which the linker otherwise makes at the first use. They are
 * in the arena afterwards, or in the thread's static block. */
void dp_modules_touch_tls(dp_modules *m, uint32_t before);

#endif
