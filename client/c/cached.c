/* Cached grants: the endpoint and channels of a released lease, under the grant's key. The next lease with the same terms offers them
 * again. The agent compares the libraries by their hash. On shm the agent holds the channels too, and may give them to another process
 * first (hand.c).
 *
 *   release ──▶ on the list ──▶ agent caches the workers ──▶ lease with the same terms: claimed, or offered and granted again
 *                    └── agent does not: destroyed    └─▶ event DROPPED: destroyed
 *
 * When workers are not cached, the agent may give the session a spare lease instead. It is on the list in the same way.
 *
 * The thread that takes a grant off the list owns it, so grants may pass from one thread to another. */
#include <stdlib.h>
#include <string.h>

#include "client.h"

static pthread_mutex_t cached_mu = PTHREAD_MUTEX_INITIALIZER; /* taken last, held for moments */
static rfaas_grant *cached;                                   /* linked by link */

static void put(rfaas_grant *h) {
    pthread_mutex_lock(&cached_mu);
    h->link = cached;
    cached = h;
    pthread_mutex_unlock(&cached_mu);
}

/* Compares the terms of leases, except the number of workers. */
static bool same_terms(const rfaas_agent_spec *a, const rfaas_agent_spec *b) {
    return a->cores_per_worker == b->cores_per_worker && a->wait_mode == b->wait_mode && a->depth == b->depth && a->eager == b->eager &&
           a->memory == b->memory && a->bulk == b->bulk && a->call_limit_ns == b->call_limit_ns && a->init == b->init &&
           (a->flags & (RFAAS_LEASE_REUSE | RFAAS_LEASE_SEED)) == (b->flags & (RFAAS_LEASE_REUSE | RFAAS_LEASE_SEED)) && !strcmp(a->bundle, b->bundle) && !strcmp(a->runtime, b->runtime);
}

static bool alike(const rfaas_grant *h, const rfaas_lease *l, const char *at) {
    const char *executor = at && *at ? at : l->spec.executor;
    return h->cached && h->session == l->session && h->spec.workers == l->spec.workers && same_terms(&h->spec, &l->spec) &&
           !memcmp(&h->library, &l->library, sizeof h->library) && (!*executor || !strcmp(executor, h->executor));
}

/* Takes a grant off the list: the one with `key`; without a key, one with the terms of `like`; else one of `s`; else any. */
static rfaas_grant *take(uint64_t key, const rfaas_lease *like, const char *at, const rfaas_session *s) {
    pthread_mutex_lock(&cached_mu);
    rfaas_grant **p = &cached;
    while (*p && (key ? (*p)->key != key : like ? !alike(*p, like, at) : s && (*p)->session != s))
        p = &(*p)->link;
    rfaas_grant *h = *p;
    if (h)
        *p = h->link;
    pthread_mutex_unlock(&cached_mu);
    return h;
}

/* Replaces the grant with this key by g, which may be NULL, and destroys it. Returns false if an event has already removed the grant. */
static bool replace(uint64_t key, rfaas_grant *g) {
    pthread_mutex_lock(&cached_mu);
    rfaas_grant **p = &cached, *was;
    while (*p && (*p)->key != key)
        p = &(*p)->link;
    if ((was = *p)) {
        *p = was->link;
        if (g) {
            g->link = cached;
            cached = g;
        }
    }
    pthread_mutex_unlock(&cached_mu);
    if (!was)
        return false;
    rfaas_api_grant_destroy(was);
    return true;
}

/* Lets leases take a grant, because the agent has confirmed that its workers are cached. An event may have destroyed it already. by:
 * generation of the agent. */
static void offer_for_use(uint64_t key, const rfaas_agent_released *r, const rfaas_agent_own_claim *own, uint32_t by) {
    pthread_mutex_lock(&cached_mu);
    for (rfaas_grant *h = cached; h; h = h->link)
        if (h->key == key) {
            h->cached = true;
            h->held_by = r->handed ? by : 0;
            h->claim = r->claim;
            h->own = *own;
            h->claim_by = by;
        }
    pthread_mutex_unlock(&cached_mu);
}

