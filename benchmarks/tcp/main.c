/* Compares the tcp provider with a bare pair of TCP sockets, encrypted connections with unencrypted ones, and ofi over libfabric's tcp with
 * bare sockets, on loopback: round trips of four sizes, then the rate of 8-byte round trips with 64 in flight, round trips of 8 bytes with
 * both sides blocked, and the time of connecting. Without libfabric, the column ofi has a dash. Both sides spin, except where
 * they block, and each has its own processor if there are two. Each round measures all kinds, and the result is the median of the rounds' ratios, because a time
 * depends as much on the machine and its load as on the program.
 *
 *   build/bench-tcp/pingpong [ROUNDS [MILLISECONDS]]     default: 15 rounds of about 60 ms for each kind and size
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dp_tcp.h"

enum { LARGEST = 1 << 20, ROUNDS_MAX = 1000, IN_FLIGHT = 64 };
static const uint32_t sizes[] = {8, 4 << 10, 64 << 10, 1 << 20};
enum { SIZES = sizeof sizes / sizeof *sizes };

enum { BARE = -1, PLAIN, ENCRYPTED, OFI, KINDS }; /* kinds of round trips; those of providers are indexes of side.links */

/* A connection of the provider. */
typedef struct wire {
    dp_dev *dev;
    dp_domain *domain;
    dp_mem *mem, *local;
    dp_cq *cq;
    dp_qp *qp;
    uint64_t peer_addr;
    uint32_t peer_key;
} wire;

typedef struct side {
    int bare; /* the bare socket */
    bool asks;
    wire links[KINDS];
} side;

static bool blocks; /* both sides wait by system calls */

static char figures[1024]; /* lines that `make bench` reads */

static void figure(const char *name, double value, const char *unit) {
    size_t used = strlen(figures);
    snprintf(figures + used, sizeof figures - used, "figure: tcp.%s = %.3f%s\n", name, value, unit);
}

static void must(int status, const dp_error *err) {
    if (status == DP_OK)
        return;
    fprintf(stderr, "tcp: %s\n", err->msg);
    exit(1);
}

