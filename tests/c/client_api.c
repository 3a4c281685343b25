/* The C library with an agent of the test's own: a thread behind a socket pair, which stands where agent_start.c reaches the real one.
 * Its workers are threads too, so that the thread sanitizer sees everything. */
#include <sched.h>
#include <signal.h>
#include <sys/time.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client.h"
#include "dp_serve.h"
#include "ends.h"

enum { CLIENTS = 4, LEASES = 64, WORKERS = 2 };

typedef struct fake_worker {
    pthread_t thread;
    dp_dev *dev;
    dp_server *server;
    uint64_t pid;
    sem_t parked;
} fake_worker;

typedef struct fake_lease {
    uint64_t key; /* 0: free */
    uint64_t session;
    bool kept; /* released, its workers wait */
    bool known; /* to the present agent */
    fake_worker workers[WORKERS];
} fake_lease;

static pthread_mutex_t fake_mu = PTHREAD_MUTEX_INITIALIZER;
static fake_lease fake_leases[LEASES];
static uint64_t fake_pid;
static uint32_t fake_granted, fake_replaced, fake_released, fake_resumed;
static pthread_t fake_thread;
static int fake_socket = -1; /* written by whoever has fake_mu */
static int fake_adopts_ms, fake_reads_ms; /* that this agent takes to adopt the first lease, and before it reads at all */
static uint32_t fake_ends_at, fake_ends; /* this agent ends instead of answering this operation, so many times */

static uint32_t fake_echo(void *args, uint32_t n, void *res) {
    memcpy(res, args, n);
    return n;
}
static uint32_t fake_slow(void *args, uint32_t n, void *res) {
    t_sleep_ms(800);
    return fake_echo(args, n, res);
}
static const dp_function fake_functions[] = {fake_echo, fake_slow};

static void *fake_serve(void *arg) {
    dp_server_run(arg);
    return NULL;
}

static void fake_parked(void *arg) { sem_post(arg); }

/* Under fake_mu, as are the next ones. */
static void fake_start(fake_worker *w, const rfaas_agent_blob *offer, rfaas_agent_worker *out) {
    dp_error err;
    CHECK_OK_ERR(dp_dev_open("shm", &(dp_dev_options){.active_side_only = 1}, &w->dev, &err), err);
    CHECK_OK_ERR(dp_server_create(w->dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, offer->bytes, offer->size, &w->server, &err), err);
    dp_server_set_functions(w->server, fake_functions, 2);
    sem_init(&w->parked, 0, 0);
    dp_server_on_parked(w->server, fake_parked, &w->parked);
    out->blob.size = sizeof out->blob.bytes;
    CHECK_OK_ERR(dp_server_blob(w->server, out->blob.bytes, &out->blob.size, &err), err);
    out->pid = w->pid = ++fake_pid;
    out->start = 1;
    CHECK(!pthread_create(&w->thread, NULL, fake_serve, w->server));
}

/* What was kept goes on: each worker with its client's new generation. */
static void fake_resume(fake_worker *w, const rfaas_agent_blob *offer, rfaas_agent_worker *out) {
    dp_error err;
    CHECK_OK_ERR(dp_server_resume(w->server, offer->bytes, offer->size, &err), err);
    out->blob.size = sizeof out->blob.bytes;
    CHECK_OK_ERR(dp_server_blob(w->server, out->blob.bytes, &out->blob.size, &err), err);
    out->pid = w->pid;
    out->start = 3;
}

static void fake_stop(fake_worker *w) {
    if (!w->server)
        return;
    dp_server_stop(w->server);
    pthread_join(w->thread, NULL);
    dp_server_destroy(w->server);
    dp_dev_close(w->dev);
    sem_destroy(&w->parked);
    w->server = NULL;
}

static fake_lease *fake_find(uint64_t key) {
    for (int i = 0; i < LEASES; i++)
        if (fake_leases[i].key == key)
            return &fake_leases[i];
    return NULL;
}

static void fake_end(fake_lease *l) {
    for (int i = 0; i < WORKERS; i++)
        fake_stop(&l->workers[i]);
    l->key = 0;
    l->kept = false;
    fake_released++;
}

static void fake_send(uint32_t op, uint32_t id, const void *body, size_t size, const void *tail, size_t tail_size) {
    rfaas_agent_header h = {.size = (uint32_t)(sizeof h + size + tail_size), .op = op, .id = id};
    struct iovec iov[3] = {{&h, sizeof h}, {(void *)body, size}, {(void *)tail, tail_size}};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = 3};
    sendmsg(fake_socket, &m, MSG_NOSIGNAL); /* a client that has left needs it no more */
}

