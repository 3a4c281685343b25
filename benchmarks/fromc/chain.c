/* The bare wake-ups of a lease on frozen workers. The client wakes the executor's thread, and that thread thaws and wakes the worker:
 *
 *   round ── futex wake ──▶ thread ── write to the freezer, futex wake ──▶ process ── word ──▶ round
 */
#include "fromc.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define IDLE_NS 5000000
#define SPIN_NS 20000 /* how long the waiter of a round spins before it blocks, as a client does */
#define PATIENCE_NS 1000000000ll

/* In shared memory, each word on a cache line of its own. Each counts rounds. */
typedef struct words {
    _Alignas(64) uint32_t thread;
    _Alignas(64) uint32_t process;
    _Alignas(64) uint32_t answer;
} words;

struct fromc_chain {
    words *w;
    uint32_t ending;
    int freezer, old; /* of the present round */
    pid_t process;
    pthread_t thread;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0); }

static void ring(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
    wake(word);
}

/* Waits until the word is not `seen`, and returns it. */
static uint32_t await(uint32_t *word, uint32_t seen) {
    uint32_t now;
    while ((now = __atomic_load_n(word, __ATOMIC_ACQUIRE)) == seen)
        syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
    return now;
}

static void *thaw(void *arg) {
    fromc_chain *c = arg;
    for (uint32_t seen = 0;;) {
        seen = await(&c->w->thread, seen);
        if (__atomic_load_n(&c->ending, __ATOMIC_ACQUIRE))
            return NULL;
        if (c->freezer < 0) {
            ring(&c->w->answer);
            continue;
        }
        __atomic_fetch_add(&c->w->process, 1, __ATOMIC_SEQ_CST);
        ssize_t thawed = c->old ? pwrite(c->freezer, "THAWED", 6, 0) : pwrite(c->freezer, "0", 1, 0);
        (void)thawed;
        wake(&c->w->process);
    }
}

static void serve(words *w) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint32_t seen = 0;;) {
        seen = await(&w->process, seen);
        ring(&w->answer);
    }
}

fromc_chain *fromc_chain_new(int cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    fromc_chain *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->w = mmap(NULL, sizeof *c->w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    c->process = c->w == MAP_FAILED ? -1 : fork();
    if (!c->process) {
        sched_setaffinity(0, sizeof one, &one);
        serve(c->w);
        _exit(0);
    }
    int why = errno;
    sigset_t all, old; /* threads of Go handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    if (c->process > 0 && (why = pthread_create(&c->thread, NULL, thaw, c))) {
        kill(c->process, SIGKILL);
        waitpid(c->process, NULL, 0);
        c->process = -1;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (c->process > 0) {
        pthread_setaffinity_np(c->thread, sizeof one, &one);
        return c;
    }
    if (c->w != MAP_FAILED)
        munmap(c->w, sizeof *c->w);
    free(c);
    errno = why;
    return NULL;
}

int fromc_chain_process(const fromc_chain *c) { return c->process; }

int64_t fromc_chain_round(fromc_chain *c, int freezer, int old) {
    struct timespec rest = {.tv_nsec = IDLE_NS};
    while (nanosleep(&rest, &rest) && errno == EINTR)
        ;
    c->freezer = freezer;
    c->old = old;
    uint32_t seen = __atomic_load_n(&c->w->answer, __ATOMIC_ACQUIRE);
    int64_t began = now_ns(), now;
    ring(&c->w->thread);
    while (__atomic_load_n(&c->w->answer, __ATOMIC_ACQUIRE) == seen && (now = now_ns()) - began < PATIENCE_NS)
        if (now - began > SPIN_NS)
            syscall(SYS_futex, &c->w->answer, FUTEX_WAIT, seen, &(struct timespec){.tv_sec = 1}, NULL, 0);
    return __atomic_load_n(&c->w->answer, __ATOMIC_ACQUIRE) == seen ? -1 : now_ns() - began;
}

void fromc_chain_free(fromc_chain *c) {
    kill(c->process, SIGKILL);
    waitpid(c->process, NULL, 0);
    __atomic_store_n(&c->ending, 1, __ATOMIC_RELEASE);
    ring(&c->w->thread);
    pthread_join(c->thread, NULL);
    munmap(c->w, sizeof *c->w);
    free(c);
}
