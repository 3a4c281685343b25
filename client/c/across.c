/* Workers wherever they fit, as one call: a lease at each of several executors, opened at the same time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

#define ACROSS_MAX 65536  /* workers */
#define AT_ONCE 16        /* leases that are opened at the same time */

static const char op[] = "lease across executors";

/* One executor's part. */
typedef struct part {
    rfaas_session *session;
    rfaas_lease_options options;
    char at[256];
    rfaas_lease *lease;
    int status;
    char text[512];
} part;

static void *open_part(void *arg) {
    part *p = arg;
    p->status = rfaas_api_lease_open(p->session, &p->options, p->at, &p->lease);
    if (p->status)
        snprintf(p->text, sizeof p->text, "%s", rfaas_last_error()); /* this thread's */
    return NULL;
}

/* Opens up to AT_ONCE parts. Where no thread can be had this one does it. */
static void open_parts(part *parts, uint32_t n) {
    pthread_t threads[AT_ONCE];
    bool started[AT_ONCE] = {0};
    for (uint32_t i = 1; i < n; i++)
        if (!(started[i] = !pthread_create(&threads[i], NULL, open_part, &parts[i])))
            open_part(&parts[i]);
    open_part(&parts[0]);
    for (uint32_t i = 1; i < n; i++)
        if (started[i])
            pthread_join(threads[i], NULL);
}

/* Whether others may be asked when one has failed so. */
static bool refused(int status) {
    int class = dp_status_class(status);
    return class == RFAAS_CLASS_BUSY || class == RFAAS_CLASS_CONNECTION;
}

typedef struct across {
    rfaas_session *session;
    const rfaas_lease_options *options;
    rfaas_lease **leases;
    size_t capacity, count;
    uint32_t left;     /* workers */
    rfaas_msg tried;   /* EXECUTOR... */
} across;

/* Opens those of a plan's executors from `first` on that go at once. *next is the first one that is left. */
static int open_some(across *a, const rfaas_msg *plan, uint32_t first, uint32_t *next) {
    part parts[AT_ONCE];
    uint32_t n = 0, len = 0;
    int status = RFAAS_OK;
    for (; n < AT_ONCE; n++) {
        const uint8_t *at = rfaas_msg_find(plan, RFAAS_TAG_EXECUTOR, first + n, &len);
        uint64_t workers = rfaas_msg_nth_u64(plan, RFAAS_TAG_WORKERS, first + n, 0);
        if (!at)
            break;
        part *p = &parts[n];
        *p = (part){.session = a->session, .options = *a->options};
        if (len >= sizeof p->at || !workers || workers > RFAAS_WORKERS_MAX)
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: %llu workers at an address of %u bytes", op,
                                  (unsigned long long)workers, len);
        memcpy(p->at, at, len);
        p->options.workers = (uint32_t)workers;
        rfaas_msg_bytes(&a->tried, RFAAS_TAG_EXECUTOR, at, len);
    }
    *next = first + n;
    if (n == 0)
        return RFAAS_OK;
    if (a->count + n > a->capacity)
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: %u workers need more than %zu executors, and there is room for %zu leases", op,
                              a->options->workers, a->count + n - 1, a->capacity);
    open_parts(parts, n);
    for (uint32_t i = 0; i < n; i++) {
        if (!parts[i].status) {
            a->leases[a->count++] = parts[i].lease;
            a->left -= parts[i].options.workers < a->left ? parts[i].options.workers : a->left;
        } else if (!refused(parts[i].status) && !status) {
            status = rfaas_api_fail(parts[i].status, 0, "%s", parts[i].text);
        }
    }
    return status;
}

/* One round: asks where there is room, and there for leases. Ends, since no executor is asked twice. */
static int round_of(across *a) {
    rfaas_msg req = {0}, plan;
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, a->session->id);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKERS, a->left);
    rfaas_msg_u64(&req, RFAAS_TAG_CORES, a->options->cores_per_worker);
    rfaas_msg_u64(&req, RFAAS_TAG_MEMORY, a->options->memory);
    rfaas_msg_u64(&req, RFAAS_TAG_DURATION_NS, (uint64_t)a->options->duration_ns);
    uint32_t len = 0;
    const uint8_t *at;
    for (uint32_t i = 0; (at = rfaas_msg_find(&a->tried, RFAAS_TAG_EXECUTOR, i, &len)); i++)
        rfaas_msg_bytes(&req, RFAAS_TAG_EXECUTOR, at, len);
    int status = rfaas_api_ask(op, RFAAS_OP_SPREAD, &req, &plan);
    if (status)
        return status;
    uint32_t i = 0, next = 0;
    do {
        i = next;
        status = open_some(a, &plan, i, &next);
    } while (!status && next > i);
    rfaas_msg_free(&plan);
    return status || next > 0 ? status : rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: an empty plan", op);
}

