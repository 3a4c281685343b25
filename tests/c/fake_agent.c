#include "fake_agent.h"

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

pthread_mutex_t fake_mu = PTHREAD_MUTEX_INITIALIZER;
fake_lease fake_leases[LEASES];
uint32_t fake_granted, fake_replaced, fake_released, fake_resumed;
int fake_adopts_ms, fake_reads_ms, fake_adopt_status, fake_loses;
uint32_t fake_ends_at, fake_ends, fake_unreached, fake_leaves, fake_refused, fake_uses;
int fake_unreached_as = DP_PEER_GONE;
void (*fake_hands)(uint32_t id);
static uint64_t fake_pid;
static uint64_t fake_ended_lease; /* key of the lease whose workers cannot be reached, until the library moves on; 0: none */
static pthread_t fake_thread;
static int fake_socket = -1; /* writes need fake_mu */

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

static void fake_suspended(void *arg) { sem_post(arg); }

/* Starts a worker. DP_BAD_BLOB: the offer was used already. This function and the next ones need fake_mu. */
static int fake_start(fake_worker *w, const rfaas_agent_blob *offer, rfaas_agent_worker *out) {
    dp_error err;
    CHECK_OK_ERR(dp_dev_open("shm", &(dp_dev_options){.active_side_only = 1}, &w->dev, &err), err);
    int status = dp_server_create(w->dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, offer->bytes, offer->size, &w->server, &err);
    if (status == DP_BAD_BLOB) {
        dp_dev_close(w->dev);
        w->server = NULL;
        return status;
    }
    CHECK_OK_ERR(status, err);
    dp_server_set_functions(w->server, fake_functions, 2);
    sem_init(&w->suspended, 0, 0);
    dp_server_on_suspended(w->server, fake_suspended, &w->suspended);
    out->blob.size = sizeof out->blob.bytes;
    CHECK_OK_ERR(dp_server_blob(w->server, out->blob.bytes, &out->blob.size, &err), err);
    w->blob = out->blob;
    out->pid = w->pid = ++fake_pid;
    out->start = 1;
    CHECK(!pthread_create(&w->thread, NULL, fake_serve, w->server));
    return DP_OK;
}

/* Resumes a cached worker with its client's new generation. */
static int fake_resume(fake_worker *w, const rfaas_agent_blob *offer, rfaas_agent_worker *out) {
    dp_error err;
    CHECK_OK_ERR(dp_server_resume(w->server, offer->bytes, offer->size, &err), err);
    out->blob = w->blob;
    out->pid = w->pid;
    out->start = 3;
    return DP_OK;
}

static void fake_stop(fake_worker *w) {
    if (!w->server)
        return;
    dp_server_stop(w->server);
    pthread_join(w->thread, NULL);
    dp_server_destroy(w->server);
    dp_dev_close(w->dev);
    sem_destroy(&w->suspended);
    w->server = NULL;
}

fake_lease *fake_find(uint64_t key) {
    for (int i = 0; i < LEASES; i++)
        if (fake_leases[i].key == key)
            return &fake_leases[i];
    return NULL;
}

static void fake_end(fake_lease *l) {
    for (int i = 0; i < WORKERS; i++)
        fake_stop(&l->workers[i]);
    l->key = 0;
    l->cached = false;
    fake_released++;
}

static void fake_send(uint32_t op, uint32_t id, const void *body, size_t size, const void *tail, size_t tail_size) {
    rfaas_agent_header h = {.size = (uint32_t)(sizeof h + size + tail_size), .op = op, .id = id};
    struct iovec iov[3] = {{&h, sizeof h}, {(void *)body, size}, {(void *)tail, tail_size}};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = 3};
    sendmsg(fake_socket, &m, MSG_NOSIGNAL); /* the client may have left */
}

void fake_hand(uint32_t id, const rfaas_agent_hand *hand, const void *tail, size_t tail_size, int fd, uint32_t n) {
    rfaas_agent_header h = {.size = (uint32_t)(sizeof h + sizeof *hand + tail_size), .op = RFAAS_AGENT_HAND, .id = id};
    struct iovec iov[3] = {{&h, sizeof h}, {(void *)hand, sizeof *hand}, {(void *)tail, tail_size}};
    int fds[RFAAS_AGENT_FDS];
    for (uint32_t i = 0; i < n; i++)
        fds[i] = fd;
    CHECK(rfaas_pass_send(fake_socket, iov, 3, fds, n, INT64_MAX));
}

void fake_event(const rfaas_agent_event *e) {
    fake_send(RFAAS_AGENT_EVENT, 0, e, sizeof *e, NULL, 0);
    if (rfaas_agent_shared)
        __atomic_add_fetch(&rfaas_agent_shared->events, 1, __ATOMIC_RELEASE);
}

uint64_t fake_drop(uint64_t session) {
    for (int i = 0; i < LEASES; i++) {
        fake_lease *l = &fake_leases[i];
        uint64_t key = l->key;
        if (l->cached && (!session || l->session == session)) {
            fake_end(l);
            return key;
        }
    }
    return 0;
}

