/* Claimants: on verbs, the library claims cached workers over a queue pair of its own, to a cell in the executor's memory that nobody else reaches
 * (dp_claim.h). A session has one for each executor, made at a release.
 *
 *   release ──▶ agent: OWN_MAY    the next release of cached workers at this executor: ATTACH ──▶ claimant
 *   release with KEEP_OWN ──▶ agent ──▶ executor: binds the workers to the claimant ──▶ OWN_CLAIM
 *   lease_open ── wish, bell ──▶ executor: answers, thaws the workers
 *
 * A claim whose outcome is unknown ends the claimant. The caller then asks for the workers by message. The executor has decided about the claim by then, or
 * decides against it, and the agent releases the lease that the claim may have got. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"
#include "dp_raw.h"

#define CLAIM_NS 500000000ll /* longest time of a claim */
#define ATTACH_NS 2000000000ll /* longest time that a release waits for a claimant */
#define AGAIN_NS 10000000000ll /* pause after a refusal */
#define SPIN_NS 100000       /* then pauses of this length between two reads */

struct rfaas_claimant {
    struct rfaas_claimant *next;
    dp_domain *domain;
    dp_raw *conn;
    uint64_t cell;
    uint32_t rkey;
    uint32_t by; /* generation of the agent that has asked the executor */
    char executor[RFAAS_AGENT_ADDRESS];
};

/* The queue pair goes first: then no operation is under way that uses the memory. */
static void destroy(rfaas_claimant *c) {
    if (!c)
        return;
    dp_raw_destroy(c->conn);
    dp_domain_destroy(c->domain);
    free(c);
}

/* Returns where the claimant of an executor is, or would be. Under claimants_mu. */
static rfaas_claimant **find(rfaas_session *s, const char *executor) {
    rfaas_claimant **p = &s->claimants;
    while (*p && strcmp((*p)->executor, executor))
        p = &(*p)->next;
    return p;
}

static rfaas_claimant *take_out(rfaas_claimant **p) {
    rfaas_claimant *c = *p;
    if (c)
        *p = c->next;
    return c;
}

static int attach(rfaas_lease *l, rfaas_claimant *c) {
    dp_dev *dev;
    dp_error err = {0};
    rfaas_agent_attach req = {.key = l->grant->key, .blob.size = sizeof req.blob.bytes};
    int status = rfaas_api_session_device(l->session, "verbs", &dev);
    if (!status)
        status = dp_domain_create(dev, &c->domain, &err);
    if (!status)
        status = dp_raw_create(c->domain, NULL, 0, &c->conn, &err);
    if (!status)
        status = dp_raw_export(c->conn, req.blob.bytes, &req.blob.size, &err);
    if (status)
        return status;
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply;
    int64_t timeout = l->session->timeout_ns;
    if ((status = rfaas_agent_ask("attach a claimant", RFAAS_AGENT_ATTACH, &parts, timeout < ATTACH_NS ? timeout : ATTACH_NS, sizeof(rfaas_agent_attached), &reply)))
        return status;
    rfaas_agent_attached a;
    memcpy(&a, reply.data, sizeof a);
    c->by = reply.generation;
    rfaas_reply_free(&reply);
    c->cell = a.addr;
    c->rkey = a.rkey;
    return a.blob.size > sizeof a.blob.bytes ? DP_PROTOCOL : dp_raw_connect(c->conn, a.blob.bytes, a.blob.size, &err);
}

bool rfaas_api_claimant_ready(rfaas_lease *l) {
    rfaas_session *s = l->session;
    rfaas_grant *h = l->grant;
    if (strcmp(h->provider, "verbs") || !__atomic_load_n(&s->may_claim, __ATOMIC_RELAXED))
        return false;
    pthread_mutex_lock(&s->claimants_mu);
    rfaas_claimant **p = find(s, h->executor);
    if (*p && (*p)->by != rfaas_agent_generation())
        destroy(take_out(p));
    bool ready = *p;
    /* A program that has used cached workers will probably do so again. Others do not wait for the queue pair. */
    bool make = !ready && !s->attaching && h->starts[RFAAS_START_CACHED] && dp_now_ns() >= s->no_claimant_until;
    s->attaching |= make;
    pthread_mutex_unlock(&s->claimants_mu); /* other threads claim meanwhile */
    if (!make)
        return ready;
    rfaas_claimant *c = calloc(1, sizeof *c);
    if (c)
        memcpy(c->executor, h->executor, sizeof c->executor - 1);
    ready = c && !attach(l, c);
    pthread_mutex_lock(&s->claimants_mu);
    s->attaching = false;
    if (ready) { /* no other thread has made one */
        c->next = s->claimants;
        s->claimants = c;
    } else {
        destroy(c);
        s->no_claimant_until = dp_now_ns() + AGAIN_NS;
    }
    pthread_mutex_unlock(&s->claimants_mu);
    return ready;
}

void rfaas_api_claimant_answered(rfaas_session *s, const char *executor, const rfaas_agent_released *r, bool asked) {
    if (r->own != RFAAS_AGENT_OWN_MAY)
        return;
    __atomic_store_n(&s->may_claim, true, __ATOMIC_RELAXED);
    if (!asked)
        return;
    pthread_mutex_lock(&s->claimants_mu); /* the executor does not know the claimant any more */
    destroy(take_out(find(s, executor)));
    pthread_mutex_unlock(&s->claimants_mu);
}

/* Sets *won and returns DP_OK, or returns why the outcome is unknown. */
static int claim(rfaas_claimant *c, uint64_t wish, bool *won) {
    int64_t now = dp_now_ns(), began = now, until = now + CLAIM_NS;
    uint64_t answer = 0;
    int status = dp_raw_write_ring(c->conn, &wish, sizeof wish, c->cell + offsetof(dp_claim_cell, wish), c->rkey, until);
    while (!status && !(status = dp_raw_read(c->conn, &answer, sizeof answer, c->cell + offsetof(dp_claim_cell, answer), c->rkey, until))) {
        *won = answer == (wish | DP_CLAIM_WON);
        if (*won || answer == (wish | DP_CLAIM_LOST))
            return DP_OK;
        now = dp_now_ns();
        if (now >= until)
            return DP_DEADLINE;
        if (now - began > SPIN_NS)
            nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    }
    return status;
}

bool rfaas_api_claim_own(rfaas_session *s, const rfaas_grant *h, dp_claimed *out) {
    bool won = false;
    if (h->claim.line >= DP_CLAIM_LINES)
        return false;
    pthread_mutex_lock(&s->claimants_mu); /* also keeps the claimant while its operations are under way, and the cell has room for one wish */
    rfaas_claimant **p = find(s, h->executor), *c = *p;
    if (c && h->claim_by == c->by && c->by == rfaas_agent_generation() && claim(c, dp_claim_wish(h->claim.line, h->claim.sequence), &won)) {
        destroy(take_out(p));
        won = false;
    }
    pthread_mutex_unlock(&s->claimants_mu);
    *out = (dp_claimed){h->own.lease_id, h->own.client_ns, false};
    return won;
}

void rfaas_api_claimants_close(rfaas_session *s) {
    pthread_mutex_lock(&s->claimants_mu);
    while (s->claimants)
        destroy(take_out(&s->claimants));
    pthread_mutex_unlock(&s->claimants_mu);
}
