/* How a lease gets its workers. The agent chooses and asks executors. The library makes the channels.
 *
 *   begin ── channels of a cached grant that suits the lease, or new ones for the likely provider ──┐
 *                                                                                                  ▼
 *        ┌───────────────── offers ────────────────────────────────────▶ agent: next executor, grant
 *        │                                                                │            │
 *   make channels ◀── the next executor needs another provider, or refused ┘            └─▶ granted ──▶ connect each channel
 *        ▲                                                                                                       │
 *        └── ask the agent for another executor, and release the lease ◀── tcp: the workers cannot be reached ───┘
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"

/* ---- grants ---- */

rfaas_grant *rfaas_api_grant_new(const rfaas_lease *l) {
    rfaas_grant *h = calloc(1, sizeof *h);
    if (!h || !(h->workers = calloc(l->wanted, sizeof *h->workers))) {
        free(h);
        return NULL;
    }
    h->n_workers = l->wanted;
    h->library_fd = -1;
    h->key = rfaas_api_new_key(l);
    h->tables_changed = __atomic_load_n(&l->session->tables_changed, __ATOMIC_ACQUIRE);
    return h;
}

static void drop_channels(rfaas_grant *h) {
    dp_channel *channels[RFAAS_WORKERS_MAX];
    rfaas_api_promote_end(h);
    for (uint32_t i = 0; i < h->n_workers; i++) {
        channels[i] = h->workers[i].ch;
        h->workers[i].ch = NULL;
        h->workers[i].resumes = false;
    }
    rfaas_api_reap(h->ep, channels, h->n_workers);
    h->ep = NULL;
    h->queue_pairs = h->held_by = 0;
    memset(&h->before, 0, sizeof h->before);
}

void rfaas_api_grant_destroy(rfaas_grant *h) {
    rfaas_agent_drop(h->growing);
    drop_channels(h);
    for (uint32_t i = 0; i < h->n_workers; i++)
        free(h->workers[i].details);
    for (uint32_t i = 0; i < h->n_functions; i++)
        free(h->functions[i]);
    free(h->functions);
    if (h->library_fd >= 0)
        close(h->library_fd);
    free(h->workers);
    free(h);
}

void rfaas_api_grant_free(rfaas_lease *l, rfaas_grant *h) {
    if (!h)
        return;
    pthread_mutex_lock(&l->mu);
    h->key = 0; /* from here on no event finds the grant; events are handled under the mutex */
    if (l->grant == h)
        l->grant = NULL;
    pthread_mutex_unlock(&l->mu);
    rfaas_api_grant_destroy(h);
}

int rfaas_api_release_workers(const rfaas_lease *l, uint64_t key, bool wait) {
    rfaas_agent_release req = {.key = key};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    if (wait)
        return rfaas_agent_ask("release", RFAAS_AGENT_RELEASE, &parts, l->session->timeout_ns, sizeof(rfaas_agent_released), NULL);
    if (rfaas_agent_connected()) /* otherwise the executor ends the lease itself, as no agent takes it over */
        rfaas_agent_drop(rfaas_agent_send("release", RFAAS_AGENT_RELEASE, &parts, dp_now_ns() + l->session->timeout_ns));
    return RFAAS_OK;
}

/* ---- channels ---- */

#define ATTEND_EVERY_NS 1000000

/* Runs in the slow part of a wait, in place of a thread of the library: handles events, and notices workers that have ended. */
static void idle(void *arg, int64_t now, bool probe) {
    static int64_t attended; /* when a thread last called rfaas_api_attend; approximate */
    (void)arg;
    if (probe)
        rfaas_agent_look();
    else
        rfaas_agent_news();
    if (now - __atomic_load_n(&attended, __ATOMIC_RELAXED) >= ATTEND_EVERY_NS) {
        __atomic_store_n(&attended, now, __ATOMIC_RELAXED);
        rfaas_api_attend();
        rfaas_api_tell_old_claims(now);
    }
}

static void attend(const rfaas_lease *l, rfaas_grant *h) {
    dp_endpoint_set_overdue(h->ep, l->session->timeout_ns);
    dp_endpoint_on_silence(h->ep, rfaas_api_silent, h);
    dp_endpoint_on_idle(h->ep, idle, NULL);
}

