/* Calls whose cancels and deadlines race with their replies, from buffers between guard pages.
 *
 *     race LIBRARY SEED CALLS DEPTH WAIT_MODE
 *
 * A buffer belongs to the library from the start of a call to its end, however the call ends. Before and after, it belongs to the
 * caller, which keeps a pattern in it and sometimes protects it against writes, or also reads. Any access in that time is
 * detected at once, or when the pattern is compared. Payloads are overwritten as soon as the call has started. At the end
 * every slot must be free again. The address comes from the environment. Lines on standard output: "wrong TEXT" for
 * something that must never happen, at the end "end JSON". */
#include <execinfo.h>
#include <inttypes.h>
#include <rfaas.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "work.h"

#define PAGE 4096
#define SMALL PAGE
#define LARGE (20 * PAGE) /* above the eager size: through the bulk area */
#define CELLS 96
#define LARGE_EVERY 16 /* each such cell is a large one */
#define DEPTH_MAX 64
#define PATIENCE 10000000000ll

/* Memory of a payload and of a result, each between two inaccessible pages. */
typedef struct cell {
    uint8_t *in, *out; /* `room` bytes */
    size_t room;
    uint64_t pattern; /* fills `out` while no call uses it */
    bool closed;      /* `out` is protected against writes, or also reads */
    /* of a call: */
    uint8_t *payload, *result;
    size_t size, want;
    uint64_t hash;
    rfaas_request request;
} cell;

static cell cells[CELLS];
static uint32_t rest[CELLS]; /* cells without a call */
static uint32_t n_rest;
static uint64_t rng, tag, wrongs;
static uint64_t calls, ok, late, cancelled, busy, failed, closed_rests;
static int64_t longest;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static uint64_t any(uint64_t below) { return work_mix(rng += 0x9e3779b97f4a7c15u) % below; }

/* From 64 ns to 33 us, short ones as often as long ones. */
static int64_t any_time(void) { return (int64_t)(64 + any(64)) << any(9); }

#define WRONG(...) (wrongs++ < 20 ? (printf("wrong " __VA_ARGS__), putchar('\n')) : 0)

/* The library touched memory that belongs to the caller. */
static void on_fault(int sig, siginfo_t *info, void *context) {
    (void)context;
    const uint8_t *at = info->si_addr;
    const char *what = "memory that is not a buffer";
    for (int i = 0; i < CELLS; i++) {
        if (at >= cells[i].in - PAGE && at < cells[i].in + cells[i].room + PAGE)
            what = "a payload's buffer or its guard";
        if (at >= cells[i].out - PAGE && at < cells[i].out + cells[i].room + PAGE)
            what = "a result's buffer or its guard";
    }
    printf("wrong signal %d at %p: %s\n", sig, info->si_addr, what);
    fflush(stdout);
    void *trace[40];
    backtrace_symbols_fd(trace, backtrace(trace, 40), 1);
    _exit(3);
}

static uint8_t *between_guards(size_t room) {
    uint8_t *p = mmap(NULL, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + PAGE, room, PROT_READ | PROT_WRITE)) {
        perror("mmap");
        exit(1);
    }
    return p + PAGE;
}

/* ---- passing buffers to the library and back ---- */

/* The buffer becomes the caller's: fills it with a pattern, and perhaps protects it. */
static void lay_down(cell *c) {
    c->pattern = work_mix(rng++);
    work_fill(c->out, c->room, c->pattern);
    c->closed = any(8) == 0;
    if (c->closed) {
        closed_rests++;
        mprotect(c->out, c->room, any(2) ? PROT_READ : PROT_NONE);
    }
    rest[n_rest++] = (uint32_t)(c - cells);
}

static cell *pick_up(void) {
    uint64_t k = any(n_rest);
    cell *c = &cells[rest[k]];
    rest[k] = rest[--n_rest];
    if (c->closed)
        mprotect(c->out, c->room, PROT_READ | PROT_WRITE);
    if (!work_is(c->out, c->room, c->pattern))
        WRONG("a buffer of %zu bytes was written while it was the caller's", c->room);
    return c;
}

