/* The C API's library and sessions, and the way to the control part. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"

int rfaas_api_state = RFAAS_STATE_DOWN;

/* Tables and counts; never held during control operations. Taken before a lease's mutex. */
pthread_mutex_t rfaas_api_mu = PTHREAD_MUTEX_INITIALIZER;
static uint32_t init_count;
static bool fork_handled;
static rfaas_control_fn registered;
static rfaas_control_fn control;
static rfaas_session *sessions[RFAAS_SESSIONS_MAX];
static bool session_taken[RFAAS_SESSIONS_MAX];
static uint32_t session_next;

/* ---- library ---- */

int rfaas_version(void) { return RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR; }

void rfaas_control_register(rfaas_control_fn fn) { __atomic_store_n(&registered, fn, __ATOMIC_RELEASE); }

static int32_t linked_control(uint32_t op, const void *req, uint64_t len, void **reply, uint64_t *reply_len) {
    return rfaas_control_default(op, (void *)req, len, reply, reply_len);
}

/* The process that loaded the library. The control part that is linked in starts its threads as it is loaded, and a child of
 * fork() has none of them: whatever it asked would never be answered. */
static pid_t loaded_by;
__attribute__((constructor)) static void note_process(void) { loaded_by = getpid(); }

static void after_fork(void) {
    if (rfaas_api_state == RFAAS_STATE_UP)
        __atomic_store_n(&rfaas_api_state, RFAAS_STATE_FORKED, __ATOMIC_RELAXED);
}

