/* rfaas_map: requests in a window, each a chunk of items, until all have ended. With a fold (reduce.c), the results of a chunk are buffered in
 * a ring until those of all earlier chunks have been combined. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

/* A chunk in flight. */
typedef struct part {
    rfaas_request_slot *r;
    size_t first, items;
    uint8_t *out; /* where its results go */
} part;

/* Results of chunks that wait for earlier ones. The chunks are numbered, and chunk n has the place n % size. */
typedef struct ring {
    size_t size;
    size_t bytes;  /* of a place */
    size_t begun;  /* chunks that have a call */
    size_t folded; /* chunks whose results are combined */
    size_t *items; /* results in each place, 0 while its call is in flight */
    uint8_t *results;
} ring;

typedef struct map {
    rfaas_lease *l;
    rfaas_function fn;
    const uint8_t *in;
    uint8_t *out;
    size_t in_item, out_item, count;
    size_t chunk;     /* items of one call; 0: chosen for each call */
    size_t max_items; /* of one call, when the chunk is chosen here */
    size_t next;      /* first item without a call */
    call_plan plan;
    part *parts;
    size_t n_parts;
    const char *op;            /* in error texts */
    const rfaas_fold *fold;    /* NULL: rfaas_map */
    ring ring;
    const uint32_t *cancelled; /* atomic, set by another thread; NULL: cannot be cancelled */
    uint32_t turn; /* of a shared lease: selects the call or lane to wait for next */
} map;

/* Returns how many items make one call. Every worker gets twice `depth` calls out of the remaining items, so the calls queued at a
 * slow worker are at most half of its work. */
static size_t next_chunk(const map *m) {
    size_t left = m->count - m->next, n = m->chunk;
    if (!n) {
        n = left / ((size_t)(m->fold ? m->l->wanted : m->l->n_workers) * m->l->cfg.depth * 2);
        if (n > m->max_items)
            n = m->max_items;
        if (n == 0)
            n = 1;
    }
    return n < left ? n : left;
}

/* Starts calls until the workers accept no more, or the ring is full. RFAAS_OK: every item has a call. */
static int fill(map *m) {
    ring *k = &m->ring;
    while (m->next < m->count) {
        if (m->n_parts == (size_t)m->l->n_workers * m->l->cfg.depth || (m->fold && k->begun - k->folded == k->size))
            return RFAAS_BUSY;
        part *p = &m->parts[m->n_parts];
        p->first = m->next;
        p->items = next_chunk(m);
        p->out = m->fold ? k->results + k->begun % k->size * k->bytes : m->out + p->first * m->out_item;
        m->plan.batch = !shared(m->l); /* else the next submit may wait for another thread */
        int status = rfaas_api_start(m->l, m->op, &m->plan, m->fn, m->in + p->first * m->in_item,
                                     (uint32_t)(p->items * m->in_item), p->out, p->items * m->out_item, &p->r);
        if (status)
            return status;
        k->begun++;
        m->next += p->items;
        m->n_parts++;
    }
    return RFAAS_OK;
}

/* Combines the results of a chunk that has ended, and then the results of later chunks that ended before it. */
static void fold(map *m, const part *p) {
    ring *k = &m->ring;
    k->items[(size_t)(p->out - k->results) / k->bytes] = p->items;
    for (size_t at; k->folded < k->begun && k->items[at = k->folded % k->size]; k->folded++) {
        for (size_t i = 0; i < k->items[at]; i++)
            m->fold->combine(m->out, k->results + at * k->bytes + i * m->out_item, m->out_item, m->fold->arg);
        k->items[at] = 0;
    }
}

/* Makes the ring. It has twice as many places as there are calls in flight, so that a slow call does not stop the others at once. */
static int make_ring(map *m) {
    ring *k = &m->ring;
    size_t items = next_chunk(m), all; /* no later chunk is larger */
    k->size = 2 * (size_t)m->l->wanted * m->l->cfg.depth;
    k->bytes = items * m->out_item;
    if (!(k->items = calloc(k->size, sizeof *k->items)) || __builtin_mul_overflow(k->size, k->bytes, &all) || !(k->results = malloc(all)))
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory for the results of %zu calls of %zu items each; set a smaller chunk", m->op, k->size, items);
    return RFAAS_OK;
}

/* Reports whether slots become free by themselves: workers are being replaced, or run calls that were given up. */
static bool slots_come(rfaas_lease *l) {
    if (shared(l)) /* other threads' calls end, too */
        return !draining(l);
    if (!l->grant->ep)
        return false;
    for (uint32_t i = 0; i < l->n_workers; i++)
        if (dp_channel_free_slots(l->workers[i].ch) + l->workers[i].in_flight < l->cfg.depth)
            return true;
    return rfaas_api_replacing(l);
}

