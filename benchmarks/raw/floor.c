/* The floors on shared memory, both ends of each: the simplest programs that move the same bytes. */
#include "bench.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Every kind of round trip gets its own copy of the timing loop. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* One end of a ping-pong on shared memory. */
typedef struct box {
    uint64_t *flag;
    uint8_t *data;
} box;

/* Size of a box. Two boxes, or two rings, follow the head. */
static uint64_t box_size(uint64_t payload) { return ((64 + payload + 4095) & ~4095ull) + 512; }

static uint32_t power_of_two(uint32_t n) {
    uint32_t p = 1;
    while (p < n)
        p <<= 1;
    return p;
}

uint64_t dp_bench_memory(uint32_t payload, uint32_t depth) {
    uint64_t boxes = 2 * box_size(payload);
    uint64_t rings = depth > 1 ? 2 * (uint64_t)power_of_two(depth) * dp_bench_stride(payload) : 0;
    return (DP_BENCH_HEAD + (boxes > rings ? boxes : rings) + 4095) & ~4095ull;
}

static bool is_near(const dp_bench_run *r) { return r->kind == DP_BENCH_NEAR; }

/* Box 0 carries requests, box 1 replies. The extra 512 bytes keep equal offsets of the two out of the same cache set. */
static box box_at(const dp_bench_side *s, const dp_bench_run *r, int which) {
    uint32_t payload = r->size > r->reply ? r->size : r->reply;
    uint8_t *base = (uint8_t *)s->area + DP_BENCH_HEAD + (which ? box_size(payload) : 0);
    return (box){(uint64_t *)(void *)base, base + (is_near(r) ? sizeof(uint64_t) : DP_CACHE_LINE)};
}

static uint8_t *ring_at(const dp_bench_side *s, const dp_bench_run *r, int which) {
    uint32_t payload = r->size > r->reply ? r->size : r->reply;
    return (uint8_t *)s->area + DP_BENCH_HEAD + (which ? r->entries * dp_bench_stride(payload) : 0);
}

static uint64_t ring_stride(const dp_bench_run *r) { return dp_bench_stride(r->size > r->reply ? r->size : r->reply); }

/* Whether the run fits into the memory. The peer does not trust its client. */
static bool floor_fits(const dp_bench_side *s, const dp_bench_run *r) {
    uint64_t payload = r->size > r->reply ? r->size : r->reply;
    if (s->verbs && r->kind >= DP_BENCH_IMM)
        return true; /* verbs.c checks floors that do not use this memory */
    if (r->kind == DP_BENCH_RING)
        return r->entries && r->entries <= DP_DEPTH_MAX && !(r->entries & (r->entries - 1)) &&
               r->window && r->window <= r->entries &&
               DP_BENCH_HEAD + 2 * r->entries * dp_bench_stride((uint32_t)payload) <= s->size;
    return DP_BENCH_HEAD + 2 * box_size(payload) <= s->size;
}

void dp_bench_floor_reset(const dp_bench_side *s, const dp_bench_run *r) {
    s->area->ping = s->area->pong = 0;
    if (r->kind == DP_BENCH_RING) {
        for (int which = 0; which < 2; which++)
            for (uint32_t i = 0; i < r->entries; i++)
                *(uint64_t *)(void *)(ring_at(s, r, which) + i * ring_stride(r)) = 0;
    } else if (r->kind < DP_BENCH_IMM) {
        *box_at(s, r, 0).flag = *box_at(s, r, 1).flag = 0;
    }
}

/* ---- waiting ---- */

#define SPINS_PER_YIELD (1u << 11) /* some 60 us, so that undisturbed round trips make no system call */

/* If both sides share a core, the other side could only run after the spinner's time slice, thousands of times in a batch. So a
 * spinner yields, and gives up at the batch's limit. */
static __attribute__((noinline)) bool too_late(const dp_bench_side *s) {
    sched_yield();
    return dp_now_ns() > __atomic_load_n(&s->area->limit, __ATOMIC_RELAXED);
}

/* Spins until the word has the value, one pause per look. */
static ALWAYS_INLINE int await_word(const dp_bench_side *s, const uint64_t *word, uint64_t value) {
    uint32_t spins = 0;
    /* Acquire pairs with the release of publish_word: the payload written before it is visible. */
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) {
        dp_cpu_pause();
        if (__builtin_expect(!(++spins % SPINS_PER_YIELD), 0) && too_late(s))
            return DP_DEADLINE;
    }
    return DP_OK;
}

