/* Completion queues of the tcp provider: polling, blocking, and detecting dead peers.
 *
 * With one or two queue pairs, a poll reads their sockets: one system call each. With more, it asks epoll first. Waits are level
 * triggered, so tcp_cq_arm only flushes. */
#include "dp_tcp_impl.h"

#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* A peer is gone if it acknowledges nothing for GONE_MS in spite of retransmits or probes (RATIONALE.md, "Why our own provider over
 * TCP?"). */
#define GONE_MS 3500
/* How long a reply to the latest retransmit or probe may take: two round trips, within these bounds. The upper one keeps the time until a
 * dead peer is noticed within 4 s, even if the kernel mistakes the length of an outage for a round trip. */
#define GONE_CONFIRM_MIN_NS 50000000
#define GONE_CONFIRM_MAX_NS 400000000
#define GONE_SAME_NS 1000000000 /* most time between two probes of one silence; nothing probes while no call is in flight */
#define GONE_PROBES 2
#define GONE_ONE_WAY 6 /* retransmits, some 13 s: acknowledgements arrive, but not for these segments */
#define EVENTS 64

/* ---- create, destroy ---- */

int tcp_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    tcp_cq *cq = calloc(1, sizeof *cq);
    if (!cq)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue");
    uint32_t room = 1;
    while (room < capacity)
        room <<= 1;
    cq->c = (dp_cq){.ops = dev->ops, .dev = dev, .capacity = capacity};
    cq->mask = room - 1;
    cq->epoll_fd = -1;
    cq->ring = calloc(room, sizeof *cq->ring);
    cq->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!cq->ring || cq->wake_fd < 0) {
        int e = cq->ring ? errno : ENOMEM;
        if (cq->wake_fd >= 0)
            close(cq->wake_fd);
        free(cq->ring);
        free(cq);
        return dp_fail(err, DP_FATAL, e, "create completion queue of %u", capacity);
    }
    *out = &cq->c;
    return DP_OK;
}

void tcp_cq_destroy(dp_cq *c) {
    tcp_cq *cq = tcp_cq_of(c);
    if (cq->epoll_fd >= 0)
        close(cq->epoll_fd);
    close(cq->wake_fd);
    free(cq->qps);
    free(cq->ring);
    free(cq);
}