static void fake_event(const rfaas_agent_event *e) {
    fake_send(RFAAS_AGENT_EVENT, 0, e, sizeof *e, NULL, 0);
    if (rfaas_agent_shared)
        __atomic_add_fetch(&rfaas_agent_shared->events, 1, __ATOMIC_RELEASE);
}

/* One that is kept is no more; returns its key, 0 if there was none. session 0: of any. */
static uint64_t fake_drop(uint64_t session) {
    for (int i = 0; i < LEASES; i++) {
        fake_lease *l = &fake_leases[i];
        uint64_t key = l->key;
        if (l->kept && (!session || l->session == session)) {
            fake_end(l);
            return key;
        }
    }
    return 0;
}

static void fake_dropped(uint64_t key) { fake_event(&(rfaas_agent_event){.key = key, .kind = RFAAS_AGENT_DROPPED}); }

/* As long as a name may be. */
static const char *long_name(void) {
    static char name[256];
    memset(name, 'n', sizeof name - 1);
    return name;
}

/* Grants what is offered. Without offers it names the provider first. */
static void fake_acquire(uint32_t id, const rfaas_agent_acquire *req, const rfaas_agent_blob *offers) {
    rfaas_agent_candidate c = {.provider = "shm"};
    struct {
        rfaas_agent_worker workers[WORKERS];
        char names[10];
    } grant = {.names = "echo\0slow"};
    memcpy(c.executor, long_name(), sizeof c.executor);
    memcpy(c.node, long_name(), sizeof c.node);
    fake_lease *from = req->kept ? fake_find(req->kept) : NULL;
    if (req->kept && from && t_random() % 8 == 0) { /* in vain */
        fake_end(from);
        from = NULL;
    }
    if (!req->offers || (req->kept && !from)) {
        fake_send(RFAAS_AGENT_ACQUIRE, id, &c, sizeof c, NULL, 0);
        return;
    }
    CHECK_EQ(req->offers, WORKERS);
    fake_lease *l = from ? from : fake_find(0);
    CHECK(l);
    l->key = req->key;
    l->session = req->session;
    l->kept = false;
    l->known = true;
    for (uint32_t i = 0; i < WORKERS; i++)
        (from ? fake_resume : fake_start)(&l->workers[i], &offers[i], &grant.workers[i]);
    fake_resumed += from != NULL;
    fake_granted++;
    c.granted = 1;
    c.workers = WORKERS;
    c.functions = 2;
    c.names_size = 10;
    c.lease_id = req->key;
    fake_send(RFAAS_AGENT_ACQUIRE, id, &c, sizeof c, &grant, WORKERS * sizeof *grant.workers + 10);
}

static void fake_replace(uint32_t id, const rfaas_agent_replace *req) {
    rfaas_agent_worker w = {0};
    fake_lease *l = fake_find(req->key);
    CHECK(l && req->worker < WORKERS);
    fake_stop(&l->workers[req->worker]);
    fake_start(&l->workers[req->worker], &req->offer, &w);
    fake_replaced++;
    fake_send(RFAAS_AGENT_REPLACE, id, &w, sizeof w, NULL, 0);
}

/* Ends a lease, or has its workers come to rest. Every fourth is not kept, although it could be. */
static void fake_release(uint32_t id, const rfaas_agent_release *req) {
    fake_lease *l = fake_find(req->key);
    rfaas_agent_released r = {.kept = l && req->keep && t_random() % 4};
    if (l && !r.kept)
        fake_end(l);
    for (int i = 0; r.kept && i < WORKERS; i++)
        dp_server_park(l->workers[i].server);
    for (int i = 0; r.kept && i < WORKERS; i++)
        sem_wait(&l->workers[i].parked);
    if (r.kept)
        l->kept = true;
    fake_send(RFAAS_AGENT_RELEASE, id, &r, sizeof r, NULL, 0);
}

