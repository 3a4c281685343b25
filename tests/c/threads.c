/* A client with several threads: an endpoint for each, channels failed from outside, sessions and leases of the C API side
 * by side. Written for the thread sanitizer (make test-c-tsan), and run without it as well. The servers are threads of
 * this process, so that everything is seen by it. */
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>

#include "rfaas_api.h"
#include "ends.h"
#include "served.h"

enum { CLIENTS = 4 };

/* ---- endpoints ---- */

typedef struct caller {
    served s;
    pthread_t thread;
    int rounds;
    uint32_t calls, failures; /* atomic: the breaker looks */
    int32_t done;
} caller;

/* Calls until the channel fails, then brings it to life again, so many times. */
static void *call_and_recover(void *arg) {
    caller *c = arg;
    served *s = &c->s;
    char name[24];
    snprintf(name, sizeof name, "caller %p", (void *)c);
    t_name(name);
    for (int round = 0; round < c->rounds; round++) {
        dp_error err;
        served_again(s, false);
        for (;;) {
            uint8_t in[300], out[300];
            uint32_t n = 1 + (uint32_t)(t_random() % sizeof in), size = 0;
            dp_started started;
            fill_pattern(in, n, n);
            memset(out, 0, sizeof out);
            int st = dp_channel_call(s->ch, FN_ECHO, in, n, NULL, out, n, &size, dp_now_ns() + 20000000000, &started);
            if (st) {
                CHECK_STATUS(st, DP_WORKER_DIED);
                break;
            }
            CHECK_EQ(size, n);
            CHECK_PATTERN(out, n, n);
            __atomic_add_fetch(&c->calls, 1, __ATOMIC_RELAXED);
        }
        __atomic_add_fetch(&c->failures, 1, __ATOMIC_RELAXED);
        CHECK_OK_ERR(dp_channel_reset(s->ch, &err), err);
        t_peer_join(&s->peer); /* it noticed that we left */
    }
    __atomic_store_n(&c->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Threads with an endpoint each on one device, whose channels another thread fails at any moment: while they call, wait,
 * reset or connect. */
static void endpoints(dp_wait_mode mode) {
    caller c[CLIENTS] = {0};
    dp_dev *dev;
    dp_error err;
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    for (int i = 0; i < CLIENTS; i++) {
        c[i].rounds = (int)t_pick(20, 3);
        c[i].s.mode = mode;
        CHECK_OK_ERR(dp_endpoint_create(dev, 1, 4, mode, &c[i].s.ep, &err), err);
        CHECK_OK_ERR(dp_channel_create(c[i].s.ep, &(dp_channel_config){4, 1024, 0}, &c[i].s.ch, &err), err);
        CHECK(!pthread_create(&c[i].thread, NULL, call_and_recover, &c[i]));
    }
    for (int left = CLIENTS; left;) {
        left = 0;
        for (int i = 0; i < CLIENTS; i++) {
            if (__atomic_load_n(&c[i].done, __ATOMIC_ACQUIRE))
                continue;
            left++;
            if (__atomic_load_n(&c[i].calls, __ATOMIC_RELAXED) > 3 * __atomic_load_n(&c[i].failures, __ATOMIC_RELAXED))
                dp_channel_fail(c[i].s.ch, DP_WORKER_DIED);
        }
        t_sleep_ms((int)(t_random() % 4));
    }
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(c[i].thread, NULL);
        CHECK_EQ(c[i].failures, c[i].rounds);
        dp_channel_destroy(c[i].s.ch);
        dp_endpoint_destroy(c[i].s.ep);
    }
    dp_dev_close(dev);
}

T_CASE(endpoints_adaptive, "threads/endpoints-failed-from-outside", .providers = T_SHM, .seconds = 30) {
    endpoints(DP_WAIT_ADAPTIVE);
}
T_CASE(endpoints_warm, "threads/blocked-endpoints-failed-from-outside", .providers = T_SHM, .seconds = 30) {
    endpoints(DP_WAIT_WARM);
}

/* ---- the C API ---- */

/* A control part whose workers are threads: leases by key, each with its servers. */
enum { LEASES = 64, WORKERS = 2 };

typedef struct fake_worker {
    pthread_t thread;
    dp_dev *dev;
    dp_server *server;
    uint64_t pid;
    sem_t told; /* it has parked or resumed */
} fake_worker;

typedef struct fake_lease {
    uint64_t key; /* 0: free */
    uint64_t session;
    bool kept; /* released, its workers wait; key is the name of the connections */
    fake_worker workers[WORKERS];
} fake_lease;

static pthread_mutex_t fake_mu = PTHREAD_MUTEX_INITIALIZER;
static fake_lease fake_leases[LEASES];
static uint64_t fake_pid;
static uint32_t fake_granted, fake_replaced, fake_released, fake_resumed;
static struct {
    uint64_t key, session, from; /* from: the kept lease that the key was told of */
} fake_plans[LEASES];            /* a ring */
static uint32_t fake_planned;

static uint32_t fake_echo(void *args, uint32_t n, void *res) {
    memcpy(res, args, n);
    return n;
}
static const dp_function fake_functions[] = {fake_echo};

static void *fake_serve(void *arg) {
    dp_server_run(arg);
    return NULL;
}

static void fake_told(void *arg, bool parked) {
    (void)parked;
    sem_post(arg);
}

/* Under fake_mu. Appends what is said of a worker to the reply. */
static void fake_start(fake_worker *w, const uint8_t *blob, uint32_t len, rfaas_msg *reply) {
    dp_error err;
    uint8_t answer[DP_CHANNEL_BLOB_MAX];
    uint32_t n = sizeof answer;
    CHECK_OK_ERR(dp_dev_open("shm", &(dp_dev_options){.active_side_only = 1}, &w->dev, &err), err);
    CHECK_OK_ERR(dp_server_create(w->dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, blob, len, &w->server, &err), err);
    dp_server_set_functions(w->server, fake_functions, 1);
    sem_init(&w->told, 0, 0);
    dp_server_on_told(w->server, fake_told, &w->told);
    CHECK_OK_ERR(dp_server_blob(w->server, answer, &n, &err), err);
    w->pid = ++fake_pid;
    CHECK(!pthread_create(&w->thread, NULL, fake_serve, w->server));
    rfaas_msg_bytes(reply, RFAAS_TAG_BLOB, answer, n);
    rfaas_msg_u64(reply, RFAAS_TAG_PID, w->pid);
}

static void fake_stop(fake_worker *w) {
    if (!w->server)
        return;
    dp_server_stop(w->server);
    pthread_join(w->thread, NULL);
    dp_server_destroy(w->server);
    dp_dev_close(w->dev);
    sem_destroy(&w->told);
    w->server = NULL;
}

static fake_lease *fake_find(uint64_t key) {
    for (int i = 0; i < LEASES; i++)
        if (fake_leases[i].key == key)
            return &fake_leases[i];
    return NULL;
}

/* Under fake_mu, as are the next ones. */
static void fake_end(fake_lease *l) {
    for (int i = 0; i < WORKERS; i++)
        fake_stop(&l->workers[i]);
    l->key = 0;
    l->kept = false;
    fake_released++;
}

/* The plan of a key; the last keys are remembered. */
static uint32_t fake_plan_of(uint64_t key) {
    for (uint32_t i = 0; i < LEASES; i++)
        if (fake_plans[i].key == key)
            return i;
    CHECKF(false, "no plan for %#llx", (unsigned long long)key);
    return 0;
}

/* Names a kept lease of the session of the key, if there is one. */
static void fake_next(uint64_t key, rfaas_msg *reply) {
    uint32_t p = fake_plan_of(key);
    if (fake_plans[p].from) { /* it was in vain */
        fake_end(fake_find(fake_plans[p].from));
        fake_plans[p].from = 0;
        return;
    }
    for (int i = 0; i < LEASES && !fake_plans[p].from; i++) {
        fake_lease *l = &fake_leases[i];
        if (!l->kept || l->session != fake_plans[p].session)
            continue;
        fake_plans[p].from = l->key;
        l->kept = false;
        rfaas_msg_u64(reply, RFAAS_TAG_KEPT, l->key);
    }
}

/* What was kept goes on: each worker with its client's new generation. */
static void fake_resume(fake_worker *w, const uint8_t *blob, uint32_t len, rfaas_msg *reply) {
    dp_error err;
    uint8_t answer[DP_CHANNEL_BLOB_MAX];
    uint32_t n = sizeof answer;
    CHECK_OK_ERR(dp_server_resume(w->server, blob, len, &err), err);
    sem_wait(&w->told);
    CHECK_OK_ERR(dp_server_blob(w->server, answer, &n, &err), err);
    rfaas_msg_bytes(reply, RFAAS_TAG_BLOB, answer, n);
    rfaas_msg_u64(reply, RFAAS_TAG_PID, w->pid);
    rfaas_msg_u64(reply, RFAAS_TAG_START, 3);
}

static void fake_grant(uint64_t key, const rfaas_msg *req, rfaas_msg *reply) {
    uint32_t p = fake_plan_of(key);
    fake_lease *l = fake_find(fake_plans[p].from);
    CHECK(l);
    l->key = key;
    l->session = fake_plans[p].session;
    rfaas_msg_u64(reply, RFAAS_TAG_LEASE_ID, key);
    for (uint32_t i = 0; i < WORKERS; i++) {
        uint32_t len;
        const uint8_t *blob = rfaas_msg_find(req, RFAAS_TAG_BLOB, i, &len);
        CHECK(blob);
        if (fake_plans[p].from)
            fake_resume(&l->workers[i], blob, len, reply);
        else
            fake_start(&l->workers[i], blob, len, reply);
    }
    fake_resumed += fake_plans[p].from != 0;
    rfaas_msg_str(reply, RFAAS_TAG_FUNCTION, "echo");
    fake_granted++;
}

static void fake_replace(uint64_t key, const rfaas_msg *req, rfaas_msg *reply) {
    fake_lease *l = fake_find(key);
    uint64_t i = rfaas_msg_get_u64(req, RFAAS_TAG_WORKER, WORKERS);
    uint32_t len;
    const uint8_t *blob = rfaas_msg_find(req, RFAAS_TAG_BLOB, 0, &len);
    CHECK(l && blob && i < WORKERS);
    fake_stop(&l->workers[i]);
    fake_start(&l->workers[i], blob, len, reply);
    fake_replaced++;
}

/* Ends a lease, or has its workers come to rest. Every fourth is not kept, although it could be. */
static void fake_release(uint64_t key, uint64_t name, rfaas_msg *reply) {
    fake_lease *l = fake_find(key);
    if (!l)
        return;
    if (!name || t_random() % 4 == 0) {
        fake_end(l);
        return;
    }
    for (int i = 0; i < WORKERS; i++)
        dp_server_park(l->workers[i].server);
    for (int i = 0; i < WORKERS; i++)
        sem_wait(&l->workers[i].told);
    l->kept = true;
    rfaas_msg_u64(reply, RFAAS_TAG_KEPT, name);
}

/* One that is kept is no more; returns its name, 0 if there was none. session 0: of any. */
static uint64_t fake_drop(uint64_t session) {
    for (int i = 0; i < LEASES; i++) {
        fake_lease *l = &fake_leases[i];
        uint64_t name = l->key;
        if (l->kept && (!session || l->session == session)) {
            fake_end(l);
            return name;
        }
    }
    return 0;
}

static void fake_dropped(uint64_t name) {
    rfaas_msg m = {0};
    rfaas_msg_u64(&m, RFAAS_TAG_EVENT, RFAAS_NEWS_DROPPED);
    rfaas_msg_u64(&m, RFAAS_TAG_KEPT, name);
    rfaas_control_event(m.data, m.len);
    rfaas_msg_free(&m);
}

/* As long as a name may be. */
static const char *long_name(void) {
    static char name[256];
    memset(name, 'n', sizeof name - 1);
    return name;
}

static int32_t fake_control(uint32_t op, const void *data, uint64_t len, void **out, uint64_t *out_len) {
    static uint64_t session; /* under fake_mu */
    rfaas_msg req = {.data = (uint8_t *)data, .len = len}, reply = {0};
    CHECK(rfaas_msg_check(&req));
    uint64_t key = rfaas_msg_get_u64(&req, RFAAS_TAG_KEY, 0);
    pthread_mutex_lock(&fake_mu);
    switch (op) {
    case RFAAS_OP_SESSION_OPEN: rfaas_msg_u64(&reply, RFAAS_TAG_SESSION, ++session); break;
    case RFAAS_OP_SESSION_CLOSE:
        for (uint64_t name; (name = fake_drop(rfaas_msg_get_u64(&req, RFAAS_TAG_SESSION, 0)));)
            fake_dropped(name);
        break;
    case RFAAS_OP_PLAN:
        fake_plans[fake_planned % LEASES].key = key;
        fake_plans[fake_planned % LEASES].from = 0;
        fake_plans[fake_planned++ % LEASES].session = rfaas_msg_get_u64(&req, RFAAS_TAG_SESSION, 0);
        break;
    case RFAAS_OP_NEXT:
        fake_next(key, &reply);
        rfaas_msg_str(&reply, RFAAS_TAG_EXECUTOR, long_name());
        rfaas_msg_str(&reply, RFAAS_TAG_NODE, long_name());
        rfaas_msg_str(&reply, RFAAS_TAG_PROVIDER, "shm");
        break;
    case RFAAS_OP_SPREAD:
        rfaas_msg_str(&reply, RFAAS_TAG_EXECUTOR, long_name());
        rfaas_msg_u64(&reply, RFAAS_TAG_WORKERS, rfaas_msg_get_u64(&req, RFAAS_TAG_WORKERS, 0));
        break;
    case RFAAS_OP_GRANT: fake_grant(key, &req, &reply); break;
    case RFAAS_OP_REPLACE: fake_replace(key, &req, &reply); break;
    case RFAAS_OP_RELEASE: fake_release(key, rfaas_msg_get_u64(&req, RFAAS_TAG_KEPT, 0), &reply); break;
    }
    pthread_mutex_unlock(&fake_mu);
    *out = reply.data;
    *out_len = reply.len;
    return DP_OK;
}

/* Tells of a worker's death, as the event stream of an executor does: at any moment, from a thread of its own. */
static void fake_death(uint64_t key, uint32_t worker, uint64_t pid) {
    rfaas_msg m = {0};
    rfaas_msg_u64(&m, RFAAS_TAG_KEY, key);
    rfaas_msg_u64(&m, RFAAS_TAG_EVENT, RFAAS_EVENT_WORKER_DIED);
    rfaas_msg_u64(&m, RFAAS_TAG_WORKER, worker);
    rfaas_msg_u64(&m, RFAAS_TAG_PID, pid);
    rfaas_msg_u64(&m, RFAAS_TAG_STATUS, (uint64_t)(int64_t)RFAAS_WORKER_DIED);
    rfaas_msg_str(&m, RFAAS_TAG_TEXT, "signal 9 (SIGKILL)");
    rfaas_control_event(m.data, m.len);
    rfaas_msg_free(&m);
}

typedef struct api_thread {
    pthread_t thread;
    int rounds;
    uint32_t died; /* calls that ended so */
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

/* Names of 255 bytes come through whole, and where there is no room for that it is said. */
T_CASE(api_names, "api/long-names", .providers = T_SHM) {
    rfaas_control_register(fake_control);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    rfaas_session *session = NULL;
    CHECK_EQ(rfaas_session_open(NULL, &session), RFAAS_OK);
    rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
    lo.library = "none";
    lo.workers = WORKERS;
    rfaas_lease *leases[1];
    size_t n = 0;
    CHECKF(rfaas_lease_open_across(session, &lo, 1, leases, &n) == RFAAS_OK && n == 1, "across: %s", rfaas_last_error());
    rfaas_lease_details d = {.struct_size = sizeof d};
    CHECK_EQ(rfaas_lease_info(leases[0], &d), RFAAS_OK);
    CHECK(!strcmp(d.node_name, long_name()) && !strcmp(d.executor_address, long_name()));
    CHECK(strlen(d.node) == sizeof d.node - 1 && !strncmp(d.node, long_name(), sizeof d.node - 1));
    CHECK(strlen(d.executor) == sizeof d.executor - 1 && !strncmp(d.executor, long_name(), sizeof d.executor - 1));
    memset(&d, 7, sizeof d);
    d.struct_size = offsetof(rfaas_lease_details, node_name); /* of an older program */
    CHECK_EQ(rfaas_lease_info(leases[0], &d), RFAAS_OK);
    CHECK(d.provider[0] == 's' && d.node_name[0] == 7);
    rfaas_place place;
    CHECK_EQ(rfaas_places(session, &lo, 1, &place), RFAAS_UNSUPPORTED);
    CHECK(strstr(rfaas_last_error(), "its address has 255 bytes, a place holds 127"));
    CHECK_EQ(rfaas_lease_release(leases[0]), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
}

/* Several threads with sessions and leases of their own, and one that tells of deaths. */
T_CASE(api_threads, "threads/c-api", .providers = T_SHM, .seconds = 40) {
    api_thread a[CLIENTS] = {0};
    rfaas_control_register(fake_control);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK); /* the last finalize is ours */
    for (int i = 0; i < CLIENTS; i++) {
        a[i].rounds = 8;
        CHECK(!pthread_create(&a[i].thread, NULL, api_use, &a[i]));
    }
    uint32_t told = 0;
    for (int left = 1; left;) {
        left = 0;
        for (int i = 0; i < CLIENTS; i++)
            left += !__atomic_load_n(&a[i].done, __ATOMIC_ACQUIRE);
        uint64_t key = 0, pid = 0;
        uint32_t worker = (uint32_t)(t_random() % WORKERS);
        pthread_mutex_lock(&fake_mu);
        fake_lease *l = &fake_leases[t_random() % (2 * CLIENTS)];
        if (t_random() % 4 == 0 && l->key && l->workers[worker].server) {
            key = l->key;
            pid = l->workers[worker].pid;
        }
        pthread_mutex_unlock(&fake_mu);
        if (key) {
            fake_death(key, worker, pid);
            told++;
        }
        if (t_random() % 8 == 0) {
            pthread_mutex_lock(&fake_mu);
            uint64_t name = fake_drop(0);
            if (name)
                fake_dropped(name); /* before its session can have been closed */
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
    printf("%u leases, %u of them on kept connections, %u deaths told, %u calls died, %u workers replaced\n", fake_granted,
           fake_resumed, told, died, fake_replaced);
    CHECK_EQ(fake_granted, 3u * CLIENTS * 8u);
    CHECK_EQ(fake_released, fake_granted - fake_resumed);
    CHECK(fake_resumed > 0);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK); /* it can be used again */
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
}
