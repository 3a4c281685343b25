/* The library's life, and sessions. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "dp_load.h"
#include "dp_vqp.h"

int rfaas_api_state = RFAAS_STATE_DOWN;

pthread_mutex_t rfaas_api_mu = PTHREAD_MUTEX_INITIALIZER;
static uint32_t init_count;
static bool fork_handled;
static rfaas_session *sessions[RFAAS_SESSIONS_MAX];
static bool session_taken[RFAAS_SESSIONS_MAX];
static uint32_t session_next;
static uint64_t session_epoch;

static void close_devices(rfaas_session *s);
static void forget_devices(void);

/* ---- library ---- */

int rfaas_version(void) { return RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR; }

/* A child of fork() inherits no handle, and may call rfaas_init again. The memory of the parent's channels stays mapped in the child,
 * which does not touch it. */
static void before_fork(void) {
    dp_load_before_fork();
    pthread_mutex_lock(&rfaas_api_mu);
    rfaas_agent_before_fork();
    rfaas_api_reap_before_fork();
}

static void after_fork_parent(void) {
    rfaas_api_reap_after_fork(false);
    rfaas_agent_after_fork(false);
    pthread_mutex_unlock(&rfaas_api_mu);
    dp_load_after_fork(false);
}

static void after_fork_child(void) {
    dp_load_after_fork(true);
    rfaas_api_reap_after_fork(true);
    rfaas_agent_after_fork(true);
    rfaas_api_forget_leases();
    forget_devices();
    for (uint32_t i = 0; i < RFAAS_SESSIONS_MAX; i++) {
        if (sessions[i]) {
            sessions[i]->magic = 0;
            rfaas_api_tables_forget(sessions[i]);
        }
        sessions[i] = NULL;
        session_taken[i] = false;
    }
    init_count = 0;
    __atomic_store_n(&rfaas_api_state, rfaas_api_state == RFAAS_STATE_DOWN ? RFAAS_STATE_DOWN : RFAAS_STATE_FORKED, __ATOMIC_RELAXED);
    pthread_mutex_init(&rfaas_api_mu, NULL);
}

int rfaas_init(const void *options) {
    if (options)
        return rfaas_api_fail(RFAAS_INVALID, 0, "init: options must be NULL");
    pthread_mutex_lock(&rfaas_api_mu);
    int status = RFAAS_OK, why = 0;
    if (!fork_handled && (why = pthread_atfork(before_fork, after_fork_parent, after_fork_child)))
        status = rfaas_api_fail(RFAAS_FATAL, 0, "init: out of memory");
    fork_handled = !why;
    if (!status && init_count == 0 && (why = rfaas_agent_begin()))
        status = rfaas_api_fail(RFAAS_FATAL, 0, "init: no memory for the page that is shared with the agent: %s", strerror(why));
    if (!status && init_count++ == 0)
        __atomic_store_n(&rfaas_api_state, RFAAS_STATE_UP, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&rfaas_api_mu);
    return status;
}

int rfaas_api_down(const char *op) {
    int state = __atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED);
    if (state == RFAAS_STATE_UP)
        return RFAAS_OK;
    return rfaas_api_fail(RFAAS_INVALID, 0,
                          state == RFAAS_STATE_FORKED
                              ? "%s: this process was forked from one that used the library; its handles belong to the parent. Call rfaas_init again"
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
    rfaas_api_reap_finish();
    pthread_mutex_lock(&rfaas_api_mu);
    init_count = 0;
    __atomic_store_n(&rfaas_api_state, RFAAS_STATE_DOWN, __ATOMIC_RELEASE);
    rfaas_agent_end();
    pthread_mutex_unlock(&rfaas_api_mu);
    return RFAAS_OK;
}

/* ---- sessions ---- */

int rfaas_api_fail_dp(const char *op, const dp_error *err) {
    return rfaas_api_fail(err->status, 0, "%s: %s", op, err->msg[0] ? err->msg : rfaas_strerror(err->status));
}

