/* The C API's leases as the program sees them: handles, opening and releasing, looking. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "call.h"

/* Under rfaas_api_mu; entries of `leases` appear and stay, `index` is the place. */
static rfaas_lease *leases[RFAAS_LEASES_MAX];
static bool lease_taken[RFAAS_LEASES_MAX];
static uint32_t lease_next;
static uint64_t lease_epoch;

/* ---- lease handles ---- */

rfaas_lease *rfaas_api_lease_at(uint32_t index) { return __atomic_load_n(&leases[index], __ATOMIC_ACQUIRE); }

static rfaas_lease *take_lease(rfaas_session *s) {
    rfaas_lease *l = NULL;
    pthread_mutex_lock(&rfaas_api_mu);
    for (uint32_t n = 0; n < RFAAS_LEASES_MAX && !l; n++) {
        uint32_t i = lease_next++ % RFAAS_LEASES_MAX;
        if (lease_taken[i])
            continue;
        l = leases[i];
        if (!l) {
            if (!(l = calloc(1, sizeof *l)))
                break;
            pthread_mutex_init(&l->mu, NULL);
            pthread_condattr_t attr;
            pthread_condattr_init(&attr);
            pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
            pthread_cond_init(&l->changed, &attr);
            pthread_condattr_destroy(&attr);
            l->index = i;
            __atomic_store_n(&leases[i], l, __ATOMIC_RELEASE);
        }
        lease_taken[i] = true;
        l->session = s;
        s->opening++;
        lease_epoch++;
        l->request_seq = (uint32_t)(lease_epoch * 0x9e3779b1u) & RFAAS_REQ_SEQ_MASK;
    }
    pthread_mutex_unlock(&rfaas_api_mu);
    return l;
}

uint64_t rfaas_api_new_key(const rfaas_lease *l) {
    pthread_mutex_lock(&rfaas_api_mu);
    uint64_t key = ++lease_epoch << RFAAS_REQ_LEASE_BITS | l->index;
    pthread_mutex_unlock(&rfaas_api_mu);
    return key;
}

/* Everything that a lease holds on this side; the handle can be used again. */
static void destroy_lease(rfaas_lease *l) {
    rfaas_api_free_buffers(l);
    rfaas_api_home_free(l, l->home);
    rfaas_api_local_free(l);
    for (uint32_t i = 0; i < l->requests_used; i++)
        free(l->requests[i].text);
    for (uint32_t i = 0; i < l->n_functions; i++)
        free(l->functions[i]);
    free(l->functions);
    free(l->requests);
    l->functions = NULL;
    l->requests = NULL;
    l->workers = NULL;
    l->n_workers = l->n_functions = l->requests_used = l->requests_free = 0;
    l->sync_worker = l->next_worker = l->replaced = 0;
    l->busy = 0;
    l->leaving = LEAVING_NOT;
    memset(&l->past, 0, sizeof l->past);
    l->news_first = l->news_count = l->news_lost = 0;
    pthread_mutex_lock(&rfaas_api_mu);
    l->session->opening--;
    l->session = NULL;
    lease_taken[l->index] = false;
    pthread_mutex_unlock(&rfaas_api_mu);
}

int rfaas_api_bad_lease(const rfaas_lease *l, const char *op) {
    int status = rfaas_api_down(op);
    if (status)
        return status;
    if (!l)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: lease is NULL", op);
    return rfaas_api_fail(RFAAS_INVALID, 0, "%s: the lease was released", op);
}

static int check_lease(const rfaas_lease *l, const char *op) {
    if (rfaas_api_state == RFAAS_STATE_UP && l && l->magic == RFAAS_LEASE_MAGIC)
        return RFAAS_OK;
    return rfaas_api_bad_lease(l, op);
}

/* ---- opening a lease ---- */