/* Collects the calls that have ended. */
static int take_ended(map *m, size_t *taken) {
    int64_t now = m->plan.deadline ? dp_now_ns() : 0;
    *taken = 0;
    for (size_t i = 0; i < m->n_parts;) {
        part p = m->parts[i];
        if (!rfaas_api_ended(m->l, p.r, now)) {
            i++;
            continue;
        }
        m->parts[i] = m->parts[--m->n_parts];
        ++*taken;
        size_t size = 0, want = p.items * m->out_item;
        uint32_t worker = p.r->worker;
        int status = rfaas_api_report(m->l, p.r, m->op, &size);
        if (UNLIKELY(status == RFAAS_OK && size != want) || status == RFAAS_RESULT_TOO_LARGE)
            return rfaas_api_fail(RFAAS_FUNCTION_FAILED, RFAAS_MAYBE_EXECUTED,
                                  "%s: %s on worker %u returned %zu bytes for the items %zu..%zu, want %zu of %zu bytes each", m->op,
                                  function_name(m->l, m->fn), worker, size, p.first, p.first + p.items - 1, p.items,
                                  m->out_item);
        if (UNLIKELY(status))
            return rfaas_api_fail_code(status, rfaas_started(), rfaas_function_code(), "items %zu..%zu: %s", p.first, p.first + p.items - 1,
                                       rfaas_last_error());
        if (m->fold)
            fold(m, &p);
    }
    return RFAAS_OK;
}

/* Waits for one of the calls; without calls, for a free slot. */
static void wait_some(map *m, int64_t deadline) {
    rfaas_lease *l = m->l;
    if (!m->n_parts)
        rfaas_api_await_slot(l, m->plan.worker, &m->turn, deadline);
    else if (shared(l))
        rfaas_api_wait_a_while(l, m->parts[m->turn++ % m->n_parts].r, deadline);
    else if (dp_endpoint_wait_turn(l->grant->ep, deadline) == DP_YIELD)
        rfaas_api_share(l, RFAAS_NO_UNIT, DP_TURN_BRIEF);
}

static bool cancelled(const map *m) { return m->cancelled && __atomic_load_n(m->cancelled, __ATOMIC_SEQ_CST); }

#define START_NS 5000000 /* longest wait of fill() for a new worker, if the map can be cancelled */

/* fill() that fails if the map is cancelled, and returns RFAAS_BUSY every START_NS so that it is called again. */
static int fill_or_cancel(map *m, int64_t busy_since) {
    if (!m->cancelled)
        return fill(m);
    int64_t now = dp_now_ns();
    m->plan.wait_until = now + START_NS;
    int status = cancelled(m) ? rfaas_api_fail(RFAAS_CANCELLED, RFAAS_MAYBE_EXECUTED, "%s: cancelled", m->op) : fill(m);
    bool late = (m->plan.deadline && now >= m->plan.deadline) || (busy_since && now - busy_since > m->l->session->timeout_ns);
    return status == RFAAS_DEADLINE && !late ? RFAAS_BUSY : status;
}

/* Reports whether to start calls now. While the workers still have enough, the map waits until several calls have ended, so that the next
 * ones are sent together. */
static bool worth_filling(const map *m) {
    uint32_t depth = m->l->cfg.depth, together = shared(m->l) || depth < 4 ? 1 : depth / 4;
    return m->n_parts + together <= (size_t)m->l->n_workers * depth || cancelled(m);
}

static int run(map *m) {
    int64_t busy_since = 0;
    for (;;) {
        if (rfaas_api_grows(m->l))
            rfaas_api_grow(m->l);
        int status = worth_filling(m) ? fill_or_cancel(m, busy_since) : RFAAS_BUSY;
        if (status && status != RFAAS_BUSY)
            return status;
        if (!status && !m->n_parts)
            return RFAAS_OK;
        size_t taken;
        int ended = take_ended(m, &taken);
        if (ended)
            return ended;
        if (taken) {
            busy_since = 0;
            continue;
        }
        int64_t now = dp_now_ns(), deadline = m->plan.deadline;
        if (!m->n_parts) {
            busy_since = busy_since ? busy_since : now;
            if (!slots_come(m->l) || (shared(m->l) && now - busy_since > m->l->session->timeout_ns))
                return rfaas_api_fail_const(RFAAS_BUSY, "no free slot on any worker; finish a request and try again");
            if (deadline && now >= deadline)
                return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "%s: items from %zu: no worker was free", m->op, m->next);
            if (shared(m->l))
                deadline = rfaas_api_sooner(deadline, busy_since, m->l->session->timeout_ns);
            if (shared(m->l) && m->cancelled)
                deadline = rfaas_api_sooner(deadline, now, START_NS);
        }
        if (!shared(m->l) && (rfaas_api_replacing(m->l) || rfaas_api_grows(m->l)))
            deadline = rfaas_api_sooner(deadline, now, RFAAS_REPLACED_NS);
        wait_some(m, deadline);
    }
}

/* How long a failed map waits for its calls in flight. */
#define QUIET_NS 1000000000ll

