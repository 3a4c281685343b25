/* The sockets of shm: the listening one, those to peers, and the thread that accepts newcomers and notices the end of a peer. A newcomer
 * is a peer that has connected and not sent its hello yet. */
#include "dp_shm_link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define NEWCOMERS_MAX 128
#define PAUSE_MS 100 /* pause in accepting when no descriptor is left */

enum { ID_LISTEN = 0, ID_STOP = 1, ID_FIRST_LINK = 2 };

/* ---- links ---- */

static bool watch(const shm_dev *dev, const shm_link *l) {
    struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = l->id};
    return epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, l->fd, &ev) == 0;
}

shm_link *shm_link_add(shm_dev *dev, int fd, shm_qp *qp) {
    shm_link *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    *l = (shm_link){.next = dev->links, .id = dev->next_link++, .fd = fd, .qp = qp};
    if (dev->listening && !watch(dev, l)) {
        free(l);
        return NULL;
    }
    dev->links = l;
    return l;
}

void shm_link_drop(shm_dev *dev, shm_link *gone) {
    for (shm_link **p = &dev->links; *p; p = &(*p)->next)
        if (*p == gone) {
            *p = gone->next;
            break;
        }
    dev->n_newcomers -= !gone->qp;
    if (dev->listening) /* close() is not enough if another process also holds the socket */
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_DEL, gone->fd, NULL);
    close(gone->fd);
    free(gone);
}

static shm_qp *qp_by_token(shm_dev *dev, const uint8_t token[16]) {
    for (shm_qp *qp = dev->qps; qp; qp = qp->next) {
        unsigned diff = 0; /* not memcmp: a token is a secret */
        for (int i = 0; i < 16; i++)
            diff |= qp->token[i] ^ token[i];
        if (!diff)
            return qp;
    }
    return NULL;
}

/* ---- monitor thread ---- */

/* Drops the newcomer that has waited longest. Returns false if there is none. */
static bool drop_oldest_newcomer(shm_dev *dev) {
    shm_link *oldest = NULL; /* newer links are in front */
    for (shm_link *l = dev->links; l; l = l->next)
        if (!l->qp)
            oldest = l;
    if (oldest)
        shm_link_drop(dev, oldest);
    return oldest != NULL;
}

/* Starts or stops accepting newcomers, which otherwise wait in the socket's queue. */
static void listen_on(shm_dev *dev, bool on) {
    struct epoll_event ev = {.events = on ? EPOLLIN : 0, .data.u64 = ID_LISTEN};
    epoll_ctl(dev->epoll_fd, EPOLL_CTL_MOD, dev->listen_fd, &ev);
    __atomic_store_n(&dev->paused, !on, __ATOMIC_RELAXED);
}

static void greet_newcomer(shm_dev *dev, shm_link *l);

static void accept_newcomer(shm_dev *dev) {
    int fd;
    while ((fd = accept4(dev->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) < 0) {
        if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS)
            return; /* the newcomer has disconnected */
        if (!drop_oldest_newcomer(dev)) {
            /* The socket stays readable, so polling it until a descriptor is free would keep a core busy. */
            listen_on(dev, false);
            return;
        }
    }
    if (dev->n_newcomers >= NEWCOMERS_MAX)
        drop_oldest_newcomer(dev);
    shm_link *l = shm_link_add(dev, fd, NULL);
    if (!l) {
        close(fd);
        return;
    }
    dev->n_newcomers++;
    greet_newcomer(dev, l); /* its hello has usually arrived already */
}

static void greet_newcomer(shm_dev *dev, shm_link *l) {
    shm_hello h;
    shm_peer p;
    int e = shm_hello_recv(l->fd, MSG_DONTWAIT, &h, &p);
    if (e == EAGAIN)
        return;
    shm_qp *qp = e || h.status || shm_token_is_zero(h.from) ? NULL : qp_by_token(dev, h.to);
    shm_peer *deposit = qp && !qp->taken ? malloc(sizeof *deposit) : NULL;
    if (!deposit) {
        if (e == EMFILE)
            shm_hello_send(l->fd, dev, NULL, DP_FATAL, h.from);
        else if (!e)
            shm_hello_send(l->fd, dev, NULL, qp ? DP_BUSY : DP_BAD_BLOB, h.from);
        shm_peer_clear(&p);
        shm_link_drop(dev, l);
        return;
    }
    p.keep_below = dev->keep_below;
    *deposit = p;
    qp->deposit = deposit;
    qp->taken = qp->given = true;
    l->qp = qp;
    dev->n_newcomers--;
    shm_hello_send(l->fd, dev, qp, DP_OK, h.from);
    /* Now, while the peer is busy and our connect waits for its blob. If it fails, connect tries again and says why. */
    if (shm_peer_map(deposit, true, NULL))
        shm_peer_unmap(deposit);
}

