#include "startup.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Bytes that are filled at a time. No other thread can map or unmap meanwhile: some 10 us. */
#define PART (32u << 10)
#define PREFERRED 1 /* MPOL_PREFERRED of linux/mempolicy.h */

struct dp_ahead {
    char *map[DP_AHEAD_MOST]; /* NULL: taken */
    uint64_t size;            /* of one, and with its guard page */
    uint64_t len;
    int n, given;
    bool passed;   /* inherited by this process, whose page tables lack the filled pages */
    bool threaded; /* a thread exists */
    uint64_t next; /* offset in the regions taken as one sequence: everything before it is filled, or is being filled */
    unsigned node; /* NUMA node of its pages, or ~0 */
    pthread_t thread;
};

void dp_cpus_get(dp_cpus *out) {
    memset(out, 0, sizeof *out);
    syscall(SYS_sched_getaffinity, 0, sizeof *out, out);
}

unsigned dp_cpus_count(const dp_cpus *cpus) {
    unsigned n = 0;
    for (size_t i = 0; i < sizeof cpus->words / sizeof cpus->words[0]; i++)
        n += (unsigned)__builtin_popcountl(cpus->words[i]);
    return n;
}

/* Fills the next part that begins before `end`. Returns false if there is none. A part that cannot be filled, for lack of
 * memory, is filled by its first use. */
static bool fill_part(dp_ahead *a, uint64_t end) {
    uint64_t at = __atomic_load_n(&a->next, __ATOMIC_RELAXED), part;
    do {
        if (at >= end)
            return false;
        part = a->size - at % a->size;
        part = part < PART ? part : PART;
    } while (!__atomic_compare_exchange_n(&a->next, &at, at + part, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    madvise(a->map[at / a->size] + at % a->size, part, MADV_POPULATE_WRITE);
    return true;
}

static void *fill_all(void *arg) {
    dp_ahead *a = arg;
    unsigned long nodes[16] = {0};
    const unsigned bits = 8 * sizeof nodes[0];
    if (a->node < 16 * bits) {
        nodes[a->node / bits] = 1ul << a->node % bits;
        syscall(SYS_set_mempolicy, PREFERRED, nodes, 8 * sizeof nodes); /* a hint */
    }
    while (fill_part(a, (uint64_t)a->n * a->size))
        ;
    return NULL;
}

/* The thread would begin on the caller's CPU and wait until the caller sleeps. So the caller's CPUs are excluded, unless no
 * other CPU remains. */
static void choose_cpus(pthread_attr_t *attr, const dp_cpus *cpus) {
    enum { WORDS = sizeof cpus->words / sizeof cpus->words[0] };
    dp_cpus others;
    dp_cpus_get(&others);
    bool any = false;
    for (size_t i = 0; i < WORDS; i++) {
        others.words[i] = cpus->words[i] & ~others.words[i];
        any = any || others.words[i];
    }
    pthread_attr_setaffinity_np(attr, sizeof others, (const cpu_set_t *)(const void *)(any ? &others : cpus));
}

static unsigned node_here(void) {
    unsigned node;
    return syscall(SYS_getcpu, NULL, &node, NULL) ? ~0u : node;
}

void dp_ahead_start(dp_ahead *a, const dp_cpus *cpus) {
    if (!dp_ahead_left(a))
        return;
    pthread_attr_t attr;
    sigset_t all, old;
    sigfillset(&all); /* other threads handle signals */
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, DP_STARTUP_STACK);
    choose_cpus(&attr, cpus);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    a->node = node_here();
    a->threaded = pthread_create(&a->thread, &attr, fill_all, a) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}

static void unmap(dp_ahead *a) {
    for (int i = 0; i < a->n; i++)
        if (a->map[i])
            munmap(a->map[i], a->len);
    free(a);
}

dp_ahead *dp_ahead_map(int n, uint64_t size) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), body = (size + page - 1) & ~(page - 1);
    if (!body || n < 1 || n > DP_AHEAD_MOST || body / page > (uint64_t)sysconf(_SC_PHYS_PAGES) / (unsigned)n)
        return NULL;
    dp_ahead *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->size = body;
    a->node = node_here();
    for (; a->n < n && (a->map[a->n] = dp_region_map(body, 0, &a->len)); a->n++)
        ;
    /* Linux before 5.14 does not have MADV_POPULATE_WRITE, which the first page shows. */
    if (a->n < n || madvise(a->map[0], page, MADV_POPULATE_WRITE)) {
        unmap(a);
        return NULL;
    }
    return a;
}

uint64_t dp_ahead_left(const dp_ahead *a) { return (uint64_t)a->n * a->size - __atomic_load_n(&a->next, __ATOMIC_RELAXED); }

bool dp_ahead_fill(dp_ahead *a) { return fill_part(a, (uint64_t)a->n * a->size); }

bool dp_ahead_pass(dp_ahead *a, bool on) {
    a->passed = on;
    bool done = true;
    for (int i = 0; i < a->n; i++)
        done = madvise(a->map[i], a->size, on ? MADV_DOFORK : MADV_DONTFORK) == 0 && done;
    return done;
}

bool dp_ahead_near(const dp_ahead *a) { return a->node == node_here(); }

char *dp_ahead_peek(const dp_ahead *a) { return a->map[0]; }

uint64_t dp_ahead_size(const dp_ahead *a) { return a->size; }

char *dp_ahead_take(dp_ahead *a, uint64_t size) {
    if (!a || size != a->size || a->given == a->n)
        return NULL;
    int i = a->given++;
    while (fill_part(a, (uint64_t)(i + 1) * a->size))
        ;
    /* Pages that were filled before. A read maps many at a time, and writable, because no file is behind them. */
    if (a->passed)
        madvise(a->map[i], a->size, MADV_POPULATE_READ);
    return a->map[i];
}

static char *take_region(void *arg, uint64_t size) { return dp_ahead_take(arg, size); }

void dp_ahead_lend(dp_ahead *a, dp_dev *dev) {
    dev->take_region = a ? take_region : NULL;
    dev->take_region_arg = a;
}

void dp_ahead_end(dp_ahead *a) {
    if (!a)
        return;
    __atomic_store_n(&a->next, (uint64_t)a->n * a->size, __ATOMIC_RELAXED);
    if (a->threaded)
        pthread_join(a->thread, NULL);
    for (int i = 0; i < a->given; i++)
        a->map[i] = NULL;
    unmap(a);
}