uint64_t rfaas_api_cached(const rfaas_session *s) {
    uint64_t n = 0;
    pthread_mutex_lock(&cached_mu);
    for (const rfaas_grant *h = cached; h; h = h->link)
        n += h->session == s && h->cached && !h->spare;
    pthread_mutex_unlock(&cached_mu);
    return n;
}

uint32_t rfaas_api_cached_shares(const rfaas_session *s, const rfaas_agent_spec *spec, uint32_t most, rfaas_agent_share shares[]) {
    uint32_t n = 0, left = spec->workers;
    pthread_mutex_lock(&cached_mu);
    for (const rfaas_grant *h = cached; h && n < most && left; h = h->link)
        if (h->session == s && h->cached && h->spec.workers <= left && same_terms(&h->spec, spec) && !strcmp(h->spec.library, spec->library)) {
            shares[n].workers = h->spec.workers;
            memcpy(shares[n++].executor, h->executor, sizeof shares->executor);
            left -= h->spec.workers;
        }
    pthread_mutex_unlock(&cached_mu);
    return left ? 0 : n;
}

void rfaas_api_drop_cached(uint64_t key) {
    rfaas_grant *h = take(key, NULL, NULL, NULL);
    if (h)
        rfaas_api_grant_destroy(h);
}

void rfaas_api_drop_all_cached(const rfaas_session *s) {
    for (rfaas_grant *h; (h = take(0, NULL, NULL, s));)
        rfaas_api_grant_destroy(h);
}

void rfaas_api_forget_cached(void) {
    pthread_mutex_init(&cached_mu, NULL);
    cached = NULL;
    rfaas_api_forget_claims();
}

/* Reports whether a worker may have executed a function. Its state must not reach another lease, unless both permit it. */
static bool dirty(const rfaas_grant *h) {
    dp_channel_stats c = {0};
    for (uint32_t i = 0; i < h->n_workers && !c.calls; i++)
        dp_channel_get_stats(h->workers[i].ch, &c);
    return c.calls;
}

/* Reports whether the channels can serve another lease: no call is in flight, and no late reply can arrive. */
static bool at_rest(rfaas_lease *l) {
    const rfaas_grant *h = l->grant;
    if (!h->ep || h->spec.flags & RFAAS_LEASE_SEED || h->present < h->n_workers || (!(h->spec.flags & RFAAS_LEASE_REUSE) && dirty(h)) || __atomic_load_n(&l->line->draining, __ATOMIC_ACQUIRE) != RFAAS_AGENT_DRAIN_NOT)
        return false;
    for (uint32_t i = 0; i < h->n_workers; i++)
        if (h->workers[i].broken || !dp_channel_idle(h->workers[i].ch))
            return false;
    pthread_mutex_lock(&l->mu);
    bool good = !h->ended;
    pthread_mutex_unlock(&l->mu);
    return good;
}

/* Makes a grant of the spare lease that the reply to the release of l describes. Returns NULL if it cannot be used; the agent then ends it later. */
static rfaas_grant *spare_grant(rfaas_lease *l, rfaas_reply *reply) {
    const rfaas_grant *h = l->grant;
    const rfaas_agent_released *r = (const rfaas_agent_released *)reply->data;
    rfaas_grant *g = rfaas_api_grant_new(l);
    if (!g)
        return NULL;
    if (r->spare != g->n_workers || reply->size != sizeof *r + r->spare * sizeof(uint64_t) ||
        rfaas_api_unpack_channels(l, g, h->provider, reply)) {
        rfaas_api_grant_destroy(g);
        return NULL;
    }
    for (uint32_t i = 0; i < g->n_workers; i++)
        memcpy(&g->workers[i].pid, reply->data + sizeof *r + i * sizeof(uint64_t), sizeof(uint64_t));
    g->key = h->key;
    g->session = l->session;
    g->cached = g->spare = true;
    g->held_by = g->claim_by = reply->generation;
    g->claim = r->claim;
    g->tables_changed = h->tables_changed;
    g->spec = h->spec;
    g->library = h->library;
    memcpy(g->sha256, h->sha256, sizeof g->sha256);
    memcpy(g->executor, h->executor, sizeof g->executor);
    memcpy(g->node, h->node, sizeof g->node);
    g->functions = l->functions;
    g->n_functions = l->n_functions;
    g->library_fd = l->library_fd;
    l->functions = NULL;
    l->n_functions = 0;
    l->library_fd = -1;
    return g;
}

