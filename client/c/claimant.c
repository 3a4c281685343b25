/* Claimants: on verbs, the library claims cached workers over a queue pair of its own, to a cell in the executor's memory that nobody else reaches
 * (dp_claim.h). A session has at most one for each executor, made at a release.
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
#define ATTACH_NS 1000000000ll /* longest time that a release waits for a claimant, without the second of rfaas_agent_ask and that of dp_raw_connect */
#define AGAIN_NS 10000000000ll /* pause after a refusal, or a claim whose outcome is unknown */
#define SPIN_NS 100000       /* then pauses of this length between two reads */
#define MOST 16              /* executors that a session knows. Beyond them, it forgets the one that was used least recently */

typedef struct queue_pair {
    dp_dev *dev;
    dp_domain *domain;
    dp_raw *conn; /* NULL: the session is no claimant of this executor */
    uint64_t cell;
    uint32_t rkey;
    uint32_t by; /* generation of the agent that has asked the executor */
} queue_pair;

struct rfaas_claimant {
    struct rfaas_claimant *next;
    queue_pair q;
    uint32_t may;   /* generation of the agent that has answered OWN_MAY */
    bool attaching; /* a thread makes the queue pair; the claimant stays */
    int64_t pause;  /* until this CLOCK_MONOTONIC time in ns, no queue pair is made */
    char executor[RFAAS_AGENT_ADDRESS];
};

/* Takes the queue pair. The caller passes it to destroy after it has unlocked claimants_mu. */
static queue_pair detach(rfaas_claimant *c) {
    queue_pair q = c->q;
    c->q = (queue_pair){0};
    return q;
}

static void destroy(const queue_pair *q) { rfaas_api_reap_connection(q->dev, q->conn, q->domain); }

/* Returns the claimant of an executor, which becomes the first; NULL: there is none. Under claimants_mu. */
static rfaas_claimant *find(rfaas_session *s, const char *executor) {
    for (rfaas_claimant **p = &s->claimants, *c; (c = *p); p = &c->next)
        if (!strcmp(c->executor, executor)) {
            *p = c->next;
            c->next = s->claimants;
            return s->claimants = c;
        }
    return NULL;
}

/* Adds a claimant. If there are MOST, removes the last one that no thread uses, and sets *old. Returns NULL without memory. Under claimants_mu. */
static rfaas_claimant *add(rfaas_session *s, const char *executor, queue_pair *old) {
    rfaas_claimant *c = calloc(1, sizeof *c), **last = NULL;
    if (!c)
        return NULL;
    int n = 0;
    for (rfaas_claimant **p = &s->claimants; *p; p = &(*p)->next, n++)
        if (!(*p)->attaching)
            last = p;
    if (n >= MOST && last) {
        rfaas_claimant *gone = *last;
        *last = gone->next;
        *old = gone->q;
        free(gone);
    }
    memcpy(c->executor, executor, strnlen(executor, sizeof c->executor - 1));
    c->next = s->claimants;
    return s->claimants = c;
}

/* Makes the queue pair. After an error, *q has what the caller must destroy. */
static int attach(rfaas_lease *l, uint32_t by, queue_pair *q) {
    dp_error err = {0};
    rfaas_agent_attach req = {.key = l->grant->key, .blob.size = sizeof req.blob.bytes};
    int status = rfaas_api_session_device(l->session, "verbs", &q->dev);
    if (!status)
        status = dp_domain_create(q->dev, &q->domain, &err);
    if (!status)
        status = dp_raw_create(q->domain, NULL, 0, &q->conn, &err);
    if (!status)
        status = dp_raw_export(q->conn, req.blob.bytes, &req.blob.size, &err);
    if (status)
        return status;
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1, .to = by}; /* an earlier agent would end the connection */
    rfaas_reply reply;
    int64_t timeout = l->session->timeout_ns;
    if ((status = rfaas_agent_ask("attach a claimant", RFAAS_AGENT_ATTACH, &parts, timeout < ATTACH_NS ? timeout : ATTACH_NS, sizeof(rfaas_agent_attached), &reply)))
        return status;
    rfaas_agent_attached a;
    memcpy(&a, reply.data, sizeof a);
    rfaas_reply_free(&reply);
    q->by = by;
    q->cell = a.addr;
    q->rkey = a.rkey;
    return a.blob.size > sizeof a.blob.bytes ? DP_PROTOCOL : dp_raw_connect(q->conn, a.blob.bytes, a.blob.size, &err);
}