static int check_options(rfaas_lease_options *o, uint32_t most) {
    static const char op[] = "lease";
    if (!o->workers)
        o->workers = 1;
    if (!o->cores_per_worker)
        o->cores_per_worker = 1;
    if (!o->depth)
        o->depth = RFAAS_DEPTH_DEFAULT;
    if (!o->eager)
        o->eager = DP_EAGER_DEFAULT;
    if (!o->bulk)
        o->bulk = DP_BULK_DEFAULT;
    else if (o->bulk == RFAAS_NO_BULK)
        o->bulk = 0;
    if (o->workers > most)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: workers %u, want 1..%u", op, o->workers, most);
    if (o->depth > DP_DEPTH_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: depth %u, want 1..%d", op, o->depth, DP_DEPTH_MAX);
    if (o->eager > DP_EAGER_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: eager %u bytes, want 1..%u", op, o->eager, DP_EAGER_MAX);
    if (o->bulk > DP_BULK_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: bulk %llu bytes, want at most %llu", op,
                              (unsigned long long)o->bulk, (unsigned long long)DP_BULK_MAX);
    if (o->wait_mode > RFAAS_WAIT_WARM)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: wait_mode %u is none of RFAAS_WAIT_*", op, o->wait_mode);
    if (o->duration_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: duration_ns %lld is negative", op, (long long)o->duration_ns);
    if (o->call_limit_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: call_limit_ns %lld is negative", op, (long long)o->call_limit_ns);
    if (o->flags & ~(RFAAS_LEASE_RENEW | RFAAS_LEASE_FAILOVER | RFAAS_LEASE_LOCAL) || o->reserved)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: flags %#x, reserved %#x: unknown bits", op, o->flags, o->reserved);
    if (!o->library && !o->library_data)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: neither library nor library_data is set", op);
    if (!o->library && !o->library_size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: library_size is 0", op);
    if (!o->library && o->library_size > 1u << 30)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: library_size %zu, want at most %u", op, o->library_size, 1u << 30);
    return RFAAS_OK;
}

int rfaas_api_lease_options(const rfaas_lease_options *options, uint32_t most, rfaas_lease_options *out) {
    static const char op[] = "lease";
    if (!options)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options is NULL", op);
    if (options->struct_size < offsetof(rfaas_lease_options, library_data) || options->struct_size > 4096)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.struct_size is %u; start from RFAAS_LEASE_OPTIONS_INIT", op,
                              options->struct_size);
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    memcpy(&o, options, options->struct_size < sizeof o ? options->struct_size : sizeof o);
    o.struct_size = sizeof o;
    *out = o;
    return check_options(out, most);
}

int rfaas_lease_open(rfaas_session *s, const rfaas_lease_options *options, rfaas_lease **lease) {
    return rfaas_api_lease_open(s, options, NULL, lease);
}

int rfaas_api_lease_open(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **lease) {
    static const char op[] = "lease";
    rfaas_lease_options o;
    int status = rfaas_api_bad_session(s, op);
    if (!status)
        status = rfaas_api_lease_options(options, RFAAS_WORKERS_MAX, &o);
    if (status)
        return status;
    if (!lease)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: lease is NULL", op);
    int64_t start = dp_now_ns();
    rfaas_lease *l = take_lease(s);
    if (!l)
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: %d leases are open, that is the limit", op, RFAAS_LEASES_MAX);
    l->n_workers = o.workers;
    l->options = o;
    l->at = at;
    l->requests = calloc((size_t)o.workers * o.depth, sizeof *l->requests);
    rfaas_home *h = rfaas_api_home_new(l);
    if (!h || !l->requests) {
        rfaas_api_home_free(l, h);
        destroy_lease(l);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    }
    l->home = h; /* no event knows the key yet */
    status = o.flags & RFAAS_LEASE_LOCAL ? rfaas_api_local_load(l) : RFAAS_OK;
    if (!status)
        status = rfaas_api_plan(l, h);
    if (!status)
        status = rfaas_api_find_and_grant(l, h);
    if (status) {
        char text[1024];
        snprintf(text, sizeof text, "%s", rfaas_last_error());
        rfaas_api_give_back(h, op);
        int class = dp_status_class(status);
        if (!l->local || (class != RFAAS_CLASS_BUSY && class != RFAAS_CLASS_CONNECTION) || rfaas_api_local_open(l)) {
            destroy_lease(l);
            return rfaas_api_fail(status, 0, "%s", text);
        }
    }
    l->workers = l->home->workers;
    l->cfg = l->home->cfg;
    l->open_ns = dp_now_ns() - start;
    __atomic_store_n(&l->magic, RFAAS_LEASE_MAGIC, __ATOMIC_RELEASE);
    *lease = l;
    return RFAAS_OK;
}

int rfaas_lease_release(rfaas_lease *l) {
    int status = rfaas_api_enter(l, "release");
    if (status)
        return status;
    l->magic = 0;
    rfaas_api_stop_seeking(l);
    status = rfaas_api_release_home(l);
    destroy_lease(l);
    return status;
}

/* ---- looking at a lease ---- */

int rfaas_lease_workers(const rfaas_lease *l) {
    int status = check_lease(l, "lease workers");
    return status ? status : (int)l->n_workers;
}

int rfaas_lease_info(const rfaas_lease *l, rfaas_lease_details *details) {
    static const char op[] = "lease info";
    int status = check_lease(l, op);
    if (status)
        return status;
    if (!details)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: details is NULL", op);
    if (details->struct_size < offsetof(rfaas_lease_details, depth) || details->struct_size > 1 << 16)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: details.struct_size is %u, want sizeof(rfaas_lease_details)", op,
                              details->struct_size);
    rfaas_lease_details d = {.struct_size = details->struct_size,
                             .workers = l->n_workers,
                             .depth = l->cfg.depth,
                             .eager = l->cfg.eager,
                             .bulk = l->cfg.bulk,
                             .lease_id = l->home->lease_id,
                             .functions = l->n_functions,
                             .replaced = l->replaced};
    snprintf(d.node, sizeof d.node, "%.*s", (int)sizeof d.node - 1, l->home->node);
    snprintf(d.executor, sizeof d.executor, "%.*s", (int)sizeof d.executor - 1, l->home->executor);
    memcpy(d.node_name, l->home->node, sizeof d.node_name);
    memcpy(d.executor_address, l->home->executor, sizeof d.executor_address);
    memcpy(d.provider, l->home->provider, sizeof d.provider);
    memcpy(details, &d, details->struct_size < sizeof d ? details->struct_size : sizeof d);
    return RFAAS_OK;
}

int rfaas_worker_info(const rfaas_lease *l, int worker, rfaas_worker_details *details) {
    static const char op[] = "worker info";
    int status = check_lease(l, op);
    if (status)
        return status;
    if (!details)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: details is NULL", op);
    if (details->struct_size < offsetof(rfaas_worker_details, calls) || details->struct_size > 1 << 16)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: details.struct_size is %u, want sizeof(rfaas_worker_details)", op,
                              details->struct_size);
    if (worker < 0 || (uint32_t)worker >= l->n_workers)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: worker %d, the lease has workers 0..%u", op, worker, l->n_workers - 1);
    if (!l->home->ep)
        return rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: the lease has no workers; its calls run in this process", op);
    rfaas_msg req = {0}, reply;
    pthread_mutex_lock((pthread_mutex_t *)&l->mu); /* another thread may be moving the lease */
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->home->key);
    pthread_mutex_unlock((pthread_mutex_t *)&l->mu);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKER, (uint64_t)worker);
    if ((status = rfaas_api_ask(op, RFAAS_OP_INSPECT, &req, &reply)))
        return status;
    rfaas_worker_details d = {.struct_size = details->struct_size,
                              .pid = (int32_t)rfaas_msg_get_u64(&reply, RFAAS_TAG_PID, 0),
                              .calls = rfaas_msg_nth_u64(&reply, RFAAS_TAG_COUNT, 0, 0),
                              .failed = rfaas_msg_nth_u64(&reply, RFAAS_TAG_COUNT, 1, 0),
                              .refused = rfaas_msg_nth_u64(&reply, RFAAS_TAG_COUNT, 2, 0),
                              .bytes_in = rfaas_msg_nth_u64(&reply, RFAAS_TAG_COUNT, 3, 0),
                              .bytes_out = rfaas_msg_nth_u64(&reply, RFAAS_TAG_COUNT, 4, 0)};
    rfaas_msg_get_str(&reply, RFAAS_TAG_FUNCTION, d.running, sizeof d.running);
    const uint8_t *output = rfaas_msg_find(&reply, RFAAS_TAG_OUTPUT, 0, &d.output_size);
    if (d.output_size > sizeof d.output - 1)
        d.output_size = sizeof d.output - 1;
    if (output)
        memcpy(d.output, output, d.output_size);
    rfaas_msg_free(&reply);
    memcpy(details, &d, details->struct_size < sizeof d ? details->struct_size : sizeof d);
    return RFAAS_OK;
}