/* Releases a lease whose workers are not cached. If the agent has a spare lease with the same terms, puts it on the list, so that the next lease takes it
 * by a claim. */
static int release_ahead(rfaas_lease *l) {
    rfaas_grant *h = l->grant, *place = calloc(1, sizeof *place);
    if (!place || h->present < h->n_workers || !l->functions) {
        free(place);
        return rfaas_api_release_workers(l, h->key, true);
    }
    rfaas_api_tell_claims(); /* the agent must know the lease, to compare its terms */
    place->key = h->key;
    place->library_fd = -1;
    place->session = l->session;
    put(place); /* before the request: if the spare lease ends at once, the event removes it */
    rfaas_agent_release req = {.key = h->key, .ahead = 1};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply;
    int status = rfaas_agent_ask("release", RFAAS_AGENT_RELEASE, &parts, l->session->timeout_ns, sizeof(rfaas_agent_released), &reply);
    rfaas_grant *g = !status && ((const rfaas_agent_released *)reply.data)->spare ? spare_grant(l, &reply) : NULL;
    if (!status)
        rfaas_reply_free(&reply);
    if (!replace(req.key, g) && g)
        rfaas_api_grant_destroy(g);
    return status;
}

int rfaas_api_release_grant(rfaas_lease *l) {
    rfaas_grant *h = l->grant;
    rfaas_api_promote_settle(l);
    rfaas_api_promote_end(h);
    if (!h->ep)
        return RFAAS_OK; /* its calls ran in this process */
    if (l->session->open.keep < 0)
        return rfaas_api_release_workers(l, h->key, true);
    if (!at_rest(l))
        return release_ahead(l);
    rfaas_api_free_buffers(l); /* they are registered with the endpoint's domain */
    rfaas_api_tell_claims(); /* the agent must know a lease that is handed over, or whose executor is to get a claimant */
    bool claims = rfaas_api_claimant_ready(l);
    rfaas_agent_release req = {.key = h->key, .keep = claims ? RFAAS_AGENT_KEEP_OWN : 1};
    pthread_mutex_lock(&l->mu); /* events are handled under it, and find no grant afterwards */
    l->grant = NULL;
    pthread_mutex_unlock(&l->mu);
    h->session = l->session;
    h->cached = false;
    h->claim_by = 0;
    char executor[sizeof h->executor]; /* an event may destroy h from now on */
    memcpy(executor, h->executor, sizeof executor);
    h->functions = l->functions;
    h->n_functions = l->n_functions;
    h->library_fd = l->library_fd;
    l->functions = NULL;
    l->n_functions = 0;
    l->library_fd = -1;
    rfaas_api_hand_over(h);
    put(h); /* before the request: the agent may report the end of cached workers at once */
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply;
    int status = rfaas_agent_ask("release", RFAAS_AGENT_RELEASE, &parts, l->session->timeout_ns, sizeof(rfaas_agent_released), &reply);
    const rfaas_agent_released *r = (const rfaas_agent_released *)reply.data;
    bool taken = !status && r->cached;
    rfaas_agent_own_claim own = {0};
    if (taken && r->own == RFAAS_AGENT_OWN_CLAIM && reply.size == sizeof *r + sizeof own)
        memcpy(&own, reply.data + sizeof *r, sizeof own);
    if (taken) {
        offer_for_use(req.key, r, &own, reply.generation);
        rfaas_api_claimant_answered(l->session, executor, r, claims, reply.generation);
    } else
        rfaas_api_drop_cached(req.key);
    if (!status)
        free(reply.data);
    return status;
}

/* Moves the channels of a cached grant to h. */
static void move_channels(rfaas_grant *from, rfaas_grant *h) {
    for (uint32_t i = 0; i < h->n_workers; i++) {
        h->workers[i].ch = from->workers[i].ch;
        from->workers[i].ch = NULL;
    }
    h->ep = from->ep;
    from->ep = NULL;
    h->cfg = from->cfg;
    memcpy(h->provider, from->provider, sizeof h->provider);
    rfaas_statistics sum = {0};
    rfaas_api_count(h, &sum);
    h->before = sum;
}

