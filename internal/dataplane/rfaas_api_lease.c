/* The C API's sessions and leases: everything that is not per call. Talks to the control part by messages. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rfaas_api.h"

/* How long an error waits for the event that tells how its worker died. */
#define EXPLAIN_NS 500000000ll

int rfaas_api_state = RFAAS_STATE_DOWN;

/* Tables and counts; never held during control operations. Taken before a lease's mutex. */
static pthread_mutex_t table_mu = PTHREAD_MUTEX_INITIALIZER;
static uint32_t init_count;
static bool fork_handled;
static rfaas_control_fn registered;
static rfaas_control_fn control;
static rfaas_lease *leases[RFAAS_LEASES_MAX]; /* entries appear and stay; `index` is the place */
static bool lease_taken[RFAAS_LEASES_MAX];
static uint32_t lease_next;
static uint64_t lease_epoch;
static rfaas_session *sessions[RFAAS_SESSIONS_MAX];
static bool session_taken[RFAAS_SESSIONS_MAX];
static uint32_t session_next;

/* ---- library ---- */

int rfaas_version(void) { return RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR; }

void rfaas_control_register(rfaas_control_fn fn) { __atomic_store_n(&registered, fn, __ATOMIC_RELEASE); }

static int32_t linked_control(uint32_t op, const void *req, uint64_t len, void **reply, uint64_t *reply_len) {
    return rfaas_control_default(op, (void *)req, len, reply, reply_len);
}

static void after_fork(void) {
    if (rfaas_api_state == RFAAS_STATE_UP)
        __atomic_store_n(&rfaas_api_state, RFAAS_STATE_FORKED, __ATOMIC_RELAXED);
}

int rfaas_init(const void *options) {
    if (options)
        return rfaas_api_fail(RFAAS_INVALID, 0, "init: options must be NULL");
    pthread_mutex_lock(&table_mu);
    int status = RFAAS_OK;
    rfaas_control_fn fn = __atomic_load_n(&registered, __ATOMIC_ACQUIRE);
    if (!fn && rfaas_control_default)
        fn = linked_control;
    if (rfaas_api_state == RFAAS_STATE_FORKED) {
        status = rfaas_api_fail(RFAAS_INVALID, 0, "init: the library was in use when this process was forked");
    } else if (!fn) {
        status = rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "init: no control part is linked in; link with librfaas.so");
    } else if (!fork_handled && pthread_atfork(NULL, NULL, after_fork)) {
        status = rfaas_api_fail(RFAAS_FATAL, 0, "init: out of memory");
    } else {
        fork_handled = true;
        if (init_count++ == 0) {
            control = fn;
            __atomic_store_n(&rfaas_api_state, RFAAS_STATE_UP, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&table_mu);
    return status;
}

static int down(const char *op) {
    int state = __atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED);
    if (state == RFAAS_STATE_UP)
        return RFAAS_OK;
    return rfaas_api_fail(RFAAS_INVALID, 0,
                          state == RFAAS_STATE_FORKED
                              ? "%s: this process was forked from one that used the library; only the parent may go on"
                              : "%s: the library is not initialised (before rfaas_init or after rfaas_finalize)",
                          op);
}

int rfaas_finalize(void) {
    int status = down("finalize");
    if (status)
        return status;
    pthread_mutex_lock(&table_mu);
    if (init_count != 1) {
        init_count--;
        pthread_mutex_unlock(&table_mu);
        return RFAAS_OK;
    }
    pthread_mutex_unlock(&table_mu);
    for (uint32_t i = 0; i < RFAAS_SESSIONS_MAX; i++)
        if (sessions[i] && sessions[i]->magic == RFAAS_SESSION_MAGIC)
            rfaas_session_close(sessions[i]);
    pthread_mutex_lock(&table_mu);
    init_count = 0;
    __atomic_store_n(&rfaas_api_state, RFAAS_STATE_DOWN, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&table_mu);
    return RFAAS_OK;
}

/* ---- talking to the control part ---- */

/* Sends a request and takes the reply, which the caller frees. Consumes the request. On a failure the error is
 * set from the reply's text. */