static void fake_request(const rfaas_agent_header *h, const uint8_t *body) {
    if (h->op == fake_ends_at && fake_ends) {
        fake_ends--;
        shutdown(fake_socket, SHUT_RDWR);
        return;
    }
    switch (h->op) {
    case RFAAS_AGENT_HELLO:
        fake_send(h->op, h->id, &(rfaas_agent_welcome){.protocol = RFAAS_AGENT_PROTOCOL}, sizeof(rfaas_agent_welcome), NULL, 0);
        break;
    case RFAAS_AGENT_OPEN: fake_send(h->op, h->id, &(rfaas_agent_opened){.provider = "shm"}, sizeof(rfaas_agent_opened), NULL, 0); break;
    case RFAAS_AGENT_CLOSE:
        for (uint64_t key; (key = fake_drop(((const rfaas_agent_session_name *)body)->session));)
            fake_dropped(key);
        fake_send(h->op, h->id, NULL, 0, NULL, 0);
        break;
    case RFAAS_AGENT_ACQUIRE:
        fake_acquire(h->id, (const rfaas_agent_acquire *)body, (const rfaas_agent_blob *)(body + sizeof(rfaas_agent_acquire)));
        break;
    case RFAAS_AGENT_CHANGES: fake_send(h->op, h->id, &(rfaas_agent_count){0}, sizeof(rfaas_agent_count), NULL, 0); break;
    case RFAAS_AGENT_SPREAD: {
        struct {
            rfaas_agent_count count;
            rfaas_agent_share share;
        } r = {{1}, {.workers = ((const rfaas_agent_spread *)body)->workers}};
        memcpy(r.share.executor, long_name(), sizeof r.share.executor);
        fake_send(h->op, h->id, &r, sizeof r, NULL, 0);
        break;
    }
    case RFAAS_AGENT_ADOPT:
        t_sleep_ms(fake_adopts_ms);
        fake_adopts_ms = 0;
        fake_find(((const rfaas_agent_adopt *)body)->key)->known = true;
        fake_send(h->op, h->id, &(rfaas_agent_until){INT64_MAX}, sizeof(rfaas_agent_until), NULL, 0);
        break;
    case RFAAS_AGENT_REPLACE: fake_replace(h->id, (const rfaas_agent_replace *)body); break;
    case RFAAS_AGENT_RELEASE: fake_release(h->id, (const rfaas_agent_release *)body); break;
    }
}

static void *fake_agent(void *arg) {
    int fd = (int)(intptr_t)arg;
    static uint64_t body[RFAAS_AGENT_MESSAGE_MAX / sizeof(uint64_t)];
    t_name("agent");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL); /* signals are the program's */
    t_sleep_ms(fake_reads_ms);
    for (rfaas_agent_header h; recv(fd, &h, sizeof h, MSG_WAITALL) == sizeof h;) {
        size_t size = h.size - sizeof h;
        CHECK(size <= sizeof body && (!size || recv(fd, body, size, MSG_WAITALL) == (ssize_t)size));
        pthread_mutex_lock(&fake_mu);
        fake_request(&h, (const uint8_t *)body);
        pthread_mutex_unlock(&fake_mu);
    }
    close(fd);
    return NULL;
}

int rfaas_agent_reach(int64_t until, int *status, char text[RFAAS_AGENT_TEXT]) {
    (void)until;
    (void)status;
    (void)text;
    int fd[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd));
    if (fake_socket >= 0)
        pthread_join(fake_thread, NULL); /* its client has left */
    pthread_mutex_lock(&fake_mu);
    fake_socket = fd[1];
    for (int i = 0; i < LEASES; i++)
        fake_leases[i].known = false;
    pthread_mutex_unlock(&fake_mu);
    CHECK(!pthread_create(&fake_thread, NULL, fake_agent, (void *)(intptr_t)fd[1]));
    return fd[0];
}

void rfaas_agent_reach_forked(void) {}

static void fake_leave(void) {
    pthread_join(fake_thread, NULL);
    fake_socket = -1;
}

/* Tells of a worker's death, as the event stream of an executor does: at any moment. Under fake_mu. */
static void fake_death(uint64_t key, uint32_t worker, uint64_t pid) {
    fake_event(&(rfaas_agent_event){.key = key, .kind = RFAAS_EVENT_WORKER_DIED, .worker = worker, .pid = pid,
                                    .status = RFAAS_WORKER_DIED, .text = "signal 9 (SIGKILL)"});
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
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    rfaas_session *session = NULL;
    CHECK_EQ(rfaas_session_open(NULL, &session), RFAAS_OK);
    rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
    lo.library = "/proc/self/exe";
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
    fake_leave();
}

/* A session with this agent, and what its leases are. */
static rfaas_session *fake_session(rfaas_lease_options *lo) {
    rfaas_session *session = NULL;
    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    so.executor = "here";
    so.timeout_ns = 1000000000;
    *lo = (rfaas_lease_options)RFAAS_LEASE_OPTIONS_INIT;
    lo->library = "/proc/self/exe";
    lo->workers = WORKERS;
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    CHECKF(rfaas_session_open(&so, &session) == RFAAS_OK, "session: %s", rfaas_last_error());
    return session;
}

