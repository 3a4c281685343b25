/* The peer: a server like a worker's, with the floors' servers among its functions. */
#include "bench.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct peer {
    dp_bench_side side;
    dp_dev *dev;
    dp_server *server;
    dp_bench_verbs *verbs;
    uint32_t payload;
    uint32_t depth;
    uint64_t rest; /* bytes of side.rest */
} peer;

/* Functions have no context argument. One peer per thread. */
static __thread peer *serving;

/* ---- functions ---- */

static uint32_t echo(void *args, uint32_t size, void *res) {
    memcpy(res, args, size);
    return size;
}

/* Returns as many bytes as the caller accepts, without touching them. */
static uint32_t empty(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    return dp_current_invocation()->capacity;
}

/* Does what the floors' servers do with a payload and a result of different sizes. */
static uint32_t reply(void *args, uint32_t size, void *res) {
    uint32_t capacity = dp_current_invocation()->capacity;
    if (size > serving->payload || capacity > serving->payload)
        return UINT32_MAX;
    dp_bench_move(serving->side.rest, res, args, size, capacity);
    return capacity;
}

static uint32_t run_floor(void *args, uint32_t size, void *res) {
    dp_bench_run r;
    int32_t status = DP_BAD_REQUEST;
    if (size == sizeof r) {
        memcpy(&r, args, sizeof r);
        status = dp_bench_floor_server(&serving->side, &r);
    }
    memcpy(res, &status, sizeof status);
    return sizeof status;
}

/* Connects to the client's card and returns the peer's own. The result is empty if the device is not verbs. */
static uint32_t join_verbs(void *args, uint32_t size, void *res) {
    dp_bench_card mine, theirs;
    dp_error err = {0};
    if (size != sizeof theirs || serving->verbs)
        return 0;
    memcpy(&theirs, args, sizeof theirs);
    if (dp_bench_verbs_create(serving->dev, serving->payload, serving->depth, &serving->verbs, &mine, &err) ||
        dp_bench_verbs_connect(serving->verbs, &theirs, &err)) {
        fprintf(stderr, "rfaas-bench-peer: %s\n", err.msg);
        return 0;
    }
    serving->side.verbs = serving->verbs;
    memcpy(res, &mine, sizeof mine);
    return sizeof mine;
}

/* As empty, but takes area->delay ns. */
static uint32_t delayed(void *args, uint32_t size, void *res) {
    (void)args;
    (void)res;
    int64_t until = dp_now_ns() + (int64_t)__atomic_load_n(&serving->side.area->delay, __ATOMIC_RELAXED);
    while (dp_now_ns() < until)
        dp_cpu_pause();
    return size;
}

static uint32_t blocked(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    uint64_t n = __atomic_load_n(&serving->side.area->stats.blocked_waits, __ATOMIC_RELAXED);
    memcpy(res, &n, sizeof n);
    return sizeof n;
}

static const dp_function functions[DP_BENCH_FNS] = {
    [DP_BENCH_FN_ECHO] = echo,
    [DP_BENCH_FN_EMPTY] = empty,
    [DP_BENCH_FN_FLOOR] = run_floor,
    [DP_BENCH_FN_VERBS] = join_verbs,
    [DP_BENCH_FN_DELAYED] = delayed,
    [DP_BENCH_FN_BLOCKED] = blocked,
    [DP_BENCH_FN_REPLY] = reply,
};

/* ---- start and end ---- */

static int pin_peer(int cpu, dp_error *err) {
    cpu_set_t set;
    if (cpu < 0)
        return DP_OK;
    if (cpu >= CPU_SETSIZE)
        return dp_fail(err, DP_INVALID, 0, "bench peer: CPU %d", cpu);
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) ? dp_fail(err, DP_INVALID, errno, "bench peer: pin to CPU %d", cpu)
                                                  : DP_OK;
}

static int receive_hello(int sock, dp_bench_hello *h, dp_error *err) {
    ssize_t n;
    do
        n = recv(sock, h, sizeof *h, 0);
    while (n < 0 && errno == EINTR);
    if (n != sizeof *h || h->magic != DP_BENCH_MAGIC || h->blob_len > sizeof h->blob)
        return dp_fail(err, n == 0 ? DP_PEER_GONE : DP_PROTOCOL, n < 0 ? errno : 0,
                       "bench peer: greeting of %zd bytes, not %zu", n, sizeof *h);
    h->provider[sizeof h->provider - 1] = h->device[sizeof h->device - 1] = 0;
    return DP_OK;
}

