/* How a lease comes to its workers: candidates one after the other, offers of channels, the grant, connections. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

/* ---- homes ---- */

rfaas_home *rfaas_api_home_new(const rfaas_lease *l) {
    rfaas_home *h = calloc(1, sizeof *h);
    if (!h || !(h->workers = calloc(l->n_workers, sizeof *h->workers))) {
        free(h);
        return NULL;
    }
    h->n_workers = l->n_workers;
    h->key = rfaas_api_new_key(l);
    return h;
}

static void drop_channels(rfaas_home *h) {
    for (uint32_t i = 0; i < h->n_workers; i++) {
        dp_channel_destroy(h->workers[i].ch);
        h->workers[i].ch = NULL;
        h->workers[i].resumes = false;
    }
    dp_endpoint_destroy(h->ep);
    h->ep = NULL;
    h->queue_pairs = 0;
    memset(&h->before, 0, sizeof h->before);
}

void rfaas_api_home_destroy(rfaas_home *h) {
    drop_channels(h);
    for (uint32_t i = 0; i < h->n_workers; i++)
        free(h->workers[i].details);
    free(h->workers);
    free(h);
}

void rfaas_api_home_free(rfaas_lease *l, rfaas_home *h) {
    if (!h)
        return;
    pthread_mutex_lock(&l->mu);
    h->key = 0; /* an event that is being taken in has been, and none comes after it */
    if (l->home == h)
        l->home = NULL;
    pthread_mutex_unlock(&l->mu);
    rfaas_api_home_destroy(h);
}

int rfaas_api_give_back(const rfaas_home *h, const char *op) {
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, h->key);
    return rfaas_api_ask(op, RFAAS_OP_RELEASE, &req, NULL);
}

/* ---- asking for one ---- */

int rfaas_api_plan(const rfaas_lease *l, const rfaas_home *h) {
    const rfaas_lease_options *o = &l->options;
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, l->session->id);
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, h->key);
    if (l->home != h) { /* the library may have changed on disk meanwhile */
        rfaas_msg_u64(&req, RFAAS_TAG_FROM, l->home->key);
        return rfaas_api_ask("lease", RFAAS_OP_PLAN, &req, NULL);
    }
    if (o->library)
        rfaas_msg_str(&req, RFAAS_TAG_LIBRARY, o->library);
    else
        rfaas_msg_bytes(&req, RFAAS_TAG_CODE, o->library_data, o->library_size);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKERS, o->workers);
    rfaas_msg_u64(&req, RFAAS_TAG_CORES, o->cores_per_worker);
    rfaas_msg_u64(&req, RFAAS_TAG_MEMORY, o->memory);
    rfaas_msg_u64(&req, RFAAS_TAG_WAIT_MODE, o->wait_mode);
    rfaas_msg_u64(&req, RFAAS_TAG_DURATION_NS, (uint64_t)o->duration_ns);
    rfaas_msg_u64(&req, RFAAS_TAG_FLAGS, o->flags);
    rfaas_msg_u64(&req, RFAAS_TAG_CALL_LIMIT_NS, (uint64_t)o->call_limit_ns);
    rfaas_msg_u64(&req, RFAAS_TAG_DEPTH, o->depth);
    rfaas_msg_u64(&req, RFAAS_TAG_EAGER, o->eager);
    rfaas_msg_u64(&req, RFAAS_TAG_BULK, o->bulk);
    rfaas_msg_str(&req, RFAAS_TAG_EXECUTOR, o->executor);
    rfaas_msg_str(&req, RFAAS_TAG_AT, l->at);
    return rfaas_api_ask("lease", RFAAS_OP_PLAN, &req, NULL);
}

/* Makes the endpoint and a channel per worker on the provider. */
static int make_channels(const rfaas_lease *l, rfaas_home *h, const char *provider) {
    const rfaas_lease_options *o = &l->options;
    dp_dev *dev = NULL;
    dp_error err = {0};
    int status = rfaas_api_session_device(l->session, provider, &dev);
    if (status)
        return status;
    if (dp_endpoint_create(dev, o->workers, o->depth, (dp_wait_mode)o->wait_mode, &h->ep, &err))
        return rfaas_api_fail_dp("lease", &err);
    dp_endpoint_on_silence(h->ep, rfaas_api_silent, h);
    dp_channel_config cfg = {.depth = o->depth, .eager = o->eager, .bulk = o->bulk};
    for (uint32_t i = 0; i < o->workers; i++, h->queue_pairs++)
        if (dp_channel_create(h->ep, &cfg, &h->workers[i].ch, &err))
            return rfaas_api_fail_dp("lease", &err);
    h->cfg = *dp_channel_get_config(h->workers[0].ch);
    snprintf(h->provider, sizeof h->provider, "%s", provider);
    return RFAAS_OK;
}

