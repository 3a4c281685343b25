/* The monitor thread of a serving worker. It passes the executor's messages on to the serving thread, and notices the end of the client
 * while a function runs. */
#include "listen.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dp_tcp.h"
#include "message.h"
#include "seed/heap.h"
#include "startup/startup.h"
#include "table.h"

/* Tells the executor that the serving thread has suspended. */
static void tell_suspended(void *arg) {
    const dp_listener *w = arg;
    dp_msg_send(w->sock, DP_MSG_SUSPENDED, w->id, NULL, 0, -1);
}

/* Resumes service. The executor waits for the answer only if the server is late (dp_serve.h). If the client's blob is wrong, the worker ends,
 * and the executor reports why. */
static void resume(const dp_listener *w, const uint8_t *blob, uint32_t len) {
    dp_error err = {0};
    bool late = dp_server_is_late(w->server);
    int st = dp_server_resume(w->server, blob, len, &err);
    uint8_t own[DP_CHANNEL_BLOB_MAX];
    uint32_t size = sizeof own;
    if (st == DP_OK && late)
        st = dp_server_blob(w->server, own, &size, &err);
    if (st == DP_OK) {
        if (late)
            dp_msg_send(w->sock, DP_MSG_RESUMED, w->id, own, size, -1);
        return;
    }
    dp_msg_send_failure(w->sock, DP_MSG_FAILED, w->id, st, err.msg);
    fflush(stdout);
    fflush(stderr);
    _exit(DP_EXIT_FAILED);
}

/* Maps a table and tells the executor. */
static void take_table(const dp_listener *w, const uint8_t *body, uint32_t len, int fd) {
    dp_msg_table t;
    dp_error err = {0};
    int st = len == sizeof t ? DP_OK : dp_fail(&err, DP_PROTOCOL, 0, "table: a message of %u bytes, want %zu", len, sizeof t);
    memcpy(&t, body, sizeof t);
    if (st == DP_OK)
        st = dp_table_map(&t, fd, &err);
    if (st == DP_OK)
        dp_msg_send(w->sock, DP_MSG_TABLED, w->id, NULL, 0, -1);
    else
        dp_msg_send_failure(w->sock, DP_MSG_FAILED, w->id, st, err.msg);
}

enum { EXECUTOR, CLIENT }; /* source of an event in await_executor */

/* Returns an epoll instance for the sockets of the executor and the client. EPOLLRDHUP reports the end of the client. Its messages are
 * for the serving thread. On shm, few messages take this way, and the serving thread is told of each. -1: no epoll instance is needed, or no descriptor is left.
 * poll() would hold a reference to the client's socket, and the client would not notice that a function has closed it. */
static int watch_client(const dp_listener *w, int client) {
    uint32_t messages = w->dev->provider == DP_PROVIDER_SHM ? EPOLLIN | EPOLLET : 0;
    struct epoll_event said = {.events = EPOLLIN, .data.u32 = EXECUTOR}, peer = {.events = EPOLLRDHUP | messages, .data.u32 = CLIENT};
    int ep = client < 0 ? -1 : epoll_create1(EPOLL_CLOEXEC);
    if (ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, w->sock, &said)) { /* the user's limit of watches is reached */
        close(ep);
        ep = -1;
    }
    if (ep >= 0)
        dp_server_watch(w->server, epoll_ctl(ep, EPOLL_CTL_ADD, client, &peer) == 0);
    return ep;
}

/* Blocks until there is a message of the executor. If the client's process ends meanwhile, notes it in the page: the serving thread
 * cannot see it while it runs a function. Returns at once if a function has closed the epoll instance; recv() waits then. */
static void await_executor(const dp_listener *w, int ep, int client) {
    for (bool said = false; !said;) {
        struct epoll_event ev[2];
        int n = epoll_wait(ep, ev, 2, -1);
        if (n < 0 && errno != EINTR) {
            dp_server_watch(w->server, false);
            return;
        }
        for (int i = 0; i < n; i++) {
            said |= ev[i].data.u32 == EXECUTOR;
            if (ev[i].data.u32 != CLIENT)
                continue;
            if (ev[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
                __atomic_store_n(&w->page->client_gone, 1, __ATOMIC_RELEASE);
                epoll_ctl(ep, EPOLL_CTL_DEL, client, NULL);
            }
            dp_server_look(w->server);
        }
    }
}

_Static_assert(DP_TCP_HELLO_SIZE <= DP_CHANNEL_BLOB_MAX && sizeof(dp_msg_table) <= DP_CHANNEL_BLOB_MAX, "room of a message to a worker that serves");

/* A message from the executor to a serving worker. */
typedef struct said {
    struct {
        dp_msg_head head;
        uint8_t rest[DP_CHANNEL_BLOB_MAX];
    } m;
    int fd; /* descriptor of the message; -1: none */
} said;

/* Receives a message. Returns its type, 0 if it is malformed, or -1 if the executor has ended. */
static int hear(int sock, said *s) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {&s->m, sizeof s->m};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf};
    ssize_t n;
    do
        n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    s->fd = -1;
    if (n <= 0)
        return -1;
    const struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(&s->fd, CMSG_DATA(c), sizeof s->fd);
    bool whole = n >= (ssize_t)sizeof s->m.head && (size_t)n == sizeof s->m.head + s->m.head.len && s->m.head.magic == DP_MSG_MAGIC &&
                 s->m.head.version == DP_WIRE_VERSION;
    return whole ? s->m.head.type : 0;
}

/* Passes the executor's messages on to the serving thread, until STOP or the end of the executor. */
static void *listen_to_executor(void *arg) {
    const dp_listener *w = arg;
    dp_server *server = w->server;
    dp_heap_outside = 1;
    int client = dp_server_peer_fd(server), ep = watch_client(w, client);
    dp_server_touch(server); /* while the first call is under way */
    for (;;) {
        said s;
        await_executor(w, ep, client);
        int type = hear(w->sock, &s);
        if (type == DP_MSG_SOCKET && s.fd >= 0 && s.m.head.len == DP_TCP_HELLO_SIZE && w->dev->provider == DP_PROVIDER_TCP && client < 0) {
            client = fcntl(s.fd, F_DUPFD_CLOEXEC, 0); /* to notice the client's end while a function runs */
            ep = watch_client(w, client);
            /* A wrong hello is refused. Then the client is never connected, and the executor notices that. */
            dp_tcp_hand(w->dev, s.fd, s.m.rest, NULL);
            s.fd = -1;
        }
        if (type == DP_MSG_TABLE)
            take_table(w, s.m.rest, s.m.head.len, s.fd);
        if (s.fd >= 0)
            close(s.fd);
        if (type == DP_MSG_FINISH)
            dp_server_finish(server);
        if (type == DP_MSG_SUSPEND)
            dp_server_suspend(server);
        if (type == DP_MSG_RESUME)
            resume(w, s.m.rest, s.m.head.len);
        if (type < 0 || type == DP_MSG_STOP) {
            dp_server_stop(server);
            return NULL;
        }
    }
}

int dp_listener_start(dp_listener *w, dp_error *err) {
    pthread_attr_t attr;
    pthread_t thread;
    /* The thread that executes functions handles signals. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, DP_STARTUP_STACK);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    dp_server_on_suspended(w->server, tell_suspended, w);
    int e = pthread_create(&thread, &attr, listen_to_executor, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return e ? dp_fail(err, DP_FATAL, e, "start the worker's monitor thread") : DP_OK;
}