static void need(bool ok, const char *what) {
    if (ok)
        return;
    fprintf(stderr, "tcp: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void move(int fd, void *data, size_t len, bool out) {
    for (size_t done = 0; done < len;) {
        ssize_t n = out ? send(fd, (char *)data + done, len - done, MSG_DONTWAIT | MSG_NOSIGNAL)
                        : recv(fd, (char *)data + done, len - done, MSG_DONTWAIT);
        need(n > 0 || (n < 0 && errno == EAGAIN), "the other side has ended");
        done += n > 0 ? (size_t)n : 0;
        if (n < 0 && blocks)
            poll(&(struct pollfd){.fd = fd, .events = out ? POLLOUT : POLLIN}, 1, -1);
        else if (n < 0)
            dp_cpu_pause();
    }
}

/* flags: 0 or DP_MORE. */
static void post(wire *s, uint32_t size, uint32_t flags) {
    dp_sge sge = {s->local->addr, size, s->local->lkey};
    int st;
    while ((st = dp_post_write_imm(s->qp, &sge, 1, s->peer_addr, s->peer_key, 1, 0, flags)) == DP_BUSY)
        dp_cpu_pause();
    must(st, &(dp_error){.msg = "a post failed"});
}

/* Waits for arrivals, takes at most `most` of them and returns how many. */
static int take(wire *s, int most) {
    dp_wc wc[IN_FLIGHT];
    int n;
    for (bool armed = false; (n = dp_cq_poll(s->cq, wc, most)) == 0; armed = blocks && !armed) {
        need(!dp_qp_broken(s->qp), "the connection broke");
        if (blocks && (armed ? dp_cq_wait(s->cq, -1) : dp_cq_arm(s->cq)))
            need(false, "waiting");
    }
    for (int i = 0; i < n; i++) {
        must(wc[i].status, &(dp_error){.msg = "a completion failed"});
        must(dp_post_recv(s->qp, 0), &(dp_error){.msg = "a receive could not be posted"});
    }
    return n;
}

/* n round trips. Returns ns for one of them. */
static double run(side *s, int kind, uint32_t size, int n) {
    wire *l = &s->links[kind == BARE ? PLAIN : kind];
    int64_t start = dp_now_ns();
    for (int i = 0; i < n; i++)
        for (int turn = 0; turn < 2; turn++) {
            bool out = s->asks == (turn == 0);
            if (kind == BARE)
                move(s->bare, out ? l->local->addr : l->mem->addr, size, out);
            else if (out)
                post(l, size, 0);
            else
                take(l, 1);
        }
    return (double)(dp_now_ns() - start) / n;
}

/* Waits for at least one message of `size` bytes and returns how many arrived, at most `most`. */
static int take_bare(side *s, uint32_t size, int most) {
    uint8_t all[IN_FLIGHT * 8];
    ssize_t n;
    while ((n = recv(s->bare, all, size * (uint32_t)most, MSG_DONTWAIT)) < 0 && errno == EAGAIN)
        dp_cpu_pause();
    need(n > 0, "the other side has ended");
    int part = (int)(n % size);
    if (part)
        move(s->bare, all, size - (uint32_t)part, false);
    return (int)(n / size) + (part != 0);
}

/* n round trips of 8 bytes with IN_FLIGHT in flight. With `batched`, consecutive posts are sent together. Returns ns for one. */
static double run_in_flight(side *s, int kind, bool batched, int n) {
    enum { SIZE = 8 };
    wire *l = &s->links[kind == BARE ? PLAIN : kind];
    int64_t start = dp_now_ns();
    int ready = s->asks ? IN_FLIGHT : 0;
    for (int sent = 0, got = 0; sent < n || got < n;) {
        for (int burst = ready < n - sent ? ready : n - sent; burst > 0; burst--, sent++)
            if (kind == BARE)
                move(s->bare, l->local->addr, SIZE, true);
            else
                post(l, SIZE, batched && burst > 1 ? DP_MORE : 0);
        int most = n - got < IN_FLIGHT ? n - got : IN_FLIGHT;
        ready = most == 0 ? 0 : kind == BARE ? take_bare(s, SIZE, most) : take(l, most);
        got += ready;
    }
    return (double)(dp_now_ns() - start) / n;
}

/* ---- setting up ---- */

static void bind_to(int cpu) {
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) < 2)
        return;
    for (int i = 0, k = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all) && k++ == cpu)
            CPU_SET(i, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static int bare_socket(bool asks, int ctl) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0), conn = fd;
    if (asks) {
        move(ctl, &at, sizeof at, false);
        need(!connect(fd, (struct sockaddr *)&at, len), "connect");
    } else {
        need(!bind(fd, (struct sockaddr *)&at, len) && !listen(fd, 1) && !getsockname(fd, (struct sockaddr *)&at, &len), "listen");
        move(ctl, &at, sizeof at, true);
        conn = accept(fd, NULL, NULL);
        need(conn >= 0, "accept");
        close(fd);
    }
    dp_tcp_prepare(conn);
    return conn;
}

/* Makes a queue pair on s->cq and connects it with that of the other side, which does the same. */
static dp_qp *connect_queue_pair(wire *s, uint32_t depth, int ctl) {
    dp_error err;
    dp_qp *qp;
    struct {
        uint8_t blob[DP_BLOB_MAX];
        uint64_t addr;
        uint32_t len, key;
    } mine = {.len = DP_BLOB_MAX, .addr = (uint64_t)(uintptr_t)s->mem->addr, .key = s->mem->rkey}, peer;
    dp_qp_attr attr = {.max_send = depth, .max_recv = depth, .expose = {s->mem}, .n_expose = 1};
    must(dp_qp_create(s->domain, s->cq, &attr, &qp, &err), &err);
    for (uint32_t i = 0; i < depth; i++)
        must(dp_post_recv(qp, 0), &(dp_error){.msg = "a receive could not be posted"});
    must(dp_qp_export(qp, mine.blob, &mine.len, &err), &err);
    move(ctl, &mine, sizeof mine, true);
    move(ctl, &peer, sizeof peer, false);
    must(dp_qp_connect(qp, peer.blob, peer.len, &err), &err);
    s->peer_addr = peer.addr;
    s->peer_key = peer.key;
    return qp;
}