bool rfaas_api_claimant_ready(rfaas_lease *l) {
    rfaas_session *s = l->session;
    rfaas_grant *h = l->grant;
    uint32_t agent = rfaas_agent_generation();
    queue_pair old = {0}, made = {0};
    if (strcmp(h->provider, "verbs"))
        return false;
    pthread_mutex_lock(&s->claimants_mu);
    rfaas_claimant *c = find(s, h->executor);
    if (c && c->q.conn && c->q.by != agent)
        old = detach(c);
    bool ready = c && c->q.conn;
    /* A program that has used cached workers will probably do so again. Others do not wait for the queue pair. */
    bool make = c && !ready && !c->attaching && c->may == agent && h->starts[RFAAS_START_CACHED] && dp_now_ns() >= c->pause;
    if (make)
        c->attaching = true;
    pthread_mutex_unlock(&s->claimants_mu); /* other threads claim meanwhile */
    destroy(&old);
    if (!make)
        return ready;
    ready = !attach(l, agent, &made);
    pthread_mutex_lock(&s->claimants_mu);
    c->attaching = false;
    if (ready)
        c->q = made; /* no other thread has made one */
    else
        c->pause = dp_now_ns() + AGAIN_NS;
    pthread_mutex_unlock(&s->claimants_mu);
    if (!ready)
        destroy(&made);
    return ready;
}

void rfaas_api_claimant_answered(rfaas_session *s, const char *executor, const rfaas_agent_released *r, bool asked, uint32_t by) {
    queue_pair old = {0};
    if (r->own != RFAAS_AGENT_OWN_MAY)
        return;
    pthread_mutex_lock(&s->claimants_mu);
    rfaas_claimant *c = find(s, executor);
    if (c && asked)
        old = detach(c); /* the executor does not know the claimant any more */
    else if (!c)
        c = add(s, executor, &old);
    if (c)
        c->may = by;
    pthread_mutex_unlock(&s->claimants_mu);
    destroy(&old);
}

/* Sets *won and returns DP_OK, or returns why the outcome is unknown. */
static int claim(const queue_pair *q, uint64_t wish, bool *won) {
    int64_t now = dp_now_ns(), began = now, until = now + CLAIM_NS;
    uint64_t answer = 0;
    int status = dp_raw_write_ring(q->conn, &wish, sizeof wish, q->cell + offsetof(dp_claim_cell, wish), q->rkey, until);
    while (!status && !(status = dp_raw_read(q->conn, &answer, sizeof answer, q->cell + offsetof(dp_claim_cell, answer), q->rkey, until))) {
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
    queue_pair old = {0};
    if (h->claim.line >= DP_CLAIM_LINES)
        return false;
    pthread_mutex_lock(&s->claimants_mu); /* also keeps the claimant while its operations are under way, and the cell has room for one wish */
    rfaas_claimant *c = find(s, h->executor);
    if (c && c->q.conn && h->claim_by == c->q.by && c->q.by == rfaas_agent_generation() && claim(&c->q, dp_claim_wish(h->claim.line, h->claim.sequence), &won)) {
        old = detach(c);
        c->pause = dp_now_ns() + AGAIN_NS;
        won = false;
    }
    pthread_mutex_unlock(&s->claimants_mu);
    destroy(&old);
    *out = (dp_claimed){h->own.lease_id, h->own.client_ns, false};
    return won;
}

void rfaas_api_claimants_close(rfaas_session *s) {
    for (rfaas_claimant *c; (c = s->claimants); free(c)) { /* no other thread uses the session */
        s->claimants = c->next;
        destroy(&c->q);
    }
}
