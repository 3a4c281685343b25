/* The C library in several threads, with separate sessions and leases, or with one shared lease, while workers die. */
#include <sched.h>

#include "fake_agent.h"

typedef struct api_thread {
    pthread_t thread;
    int rounds;
    uint32_t died; /* calls that ended with a death */
    int32_t done;
} api_thread;

static void api_calls(api_thread *a, rfaas_lease *lease) {
    rfaas_function f;
    rfaas_request requests[4];
    uint64_t in = t_random(), out[4] = {0};
    CHECK_EQ(rfaas_lease_function(lease, "echo", &f), RFAAS_OK);
    for (int k = 0; k < 20; k++) {
        size_t n = 0;
        int st = rfaas_invoke(lease, f, &in, sizeof in, out, sizeof *out, &n, NULL);
        CHECKF(st == RFAAS_OK || st == RFAAS_WORKER_DIED, "invoke: %d %s", st, rfaas_last_error());
        CHECK(st || (n == sizeof in && out[0] == in));
        a->died += st != RFAAS_OK;
    }
    int posted = 0, statuses[4];
    for (; posted < 4; posted++)
        if (rfaas_iinvoke(lease, f, &in, sizeof in, &out[posted], sizeof *out, NULL, &requests[posted]))
            break;
    int st = rfaas_waitall((size_t)posted, requests, NULL, statuses);
    CHECKF(st == RFAAS_OK || st == RFAAS_WORKER_DIED || dp_status_class(st) == 5, "waitall: %d %s", st, rfaas_last_error());
    for (int k = 0; k < posted; k++)
        CHECK(statuses[k] || out[k] == in);
    rfaas_lease_details d = {.struct_size = sizeof d};
    CHECK_EQ(rfaas_lease_info(lease, &d), RFAAS_OK);
    CHECK_EQ(d.workers, WORKERS);
}

static void *api_use(void *arg) {
    api_thread *a = arg;
    t_name("user of the C API");
    for (int round = 0; round < a->rounds; round++) {
        rfaas_session *session;
        rfaas_lease *leases[2];
        rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
        rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
        so.executor = "here";
        lo.workers = WORKERS;
        lo.flags = RFAAS_LEASE_REUSE; /* workers that have executed calls serve the next lease */
        lo.library_data = "code";
        lo.library_size = 4;
        CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
        CHECKF(rfaas_session_open(&so, &session) == RFAAS_OK, "session: %s", rfaas_last_error());
        for (int i = 0; i < 2; i++)
            CHECKF(rfaas_lease_open(session, &lo, &leases[i]) == RFAAS_OK, "lease: %s", rfaas_last_error());
        api_calls(a, leases[0]);
        api_calls(a, leases[1]);
        CHECK_EQ(rfaas_lease_release(leases[0]), RFAAS_OK);
        CHECKF(rfaas_lease_release(leases[0]) == RFAAS_INVALID, "released twice");
        CHECKF(rfaas_lease_open(session, &lo, &leases[0]) == RFAAS_OK, "lease: %s", rfaas_last_error());
        api_calls(a, leases[0]);
        CHECK_EQ(rfaas_lease_release(leases[0]), RFAAS_OK);
        if (round % 2)
            CHECK_EQ(rfaas_lease_release(leases[1]), RFAAS_OK);
        CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
        CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    }
    __atomic_store_n(&a->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

typedef struct closer {
    rfaas_session *session;
    pthread_barrier_t *together;
    int status;
} closer;

static void *close_session(void *arg) {
    closer *c = arg;
    pthread_barrier_wait(c->together);
    c->status = rfaas_session_close(c->session);
    return NULL;
}

/* If two threads close a session, only one succeeds. */
T_CASE(api_closed_twice, "threads/session-closed-twice", .providers = T_SHM) {
    pthread_barrier_t together;
    rfaas_lease_options lo;
    pthread_barrier_init(&together, NULL, 2);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    for (int i = 0; i < 300; i++) {
        rfaas_session *session = fake_session(&lo);
        closer c[2] = {{session, &together, 0}, {session, &together, 0}};
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, close_session, &c[0]));
        close_session(&c[1]);
        pthread_join(thread, NULL);
        CHECKF((c[0].status == RFAAS_OK) + (c[1].status == RFAAS_OK) == 1, "round %d: %d and %d", i, c[0].status, c[1].status);
        CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    }
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* Several threads with separate sessions and leases, and one that reports deaths. */
T_CASE(api_threads, "threads/c-api", .providers = T_SHM, .seconds = 40) {
    api_thread a[CLIENTS] = {0};
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK); /* so that the last finalize is this thread's */
    for (int i = 0; i < CLIENTS; i++) {
        a[i].rounds = 8;
        CHECK(!pthread_create(&a[i].thread, NULL, api_use, &a[i]));
    }
    uint32_t told = 0;
    for (int left = 1; left;) {
        left = 0;
        for (int i = 0; i < CLIENTS; i++)
            left += !__atomic_load_n(&a[i].done, __ATOMIC_ACQUIRE);
        uint32_t worker = (uint32_t)(t_random() % WORKERS);
        pthread_mutex_lock(&fake_mu);
        fake_lease *l = &fake_leases[t_random() % (2 * CLIENTS)];
        if (t_random() % 4 == 0 && l->key && l->workers[worker].server) {
            fake_death(l->key, worker, l->workers[worker].pid);
            told++;
        }
        pthread_mutex_unlock(&fake_mu);
        if (t_random() % 8 == 0) {
            pthread_mutex_lock(&fake_mu);
            uint64_t name = fake_drop(0);
            if (name)
                fake_dropped(name); /* before its session can be closed */
            pthread_mutex_unlock(&fake_mu);
        }
        t_sleep_ms((int)(t_random() % 3));
    }
    uint32_t died = 0;
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(a[i].thread, NULL);
        died += a[i].died;
    }
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
    printf("%u leases, %u of them on cached connections, %u deaths told, %u calls died, %u workers replaced\n", fake_granted,
           fake_resumed, told, died, fake_replaced);
    CHECK_EQ(fake_granted, 3u * CLIENTS * 8u);
    CHECK_EQ(fake_released, fake_granted - fake_resumed);
    CHECK(fake_resumed > 0);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK); /* it can be used again */
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
}