static int ask(const char *op_name, uint32_t op, rfaas_msg *req, rfaas_msg *reply) {
    rfaas_msg drop = {0};
    rfaas_msg *r = reply ? reply : &drop;
    memset(r, 0, sizeof *r);
    if (req->failed) {
        rfaas_msg_free(req);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op_name);
    }
    void *data = NULL;
    uint64_t len = 0;
    int status = control(op, req->data, req->len, &data, &len);
    rfaas_msg_free(req);
    *r = (rfaas_msg){.data = data, .len = data ? len : 0};
    if (!rfaas_msg_check(r)) {
        rfaas_msg_free(r);
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: the control part sent a malformed reply of %llu bytes", op_name,
                              (unsigned long long)len);
    }
    if (status != RFAAS_OK) {
        char text[1024];
        rfaas_msg_get_str(r, RFAAS_TAG_TEXT, text, sizeof text);
        rfaas_msg_free(r);
        return rfaas_api_fail(status, 0, "%s", text[0] ? text : rfaas_strerror(status));
    }
    if (!reply)
        rfaas_msg_free(r);
    return RFAAS_OK;
}

static int fail_dp(const char *op, const dp_error *err) {
    return rfaas_api_fail(err->status, 0, "%s: %s", op, err->msg[0] ? err->msg : rfaas_strerror(err->status));
}

/* ---- sessions ---- */

static rfaas_session *take_session(void) {
    rfaas_session *s = NULL;
    pthread_mutex_lock(&table_mu);
    for (uint32_t n = 0; n < RFAAS_SESSIONS_MAX && !s; n++) {
        uint32_t i = session_next++ % RFAAS_SESSIONS_MAX;
        if (session_taken[i])
            continue;
        if (!sessions[i] && (sessions[i] = calloc(1, sizeof *s)))
            pthread_mutex_init(&sessions[i]->mu, NULL);
        if ((s = sessions[i])) {
            s->index = i;
            session_taken[i] = true;
        }
    }
    pthread_mutex_unlock(&table_mu);
    return s;
}

static void give_session(rfaas_session *s) {
    pthread_mutex_lock(&table_mu);
    session_taken[s->index] = false;
    pthread_mutex_unlock(&table_mu);
}

static int bad_session(const rfaas_session *s, const char *op) {
    int status = down(op);
    if (status)
        return status;
    if (!s)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: session is NULL", op);
    if (s->magic != RFAAS_SESSION_MAGIC)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: the session is closed", op);
    return RFAAS_OK;
}

int rfaas_session_open(const rfaas_session_options *options, rfaas_session **session) {
    static const char op[] = "open session";
    int status = down(op);
    if (status)
        return status;
    if (!session)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: session is NULL", op);
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    if (options) {
        if (options->struct_size < offsetof(rfaas_session_options, provider) || options->struct_size > 4096)
            return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.struct_size is %u; start from RFAAS_SESSION_OPTIONS_INIT",
                                  op, options->struct_size);
        memcpy(&o, options, options->struct_size < sizeof o ? options->struct_size : sizeof o);
    }
    if (o.timeout_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: timeout_ns %lld is negative", op, (long long)o.timeout_ns);
    if (o.device && strlen(o.device) >= sizeof ((rfaas_session *)0)->device)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: device name of %zu bytes, want at most %zu", op, strlen(o.device),
                              sizeof ((rfaas_session *)0)->device - 1);
    rfaas_session *s = take_session();
    if (!s)
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: %d sessions are open, that is the limit", op, RFAAS_SESSIONS_MAX);
    memset(s->device, 0, sizeof s->device);
    if (o.device)
        strcpy(s->device, o.device);
    s->dev = (dp_dev_options){.device = s->device[0] ? s->device : NULL,
                              .port = o.port,
                              .gid_index = o.gid_index,
                              .pkey_index = o.pkey_index,
                              .traffic_class = o.traffic_class,
                              .service_level = o.service_level,
                              .mtu = o.mtu};
    rfaas_msg req = {0}, reply;
    rfaas_msg_str(&req, RFAAS_TAG_MANAGER, o.manager);
    rfaas_msg_str(&req, RFAAS_TAG_EXECUTOR, o.executor);
    rfaas_msg_str(&req, RFAAS_TAG_PROVIDER, o.provider);
    rfaas_msg_str(&req, RFAAS_TAG_TENANT, o.tenant);
    rfaas_msg_u64(&req, RFAAS_TAG_FLAGS, o.flags);
    rfaas_msg_u64(&req, RFAAS_TAG_TIMEOUT_NS, (uint64_t)o.timeout_ns);
    status = ask(op, RFAAS_OP_SESSION_OPEN, &req, &reply);
    if (status) {
        give_session(s);
        return status;
    }
    s->id = rfaas_msg_get_u64(&reply, RFAAS_TAG_SESSION, 0);
    rfaas_msg_free(&reply);
    s->shm = s->verbs = NULL;
    s->opening = 0;
    __atomic_store_n(&s->magic, RFAAS_SESSION_MAGIC, __ATOMIC_RELEASE);
    *session = s;
    return RFAAS_OK;
}