static rfaas_session *take_session(void) {
    rfaas_session *s = NULL;
    pthread_mutex_lock(&rfaas_api_mu);
    for (uint32_t n = 0; n < RFAAS_SESSIONS_MAX && !s; n++) {
        uint32_t i = session_next++ % RFAAS_SESSIONS_MAX;
        if (session_taken[i])
            continue;
        s = sessions[i];
        if (!s && (s = calloc(1, sizeof *s))) {
            pthread_mutex_init(&s->mu, NULL);
            pthread_mutex_init(&s->claimants_mu, NULL);
            __atomic_store_n(&sessions[i], s, __ATOMIC_RELEASE); /* rfaas_api_reopen looks without the mutex */
        }
        if (s) {
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
    if (__atomic_load_n(&s->magic, __ATOMIC_ACQUIRE) != RFAAS_SESSION_MAGIC)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: the session is closed", op);
    return RFAAS_OK;
}

/* ---- sessions without executors (RFAAS_SESSION_LOCAL) ---- */

#define SLOW_NS 100000000ll        /* a failure that takes longer counts as slow */
#define AWAY_TIMES 10              /* after a slow failure, the pause before the next attempt is this many times its duration */
#define AWAY_MAX_NS 60000000000ll

bool rfaas_api_without_agent(const rfaas_session *s, int status, const rfaas_reply *r) {
    int class = dp_status_class(status);
    return s->open.flags & RFAAS_SESSION_LOCAL && (class == RFAAS_CLASS_CONNECTION || (r->lost && class == RFAAS_CLASS_UNSUPPORTED));
}

void rfaas_api_note_away(rfaas_session *s, int status, const char *text, int64_t took) {
    if (took < SLOW_NS)
        return;
    pthread_mutex_lock(&s->mu);
    s->away.until = dp_now_ns() + (took < AWAY_MAX_NS / AWAY_TIMES ? AWAY_TIMES * took : AWAY_MAX_NS);
    s->away.status = status;
    snprintf(s->away.text, sizeof s->away.text, "%s", text);
    pthread_mutex_unlock(&s->mu);
}

int64_t rfaas_api_away(rfaas_session *s, rfaas_acquisition *a) {
    pthread_mutex_lock(&s->mu);
    int64_t until = s->away.until > dp_now_ns() ? s->away.until : 0;
    if (until && a) {
        a->done = true;
        a->status = s->away.status;
        memcpy(a->text, s->away.text, sizeof a->text);
    }
    pthread_mutex_unlock(&s->mu);
    return until;
}

/* Takes what the agent knows about a session, and frees the reply. */
static void take_opened(rfaas_session *s, const rfaas_reply *r) {
    rfaas_agent_opened opened;
    memcpy(&opened, r->data, sizeof opened);
    free(r->data);
    pthread_mutex_lock(&s->mu);
    if (s->encrypt != opened.encrypt)
        s->encrypt = opened.encrypt;
    __atomic_store_n(&s->nowhere, !opened.configured, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&s->mu);
}

/* ---- opening and closing ---- */

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
    if (o.data_encryption > RFAAS_DATA_ENCRYPTION_REQUIRE)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: data_encryption %u is unknown; want 0 or RFAAS_DATA_ENCRYPTION_*", op, o.data_encryption);
    if (o.timeout_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: timeout_ns %lld is negative", op, (long long)o.timeout_ns);
    if (o.device && strlen(o.device) >= sizeof ((rfaas_session *)0)->device)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: device name of %zu bytes, want at most %zu", op, strlen(o.device),
                              sizeof ((rfaas_session *)0)->device - 1);
    rfaas_session *s = take_session();
    if (!s)
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: %d sessions are open, which is the limit", op, RFAAS_SESSIONS_MAX);
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
    s->timeout_ns = !o.timeout_ns ? 10000000000ll : o.timeout_ns < RFAAS_TIMEOUT_MAX_NS ? o.timeout_ns : RFAAS_TIMEOUT_MAX_NS;
    memset(s->provider, 0, sizeof s->provider);
    pthread_mutex_lock(&rfaas_api_mu);
    s->open = (rfaas_agent_session){.session = ++session_epoch, .flags = o.flags, .keep = o.cached_leases, .timeout_ns = s->timeout_ns,
                                    .data_encryption = o.data_encryption, .port = o.port, .pkey_index = o.pkey_index,
                                    .traffic_class = o.traffic_class, .service_level = o.service_level, .mtu = o.mtu,
                                    .gid = (uint32_t)o.gid_index + 1u, .virtual_pairs = DP_VQP_VERSION};
    pthread_mutex_unlock(&rfaas_api_mu);
    const struct {
        const char *name, *from;
        char *to;
        size_t room;
    } texts[] = {{"manager", o.manager, s->open.manager, sizeof s->open.manager},
                 {"executor", o.executor, s->open.executor, sizeof s->open.executor},
                 {"device", o.device, s->open.device, sizeof s->open.device},
                 {"provider", o.provider, s->open.provider, sizeof s->open.provider},
                 {"tenant", o.tenant, s->open.tenant, sizeof s->open.tenant},
                 {"secret_file", o.secret_file, s->open.secret_file, sizeof s->open.secret_file},
                 {"token_file", o.token_file, s->open.token_file, sizeof s->open.token_file}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts && !status; i++)
        if (texts[i].from && (size_t)snprintf(texts[i].to, texts[i].room, "%s", texts[i].from) >= texts[i].room)
            status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s has %zu bytes, want at most %zu: %s", op, texts[i].name, strlen(texts[i].from),
                                    texts[i].room - 1, texts[i].from);
    rfaas_request_parts parts = {.body = &s->open, .body_size = sizeof s->open, .fd = -1};
    rfaas_reply reply;
    bool asked = !status;
    int64_t begun = dp_now_ns();
    if (asked)
        status = rfaas_agent_ask(op, RFAAS_AGENT_OPEN, &parts, s->timeout_ns, sizeof(rfaas_agent_opened), &reply);
    if (status && !(asked && rfaas_api_without_agent(s, status, &reply))) {
        give_session(s);
        return status;
    }
    s->nowhere = s->encrypt = 0;
    s->away.until = 0;
    if (status) {
        rfaas_api_note_away(s, status, rfaas_last_error(), dp_now_ns() - begun);
    } else {
        memcpy(s->provider, ((const rfaas_agent_opened *)reply.data)->provider, sizeof s->provider - 1);
        take_opened(s, &reply);
    }
    s->shm = false;
    s->verbs = s->tcp = s->ofi = NULL;
    s->opening = 0;
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
        pthread_mutex_lock(&rfaas_api_mu); /* leases of other sessions change meanwhile */
        bool ours = l->session == s;
        pthread_mutex_unlock(&rfaas_api_mu);
        if (ours && l->magic == RFAAS_LEASE_MAGIC)
            rfaas_api_release_of(l, s);
    }
    pthread_mutex_lock(&rfaas_api_mu);
    uint32_t opening = s->opening;
    pthread_mutex_unlock(&rfaas_api_mu);
    if (opening)
        return rfaas_api_fail(RFAAS_INVALID, 0, "close session: %u of its leases are being opened or used by other threads", opening);
    if (__atomic_exchange_n(&s->magic, 0, __ATOMIC_ACQ_REL) != RFAAS_SESSION_MAGIC) /* two threads close it */
        return rfaas_api_fail(RFAAS_INVALID, 0, "close session: the session is closed");
    rfaas_agent_session_name req = {.session = s->open.session};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    if (!(s->open.flags & RFAAS_SESSION_LOCAL) || rfaas_agent_connected())
        status = rfaas_agent_ask("close session", RFAAS_AGENT_CLOSE, &parts, s->timeout_ns, 0, NULL);
    rfaas_api_tables_free(s);
    rfaas_api_seeds_close(s);
    rfaas_api_drop_all_cached(s); /* events have done so already if the request succeeded */
    rfaas_api_claimants_close(s);
    close_devices(s);
    give_session(s);
    return status;
}