void fake_dropped(uint64_t key) { fake_event(&(rfaas_agent_event){.key = key, .kind = RFAAS_AGENT_DROPPED}); }

const char *fake_name(void) {
    static char name[256];
    memset(name, 'n', sizeof name - 1);
    return name;
}

/* Describes a worker on tcp to which connecting fails with fake_unreached_as: no process listens at its address, it requires encryption,
 * which the session has off, or its blob is damaged. */
static void fake_ended(const rfaas_agent_blob *offer, rfaas_agent_worker *out) {
    dp_error err;
    dp_dev *dev;
    dp_server *server;
    CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.handed = 1, .advertise = "127.0.0.1:1", .encrypt = fake_unreached_as == DP_UNSUPPORTED ? DP_ENCRYPT_REQUIRE : DP_ENCRYPT_OFF}, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, offer->bytes, offer->size, &server, &err), err);
    out->blob.size = sizeof out->blob.bytes;
    CHECK_OK_ERR(dp_server_blob(server, out->blob.bytes, &out->blob.size, &err), err);
    if (fake_unreached_as == DP_BAD_BLOB)
        out->blob.bytes[sizeof(dp_channel_blob)] ^= 1;
    out->pid = ++fake_pid;
    dp_server_destroy(server);
    dp_dev_close(dev);
}

/* Grants workers for the offers. Without offers it names the provider first. */
static void fake_acquire(uint32_t id, const rfaas_agent_acquire *req, const rfaas_agent_blob *offers) {
    rfaas_agent_candidate c = {.provider = "shm"};
    struct {
        rfaas_agent_worker workers[WORKERS];
        char names[10];
    } grant = {.names = "echo\0slow"};
    memcpy(c.executor, fake_name(), sizeof c.executor);
    memcpy(c.node, fake_name(), sizeof c.node);
    if (fake_hands && req->first && !req->cached) {
        fake_hands(id);
        c.handed = 1;
        fake_send(RFAAS_AGENT_ACQUIRE, id, &c, sizeof c, NULL, 0);
        return;
    }
    if (req->from && !fake_ended_lease) { /* a lease of an earlier agent */
        fake_refused++;
        rfaas_agent_header h = {.size = sizeof h, .op = RFAAS_AGENT_ACQUIRE, .id = id, .status = RFAAS_INVALID};
        CHECK(send(fake_socket, &h, sizeof h, MSG_NOSIGNAL) == sizeof h);
        return;
    }
    CHECKF(req->from == (req->first ? fake_ended_lease : 0) && !req->from == !req->reason[0] && req->from != req->key, "from %llu, %s",
           (unsigned long long)req->from, req->reason);
    CHECK_EQ(req->status, req->from ? fake_unreached_as : 0);
    fake_ended_lease = req->first ? 0 : fake_ended_lease;
    if (fake_unreached) {
        strcpy(c.provider, "tcp");
        if (req->offers && !strcmp(req->provider, "tcp")) {
            for (uint32_t i = 0; i < WORKERS; i++)
                fake_ended(&offers[i], &grant.workers[i]);
            fake_unreached--;
            fake_ended_lease = req->key;
            c.granted = 1;
            c.workers = WORKERS;
            c.functions = 2;
            c.names_size = 10;
            c.lease_id = req->key;
        }
        fake_send(RFAAS_AGENT_ACQUIRE, id, &c, sizeof c, &grant, c.granted ? WORKERS * sizeof *grant.workers + 10 : 0);
        if (c.granted && fake_leaves) {
            fake_leaves--;
            shutdown(fake_socket, SHUT_RDWR);
        }
        return;
    }
    fake_lease *from = req->cached ? fake_find(req->cached) : NULL;
    if (req->cached && from && t_random() % 8 == 0) { /* in vain */
        fake_end(from);
        from = NULL;
    }
    if (!req->offers || (req->cached && !from)) {
        fake_send(RFAAS_AGENT_ACQUIRE, id, &c, sizeof c, NULL, 0);
        return;
    }
    CHECK_EQ(req->offers, WORKERS);
    fake_lease *l = from ? from : fake_find(0);
    CHECK(l);
    l->key = req->key;
    l->session = req->session;
    l->cached = false;
    l->known = true;
    for (uint32_t i = 0; i < WORKERS; i++)
        CHECK_EQ((from ? fake_resume : fake_start)(&l->workers[i], &offers[i], &grant.workers[i]), DP_OK);
    fake_resumed += from != NULL;
    fake_granted++;
    c.granted = 1;
    c.workers = WORKERS;
    c.functions = 2;
    c.names_size = 10;
    c.lease_id = req->key;
    fake_send(RFAAS_AGENT_ACQUIRE, id, &c, sizeof c, &grant, WORKERS * sizeof *grant.workers + 10);
}

