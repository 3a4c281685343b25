/* rfaas_lease_open_across and rfaas_places: leases on several executors, opened at the same time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

#define ACROSS_MAX 65536  /* workers */
#define AT_ONCE 16        /* leases that are opened at the same time */
#define PAUSE_MIN_NS 5000000
#define PAUSE_MAX_NS 500000000

static const char op[] = "lease across executors";

/* One executor's part. Its lease never runs calls in this process at first, because other executors may have room. */
typedef struct part {
    rfaas_lease_options options;
    char at[RFAAS_AGENT_ADDRESS];
    rfaas_lease *lease;
    rfaas_acquisition acquisition;
    int status;
    char text[512];
} part;

#define PART_NS 2000000 /* longest wait for one part's init call while other parts wait for the agent */

/* Opens the parts, all at the same time. */
static void open_parts(rfaas_session *s, part *parts, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        part *p = &parts[i];
        p->status = rfaas_api_lease_begin(s, &p->options, p->at, &p->lease, &p->acquisition);
    }
    for (bool all = false; !all;) {
        int64_t until = INT64_MAX;
        const rfaas_acquisition *wait = NULL; /* the part to wait for; a part with a running init call is preferred */
        uint32_t waiting = 0;
        all = true;
        for (uint32_t i = 0; i < n; i++) {
            part *p = &parts[i];
            if (p->status || rfaas_api_acquire_step(&p->acquisition))
                continue;
            all = false;
            until = p->acquisition.until < until ? p->acquisition.until : until;
            waiting++;
            if (!wait || p->acquisition.initialising)
                wait = &p->acquisition;
        }
        if (wait)
            rfaas_api_acquire_wait(wait, wait->initialising && waiting > 1 ? dp_now_ns() + PART_NS : until);
    }
    for (uint32_t i = 0; i < n; i++) {
        part *p = &parts[i];
        if (!p->status)
            p->status = rfaas_api_lease_finish(&p->lease, &p->acquisition, false);
        if (p->status)
            snprintf(p->text, sizeof p->text, "%s", rfaas_last_error());
    }
}

/* Reports whether other executors may be asked after the error of a part. */
static bool refused(const part *p) {
    int class = dp_status_class(p->status);
    return !p->acquisition.init_failed && (class == RFAAS_CLASS_BUSY || class == RFAAS_CLASS_CONNECTION || class == RFAAS_CLASS_LEASE);
}

typedef struct across {
    rfaas_session *session;
    const rfaas_lease_options *options;
    rfaas_lease **leases;
    size_t capacity, count;
    uint32_t left;                     /* workers */
    char (*tried)[RFAAS_AGENT_ADDRESS]; /* executors */
    uint32_t n_tried;
    int64_t wait_until;
    int64_t pause; /* before the executors that have refused are asked again */
} across;

/* Asks the agent which executors have room. */
static int ask_shares(rfaas_session *s, const char *what, rfaas_agent_spread *req, const void *avoid, rfaas_reply *reply, uint64_t *n) {
    req->session = s->open.session;
    rfaas_request_parts parts = {.body = req, .body_size = sizeof *req, .tail = avoid, .tail_size = (size_t)req->avoid * RFAAS_AGENT_ADDRESS, .fd = -1};
    int status = rfaas_agent_ask(what, RFAAS_AGENT_SPREAD, &parts, s->timeout_ns + req->wait_ns, sizeof(rfaas_agent_count), reply);
    if (status)
        return status;
    memcpy(n, reply->data, sizeof *n);
    if (*n == (reply->size - sizeof(rfaas_agent_count)) / sizeof(rfaas_agent_share))
        return RFAAS_OK;
    free(reply->data);
    return rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: the agent's reply has %u bytes for %llu executors", what, reply->size,
                          (unsigned long long)*n);
}

/* Copies the shares of a plan from the i-th on. */
static void copy_shares(const rfaas_reply *r, uint64_t i, uint32_t n, rfaas_agent_share *shares) {
    memcpy(shares, r->data + sizeof(rfaas_agent_count) + i * sizeof *shares, n * sizeof *shares);
    for (i = 0; i < n; i++)
        shares[i].executor[sizeof shares->executor - 1] = 0;
}

static int note_tried(across *a, const char *executor) {
    void *more = realloc(a->tried, (a->n_tried + 1) * sizeof *a->tried);
    if (!more)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    a->tried = more;
    snprintf(a->tried[a->n_tried++], RFAAS_AGENT_ADDRESS, "%s", executor);
    return RFAAS_OK;
}