/* ---- devices ---- */

/* The shared-memory device of all sessions. */
static pthread_mutex_t shm_mu = PTHREAD_MUTEX_INITIALIZER;
static dp_dev *shm;
static uint32_t shm_users;

static int open_shm(rfaas_session *s, dp_error *err) {
    int status = DP_OK;
    pthread_mutex_lock(&shm_mu);
    if (!shm)
        status = dp_dev_open("shm", &(dp_dev_options){.attended = 1, .packable = 1}, &shm, err);
    if (!status && !s->shm) {
        s->shm = true;
        shm_users++;
    }
    pthread_mutex_unlock(&shm_mu);
    return status;
}

static void close_devices(rfaas_session *s) {
    dp_dev *unused = NULL;
    pthread_mutex_lock(&shm_mu);
    if (s->shm && --shm_users == 0) {
        unused = shm;
        shm = NULL;
    }
    pthread_mutex_unlock(&shm_mu);
    rfaas_api_reap_device(unused);
    rfaas_api_reap_device(s->verbs);
    rfaas_api_reap_device(s->tcp);
    rfaas_api_reap_device(s->ofi);
    rfaas_api_reap_device(s->brokered);
    s->shm = false;
    s->verbs = s->tcp = s->ofi = s->brokered = NULL;
}

