/* The listening socket of a tcp device, and the thread that accepts. A pending connection is an accepted socket without a whole hello, so
 * it is not authenticated. It uses DP_TCP_HELLO_SIZE bytes of memory for at most DP_TCP_HELLO_MS, and there are at most DP_TCP_PENDING. */
#include "dp_tcp_impl.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define MS 1000000ll
#define PAUSE_MS 100 /* pause of accepting if no descriptor is left */
#define BACKLOG 256

enum { ID_LISTEN = 0, ID_STOP = 1, ID_TIMER = 2, ID_FIRST = 3 };

typedef struct pending_conn {
    uint64_t id; /* in epoll's data, because the connection may be dropped while its event is pending; 0: unused entry */
    int fd;
    uint32_t got;
    int64_t since;
    uint8_t hello[DP_TCP_HELLO_SIZE];
} pending_conn;

struct tcp_listener {
    int listen_fd, epoll_fd, stop_fd, timer_fd;
    pthread_t thread;
    pthread_mutex_t attending; /* one thread at a time */
    bool threaded;
    bool paused; /* no descriptor is left to accept with; atomic */
    uint64_t next_id;
    pending_conn pending[DP_TCP_PENDING];
};

/* ---- pending connections: by the thread, or under the lock of tcp_attend ---- */

static void drop(pending_conn *s) {
    close(s->fd);
    s->id = 0;
}

static pending_conn *oldest(tcp_listener *l) {
    pending_conn *found = NULL;
    for (int i = 0; i < DP_TCP_PENDING; i++)
        if (l->pending[i].id && (!found || l->pending[i].id < found->id))
            found = &l->pending[i];
    return found;
}

static pending_conn *free_place(tcp_listener *l) {
    for (int i = 0; i < DP_TCP_PENDING; i++)
        if (!l->pending[i].id)
            return &l->pending[i];
    return NULL;
}

static void count(tcp_dev *dev, uint64_t *what) {
    pthread_mutex_lock(&dev->lock);
    ++*what;
    pthread_mutex_unlock(&dev->lock);
}

/* Drops a connection and counts it, before its peer can see the end. */
static void drop_counted(tcp_dev *dev, pending_conn *s) {
    count(dev, &dev->counts.dropped);
    drop(s);
}

/* Sets the timer to the deadline of the oldest pending connection. */
static void set_timer(tcp_listener *l) {
    const pending_conn *s = oldest(l);
    int64_t at = s ? s->since + DP_TCP_HELLO_MS * MS : 0;
    struct itimerspec t = {.it_value = {at / 1000000000, at % 1000000000}};
    timerfd_settime(l->timer_fd, TFD_TIMER_ABSTIME, &t, NULL);
}

static void drop_late(tcp_dev *dev, tcp_listener *l) {
    uint64_t n;
    ssize_t got = read(l->timer_fd, &n, sizeof n);
    (void)got;
    int64_t now = dp_now_ns();
    for (pending_conn *s; (s = oldest(l)) && now - s->since >= DP_TCP_HELLO_MS * MS;)
        drop_counted(dev, s);
    set_timer(l);
}

/* Starts or stops accepting. Meanwhile, new connections wait in the socket's queue. */
static void listen_on(tcp_listener *l, bool on) {
    struct epoll_event ev = {.events = on ? EPOLLIN : 0, .data.u64 = ID_LISTEN};
    epoll_ctl(l->epoll_fd, EPOLL_CTL_MOD, l->listen_fd, &ev);
    __atomic_store_n(&l->paused, !on, __ATOMIC_RELAXED);
}

/* Reads the bytes of a hello that have arrived. */
static void hear(tcp_dev *dev, tcp_listener *l, pending_conn *s) {
    ssize_t n = recv(s->fd, s->hello + s->got, sizeof s->hello - s->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0 && (s->got += (uint32_t)n) < sizeof s->hello)
        return;
    if (n > 0) {
        epoll_ctl(l->epoll_fd, EPOLL_CTL_DEL, s->fd, NULL);
        s->id = 0;
        dp_tcp_hand(&dev->d, s->fd, s->hello, NULL);
    } else {
        drop_counted(dev, s);
    }
    set_timer(l);
}

static void accept_connection(tcp_dev *dev, tcp_listener *l) {
    int fd;
    while ((fd = accept4(l->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) < 0) {
        if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS)
            return; /* the connection has ended already */
        pending_conn *s = oldest(l);
        if (!s) { /* the listening socket stays readable, so polling it until a descriptor is free would keep a core busy */
            listen_on(l, false);
            return;
        }
        drop_counted(dev, s);
    }
    count(dev, &dev->counts.accepted);
    pending_conn *s = free_place(l);
    if (!s)
        drop_counted(dev, s = oldest(l));
    *s = (pending_conn){.id = l->next_id++, .fd = fd, .since = dp_now_ns()};
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = s->id};
    if (epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, fd, &ev)) {
        drop_counted(dev, s);
        return;
    }
    set_timer(l);
    hear(dev, l, s); /* the hello has usually arrived already */
}

/* Handles events. False: the thread is to stop. */
static bool handle(tcp_dev *dev, tcp_listener *l, const struct epoll_event *ev, int n) {
    if (__atomic_load_n(&l->paused, __ATOMIC_RELAXED))
        listen_on(l, true);
    for (int i = 0; i < n; i++) {
        uint64_t id = ev[i].data.u64;
        if (id == ID_STOP)
            return false;
        if (id == ID_LISTEN)
            accept_connection(dev, l);
        else if (id == ID_TIMER)
            drop_late(dev, l);
        for (int k = 0; id >= ID_FIRST && k < DP_TCP_PENDING; k++)
            if (l->pending[k].id == id)
                hear(dev, l, &l->pending[k]);
    }
    return true;
}