/* Makes the endpoint and a channel for each worker, on a provider. */
static int make_channels(const rfaas_lease *l, rfaas_grant *h, const char *provider) {
    const rfaas_lease_options *o = &l->options;
    dp_dev *dev = NULL;
    dp_error err = {0};
    int status = rfaas_api_session_device(l->session, provider, &dev);
    if (status)
        return status;
    if (dp_endpoint_create(dev, o->workers, o->depth, (dp_wait_mode)o->wait_mode, &h->ep, &err))
        return rfaas_api_fail_dp("lease", &err);
    attend(l, h);
    dp_channel_config cfg = {.depth = o->depth, .eager = o->eager, .bulk = o->bulk};
    for (uint32_t i = 0; i < o->workers; i++, h->queue_pairs++)
        if (dp_channel_create(h->ep, &cfg, &h->workers[i].ch, &err))
            return rfaas_api_fail_dp("lease", &err);
    h->cfg = *dp_channel_get_config(h->workers[0].ch);
    snprintf(h->provider, sizeof h->provider, "%s", provider);
    return RFAAS_OK;
}

int rfaas_api_offer(rfaas_worker *w, rfaas_agent_blob *blob) {
    dp_error err = {0};
    blob->size = sizeof blob->bytes;
    return dp_channel_offer(w->ch, blob->bytes, &blob->size, &err) ? rfaas_api_fail_dp("offer a channel", &err) : RFAAS_OK;
}

int rfaas_api_connect_worker(rfaas_lease *l, rfaas_grant *h, uint32_t i, const rfaas_agent_worker *from) {
    dp_error err = {0};
    rfaas_worker *w = &h->workers[i];
    if (from->blob.size == 0 || from->blob.size > sizeof from->blob.bytes)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "connect worker %u: its blob has %u bytes", i, from->blob.size);
    /* A resumed channel that has just broken belongs to a worker that has just died. The next call replaces the worker. */
    int st = w->resumes ? dp_channel_resume(w->ch, from->blob.bytes, from->blob.size, &err)
                        : dp_channel_connect(w->ch, from->blob.bytes, from->blob.size, &err);
    if (st && !(w->resumes && st == dp_channel_status(w->ch)))
        return rfaas_api_fail_dp("connect a worker", &err);
    w->resumes = false;
    dp_channel_carry(w->ch, l->options.bulk_max);
    __atomic_add_fetch(&h->starts[from->start < RFAAS_STARTS ? from->start : RFAAS_START_UNKNOWN], 1, __ATOMIC_RELAXED); /* other threads may replace other workers */
    pthread_mutex_lock(&l->mu);
    w->start = (rfaas_worker_start){.start = from->start < RFAAS_STARTS ? from->start : RFAAS_START_UNKNOWN, .fork_ns = from->fork_ns,
                                    .sandbox_ns = from->sandbox_ns, .connect_ns = from->connect_ns, .code_ns = from->code_ns};
    snprintf(w->start.unseeded, sizeof w->start.unseeded, "%.*s", (int)sizeof from->unseeded - 1, from->unseeded);
    w->pid = from->pid;
    /* An event about this worker may have arrived before its pid did. */
    if (h->ended)
        dp_channel_fail(w->ch, h->ended);
    else if (w->pid && w->dead_pid == w->pid)
        dp_channel_fail(w->ch, w->death_status);
    pthread_mutex_unlock(&l->mu);
    return RFAAS_OK;
}

/* ---- the steps of an acquisition ---- */

#define SPECULATIVE_BYTES (64ull << 20) /* most memory of channels that are made before an executor is known */
#define STEP_GRACE_NS 1000000000ll
#define ASIDE_NS 500000000ll   /* how long an acquisition with `aside` may take to reach an agent */
#define STARVED_NS 500000000ll /* how long an acquisition waits for a free descriptor; a worker waits 2 s for its client */

static bool finished(rfaas_acquisition *a, int status) {
    a->done = true;
    a->status = status;
    a->code = status ? rfaas_function_code() : 0;
    if (status)
        snprintf(a->text, sizeof a->text, "%s", rfaas_last_error());
    return true;
}

static bool start(rfaas_acquisition *a);
static bool start_again(rfaas_acquisition *a);
static uint64_t change_key(rfaas_lease *l, rfaas_grant *h);

/* Reports whether an init call ended because its connection or executor was lost. */
static bool lost(int status) {
    int class = dp_status_class(status);
    return class == RFAAS_CLASS_CONNECTION || class == RFAAS_CLASS_LEASE;
}

