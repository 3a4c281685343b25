/* Links that die or are interrupted, and peers that are stopped. For a dead link, socket filters at both ends drop every packet, so the
 * kernels neither receive nor answer anything. */
#include "tcp_peer.h"

#include <errno.h>
#include <linux/filter.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define MS 1000000ll

static void deafen(end *e) {
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog all = {1, &drop};
    CHECK(!setsockopt(tcp_qp_of(e->qp)->peer.fd, SOL_SOCKET, SO_ATTACH_FILTER, &all, sizeof all));
}

static void hear(end *e) {
    int none = 0;
    CHECK(!setsockopt(tcp_qp_of(e->qp)->peer.fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none));
}

static void cut(end *a, end *b) {
    deafen(a);
    deafen(b);
}

static void mend(end *a, end *b) {
    hear(a);
    hear(b);
}

/* Polls this side only: the far ends are at the other side of the link. */
static void look(end *e) {
    dp_wc wc;
    CHECK_EQ(dp_cq_poll(e->cq, &wc, 0), 0);
    dp_qp_probe(e->qp);
}

enum { IDLE, BUSY, SENT_LATER, INTERRUPTED, STOPPED, LINKS };

static const end_opts link_opts = {.size = 65536, .max_send = 64, .max_recv = 64};

static void write_words(end *near, const card *far, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        dp_sge s = {&i, 4, 0};
        CHECK_OK(dp_post_write_imm(near->qp, &s, 1, far->regions[0].addr + 4 * i, far->regions[0].rkey, i, i, 0));
    }
}

/* Five links at the same time, so that the case takes as long as one of them. */
T_CASE(links, "tcp/links-dead-and-interrupted", .providers = T_TCP, .seconds = 40) {
    end near[LINKS], far[LINKS];
    card c[LINKS];
    for (int i = 0; i < LINKS; i++) {
        end_open(&near[i], &link_opts, NULL);
        end_open(&far[i], &link_opts, NULL);
        end_card(&far[i], &c[i]);
        ends_connect_and_write(&near[i], &far[i]);
        end_unattend(far[i].cq); /* from now on it polls when the case says so */
        end_unattend(near[i].cq);
        c[i].regions[0] = (reg_ref){(uint64_t)(uintptr_t)far[i].mem->addr, far[i].mem->size, far[i].mem->rkey};
    }
    int64_t start = dp_now_ns(), named[LINKS] = {0}, limit = (int64_t)(5000 * MS * t_time_scale());
    for (int i = IDLE; i <= INTERRUPTED; i++)
        cut(&near[i], &far[i]);
    write_words(&near[BUSY], &c[BUSY], 0, 5);
    write_words(&near[INTERRUPTED], &c[INTERRUPTED], 0, 20);
    /* A stopped peer: all buffers are full. */
    uint64_t posted = 0;
    dp_sge block = local_sge(&near[STOPPED], 0, 65536);
    int full = 0;
    for (int64_t since = dp_now_ns(); !full || dp_now_ns() - since < 200 * MS;) {
        int st = dp_post_write(near[STOPPED].qp, &block, 1, c[STOPPED].regions[0].addr, c[STOPPED].regions[0].rkey, 1, 0);
        CHECK(st == DP_OK || st == DP_BUSY);
        posted += st == DP_OK;
        full += st == DP_BUSY;
    }
    bool mended = false, later = false;
    for (int64_t now = start; now - start < 5200 * MS || !named[IDLE] || !named[BUSY] || !named[SENT_LATER]; now = dp_now_ns()) {
        CHECKF(now - start < 2 * limit, "named after: idle %lld, busy %lld, later %lld ns", (long long)named[IDLE], (long long)named[BUSY],
               (long long)named[SENT_LATER]);
        for (int i = 0; i < LINKS; i++) {
            look(&near[i]);
            if (!named[i] && dp_qp_broken(near[i].qp))
                named[i] = dp_now_ns() - start;
        }
        if (!later && now - start > 1500 * MS) { /* the link has been dead for a while when it is used */
            write_words(&near[SENT_LATER], &c[SENT_LATER], 0, 5);
            later = true;
        }
        if (!mended && now - start > 2000 * MS) {
            write_words(&near[INTERRUPTED], &c[INTERRUPTED], 20, 40);
            mend(&near[INTERRUPTED], &far[INTERRUPTED]);
            mended = true;
        }
        t_sleep_ms(10);
    }
    for (int i = IDLE; i <= SENT_LATER; i++) {
        t_note("link %d, named after %lld ms", i, (long long)(named[i] / MS));
        CHECK_STATUS(dp_qp_broken(near[i].qp), DP_PEER_GONE);
        CHECK_LE(named[i], limit + (i == SENT_LATER ? 1500 * MS : 0));
    }
    printf("    named after %lld ms idle, %lld ms busy, %lld ms when needed later\n", (long long)(named[IDLE] / MS), (long long)(named[BUSY] / MS),
           (long long)(named[SENT_LATER] / MS));
    /* Interrupted: nothing is lost. */
    CHECK_EQ(dp_qp_broken(near[INTERRUPTED].qp), 0);
    for (uint32_t i = 0; i < 40; i++) {
        CHECK_EQ(end_imm(&far[INTERRUPTED]).imm, i);
        CHECK_EQ(((uint32_t *)(void *)end_bytes(&far[INTERRUPTED]))[i], i);
    }
    /* A stopped peer continues where it was. */
    CHECK_EQ(dp_qp_broken(near[STOPPED].qp), 0);
    int st;
    for (int64_t until = dp_now_ns() + poll_ns();;) {
        st = dp_post_write_imm(near[STOPPED].qp, NULL, 0, 0, 0, 7, 0, 0);
        if (st != DP_BUSY)
            break;
        CHECKF(dp_now_ns() < until, "still full");
        look(&near[STOPPED]);
        look(&far[STOPPED]);
    }
    CHECK_OK(st);
    for (int64_t until = dp_now_ns() + poll_ns(); far[STOPPED].received.head == far[STOPPED].received.tail;) {
        CHECK(dp_now_ns() < until);
        look(&near[STOPPED]);
        end_drain(&far[STOPPED]);
    }
    CHECK_EQ(end_imm(&far[STOPPED]).imm, 7);
    CHECK_EQ(dp_qp_broken(far[STOPPED].qp), 0);
    for (int i = 0; i < LINKS; i++) {
        end_attend(near[i].cq);
        end_attend(far[i].cq);
        end_close(&near[i]);
        end_close(&far[i]);
    }
}