static wire open_link(int kind, int ctl) {
    wire s = {0};
    dp_error err;
    const dp_dev_options o = {.encrypt = kind == ENCRYPTED ? DP_ENCRYPT_REQUIRE : DP_ENCRYPT_OFF};
    int st = dp_dev_open(kind == OFI ? "ofi" : "tcp", &o, &s.dev, &err);
    if (kind == OFI && dp_status_class(st) == dp_status_class(DP_UNSUPPORTED))
        return (wire){0}; /* the other side does the same */
    must(st, &err);
    must(dp_domain_create(s.dev, &s.domain, &err), &err);
    must(dp_mem_alloc(s.domain, LARGEST, DP_REMOTE_WRITE, &s.mem, &err), &err);
    must(dp_mem_alloc(s.domain, LARGEST, 0, &s.local, &err), &err);
    must(dp_cq_create(s.dev, 4 * IN_FLIGHT, &s.cq, &err), &err);
    dp_cq_promise_hot(s.cq, kind == OFI); /* the others also wait blocked */
    s.qp = connect_queue_pair(&s, IN_FLIGHT, ctl);
    return s;
}

static side open_side(bool asks, int ctl) {
    side s = {.asks = asks, .bare = bare_socket(asks, ctl)};
    for (int kind = PLAIN; kind < KINDS; kind++)
        s.links[kind] = open_link(kind, ctl);
    return s;
}

/* ---- the rounds: both sides go through the same ones ---- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static void measure(side *s, int ctl, uint32_t size, int rounds, int ms) {
    double bare[ROUNDS_MAX], ours[ROUNDS_MAX], sealed[ROUNDS_MAX], ratio[ROUNDS_MAX], price[ROUNDS_MAX], ofi[ROUNDS_MAX];
    bool has_ofi = s->links[OFI].dev;
    int n = 200;
    run(s, BARE, size, n);
    run(s, ENCRYPTED, size, n);
    if (has_ofi)
        run(s, OFI, size, n);
    double warm = run(s, PLAIN, size, n);
    if (s->asks) { /* this side chooses how many round trips fill the time */
        n = (int)(ms * 1e6 / warm) + 1;
        move(ctl, &n, sizeof n, true);
    } else {
        move(ctl, &n, sizeof n, false);
    }
    for (int i = 0; i < rounds; i++) {
        bare[i] = run(s, BARE, size, n);
        ours[i] = run(s, PLAIN, size, n);
        sealed[i] = run(s, ENCRYPTED, size, n);
        ratio[i] = ours[i] / bare[i];
        price[i] = sealed[i] / ours[i];
        ofi[i] = has_ofi ? run(s, OFI, size, n) / bare[i] : 0;
    }
    if (!s->asks)
        return;
    printf("%8u  %10.2f  %10.2f  %8.3f  %12.2f  %14.3f", size, median(bare, rounds) / 1000, median(ours, rounds) / 1000,
           median(ratio, rounds), median(sealed, rounds) / 1000, median(price, rounds));
    if (has_ofi)
        printf("  %8.3f\n", median(ofi, rounds));
    else
        printf("  %8s\n", "-");
    static const char *const kinds[] = {"ratio", "encrypted", "ofi"};
    double medians[] = {median(ratio, rounds), median(price, rounds), median(ofi, rounds)};
    for (int kind = 0; kind < 2 + has_ofi; kind++) {
        char name[32];
        snprintf(name, sizeof name, "%s.%u", kinds[kind], size);
        figure(name, medians[kind], "");
    }
}