static void forget_devices(void) {
    pthread_mutex_init(&shm_mu, NULL);
    shm = NULL;
    shm_users = 0;
}

void rfaas_api_attend(void) {
    if (pthread_mutex_trylock(&shm_mu))
        return; /* another thread attends */
    if (shm)
        dp_dev_attend(shm);
    pthread_mutex_unlock(&shm_mu);
}

bool rfaas_api_starved(void) {
    pthread_mutex_lock(&shm_mu);
    bool starved = shm && dp_dev_starved(shm);
    pthread_mutex_unlock(&shm_mu);
    return starved;
}

int rfaas_api_attend_fd(void) {
    pthread_mutex_lock(&shm_mu);
    int fd = shm ? dp_dev_event_fd(shm) : -1;
    pthread_mutex_unlock(&shm_mu);
    return fd;
}

int rfaas_session_cached(rfaas_session *s) {
    int status = rfaas_api_bad_session(s, "cached leases");
    if (status)
        return status;
    rfaas_agent_look();
    return (int)rfaas_api_cached(s);
}

static int open_own(const rfaas_session *s, const char *provider, dp_dev **own, dp_error *err) {
    const char *of_libfabric = getenv("RFAAS_OFI_PROVIDER");
    const dp_dev_options connects = {.active_side_only = 1, .encrypt = (int)s->encrypt};
    dp_dev_options ofi = {.encrypt = (int)s->encrypt};
    dp_ofi_choose(&ofi, of_libfabric && *of_libfabric ? of_libfabric : "tcp", getenv("RFAAS_OFI_DEVICE"));
    if (own == &s->brokered)
        return dp_vqp_open(DP_PROVIDER_VERBS, own, err);
    return dp_dev_open(provider, own == &s->tcp ? &connects : own == &s->ofi ? &ofi : &s->dev, own, err);
}

/* The session's device for a provider, opened once. */
int rfaas_api_session_device(rfaas_session *s, const char *provider, dp_dev **out) {
    dp_error err = {0};
    int status = RFAAS_OK;
    bool is_shm = !strcmp(provider, "shm");
    dp_dev **own = !strcmp(provider, "tcp") ? &s->tcp : !strcmp(provider, "ofi") ? &s->ofi : !strcmp(provider, "verbs") ? &s->verbs
                   : !strcmp(provider, "brokered") ? &s->brokered : NULL;
    if (!is_shm && !own)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the agent chose the unknown provider \"%s\"", provider);
    pthread_mutex_lock(&s->mu);
    if (is_shm)
        status = open_shm(s, &err);
    else if (!*own)
        status = open_own(s, provider, own, &err);
    *out = is_shm ? shm : *own;
    pthread_mutex_unlock(&s->mu);
    return status ? rfaas_api_fail_dp("lease: open device", &err) : RFAAS_OK;
}

/* ---- another agent ---- */

/* A lease that is moving does not hand over its next grant: it searches again. */
static void give_up_next(rfaas_lease *l) {
    pthread_mutex_lock(&l->mu);
    rfaas_agent_event e = {.key = l->next && l->next->lease_id ? l->next->key : 0, .kind = RFAAS_EVENT_ENDED, .status = RFAAS_LEASE_ENDED,
                           .text = "lost: the agent has ended"};
    pthread_mutex_unlock(&l->mu);
    if (e.key)
        rfaas_api_take_event(&e, NULL);
}