/* Sets the loopback interface of this process's network namespace up or down. */
static void loopback(bool up) {
    struct ifreq lo = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    CHECK_GE(fd, 0);
    lo.ifr_flags = up ? IFF_UP : 0;
    CHECK(!ioctl(fd, SIOCSIFFLAGS, &lo));
    close(fd);
}

/* The retransmission time-out, when the peer has acknowledged all that was sent. */
static uint32_t rto_ms(end *e) {
    struct tcp_info info = {.tcpi_unacked = 1};
    for (int64_t until = dp_now_ns() + poll_ns(); info.tcpi_unacked; t_sleep_ms(1)) {
        socklen_t len = sizeof info;
        CHECK(dp_now_ns() < until);
        look(e);
        CHECK(!getsockopt(tcp_qp_of(e->qp)->peer.fd, IPPROTO_TCP, TCP_INFO, &info, &len));
    }
    return info.tcpi_rto / 1000;
}

/* Writes a word, takes its acknowledgement and the link away for a second, and returns the retransmission time-out that follows. */
static uint32_t outage(end *near, const card *near_card, end *far, const card *far_card) {
    deafen(near);
    write_words(near, far_card, 0, 1);
    CHECK_EQ(end_imm(far).imm, 0);
    loopback(false);
    for (int64_t start = dp_now_ns(); dp_now_ns() - start < 1000 * MS; t_sleep_ms(10)) /* the length of the outage */
        look(near);
    hear(near);
    loopback(true);
    write_words(far, near_card, 0, 1);
    CHECK_EQ(end_imm(near).imm, 0);
    return rto_ms(near);
}

/* A kernel whose interface is down cannot retransmit. If the peer's next segment acknowledges what was sent before the outage, the kernel
 * takes the length of the outage for a round-trip time, and retransmits become rare. A link that dies then must be detected as soon as any
 * other. */