static void measure_in_flight(side *s, int ctl, int rounds, int ms) {
    enum { COLUMNS = 4 };
    const struct {
        int kind;
        bool batched;
    } columns[COLUMNS] = {{BARE, false}, {PLAIN, false}, {PLAIN, true}, {ENCRYPTED, true}};
    double ns[COLUMNS][ROUNDS_MAX], ratio[ROUNDS_MAX];
    int n = 2000;
    for (int i = 0; i < COLUMNS; i++)
        run_in_flight(s, columns[i].kind, columns[i].batched, n);
    double warm = run_in_flight(s, PLAIN, false, n);
    if (s->asks) {
        n = (int)(ms * 1e6 / warm) + 1;
        move(ctl, &n, sizeof n, true);
    } else {
        move(ctl, &n, sizeof n, false);
    }
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < COLUMNS; i++)
            ns[i][r] = run_in_flight(s, columns[i].kind, columns[i].batched, n);
        ratio[r] = ns[0][r] / ns[1][r];
    }
    if (!s->asks)
        return;
    printf("\n8 bytes, %d in flight, thousands per second: bare %.0f, tcp %.0f (%.3f of bare), tcp batched %.0f, encrypted batched %.0f\n", IN_FLIGHT,
           1e6 / median(ns[0], rounds), 1e6 / median(ns[1], rounds), median(ratio, rounds), 1e6 / median(ns[2], rounds),
           1e6 / median(ns[3], rounds));
    figure("in_flight", median(ratio, rounds), "");
    figure("batched", 1e9 / median(ns[2], rounds), "");
}

/* Measures round trips of 8 bytes with both sides blocked. */
static void measure_blocked(side *s, int ctl, int rounds, int ms) {
    enum { SIZE = 8 };
    double bare[ROUNDS_MAX], ratio[ROUNDS_MAX];
    blocks = true;
    int n = (int)(ms * 1e6 / run(s, BARE, SIZE, 200)) + 1;
    move(ctl, &n, sizeof n, s->asks);
    for (int i = 0; i < rounds; i++) {
        bare[i] = run(s, BARE, SIZE, n);
        ratio[i] = run(s, PLAIN, SIZE, n) / bare[i];
    }
    blocks = false;
    if (!s->asks)
        return;
    printf("8 bytes, both sides blocked: bare %.2f us, tcp/bare %.3f\n", median(bare, rounds) / 1000, median(ratio, rounds));
    figure("blocked", median(ratio, rounds), "");
}

/* Measures the time from the creation of a queue pair on both sides until it is connected. The blobs travel over a socket pair. */
static void measure_connecting(side *s, int ctl) {
    enum { TIMES = 101 };
    double ns[TIMES];
    wire l = s->links[PLAIN];
    char sync = 0;
    for (int i = 0; i < TIMES; i++) {
        int64_t start = dp_now_ns();
        dp_qp *qp = connect_queue_pair(&l, 4, ctl);
        ns[i] = (double)(dp_now_ns() - start);
        move(ctl, &sync, 1, true);
        move(ctl, &sync, 1, false);
        dp_qp_destroy(qp);
    }
    if (!s->asks)
        return;
    printf("connecting over tcp: %.0f us\n", median(ns, TIMES) / 1000);
    figure("connect_ms", median(ns, TIMES) / 1e6, " ms");
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 15, ms = argc > 2 ? atoi(argv[2]) : 60, ctl[2];
    if (rounds < 1 || rounds > ROUNDS_MAX || ms < 1 || argc > 3) {
        fprintf(stderr, "usage: pingpong [ROUNDS [MILLISECONDS]]: 1 to %d rounds, at least 1 ms\n", ROUNDS_MAX);
        return 2;
    }
    need(!socketpair(AF_UNIX, SOCK_STREAM, 0, ctl), "socketpair");
    pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    bool asks = child > 0;
    bind_to(asks ? 0 : 1);
    side s = open_side(asks, ctl[asks]);
    if (asks)
        printf("%8s  %10s  %10s  %8s  %12s  %14s  %8s\n", "bytes", "bare us", "tcp us", "tcp/bare", "encrypted us", "encrypted/tcp", "ofi/bare");
    for (int i = 0; i < SIZES; i++)
        measure(&s, ctl[asks], sizes[i], rounds, ms);
    measure_in_flight(&s, ctl[asks], rounds, ms);
    measure_blocked(&s, ctl[asks], rounds, ms);
    measure_connecting(&s, ctl[asks]);
    int status = 0;
    if (asks) {
        printf("\n%s", figures);
        waitpid(child, &status, 0);
    }
    return status != 0;
}