int rfaas_api_offer(rfaas_worker *w, rfaas_msg *req) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    dp_error err = {0};
    if (dp_channel_offer(w->ch, blob, &len, &err))
        return rfaas_api_fail_dp("offer a channel", &err);
    rfaas_msg_bytes(req, RFAAS_TAG_BLOB, blob, len);
    return RFAAS_OK;
}

int rfaas_api_connect_worker(rfaas_lease *l, rfaas_home *h, uint32_t i, const rfaas_msg *reply, uint32_t n) {
    dp_error err = {0};
    uint32_t len = 0;
    const uint8_t *blob = rfaas_msg_find(reply, RFAAS_TAG_BLOB, n, &len);
    if (!blob)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "connect worker %u: the grant has no blob for it", i);
    rfaas_worker *w = &h->workers[i];
    /* A kept connection that has just broken is that of a worker that has just died: the next call replaces it. */
    int st = w->resumes ? dp_channel_resume(w->ch, blob, len, &err) : dp_channel_connect(w->ch, blob, len, &err);
    if (st && !(w->resumes && st == dp_channel_status(w->ch)))
        return rfaas_api_fail_dp("connect a worker", &err);
    w->resumes = false;
    uint64_t start = rfaas_msg_nth_u64(reply, RFAAS_TAG_START, n, 0);
    h->starts[start < RFAAS_STARTS ? start : 0]++;
    pthread_mutex_lock(&l->mu);
    w->pid = rfaas_msg_nth_u64(reply, RFAAS_TAG_PID, n, 0);
    /* Events that came before this worker was known here. */
    if (h->ended)
        dp_channel_fail(w->ch, h->ended);
    else if (w->pid && w->dead_pid == w->pid)
        dp_channel_fail(w->ch, w->death_status);
    pthread_mutex_unlock(&l->mu);
    return RFAAS_OK;
}

/* The names come with every grant. The first grant's are the lease's. */
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

/* Numbers of functions stay what they are wherever the lease goes on. */
static int same_functions(const rfaas_lease *l, const rfaas_msg *reply) {
    uint32_t len = 0;
    for (uint32_t i = 0; i < l->n_functions; i++) {
        const char *name = (const char *)rfaas_msg_find(reply, RFAAS_TAG_FUNCTION, i, &len);
        if (!name || len != strlen(l->functions[i]) || memcmp(name, l->functions[i], len))
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: function %u is \"%.*s\" there and was \"%s\"", i,
                                  name ? (int)len : 0, name ? name : "", l->functions[i]);
    }
    return RFAAS_OK;
}

/* Asks the present candidate: offers, grant, connect. */
static int grant(rfaas_lease *l, rfaas_home *h) {
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, h->key);
    int status = RFAAS_OK;
    for (uint32_t i = 0; i < h->n_workers && !status; i++)
        status = rfaas_api_offer(&h->workers[i], &req);
    if (status) {
        rfaas_msg_free(&req);
        return status;
    }
    status = rfaas_api_ask("lease", RFAAS_OP_GRANT, &req, &reply);
    if (status)
        return status;
    h->lease_id = rfaas_msg_get_u64(&reply, RFAAS_TAG_LEASE_ID, 0);
    status = l->functions ? same_functions(l, &reply) : take_functions(l, &reply);
    for (uint32_t i = 0; i < h->n_workers && !status; i++)
        status = rfaas_api_connect_worker(l, h, i, &reply, i);
    rfaas_msg_free(&reply);
    /* A broken grant is no reason to ask the next executor. */
    return dp_status_class(status) == RFAAS_CLASS_CONNECTION ? rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s", rfaas_last_error())
                                                             : status;
}

int rfaas_api_find_and_grant(rfaas_lease *l, rfaas_home *h) {
    for (;;) {
        rfaas_msg req = {0}, reply;
        char provider[sizeof h->provider];
        rfaas_msg_u64(&req, RFAAS_TAG_KEY, h->key);
        int status = rfaas_api_ask("lease", RFAAS_OP_NEXT, &req, &reply);
        if (status)
            return status;
        rfaas_msg_get_str(&reply, RFAAS_TAG_PROVIDER, provider, sizeof provider);
        rfaas_msg_get_str(&reply, RFAAS_TAG_EXECUTOR, h->executor, sizeof h->executor);
        rfaas_msg_get_str(&reply, RFAAS_TAG_NODE, h->node, sizeof h->node);
        uint64_t kept = rfaas_msg_get_u64(&reply, RFAAS_TAG_KEPT, 0);
        rfaas_msg_free(&reply);
        drop_channels(h);
        if (kept) { /* whatever is wrong with it: the next candidate is a new one */
            h->lease_id = 0;
            if (!rfaas_api_adopt(h, kept) || ((status = grant(l, h)) && !h->lease_id))
                continue;
            return status;
        }
        status = make_channels(l, h, provider);
        if (status)
            return status;
        status = grant(l, h);
        int class = dp_status_class(status);
        if (class != RFAAS_CLASS_BUSY && (class != RFAAS_CLASS_CONNECTION || status == RFAAS_PROTOCOL))
            return status;
    }
}