/* Polls the init calls of the granted workers. Returns true if all have returned, or one has failed. */
static bool init_step(rfaas_acquisition *a) {
    bool busy = false;
    for (uint32_t i = 0; i < a->grant->present; i++) {
        int status = rfaas_api_init_step(a->lease, a->grant, i);
        if (status && status != RFAAS_BUSY) {
            a->init_failed = rfaas_api_init_failed();
            return !a->init_failed && lost(status) && ++a->lost < RFAAS_AGENT_ATTEMPTS ? start_again(a) : finished(a, status);
        }
        busy |= status == RFAAS_BUSY;
    }
    return !busy && finished(a, RFAAS_OK);
}

/* Starts the init calls of all workers that were granted. */
static bool init_start(rfaas_acquisition *a) {
    a->initialising = true;
    for (uint32_t i = 0; i < a->grant->present; i++) {
        int status = rfaas_api_init_start(a->lease, a->grant, i);
        if (status) {
            a->init_failed = true;
            return finished(a, status);
        }
        if (a->grant->workers[i].initialising)
            a->until = a->grant->workers[i].init_until;
    }
    return init_step(a);
}

/* Sends a step. It offers the grant's channels, if there are any. from: key of a lease whose workers cannot be reached for the reason in a->text,
 * or 0. */
static bool send_step(rfaas_acquisition *a, bool first, uint64_t from) {
    rfaas_lease *l = a->lease;
    rfaas_grant *h = a->grant;
    rfaas_agent_acquire req = {.key = h->key, .session = l->session->open.session, .cached = a->cached, .first = first};
    int64_t now = dp_now_ns();
    if (a->wait_until > now && !(a->aside && (h->ep || from)))
        req.wait_ns = a->wait_until - now;
    rfaas_agent_blob *offers = NULL;
    int status = RFAAS_OK;
    if (from) {
        req.from = from;
        req.status = a->unreached;
        snprintf(req.reason, sizeof req.reason, "%.*s", (int)sizeof req.reason - 1, a->text);
    } else if (first) {
        req.spec = l->spec;
        snprintf(req.at, sizeof req.at, "%s", a->at ? a->at : "");
    }
    rfaas_api_init_seed(l, first && !from, &req);
    if (h->ep || req.seed_function) {
        if (!(offers = malloc(h->n_workers * sizeof *offers + req.seed_function + req.seed_payload)))
            return finished(a, rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory"));
    }
    if (h->ep) {
        memcpy(req.provider, h->provider, sizeof req.provider);
        for (; req.offers < h->n_workers && !status; req.offers++)
            status = rfaas_api_offer(&h->workers[req.offers], &offers[req.offers]);
    }
    a->until = now + l->session->timeout_ns + req.wait_ns + STEP_GRACE_NS + rfaas_api_tables_ns(l->session) + l->bundle_ns + rfaas_api_seed_ns(l);
    if (req.seed_function)
        memcpy(mempcpy(offers + req.offers, l->init.function, req.seed_function), l->init.payload, req.seed_payload);
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .tail = offers,
                                 .tail_size = req.offers * sizeof *offers + req.seed_function + req.seed_payload, .fd = first && !from ? l->library_fd : -1};
    if (!status && !(a->ticket = rfaas_agent_send("lease", RFAAS_AGENT_ACQUIRE, &parts, a->aside ? now + ASIDE_NS : a->until)))
        status = rfaas_api_last_status();
    free(offers);
    return status ? finished(a, status) : false;
}

/* Finishes an acquisition whose workers were claimed. cached: key of the cached grant. by: generation of the agent that has cached it. */
static bool claimed(rfaas_acquisition *a, uint64_t cached, uint32_t by) {
    rfaas_grant *h = a->grant;
    attend(a->lease, h);
    if (rfaas_api_note_claim(a->lease, h, cached, by))
        return init_start(a);
    rfaas_api_release_workers(a->lease, change_key(a->lease, h), false); /* the next agent may have the lease or not */
    return ++a->lost < RFAAS_AGENT_ATTEMPTS ? start(a)
                                            : finished(a, rfaas_api_fail(RFAAS_PEER_GONE, 0, "lease: %d agents have ended while it was opened", RFAAS_AGENT_ATTEMPTS));
}

