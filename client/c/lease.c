/* Leases of the C API: handles, opening, releasing. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "call.h"

#define HANDLES_FIRST 64 /* divides RFAAS_LEASES_MAX */

/* Under rfaas_api_mu. An entry of `leases` is never removed while the library runs; its place is the lease's `index`. The first n_handles are used in
 * turn. A released handle is not used for the next HANDLES_FIRST - 1 leases. If no handle is left then, their number doubles. */
static rfaas_lease *leases[RFAAS_LEASES_MAX];
static bool lease_taken[RFAAS_LEASES_MAX];
static uint64_t lease_free_at[RFAAS_LEASES_MAX]; /* leases_opened from which a handle may be used again */
static uint64_t leases_opened;
static uint32_t lease_next, n_handles = HANDLES_FIRST;
static uint64_t lease_epoch;

/* ---- lease handles ---- */

rfaas_lease *rfaas_api_lease_at(uint32_t index) { return __atomic_load_n(&leases[index], __ATOMIC_ACQUIRE); }

/* Returns the place of a free handle; RFAAS_LEASES_MAX if there is none. */
static uint32_t free_handle(void) {
    for (uint32_t n = 0; n < n_handles; n++) {
        uint32_t i = lease_next++ % n_handles;
        if (!lease_taken[i] && leases_opened >= lease_free_at[i])
            return i;
    }
    if (n_handles == RFAAS_LEASES_MAX) {
        for (uint32_t i = 0; i < n_handles; i++)
            if (!lease_taken[i]) /* rather than none */
                return i;
        return n_handles;
    }
    lease_next = n_handles;
    n_handles *= 2;
    return lease_next++;
}

/* Returns the handle at a place, which it makes for the first lease there; NULL without memory. */
static rfaas_lease *handle_at(uint32_t i) {
    rfaas_lease *l = leases[i];
    if (!l && (l = calloc(1, sizeof *l))) {
        pthread_mutex_init(&l->mu, NULL);
        rfaas_api_threads_init(l);
        l->index = i;
        __atomic_store_n(&leases[i], l, __ATOMIC_RELEASE);
    }
    return l;
}