T_CASE(link_dead_again, "tcp/link-dead-soon-after-an-outage", .providers = T_TCP, .seconds = 60) {
    if (unshare(geteuid() ? CLONE_NEWUSER | CLONE_NEWNET : CLONE_NEWNET))
        t_skip("no network namespace of its own: %s", strerror(errno));
    loopback(true);
    end near, far, *ends[] = {&near, &far};
    card of_near, c;
    end_open(&near, &link_opts, NULL);
    end_open(&far, &link_opts, NULL);
    end_card(&near, &of_near);
    end_card(&far, &c);
    ends_connect_and_write(&near, &far);
    for (int i = 0; i < 2; i++)
        end_unattend(ends[i]->cq);
    uint32_t rto = 0;
    for (int tries = 0; rto < 900 && tries < 10; tries++) /* a retransmit may have been first */
        rto = outage(&near, &of_near, &far, &c);
    CHECKF(rto >= 900, "the retransmission time-out is %u ms; this case needs a long one", rto);
    cut(&near, &far);
    write_words(&near, &c, 1, 2);
    int64_t start = dp_now_ns(), limit = (int64_t)(5000 * MS * t_time_scale());
    for (; !dp_qp_broken(near.qp); t_sleep_ms(10)) {
        CHECKF(dp_now_ns() - start < limit, "not named after %lld ms; the retransmission time-out was %u ms", (long long)(limit / MS), rto);
        look(&near);
    }
    CHECK_STATUS(dp_qp_broken(near.qp), DP_PEER_GONE);
    printf("    named after %lld ms, at a retransmission time-out of %u ms\n", (long long)((dp_now_ns() - start) / MS), rto);
    end_attend(near.cq);
    end_attend(far.cq);
    end_close(&near);
    end_close(&far);
}

/* A silent peer has two round trips to answer, but never so long that a dead one is noticed late. */
T_CASE(gone_confirm, "tcp/silence-confirmed-after-two-round-trips", .providers = T_TCP) {
    static const struct {
        uint32_t rtt_us;
        int64_t ms;
    } want[] = {{0, 50}, {100, 50}, {25000, 50}, {40000, 80}, {150000, 300}, {200000, 400}, {30000000, 400}, {UINT32_MAX, 400}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        CHECK_EQ(tcp_gone_confirm_ns(want[i].rtt_us), want[i].ms * MS);
}

/* One poll of a queue pair with max_answers executes few bytes of a flood, since other threads wait for the server of its connection. The
 * next polls execute the rest. */
T_CASE(short_takes, "tcp/short-takes", .providers = T_TCP) {
    enum { BLOCK = 64 << 10, BLOCKS = 24, ENOUGH = 8 };
    static const end_opts flood = {.size = BLOCK * BLOCKS, .max_send = 64, .max_recv = 8};
    static const end_opts served = {.size = BLOCK * BLOCKS, .max_send = 8, .max_recv = 8, .max_answers = 64 << 10};
    end near, far;
    card c;
    end_open(&near, &flood, NULL);
    end_open(&far, &served, NULL);
    int big = BLOCK * BLOCKS;
    end_card(&far, &c);
    ends_connect_and_write(&near, &far);
    CHECK(!setsockopt(tcp_qp_of(far.qp)->peer.fd, SOL_SOCKET, SO_RCVBUF, &big, sizeof big));
    end_unattend(far.cq);
    end_unattend(near.cq);
    memset(local_bytes(&near), 7, BLOCK * BLOCKS);
    memset(end_bytes(&far), 0, BLOCK * BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        dp_sge s = local_sge(&near, i * BLOCK, BLOCK);
        CHECK_OK(dp_post_write(near.qp, &s, 1, (uint64_t)(uintptr_t)far.mem->addr + i * BLOCK, c.regions[0].rkey, i, 0));
    }
    int64_t until = dp_now_ns() + (int64_t)(5000 * MS * t_time_scale());
    for (int unread = 0; unread < ENOUGH * BLOCK; look(&near)) {
        CHECK(!ioctl(tcp_qp_of(far.qp)->peer.fd, FIONREAD, &unread));
        CHECKF(dp_now_ns() < until, "only %d bytes have arrived", unread);
    }
    look(&far);
    CHECK_EQ(end_bytes(&far)[0], 7);
    CHECK_EQ(end_bytes(&far)[(ENOUGH - 2) * BLOCK], 0);
    while (end_bytes(&far)[BLOCKS * BLOCK - 1] != 7) {
        look(&near);
        look(&far);
        CHECKF(dp_now_ns() < until, "the rest is not executed");
    }
    end_attend(near.cq);
    end_attend(far.cq);
    end_close(&near);
    end_close(&far);
}
