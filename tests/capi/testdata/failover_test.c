/* A program whose executors are killed or drained by whoever runs it (failover_test.go): makes idempotent calls without
 * end, says on which executor it is whenever that changes, and ends after the number of moves in its second argument. Every
 * result is checked. Exit status 0: all good. */
#define CHECK_ARGUMENT moves_wanted
static const char *moves_wanted;
#include "check.h"

#include <signal.h>

static void say_where(rfaas_lease *l) {
    rfaas_lease_details d = {.struct_size = sizeof d};
    OK(rfaas_lease_info(l, &d));
    printf("on %s\n", d.executor);
    fflush(stdout);
}

static rfaas_lease *open_lease(uint32_t flags) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = library;
    o.workers = 1;
    o.depth = 4;
    o.flags = flags;
    o.bulk = 1 << 20;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

/* One worker dies again and again; the executor lives. */
static void worker_deaths(void) {
    rfaas_lease *l = open_lease(0);
    rfaas_function crash = find(l, "crash"), echo = find(l, "echo"), sleep_ns = find(l, "sleep_ns");
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    rfaas_statistics s = {.struct_size = sizeof s};
    uint64_t out = 0, v = 7;
    o.repeats = 2; /* a call that always kills is made three times in all */
    CHECK(rfaas_invoke(l, crash, NULL, 0, NULL, 0, NULL, &o) == RFAAS_WORKER_DIED && rfaas_started() == RFAAS_MAYBE_EXECUTED);
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.repeated == 2 && s.calls == 3);
    OK(rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o));
    CHECK(out == 7);
    o.flags = 4;
    FAILS(rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o), RFAAS_INVALID, "flags 0x4");
    o.flags = 0;
    o.attempt_ns = -1;
    FAILS(rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o), RFAAS_INVALID, "attempt_ns");

    /* An attempt that takes too long is made again, and the whole call has a deadline. */
    uint64_t ns = 500000000;
    o.attempt_ns = 20000000;
    double start = now();
    CHECK(rfaas_invoke(l, sleep_ns, &ns, 8, &out, 8, NULL, &o) == RFAAS_DEADLINE && now() - start > 0.055);
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.repeated == 4);

    /* The new worker is waited for no longer than the call's deadline, and comes nevertheless. */
    o.attempt_ns = 0;
    o.timeout_ns = 1; /* no time for it at all */
    double longest = 0, end = now() + 10;
    uint32_t late = 0;
    CHECK(rfaas_invoke(l, crash, NULL, 0, NULL, 0, NULL, NULL) == RFAAS_WORKER_DIED);
    FAILS(rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o), RFAAS_DEADLINE, "replace worker 0: no new worker within");
    CHECK(rfaas_started() == RFAAS_NOT_STARTED);
    o.timeout_ns = 1000000;
    for (int status = RFAAS_DEADLINE; status != RFAAS_OK && now() < end; late++, o.timeout_ns += 1000000) {
        start = now();
        status = rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o);
        if (now() - start > longest)
            longest = now() - start;
        /* The new worker may be slow, too, and then have all its slots taken. */
        CHECK(status == RFAAS_OK || status == RFAAS_DEADLINE || status == RFAAS_BUSY);
    }
    CHECK(now() < end);
    printf("%u calls of 1 ms and more until the new worker was there, the longest took %.1f ms\n", late - 1, longest * 1e3);
    o.timeout_ns = 0;

    /* A request in flight whose worker is killed. */
    o.attempt_ns = 0;
    rfaas_worker_details victim = {.struct_size = sizeof victim};
    OK(rfaas_worker_info(l, 0, &victim));
    if (victim.pid > 1 && kill((pid_t)victim.pid, 0) == 0) {
        rfaas_request r;
        ns = 300000000;
        OK(rfaas_iinvoke(l, sleep_ns, &ns, 8, &out, 8, &o, &r));
        OK(kill((pid_t)victim.pid, SIGKILL));
        size_t n = 0;
        out = 0;
        OK(rfaas_wait(&r, &n));
        CHECK(n == 8 && out == ns);
        rfaas_map_options m = RFAAS_MAP_OPTIONS_INIT;
        static uint64_t in[64], back[64];
        for (uint64_t i = 0; i < 64; i++)
            in[i] = i;
        m.repeats = 1;
        OK(rfaas_map(l, echo, in, 8, back, 8, 64, &m));
        CHECK(!memcmp(in, back, sizeof in));
    }
    OK(rfaas_lease_release(l));
}

void everything(void) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    rfaas_statistics s = {.struct_size = sizeof s};
    uint64_t wanted = strtoull(moves_wanted, NULL, 10), moved = 0, calls = 0, wrong = 0;
    double longest = 0, last = 0, end = now() + 60;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    if (wanted == 0) {
        worker_deaths();
        OK(rfaas_finalize());
        return;
    }
    rfaas_lease *l = open_lease(RFAAS_LEASE_FAILOVER);
    rfaas_function echo = find(l, "echo");
    char *buffer = NULL; /* registered memory moves with the lease */
    OK(rfaas_alloc(l, 100000, (void **)&buffer));
    memset(buffer, 5, 100000);
    static char back[100000];
    o.repeats = 3;
    say_where(l);
    while (moved < wanted && now() < end && wrong < 3) {
        rfaas_request r[3];
        uint64_t in[4], out[4] = {0};
        for (int i = 0; i < 4; i++)
            in[i] = calls * 4 + (uint64_t)i;
        for (int i = 0; i < 3; i++)
            OK(rfaas_iinvoke(l, echo, &in[i], 8, &out[i], 8, &o, &r[i]));
        OK(rfaas_waitall(3, r, NULL, NULL));
        OK(rfaas_invoke(l, echo, &in[3], 8, &out[3], 8, NULL, &o));
        wrong += memcmp(in, out, sizeof in) != 0;
        double t = now();
        if (last && t - last > longest)
            longest = t - last;
        calls += 4;
        OK(rfaas_lease_statistics(l, &s));
        if (s.moved != moved) {
            moved = s.moved;
            printf("%llu calls, longest gap %.1f ms, %llu repeated\n", (unsigned long long)calls, longest * 1e3,
                   (unsigned long long)s.repeated);
            longest = 0;
            size_t n = 0;
            OK(rfaas_invoke(l, echo, buffer, 100000, back, sizeof back, &n, &o));
            CHECK(n == 100000 && !memcmp(buffer, back, n));
            if (moved < wanted)
                say_where(l);
            t = now();
        }
        last = t;
    }
    CHECK(wrong == 0 && moved == wanted && s.calls >= calls);
    /* The next one is for the lease's end: a seeker that looks in vain ends with it. What an attempt may have done, the call may
     * have, though it could not be made again. */
    uint64_t minute = 60000000000u, slept;
    rfaas_request flying;
    o.timeout_ns = 1500000000;
    OK(rfaas_iinvoke(l, find(l, "sleep_ns"), &minute, 8, &slept, 8, &o, &flying));
    say_where(l);
    int last_status = rfaas_wait(&flying, NULL);
    CHECK((last_status == RFAAS_DEADLINE || last_status == RFAAS_LEASE_ENDED) && rfaas_started() == RFAAS_MAYBE_EXECUTED);
    for (o.timeout_ns = 1000000000; now() < end;) {
        uint64_t v = 1, out;
        int status = rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o);
        if (status == RFAAS_OK)
            continue;
        CHECK((status == RFAAS_DEADLINE || status == RFAAS_LEASE_ENDED) && strstr(rfaas_last_error(), "no other"));
        break;
    }
    CHECK(now() < end);
    OK(rfaas_finalize());
}