/* Ends the calls of a failed map before it returns: one that still runs or waits in its worker's queue might kill the worker under
 * the program's next call. A worker that is busy for longer is replaced by the next call that uses it, unless it has requests of
 * the program. After the deadline the map does not wait. */
static void give_up(map *m, int status) {
    rfaas_lease *l = m->l;
    int64_t until = dp_now_ns() + QUIET_NS;
    int started = rfaas_started();
    int32_t code = rfaas_function_code();
    char *why = strdup(rfaas_last_error()); /* collecting other calls sets other errors */
    bool late = status == RFAAS_DEADLINE || status == RFAAS_CANCELLED || status == RFAAS_LEASE_ENDED;
    if (m->plan.deadline && m->plan.deadline < until)
        until = m->plan.deadline;
    for (size_t i = 0; i < m->n_parts;) {
        if (rfaas_api_ended(l, m->parts[i].r, 0)) {
            rfaas_api_drop_request(l, m->parts[i].r);
            m->parts[i] = m->parts[--m->n_parts];
        } else if (late || dp_now_ns() >= until) {
            i++;
        } else {
            wait_some(m, until);
            i = 0;
        }
    }
    for (size_t i = 0; i < m->n_parts; i++) {
        uint32_t w = m->parts[i].r->worker;
        rfaas_api_drop_request(l, m->parts[i].r);
        if (late || (shared(l) && !dp_turns_try(l->turns, DP_TURN_CALL, unit_of(w))))
            continue;
        if (!in_flight(l, w))
            dp_channel_fail(l->workers[w].ch, DP_PEER_GONE);
        if (shared(l))
            dp_turns_give(l->turns, unit_of(w));
    }
    if (why)
        rfaas_api_fail_code(status, started, code, "%s", why);
    free(why);
}

static int check(map *m, size_t chunk) {
    rfaas_lease *l = m->l;
    const char *op = m->op;
    uint64_t large = carried(l);
    size_t item = m->in_item > m->out_item ? m->in_item : m->out_item;
    if (large > UINT32_MAX)
        large = UINT32_MAX;
    if (draining(l) || m->fn >= l->n_functions) {
        int status = rfaas_api_bad_call(l, op, m->fn, NULL, 0, NULL, 0);
        if (status)
            return status;
    }
    if (m->in_item == 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: in_item is 0, want at least 1 byte", op);
    if (m->fold && m->out_item == 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: out_item is 0, want at least 1 byte", op);
    if (m->count && (!m->in || (!m->out && m->out_item)))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s is NULL with %zu items", op,
                              !m->in ? "in" : m->fold ? "accumulator" : "out", m->count);
    if (m->count > SIZE_MAX / item)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %zu items of %zu bytes are more than memory can hold", op, m->count, item);
    if (item > large || chunk > large / item)
        return rfaas_api_too_large(l, op, m->fn, m->in_item * (chunk ? chunk : 1), m->out_item * (chunk ? chunk : 1));
    m->max_items = item < l->cfg.eager ? l->cfg.eager / item : 1;
    return RFAAS_OK;
}

int rfaas_map(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *out, size_t out_item, size_t count,
              const rfaas_map_options *options) {
    return rfaas_api_map(l, function, in, in_item, out, out_item, count, options, NULL, NULL);
}

int rfaas_api_map(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *out, size_t out_item, size_t count,
                  const rfaas_map_options *options, const rfaas_fold *fold, const uint32_t *cancelled) {
    const char *op = fold ? "reduce" : "map";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
    if (options) {
        if (options->struct_size < offsetof(rfaas_map_options, timeout_ns) || options->struct_size > 4096)
            return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.struct_size is %u; start from RFAAS_MAP_OPTIONS_INIT", op,
                                           options->struct_size));
        memcpy(&o, options, options->struct_size < sizeof o ? options->struct_size : sizeof o);
    }
    if (o.timeout_ns < 0)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: timeout_ns %lld is negative", op, (long long)o.timeout_ns));
    map m = {.l = l, .fn = function, .in = in, .out = out, .in_item = in_item, .out_item = out_item, .count = count,
             .chunk = o.chunk, .op = op, .fold = fold, .cancelled = cancelled, .plan = {.worker = RFAAS_ANY_WORKER, .repeats = o.repeats, .full_is_busy = true}};
    if ((status = check(&m, o.chunk)) || count == 0)
        return leave(l, status);
    if (o.timeout_ns) {
        int64_t now = dp_now_ns();
        m.plan.deadline = o.timeout_ns > INT64_MAX - now ? 0 : now + o.timeout_ns;
    }
    if (!(m.parts = malloc((size_t)l->wanted * l->cfg.depth * sizeof *m.parts)))
        return leave(l, rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op));
    status = fold ? make_ring(&m) : RFAAS_OK;
    if (!status && (status = run(&m)))
        give_up(&m, status);
    free(m.parts);
    free(m.ring.items);
    free(m.ring.results);
    return leave(l, status);
}
