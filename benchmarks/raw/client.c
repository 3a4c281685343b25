/* The bench's client: opens the channel, and runs batches of calls and of bare round trips. */
#include "bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct dp_bench {
    dp_bench_config cfg;
    dp_endpoint *ep;
    dp_channel *ch;
    dp_bench_side side;
    dp_bench_verbs *verbs;
    dp_mem *registered; /* memory of payloads, or NULL */
    uint64_t run;
    uint64_t buffer; /* bytes of side.in and of side.out */
    bool remote;     /* the peer is on another machine and has an area of its own */
};

/* ---- opening ---- */

static void *buffer_create(uint64_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static int map_area(dp_bench *b, int fd, dp_error *err) {
    struct stat st = {.st_size = DP_BENCH_HEAD};
    uint64_t need = b->remote ? DP_BENCH_HEAD : dp_bench_memory(b->cfg.payload, b->cfg.depth);
    if (!b->remote && fstat(fd, &st))
        return dp_fail(err, DP_FATAL, errno, "bench: shared memory");
    if ((uint64_t)st.st_size < need)
        return dp_fail(err, DP_INVALID, 0, "bench: shared memory of %lld bytes, %llu needed", (long long)st.st_size,
                       (unsigned long long)need);
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_POPULATE | (b->remote ? MAP_ANONYMOUS : 0), b->remote ? -1 : fd, 0);
    if (p == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "bench: map %lld bytes", (long long)st.st_size);
    b->side.area = p;
    b->side.size = (uint64_t)st.st_size;
    b->buffer = (b->cfg.payload + 4096 + 4095) & ~4095ull;
    b->side.in = buffer_create(b->buffer);
    b->side.out = buffer_create(b->buffer);
    if (!b->side.in || !b->side.out)
        return dp_fail(err, DP_FATAL, ENOMEM, "bench: buffers of %llu bytes", (unsigned long long)b->buffer);
    dp_random(b->side.in, b->buffer < 4096 ? b->buffer : 4096);
    return DP_OK;
}

static int shake_hands(dp_bench *b, const dp_dev *dev, const dp_dev_options *o, int sock, dp_error *err) {
    dp_bench_hello h = {.magic = DP_BENCH_MAGIC, .mode = b->cfg.mode, .peer_cpu = b->cfg.peer_cpu,
                        .payload = b->cfg.payload, .depth = b->cfg.depth, .port = o->port, .gid_index = o->gid_index,
                        .pkey_index = o->pkey_index, .traffic_class = o->traffic_class,
                        .service_level = o->service_level, .mtu = o->mtu, .blob_len = sizeof h.blob};
    snprintf(h.provider, sizeof h.provider, "%s", dev->provider == DP_PROVIDER_VERBS ? "verbs" : "shm");
    snprintf(h.device, sizeof h.device, "%s", o->device ? o->device : "");
    int st = dp_channel_offer(b->ch, h.blob, &h.blob_len, err);
    if (st)
        return st;
    if (send(sock, &h, sizeof h, MSG_NOSIGNAL) != sizeof h)
        return dp_fail(err, DP_PEER_GONE, errno, "bench: greet the peer");
    struct timeval patience = {.tv_sec = DP_BENCH_PATIENCE_NS / 1000000000};
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    dp_bench_answer a;
    ssize_t n;
    int64_t until = dp_now_ns() + DP_BENCH_PATIENCE_NS;
    do /* a socket with a time-out returns EINTR after any signal, even with SA_RESTART */
        n = recv(sock, &a, sizeof a, 0);
    while (n < 0 && errno == EINTR && dp_now_ns() < until);
    if (n != sizeof a || a.magic != DP_BENCH_MAGIC || a.blob_len > sizeof a.blob)
        return dp_fail(err, DP_PEER_GONE, n < 0 ? errno : 0, "bench: the peer's answer has %zd bytes, not %zu", n,
                       sizeof a);
    if (a.status)
        return dp_fail(err, a.status, 0, "bench peer: %.*s", (int)sizeof a.msg - 1, a.msg);
    return dp_channel_connect(b->ch, a.blob, a.blob_len, err);
}

/* Calls a function of the peer whose result begins with an int32 status. */
static int ask_peer(dp_bench *b, uint32_t function, const void *in, uint32_t size, void *out, uint32_t capacity,
                    uint32_t *got) {
    dp_started started;
    return dp_channel_call(b->ch, function, in, size, NULL, out, capacity, got, dp_now_ns() + DP_BENCH_PATIENCE_NS,
                           &started);
}