/* ---- one lease, several threads ---- */

typedef struct sharer {
    pthread_t thread;
    rfaas_lease *lease;
    rfaas_function f;
    int rounds;
    bool until_released;
    uint32_t died, released;
} sharer;

/* Makes a call in a random way. Returns its status. */
static int shared_call(sharer *s, uint64_t in, uint64_t *out) {
    rfaas_request r = RFAAS_REQUEST_NULL;
    size_t n = 0, at;
    int done = 0, st;
    uint64_t way = t_random() % 6;
    if (way == 0 || way == 5)
        return rfaas_invoke(s->lease, s->f, &in, sizeof in, out, sizeof *out, &n, NULL);
    while ((st = rfaas_iinvoke(s->lease, s->f, &in, sizeof in, out, sizeof *out, NULL, &r)) == RFAAS_BUSY)
        sched_yield();
    if (st)
        return st;
    switch (way) {
    case 1: return rfaas_wait(&r, &n);
    case 2:
        while (!(st = rfaas_test(&r, &done, &n)) && !done)
            sched_yield();
        return st;
    case 3: return rfaas_waitany(1, &r, &at, &n);
    default:
        st = rfaas_cancel(&r);
        *out = in;
        return st;
    }
}

enum { CALLS_PER_DEATH = 100 };

static void tell_a_death(void) {
    uint32_t worker = (uint32_t)(t_random() % WORKERS);
    pthread_mutex_lock(&fake_mu);
    for (int i = 0; i < LEASES; i++)
        if (fake_leases[i].key && !fake_leases[i].cached && fake_leases[i].workers[worker].server)
            fake_death(fake_leases[i].key, worker, fake_leases[i].workers[worker].pid);
    pthread_mutex_unlock(&fake_mu);
}

static void *share_lease(void *arg) {
    sharer *s = arg;
    t_name("one of several threads");
    for (int i = 0; i < s->rounds || s->until_released; i++) {
        uint64_t in = t_random(), out = 0;
        int st = shared_call(s, in, &out);
        if (s->until_released && (st == RFAAS_INVALID || st == RFAAS_LEASE_ENDED)) {
            s->released++;
            break;
        }
        CHECKF(st == RFAAS_OK || st == RFAAS_WORKER_DIED, "call: %d %s", st, rfaas_last_error());
        CHECK(st || out == in);
        s->died += st != RFAAS_OK;
        if (!s->until_released && t_random() % CALLS_PER_DEATH == 0) /* by calls and not by time, so that a slow machine has as many */
            tell_a_death();
        if (i % 64 == 0 && !s->until_released) {
            rfaas_statistics all = {.struct_size = sizeof all};
            void *b = NULL;
            CHECK_EQ(rfaas_lease_statistics(s->lease, &all), RFAAS_OK);
            CHECK_EQ(rfaas_alloc(s->lease, 5000, &b), RFAAS_OK);
            while ((st = rfaas_free(s->lease, b)) == RFAAS_BUSY)
                sched_yield();
            CHECK_EQ(st, RFAAS_OK);
        }
    }
    return NULL;
}

/* Several threads call on one lease while its workers die, until they have made enough calls or the lease is released. */
static void one_lease(bool release) {
    for (int round = 0; round < (release ? (int)t_pick(40, 8) : 2); round++) {
        sharer s[CLIENTS] = {0};
        rfaas_session *session;
        rfaas_lease *lease;
        rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
        rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
        rfaas_function f;
        so.executor = "here";
        lo.workers = WORKERS;
        lo.wait_mode = round % 2 ? RFAAS_WAIT_WARM : RFAAS_WAIT_ADAPTIVE;
        lo.library_data = "code";
        lo.library_size = 4;
        CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
        CHECKF(rfaas_session_open(&so, &session) == RFAAS_OK, "session: %s", rfaas_last_error());
        CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
        CHECK_EQ(rfaas_lease_function(lease, "echo", &f), RFAAS_OK);
        for (int i = 0; i < CLIENTS; i++) {
            s[i] = (sharer){.lease = lease, .f = f, .rounds = (int)t_pick(3000, 300), .until_released = release};
            CHECK(!pthread_create(&s[i].thread, NULL, share_lease, &s[i]));
        }
        if (release) {
            t_sleep_ms((int)(t_random() % 8));
            CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
        }
        uint32_t died = 0, released = 0;
        for (int i = 0; i < CLIENTS; i++) {
            pthread_join(s[i].thread, NULL);
            died += s[i].died;
            released += s[i].released;
        }
        CHECK_EQ(released, release ? CLIENTS : 0);
        if (!release) {
            rfaas_statistics all = {.struct_size = sizeof all};
            CHECK_EQ(rfaas_lease_statistics(lease, &all), RFAAS_OK);
            printf("%llu calls, %u died, %u workers replaced\n", (unsigned long long)all.calls, died, all.replaced);
            CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
        }
        CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
        CHECK_EQ(rfaas_finalize(), RFAAS_OK);
        fake_leave();
    }
}

T_CASE(api_one_lease, "threads/one-lease", .providers = T_SHM, .seconds = 60) { one_lease(false); }
T_CASE(api_one_lease_released, "threads/one-lease-released", .providers = T_SHM, .seconds = 60) { one_lease(true); }