static rfaas_lease *take_lease(rfaas_session *s) {
    pthread_mutex_lock(&rfaas_api_mu);
    uint32_t i = free_handle();
    rfaas_lease *l = i < RFAAS_LEASES_MAX ? handle_at(i) : NULL;
    if (l) {
        lease_taken[i] = true;
        leases_opened++;
        l->session = s;
        l->line = &rfaas_agent_shared->leases[i];
        l->line->busy = 0;
        l->line->draining = RFAAS_AGENT_DRAIN_NOT;
        l->library_fd = -1;
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

void rfaas_api_each_lease(void (*fn)(rfaas_lease *l)) {
    for (uint32_t i = 0; i < RFAAS_LEASES_MAX; i++) {
        rfaas_lease *l = rfaas_api_lease_at(i);
        if (l)
            fn(l);
    }
}

void rfaas_api_forget_leases(void) {
    for (uint32_t i = 0; i < RFAAS_LEASES_MAX; i++) {
        if (leases[i])
            leases[i]->magic = 0;
        leases[i] = NULL;
        lease_taken[i] = false;
    }
    rfaas_api_forget_cached();
    rfaas_api_forget_searches();
}

/* Frees everything that a lease holds in this process, and lets the handle be used again. */
static void destroy_lease(rfaas_lease *l) {
    rfaas_api_forget_claim(l);
    rfaas_api_free_buffers(l);
    rfaas_api_grant_free(l, l->grant);
    rfaas_api_local_free(l);
    rfaas_api_init_free(l);
    for (uint32_t i = 0; i < l->requests_used; i++) {
        free(l->requests[i].text);
        if (l->requests[i].pieces)
            free(l->requests[i].pieces->rest);
        free(l->requests[i].pieces);
    }
    for (uint32_t i = 0; i < l->n_functions; i++)
        free(l->functions[i]);
    free(l->functions);
    free(l->requests);
    l->functions = NULL;
    l->requests = NULL;
    l->workers = NULL;
    l->n_workers = l->wanted = l->grows = l->n_functions = l->requests_used = l->requests_free = 0;
    l->sync_worker = l->next_worker = l->replaced = 0;
    l->line->busy = 0;
    l->line->key = 0;
    l->draining_reason[0] = l->local_reason[0] = l->seed_name[0] = l->seed_at[0] = 0;
    if (l->library_fd >= 0)
        close(l->library_fd);
    l->library_fd = -1;
    l->entered = 0;
    l->grow_at = 0;
    rfaas_api_threads_reset(l);
    rfaas_api_descriptor_free(l); /* only now, because its thread may wait for this one to leave */
    memset(&l->past, 0, sizeof l->past);
    l->news_first = l->news_count = l->news_lost = 0;
    pthread_mutex_lock(&rfaas_api_mu);
    l->session->opening--;
    l->session = NULL;
    lease_taken[l->index] = false;
    lease_free_at[l->index] = leases_opened + HANDLES_FIRST - 1;
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

/* ---- opening a lease ---- */

#define BULK_MIN 4096 /* of leases whose payloads travel in parts */

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
    if (!o->bulk && !o->bulk_max)
        o->bulk_max = DP_BULK_MAX_DEFAULT;
    if (!o->bulk)
        o->bulk = DP_BULK_DEFAULT;
    else if (o->bulk == RFAAS_NO_BULK)
        o->bulk = 0;
    if (!o->bulk && o->bulk_max)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: bulk_max %llu bytes with RFAAS_NO_BULK: parts pass through the bulk area; set bulk, or "
                              "leave out bulk_max", op, (unsigned long long)o->bulk_max);
    if (o->bulk_max > DP_BULK_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: bulk_max %llu bytes, want at most %llu", op, (unsigned long long)o->bulk_max,
                              (unsigned long long)DP_BULK_MAX);
    if (o->bulk && o->bulk < BULK_MIN && o->bulk_max > o->bulk)
        o->bulk = BULK_MIN;
    if (o->workers > most)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: workers %u, want 1..%u", op, o->workers, most);
    if (!o->workers_min)
        o->workers_min = o->workers;
    if (o->workers_min > o->workers)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: workers_min %u, want at most workers, which is %u; 0 means all", op, o->workers_min, o->workers);
    if (o->depth > DP_DEPTH_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: depth %u, want 1..%d", op, o->depth, DP_DEPTH_MAX);
    if (o->eager > DP_EAGER_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: eager %u bytes, want 1..%u", op, o->eager, DP_EAGER_MAX);
    if (o->bulk > DP_BULK_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: bulk %llu bytes, want at most %llu", op,
                              (unsigned long long)o->bulk, (unsigned long long)DP_BULK_MAX);
    if (o->wait_mode > RFAAS_WAIT_WARM)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: wait_mode %u is not one of RFAAS_WAIT_*", op, o->wait_mode);
    if (o->duration_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: duration_ns %lld is negative", op, (long long)o->duration_ns);
    if (o->call_limit_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: call_limit_ns %lld is negative", op, (long long)o->call_limit_ns);
    if (o->wait_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: wait_ns %lld is negative", op, (long long)o->wait_ns);
    if (o->wait_ns > RFAAS_TIMEOUT_MAX_NS)
        o->wait_ns = RFAAS_TIMEOUT_MAX_NS;
    if (o->flags & ~(RFAAS_LEASE_RENEW | RFAAS_LEASE_FAILOVER | RFAAS_LEASE_LOCAL | RFAAS_LEASE_REUSE | RFAAS_LEASE_SEED | RFAAS_LEASE_SEED_REQUIRED) || o->reserved || o->reserved2)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: flags %#x, reserved %#x: unknown bits", op, o->flags, o->reserved | o->reserved2);
    if (!o->library && !o->library_data)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: neither library nor library_data is set", op);
    if (!o->library && !o->library_size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: library_size is 0", op);
    if (!o->library && o->library_size > 1u << 30)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: library_size %zu, want at most %u", op, o->library_size, 1u << 30);
    if (o->runtime && *o->runtime && (o->flags & (RFAAS_LEASE_SEED | RFAAS_LEASE_SEED_REQUIRED | RFAAS_LEASE_LOCAL) || (o->seed && *o->seed)))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: runtime %s with flags %#x: a lease with a runtime cannot have a seed or RFAAS_LEASE_LOCAL", op,
                              o->runtime, o->flags);
    int status = rfaas_api_seed_check(o);
    return status ? status : rfaas_api_init_check(o);
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

/* ---- the library, for the agent ---- */

/* Distinguishes libraries in memory (FNV-1a). The agent compares SHA-256 hashes. */
static uint64_t checksum(const void *data, size_t size) {
    uint64_t sum = 0xcbf29ce484222325u;
    for (const uint8_t *p = data, *end = p + size; p < end; p++)
        sum = (sum ^ *p) * 0x100000001b3u;
    return sum;
}

static int open_memory(rfaas_lease *l, const void *data, size_t size) {
    l->library_fd = rfaas_agent_above_stdio(memfd_create("rfaas-library", MFD_CLOEXEC));
    if (l->library_fd < 0)
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: no memory for a copy of the library: %s", strerror(errno));
    for (size_t at = 0; at < size;) {
        ssize_t n = pwrite(l->library_fd, (const char *)data + at, size - at, (off_t)at);
        if (n < 0 && errno != EINTR)
            return rfaas_api_fail(RFAAS_FATAL, 0, "lease: no memory for a copy of the library of %zu bytes: %s", size, strerror(errno));
        at += n > 0 ? (size_t)n : 0;
    }
    l->library = (rfaas_library_id){.inode = checksum(data, size), .size = size};
    return RFAAS_OK;
}

/* Sets the identity of the library from the stat of its file. */
static int identify(rfaas_lease *l, const struct stat *st) {
    if (!S_ISREG(st->st_mode))
        return rfaas_api_fail(RFAAS_BAD_LIBRARY, 0, "read the library: %s is not a regular file", l->options.library);
    l->library = (rfaas_library_id){.device = st->st_dev, .inode = st->st_ino, .size = (uint64_t)st->st_size,
                                    .modified_ns = st->st_mtim.tv_sec * 1000000000ll + st->st_mtim.tv_nsec,
                                    .changed_ns = st->st_ctim.tv_sec * 1000000000ll + st->st_ctim.tv_nsec};
    return RFAAS_OK;
}

/* Identifies the library of the lease by stat. Does not open the file, because a lease on cached workers does not need it. */
static int find_library(rfaas_lease *l) {
    const rfaas_lease_options *o = &l->options;
    struct stat st;
    if (!o->library)
        return open_memory(l, o->library_data, o->library_size);
    if (stat(o->library, &st))
        return rfaas_api_fail(RFAAS_BAD_LIBRARY, 0, "read the library: open %s: %s", o->library, strerror(errno));
    return identify(l, &st);
}

int rfaas_api_open_library(rfaas_lease *l) {
    struct stat st;
    if (l->library_fd >= 0)
        return RFAAS_OK;
    l->library_fd = rfaas_agent_above_stdio(open(l->options.library, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (l->library_fd < 0 || fstat(l->library_fd, &st))
        return rfaas_api_fail(RFAAS_BAD_LIBRARY, 0, "read the library: open %s: %s", l->options.library, strerror(errno));
    return identify(l, &st);
}

int rfaas_api_spec(const rfaas_lease_options *o, rfaas_agent_spec *spec) {
    *spec = (rfaas_agent_spec){.workers = o->workers, .cores_per_worker = o->cores_per_worker, .wait_mode = o->wait_mode,
                                 .flags = o->flags, .depth = o->depth, .eager = o->eager, .workers_min = o->workers_min, .init = o->init_function && *o->init_function, .memory = o->memory, .bulk = o->bulk,
                                 .duration_ns = o->duration_ns, .call_limit_ns = o->call_limit_ns};
    if (o->executor && (size_t)snprintf(spec->executor, sizeof spec->executor, "%s", o->executor) >= sizeof spec->executor)
        return rfaas_api_fail(RFAAS_INVALID, 0, "lease: the executor's address has %zu bytes, want at most %zu: %s", strlen(o->executor),
                              sizeof spec->executor - 1, o->executor);
    if (o->runtime && (size_t)snprintf(spec->runtime, sizeof spec->runtime, "%s", o->runtime) >= sizeof spec->runtime)
        return rfaas_api_fail(RFAAS_INVALID, 0, "lease: the runtime's name has %zu bytes, want at most %zu: %s", strlen(o->runtime),
                              sizeof spec->runtime - 1, o->runtime);
    const char *slash = o->library ? strrchr(o->library, '/') : NULL;
    snprintf(spec->library, sizeof spec->library, "%.255s", !o->library ? "" : slash ? slash + 1 : o->library);
    return rfaas_api_bundle_paths(o->bundle, spec->bundle);
}

static int describe(rfaas_lease *l) {
    int status = rfaas_api_spec(&l->options, &l->spec);
    if (status)
        return status;
    l->bundle_ns = *l->spec.bundle ? rfaas_api_bundle_ns(l->spec.bundle, l->session->timeout_ns) : 0;
    return find_library(l);
}

/* ---- opening ---- */

int rfaas_api_lease_begin(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **lease, rfaas_acquisition *a) {
    static const char op[] = "lease";
    rfaas_lease_options o;
    *lease = NULL;
    int status = rfaas_api_lease_options(options, RFAAS_WORKERS_MAX, &o);
    if (status)
        return status;
    int64_t begun = dp_now_ns();
    rfaas_lease *l = take_lease(s);
    if (!l)
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: %d leases are open, which is the limit", op, RFAAS_LEASES_MAX);
    l->wanted = o.workers;
    l->n_workers = o.workers_min; /* until the executor has granted more */
    l->options = o;
    l->open_ns = begun;
    l->requests = calloc((size_t)o.workers * o.depth, sizeof *l->requests);
    rfaas_grant *h = rfaas_api_grant_new(l);
    if (!h || !l->requests) {
        if (h)
            rfaas_api_grant_destroy(h);
        destroy_lease(l);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    }
    pthread_mutex_lock(&l->mu);
    l->grant = h;
    l->line->key = h->key;
    pthread_mutex_unlock(&l->mu);
    rfaas_seed *seed = NULL;
    status = o.flags & RFAAS_LEASE_LOCAL ? rfaas_api_local_load(l) : RFAAS_OK;
    if (!status)
        status = rfaas_api_seed_use(l, &l->options, &seed);
    if (!status)
        status = rfaas_api_init_keep(l);
    rfaas_api_seed_used(seed);
    if (!status)
        status = describe(l);
    if (status) {
        destroy_lease(l);
        return status;
    }
    if (!a->done && !(l->local && !o.wait_ns && rfaas_api_away(s, a)))
        rfaas_api_acquire_begin(a, l, h, at || !*l->seed_at || *l->spec.executor ? at : l->seed_at, o.wait_ns, false);
    *lease = l;
    return RFAAS_OK;
}

/* Opens a lease that got no workers. Returns an error if calls cannot run in this process instead. */
static int without_workers(rfaas_lease *l, const rfaas_acquisition *a, bool may_be_local) {
    rfaas_api_release_workers(l, l->grant->key, a->init_failed); /* true: workers that still execute the init call take a while to end */
    if (!may_be_local || a->init_failed || !rfaas_api_local_suits(l, a->status))
        return rfaas_api_fail_code(a->status, 0, a->code, "%s", a->text);
    if (!l->options.wait_ns)
        rfaas_api_note_away(l->session, a->status, a->text, dp_now_ns() - l->open_ns);
    return rfaas_api_local_open(l, a->text);
}

int rfaas_api_lease_finish(rfaas_lease **lease, rfaas_acquisition *a, bool may_be_local) {
    rfaas_lease *l = *lease;
    int status = a->status ? without_workers(l, a, may_be_local) : RFAAS_OK;
    if (status) {
        destroy_lease(l);
        *lease = NULL;
        return a->status = status;
    }
    l->workers = l->grant->workers;
    l->cfg = l->grant->cfg;
    if (l->grant->ep)
        rfaas_api_set_workers(l, l->grant->present);
    l->open_ns = dp_now_ns() - l->open_ns;
    rfaas_api_promote_soon(l);
    __atomic_store_n(&l->magic, RFAAS_LEASE_MAGIC, __ATOMIC_RELEASE);
    return RFAAS_OK;
}

int rfaas_api_lease_open(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **lease) {
    static const char op[] = "lease";
    rfaas_acquisition a = {0};
    rfaas_lease *l;
    int status = rfaas_api_bad_session(s, op);
    if (!status && !lease)
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: lease is NULL", op);
    if (!status)
        status = rfaas_api_lease_begin(s, options, at, &l, &a);
    if (status)
        return status;
    while (!rfaas_api_acquire_step(&a))
        rfaas_api_acquire_wait(&a, a.until);
    status = rfaas_api_lease_finish(&l, &a, true);
    if (!status)
        *lease = l;
    return status;
}

int rfaas_lease_release(rfaas_lease *l) { return rfaas_api_release_of(l, NULL); }

int rfaas_api_release_of(rfaas_lease *l, const rfaas_session *of) {
    int status = rfaas_api_enter_last(l, "release", of);
    if (status)
        return status;
    rfaas_api_stop_seeking(l);
    status = rfaas_api_release_grant(l);
    destroy_lease(l);
    return status;
}