/* Answers that the new worker has not started, as when the client's time is over. The client receives the event and the answer together. */
static void fake_lose(uint32_t id, const rfaas_agent_replace *req) {
    struct {
        rfaas_agent_header h;
        rfaas_agent_worker worker;
    } answer = {{.size = sizeof answer, .op = RFAAS_AGENT_REPLACE, .id = id}, {0}};
    struct {
        rfaas_agent_header h;
        rfaas_agent_event e;
    } event = {{.size = sizeof event, .op = RFAAS_AGENT_EVENT},
               {.key = req->key, .kind = RFAAS_EVENT_ENDED, .status = RFAAS_PEER_GONE, .text = "lost: executor here: it sent nothing for 5s"}};
    struct iovec a = {&answer, sizeof answer}, e = {&event, sizeof event}, both[2] = {fake_loses < 0 ? e : a, fake_loses < 0 ? a : e};
    struct msghdr m = {.msg_iov = both, .msg_iovlen = 2};
    sendmsg(fake_socket, &m, MSG_NOSIGNAL);
    __atomic_add_fetch(&rfaas_agent_shared->events, 1, __ATOMIC_RELEASE);
    fake_loses = 0;
}

static void fake_replace(uint32_t id, const rfaas_agent_replace *req) {
    rfaas_agent_worker w = {0};
    fake_lease *l = fake_find(req->key);
    CHECK(l && req->worker < WORKERS);
    if (fake_loses && req->timeout_ns) {
        fake_lose(id, req);
        return;
    }
    fake_stop(&l->workers[req->worker]);
    rfaas_agent_header refusal = {.size = sizeof refusal, .op = RFAAS_AGENT_REPLACE, .id = id};
    refusal.status = fake_start(&l->workers[req->worker], &req->offer, &w);
    if (refusal.status) {
        CHECK(send(fake_socket, &refusal, sizeof refusal, MSG_NOSIGNAL) == sizeof refusal);
        return;
    }
    fake_replaced++;
    if (fake_uses) {
        fake_uses--;
        fake_stop(&l->workers[req->worker]);
        shutdown(fake_socket, SHUT_RDWR);
        return;
    }
    fake_send(RFAAS_AGENT_REPLACE, id, &w, sizeof w, NULL, 0);
}

/* Ends a lease, or caches its workers. Every fourth lease is not cached although it could be. */
static void fake_release(uint32_t id, const rfaas_agent_release *req) {
    fake_lease *l = fake_find(req->key);
    rfaas_agent_released r = {.cached = l && req->keep && t_random() % 4};
    if (l && !r.cached)
        fake_end(l);
    for (int i = 0; r.cached && i < WORKERS; i++)
        dp_server_suspend(l->workers[i].server);
    for (int i = 0; r.cached && i < WORKERS; i++)
        sem_wait(&l->workers[i].suspended);
    if (r.cached)
        l->cached = true;
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
    case RFAAS_AGENT_OPEN: fake_send(h->op, h->id, &(rfaas_agent_opened){.provider = "shm", .configured = 1}, sizeof(rfaas_agent_opened), NULL, 0); break;
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
        memcpy(r.share.executor, fake_name(), sizeof r.share.executor);
        fake_send(h->op, h->id, &r, sizeof r, NULL, 0);
        break;
    }
    case RFAAS_AGENT_ADOPT:
        t_sleep_ms(fake_adopts_ms);
        fake_adopts_ms = 0;
        if (fake_adopt_status) {
            rfaas_agent_header refusal = {.size = sizeof refusal, .op = h->op, .id = h->id, .status = fake_adopt_status};
            fake_adopt_status = 0;
            CHECK(send(fake_socket, &refusal, sizeof refusal, MSG_NOSIGNAL) == sizeof refusal);
            break;
        }
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
    pthread_sigmask(SIG_SETMASK, &all, NULL); /* the program handles signals */
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
        pthread_join(fake_thread, NULL); /* it ends when its client has left */
    pthread_mutex_lock(&fake_mu);
    fake_socket = fd[1];
    fake_ended_lease = 0;
    for (int i = 0; i < LEASES; i++)
        fake_leases[i].known = false;
    pthread_mutex_unlock(&fake_mu);
    CHECK(!pthread_create(&fake_thread, NULL, fake_agent, (void *)(intptr_t)fd[1]));
    return fd[0];
}

void rfaas_agent_reach_forked(void) {}

void fake_leave(void) {
    pthread_join(fake_thread, NULL);
    fake_socket = -1;
}

void fake_death(uint64_t key, uint32_t worker, uint64_t pid) {
    fake_event(&(rfaas_agent_event){.key = key, .kind = RFAAS_EVENT_WORKER_DIED, .worker = worker, .pid = pid,
                                    .status = RFAAS_WORKER_DIED, .text = "signal 9 (SIGKILL)"});
}

void fake_hang_up(void) {
    pthread_mutex_lock(&fake_mu);
    shutdown(fake_socket, SHUT_RDWR);
    pthread_mutex_unlock(&fake_mu);
}

rfaas_session *fake_session(rfaas_lease_options *lo) {
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