/* Payload and result end at the guard page after them, or begin at the one before. */
static void prepare(cell *c) {
    work_head h = {.tag = ++tag, .pause_us = any(100) == 0};
    size_t most = c->room - sizeof h;
    c->size = sizeof h + any(any(4) ? 300 : most);
    c->want = any(any(4) ? 300 : most);
    h.want = (uint32_t)c->want;
    c->payload = any(2) ? c->in : c->in + c->room - c->size;
    c->result = any(2) ? c->out : c->out + c->room - c->want;
    memcpy(c->payload, &h, sizeof h);
    work_fill(c->payload + sizeof h, c->size - sizeof h, h.tag);
    c->hash = work_hash(c->payload, c->size);
}

/* A call has ended, and its buffers belong to the caller again. */
static void ended(cell *c, int status, size_t size) {
    calls++;
    size_t before = (size_t)(c->result - c->out);
    if (status == RFAAS_OK) {
        ok++;
        if (size != c->want || !work_is(c->result, size, c->hash))
            WRONG("the result of %zu bytes is not the %zu bytes of hash %" PRIx64, size, c->want, c->hash);
        memset(c->result, 0, size); /* compare the rest with the pattern */
        uint8_t *again = c->result;
        for (size_t i = 0; i < size; i++) {
            uint64_t w = work_mix(c->pattern + ((before + i) / 8 + 1) * 0x9e3779b97f4a7c15u);
            again[i] = (uint8_t)(w >> (before + i) % 8 * 8);
        }
    } else if (status == RFAAS_DEADLINE) {
        late++;
    } else if (status == RFAAS_CANCELLED) {
        cancelled++;
    } else {
        failed++;
        WRONG("a call ended with %d: %s", status, rfaas_last_error());
    }
    if (!work_is(c->out, c->room, c->pattern))
        WRONG("a call that ended with %d wrote outside its result of %zu bytes at %zu of %zu", status, c->want, before, c->room);
    lay_down(c);
}

/* The payload may be reused: the library must not read it any more. */
static void scribble(cell *c) {
    if (any(16) == 0) {
        mprotect(c->in, c->room, PROT_NONE);
        mprotect(c->in, c->room, PROT_READ | PROT_WRITE); /* a read between the two crashes */
    }
    memset(c->payload, 0x5a, c->size);
}

/* ---- calls ---- */

static void synchronous(rfaas_lease *l, rfaas_function f) {
    cell *c = pick_up();
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    size_t size = 0;
    prepare(c);
    o.timeout_ns = any(6) ? any_time() : 0;
    int64_t began = now();
    int status;
    do
        status = rfaas_invoke(l, f, c->payload, c->size, c->result, c->want, &size, &o);
    while (status == RFAAS_BUSY && ++busy && now() - began < PATIENCE);
    if (now() - began > longest)
        longest = now() - began;
    scribble(c);
    ended(c, status, size);
}

static void end_one(cell *c) {
    size_t size = 0;
    int status = RFAAS_OK, done = 0;
    int64_t began = now(), until = began + any_time();
    switch (any(5)) {
    case 0: /* cancelled at once */
        break;
    case 1: /* cancelled after a while, perhaps when it has ended */
        while (now() < until && !done)
            status = rfaas_test(&c->request, &done, &size);
        break;
    case 2: /* polled until it has ended */
        while (!done && now() - began < PATIENCE)
            status = rfaas_test(&c->request, &done, &size);
        break;
    default:
        status = rfaas_wait(&c->request, &size);
        done = 1;
    }
    if (now() - began > longest)
        longest = now() - began;
    if (!done) {
        if (rfaas_cancel(&c->request) != RFAAS_OK)
            WRONG("cancel: %s", rfaas_last_error());
        status = RFAAS_CANCELLED;
    }
    ended(c, status, size);
}