int rfaas_session_close(rfaas_session *s) {
    int status = bad_session(s, "close session");
    if (status)
        return status;
    for (uint32_t i = 0; i < RFAAS_LEASES_MAX; i++) {
        rfaas_lease *l = rfaas_api_lease_at(i);
        if (l && l->magic == RFAAS_LEASE_MAGIC && l->session == s)
            rfaas_lease_release(l);
    }
    pthread_mutex_lock(&table_mu);
    uint32_t opening = s->opening;
    pthread_mutex_unlock(&table_mu);
    if (opening)
        return rfaas_api_fail(RFAAS_INVALID, 0, "close session: another thread is opening a lease in it");
    s->magic = 0;
    if (s->shm)
        dp_dev_close(s->shm);
    if (s->verbs)
        dp_dev_close(s->verbs);
    s->shm = s->verbs = NULL;
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, s->id);
    status = ask("close session", RFAAS_OP_SESSION_CLOSE, &req, NULL);
    give_session(s);
    return status;
}

/* The session's device for a provider, opened once. */
static int session_device(rfaas_session *s, const char *provider, dp_dev **out) {
    dp_error err = {0};
    dp_dev **dev = strcmp(provider, "shm") == 0 ? &s->shm : strcmp(provider, "verbs") == 0 ? &s->verbs : NULL;
    if (!dev)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the control part chose the unknown provider \"%s\"", provider);
    pthread_mutex_lock(&s->mu);
    int status = *dev ? RFAAS_OK : dp_dev_open(provider, &s->dev, dev, &err);
    *out = *dev;
    pthread_mutex_unlock(&s->mu);
    return status ? fail_dp("lease: open device", &err) : RFAAS_OK;
}

/* ---- lease handles ---- */

rfaas_lease *rfaas_api_lease_at(uint32_t index) { return __atomic_load_n(&leases[index], __ATOMIC_ACQUIRE); }

static rfaas_lease *take_lease(rfaas_session *s) {
    rfaas_lease *l = NULL;
    pthread_mutex_lock(&table_mu);
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
        l->key = lease_epoch << RFAAS_REQ_LEASE_BITS | i;
        l->request_seq = (uint32_t)(lease_epoch * 0x9e3779b1u) & RFAAS_REQ_SEQ_MASK;
    }
    pthread_mutex_unlock(&table_mu);
    return l;
}

/* Everything that a lease holds on this side; the handle can be used again. */
static void destroy_lease(rfaas_lease *l) {
    pthread_mutex_lock(&l->mu);
    l->key = 0;
    pthread_mutex_unlock(&l->mu);
    for (uint32_t i = 0; i < l->n_workers; i++) {
        if (l->workers[i].ch)
            dp_channel_destroy(l->workers[i].ch);
        free(l->workers[i].details);
    }
    while (l->buffers) {
        rfaas_buffer *b = l->buffers;
        l->buffers = b->next;
        dp_mem_free(b->mem);
        free(b);
    }
    dp_endpoint_destroy(l->ep);
    for (uint32_t i = 0; i < l->requests_used; i++)
        free(l->requests[i].text);
    for (uint32_t i = 0; i < l->n_functions; i++)
        free(l->functions[i]);
    free(l->functions);
    free(l->requests);
    free(l->workers);
    l->ep = NULL;
    l->functions = NULL;
    l->requests = NULL;
    l->workers = NULL;
    l->n_workers = l->n_functions = l->requests_used = l->requests_free = 0;
    l->sync_worker = l->next_worker = l->replaced = 0;
    l->busy = 0;
    l->ended = 0;
    pthread_mutex_lock(&table_mu);
    l->session->opening--;
    l->session = NULL;
    lease_taken[l->index] = false;
    pthread_mutex_unlock(&table_mu);
}