enum { EVENTS = 16 };

static void *run(void *arg) {
    tcp_dev *dev = arg;
    pthread_mutex_lock(&dev->lock); /* until tcp_listen_start has ended */
    tcp_listener *l = dev->listener;
    pthread_mutex_unlock(&dev->lock);
    for (;;) {
        struct epoll_event ev[EVENTS];
        int n = epoll_wait(l->epoll_fd, ev, EVENTS, __atomic_load_n(&l->paused, __ATOMIC_RELAXED) ? PAUSE_MS : -1);
        if ((n < 0 && errno != EINTR) || !handle(dev, l, ev, n))
            return NULL;
    }
}

/* ---- for a device without a thread ---- */

static tcp_listener *attended(tcp_dev *dev) {
    return dev->attended ? __atomic_load_n(&dev->listener, __ATOMIC_ACQUIRE) : NULL;
}

void tcp_attend(dp_dev *d) {
    tcp_dev *dev = tcp_dev_of(d);
    tcp_listener *l = attended(dev);
    if (!l)
        return;
    pthread_mutex_lock(&l->attending);
    struct epoll_event ev[EVENTS];
    if (tcp_starved(d))
        listen_on(l, true); /* descriptors may be free again */
    int n;
    do {
        n = epoll_wait(l->epoll_fd, ev, EVENTS, 0);
        if (n > 0)
            handle(dev, l, ev, n);
    } while (n == EVENTS);
    pthread_mutex_unlock(&l->attending);
}

bool tcp_starved(const dp_dev *d) {
    const tcp_listener *l = __atomic_load_n(&((const tcp_dev *)d)->listener, __ATOMIC_ACQUIRE);
    return l && __atomic_load_n(&l->paused, __ATOMIC_RELAXED);
}

int tcp_event_fd(dp_dev *d) {
    const tcp_listener *l = attended(tcp_dev_of(d));
    return l ? l->epoll_fd : -1;
}

/* ---- listening ---- */

/* Binds to the first free port of the range. 0 or an errno. */
static int bind_port(tcp_dev *dev, int fd) {
    struct sockaddr_storage at = dev->listen_at;
    uint16_t *port = at.ss_family == AF_INET ? &((struct sockaddr_in *)&at)->sin_port : &((struct sockaddr_in6 *)&at)->sin6_port;
    for (int p = dev->port_first;; p++) {
        *port = htons((uint16_t)p);
        if (!bind(fd, (struct sockaddr *)&at, dev->listen_len) && !listen(fd, BACKLOG))
            break;
        if (errno != EADDRINUSE || p >= dev->port_last)
            return errno;
    }
    if (dev->n_addresses)
        return 0;
    socklen_t len = sizeof at;
    if (getsockname(fd, (struct sockaddr *)&at, &len))
        return errno;
    dev->n_addresses = tcp_address_of(&at, &dev->addresses[0]);
    return 0;
}

static int watch(const tcp_listener *l, int fd, uint64_t id) {
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = id};
    return epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, fd, &ev);
}

static void close_all(tcp_listener *l) {
    for (int i = 0; i < DP_TCP_PENDING; i++)
        if (l->pending[i].id)
            drop(&l->pending[i]);
    int fds[] = {l->listen_fd, l->epoll_fd, l->stop_fd, l->timer_fd};
    for (int i = 0; i < 4; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    pthread_mutex_destroy(&l->attending);
    free(l);
}

int tcp_listen_start(tcp_dev *dev, dp_error *err) {
    tcp_listener *l = calloc(1, sizeof *l);
    if (!l)
        return dp_fail(err, DP_FATAL, ENOMEM, "listen for tcp peers");
    int one = 1, e = 0;
    l->next_id = ID_FIRST;
    pthread_mutex_init(&l->attending, NULL);
    l->listen_fd = socket(dev->listen_at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    l->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    l->stop_fd = eventfd(0, EFD_CLOEXEC);
    l->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (l->listen_fd < 0 || l->epoll_fd < 0 || l->stop_fd < 0 || l->timer_fd < 0)
        e = errno;
    if (!e) {
        setsockopt(l->listen_fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        e = bind_port(dev, l->listen_fd);
    }
    if (!e && (watch(l, l->listen_fd, ID_LISTEN) || watch(l, l->stop_fd, ID_STOP) || watch(l, l->timer_fd, ID_TIMER)))
        e = errno;
    if (!e && !dev->attended) {
        e = dp_thread_start(&l->thread, run, dev);
        l->threaded = !e;
    }
    if (e) {
        close_all(l);
        return dp_fail(err, DP_FATAL, e, "listen for tcp peers on %s, ports %d to %d", dev->d.name, dev->port_first, dev->port_last);
    }
    __atomic_store_n(&dev->listener, l, __ATOMIC_RELEASE);
    return DP_OK;
}

void tcp_listen_stop(tcp_dev *dev) {
    tcp_listener *l = dev->listener;
    if (!l)
        return;
    uint64_t one = 1;
    while (l->threaded && write(l->stop_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    if (l->threaded)
        pthread_join(l->thread, NULL);
    close_all(l);
    dev->listener = NULL;
}
