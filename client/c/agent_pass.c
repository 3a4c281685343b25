/* Sending and receiving bytes and descriptors over the socket to the agent. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client.h"

void rfaas_reply_free(rfaas_reply *r) {
    for (uint32_t i = 0; i < r->n_fds; i++)
        if (r->fds[i] >= 0)
            close(r->fds[i]);
    free(r->fds);
    free(r->channels);
    free(r->data);
    r->fds = NULL;
    r->channels = NULL;
    r->data = NULL;
    r->n_fds = r->n_channels = 0;
}

/* Used only by the thread that reads. */
static struct {
    int fds[RFAAS_AGENT_FDS];
    uint32_t n;
} came[2]; /* descriptors of messages in the buffer, in order */
static uint32_t n_came;

void rfaas_pass_drop_first(void) {
    while (n_came && came[0].n)
        close(came[0].fds[--came[0].n]);
    if (n_came && --n_came)
        came[0] = came[1];
}

void rfaas_pass_drop(void) {
    while (n_came)
        rfaas_pass_drop_first();
}

ssize_t rfaas_pass_receive(int fd, void *to, size_t room) {
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof came[0].fds)];
    } control;
    struct iovec iov = {to, room};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    bool passed = c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS;
    if (!passed && !(n > 0 && m.msg_flags & MSG_CTRUNC))
        return n;
    bool third = n_came == 2; /* the agent breaks the protocol */
    if (!third)
        came[n_came++].n = 0;
    for (uint32_t i = 0; passed && i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
        int got;
        memcpy(&got, CMSG_DATA(c) + i * sizeof got, sizeof got);
        if (third || m.msg_flags & MSG_CTRUNC)
            close(got);
        else if ((got = rfaas_agent_above_stdio(got)) >= 0)
            came[n_came - 1].fds[came[n_came - 1].n++] = got;
    }
    return third ? -1 : n;
}

void rfaas_pass_channels(rfaas_reply *r, const uint8_t *body, uint32_t size) {
    rfaas_agent_hand hand;
    if (size < sizeof hand || !n_came)
        return;
    memcpy(&hand, body, sizeof hand);
    if (!hand.count || hand.count > RFAAS_AGENT_WORKERS || hand.first != r->n_channels || hand.first > RFAAS_AGENT_WORKERS - hand.count ||
        hand.fds != came[0].n || hand.size != sizeof *r->channels || size - sizeof hand != (size_t)hand.count * hand.size)
        return;
    dp_packed_channel *channels = realloc(r->channels, (r->n_channels + hand.count) * sizeof *channels);
    r->channels = channels ? channels : r->channels;
    int *fds = channels ? realloc(r->fds, (r->n_fds + hand.fds) * sizeof *fds) : NULL;
    if (!fds)
        return;
    r->fds = fds;
    memcpy(channels + r->n_channels, body + sizeof hand, size - sizeof hand);
    memcpy(fds + r->n_fds, came[0].fds, hand.fds * sizeof *fds);
    r->n_channels += hand.count;
    r->n_fds += hand.fds;
    came[0].n = 0;
}

void rfaas_pass_region(const uint8_t *body, uint32_t size) {
    if (n_came && came[0].n)
        rfaas_api_take_region(body, size, came[0].fds[0]);
    rfaas_pass_drop_first();
}

bool rfaas_pass_send(int fd, struct iovec *iov, int n, const int *pass, uint32_t n_pass, int64_t until) {
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(RFAAS_AGENT_FDS * sizeof(int))];
    } control;
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = (size_t)n};
    if (n_pass) {
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE(n_pass * sizeof *pass);
        memset(&control, 0, m.msg_controllen);
        control.head = (struct cmsghdr){.cmsg_len = CMSG_LEN(n_pass * sizeof *pass), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.head), pass, n_pass * sizeof *pass);
    }
    while (m.msg_iovlen) {
        ssize_t sent = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == ETOOMANYREFS && n_pass == 1 && dp_now_ns() < until) {
            poll(NULL, 0, 1); /* nothing was sent; descriptors in flight arrive soon */
            continue;
        }
        if (sent < 0 && errno == ETOOMANYREFS && n_pass > 1)
            return true; /* too many descriptors of the user are in flight; the agent notices that channels are missing */
        if (sent < 0 && errno == EAGAIN) {
            int64_t left = until - dp_now_ns();
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            if (left <= 0 || (poll(&p, 1, (int)(left / 1000000) + 1) < 0 && errno != EINTR))
                return false;
            continue;
        }
        if (sent < 0)
            return false;
        m.msg_control = NULL;
        m.msg_controllen = 0;
        for (size_t done = (size_t)sent; m.msg_iovlen && done >= m.msg_iov->iov_len; m.msg_iov++, m.msg_iovlen--) {
            done -= m.msg_iov->iov_len;
            sent = (ssize_t)done;
        }
        if (m.msg_iovlen) {
            m.msg_iov->iov_base = (uint8_t *)m.msg_iov->iov_base + sent;
            m.msg_iov->iov_len -= (size_t)sent;
        }
    }
    return true;
}