int rfaas_api_bad_lease(const rfaas_lease *l, const char *op) {
    int status = down(op);
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

static int lease_enter(rfaas_lease *l, const char *op) {
    int status = check_lease(l, op);
    if (status)
        return status;
    if (__atomic_exchange_n(&l->busy, 1, __ATOMIC_RELAXED))
        return rfaas_api_fail(RFAAS_WRONG_THREAD, 0, "%s: another thread is inside this lease", op);
    return RFAAS_OK;
}

static int lease_leave(rfaas_lease *l, int status) {
    __atomic_store_n(&l->busy, 0, __ATOMIC_RELAXED);
    return status;
}

/* ---- opening a lease ---- */

static int check_options(rfaas_lease_options *o) {
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
    if (o->workers > RFAAS_WORKERS_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: workers %u, want 1..%d", op, o->workers, RFAAS_WORKERS_MAX);
    if (o->depth > DP_DEPTH_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: depth %u, want 1..%d", op, o->depth, DP_DEPTH_MAX);
    if (o->eager > DP_EAGER_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: eager %u bytes, want 64..%u", op, o->eager, DP_EAGER_MAX);
    if (o->bulk > DP_BULK_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: bulk %llu bytes, want at most %llu", op,
                              (unsigned long long)o->bulk, (unsigned long long)DP_BULK_MAX);
    if (o->wait_mode > RFAAS_WAIT_WARM)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: wait_mode %u is none of RFAAS_WAIT_*", op, o->wait_mode);
    if (o->duration_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: duration_ns %lld is negative", op, (long long)o->duration_ns);
    if (o->call_limit_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: call_limit_ns %lld is negative", op, (long long)o->call_limit_ns);
    if (!o->library && !o->library_data)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: neither library nor library_data is set", op);
    if (!o->library && !o->library_size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: library_size is 0", op);
    if (!o->library && o->library_size > 1u << 30)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: library_size %zu, want at most %u", op, o->library_size, 1u << 30);
    return RFAAS_OK;
}

static int plan(rfaas_lease *l, const rfaas_lease_options *o) {
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, l->session->id);
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
    if (o->library)
        rfaas_msg_str(&req, RFAAS_TAG_LIBRARY, o->library);
    else
        rfaas_msg_bytes(&req, RFAAS_TAG_CODE, o->library_data, o->library_size);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKERS, o->workers);
    rfaas_msg_u64(&req, RFAAS_TAG_CORES, o->cores_per_worker);
    rfaas_msg_u64(&req, RFAAS_TAG_MEMORY, o->memory);
    rfaas_msg_u64(&req, RFAAS_TAG_WAIT_MODE, o->wait_mode);
    rfaas_msg_u64(&req, RFAAS_TAG_DURATION_NS, (uint64_t)o->duration_ns);
    rfaas_msg_u64(&req, RFAAS_TAG_CALL_LIMIT_NS, (uint64_t)o->call_limit_ns);
    rfaas_msg_u64(&req, RFAAS_TAG_DEPTH, o->depth);
    rfaas_msg_u64(&req, RFAAS_TAG_EAGER, o->eager);
    rfaas_msg_u64(&req, RFAAS_TAG_BULK, o->bulk);
    rfaas_msg_str(&req, RFAAS_TAG_EXECUTOR, o->executor);
    return ask("lease", RFAAS_OP_PLAN, &req, NULL);
}

/* Makes the endpoint and a channel per worker on the provider. */
static int make_channels(rfaas_lease *l, const char *provider, const rfaas_lease_options *o) {
    dp_dev *dev = NULL;
    dp_error err = {0};
    int status = session_device(l->session, provider, &dev);
    if (status)
        return status;
    if (dp_endpoint_create(dev, o->workers, o->depth, (dp_wait_mode)o->wait_mode, &l->ep, &err))
        return fail_dp("lease", &err);
    dp_channel_config cfg = {.depth = o->depth, .eager = o->eager, .bulk = o->bulk};
    for (uint32_t i = 0; i < o->workers; i++)
        if (dp_channel_create(l->ep, &cfg, &l->workers[i].ch, &err))
            return fail_dp("lease", &err);
    l->cfg = *dp_channel_get_config(l->workers[0].ch);
    snprintf(l->provider, sizeof l->provider, "%s", provider);
    return RFAAS_OK;
}

static void drop_channels(rfaas_lease *l) {
    for (uint32_t i = 0; i < l->n_workers; i++) {
        dp_channel_destroy(l->workers[i].ch);
        l->workers[i].ch = NULL;
    }
    dp_endpoint_destroy(l->ep);
    l->ep = NULL;
}

static int offer(rfaas_worker *w, rfaas_msg *req) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    dp_error err = {0};
    if (dp_channel_offer(w->ch, blob, &len, &err))
        return fail_dp("offer a channel", &err);
    rfaas_msg_bytes(req, RFAAS_TAG_BLOB, blob, len);
    return RFAAS_OK;
}

/* Connects worker i to the n-th blob of a grant. */
static int connect_worker(rfaas_lease *l, uint32_t i, const rfaas_msg *reply, uint32_t n) {
    dp_error err = {0};
    uint32_t len = 0;
    const uint8_t *blob = rfaas_msg_find(reply, RFAAS_TAG_BLOB, n, &len);
    if (!blob)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "connect worker %u: the grant has no blob for it", i);
    if (dp_channel_connect(l->workers[i].ch, blob, len, &err))
        return fail_dp("connect a worker", &err);
    rfaas_worker *w = &l->workers[i];
    pthread_mutex_lock(&l->mu);
    w->pid = rfaas_msg_nth_u64(reply, RFAAS_TAG_PID, n, 0);
    /* Events that came before this worker was known here. */
    if (l->ended)
        dp_channel_fail(w->ch, l->ended);
    else if (w->pid && w->dead_pid == w->pid)
        dp_channel_fail(w->ch, w->death_status);
    pthread_mutex_unlock(&l->mu);
    return RFAAS_OK;
}

static int take_functions(rfaas_lease *l, const rfaas_msg *reply) {
    uint32_t n = 0, len;
    while (rfaas_msg_find(reply, RFAAS_TAG_FUNCTION, n, &len))
        n++;
    if (n == 0)
        return rfaas_api_fail(RFAAS_BAD_LIBRARY, 0, "lease: the library has no functions");
    if (!(l->functions = calloc(n, sizeof *l->functions)))
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    for (l->n_functions = 0; l->n_functions < n; l->n_functions++) {
        const char *name = (const char *)rfaas_msg_find(reply, RFAAS_TAG_FUNCTION, l->n_functions, &len);
        if (!(l->functions[l->n_functions] = strndup(name, len)))
            return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    }
    return RFAAS_OK;
}

/* Asks the present candidate: offers, grant, connect. *granted says whether there is something to release. */
static int grant(rfaas_lease *l) {
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
    int status = RFAAS_OK;
    for (uint32_t i = 0; i < l->n_workers && !status; i++)
        status = offer(&l->workers[i], &req);
    if (status) {
        rfaas_msg_free(&req);
        return status;
    }
    status = ask("lease", RFAAS_OP_GRANT, &req, &reply);
    if (status)
        return status;
    l->lease_id = rfaas_msg_get_u64(&reply, RFAAS_TAG_LEASE_ID, 0);
    status = take_functions(l, &reply);
    for (uint32_t i = 0; i < l->n_workers && !status; i++)
        status = connect_worker(l, i, &reply, i);
    rfaas_msg_free(&reply);
    /* A broken grant is no reason to ask the next executor. */
    return dp_status_class(status) == RFAAS_CLASS_CONNECTION ? rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s", rfaas_last_error())
                                                             : status;
}

/* Goes through the candidates until one grants. */
static int find_and_grant(rfaas_lease *l, const rfaas_lease_options *o) {
    for (;;) {
        rfaas_msg req = {0}, reply;
        char provider[sizeof l->provider];
        rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
        int status = ask("lease", RFAAS_OP_NEXT, &req, &reply);
        if (status)
            return status;
        rfaas_msg_get_str(&reply, RFAAS_TAG_PROVIDER, provider, sizeof provider);
        rfaas_msg_get_str(&reply, RFAAS_TAG_EXECUTOR, l->executor, sizeof l->executor);
        rfaas_msg_get_str(&reply, RFAAS_TAG_NODE, l->node, sizeof l->node);
        rfaas_msg_free(&reply);
        drop_channels(l);
        status = make_channels(l, provider, o);
        if (status)
            return status;
        status = grant(l);
        int class = dp_status_class(status);
        if (class != RFAAS_CLASS_BUSY && (class != RFAAS_CLASS_CONNECTION || status == RFAAS_PROTOCOL))
            return status;
    }
}

int rfaas_lease_open(rfaas_session *s, const rfaas_lease_options *options, rfaas_lease **lease) {
    static const char op[] = "lease";
    int status = bad_session(s, op);
    if (status)
        return status;
    if (!options || !lease)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s is NULL", op, options ? "lease" : "options");
    if (options->struct_size < offsetof(rfaas_lease_options, library_data) || options->struct_size > 4096)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.struct_size is %u; start from RFAAS_LEASE_OPTIONS_INIT", op,
                              options->struct_size);
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    memcpy(&o, options, options->struct_size < sizeof o ? options->struct_size : sizeof o);
    if ((status = check_options(&o)))
        return status;
    rfaas_lease *l = take_lease(s);
    if (!l)
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: %d leases are open, that is the limit", op, RFAAS_LEASES_MAX);
    l->workers = calloc(o.workers, sizeof *l->workers);
    l->requests = calloc((size_t)o.workers * o.depth, sizeof *l->requests);
    if (!l->workers || !l->requests) {
        destroy_lease(l);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    }
    l->n_workers = o.workers;
    status = plan(l, &o);
    if (!status)
        status = find_and_grant(l, &o);
    if (status) {
        char text[1024];
        snprintf(text, sizeof text, "%s", rfaas_last_error());
        rfaas_msg req = {0};
        rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
        ask(op, RFAAS_OP_RELEASE, &req, NULL);
        destroy_lease(l);
        return rfaas_api_fail(status, 0, "%s", text);
    }
    __atomic_store_n(&l->magic, RFAAS_LEASE_MAGIC, __ATOMIC_RELEASE);
    *lease = l;
    return RFAAS_OK;
}

int rfaas_lease_release(rfaas_lease *l) {
    static const char op[] = "release";
    int status = lease_enter(l, op);
    if (status)
        return status;
    l->magic = 0;
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
    status = ask(op, RFAAS_OP_RELEASE, &req, NULL);
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
                             .lease_id = l->lease_id,
                             .functions = l->n_functions,
                             .replaced = l->replaced};
    memcpy(d.node, l->node, sizeof d.node);
    memcpy(d.executor, l->executor, sizeof d.executor);
    memcpy(d.provider, l->provider, sizeof d.provider);
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
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKER, (uint64_t)worker);
    if ((status = ask(op, RFAAS_OP_INSPECT, &req, &reply)))
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
    char list[512];
    size_t at = 0;
    list[0] = 0;
    for (uint32_t i = 0; i < l->n_functions && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", l->functions[i]);
    return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: \"%.128s\" is not in the library, which has %u: %s%s", op, name,
                          l->n_functions, list, at >= sizeof list ? " ..." : "");
}