/* What makes each agent end is not asked for ever. */
T_CASE(api_agents_end, "api/agents-end-in-an-acquisition", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease = NULL;
    rfaas_session *session = fake_session(&lo);
    fake_ends_at = RFAAS_AGENT_ACQUIRE;
    fake_ends = 100;
    CHECK_EQ(rfaas_lease_open(session, &lo, &lease), RFAAS_PEER_GONE);
    CHECKF(fake_ends >= 90, "%u agents have ended", 100 - fake_ends);
    fake_ends = 2;
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* No lease has ended, and the agent answers. */
static void all_held(rfaas_session *session, rfaas_lease **leases, int n) {
    for (int i = 0; i < n; i++) {
        rfaas_event e = {.struct_size = sizeof e};
        CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
        CHECK_EQ(rfaas_lease_event(leases[i], &e), RFAAS_OK);
        CHECKF(e.kind == 0, "lease %d: event %u: %s", i, e.kind, e.text);
    }
}

/* An agent that takes too long to adopt a lease is left, and ends none. */
T_CASE(api_agent_hangs_adopting, "api/agent-hangs-in-an-adoption", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *leases[2];
    rfaas_session *session = fake_session(&lo);
    for (int i = 0; i < 2; i++)
        CHECKF(rfaas_lease_open(session, &lo, &leases[i]) == RFAAS_OK, "lease: %s", rfaas_last_error());
    fake_adopts_ms = 2500;
    pthread_mutex_lock(&fake_mu);
    shutdown(fake_socket, SHUT_RDWR);
    pthread_mutex_unlock(&fake_mu);
    CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_PEER_GONE);
    all_held(session, leases, 2);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(rfaas_lease_release(leases[i]), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* And has another one in its place. */
static void *end_agent_soon(void *session) {
    t_sleep_ms(200);
    pthread_mutex_lock(&fake_mu);
    shutdown(fake_socket, SHUT_RDWR);
    pthread_mutex_unlock(&fake_mu);
    CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
    return NULL;
}

/* The agent ends when it has granted the lease's next home, while calls still run at the old one: the lease does not move to a home
 * that the next agent does not know. */
T_CASE(api_agent_ends_moving, "threads/agent-ends-while-a-lease-moves", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    rfaas_function echo, slow;
    rfaas_request r;
    uint64_t in = 7, out[2] = {0};
    lo.flags = RFAAS_LEASE_FAILOVER;
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK_EQ(rfaas_lease_function(lease, "echo", &echo), RFAAS_OK);
    CHECK_EQ(rfaas_lease_function(lease, "slow", &slow), RFAAS_OK);
    CHECKF(rfaas_iinvoke(lease, slow, &in, sizeof in, &out[0], sizeof *out, NULL, &r) == RFAAS_OK, "%s", rfaas_last_error());
    pthread_t thread;
    pthread_mutex_lock(&fake_mu);
    lease->line->draining = RFAAS_AGENT_DRAIN_SOON;
    fake_event(&(rfaas_agent_event){.key = lease->home->key, .kind = RFAAS_EVENT_DRAINING, .text = "drains"});
    pthread_mutex_unlock(&fake_mu);
    CHECK(!pthread_create(&thread, NULL, end_agent_soon, session));
    CHECKF(rfaas_invoke(lease, echo, &in, sizeof in, &out[1], sizeof *out, NULL, NULL) == RFAAS_OK, "%s", rfaas_last_error());
    pthread_join(thread, NULL);
    CHECKF(rfaas_wait(&r, NULL) == RFAAS_OK && out[0] == in, "%s", rfaas_last_error());
    pthread_mutex_lock(&fake_mu);
    fake_lease *l = fake_find(lease->home->key);
    CHECK(l && l->known);
    pthread_mutex_unlock(&fake_mu);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
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

/* Of two threads that close a session, one does. */
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

/* The agent ends, and the next one while leases are handed to it: the third one has them. */
T_CASE(api_agent_ends_adopting, "api/agent-ends-in-an-adoption", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *leases[3];
    rfaas_session *session = fake_session(&lo);
    for (int i = 0; i < 3; i++)
        CHECKF(rfaas_lease_open(session, &lo, &leases[i]) == RFAAS_OK, "lease: %s", rfaas_last_error());
    fake_ends_at = RFAAS_AGENT_ADOPT;
    fake_ends = 1;
    pthread_mutex_lock(&fake_mu);
    shutdown(fake_socket, SHUT_RDWR);
    pthread_mutex_unlock(&fake_mu);
    all_held(session, leases, 3);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(rfaas_lease_release(leases[i]), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The agent ends between its grant and the moment in which the library takes it: the next agent grants another lease, since it does not
 * know the first one. */
T_CASE(api_grant_of_another, "api/agent-ends-after-a-grant", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_acquisition a;
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    uint32_t before = __atomic_load_n(&fake_granted, __ATOMIC_ACQUIRE), generation = rfaas_agent_generation();
    CHECKF(rfaas_api_lease_begin(session, &lo, NULL, &lease, &a) == RFAAS_OK, "lease: %s", rfaas_last_error());
    for (bool offered = false; __atomic_load_n(&fake_granted, __ATOMIC_ACQUIRE) == before;) {
        rfaas_agent_wait(dp_now_ns() + 20000000);
        if (!offered && __atomic_load_n(&fake_granted, __ATOMIC_ACQUIRE) == before) {
            CHECK(!rfaas_api_acquire_step(&a));
            offered = lease->home->ep;
        }
    }
    rfaas_agent_wait(dp_now_ns() + 200000000); /* the reply comes to its ticket */
    pthread_mutex_lock(&fake_mu);
    shutdown(fake_socket, SHUT_RDWR);
    pthread_mutex_unlock(&fake_mu);
    while (rfaas_agent_generation() == generation)
        rfaas_agent_wait(dp_now_ns() + 20000000);
    while (!rfaas_api_acquire_step(&a))
        rfaas_agent_wait(a.until);
    CHECKF(rfaas_api_lease_finish(&lease, &a) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK_EQ(fake_granted, before + 2);
    all_held(session, &lease, 1);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

static void nothing(int signal) { (void)signal; }

/* Signals do not end a connection whose buffer is full, and what no message holds is said. */
T_CASE(api_environment, "api/large-environment", .providers = T_SHM) {
    static char value[2 * RFAAS_AGENT_MESSAGE_MAX];
    rfaas_lease_options lo;
    memset(value, 'v', sizeof value - 1);
    value[900000] = 0;
    setenv("RFAAS_TEST", value, 1);
    fake_reads_ms = 100;
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = nothing}, NULL);
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 5000}, {0, 5000}}, NULL);
    rfaas_session *session = fake_session(&lo);
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
    value[900000] = 'v';
    setenv("RFAAS_TEST", value, 1);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    CHECK_EQ(rfaas_session_open(NULL, &session), RFAAS_INVALID);
    CHECKF(strstr(rfaas_last_error(), "RFAAS_"), "%s", rfaas_last_error());
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    unsetenv("RFAAS_TEST");
    fake_leave();
}

static void *release_soon(void *lease) {
    t_sleep_ms(50);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    return NULL;
}

/* A lease is released while it is being handed to the next agent. */
T_CASE(api_released_adopting, "threads/released-while-adopted", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    pthread_t thread;
    fake_adopts_ms = 200;
    pthread_mutex_lock(&fake_mu);
    shutdown(fake_socket, SHUT_RDWR);
    pthread_mutex_unlock(&fake_mu);
    CHECK(!pthread_create(&thread, NULL, release_soon, lease));
    CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
    pthread_join(thread, NULL);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* Several threads with sessions and leases of their own, and one that tells of deaths. */
T_CASE(api_threads, "threads/c-api", .providers = T_SHM, .seconds = 40) {
    api_thread a[CLIENTS] = {0};
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
    fake_leave();
    printf("%u leases, %u of them on kept connections, %u deaths told, %u calls died, %u workers replaced\n", fake_granted,
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
    int32_t done;
} sharer;

/* One call in one of the ways in which there are. Returns its status. */
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
    __atomic_store_n(&s->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void tell_a_death(void) {
    uint32_t worker = (uint32_t)(t_random() % WORKERS);
    pthread_mutex_lock(&fake_mu);
    for (int i = 0; i < LEASES; i++)
        if (fake_leases[i].key && !fake_leases[i].kept && fake_leases[i].workers[worker].server)
            fake_death(fake_leases[i].key, worker, fake_leases[i].workers[worker].pid);
    pthread_mutex_unlock(&fake_mu);
}

/* Several threads call in one lease while its workers die, until they have done enough, or the lease is released. */
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
        for (int left = !release; left;) {
            left = 0;
            for (int i = 0; i < CLIENTS; i++)
                left += !__atomic_load_n(&s[i].done, __ATOMIC_ACQUIRE);
            t_sleep_ms((int)(t_random() % 20));
            tell_a_death();
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