int rfaas_init(const void *options) {
    if (options)
        return rfaas_api_fail(RFAAS_INVALID, 0, "init: options must be NULL");
    /* Before the mutex, which another thread may have held at the fork. */
    if (__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) == RFAAS_STATE_FORKED)
        return rfaas_api_fail(RFAAS_INVALID, 0, "init: the library was in use when this process was forked");
    pthread_mutex_lock(&rfaas_api_mu);
    int status = RFAAS_OK;
    rfaas_control_fn fn = __atomic_load_n(&registered, __ATOMIC_ACQUIRE);
    if (!fn && rfaas_control_default)
        fn = linked_control;
    if (!fn) {
        status = rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "init: no control part is linked in; link with librfaas.so");
    } else if (fn == linked_control && getpid() != loaded_by) {
        status = rfaas_api_fail(RFAAS_INVALID, 0, "init: process %d was forked from %d, which had loaded the library; only that one, "
                                "or a program that is started by exec, can use it", (int)getpid(), (int)loaded_by);
    } else if (!fork_handled && pthread_atfork(NULL, NULL, after_fork)) {
        status = rfaas_api_fail(RFAAS_FATAL, 0, "init: out of memory");
    } else {
        fork_handled = true;
        if (init_count++ == 0) {
            control = fn;
            __atomic_store_n(&rfaas_api_state, RFAAS_STATE_UP, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&rfaas_api_mu);
    return status;
}

int rfaas_api_down(const char *op) {
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
    int status = rfaas_api_down("finalize");
    if (status)
        return status;
    pthread_mutex_lock(&rfaas_api_mu);
    if (init_count != 1) {
        init_count--;
        pthread_mutex_unlock(&rfaas_api_mu);
        return RFAAS_OK;
    }
    pthread_mutex_unlock(&rfaas_api_mu);
    for (uint32_t i = 0; i < RFAAS_SESSIONS_MAX; i++)
        if (sessions[i] && sessions[i]->magic == RFAAS_SESSION_MAGIC)
            rfaas_session_close(sessions[i]);
    pthread_mutex_lock(&rfaas_api_mu);
    init_count = 0;
    __atomic_store_n(&rfaas_api_state, RFAAS_STATE_DOWN, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&rfaas_api_mu);
    return RFAAS_OK;
}

/* ---- talking to the control part ---- */

/* Sends a request and takes the reply, which the caller frees. Consumes the request. On a failure the error is
 * set from the reply's text. */
int rfaas_api_ask(const char *op_name, uint32_t op, rfaas_msg *req, rfaas_msg *reply) {
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

int rfaas_api_fail_dp(const char *op, const dp_error *err) {
    return rfaas_api_fail(err->status, 0, "%s: %s", op, err->msg[0] ? err->msg : rfaas_strerror(err->status));
}

/* ---- sessions ---- */

static rfaas_session *take_session(void) {
    rfaas_session *s = NULL;
    pthread_mutex_lock(&rfaas_api_mu);
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
    pthread_mutex_unlock(&rfaas_api_mu);
    return s;
}

static void give_session(rfaas_session *s) {
    pthread_mutex_lock(&rfaas_api_mu);
    session_taken[s->index] = false;
    pthread_mutex_unlock(&rfaas_api_mu);
}

int rfaas_api_bad_session(const rfaas_session *s, const char *op) {
    int status = rfaas_api_down(op);
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
    int status = rfaas_api_down(op);
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
    if (o.reserved)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.reserved is %u, want 0", op, o.reserved);
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
    rfaas_msg_u64(&req, RFAAS_TAG_KEEP, (uint64_t)(int64_t)o.keep_leases);
    status = rfaas_api_ask(op, RFAAS_OP_SESSION_OPEN, &req, &reply);
    if (status) {
        give_session(s);
        return status;
    }
    s->id = rfaas_msg_get_u64(&reply, RFAAS_TAG_SESSION, 0);
    rfaas_msg_free(&reply);
    s->shm = s->verbs = NULL;
    s->opening = 0;
    s->timeout_ns = o.timeout_ns ? o.timeout_ns : 10000000000ll;
    __atomic_store_n(&s->magic, RFAAS_SESSION_MAGIC, __ATOMIC_RELEASE);
    *session = s;
    return RFAAS_OK;
}

int rfaas_session_close(rfaas_session *s) {
    int status = rfaas_api_bad_session(s, "close session");
    if (status)
        return status;
    for (uint32_t i = 0; i < RFAAS_LEASES_MAX; i++) {
        rfaas_lease *l = rfaas_api_lease_at(i);
        if (!l)
            continue;
        pthread_mutex_lock(&rfaas_api_mu); /* other sessions' leases come and go meanwhile */
        bool ours = l->session == s;
        pthread_mutex_unlock(&rfaas_api_mu);
        if (ours && l->magic == RFAAS_LEASE_MAGIC)
            rfaas_lease_release(l);
    }
    pthread_mutex_lock(&rfaas_api_mu);
    uint32_t opening = s->opening;
    pthread_mutex_unlock(&rfaas_api_mu);
    if (opening)
        return rfaas_api_fail(RFAAS_INVALID, 0, "close session: %u of its leases are being opened or used by other threads", opening);
    s->magic = 0;
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, s->id);
    status = rfaas_api_ask("close session", RFAAS_OP_SESSION_CLOSE, &req, NULL);
    rfaas_api_drop_all_kept(s); /* events have done so, unless that failed */
    if (s->shm)
        dp_dev_close(s->shm);
    if (s->verbs)
        dp_dev_close(s->verbs);
    s->shm = s->verbs = NULL;
    give_session(s);
    return status;
}

/* The session's device for a provider, opened once. */
int rfaas_api_session_device(rfaas_session *s, const char *provider, dp_dev **out) {
    dp_error err = {0};
    dp_dev **dev = strcmp(provider, "shm") == 0 ? &s->shm : strcmp(provider, "verbs") == 0 ? &s->verbs : NULL;
    if (!dev)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the control part chose the unknown provider \"%s\"", provider);
    pthread_mutex_lock(&s->mu);
    int status = *dev ? RFAAS_OK : dp_dev_open(provider, &s->dev, dev, &err);
    *out = *dev;
    pthread_mutex_unlock(&s->mu);
    return status ? rfaas_api_fail_dp("lease: open device", &err) : RFAAS_OK;
}