/* ---- registered buffers ---- */

int rfaas_alloc(rfaas_lease *l, size_t size, void **buffer) {
    static const char op[] = "alloc";
    int status = lease_enter(l, op);
    if (status)
        return status;
    if (!buffer || size == 0 || (uint64_t)size > 1ull << 40)
        return lease_leave(l, rfaas_api_fail(RFAAS_INVALID, 0, buffer ? "%s: size %zu, want 1 .. 1 TiB" : "%s: buffer is NULL",
                                             op, size));
    rfaas_buffer *b = calloc(1, sizeof *b);
    dp_error err = {0};
    if (!b)
        return lease_leave(l, rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op));
    if (dp_mem_alloc(dp_endpoint_domain(l->ep), size, 0, &b->mem, &err)) {
        free(b);
        return lease_leave(l, fail_dp(op, &err));
    }
    b->next = l->buffers;
    l->buffers = b;
    *buffer = b->mem->addr;
    return lease_leave(l, RFAAS_OK);
}

int rfaas_free(rfaas_lease *l, void *buffer) {
    static const char op[] = "free";
    int status = lease_enter(l, op);
    if (status)
        return status;
    if (!buffer)
        return lease_leave(l, RFAAS_OK);
    rfaas_buffer **p = &l->buffers;
    while (*p && (*p)->mem->addr != buffer)
        p = &(*p)->next;
    if (!*p)
        return lease_leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: %p is not a buffer of this lease", op, buffer));
    for (uint32_t i = 0; i < l->n_workers; i++) {
        dp_channel *ch = l->workers[i].ch;
        if (!l->workers[i].broken && !dp_channel_status(ch) && dp_channel_free_slots(ch) < l->cfg.depth)
            return lease_leave(l, rfaas_api_fail(RFAAS_BUSY, 0, "%s: worker %u has calls in flight that may read the buffer",
                                                 op, i));
    }
    rfaas_buffer *b = *p;
    *p = b->next;
    dp_mem_free(b->mem);
    free(b);
    return lease_leave(l, RFAAS_OK);
}