/* fd is -1 if the client is on another machine: the area is then private memory. */
static int map_memory(peer *p, int fd, dp_error *err) {
    struct stat st = {.st_size = DP_BENCH_HEAD};
    if (fd >= 0 && (fstat(fd, &st) || st.st_size < DP_BENCH_HEAD))
        return dp_fail(err, DP_INVALID, 0, "bench peer: descriptor %d is not the shared memory of the bench", fd);
    void *m = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_POPULATE | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    if (m == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "bench peer: map %lld bytes", (long long)st.st_size);
    p->side.area = m;
    p->side.size = (uint64_t)st.st_size;
    p->rest = (uint64_t)p->payload + 4096;
    void *rest = mmap(NULL, p->rest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (rest == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "bench peer: map %u bytes", p->payload);
    p->side.rest = rest;
    return DP_OK;
}

static int start(peer *p, const dp_bench_hello *h, const dp_bench_fds *fds, const dp_bench_here *here,
                 dp_bench_answer *a, dp_error *err) {
    dp_dev_options o = {.device = h->device, .port = h->port, .gid_index = h->gid_index,
                              .pkey_index = h->pkey_index, .traffic_class = h->traffic_class,
                              .service_level = h->service_level, .mtu = h->mtu};
    if (here)
        o = here->device;
    o.active_side_only = 1;
    const dp_server_config cfg = {.mode = h->mode};
    p->side.ping = fds->ping;
    p->side.pong = fds->pong;
    p->payload = h->payload;
    p->depth = h->depth;
    if ((uint64_t)h->payload * h->depth > DP_BENCH_PAYLOAD_MAX)
        return dp_fail(err, DP_INVALID, 0, "bench peer: %u calls of %u bytes in flight, at most %llu bytes together", h->depth,
                       h->payload, (unsigned long long)DP_BENCH_PAYLOAD_MAX);
    int st = pin_peer(here ? here->cpu : h->peer_cpu, err);
    if (!st)
        st = map_memory(p, fds->memory, err);
    if (!st)
        st = dp_dev_open(h->provider, &o, &p->dev, err);
    if (!st)
        st = dp_server_create(p->dev, &cfg, h->blob, h->blob_len, &p->server, err);
    a->blob_len = sizeof a->blob;
    if (!st)
        st = dp_server_blob(p->server, a->blob, &a->blob_len, err);
    return st;
}

static void stop(peer *p) {
    dp_bench_verbs_destroy(p->verbs);
    dp_server_destroy(p->server);
    if (p->dev)
        dp_dev_close(p->dev);
    if (p->side.area)
        munmap(p->side.area, p->side.size);
    if (p->side.rest)
        munmap(p->side.rest, p->rest);
}

int dp_bench_serve(const dp_bench_fds *fds, const dp_bench_here *here, dp_error *err) {
    dp_bench_hello h;
    dp_bench_answer a = {.magic = DP_BENCH_MAGIC};
    peer p = {0};
    dp_error own = {0};
    if (!err)
        err = &own;
    int st = receive_hello(fds->socket, &h, err);
    if (st)
        return st;
    st = a.status = start(&p, &h, fds, here, &a, err);
    if (st) {
        a.blob_len = 0;
        snprintf(a.msg, sizeof a.msg, "%s", err->msg);
    } else {
        dp_server_set_functions(p.server, functions, DP_BENCH_FNS);
        dp_server_share_stats(p.server, &p.side.area->stats);
    }
    if (send(fds->socket, &a, sizeof a, MSG_NOSIGNAL) != sizeof a && !st)
        st = dp_fail(err, DP_PEER_GONE, errno, "bench peer: answer");
    if (!st) {
        serving = &p;
        st = dp_server_run(p.server);
        serving = NULL;
        if (st == DP_PEER_GONE || st == DP_CONNECTION) /* on verbs, a client that ends looks like a broken connection */
            st = DP_OK;
        else if (st)
            dp_fail(err, st, 0, "bench peer: serving ended: %s", dp_status_text(st));
    }
    stop(&p);
    return st;
}