static int open_verbs(dp_bench *b, dp_dev *dev, dp_error *err) {
    dp_bench_card mine, theirs;
    uint32_t got;
    int st = dp_bench_verbs_create(dev, b->cfg.payload, b->cfg.depth, &b->verbs, &mine, err);
    if (st)
        return st;
    st = ask_peer(b, DP_BENCH_FN_VERBS, &mine, sizeof mine, &theirs, sizeof theirs, &got);
    if (!st && got != sizeof theirs)
        st = DP_UNSUPPORTED;
    if (st)
        return dp_fail(err, st, 0, "bench: the peer's bare queue pair: %s", dp_status_text(st));
    b->side.verbs = b->verbs;
    return dp_bench_verbs_connect(b->verbs, &theirs, err);
}

int dp_bench_open(dp_dev *dev, const dp_dev_options *opts, const dp_bench_config *cfg, const dp_bench_fds *fds,
                  dp_bench **out, dp_error *err) {
    if (fds->memory < 0 && dev->provider != DP_PROVIDER_VERBS)
        return dp_fail(err, DP_INVALID, 0, "bench: a peer on another machine needs provider verbs, not %s", dev->name);
    if (cfg->depth == 0 || cfg->depth > cfg->slots || cfg->slots > DP_DEPTH_MAX)
        return dp_fail(err, DP_INVALID, 0, "bench: depth %u of %u slots (at most %d)", cfg->depth, cfg->slots,
                       DP_DEPTH_MAX);
    dp_bench *b = calloc(1, sizeof *b);
    if (!b)
        return dp_fail(err, DP_FATAL, ENOMEM, "bench");
    b->cfg = *cfg;
    b->remote = fds->memory < 0;
    b->side.ping = fds->ping;
    b->side.pong = fds->pong;
    const dp_dev_options none = {.gid_index = -1};
    const dp_channel_config channel = {cfg->slots, cfg->eager, cfg->bulk};
    int st = map_area(b, fds->memory, err);
    if (!st)
        st = dp_endpoint_create(dev, 1, cfg->slots, cfg->mode, &b->ep, err);
    if (!st)
        st = dp_channel_create(b->ep, &channel, &b->ch, err);
    if (!st && cfg->registered)
        st = dp_mem_alloc(dp_endpoint_domain(b->ep), cfg->payload, 0, &b->registered, err);
    if (!st)
        st = shake_hands(b, dev, opts ? opts : &none, fds->socket, err);
    if (!st && dev->provider == DP_PROVIDER_VERBS && !cfg->calls_only)
        st = open_verbs(b, dev, err);
    if (st) {
        dp_bench_close(b);
        return st;
    }
    *out = b;
    return DP_OK;
}

void dp_bench_close(dp_bench *b) {
    if (!b)
        return;
    dp_bench_verbs_destroy(b->verbs);
    dp_mem_free(b->registered);
    dp_channel_destroy(b->ch);
    dp_endpoint_destroy(b->ep);
    if (b->side.area)
        munmap(b->side.area, b->side.size);
    if (b->side.in)
        munmap(b->side.in, b->buffer);
    if (b->side.out)
        munmap(b->side.out, b->buffer);
    free(b);
}

void dp_bench_abort(dp_bench *b) {
    uint64_t many = 1000; /* event_await recognizes more than one as an abort */
    ssize_t n = write(b->side.pong, &many, sizeof many);
    (void)n;
    if (b->verbs)
        dp_bench_verbs_abort(b->verbs);
    dp_channel_fail(b->ch, DP_PEER_GONE);
}

/* ---- floors ---- */