/* ---- workers that die ---- */

/* The lines below an error's first: what was on the stack of a dead worker and what it had printed. NULL: none. */
static char *death_details(const rfaas_msg *m) {
    static const struct {
        uint16_t tag;
        const char *title;
    } parts[] = {{RFAAS_TAG_BACKTRACE, "on the stack"}, {RFAAS_TAG_OUTPUT, "its last output"}};
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f)
        return NULL;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint32_t len = 0;
        const char *from = (const char *)rfaas_msg_find(m, parts[i].tag, 0, &len);
        while (len && (from[len - 1] == '\n' || !from[len - 1]))
            len--;
        if (len)
            fprintf(f, "\n%s:\n    ", parts[i].title);
        for (uint32_t k = 0; k < len; k++) {
            if (from[k] == '\n')
                fputs("\n    ", f);
            else
                fputc(from[k] ? from[k] : '?', f);
        }
    }
    if (fclose(f)) {
        free(text);
        return NULL;
    }
    return text;
}

static void note_death(rfaas_worker *w, const rfaas_msg *m, int status) {
    rfaas_msg_get_str(m, RFAAS_TAG_TEXT, w->reason, sizeof w->reason);
    free(w->details);
    w->details = death_details(m);
    w->death_status = dp_status_class(status) == RFAAS_CLASS_CONNECTION ? status : DP_WORKER_DIED;
    /* A report about one that was replaced already, because its connection told earlier, must not end its
     * successor; one about a successor that is still being connected is kept. */
    w->dead_pid = rfaas_msg_get_u64(m, RFAAS_TAG_PID, 0);
    if (w->pid && w->dead_pid == w->pid)
        dp_channel_fail(w->ch, w->death_status);
}