static ALWAYS_INLINE void publish_word(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

static long futex(uint64_t *word, int op, uint64_t value, const struct timespec *timeout) {
    /* The low half: integers are little endian here (dp_wire.h). */
    return syscall(SYS_futex, (uint32_t *)(void *)word, op, (uint32_t)value, timeout, NULL, 0);
}

static int futex_await(const dp_bench_side *s, uint64_t *word, uint64_t value) {
    const struct timespec patience = {.tv_nsec = 100000000};
    uint64_t now;
    while ((now = __atomic_load_n(word, __ATOMIC_ACQUIRE)) != value)
        if (futex(word, FUTEX_WAIT, now, &patience) && errno == ETIMEDOUT && too_late(s))
            return DP_DEADLINE;
    return DP_OK;
}

static void futex_publish(uint64_t *word, uint64_t value) {
    publish_word(word, value);
    futex(word, FUTEX_WAKE, 1, NULL);
}

/* dp_bench_abort adds more than one to the count: the other side is gone. */
static int event_await(int fd) {
    uint64_t count;
    for (;;) {
        ssize_t n = read(fd, &count, sizeof count);
        if (n == sizeof count)
            return count == 1 ? DP_OK : DP_PEER_GONE;
        if (n >= 0 || errno != EINTR)
            return DP_FATAL;
    }
}

static int event_publish(int fd) {
    uint64_t one = 1;
    return write(fd, &one, sizeof one) == sizeof one ? DP_OK : DP_FATAL;
}

/* ---- one round trip of each kind; i counts from 1 ---- */

typedef struct trip {
    const dp_bench_side *s;
    const dp_bench_run *r;
    box req, rep;
} trip;

typedef int (*trip_fn)(const trip *t, uint64_t i);

static ALWAYS_INLINE int flag_client(const trip *t, uint64_t i) {
    publish_word(&t->s->area->ping, i);
    return await_word(t->s, &t->s->area->pong, i);
}

static ALWAYS_INLINE int flag_server(const trip *t, uint64_t i) {
    int st = await_word(t->s, &t->s->area->ping, i);
    publish_word(&t->s->area->pong, i);
    return st;
}

static ALWAYS_INLINE void fill_payload(const trip *t, uint64_t i) {
    t->s->in[0] = (uint8_t)i;
    memcpy(t->req.data, t->s->in, t->r->size);
}

static ALWAYS_INLINE void answer(const trip *t) { dp_bench_move(t->s->rest, t->rep.data, t->req.data, t->r->size, t->r->reply); }

static ALWAYS_INLINE int box_client(const trip *t, uint64_t i) {
    fill_payload(t, i);
    publish_word(t->req.flag, i);
    int st = await_word(t->s, t->rep.flag, i);
    memcpy(t->s->out, t->rep.data, t->r->reply);
    return st;
}

static ALWAYS_INLINE int box_server(const trip *t, uint64_t i) {
    int st = await_word(t->s, t->req.flag, i);
    answer(t);
    publish_word(t->rep.flag, i);
    return st;
}

static ALWAYS_INLINE int event_client(const trip *t, uint64_t i) {
    fill_payload(t, i);
    int st = event_publish(t->s->ping);
    if (!st)
        st = event_await(t->s->pong);
    memcpy(t->s->out, t->rep.data, t->r->reply);
    return st;
}

static ALWAYS_INLINE int event_server(const trip *t, uint64_t i) {
    (void)i;
    int st = event_await(t->s->ping);
    if (st)
        return st;
    answer(t);
    return event_publish(t->s->pong);
}

static ALWAYS_INLINE int futex_client(const trip *t, uint64_t i) {
    fill_payload(t, i);
    futex_publish(t->req.flag, i);
    int st = futex_await(t->s, t->rep.flag, i);
    memcpy(t->s->out, t->rep.data, t->r->reply);
    return st;
}

static ALWAYS_INLINE int futex_server(const trip *t, uint64_t i) {
    int st = futex_await(t->s, t->req.flag, i);
    answer(t);
    futex_publish(t->rep.flag, i);
    return st;
}

/* One-sided: the peer does nothing. */
static ALWAYS_INLINE int read_client(const trip *t, uint64_t i) {
    (void)i;
    memcpy(t->s->out, t->rep.data, t->r->reply);
    /* The compiler must not move the copy out of the loop. */
    __asm__ volatile("" ::: "memory");
    return DP_OK;
}

static ALWAYS_INLINE int add_client(const trip *t, uint64_t i) {
    (void)i;
    __atomic_fetch_add(&t->s->area->pong, 1, __ATOMIC_SEQ_CST);
    return DP_OK;
}

/* ---- loops ---- */

static ALWAYS_INLINE int serve(trip_fn f, const trip *t) {
    for (uint64_t i = 1; i <= t->r->rounds; i++) {
        int st = f(t, i);
        if (__builtin_expect(st, 0))
            return st;
    }
    return DP_OK;
}

static ALWAYS_INLINE int timed(trip_fn f, const trip *t, uint32_t warm, int64_t *samples, int64_t *ns) {
    for (uint64_t i = 1; i <= warm; i++) {
        int st = f(t, i);
        if (st)
            return st;
    }
    int64_t begin = dp_now_ns(), last = begin;
    for (uint64_t i = warm + 1; i <= t->r->rounds; i++) {
        int st = f(t, i);
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

/* ---- rings ---- */

static int ring_server(const dp_bench_side *s, const dp_bench_run *r) {
    uint8_t *from = ring_at(s, r, 0), *to = ring_at(s, r, 1);
    uint64_t stride = ring_stride(r), mask = r->entries - 1;
    for (uint64_t i = 0; i < r->rounds; i++) {
        uint8_t *a = from + (i & mask) * stride, *b = to + (i & mask) * stride;
        int st = await_word(s, (uint64_t *)(void *)a, i + 1);
        if (__builtin_expect(st, 0))
            return st;
        dp_bench_move(s->rest, b + sizeof(uint64_t), a + sizeof(uint64_t), r->size, r->reply);
        publish_word((uint64_t *)(void *)b, i + 1);
    }
    return DP_OK;
}

static int ring_client(const dp_bench_side *s, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns) {
    uint8_t *to = ring_at(s, r, 0), *from = ring_at(s, r, 1);
    uint64_t stride = ring_stride(r), mask = r->entries - 1;
    uint64_t head = 0, tail = 0;
    int64_t begin = 0, pushed[DP_DEPTH_MAX];
    while (tail < r->rounds) {
        while (head < r->rounds && head - tail < r->window) {
            uint8_t *e = to + (head & mask) * stride;
            s->in[0] = (uint8_t)head;
            memcpy(e + sizeof(uint64_t), s->in, r->size);
            if (samples)
                pushed[head & mask] = dp_now_ns();
            publish_word((uint64_t *)(void *)e, ++head);
        }
        /* Waits for the oldest and takes the others that have arrived. */
        bool first = true;
        while (tail < head) {
            const uint64_t *seq = (const uint64_t *)(const void *)(from + (tail & mask) * stride);
            if (first) {
                int st = await_word(s, seq, tail + 1);
                if (__builtin_expect(st, 0))
                    return st;
                first = false;
            } else if (__atomic_load_n(seq, __ATOMIC_ACQUIRE) != tail + 1) {
                break;
            }
            memcpy(s->out, seq + 1, r->reply);
            if (tail == warm)
                begin = dp_now_ns();
            if (samples && tail >= warm)
                samples[tail - warm] = dp_now_ns() - pushed[tail & mask];
            tail++;
        }
    }
    *ns = dp_now_ns() - begin;
    return DP_OK;
}

/* ---- by kind ---- */

int dp_bench_floor_server(const dp_bench_side *s, const dp_bench_run *r) {
    if (!floor_fits(s, r))
        return DP_INVALID;
    trip t = {s, r, box_at(s, r, 0), box_at(s, r, 1)};
    __atomic_store_n(&s->area->ready, r->run, __ATOMIC_SEQ_CST);
    switch ((dp_bench_kind)r->kind) {
    case DP_BENCH_FLAG: return serve(flag_server, &t);
    case DP_BENCH_NEAR:
    case DP_BENCH_APART: return serve(box_server, &t);
    case DP_BENCH_RING: return ring_server(s, r);
    case DP_BENCH_EVENTFD: return serve(event_server, &t);
    case DP_BENCH_FUTEX: return serve(futex_server, &t);
    case DP_BENCH_IMM:
    case DP_BENCH_IMM_WARM:
    case DP_BENCH_IMM_WINDOW: return s->verbs ? dp_bench_verbs_server(s->verbs, r) : DP_UNSUPPORTED;
    case DP_BENCH_READ:
    case DP_BENCH_FETCH_ADD: return DP_OK;
    }
    return DP_INVALID;
}

int dp_bench_floor_client(const dp_bench_side *s, const dp_bench_run *r, uint32_t warm, int64_t *samples,
                          int64_t *ns) {
    trip t = {s, r, box_at(s, r, 0), box_at(s, r, 1)};
    switch ((dp_bench_kind)r->kind) {
    case DP_BENCH_FLAG: return timed(flag_client, &t, warm, samples, ns);
    case DP_BENCH_NEAR:
    case DP_BENCH_APART: return timed(box_client, &t, warm, samples, ns);
    case DP_BENCH_RING: return ring_client(s, r, warm, samples, ns);
    case DP_BENCH_EVENTFD: return timed(event_client, &t, warm, samples, ns);
    case DP_BENCH_FUTEX: return timed(futex_client, &t, warm, samples, ns);
    case DP_BENCH_READ:
        return s->verbs ? dp_bench_verbs_client(s->verbs, r, warm, samples, ns) : timed(read_client, &t, warm, samples, ns);
    case DP_BENCH_FETCH_ADD:
        return s->verbs ? dp_bench_verbs_client(s->verbs, r, warm, samples, ns) : timed(add_client, &t, warm, samples, ns);
    case DP_BENCH_IMM:
    case DP_BENCH_IMM_WARM:
    case DP_BENCH_IMM_WINDOW:
        return s->verbs ? dp_bench_verbs_client(s->verbs, r, warm, samples, ns) : DP_UNSUPPORTED;
    }
    return DP_INVALID;
}