int rfaas_lease_open_across(rfaas_session *s, const rfaas_lease_options *options, size_t capacity, rfaas_lease *leases[],
                            size_t *count) {
    rfaas_lease_options o;
    int status = rfaas_api_bad_session(s, op);
    if (!status)
        status = rfaas_api_lease_options(options, ACROSS_MAX, &o);
    if (status)
        return status;
    if (!leases || !count || !capacity)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op, !leases ? "leases is NULL" : !count ? "count is NULL" : "capacity is 0");
    if (o.executor && *o.executor)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: executor %s is given", op, o.executor);
    o.executor = NULL;
    across a = {.session = s, .options = &o, .leases = leases, .capacity = capacity, .left = o.workers};
    while (a.left && !status)
        status = round_of(&a);
    rfaas_msg_free(&a.tried);
    if (!status) {
        *count = a.count;
        return RFAAS_OK;
    }
    char text[1024];
    snprintf(text, sizeof text, "%s", rfaas_last_error());
    while (a.count)
        rfaas_lease_release(leases[--a.count]);
    return rfaas_api_fail(status, 0, "%s", text);
}

int rfaas_places(rfaas_session *s, const rfaas_lease_options *options, size_t count, rfaas_place places[]) {
    static const char what[] = "places";
    rfaas_lease_options o;
    int status = rfaas_api_bad_session(s, what);
    if (!status)
        status = rfaas_api_lease_options(options, RFAAS_WORKERS_MAX, &o);
    if (status)
        return status;
    if (!places || !count || count > ACROSS_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, places ? "%s: count %zu, want 1..%d" : "%s: places is NULL", what, count, ACROSS_MAX);
    rfaas_msg req = {0}, plan;
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, s->id);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKERS, count); /* a whole lease for each */
    rfaas_msg_u64(&req, RFAAS_TAG_CORES, (uint64_t)o.cores_per_worker * o.workers);
    rfaas_msg_u64(&req, RFAAS_TAG_MEMORY, o.memory > UINT64_MAX / o.workers ? UINT64_MAX : o.memory * o.workers);
    rfaas_msg_u64(&req, RFAAS_TAG_DURATION_NS, (uint64_t)o.duration_ns);
    rfaas_msg_str(&req, RFAAS_TAG_AT, o.executor ? o.executor : "");
    if ((status = rfaas_api_ask(what, RFAAS_OP_SPREAD, &req, &plan)))
        return status;
    size_t n = 0;
    for (uint32_t i = 0, len = 0; n < count; i++) {
        const uint8_t *at = rfaas_msg_find(&plan, RFAAS_TAG_EXECUTOR, i, &len);
        uint64_t fits = rfaas_msg_nth_u64(&plan, RFAAS_TAG_WORKERS, i, 0);
        if (at && len >= sizeof places->executor) {
            status = rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: executor %.*s: its address has %u bytes, a place holds %zu", what,
                                    (int)len, (const char *)at, len, sizeof places->executor - 1);
            rfaas_msg_free(&plan);
            return status;
        }
        if (!at) {
            rfaas_msg_free(&plan);
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: a plan for %zu of %zu leases", what, n, count);
        }
        for (; fits && n < count; fits--, n++) {
            memset(&places[n], 0, sizeof *places);
            memcpy(places[n].executor, at, len);
        }
    }
    rfaas_msg_free(&plan);
    return RFAAS_OK;
}

int rfaas_lease_open_at(rfaas_session *s, const rfaas_lease_options *options, const rfaas_place *place, rfaas_lease **lease) {
    if (!place || !place->executor[0] || !memchr(place->executor, 0, sizeof place->executor))
        return rfaas_api_fail(RFAAS_INVALID, 0, "lease: place %s", place ? "has no executor's address" : "is NULL");
    return rfaas_api_lease_open(s, options, place->executor, lease);
}
