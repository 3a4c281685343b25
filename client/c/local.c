/* Functions in the calling process, for leases with RFAAS_LEASE_LOCAL that have no executor: the same library, opened by
 * dlopen (local_library.h), called on the caller's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "call.h"
#include "dp_elf.h"

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

bool rfaas_api_local_suits(const rfaas_lease *l, int status) {
    int class = dp_status_class(status);
    bool absent = class == RFAAS_CLASS_CREDENTIAL || (class == RFAAS_CLASS_INVALID && l->session->nowhere && !*l->spec.executor);
    return l->local && (class == RFAAS_CLASS_BUSY || class == RFAAS_CLASS_CONNECTION || class == RFAAS_CLASS_LEASE ||
                        class == RFAAS_CLASS_UNSUPPORTED || status == RFAAS_DEADLINE || (absent && l->session->open.flags & RFAAS_SESSION_LOCAL));
}

void rfaas_api_local_because(rfaas_lease *l, const char *why, bool event) {
    rfaas_agent_event here = {.kind = RFAAS_EVENT_LOCAL};
    pthread_mutex_lock(&l->mu);
    snprintf(l->local_reason, sizeof l->local_reason, "%.*s", (int)sizeof l->local_reason - 1, why);
    memcpy(here.text, l->local_reason, sizeof l->local_reason);
    if (event)
        rfaas_api_keep_news(l, &here);
    pthread_mutex_unlock(&l->mu);
}

/* Keeps the names that dp_elf_functions has written. */
static int keep_names(rfaas_lease *l, const char *names, uint32_t count) {
    if (!(l->functions = calloc(count, sizeof *l->functions)))
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    for (; l->n_functions < count; l->n_functions++, names += strlen(names) + 1)
        if (!(l->functions[l->n_functions] = strdup(names)))
            return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    return RFAAS_OK;
}

/* Reads the names of the library's functions as executors do, so that the numbers stay valid when the lease moves. */
static int read_functions(rfaas_lease *l) {
    dp_error err = {0};
    uint32_t count, bytes;
    int status = RFAAS_FATAL;
    struct stat st;
    bool there = !fstat(l->library_fd, &st) && st.st_size > 0;
    void *file = there ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, l->library_fd, 0) : MAP_FAILED;
    dp_elf_work *work = calloc(1, sizeof *work);
    char *names = malloc(DP_ELF_NAMES_MAX);
    if (file == MAP_FAILED || !work || !names)
        rfaas_api_fail(status, 0, "lease: no memory to read the names of the library's functions");
    else if ((status = dp_elf_functions(file, (uint64_t)st.st_size, NULL, work, names, &count, &bytes, &err)))
        rfaas_api_fail_dp("lease: read the library", &err);
    else
        status = keep_names(l, names, count);
    free(names);
    free(work);
    if (file != MAP_FAILED)
        munmap(file, (size_t)st.st_size);
    return status;
}

static uint64_t whole_lines(uint64_t size) { return (size + 63) & ~63ull; } /* as dp_channel_create rounds */

uint64_t rfaas_api_local_limit(const rfaas_lease *l) {
    return whole_lines(l->options.bulk > l->options.eager ? l->options.bulk : l->options.eager);
}

int rfaas_api_local_open(rfaas_lease *l, const char *why) {
    int status = l->functions ? RFAAS_OK : rfaas_api_open_library(l);
    if (!status && !l->functions)
        status = read_functions(l);
    if (status)
        return status;
    rfaas_grant *h = rfaas_api_grant_new(l);
    if (!h)
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    rfaas_api_grant_free(l, l->grant);
    h->cfg = (dp_channel_config){.depth = l->options.depth, .eager = (uint32_t)whole_lines(l->options.eager), .bulk = whole_lines(l->options.bulk)};
    snprintf(h->provider, sizeof h->provider, "local");
    gethostname(h->node, sizeof h->node - 1);
    l->grant = h;
    l->line->draining = RFAAS_AGENT_DRAIN_LOCAL;
    rfaas_api_local_because(l, why, true);
    return rfaas_api_init_here(l);
}

int rfaas_api_here(rfaas_lease *l, const char *op, const call_args *a, uint32_t *got) {
    rfaas_function fn = a->fn;
    uint32_t room = cut_capacity(l, a->room);
    note_no_worker();
    rfaas_call_pieces whole = {.in = {&(dp_piece){(void *)a->in, a->in_size, 1, 0}, 1}, .out = {&(dp_piece){a->out, room, 1, 0}, 1}};
    const rfaas_call_pieces *pieces = a->pieces ? a->pieces : &whole;
    const char *first = l->functions[dp_chain_first(fn)], *second = dp_is_chain(fn) ? l->functions[dp_chain_second(fn)] : NULL;
    rfaas_local_fn *f = rfaas_local_find(l->local, first), *then = second ? rfaas_local_find(l->local, second) : NULL;
    if (!f || (second && !then))
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s %s: the library that this process has loaded lacks the function", op, f ? second : first);
    if (a->in_size > carried(l))
        return rfaas_api_too_large(l, op, fn, a->in_size, room);
    uint64_t limit = rfaas_api_local_limit(l);
    pthread_mutex_lock(&l->local_mu); /* one call at a time, as in a worker */
    rfaas_session *before = rfaas_api_tables_of(l->session); /* a function may use a lease of its own */
    const char *paths = rfaas_api_bundle_of(l->spec.bundle);
    rfaas_local_failure failure;
    int init = rfaas_api_init_here(l), status = init;
    if (!init)
        status = rfaas_local_call(l->local, f, then, limit, &pieces->in, a->in_size, &pieces->out, room, got, &failure);
    rfaas_api_bundle_of(paths);
    rfaas_api_tables_of(before);
    pthread_mutex_unlock(&l->local_mu);
    if (init)
        return init;
    if (status == RFAAS_FATAL)
        return rfaas_api_fail(status, 0, "%s: no memory for a payload of %u bytes and a result of up to %u", op, a->in_size, room);
    __atomic_add_fetch(&l->past.local, 1, __ATOMIC_RELAXED);
    if (status == RFAAS_FUNCTION_FAILED)
        return rfaas_api_fail_code(status, RFAAS_MAYBE_EXECUTED, failure.code, "%s%s in this process failed%s%s",
                                   failure.second ? second : first,
                                   !second ? "" : failure.second ? ", the second function of a chain," : ", the first function of a chain,",
                                   *failure.text ? ": " : "", failure.text);
    if (status)
        return rfaas_api_fail(status, RFAAS_MAYBE_EXECUTED, "%s %s in this process: %s", op, function_name(l, fn),
                              rfaas_strerror(status));
    return RFAAS_OK;
}