int tcp_cq_attach(tcp_cq *cq, tcp_qp *qp, dp_error *err) {
    if (cq->n_qps == cq->cap_qps) {
        uint32_t cap = cq->cap_qps ? 2 * cq->cap_qps : 4;
        tcp_qp **more = realloc(cq->qps, cap * sizeof *more);
        if (!more)
            return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
        cq->qps = more;
        cq->cap_qps = cap;
    }
    if (cq->n_qps >= TCP_DIRECT_QPS && cq->epoll_fd < 0 && (cq->epoll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0)
        return dp_fail(err, DP_FATAL, errno, "create queue pair: epoll");
    cq->qps[cq->n_qps++] = qp;
    return DP_OK;
}

void tcp_cq_detach(tcp_cq *cq, tcp_qp *qp) {
    for (uint32_t i = 0; i < cq->n_qps; i++)
        if (cq->qps[i] == qp) {
            cq->qps[i] = cq->qps[--cq->n_qps];
            return;
        }
}

void tcp_cq_forget(tcp_cq *cq, const tcp_qp *qp) {
    uint32_t keep = cq->head;
    for (uint32_t i = cq->head; i != cq->tail; i++)
        if (cq->ring[i & cq->mask].qp != &qp->q)
            cq->ring[keep++ & cq->mask] = cq->ring[i & cq->mask];
    cq->tail = keep;
}

/* ---- polling ---- */

/* Returns the events to watch the queue pair's socket for; 0: none. A socket whose data must wait is not watched at all, because epoll
 * would report the end of the connection unasked. */
static uint32_t wanted(const tcp_qp *qp) {
    if (qp->peer.fd < 0)
        return 0;
    return (qp->held ? 0 : EPOLLIN) | (tcp_backlog(qp) ? EPOLLOUT : 0);
}

/* Updates the events in epoll. False: the socket cannot be watched. Then each poll reads it, and waits are at most UNWATCHED_NS long. */
static bool watch(tcp_cq *cq, tcp_qp *qp) {
    uint32_t events = wanted(qp);
    if (qp->watched == events)
        return true;
    struct epoll_event ev = {.events = events, .data.ptr = qp};
    int op = !qp->watched ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    if (epoll_ctl(cq->epoll_fd, op, qp->peer.fd, &ev))
        return false;
    qp->watched = events;
    return true;
}

int tcp_qp_events(dp_qp *q, int *fd) {
    const tcp_qp *qp = tcp_qp_of(q);
    *fd = qp->peer.fd;
    return (int)(wanted(qp) | (qp->more ? EPOLLOUT : 0)); /* if the socket takes data now, there is an event at once */
}

void tcp_close(tcp_qp *qp) {
    if (qp->peer.fd < 0)
        return;
    /* close() does not remove the descriptor from epoll if a child process still has it. */
    if (qp->watched)
        epoll_ctl(tcp_cq_of(qp->q.cq)->epoll_fd, EPOLL_CTL_DEL, qp->peer.fd, NULL);
    if (!qp->passed)
        shutdown(qp->peer.fd, SHUT_RDWR);
    close(qp->peer.fd);
    qp->peer.fd = -1;
    qp->watched = 0;
}

static void look_at(tcp_qp *qp) {
    tcp_take(qp);
    if (qp->peer.fd >= 0 && tcp_backlog(qp))
        tcp_flush(qp); /* answers go at once: a function may run before the next poll */
}

/* Reports whether the queue pair must be read even if epoll reports nothing. */
static bool due(const tcp_qp *qp) {
    return qp->ready || qp->more || tcp_backlog(qp) || (qp->held && qp->rtaken != qp->rposted) || !(qp->watched & EPOLLIN);
}

static void look_around(tcp_cq *cq) {
    bool all = cq->epoll_fd < 0;
    if (!all) {
        struct epoll_event ev[EVENTS];
        int n = epoll_wait(cq->epoll_fd, ev, EVENTS, 0);
        for (int i = 0; i < n; i++)
            ((tcp_qp *)ev[i].data.ptr)->ready = true;
    }
    for (uint32_t i = 0; i < cq->n_qps; i++) {
        tcp_qp *qp = cq->qps[i];
        if (qp->peer.fd < 0 || qp->q.state == DP_QP_INIT || !(all || due(qp)))
            continue;
        look_at(qp);
        if (!all)
            watch(cq, qp);
    }
}

int tcp_cq_poll(dp_cq *c, dp_wc *wc, int n) {
    tcp_cq *cq = tcp_cq_of(c);
    cq->polls++;
    if (cq->head == cq->tail || n == 0)
        look_around(cq);
    int got = 0;
    for (; got < n && cq->head != cq->tail; got++) {
        wc[got] = cq->ring[cq->head++ & cq->mask];
        tcp_qp *qp = tcp_qp_of(wc[got].qp);
        if (wc[got].op == DP_OP_RECV_IMM)
            qp->rpolled++;
        else
            qp->unpolled--;
        if (wc[got].status)
            qp->q.state = DP_QP_ERROR;
    }
    return got;
}

/* ---- blocking ---- */

int tcp_cq_arm(dp_cq *c) {
    tcp_cq *cq = tcp_cq_of(c);
    for (uint32_t i = 0; i < cq->n_qps; i++)
        if (cq->qps[i]->peer.fd >= 0 && tcp_backlog(cq->qps[i]))
            tcp_flush(cq->qps[i]);
    return DP_OK;
}

void tcp_cq_disarm(dp_cq *c) { (void)c; }

void tcp_cq_promise_hot(dp_cq *c, bool hot) { (void)c, (void)hot; }

void tcp_cq_wake(dp_cq *c) {
    int saved = errno; /* this may run in a signal handler */
    uint64_t one = 1;
    ssize_t n = write(tcp_cq_of(c)->wake_fd, &one, sizeof one); /* fails only when many wakes are pending */
    (void)n;
    errno = saved;
}

#define FDS_PER_CQ (1 + TCP_DIRECT_QPS)
#define UNWATCHED_NS 1000000 /* how long to sleep while a socket is not watched */

/* Fills in the descriptors to wait for. Returns their number, or -1 if a poll would find something already. */
static int collect(tcp_cq *cq, struct pollfd *fds, int64_t *timeout_ns) {
    int n = 0;
    if (cq->head != cq->tail)
        return -1;
    fds[n++] = (struct pollfd){.fd = cq->wake_fd, .events = POLLIN};
    for (uint32_t i = 0; i < cq->n_qps; i++) {
        tcp_qp *qp = cq->qps[i];
        if (qp->peer.fd < 0)
            continue;
        if (qp->more || (qp->held && qp->rtaken != qp->rposted))
            return -1;
        if (cq->epoll_fd >= 0) {
            if (!watch(cq, qp) && (*timeout_ns < 0 || *timeout_ns > UNWATCHED_NS))
                *timeout_ns = UNWATCHED_NS;
        } else if (wanted(qp)) { /* EPOLLIN and EPOLLOUT have the values of POLLIN and POLLOUT */
            fds[n++] = (struct pollfd){.fd = qp->peer.fd, .events = (short)wanted(qp)};
        }
    }
    if (cq->epoll_fd >= 0)
        fds[n++] = (struct pollfd){.fd = cq->epoll_fd, .events = POLLIN};
    return n;
}

static void take_wake(const tcp_cq *cq) {
    uint64_t count;
    ssize_t n = read(cq->wake_fd, &count, sizeof count);
    (void)n; /* there may be no wake */
}

bool tcp_cq_wait_many(dp_cq **c, uint32_t n, int64_t timeout_ns) {
    struct pollfd fds[TCP_WAIT_MAX * FDS_PER_CQ];
    nfds_t used = 0;
    if (n > TCP_WAIT_MAX)
        return false;
    bool now = false;
    for (uint32_t i = 0; i < n; i++) {
        int k = collect(tcp_cq_of(c[i]), fds + used, &timeout_ns);
        now |= k < 0;
        used += k > 0 ? (nfds_t)k : 0;
    }
    struct timespec ts = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    if (!now && ppoll(fds, used, timeout_ns < 0 ? NULL : &ts, NULL) <= 0)
        return true;
    for (uint32_t i = 0; i < n; i++)
        take_wake(tcp_cq_of(c[i]));
    return true;
}

int tcp_cq_wait(dp_cq *c, int64_t timeout_ns) {
    tcp_cq_wait_many(&c, 1, timeout_ns);
    return DP_OK;
}

/* ---- detecting dead peers ---- */

/* Reports whether, by the kernel's counters, the peer does not answer. While data is in flight, one retransmit is enough, because soon
 * after an outage the kernel waits for seconds before the second one. Unanswered probes count while the connection is idle (keepalive) or
 * the peer's window is full. */
static bool silent(const struct tcp_info *info) {
    bool asked = (info->tcpi_unacked && info->tcpi_retransmits) || info->tcpi_probes >= GONE_PROBES;
    return (asked && info->tcpi_last_ack_recv >= GONE_MS) || (info->tcpi_unacked && info->tcpi_retransmits >= GONE_ONE_WAY);
}

int64_t tcp_gone_confirm_ns(uint32_t rtt_us) {
    int64_t two = 2000ll * rtt_us;
    return two < GONE_CONFIRM_MIN_NS ? GONE_CONFIRM_MIN_NS : two > GONE_CONFIRM_MAX_NS ? GONE_CONFIRM_MAX_NS : two;
}

/* Reports whether the peer is silent, and was so at an earlier probe. */
static bool gone(tcp_qp *qp, const struct tcp_info *info) {
    int64_t now = dp_now_ns();
    if (!silent(info))
        qp->silent_since = 0;
    else if (!qp->silent_since || now - qp->silent_until > GONE_SAME_NS)
        qp->silent_since = now;
    qp->silent_until = now;
    return qp->silent_since && now - qp->silent_since >= tcp_gone_confirm_ns(info->tcpi_rtt);
}

/* For a connection that the peer has closed. Reports whether no received data is left that the owner, if it polls, could still take. */
static bool nothing_left(const tcp_qp *qp, bool polled) {
    int unread = 0;
    if (qp->more)
        return false;
    if (qp->held || !polled || ioctl(qp->peer.fd, FIONREAD, &unread))
        return true;
    return unread == 0 && qp->hi == qp->lo;
}

int tcp_qp_probe(dp_qp *q) {
    tcp_qp *qp = tcp_qp_of(q);
    tcp_cq *cq = tcp_cq_of(q->cq);
    int broken = dp_qp_broken(q);
    if (broken)
        return broken;
    if (qp->peer.fd < 0)
        return q->state == DP_QP_ERROR ? DP_CONNECTION : DP_OK;
    struct tcp_info info = {0};
    socklen_t len = sizeof info;
    bool polled = cq->polls != qp->probed_polls;
    qp->probed_polls = cq->polls;
    if (getsockopt(qp->peer.fd, IPPROTO_TCP, TCP_INFO, &info, &len))
        return DP_OK;
    q->arrived = info.tcpi_unacked || info.tcpi_notsent_bytes || tcp_backlog(qp) ? q->posted - (q->posted > 0) : q->posted;
    q->bytes_acked = info.tcpi_bytes_acked;
    q->bytes_received = info.tcpi_bytes_received;
    bool open = info.tcpi_state == 1 /* established */;
    if (open ? gone(qp, &info) : nothing_left(qp, polled))
        tcp_end(qp, DP_PEER_GONE);
    return dp_qp_broken(q);
}