int rfaas_lease_function(const rfaas_lease *l, const char *name, rfaas_function *function) {
    static const char op[] = "find function";
    int status = check_lease(l, op);
    if (status)
        return status;
    if (!name || !function)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s is NULL", op, name ? "function" : "name");
    for (uint32_t i = 0; i < l->n_functions; i++)
        if (strcmp(l->functions[i], name) == 0) {
            *function = i;
            return RFAAS_OK;
        }
    if (!l->home->ep) { /* its names come one by one */
        status = rfaas_api_local_function((rfaas_lease *)l, name);
        *function = status ? *function : l->n_functions - 1;
        return status;
    }
    char list[512];
    size_t at = 0;
    list[0] = 0;
    for (uint32_t i = 0; i < l->n_functions && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", l->functions[i]);
    return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: \"%.128s\" is not in the library, which has %u: %s%s", op, name,
                          l->n_functions, list, at >= sizeof list ? " ..." : "");
}

/* ---- statistics ---- */

int rfaas_lease_statistics(rfaas_lease *l, rfaas_statistics *stats) {
    static const char op[] = "lease statistics";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (!stats)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: stats is NULL", op));
    if (stats->struct_size < offsetof(rfaas_statistics, calls) || stats->struct_size > 1 << 16)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: stats.struct_size is %u, want sizeof(rfaas_statistics)", op,
                                       stats->struct_size));
    rfaas_statistics s = l->past;
    s.struct_size = stats->struct_size;
    s.replaced = l->replaced;
    s.open_ns = l->open_ns;
    s.kept = rfaas_api_kept(l->session);
    rfaas_api_count(l->home, &s);
    memcpy(stats, &s, stats->struct_size < sizeof s ? stats->struct_size : sizeof s);
    return leave(l, RFAAS_OK);
}