/* Reports whether the workers of a cached grant can be claimed for a lease. The agent may learn of the new lease from the shared page, which does not
 * have its terms, so the terms must be those of the cached one. */
static bool claimable(const rfaas_grant *h, const rfaas_lease *l) {
    bool good = h->claim_by && (h->claim.region || h->own.lease_id) && !l->functions && h->spec.duration_ns == l->spec.duration_ns && h->spec.flags == l->spec.flags && !*l->spec.bundle && !strcmp(h->spec.runtime, l->spec.runtime) &&
                !strcmp(h->spec.executor, l->spec.executor) &&
                h->tables_changed == __atomic_load_n(&l->session->tables_changed, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < h->n_workers && good; i++)
        good = dp_channel_idle(h->workers[i].ch);
    return good;
}

uint64_t rfaas_api_adopt_claimed(rfaas_lease *l, rfaas_grant *h, const char *at, uint32_t *by) {
    int64_t now = dp_now_ns();
    dp_claimed won;
    dp_error err = {0};
    rfaas_api_attend(); /* notices workers that have ended, for example with their executor */
    rfaas_grant *from = take(0, l, at, NULL);
    if (!from)
        return 0;
    if (!claimable(from, l) || !(from->own.lease_id ? rfaas_api_claim_own(l->session, from, &won) : rfaas_api_claim_workers(&from->claim, from->claim_by, true, &won))) {
        put(from); /* the caller offers its channels next */
        return 0;
    }
    uint32_t how = from->spare ? RFAAS_START_POOLED : RFAAS_START_CACHED;
    for (uint32_t i = 0; i < h->n_workers; i++) {
        rfaas_worker *w = &h->workers[i];
        if (won.awake)
            dp_channel_expect(from->workers[i].ch);
        else
            dp_channel_next_generation(from->workers[i].ch, &err); /* fails if the worker dies just now; the first call replaces it */
        w->pid = from->workers[i].pid;
        w->start = (rfaas_worker_start){.start = how};
        dp_channel_carry(from->workers[i].ch, l->options.bulk_max);
    }
    move_channels(from, h);
    pthread_mutex_lock(&l->mu);
    h->lease_id = won.lease_id;
    h->until_ns = now + won.client_ns;
    h->present = h->n_workers;
    h->spec = l->spec;
    h->library = l->library;
    pthread_mutex_unlock(&l->mu);
    h->starts[how] = h->n_workers;
    h->held_by = from->held_by;
    memcpy(h->sha256, from->sha256, sizeof h->sha256);
    memcpy(h->executor, from->executor, sizeof h->executor);
    memcpy(h->node, from->node, sizeof h->node);
    memcpy(l->session->provider, h->provider, sizeof h->provider);
    l->functions = from->functions;
    l->n_functions = from->n_functions;
    from->functions = NULL;
    from->n_functions = 0;
    if (l->library_fd < 0) { /* the same library */
        l->library_fd = from->library_fd;
        from->library_fd = -1;
    }
    uint64_t key = from->key;
    *by = from->claim_by;
    rfaas_api_grant_destroy(from);
    return key;
}

uint64_t rfaas_api_adopt_cached(const rfaas_lease *l, rfaas_grant *h, const char *at) {
    rfaas_grant *from = take(0, l, at, NULL);
    if (!from)
        return 0;
    uint64_t key = from->key;
    dp_error err = {0};
    bool good = true;
    for (uint32_t i = 0; i < from->n_workers && good; i++)
        good = !dp_channel_next_generation(from->workers[i].ch, &err);
    if (good) {
        move_channels(from, h);
        for (uint32_t i = 0; i < h->n_workers; i++)
            h->workers[i].resumes = true;
    } else { /* makes the agent end the workers */
        rfaas_api_release_workers(l, from->key, false);
    }
    rfaas_api_grant_destroy(from);
    return good ? key : 0;
}