/* Opens leases for n shares, all at the same time. */
static int open_some(across *a, const rfaas_agent_share *shares, uint32_t n) {
    int status = RFAAS_OK;
    part *parts = calloc(n, sizeof *parts);
    if (!parts)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    if (a->count + n > a->capacity)
        status = rfaas_api_fail(RFAAS_BUSY, 0, "%s: %u workers need more than %zu executors, and there is room for %zu leases", op,
                                a->options->workers, a->count + n - 1, a->capacity);
    for (uint32_t i = 0; i < n && !status; i++) {
        const rfaas_agent_share *share = &shares[i];
        part *p = &parts[i];
        p->options = *a->options;
        if (!share->workers || share->workers > RFAAS_WORKERS_MAX)
            status = rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: %llu workers at %s", op, (unsigned long long)share->workers, share->executor);
        p->options.workers = p->options.workers_min = (uint32_t)share->workers;
        memcpy(p->at, share->executor, sizeof p->at);
        if (!status)
            status = note_tried(a, share->executor);
    }
    if (!status)
        open_parts(a->session, parts, n);
    for (uint32_t i = 0; i < n && parts[i].options.workers; i++) {
        if (!parts[i].status && parts[i].lease) {
            a->leases[a->count++] = parts[i].lease;
            a->left -= parts[i].options.workers < a->left ? parts[i].options.workers : a->left;
        } else if (parts[i].status && !refused(&parts[i]) && !status) {
            status = rfaas_api_fail_code(parts[i].status, 0, parts[i].acquisition.code, "%s", parts[i].text);
        }
    }
    free(parts);
    return status;
}

/* Lets the next round wait for room, also at executors that have refused. They may show room and refuse again, for example because of the
 * tenant's limit. */
static void ask_again(across *a) {
    a->pause = a->pause ? (a->pause * 2 < PAUSE_MAX_NS ? a->pause * 2 : PAUSE_MAX_NS) : PAUSE_MIN_NS;
    int64_t until = dp_now_ns() + a->pause;
    if (a->wait_until < until)
        until = a->wait_until;
    while (dp_now_ns() < until)
        rfaas_agent_wait(until); /* ends early when a message arrives */
    a->n_tried = 0;
}

/* One round: finds executors with room and opens leases there. Without waiting the rounds end, because no executor is asked twice. */
static int round_of(across *a) {
    rfaas_agent_spread req = {.workers = a->left, .cores_per_worker = a->options->cores_per_worker, .memory = a->options->memory,
                              .duration_ns = a->options->duration_ns, .avoid = a->n_tried};
    rfaas_reply plan;
    uint64_t n;
    int64_t left = a->wait_until - dp_now_ns();
    if (!a->n_tried && left > 0)
        req.wait_ns = left;
    int status = ask_shares(a->session, op, &req, a->tried, &plan, &n);
    if (status == RFAAS_BUSY && a->n_tried && left > 0) {
        ask_again(a);
        return RFAAS_OK;
    }
    if (status)
        return status;
    for (uint64_t i = 0; i < n && !status; i += AT_ONCE) {
        rfaas_agent_share shares[AT_ONCE];
        uint32_t some = n - i < AT_ONCE ? (uint32_t)(n - i) : AT_ONCE;
        copy_shares(&plan, i, some, shares);
        status = open_some(a, shares, some);
    }
    free(plan.data);
    return status || n > 0 ? status : rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: an empty plan", op);
}

/* Opens leases on the workers of cached leases, if the session has as many with the same terms. On shm each is a claim, so that nobody else is asked. An
 * executor that has ended its cached workers is asked for new ones. */
static int open_cached(across *a) {
    rfaas_agent_share shares[AT_ONCE];
    rfaas_agent_spec spec;
    int status = rfaas_api_spec(a->options, &spec);
    uint32_t n = status ? 0 : rfaas_api_cached_shares(a->session, &spec, a->capacity < AT_ONCE ? (uint32_t)a->capacity : AT_ONCE, shares);
    if (n)
        status = open_some(a, shares, n);
    a->n_tried = 0; /* these executors may have room for more */
    return status;
}

/* Opens leases in this process for the workers that are left, if the leases permit that. `status` and the thread's error are the reason. */
static int open_here(across *a, int status) {
    rfaas_lease_options o = *a->options;
    rfaas_acquisition refused = {.done = true, .status = status, .code = rfaas_function_code(), .init_failed = rfaas_api_init_failed()};
    snprintf(refused.text, sizeof refused.text, "%s", rfaas_last_error());
    if (!(o.flags & RFAAS_LEASE_LOCAL) || (a->left + RFAAS_WORKERS_MAX - 1) / RFAAS_WORKERS_MAX > a->capacity - a->count)
        return status;
    for (status = RFAAS_OK; a->left && !status; a->left -= o.workers) {
        rfaas_acquisition each = refused;
        o.workers = o.workers_min = a->left < RFAAS_WORKERS_MAX ? a->left : RFAAS_WORKERS_MAX;
        status = rfaas_api_lease_begin(a->session, &o, NULL, &a->leases[a->count], &each);
        if (!status && !(status = rfaas_api_lease_finish(&a->leases[a->count], &each, true)))
            a->count++;
    }
    return status;
}