void rfaas_control_event(const void *data, uint64_t len) {
    rfaas_msg m = {.data = (uint8_t *)data, .len = len};
    if (!rfaas_msg_check(&m))
        return;
    uint64_t key = rfaas_msg_get_u64(&m, RFAAS_TAG_KEY, 0);
    rfaas_lease *l = key ? rfaas_api_lease_at(key & (RFAAS_LEASES_MAX - 1)) : NULL;
    if (!l)
        return;
    int status = (int)(int64_t)rfaas_msg_get_u64(&m, RFAAS_TAG_STATUS, 0);
    uint64_t worker = rfaas_msg_get_u64(&m, RFAAS_TAG_WORKER, UINT64_MAX);
    pthread_mutex_lock(&l->mu);
    if (l->key == key) {
        switch (rfaas_msg_get_u64(&m, RFAAS_TAG_EVENT, 0)) {
        case RFAAS_EVENT_WORKER_DIED:
            if (worker < l->n_workers)
                note_death(&l->workers[worker], &m, status);
            break;
        case RFAAS_EVENT_LEASE_ENDED:
            l->ended = status < 0 ? status : DP_LEASE_ENDED;
            rfaas_msg_get_str(&m, RFAAS_TAG_TEXT, l->ended_reason, sizeof l->ended_reason);
            for (uint32_t i = 0; i < l->n_workers; i++)
                if (l->workers[i].ch)
                    dp_channel_fail(l->workers[i].ch, l->ended);
            break;
        }
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->mu);
}