/* Sends the first step. Also used after the agent has ended, since the next agent knows nothing of the acquisition. */
static bool start(rfaas_acquisition *a) {
    rfaas_lease *l = a->lease;
    drop_channels(a->grant);
    a->from = 0;
    a->cached = 0;
    if (a->aside)
        return send_step(a, true, 0);
    uint32_t by;
    uint64_t key = rfaas_api_adopt_claimed(l, a->grant, a->at, &by);
    if (key)
        return claimed(a, key, by);
    if (rfaas_api_open_library(l)) /* the agent reads it through the descriptor, so it need not see the same files */
        return finished(a, rfaas_api_last_status());
    a->cached = rfaas_api_adopt_cached(l, a->grant, a->at);
    if (a->cached)
        attend(l, a->grant);
    const char *guess = l->session->provider;
    uint64_t bytes = l->options.workers * ((uint64_t)l->options.depth * l->options.eager + l->options.bulk);
    bool handed = __atomic_load_n(&l->session->handed, __ATOMIC_RELAXED);
    if (!a->cached && *guess && !handed && bytes <= SPECULATIVE_BYTES && make_channels(l, a->grant, guess))
        drop_channels(a->grant); /* the agent names the provider that is needed, and an error is reported then */
    return send_step(a, true, 0);
}

/* Gives the grant a new key, so that it has no lease again. Returns the old key, whose lease the caller releases. */
static uint64_t change_key(rfaas_lease *l, rfaas_grant *h) {
    rfaas_api_tell_claims(); /* under the old key */
    uint64_t old = h->key, key = rfaas_api_new_key(l);
    pthread_mutex_lock(&l->mu);
    if (l->line->key == old)
        l->line->key = key;
    h->key = key;
    h->lease_id = 0;
    h->present = h->room = 0;
    h->ended = 0;
    for (uint32_t i = 0; i < h->n_workers; i++)
        h->workers[i].pid = h->workers[i].dead_pid = h->workers[i].silent_pid = 0;
    pthread_mutex_unlock(&l->mu);
    return old;
}

/* Gives up the workers of a grant and searches anew. */
static bool start_again(rfaas_acquisition *a) {
    rfaas_grant *h = a->grant;
    a->initialising = false;
    for (uint32_t i = 0; i < h->n_workers; i++)
        h->workers[i].initialising = false;
    memset(h->starts, 0, sizeof h->starts);
    rfaas_api_release_workers(a->lease, change_key(a->lease, h), true);
    return start(a);
}

void rfaas_api_acquire_begin(rfaas_acquisition *a, rfaas_lease *l, rfaas_grant *h, const char *at, int64_t wait_ns, bool aside) {
    int64_t now = dp_now_ns();
    *a = (rfaas_acquisition){.lease = l, .grant = h, .at = at, .aside = aside, .wait_until = now + wait_ns,
                             .patience = now + (aside ? 0 : wait_ns) + l->session->timeout_ns};
    start(a);
}

void rfaas_api_acquire_drop(rfaas_acquisition *a) {
    rfaas_agent_drop(a->ticket);
    a->ticket = 0;
    a->done = true;
}

/* Returns the n-th string of a block, or NULL. */
static const char *nth_name(const char *names, size_t size, uint32_t n) {
    const char *at = names, *end = names + size;
    for (; n && at < end; n--) {
        at = memchr(at, 0, (size_t)(end - at));
        if (!at)
            return NULL;
        at++;
    }
    return at < end && memchr(at, 0, (size_t)(end - at)) ? at : NULL;
}

/* Takes the function names of a grant. The first grant sets the lease's names; later grants must have the same ones. */
static int take_functions(rfaas_lease *l, const rfaas_agent_candidate *c, const char *names) {
    if (c->functions == 0)
        return rfaas_api_fail(RFAAS_BAD_LIBRARY, 0, "lease: the library has no functions");
    bool known = l->functions;
    if (!known && !(l->functions = calloc(c->functions, sizeof *l->functions)))
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    const char *at = names, *end = names + c->names_size;
    for (uint32_t i = 0; i < c->functions; i++) {
        const char *name = nth_name(at, (size_t)(end - at), 0);
        if (!name)
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the agent names %u of %u functions", i, c->functions);
        at = name + strlen(name) + 1;
        if (known && (i >= l->n_functions || strcmp(name, l->functions[i])))
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: function %u is \"%s\" on the new executor and was \"%s\"", i, name,
                                  i < l->n_functions ? l->functions[i] : "");
        if (known)
            continue;
        if (!(l->functions[i] = strdup(name)))
            return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
        l->n_functions = i + 1;
    }
    return !known || c->functions == l->n_functions ? RFAAS_OK
                                                    : rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the library has %u functions on the new executor and had %u",
                                                                     c->functions, l->n_functions);
}

