/* What a program can ask of a lease: its workers, executor, functions, state and statistics. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "call.h"

static int check_lease(const rfaas_lease *l, const char *op) {
    return usable(l) ? RFAAS_OK : rfaas_api_bad_lease(l, op);
}

int rfaas_lease_workers(const rfaas_lease *l) {
    int status = check_lease(l, "lease workers");
    if (status)
        return status;
    rfaas_api_look_for_workers((rfaas_lease *)l);
    return (int)rfaas_api_workers(l);
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
    rfaas_api_look_for_workers((rfaas_lease *)l);
    pthread_mutex_lock((pthread_mutex_t *)&l->mu); /* another thread may be moving the lease, or releasing it */
    if (!l->grant) {
        pthread_mutex_unlock((pthread_mutex_t *)&l->mu);
        return rfaas_api_bad_lease(l, op);
    }
    rfaas_lease_details d = {.struct_size = details->struct_size,
                             .workers = rfaas_api_workers(l),
                             .workers_wanted = l->wanted,
                             .depth = l->cfg.depth,
                             .eager = l->cfg.eager,
                             .bulk = l->cfg.bulk,
                             .lease_id = l->grant->lease_id,
                             .functions = l->n_functions,
                             .replaced = __atomic_load_n(&l->replaced, __ATOMIC_RELAXED)};
    snprintf(d.node, sizeof d.node, "%.*s", (int)sizeof d.node - 1, l->grant->node);
    snprintf(d.executor, sizeof d.executor, "%.*s", (int)sizeof d.executor - 1, l->grant->executor);
    memcpy(d.node_name, l->grant->node, sizeof d.node_name);
    memcpy(d.executor_address, l->grant->executor, sizeof d.executor_address);
    if (__atomic_load_n(&l->line->draining, __ATOMIC_RELAXED) == RFAAS_AGENT_DRAIN_LOCAL) {
        snprintf(d.provider, sizeof d.provider, "local");
        memcpy(d.local_reason, l->local_reason, sizeof d.local_reason);
    } else {
        memcpy(d.provider, l->grant->provider, sizeof d.provider);
    }
    int64_t left = l->grant->ep && l->grant->until_ns ? l->grant->until_ns - dp_now_ns() : 0;
    d.left_ns = left > 0 && !l->grant->ended ? left : 0;
    pthread_mutex_unlock((pthread_mutex_t *)&l->mu);
    memcpy(details, &d, details->struct_size < sizeof d ? details->struct_size : sizeof d);
    return RFAAS_OK;
}

int rfaas_lease_status(const rfaas_lease *lease) {
    static const char op[] = "lease";
    rfaas_lease *l = (rfaas_lease *)lease;
    int status = check_lease(l, op);
    if (status)
        return status;
    rfaas_agent_look();
    if (rfaas_api_fails_over(l))
        return RFAAS_OK;
    return rfaas_api_fail_ended(l, op);
}

int rfaas_worker_origin(const rfaas_lease *lease, int worker, rfaas_worker_start *start) {
    static const char op[] = "worker start";
    rfaas_lease *l = (rfaas_lease *)lease;
    int status = check_lease(l, op);
    if (status)
        return status;
    if (!start)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: start is NULL", op);
    if (start->struct_size < offsetof(rfaas_worker_start, fork_ns) || start->struct_size > 1 << 16)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: start.struct_size is %u, want sizeof(rfaas_worker_start)", op, start->struct_size);
    if (worker < 0 || (uint32_t)worker >= l->n_workers)
        return rfaas_api_no_worker(l, op, worker);
    rfaas_worker_start s = {.pid = getpid()};
    pthread_mutex_lock(&l->mu); /* another thread may be moving the lease, or releasing it */
    if (!l->grant) {
        pthread_mutex_unlock(&l->mu);
        return rfaas_api_bad_lease(l, op);
    }
    if (l->grant->ep) {
        s = l->grant->workers[worker].start;
        s.pid = (int32_t)l->grant->workers[worker].pid;
    }
    pthread_mutex_unlock(&l->mu);
    s.struct_size = start->struct_size;
    memcpy(start, &s, start->struct_size < sizeof s ? start->struct_size : sizeof s);
    return RFAAS_OK;
}