void rfaas_api_describe_grant(const rfaas_lease *l, const rfaas_grant *h, rfaas_agent_adopt *req, uint64_t *pids) {
    *req = (rfaas_agent_adopt){.key = h->key, .session = l->session->open.session, .lease_id = h->lease_id, .until_ns = h->until_ns, .present = h->present, .spec = h->spec};
    memcpy(req->library, h->sha256, sizeof req->library);
    memcpy(req->at, h->executor, sizeof req->at);
    memcpy(req->node, h->node, sizeof req->node);
    memcpy(req->provider, h->provider, sizeof req->provider);
    for (uint32_t i = 0; i < h->n_workers; i++)
        pids[i] = h->workers[i].pid;
}

/* Hands a lease's grant over to a new agent. If the grant is lost, its calls end. Another thread may move or release the lease meanwhile. */
static void hand_over(rfaas_lease *l) {
    int64_t timeout_ns = 0;
    int library = -1;
    give_up_next(l);
    if (l->session) /* otherwise its line may be in the page of an earlier connection, which is unmapped */
        rfaas_api_forget_claim(l);
    pthread_mutex_lock(&l->mu);
    rfaas_grant *h = l->grant;
    bool ours = l->session && h && h->key && h->lease_id && h->ep && !h->ended;
    rfaas_agent_adopt req = {0};
    uint64_t *pids = ours ? malloc(h->n_workers * sizeof *pids) : NULL;
    if (pids) {
        rfaas_api_describe_grant(l, h, &req, pids);
        timeout_ns = l->session->timeout_ns;
        library = fcntl(l->library_fd, F_DUPFD_CLOEXEC, 3); /* without one, backtraces have no lines of the source */
    }
    uint32_t n = pids ? h->n_workers : 0;
    pthread_mutex_unlock(&l->mu);
    if (!pids)
        return;
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .tail = pids, .tail_size = n * sizeof *pids, .fd = library};
    rfaas_reply reply;
    int status = rfaas_agent_ask("hand a lease to another agent", RFAAS_AGENT_ADOPT, &parts, timeout_ns, sizeof(rfaas_agent_until), &reply);
    free(pids);
    if (library >= 0)
        close(library);
    if (!status) {
        pthread_mutex_lock(&l->mu);
        if (l->grant && l->grant->key == req.key)
            l->grant->until_ns = ((rfaas_agent_until *)reply.data)->until_ns;
        pthread_mutex_unlock(&l->mu);
        free(reply.data);
    } else if (!reply.lost) { /* otherwise it is handed to the next agent */
        rfaas_agent_event e = {.key = req.key, .kind = RFAAS_EVENT_ENDED, .status = status};
        snprintf(e.text, sizeof e.text, "lost: %s", rfaas_last_error());
        rfaas_api_take_event(&e, NULL);
    }
}

void rfaas_api_reopen(void) {
    rfaas_api_drop_all_cached(NULL); /* executors ended their workers when the connection of the old agent broke */
    for (uint32_t i = 0; i < RFAAS_SESSIONS_MAX; i++) {
        rfaas_session *s = __atomic_load_n(&sessions[i], __ATOMIC_ACQUIRE);
        if (!s || __atomic_load_n(&s->magic, __ATOMIC_ACQUIRE) != RFAAS_SESSION_MAGIC)
            continue;
        rfaas_agent_session again = s->open;
        again.flags |= RFAAS_AGENT_REOPEN;
        rfaas_request_parts parts = {.body = &again, .body_size = sizeof again, .fd = -1};
        rfaas_reply reply;
        if (!rfaas_agent_ask("open session", RFAAS_AGENT_OPEN, &parts, s->timeout_ns, sizeof(rfaas_agent_opened), &reply))
            take_opened(s, &reply); /* after a failure, operations that need the session report the error */
        rfaas_api_tables_publish(s);
        rfaas_api_seeds_keep(s);
    }
    rfaas_api_each_lease(hand_over);
}
