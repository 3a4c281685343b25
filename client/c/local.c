/* Functions in the calling process, for leases with RFAAS_LEASE_LOCAL that have no executor: the same library, opened by
 * dlopen (local_library.h), called on the caller's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "call.h"

#define FUNCTIONS_MAX 65536 /* numbers of functions have 16 bits */

int rfaas_api_local_load(rfaas_lease *l) {
    const rfaas_lease_options *o = &l->options;
    dp_error e;
    int status = rfaas_local_open(o->library, o->library_data, o->library_size, &l->local, &e);
    if (!status)
        rfaas_local_finders(l->local, rfaas_api_table_here, rfaas_api_bundle_here);
    return status ? rfaas_api_fail(status, 0, "lease: it cannot be loaded into this process, as RFAAS_LEASE_LOCAL wants: %s", e.msg)
                  : RFAAS_OK;
}

void rfaas_api_local_free(rfaas_lease *l) {
    rfaas_local_close(l->local);
    l->local = NULL;
}

int rfaas_api_local_open(rfaas_lease *l) {
    rfaas_grant *h = rfaas_api_grant_new(l);
    if (!h)
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    rfaas_api_grant_free(l, l->grant);
    h->cfg = (dp_channel_config){.depth = l->options.depth, .eager = l->options.eager, .bulk = l->options.bulk};
    snprintf(h->provider, sizeof h->provider, "local");
    gethostname(h->node, sizeof h->node - 1);
    l->grant = h;
    l->line->draining = RFAAS_AGENT_DRAIN_LOCAL;
    return RFAAS_OK;
}

int rfaas_api_local_function(rfaas_lease *l, const char *name) {
    if (!rfaas_local_find(l->local, name))
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "find function: \"%.128s\" is not in the library", name);
    /* Other threads may read the names: the array stays where it is. */
    if (!l->functions)
        l->functions = calloc(FUNCTIONS_MAX, sizeof *l->functions);
    char *copy = strdup(name);
    if (!l->functions || !copy || l->n_functions == FUNCTIONS_MAX) {
        free(copy);
        return rfaas_api_fail(RFAAS_FATAL, 0, "find function: out of memory, or more than %d functions", FUNCTIONS_MAX);
    }
    l->functions[l->n_functions] = copy;
    __atomic_store_n(&l->n_functions, l->n_functions + 1, __ATOMIC_RELEASE);
    return RFAAS_OK;
}

int rfaas_api_here(rfaas_lease *l, const char *op, const call_args *a, uint32_t *got) {
    rfaas_function fn = a->fn;
    uint32_t room = cut_capacity(l, a->room);
    rfaas_call_pieces whole = {.in = {&(dp_piece){(void *)a->in, a->in_size, 1, 0}, 1}, .out = {&(dp_piece){a->out, room, 1, 0}, 1}};
    const rfaas_call_pieces *pieces = a->pieces ? a->pieces : &whole;
    rfaas_local_fn *f = rfaas_local_find(l->local, l->functions[fn]);
    if (!f)
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s %s: not in the library as this process has it", op, l->functions[fn]);
    uint64_t limit = l->cfg.bulk > l->cfg.eager ? l->cfg.bulk : l->cfg.eager;
    pthread_mutex_lock(&l->local_mu); /* one call at a time, as in a worker */
    rfaas_session *before = rfaas_api_tables_of(l->session); /* a function may use a lease of its own */
    const char *paths = rfaas_api_bundle_of(l->spec.bundle);
    rfaas_local_failure failure;
    int init = rfaas_api_init_here(l), status = init;
    if (!init)
        status = rfaas_local_call(l->local, f, limit, &pieces->in, a->in_size, &pieces->out, room, got, &failure);
    rfaas_api_bundle_of(paths);
    rfaas_api_tables_of(before);
    pthread_mutex_unlock(&l->local_mu);
    if (init)
        return init;
    if (status == RFAAS_TOO_LARGE)
        return rfaas_api_too_large(l, op, fn, a->in_size, room);
    if (status == RFAAS_FATAL)
        return rfaas_api_fail(status, 0, "%s: no memory for payload and result of %llu bytes", op, (unsigned long long)limit);
    __atomic_add_fetch(&l->past.local, 1, __ATOMIC_RELAXED);
    if (status == RFAAS_FUNCTION_FAILED)
        return rfaas_api_fail_code(status, RFAAS_MAYBE_EXECUTED, failure.code, "%s in this process failed%s%s", l->functions[fn],
                                   *failure.text ? ": " : "", failure.text);
    if (status)
        return rfaas_api_fail(status, RFAAS_MAYBE_EXECUTED, "%s %s in this process: %s", op, l->functions[fn],
                              rfaas_strerror(status));
    return RFAAS_OK;
}