static void asynchronous(rfaas_lease *l, rfaas_function f, uint32_t depth) {
    cell *flying[DEPTH_MAX];
    uint32_t n = 0, want = 1 + (uint32_t)any(depth);
    while (n < want) {
        cell *c = pick_up();
        rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
        prepare(c);
        o.timeout_ns = any(2) ? any_time() : 0;
        int status = rfaas_iinvoke(l, f, c->payload, c->size, c->result, c->want, &o, &c->request);
        if (status != RFAAS_OK) {
            if (status == RFAAS_BUSY)
                busy++;
            else
                WRONG("iinvoke: %d, %s", status, rfaas_last_error());
            if (!work_is(c->out, c->room, c->pattern))
                WRONG("a call that was refused wrote its result");
            lay_down(c);
            break;
        }
        scribble(c);
        flying[n++] = c;
    }
    while (n) {
        uint64_t k = any(n);
        cell *c = flying[k];
        flying[k] = flying[--n];
        end_one(c);
    }
}

/* Every slot is free when as many calls as there are slots can be in flight at once. */
static bool all_slots_free(rfaas_lease *l, rfaas_function f, uint32_t depth) {
    for (int64_t end = now() + PATIENCE; now() < end;) {
        cell *flying[DEPTH_MAX];
        uint32_t n = 0;
        for (; n < depth; n++) {
            cell *c = flying[n] = pick_up();
            prepare(c);
            c->size = sizeof(work_head), c->want = 8; /* no bulk, because only slots are tested */
            work_head h = {.tag = ++tag, .want = 8, .pause_us = 0};
            memcpy(c->payload, &h, sizeof h);
            c->hash = work_hash(c->payload, c->size);
            c->result = c->out;
            if (rfaas_iinvoke(l, f, c->payload, c->size, c->result, 8, NULL, &c->request) != RFAAS_OK) {
                lay_down(c);
                break;
            }
        }
        rfaas_request more;
        bool full = n == depth && rfaas_iinvoke(l, f, NULL, 0, NULL, 0, NULL, &more) == RFAAS_BUSY;
        for (uint32_t i = 0; i < n; i++) {
            size_t size = 0;
            int status = rfaas_wait(&flying[i]->request, &size);
            ended(flying[i], status, size);
        }
        if (full)
            return true;
    }
    return false;
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t total = strtoull(argv[3], NULL, 10);
    uint32_t depth = (uint32_t)strtoul(argv[4], NULL, 10);
    rng = strtoull(argv[2], NULL, 10);
    tag = rng << 32;
    rfaas_session *s;
    rfaas_lease *l;
    rfaas_function f;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = argv[1];
    o.depth = depth;
    o.wait_mode = (uint32_t)strtoul(argv[5], NULL, 10);
    o.bulk = 1 << 20;
    if (depth > DEPTH_MAX || rfaas_init(NULL) || rfaas_session_open(NULL, &s) || rfaas_lease_open(s, &o, &l) ||
        rfaas_lease_function(l, "work", &f)) {
        printf("wrong set-up: %s\n", rfaas_last_error());
        return 1;
    }
    struct sigaction a = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &a, NULL);
    sigaction(SIGBUS, &a, NULL);
    for (uint32_t i = 0; i < CELLS; i++) {
        cells[i].room = i % LARGE_EVERY ? SMALL : LARGE;
        cells[i].in = between_guards(cells[i].room);
        cells[i].out = between_guards(cells[i].room);
        lay_down(&cells[i]);
    }
    int64_t began = now();
    while (calls < total && !failed) {
        if (any(2))
            synchronous(l, f);
        else
            asynchronous(l, f, depth);
    }
    int64_t took = now() - began;
    bool all_free = all_slots_free(l, f, depth);
    if (!all_free)
        WRONG("slots are not free");
    while (n_rest)
        pick_up(); /* checks all buffers again */
    if (rfaas_lease_release(l) || rfaas_session_close(s) || rfaas_finalize())
        WRONG("end: %s", rfaas_last_error());
    printf("end {\"calls\":%" PRIu64 ",\"ok\":%" PRIu64 ",\"deadline\":%" PRIu64 ",\"cancelled\":%" PRIu64 ",\"busy\":%" PRIu64
           ",\"closed\":%" PRIu64 ",\"wrong\":%" PRIu64 ",\"longest_ns\":%" PRId64 ",\"ns\":%" PRId64 "}\n",
           calls, ok, late, cancelled, busy, closed_rests, wrongs, longest, took);
    return wrongs ? 1 : 0;
}