static void link_event(shm_dev *dev, uint64_t id) {
    for (shm_link *l = dev->links; l; l = l->next) {
        if (l->id != id)
            continue;
        if (!l->qp) {
            greet_newcomer(dev, l);
            return;
        }
        /* Only shared memory follows a hello. Otherwise the peer has closed the socket, or it violates the protocol. */
        int st = l->qp->takes_shared ? shm_shares_take(l->qp, l->fd) : DP_PEER_GONE;
        if (!st)
            return;
        dp_qp_break(&l->qp->q, st);
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_DEL, l->fd, NULL);
        return;
    }
}

/* Handles the events of epoll. Returns false if the thread is to stop. */
static bool handle(shm_dev *dev, const struct epoll_event *ev, int n) {
    bool stop = false;
    pthread_mutex_lock(&dev->lock);
    if (dev->paused)
        listen_on(dev, true);
    for (int i = 0; i < n && !stop; i++) {
        if (ev[i].data.u64 == ID_STOP)
            stop = true;
        else if (ev[i].data.u64 == ID_LISTEN)
            accept_newcomer(dev);
        else
            link_event(dev, ev[i].data.u64);
    }
    pthread_mutex_unlock(&dev->lock);
    return !stop;
}

enum { EVENTS = 16 }; /* at a time */

static void *monitor(void *arg) {
    shm_dev *dev = arg;
    for (;;) {
        struct epoll_event ev[EVENTS];
        int n = epoll_wait(dev->epoll_fd, ev, EVENTS, dev->paused ? PAUSE_MS : -1);
        if ((n < 0 && errno != EINTR) || !handle(dev, ev, n))
            return NULL;
    }
}

/* Does the work of the thread, for a device without one. */
void shm_attend(dp_dev *d) {
    shm_dev *dev = (shm_dev *)d;
    struct epoll_event ev[EVENTS];
    if (!dev->attended || !__atomic_load_n(&dev->listening, __ATOMIC_ACQUIRE))
        return;
    if (shm_starved(d)) { /* descriptors may be free again: try to accept */
        pthread_mutex_lock(&dev->lock);
        listen_on(dev, true);
        pthread_mutex_unlock(&dev->lock);
    }
    int n;
    do {
        n = epoll_wait(dev->epoll_fd, ev, EVENTS, 0);
        if (n > 0)
            handle(dev, ev, n);
    } while (n == EVENTS);
}

bool shm_starved(const dp_dev *d) { return __atomic_load_n(&((const shm_dev *)d)->paused, __ATOMIC_RELAXED); }

int shm_event_fd(dp_dev *d) {
    const shm_dev *dev = (const shm_dev *)d;
    return dev->attended && __atomic_load_n(&dev->listening, __ATOMIC_ACQUIRE) ? dev->epoll_fd : -1;
}

/* ---- listening ---- */

socklen_t shm_listen_address(const uint8_t name[16], struct sockaddr_un *a) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    char *p = a->sun_path + 1; /* the leading NUL makes it abstract: no file, gone with the process */
    p += sprintf(p, "rfaas-shm-");
    for (int i = 0; i < 16; i++)
        p += sprintf(p, "%02x", name[i]);
    return (socklen_t)(p - (char *)a);
}

int shm_listen_start(shm_dev *dev, dp_error *err) {
    struct sockaddr_un a;
    dp_random(dev->name, sizeof dev->name);
    socklen_t len = shm_listen_address(dev->name, &a);
    dev->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    dev->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    dev->stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event on_listen = {.events = EPOLLIN, .data.u64 = ID_LISTEN};
    struct epoll_event on_stop = {.events = EPOLLIN, .data.u64 = ID_STOP};
    int e = 0;
    if (dev->listen_fd < 0 || dev->epoll_fd < 0 || dev->stop_fd < 0 ||
        bind(dev->listen_fd, (struct sockaddr *)&a, len) || listen(dev->listen_fd, 64) ||
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, dev->listen_fd, &on_listen) ||
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, dev->stop_fd, &on_stop))
        e = errno;
    dev->next_link += ID_FIRST_LINK;
    for (shm_link *l = dev->links; !e && l; l = l->next) { /* links that were made before this socket */
        l->id = dev->next_link++;
        if (!watch(dev, l))
            e = errno;
    }
    __atomic_store_n(&dev->paused, false, __ATOMIC_RELAXED); /* other threads call shm_starved */
    if (!e && !dev->attended)
        e = dp_thread_start(&dev->monitor, monitor, dev);
    if (e) {
        int *fds[] = {&dev->listen_fd, &dev->epoll_fd, &dev->stop_fd};
        for (int i = 0; i < 3; i++) {
            if (*fds[i] >= 0)
                close(*fds[i]);
            *fds[i] = -1;
        }
        return dp_fail(err, DP_FATAL, e, "start listening for shm peers");
    }
    __atomic_store_n(&dev->listening, true, __ATOMIC_RELEASE);
    return DP_OK;
}

void shm_link_close(shm_dev *dev) {
    if (dev->listening) {
        uint64_t one = 1;
        while (!dev->attended && write(dev->stop_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
        if (!dev->attended)
            pthread_join(dev->monitor, NULL);
        close(dev->listen_fd);
        close(dev->epoll_fd);
        close(dev->stop_fd);
        dev->listening = false;
    }
    while (dev->links)
        shm_link_drop(dev, dev->links);
}