const char *rfaas_lease_function_name(const rfaas_lease *l, rfaas_function function) {
    rfaas_lease *mine = (rfaas_lease *)l;
    if (rfaas_api_enter(mine, "function name"))
        return NULL;
    const char *name = function < l->n_functions ? l->functions[function] : NULL;
    leave_uncounted(mine, RFAAS_OK);
    return name;
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
        return rfaas_api_no_worker(l, op, worker);
    pthread_mutex_lock((pthread_mutex_t *)&l->mu); /* another thread may be moving the lease, or releasing it */
    bool workers = l->grant && l->grant->ep;
    uint64_t key = l->grant ? l->grant->key : 0;
    pthread_mutex_unlock((pthread_mutex_t *)&l->mu);
    if (!workers)
        return rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: the lease has no workers; its calls run in this process", op);
    rfaas_agent_worker_name req = {.key = key, .worker = (uint32_t)worker};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply;
    if ((status = rfaas_agent_ask(op, RFAAS_AGENT_INSPECT, &parts, l->session->timeout_ns, sizeof(rfaas_agent_inspection), &reply)))
        return status;
    const rfaas_agent_inspection *i = (const rfaas_agent_inspection *)reply.data;
    rfaas_worker_details d = {.struct_size = details->struct_size, .pid = i->pid, .calls = i->calls, .failed = i->failed,
                              .refused = i->refused, .bytes_in = i->bytes_in, .bytes_out = i->bytes_out,
                              .output_size = i->output_size < sizeof i->output ? i->output_size : sizeof i->output};
    snprintf(d.running, sizeof d.running, "%.*s", (int)sizeof i->running - 1, i->running);
    memcpy(d.output, i->output, d.output_size);
    free(reply.data);
    memcpy(details, &d, details->struct_size < sizeof d ? details->struct_size : sizeof d);
    return RFAAS_OK;
}

int rfaas_lease_function(const rfaas_lease *l, const char *name, rfaas_function *function) {
    static const char op[] = "find function";
    rfaas_lease *mine = (rfaas_lease *)l;
    int status = rfaas_api_enter(mine, op);
    if (status)
        return status;
    if (!name || !function)
        return leave_uncounted(mine, rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s is NULL", op, name ? "function" : "name"));
    for (uint32_t i = 0; i < l->n_functions; i++)
        if (strcmp(l->functions[i], name) == 0) {
            *function = i;
            return leave_uncounted(mine, RFAAS_OK);
        }
    return leave_uncounted(mine, rfaas_api_no_function(l, op, name));
}

int rfaas_lease_chain(const rfaas_lease *l, rfaas_function first, rfaas_function second, rfaas_function *chain) {
    static const char op[] = "chain";
    rfaas_lease *mine = (rfaas_lease *)l;
    int status = rfaas_api_enter(mine, op);
    if (status)
        return status;
    uint32_t n = l->n_functions;
    if (!chain)
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: chain is NULL", op);
    else if (dp_is_chain(first) || dp_is_chain(second))
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: function %#x is a chain itself, and a chain has two functions of the library. Call the third "
                                "function with the chain's result", op, dp_is_chain(first) ? first : second);
    else if (first >= n || second >= n)
        status = rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: function %u, the library has functions 0..%u", op, first < n ? second : first, n - 1);
    else if (second > DP_CHAIN_SECOND_MAX)
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: function %u cannot be the second of a chain, because its index is above %u", op, second,
                                DP_CHAIN_SECOND_MAX);
    else
        *chain = DP_CHAIN(first, second);
    return leave_uncounted(mine, status);
}

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
    if ((status = rfaas_api_take_all(l, op, 0)))
        return leave(l, status);
    rfaas_statistics s = l->past;
    s.struct_size = stats->struct_size;
    s.replaced = l->replaced;
    s.open_ns = l->open_ns;
    s.cached_leases = rfaas_api_cached(l->session);
    rfaas_api_count(l->grant, &s);
    rfaas_api_put_all(l);
    memcpy(stats, &s, stats->struct_size < sizeof s ? stats->struct_size : sizeof s);
    return leave(l, RFAAS_OK);
}
