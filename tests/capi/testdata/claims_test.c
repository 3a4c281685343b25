/* Many clients take turns on few cached workers by claims (claims_test.go). Arguments: echo.so, and "race:CLIENTS:ROUNDS:SEED" or "take:SEED".
 * Racing clients are threads of several processes. TEST_SHARED names a file that all processes share. */
#define CHECK_ARGUMENT what
static const char *what;
#include "check.h"

#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PIDS (1 << 22) /* the kernel's largest pid_max */
#define CALLS 3        /* of each racing lease */
#define THREADS 20     /* most clients of a process */

/* Counters that this process shares with the processes that it forks. */
static struct counts {
    atomic_int leases, calls, cached;
    atomic_llong held_us; /* sum over all workers, from the first result of their lease to its release */
} *all;
static atomic_char *held; /* by process id of the worker. All processes share it */
static int rounds;
static uint64_t seed;

/* Returns a number below n. *state is not 0. */
static uint32_t draw(uint64_t *state, uint32_t n) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 32) % n;
}

/* Takes a lease, makes calls, and checks that no other lease has the workers meanwhile. Returns whether it got the lease. */
static bool turn(uint64_t number, rfaas_lease_options *o, int calls) {
    rfaas_worker_start from[4];
    rfaas_lease *l;
    uint64_t out = 0;
    o->library = library;
    o->wait_ns = 600000000000;
    if (rfaas_lease_open(session, o, &l)) {
        report(__LINE__, "open");
        return false;
    }
    double began = 0;
    for (uint32_t w = 0; w < o->workers; w++) {
        from[w] = (rfaas_worker_start){.struct_size = sizeof *from};
        OK(rfaas_worker_origin(l, w, &from[w]));
        CHECK(atomic_exchange(&held[from[w].pid % PIDS], 1) == 0);
    }
    for (int i = 0; i < calls; i++) {
        OK(rfaas_invoke(l, find(l, "echo"), &number, 8, &out, 8, NULL, NULL));
        CHECK(out == number);
        all->calls++;
        began = began ? began : now();
    }
    all->held_us += (long long)((now() - began) * 1e6) * o->workers;
    for (uint32_t w = 0; w < o->workers; w++) {
        all->cached += from[w].start == RFAAS_START_CACHED;
        held[from[w].pid % PIDS] = 0;
    }
    OK(rfaas_lease_release(l));
    all->leases++;
    return true;
}

/* An eighth of the leases has terms that no cached worker has, so that the executor ends one. */
static void *client(void *arg) {
    uint64_t me = (uintptr_t)arg, state = seed ^ (me + 1) * 0x9e3779b97f4a7c15;
    for (int i = 0; i < rounds; i++) {
        rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
        o.workers = 1;
        o.flags = RFAAS_LEASE_REUSE;
        o.bulk = draw(&state, 8) ? 1 << 13 : 1 << 14;
        turn(me << 32 | (uint64_t)i, &o, CALLS);
    }
    return NULL;
}

/* Runs the clients first to last - 1 as threads of this process. */
static void race(int first, int last) {
    pthread_t t[THREADS];
    for (int i = first; i < last; i++)
        pthread_create(&t[i - first], NULL, client, (void *)(uintptr_t)i);
    for (int i = first; i < last; i++)
        pthread_join(t[i - first], NULL);
}

/* Takes leases of one to four new workers at random times, for which the executor ends cached workers of the racing clients. Ends with standard input. */
static void take(void) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    for (uint64_t state = seed; poll(&input, 1, (int)draw(&state, 20)) == 0;) {
        rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
        o.workers = 1 + draw(&state, 4);
        o.bulk = 1 << 13;
        if (!turn(state, &o, 1))
            break;
    }
}

void everything(void) {
    int n = 0;
    const char *path = getenv("TEST_SHARED");
    int fd = open(path ? path : "", O_RDWR);
    held = mmap(NULL, PIDS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED && held != MAP_FAILED);
    bool racing = sscanf(what, "race:%d:%d:%lu", &n, &rounds, &seed) == 3;
    int first = 0, children = 0;
    bool child = false;
    for (; racing && !child && n - first > THREADS; children++) { /* the last ones run in this process */
        child = fork() == 0;
        first += child ? 0 : THREADS;
    }
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    if (racing)
        race(first, n - first < THREADS ? n : first + THREADS);
    else if (sscanf(what, "take:%lu", &seed) == 1)
        take();
    else
        report(__LINE__, what);
    OK(rfaas_finalize());
    if (child)
        _exit(failures ? 1 : 0);
    for (int status; children; children--)
        CHECK(wait(&status) > 0 && status == 0);
    printf("leases %d\ncalls %d\ncached %d\nheld_us %lld\n", all->leases, all->calls, all->cached, all->held_us);
}