int rfaas_api_explain(rfaas_lease *l, const char *op, rfaas_function fn, uint32_t worker, int status, int started) {
    const char *name = fn < l->n_functions ? l->functions[fn] : "?";
    const char *note = started == RFAAS_MAYBE_EXECUTED ? "" : " (not started)";
    if (status == RFAAS_FUNCTION_FAILED)
        return status; /* the text is the function's own */
    if (dp_status_class(status) != RFAAS_CLASS_CONNECTION && dp_status_class(status) != RFAAS_CLASS_LEASE)
        return rfaas_api_fail(status, started, "%s %s on worker %u: %s%s", op, name, worker, rfaas_strerror(status), note);
    char why[sizeof ((rfaas_worker *)0)->reason], *details = NULL;
    rfaas_worker *w = &l->workers[worker];
    int64_t until = dp_now_ns() + EXPLAIN_NS;
    struct timespec ts = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&l->mu);
    while (!l->ended && w->pid && w->dead_pid != w->pid && w->silent_pid != w->pid && started == RFAAS_MAYBE_EXECUTED)
        if (pthread_cond_timedwait(&l->changed, &l->mu, &ts))
            w->silent_pid = w->pid; /* once is enough */
    bool died = w->pid && w->dead_pid == w->pid;
    int ended = l->ended;
    snprintf(why, sizeof why, "%s", ended ? l->ended_reason : w->reason);
    int death = w->death_status;
    if (died && !ended && w->details)
        details = strdup(w->details);
    pthread_mutex_unlock(&l->mu);
    if (ended)
        return rfaas_api_fail(ended, started, "%s %s: the lease on %s ended: %s%s", op, name, l->executor, why, note);
    if (!died)
        return rfaas_api_fail(status, started, "%s %s on worker %u: %s%s", op, name, worker, rfaas_strerror(status), note);
    rfaas_api_fail(death, started, "%s %s: %s: %s%s%s", op, name, rfaas_strerror(death), why, note, details ? details : "");
    free(details);
    return death;
}

int rfaas_api_repair(rfaas_lease *l, uint32_t i) {
    static const char op[] = "replace worker";
    rfaas_worker *w = &l->workers[i];
    dp_error err = {0};
    rfaas_api_settle(l, i);
    pthread_mutex_lock(&l->mu);
    int ended = l->ended;
    char why[sizeof l->ended_reason];
    memcpy(why, l->ended_reason, sizeof why);
    w->pid = 0;
    pthread_mutex_unlock(&l->mu);
    w->broken = true;
    if (ended)
        return rfaas_api_fail(ended, 0, "%s %u: the lease on %s ended: %s", op, i, l->executor, why);
    if (dp_channel_reset(w->ch, &err))
        return fail_dp(op, &err);
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->key);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKER, i);
    int status = offer(w, &req);
    if (status)
        rfaas_msg_free(&req);
    else
        status = ask(op, RFAAS_OP_REPLACE, &req, &reply);
    if (!status) {
        status = connect_worker(l, i, &reply, 0);
        rfaas_msg_free(&reply);
    }
    if (status) {
        dp_channel_fail(w->ch, DP_PEER_GONE); /* so that the next use tries again */
        return status;
    }
    w->broken = false;
    l->replaced++;
    return RFAAS_OK;
}
