/* Idempotent calls while executors are killed (failover_test.go): as many rounds as the second argument says, each of 100,000
 * calls or more. After a fifth of them it says on which executor it is, which is then killed, and at the end of a
 * round how long nothing was completed at most, and how long without what the machine kept a thread waiting that does nothing. Every
 * result is checked. Exit status 0: all good. */
#define CHECK_ARGUMENT rounds
static const char *rounds;
#include <sched.h>

#include "check.h"

#define CALLS 100000u
#define WINDOW 8

typedef struct span {
    double from, to;
} span;

/* When the machine kept a thread waiting for more than 10 ms, on any core; and when nothing was completed for so long. */
#define SPANS 4096
static pthread_mutex_t held_lock = PTHREAD_MUTEX_INITIALIZER;
static span held[SPANS], gaps[SPANS];
static size_t helds, n_gaps;

static void *wakes(void *arg) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)(intptr_t)arg, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    for (;;) {
        span s = {.from = now() + 0.002};
        usleep(2000);
        s.to = now();
        pthread_mutex_lock(&held_lock);
        if (s.to - s.from > 0.010 && helds < SPANS)
            held[helds++] = s;
        pthread_mutex_unlock(&held_lock);
    }
    return NULL;
}

static double length(span s) { return s.to - s.from; }

/* The longest gap, each without the longest part of it in which a thread was kept waiting, in seconds. Forgets all of them. */
static double own_gap(void) {
    double longest = 0;
    pthread_mutex_lock(&held_lock);
    for (size_t i = 0; i < n_gaps; i++) {
        double most = 0;
        for (size_t k = 0; k < helds; k++) {
            span both = {held[k].from > gaps[i].from ? held[k].from : gaps[i].from, held[k].to < gaps[i].to ? held[k].to : gaps[i].to};
            most = length(both) > most ? length(both) : most;
        }
        longest = length(gaps[i]) - most > longest ? length(gaps[i]) - most : longest;
    }
    helds = n_gaps = 0;
    pthread_mutex_unlock(&held_lock);
    return longest;
}

static void wake_on_every_core(void) {
    cpu_set_t all;
    CHECK(!sched_getaffinity(0, sizeof all, &all));
    for (size_t i = 0; i < CPU_SETSIZE; i++) {
        pthread_t t;
        if (CPU_ISSET(i, &all))
            CHECK(!pthread_create(&t, NULL, wakes, (void *)(intptr_t)i) && !pthread_detach(t));
    }
}

static uint64_t moved(rfaas_lease *l, uint64_t *repeated) {
    rfaas_statistics s = {.struct_size = sizeof s};
    OK(rfaas_lease_statistics(l, &s));
    *repeated = s.repeated;
    return s.moved;
}

void everything(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    uint64_t repeated = 0, before = 0;
    wake_on_every_core();
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    o.library = library;
    o.depth = WINDOW;
    o.flags = RFAAS_LEASE_FAILOVER;
    OK(rfaas_lease_open(session, &o, &l));
    rfaas_function echo = find(l, "echo");
    c.repeats = 3;
    for (uint64_t round = 1; round <= strtoull(rounds, NULL, 10); round++) {
        uint64_t calls = 0, wrong = 0, in[WINDOW], out[WINDOW];
        double last = now(), end = last + 20;
        double longest = 0;
        (void)own_gap();
        while ((calls < CALLS || moved(l, &repeated) < round) && now() < end) {
            rfaas_request r[WINDOW];
            size_t done = WINDOW;
            memset(out, 0, sizeof out);
            for (size_t i = 0; i < WINDOW; i++) {
                in[i] = round << 32 | (calls + i);
                OK(rfaas_iinvoke(l, echo, &in[i], 8, &out[i], 8, &c, &r[i]));
            }
            while (done-- > 0) {
                size_t at = 0, n = 0;
                OK(rfaas_waitany(WINDOW, r, &at, &n));
                wrong += n != 8 || out[at] != in[at];
                double t = now();
                if (t - last > longest)
                    longest = t - last;
                if (t - last > 0.010 && n_gaps < SPANS)
                    gaps[n_gaps++] = (span){last, t};
                last = t;
            }
            if (calls < CALLS / 5 && calls + WINDOW >= CALLS / 5) {
                rfaas_lease_details d = {.struct_size = sizeof d};
                OK(rfaas_lease_info(l, &d));
                printf("on %s\n", d.executor);
                fflush(stdout);
            }
            calls += WINDOW;
        }
        CHECK(wrong == 0 && moved(l, &repeated) == round);
        printf("gap %.3f ms, own %.3f ms, %llu calls, %llu repeated\n", longest * 1e3, own_gap() * 1e3,
               (unsigned long long)calls, (unsigned long long)(repeated - before));
        fflush(stdout);
        before = repeated;
        if (failures)
            break;
    }
    OK(rfaas_finalize());
}