/* Waits until the peer's thread has entered the floor, before the clock runs. Sleeps, because both may share a core. */
static int await_ready(dp_bench *b) {
    int64_t until = dp_now_ns() + DP_BENCH_PATIENCE_NS;
    for (uint32_t spins = 0; __atomic_load_n(&b->side.area->ready, __ATOMIC_ACQUIRE) != b->run; spins++) {
        if (spins < 2000) {
            dp_cpu_pause();
            continue;
        }
        if (dp_now_ns() > until)
            return DP_DEADLINE;
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return DP_OK;
}

/* Returns the status in the function's result. */
static int collect(dp_bench *b, uint32_t slot) {
    int32_t status = DP_FATAL;
    uint32_t size = 0;
    int st = dp_channel_wait(b->ch, slot, dp_now_ns() + DP_BENCH_PATIENCE_NS);
    if (st) {
        dp_channel_abandon(b->ch, slot);
        return st;
    }
    st = dp_channel_finish(b->ch, slot, &status, &size, NULL);
    return st ? st : size == sizeof status ? status : DP_PROTOCOL;
}

int dp_bench_floor(dp_bench *b, dp_bench_kind kind, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n,
                   int64_t *samples, int64_t *ns, dp_error *err) {
    bool on_shm = b->verbs == NULL || kind < DP_BENCH_IMM;
    uint32_t room = on_shm ? b->cfg.payload : b->cfg.payload + DP_REQ_LONG;
    if (b->remote && on_shm)
        return dp_fail(err, DP_UNSUPPORTED, 0, "bench floor of kind %d: the peer is on another machine", kind);
    if (size > room || reply > room)
        return dp_fail(err, DP_INVALID, 0, "bench floor: %u bytes there and %u back, at most %u", size, reply, room);
    uint32_t entries = 1;
    while (entries < b->cfg.depth)
        entries <<= 1;
    dp_bench_run r = {.kind = kind, .size = size, .reply = reply, .window = b->cfg.depth, .entries = entries,
                      .rounds = (uint64_t)warm + n, .run = ++b->run};
    dp_bench_floor_reset(&b->side, &r);
    int64_t limit = dp_now_ns() + DP_BENCH_BATCH_NS + (int64_t)(r.rounds * ((uint64_t)size + reply));
    __atomic_store_n(&b->side.area->limit, limit, __ATOMIC_RELAXED);
    uint32_t slot = 0;
    int st = dp_channel_submit(b->ch, DP_BENCH_FN_FLOOR, &r, sizeof r, NULL, sizeof(int32_t), &slot);
    if (st)
        return dp_fail(err, st, 0, "bench floor: submit: %s", dp_status_text(st));
    /* The client cannot see whether a peer on another machine is ready. There the first untimed round trip waits for it. */
    st = b->remote ? DP_OK : await_ready(b);
    if (!st)
        st = dp_bench_floor_client(&b->side, &r, warm, samples, ns);
    int end = collect(b, slot);
    if (st == DP_DEADLINE && end)
        st = end; /* a better reason for the deadline: the peer may be gone */
    if (st || end)
        return dp_fail(err, st ? st : end, 0, "bench floor of kind %d: here %s, at the peer %s", kind,
                       dp_status_text(st), dp_status_text(end));
    return DP_OK;
}

/* ---- calls ---- */

/* Ends a call: copies its result to `out`, or reads it where it is. */
static inline int finish(dp_bench *b, uint32_t slot, uint32_t reply) {
    uint32_t got;
    int st = dp_channel_finish(b->ch, slot, b->registered ? NULL : b->side.out, &got, NULL);
    return st ? st : got == reply ? DP_OK : DP_PROTOCOL;
}

static inline int submit(dp_bench *b, uint32_t function, uint32_t size, uint32_t reply, uint32_t i, uint32_t *slot) {
    uint8_t *in = b->registered ? b->registered->addr : b->side.in;
    in[0] = (uint8_t)i;
    return dp_channel_submit(b->ch, function, in, size, b->registered, reply, slot);
}

static inline int call(dp_bench *b, uint32_t function, uint32_t size, uint32_t reply, uint32_t i) {
    uint32_t got, slot;
    if (b->registered) {
        int st = submit(b, function, size, reply, i, &slot);
        if (!st)
            st = dp_channel_wait(b->ch, slot, 0);
        return st ? st : finish(b, slot, reply);
    }
    dp_started started;
    b->side.in[0] = (uint8_t)i;
    int st = dp_channel_call(b->ch, function, b->side.in, size, NULL, b->side.out, reply, &got, 0, &started);
    return st ? st : got == reply ? DP_OK : DP_PROTOCOL;
}

static int calls_one(dp_bench *b, uint32_t function, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n, int64_t *samples,
                     int64_t *ns) {
    for (uint32_t i = 0; i < warm; i++) {
        int st = call(b, function, size, reply, i);
        if (st)
            return st;
    }
    int64_t begin = dp_now_ns(), last = begin;
    for (uint32_t i = 0; i < n; i++) {
        int st = call(b, function, size, reply, i);
        if (__builtin_expect(st, 0))
            return st;
        if (samples) {
            int64_t now = dp_now_ns();
            *samples++ = now - last;
            last = now;
        }
    }
    *ns = dp_now_ns() - begin;
    return DP_OK;
}

static int calls_many(dp_bench *b, uint32_t function, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n, int64_t *samples,
                      int64_t *ns) {
    uint64_t rounds = (uint64_t)warm + n, head = 0, tail = 0;
    uint32_t depth = b->cfg.depth, mask = DP_DEPTH_MAX - 1, slots[DP_DEPTH_MAX]; /* a mask, as in the floor: a division takes too long */
    int64_t begin = dp_now_ns(), submitted[DP_DEPTH_MAX];
    while (tail < rounds) {
        while (head < rounds && head - tail < depth) {
            if (samples)
                submitted[head & mask] = dp_now_ns();
            int st = submit(b, function, size, reply, (uint32_t)head, &slots[head & mask]);
            if (__builtin_expect(st, 0))
                return st;
            head++;
        }
        /* Waits for the oldest and takes the others that have arrived. */
        bool first = true;
        while (tail < head) {
            uint32_t slot = slots[tail & mask];
            int st = first ? dp_channel_wait(b->ch, slot, 0) : DP_OK;
            if (!st)
                st = finish(b, slot, reply);
            if (!first && st == DP_INVALID)
                break; /* in flight */
            if (__builtin_expect(st, 0))
                return st;
            first = false;
            if (tail == warm)
                begin = dp_now_ns();
            if (samples && tail >= warm)
                samples[tail - warm] = dp_now_ns() - submitted[tail & mask];
            tail++;
        }
    }
    *ns = dp_now_ns() - begin;
    return DP_OK;
}

int dp_bench_calls(dp_bench *b, uint32_t function, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n, int64_t *samples,
                   int64_t *ns, dp_error *err) {
    if (size > b->cfg.payload || reply > b->cfg.payload)
        return dp_fail(err, DP_INVALID, 0, "bench: payload of %u bytes, result of %u, at most %u", size, reply, b->cfg.payload);
    int st = b->cfg.depth == 1 ? calls_one(b, function, size, reply, warm, n, samples, ns)
                               : calls_many(b, function, size, reply, warm, n, samples, ns);
    return st ? dp_fail(err, st, 0, "bench: call of %u bytes: %s", size, dp_status_text(st)) : DP_OK;
}

int dp_bench_verify(dp_bench *b, uint32_t size, dp_error *err) {
    if (size > b->cfg.payload)
        return dp_fail(err, DP_INVALID, 0, "bench: payload of %u bytes, at most %u", size, b->cfg.payload);
    dp_random(b->side.in, size);
    memset(b->side.out, 0, size);
    uint32_t got = 0;
    dp_started started;
    int st = dp_channel_call(b->ch, DP_BENCH_FN_ECHO, b->side.in, size, NULL, b->side.out, size, &got, 0, &started);
    if (st)
        return dp_fail(err, st, 0, "bench: echo of %u bytes: %s", size, dp_status_text(st));
    if (got != size || memcmp(b->side.in, b->side.out, size))
        return dp_fail(err, DP_PROTOCOL, 0, "bench: echo of %u bytes came back changed", size);
    return DP_OK;
}

void dp_bench_delay(dp_bench *b, uint64_t ns) { __atomic_store_n(&b->side.area->delay, ns, __ATOMIC_RELAXED); }

void dp_bench_blocked(dp_bench *b, uint64_t *client, uint64_t *peer) {
    dp_channel_stats s;
    dp_channel_get_stats(b->ch, &s);
    *client = s.blocked_waits;
    uint32_t got = 0;
    if (!b->remote)
        *peer = __atomic_load_n(&b->side.area->stats.blocked_waits, __ATOMIC_RELAXED);
    else if (ask_peer(b, DP_BENCH_FN_BLOCKED, NULL, 0, peer, sizeof *peer, &got) || got != sizeof *peer)
        *peer = 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dp_bench_clock_ns(void) {
    enum { BATCHES = 31, READS = 100 };
    double cost[BATCHES];
    for (int i = 0; i < BATCHES; i++) {
        int64_t begin = dp_now_ns(), end = begin;
        for (int k = 0; k < READS; k++)
            end = dp_now_ns();
        cost[i] = (double)(end - begin) / READS;
    }
    qsort(cost, BATCHES, sizeof *cost, by_value);
    return cost[BATCHES / 2];
}