/* Records what was granted, to hand it over to the next agent. Returns false if the agent that granted it has ended: the
 * present agent may not know the lease. */
static bool take_lease(rfaas_lease *l, rfaas_grant *h, const rfaas_agent_candidate *c, uint32_t granted_by) {
    pthread_mutex_lock(&l->mu);
    h->lease_id = c->lease_id;
    h->until_ns = c->until_ns;
    memcpy(h->sha256, c->library, sizeof h->sha256);
    h->spec = l->spec;
    h->library = l->library;
    pthread_mutex_unlock(&l->mu);
    return rfaas_agent_generation() == granted_by;
}

/* Reports whether a firewall can keep the client from the workers of a grant. */
static bool behind_network(const rfaas_grant *h) { return !strcmp(h->provider, "tcp") || !strcmp(h->provider, "ofi"); }

/* Connects the channels to the workers that were granted. */
static int take_grant(rfaas_acquisition *a, const rfaas_agent_candidate *c, const uint8_t *behind, size_t size) {
    rfaas_lease *l = a->lease;
    rfaas_grant *h = a->grant;
    if (c->workers < l->spec.workers_min || c->workers > h->n_workers || !h->ep || size != c->workers * sizeof(rfaas_agent_worker) + c->names_size)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: a grant of %u workers in %zu bytes, want %u to %u workers", c->workers, size, l->spec.workers_min,
                              h->n_workers);
    int status = take_functions(l, c, (const char *)behind + c->workers * sizeof(rfaas_agent_worker));
    pthread_mutex_lock(&l->mu);
    h->present = c->workers;
    pthread_mutex_unlock(&l->mu);
    for (uint32_t i = 0; i < c->workers && !status; i++) {
        rfaas_agent_worker w;
        memcpy(&w, behind + i * sizeof w, sizeof w);
        status = a->unreached = rfaas_api_connect_worker(l, h, i, &w);
    }
    if (!status)
        memcpy(l->session->provider, h->provider, sizeof h->provider);
    /* Report a malformed grant as a protocol error: after a connection error the caller would ask another executor. On tcp and ofi a
     * firewall is a more likely cause. */
    return dp_status_class(status) == RFAAS_CLASS_CONNECTION && !behind_network(h) ? rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s", rfaas_last_error()) : status;
}

/* Claims the workers of a cached grant whose channels came with the reply. Returns false if they cannot be claimed. The caller then offers the
 * channels. Otherwise sets *done to what rfaas_api_acquire_step returns. */
static bool claim_handed(rfaas_acquisition *a, const rfaas_agent_candidate *c, const rfaas_reply *r, bool *done) {
    rfaas_grant *h = a->grant;
    rfaas_agent_candidate g = *c;
    dp_claimed won;
    int64_t now = dp_now_ns();
    if (a->lease->functions || !rfaas_api_claim_workers(&c->claim, r->generation, false, &won))
        return false;
    g.lease_id = won.lease_id;
    g.until_ns = now + won.client_ns;
    h->held_by = r->generation;
    take_lease(a->lease, h, &g, r->generation);
    int status = take_grant(a, &g, r->data + sizeof g, r->size - sizeof g);
    *done = status ? finished(a, status) : claimed(a, h->key, r->generation);
    return true;
}

/* Offers channels that the next executor can use: those of a cached grant in the reply, or new ones. */
static bool offer_again(rfaas_acquisition *a, const rfaas_agent_candidate *c, const rfaas_reply *r) {
    rfaas_grant *h = a->grant;
    a->cached = 0;
    drop_channels(h); /* an executor that refused may have connected to them */
    if (c->handed) {
        if (rfaas_api_take_over(a->lease, h, c->provider, r))
            a->cached = h->key;
        else
            drop_channels(h); /* the agent gives up the cached grant, and names another candidate */
        if (h->ep)
            attend(a->lease, h);
        bool done;
        if (h->ep && claim_handed(a, c, r, &done))
            return done;
        return send_step(a, false, 0);
    }
    int status = make_channels(a->lease, h, c->provider);
    return status ? finished(a, status) : send_step(a, false, 0);
}