/* Leases that are opened together have all their workers, because the first of them would take the cores that the others need. */
static int check_workers_min(const char *what, const rfaas_lease_options *o) {
    if (o->workers_min == o->workers)
        return RFAAS_OK;
    return rfaas_api_fail(RFAAS_INVALID, 0, "%s: workers_min %u of %u workers: leases that are opened together have all their workers; set workers_min "
                          "to 0, or open each lease with rfaas_lease_open", what, o->workers_min, o->workers);
}

int rfaas_lease_open_across(rfaas_session *s, const rfaas_lease_options *options, size_t capacity, rfaas_lease *leases[],
                            size_t *count) {
    rfaas_lease_options o;
    int status = rfaas_api_bad_session(s, op);
    if (!status)
        status = rfaas_api_lease_options(options, ACROSS_MAX, &o);
    if (!status)
        status = check_workers_min(op, &o);
    if (status)
        return status;
    if (!leases || !count || !capacity)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op, !leases ? "leases is NULL" : !count ? "count is NULL" : "capacity is 0");
    if (o.executor && *o.executor)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: executor %s is given", op, o.executor);
    o.executor = NULL;
    across a = {.session = s, .options = &o, .leases = leases, .capacity = capacity, .left = o.workers, .wait_until = dp_now_ns() + o.wait_ns};
    o.wait_ns = 0; /* the parts do not wait */
    status = open_cached(&a);
    while (a.left && !status)
        status = round_of(&a);
    if (status)
        status = open_here(&a, status);
    free(a.tried);
    if (!status) {
        *count = a.count;
        return RFAAS_OK;
    }
    char text[1024];
    int32_t code = rfaas_function_code();
    snprintf(text, sizeof text, "%s", rfaas_last_error());
    while (a.count)
        rfaas_lease_release(leases[--a.count]);
    return rfaas_api_fail_code(status, 0, code, "%s", text);
}

int rfaas_places(rfaas_session *s, const rfaas_lease_options *options, size_t count, rfaas_place places[]) {
    static const char what[] = "places";
    rfaas_lease_options o;
    int status = rfaas_api_bad_session(s, what);
    if (!status)
        status = rfaas_api_lease_options(options, RFAAS_WORKERS_MAX, &o);
    if (!status)
        status = check_workers_min(what, &o);
    if (status)
        return status;
    if (!places || !count || count > ACROSS_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, places ? "%s: count %zu, want 1..%d" : "%s: places is NULL", what, count, ACROSS_MAX);
    /* A whole lease counts as one worker with all of its cores. */
    rfaas_agent_spread req = {.workers = count, .cores_per_worker = (uint64_t)o.cores_per_worker * o.workers, .one = 1,
                              .memory = o.memory > UINT64_MAX / o.workers ? UINT64_MAX : o.memory * o.workers, .duration_ns = o.duration_ns, .wait_ns = o.wait_ns};
    if (o.executor && (size_t)snprintf(req.executor, sizeof req.executor, "%s", o.executor) >= sizeof req.executor)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: the executor's address has %zu bytes: %s", what, strlen(o.executor), o.executor);
    rfaas_reply plan;
    uint64_t shares;
    if ((status = ask_shares(s, what, &req, NULL, &plan, &shares)))
        return status;
    size_t n = 0;
    for (uint64_t i = 0; i < shares && n < count && !status; i++) {
        rfaas_agent_share share;
        copy_shares(&plan, i, 1, &share);
        if (strlen(share.executor) >= sizeof places->executor)
            status = rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: executor %s: its address has %zu bytes, a place holds %zu", what, share.executor,
                                    strlen(share.executor), sizeof places->executor - 1);
        for (; share.workers && n < count && !status; share.workers--, n++) {
            memset(&places[n], 0, sizeof *places);
            memcpy(places[n].executor, share.executor, strlen(share.executor));
        }
    }
    free(plan.data);
    return status || n == count ? status : rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: a plan for %zu of %zu leases", what, n, count);
}

int rfaas_lease_open_at(rfaas_session *s, const rfaas_lease_options *options, const rfaas_place *place, rfaas_lease **lease) {
    if (!place || !place->executor[0] || !memchr(place->executor, 0, sizeof place->executor))
        return rfaas_api_fail(RFAAS_INVALID, 0, "lease: place %s", place ? "has no executor's address" : "is NULL");
    return rfaas_api_lease_open(s, options, place->executor, lease);
}
