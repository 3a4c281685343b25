/* Connections of released leases that wait for the next one: a home's endpoint and channels, under the name that its key was.
 * The control part knows which lease fits which; here is only what it names.
 *
 *   release ──▶ kept ──▶ RFAAS_OP_RELEASE, kept ──▶ RFAAS_OP_NEXT names it ──▶ adopted by a new home
 *                │   └── not kept: destroyed     └─▶ an event names it: given up, destroyed
 *
 * Whoever takes a home off the list has it alone, which is what hands its objects from one thread to another. */
#include <stdlib.h>
#include <string.h>

#include "client.h"

static pthread_mutex_t kept_mu = PTHREAD_MUTEX_INITIALIZER; /* taken last, held for moments */
static rfaas_home *kept;                                    /* linked by link */

static void put(rfaas_home *h) {
    pthread_mutex_lock(&kept_mu);
    h->link = kept;
    kept = h;
    pthread_mutex_unlock(&kept_mu);
}

/* The home of this name, or with name 0 any of the session; NULL: there is none. */
static rfaas_home *take(uint64_t name, const rfaas_session *s) {
    pthread_mutex_lock(&kept_mu);
    rfaas_home **p = &kept;
    while (*p && (name ? (*p)->key != name : (*p)->session != s))
        p = &(*p)->link;
    rfaas_home *h = *p;
    if (h)
        *p = h->link;
    pthread_mutex_unlock(&kept_mu);
    return h;
}

uint64_t rfaas_api_kept(const rfaas_session *s) {
    uint64_t n = 0;
    pthread_mutex_lock(&kept_mu);
    for (const rfaas_home *h = kept; h; h = h->link)
        n += h->session == s;
    pthread_mutex_unlock(&kept_mu);
    return n;
}

void rfaas_api_drop_kept(uint64_t name) {
    rfaas_home *h = take(name, NULL);
    if (h)
        rfaas_api_home_destroy(h);
}

void rfaas_api_drop_all_kept(const rfaas_session *s) {
    for (rfaas_home *h; (h = take(0, s));)
        rfaas_api_home_destroy(h);
}

/* Whether the connections can go on with another lease: nothing is under way on them, nor can anything come late. */
static bool at_rest(rfaas_lease *l) {
    const rfaas_home *h = l->home;
    if (!h->ep || __atomic_load_n(&l->leaving, __ATOMIC_ACQUIRE) != LEAVING_NOT)
        return false;
    for (uint32_t i = 0; i < h->n_workers; i++)
        if (h->workers[i].broken || !dp_channel_idle(h->workers[i].ch))
            return false;
    pthread_mutex_lock(&l->mu);
    bool good = !h->ended;
    pthread_mutex_unlock(&l->mu);
    return good;
}

int rfaas_api_release_home(rfaas_lease *l) {
    static const char op[] = "release";
    rfaas_home *h = l->home;
    if (!at_rest(l))
        return rfaas_api_give_back(h, op);
    rfaas_api_free_buffers(l); /* they are registered with the endpoint's domain */
    uint64_t name = h->key;
    pthread_mutex_lock(&l->mu); /* an event that is being taken in has been, and none finds it any more */
    l->home = NULL;
    pthread_mutex_unlock(&l->mu);
    h->session = l->session;
    put(h); /* before the control part knows: it may give it to another thread at once */
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, name);
    rfaas_msg_u64(&req, RFAAS_TAG_KEPT, name);
    int status = rfaas_api_ask(op, RFAAS_OP_RELEASE, &req, &reply);
    bool taken = !status && rfaas_msg_get_u64(&reply, RFAAS_TAG_KEPT, 0) == name;
    if (!status)
        rfaas_msg_free(&reply);
    if (!taken)
        rfaas_api_drop_kept(name);
    return status;
}

bool rfaas_api_adopt(rfaas_home *h, uint64_t name) {
    rfaas_home *from = take(name, NULL);
    if (!from)
        return false;
    bool good = from->n_workers == h->n_workers;
    dp_error err = {0};
    for (uint32_t i = 0; i < from->n_workers && good; i++)
        good = !dp_channel_renew(from->workers[i].ch, &err);
    if (good) {
        for (uint32_t i = 0; i < h->n_workers; i++) {
            h->workers[i].ch = from->workers[i].ch;
            h->workers[i].resumes = true;
            from->workers[i].ch = NULL;
        }
        h->ep = from->ep;
        from->ep = NULL;
        dp_endpoint_on_silence(h->ep, rfaas_api_silent, h);
        h->cfg = from->cfg;
        memcpy(h->provider, from->provider, sizeof h->provider);
        rfaas_statistics sum = {0};
        rfaas_api_count(h, &sum);
        h->before = sum;
    }
    rfaas_api_home_destroy(from);
    return good;
}