/* Reports whether the workers of a grant cannot be reached, so that another executor is asked: they do not answer, they answer with
 * something other than a greeting, or the settings of data encryption contradict each other. */
static bool unreachable(const rfaas_acquisition *a) {
    int st = a->unreached;
    return (dp_status_class(st) == RFAAS_CLASS_CONNECTION || st == DP_BAD_BLOB || st == DP_UNSUPPORTED) && behind_network(a->grant) &&
           dp_now_ns() < a->patience;
}

/* Asks for another executor than that of the grant. The last error of this thread is that of connecting to its workers. */
static bool go_on(rfaas_acquisition *a) {
    snprintf(a->text, sizeof a->text, "%s", rfaas_last_error());
    uint64_t old = change_key(a->lease, a->grant);
    drop_channels(a->grant);
    memset(a->grant->starts, 0, sizeof a->grant->starts);
    a->cached = 0;
    bool done = send_step(a, true, old);
    rfaas_api_release_workers(a->lease, old, false);
    return done;
}

/* Handles the reply to a step. Returns true if the acquisition is done. */
static bool take_candidate(rfaas_acquisition *a, rfaas_reply *r) {
    rfaas_grant *h = a->grant;
    rfaas_agent_candidate c;
    bool done;
    if (r->size < sizeof c) {
        done = finished(a, rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the agent's reply has %u bytes, want %zu", r->size, sizeof c));
        rfaas_reply_free(r);
        return done;
    }
    memcpy(&c, r->data, sizeof c);
    a->from = r->generation;
    c.executor[sizeof c.executor - 1] = c.node[sizeof c.node - 1] = c.provider[sizeof c.provider - 1] = 0;
    memcpy(h->executor, c.executor, sizeof h->executor);
    memcpy(h->node, c.node, sizeof h->node);
    if (!c.granted) {
        __atomic_store_n(&a->lease->session->handed, c.handed, __ATOMIC_RELAXED);
        done = offer_again(a, &c, r);
    } else if (!take_lease(a->lease, h, &c, r->generation) && ++a->lost < RFAAS_AGENT_ATTEMPTS) {
        rfaas_api_release_workers(a->lease, change_key(a->lease, h), false);
        done = start(a);
    } else {
        h->held_by = c.handed ? r->generation : 0;
        a->unreached = 0;
        int status = take_grant(a, &c, r->data + sizeof c, r->size - sizeof c);
        done = unreachable(a) ? go_on(a) : status ? finished(a, status) : init_start(a);
    }
    rfaas_reply_free(r);
    return done;
}

bool rfaas_api_acquire_step(rfaas_acquisition *a) {
    rfaas_reply r;
    if (a->done)
        return true;
    if (a->initialising)
        return init_step(a);
    if (!rfaas_agent_take(a->ticket, &r)) {
        int64_t now = dp_now_ns();
        a->starved = !rfaas_api_starved() ? 0 : a->starved ? a->starved : now;
        if (a->starved && now - a->starved >= STARVED_NS) {
            rfaas_api_acquire_drop(a);
            return finished(a, rfaas_api_fail(RFAAS_FATAL, 0, "lease: no file descriptor is left for the connections of workers; close some, or raise "
                                              "the limit (ulimit -n)"));
        }
        if (now < a->until)
            return false;
        rfaas_api_acquire_drop(a);
        return finished(a, rfaas_api_fail(RFAAS_PEER_GONE, 0, "lease: the agent did not answer in time; check whether it is stopped with `rfaas agent status`"));
    }
    a->ticket = 0;
    if (!r.status)
        return take_candidate(a, &r);
    rfaas_reply_free(&r);
    bool strange = a->from && r.generation != a->from; /* this agent does not know the search that it should continue */
    if ((r.lost || strange) && ++a->lost < RFAAS_AGENT_ATTEMPTS)
        return start(a);
    return finished(a, rfaas_api_fail(r.status, 0, "%s", *r.text ? r.text : rfaas_strerror(r.status)));
}

void rfaas_api_acquire_wait(const rfaas_acquisition *a, int64_t until) {
    for (uint32_t i = 0; a->initialising && i < a->grant->n_workers; i++)
        if (a->grant->workers[i].initialising) {
            rfaas_api_init_wait(&a->grant->workers[i], until);
            return;
        }
    rfaas_agent_wait(until);
}
