/* Seeds: the memory of a prepared worker, from which other workers start.
 *
 * A seed is a memory file. The arena (heap.h) comes first, at the file's offset 0. The maker of a seed maps it shared, so that its heap
 * already is the seed's, and only static data has to be copied when the seed is captured. Behind the arena there are a header and the
 * writable data of each library that was loaded for user code.
 *
 *   0 ............ size      arena: what user code allocated, and its thread-local blocks
 *   size ......... + header  dp_seed_header
 *   behind it                data of each own module, whole pages, those of zeros as holes; then thread-local blocks that lie outside of the arena
 *
 * A worker that starts from a seed loads the same libraries in the same order, so that they lie at the same addresses. It checks that they
 * do, and maps the seed's bytes privately over its own. What user code has in libc or in other objects of the process cannot travel, so
 * dp_seed_capture refuses, by name, whatever it can find there: threads, descriptors, signal handlers and more. */
#ifndef RFAAS_SEED_H
#define RFAAS_SEED_H

#include <locale.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "dp_status.h"
#include "apart.h"
#include "heap.h"
#include "modules.h"

#define DP_SEED_MAGIC 0x4445455352ull /* "RSEED" */
#define DP_SEED_VERSION 5u
#define DP_SEED_KEYS DP_HEAP_KEYS
#define DP_SEED_EXTENTS 1024
#define DP_SEED_WARNING 192 /* bytes of the text with its NUL */

/* Bytes [from, to) of the file, whole pages. */
typedef struct dp_seed_extent {
    uint64_t from, to;
} dp_seed_extent;

/* The header. The file belongs to the tenant, whose code could change it while it was made, so a worker trusts none of its values: it
 * compares them with its own. */
typedef struct dp_seed_header {
    uint64_t magic;
    uint32_t version;
    uint32_t n_modules;
    uint64_t heap_size;
    uint64_t thread_pointer;
    uint64_t processor[4];       /* what code may choose by: AT_HWCAP, AT_HWCAP2, and words of CPUID */
    dp_apart apart;
    uint64_t made[DP_SEED_KEYS / 64]; /* keys that setup has made */
    uint64_t keys[DP_SEED_KEYS];      /* values that point into the arena */
    dp_module modules[DP_MODULES_MAX];
    /* What of the arena has memory. To find it in the file takes 5 ms for 100 MB. */
    uint32_t n_extents;
    dp_seed_extent extents[DP_SEED_EXTENTS];
    uint64_t root, root_size; /* the bytes that rfaas_table returns in workers that map the arena (mapped.h); 0: none */
} dp_seed_header;

/* internal/zygote/layout.go reads these. */
_Static_assert(offsetof(dp_seed_header, processor) == 32 && offsetof(dp_seed_header, modules) == 2072 && sizeof(dp_module) == 184 && offsetof(dp_module, build) == 96 &&
                   offsetof(dp_module, base) == 120 && offsetof(dp_module, data) == 128 && offsetof(dp_module, tls) == 160,
               "layout of a seed's header");
_Static_assert(DP_MODULES_MAX == 256 && offsetof(dp_seed_header, extents) == 49184 && offsetof(dp_seed_header, root) == 65568, "layout of a seed's header");

/* What dp_seed_make_begin finds before user code runs, and dp_seed_capture compares. */
typedef struct dp_seed_before {
    int threads, descriptors;
    struct sigaction actions[_NSIG];
    sigset_t mask;
    uint32_t floating; /* rounding and exceptions */
    mode_t umask;
    uint64_t environment; /* a sum */
    uint64_t directory;
    char locale[256];
    locale_t own_locale; /* of the thread */
    int timers;          /* of timer_create; -1: not known */
    cpu_set_t cpus;
} dp_seed_before;

typedef struct dp_seed {
    int fd;
    bool makes; /* this process makes the seed, and does not start from it */
    uint64_t heap_size;
    uint32_t before; /* modules that stay the process's own */
    dp_modules modules;
    dp_apart apart;
    uint64_t keys[DP_SEED_KEYS / 64]; /* those that exist when the library is loaded */
    const void *payload; /* of the setup function; set by the caller of dp_seed_capture */
    uint64_t payload_size;
    char warning[DP_SEED_WARNING]; /* set by dp_seed_capture: what may be wrong with the seed; "": nothing */
    dp_seed_before was;
    /* Set before dp_seed_apply if the file is filled on demand: called when the heap is mapped and before anything reads it. */
    int (*laid)(void *arg, dp_error *err);
    void *laid_arg;
} dp_seed;

/* dp_seed_prepare does once, in the zygote, what would take longest in each worker that starts from a seed: it loads mimalloc, and asks for the features of
 * the processor, which in a virtual machine only the hypervisor can answer.
 *
 * Thread-specific keys have numbers, which must be the same in all workers of a seed. dp_seed_prepare takes the first ones, so that what a process loads
 * for itself, such as a provider, gets others. dp_seed_free_keys gives them to user code, before that is loaded; a second time it does nothing. */
void dp_seed_prepare(void);
void dp_seed_free_keys(void);

/* Bytes that the file of a seed must have at least, without the modules' data. */
uint64_t dp_seed_file_size(uint64_t heap_size);

/* Reads bytes of the file of a seed. */
int dp_seed_read(int fd, void *to, uint64_t size, uint64_t at, dp_error *err);

/* dp_seed_make_begin and dp_seed_begin map the arena, load the libraries that stay apart, and open the heap: in the process that makes the
 * seed, which knows those libraries, and in a worker that starts from it. *s must be zero: the functions do not clear it, because that would
 * write to 15 pages. fd is the seed's file. The caller loads user code next, with dp_heap_outside 0 meanwhile, then calls dp_seed_loaded. What
 * the caller itself allocates until dp_seed_apply is outside, because the seed is laid over the arena. heap_size is a multiple of DP_HEAP_UNIT,
 * and at least two of them. DP_UNSUPPORTED: this process can have no seed, and may go on without. */
int dp_seed_make_begin(dp_seed *s, int fd, uint64_t heap_size, const dp_apart *apart, dp_error *err);
int dp_seed_begin(dp_seed *s, int fd, uint64_t heap_size, dp_error *err);
/* dp_seed_loaded ends the loading. */
void dp_seed_loaded(dp_seed *s);
/* dp_seed_check_library returns DP_UNSUPPORTED if the state of the library cannot travel, whatever its init call does. Call it after dp_seed_loaded. */
int dp_seed_check_library(const dp_seed *s, dp_error *err);

/* dp_seed_capture writes the seed, after user code has prepared its state. On the thread that executed user code, with no call running.
 * DP_UNSUPPORTED: the state cannot travel; the text names what is in the way and the remedy. From now on, changes to the state are this
 * process's own. */
int dp_seed_capture(dp_seed *s, dp_error *err);

/* dp_seed_unseeded says that the worker goes on without its seed. After dp_seed_begin or dp_seed_apply has returned DP_UNSUPPORTED, or before
 * user code runs. */
void dp_seed_unseeded(dp_seed *s);

/* dp_seed_apply lays a seed over this process. DP_UNSUPPORTED: this process differs from the seed's, and nothing was changed. After
 * another error the process cannot go on. */
int dp_seed_apply(dp_seed *s, dp_error *err);

#endif
