/* The stream of a tcp connection whose peer sends arbitrary bytes. Byte 0 of the input: number of posted receives. Byte 1: posts of this
 * side that wait for an answer (2 bits each: none, write, read, atomic: fetch-and-add and compare-and-swap in turn). Then pieces follow,
 * each after a control byte. Bit 7 of it: the piece begins with a frame header, which gets a valid key and an address in the region or
 * just behind it. Its low 7 bits: how many more bytes of input the piece takes; control byte 0: as many as a piece can have. The region
 * ends at an inaccessible page. */
#include <sys/socket.h>
#include <unistd.h>

#include "dp_tcp_impl.h"
#include "fuzz.h"

enum { RECVS = 8, REGION = 4096, LOCAL = 64 };

static dp_dev *dev;
static dp_domain *domain;
static dp_mem *writable, *readable, *local;
static dp_cq *cq;
static dp_qp *qp;

static void set_up(void) {
    dp_error err;
    MUST(dp_dev_open("tcp", &(dp_dev_options){.active_side_only = 1}, &dev, &err) == DP_OK);
    MUST(dp_domain_create(dev, &domain, &err) == DP_OK);
    MUST(dp_mem_alloc(domain, REGION, DP_REMOTE_WRITE | DP_REMOTE_ATOMIC, &writable, &err) == DP_OK);
    MUST(dp_mem_alloc(domain, REGION, DP_REMOTE_READ, &readable, &err) == DP_OK);
    MUST(dp_mem_alloc(domain, 4 * LOCAL, 0, &local, &err) == DP_OK);
    MUST(dp_cq_create(dev, 64, &cq, &err) == DP_OK);
    dp_qp_attr attr = {.max_send = 8, .max_recv = RECVS, .expose = {writable, readable}, .n_expose = 2};
    MUST(dp_qp_create(domain, cq, &attr, &qp, &err) == DP_OK);
}

/* A connection with a socket pair instead of TCP, to a peer that exposes one region. */
static int connect_pair(void) {
    dp_error err;
    int sv[2];
    MUST(dp_qp_reset(qp, &err) == DP_OK);
    MUST(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv));
    tcp_qp *q = tcp_qp_of(qp);
    q->peer = (tcp_link){.fd = sv[0], .n_regions = 1, .regions = {{7, 7, 0x10000, 1 << 20}}};
    qp->state = DP_QP_CONNECTED;
    return sv[1];
}

static int post(uint8_t kind, int i) {
    dp_sge s = {(uint8_t *)local->addr + LOCAL * i, kind == 3 ? 8 : LOCAL, 0};
    if (kind == 0)
        return 0;
    int st = kind == 1   ? dp_post_write(qp, &s, 1, 0x10000, 7, 1, DP_SIGNALED)
             : kind == 2 ? dp_post_read(qp, &s, 0x10000, 7, 1, DP_SIGNALED)
             : i % 2     ? dp_post_compare_swap(qp, &s, 0x10000, 7, 0, 1, 1, DP_SIGNALED)
                         : dp_post_fetch_add(qp, &s, 0x10000, 7, 1, 1, DP_SIGNALED);
    MUST(st == DP_OK);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!dev)
        set_up();
    input in = {data, size};
    int fd = connect_pair(), recvs = take8(&in) % (RECVS + 1), posts = 0, received = 0;
    uint8_t posted = take8(&in);
    for (int i = 0; i < recvs; i++)
        MUST(dp_post_recv(qp, (uint64_t)i) == DP_OK);
    for (int i = 0; i < 4; i++)
        posts += post(posted >> 2 * i & 3, i);
    while (in.left && !dp_qp_broken(qp)) {
        uint8_t control = take8(&in), piece[sizeof(tcp_frame) + 128];
        size_t n = 0;
        if (control & 0x80) {
            tcp_frame f;
            take(&in, &f, sizeof f);
            const dp_mem *m = f.op == TCP_READ ? readable : writable;
            f.zero = 0;
            f.rkey = m->rkey;
            f.raddr = (uint64_t)(uintptr_t)m->addr + f.raddr % (REGION + 8);
            f.len %= REGION + 2;
            memcpy(piece, &f, n = sizeof f);
        }
        size_t more = control ? control & 0x7f : sizeof piece - n;
        if (more > in.left)
            more = in.left;
        take(&in, piece + n, more);
        MUST(send(fd, piece, n + more, MSG_NOSIGNAL) >= 0 || dp_qp_broken(qp));
        dp_wc wc[4];
        for (int k; (k = dp_cq_poll(cq, wc, 4)) > 0;)
            for (int i = 0; i < k; i++) {
                MUST(wc[i].qp == qp);
                if (wc[i].op == DP_OP_RECV_IMM) {
                    MUST(wc[i].status == DP_OK && wc[i].wr_id == (uint64_t)received++);
                } else {
                    MUST(wc[i].wr_id == 1 && (wc[i].status == DP_OK || dp_qp_broken(qp)));
                    posts--;
                }
            }
        MUST(tcp_backlog(tcp_qp_of(qp)) <= TCP_OUT_MAX);
        char answers[4096];
        while (recv(fd, answers, sizeof answers, MSG_DONTWAIT) > 0)
            ;
    }
    MUST(received <= recvs && posts >= 0 && (posts == 0 || !dp_qp_broken(qp)));
    MUST(!dp_qp_broken(qp) || dp_qp_broken(qp) == DP_PROTOCOL || dp_qp_broken(qp) == DP_PEER_GONE);
    for (int i = 0; i < REGION; i++)
        MUST(((const uint8_t *)readable->addr)[i] == 0);
    close(fd);
    return 0;
}
