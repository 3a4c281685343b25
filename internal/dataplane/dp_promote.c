/* Moving the channels of an endpoint from virtual queue pairs to private ones. See dp_channel.h.
 *
 * Order. When the worker is asked to move, no other call is in flight, so it has answered all earlier requests. It connects its second queue
 * pair before it answers, and sends all later replies on it. The client sends all later requests on its private queue pair. So the number of
 * that call separates the two connections, and no request or reply can overtake another. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dp_channel_impl.h"
#include "dp_vqp.h"

/* The new parts of one channel; after the switch the old ones. */
typedef struct part {
    dp_channel *ch;
    uint32_t lane;
    dp_qp *qp;
    dp_mem *results, *staging;
    dp_side peer;
    uint32_t slot; /* of the message */
    bool asked, moved;
} part;

struct dp_promotion {
    dp_endpoint *ep;
    dp_dev *dev;
    dp_domain *domain;
    dp_cq **cqs; /* n_lanes */
    part *parts;
    uint32_t n_lanes, n;
    bool switched;
};

bool dp_endpoint_brokered(const dp_endpoint *ep) { return dp_vqp_is(ep->dev); }

/* ---- preparing ---- */

static int prepare_part(dp_promotion *p, part *t, dp_error *err) {
    dp_channel *ch = t->ch;
    dp_qp_attr a = {.max_send = 2 * ch->cfg.depth + 8, .max_recv = ch->cfg.depth, .max_inline = 256, .n_expose = 1};
    int st = dp_mem_register(p->domain, ch->results->addr, ch->results->size, DP_REMOTE_WRITE, &t->results, err);
    if (!st)
        st = dp_mem_register(p->domain, ch->staging->addr, ch->staging->size, 0, &t->staging, err);
    a.expose[0] = t->results;
    if (!st)
        st = dp_qp_create(p->domain, p->cqs[t->lane], &a, &t->qp, err);
    for (uint32_t i = 0; i < ch->cfg.depth && !st; i++)
        if ((st = dp_post_recv(t->qp, 0)))
            dp_fail(err, st, 0, "post receive %u of %u", i, ch->cfg.depth);
    return st;
}

static int prepare(dp_promotion *p, dp_error *err) {
    int st = dp_domain_create(p->dev, &p->domain, err);
    for (uint32_t i = 0; i < p->n_lanes && !st; i++)
        st = dp_cq_create(p->dev, p->ep->lane_capacity, &p->cqs[i], err);
    for (uint32_t i = 0; i < p->n && !st; i++)
        st = prepare_part(p, &p->parts[i], err);
    return st;
}

int dp_promotion_prepare(dp_endpoint *ep, dp_dev *dev, dp_promotion **out, dp_error *err) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        n += ep->lanes[i]->n_channels;
    if (!dp_vqp_is(ep->dev) || dev->provider != ep->dev->provider)
        return dp_fail(err, DP_INVALID, 0, "promote: the endpoint has no virtual queue pairs, or those of another provider");
    dp_promotion *p = calloc(1, sizeof *p);
    if (p) {
        *p = (dp_promotion){.ep = ep, .dev = dev, .n_lanes = ep->n_lanes, .n = n, .cqs = calloc(ep->n_lanes, sizeof(dp_cq *)),
                            .parts = calloc(n, sizeof(part))};
    }
    if (!p || !p->cqs || !p->parts) {
        if (p) {
            free(p->cqs);
            free(p->parts);
        }
        free(p);
        return dp_fail(err, DP_FATAL, ENOMEM, "promote");
    }
    n = 0;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        for (dp_channel *ch = ep->lanes[i]->channels; ch; ch = ch->next)
            p->parts[n++] = (part){.ch = ch, .lane = i};
    int st = prepare(p, err);
    if (st) {
        dp_promotion_free(p);
        return st;
    }
    *out = p;
    return DP_OK;
}

/* ---- asking the workers ---- */

static bool ready(const dp_channel *ch) { return !ch->n_busy && !ch->n_abandoned && !ch->reserved && !ch->held && (ch->failed || ch->n_free); }

bool dp_promotion_possible(const dp_endpoint *ep) {
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        for (const dp_channel *ch = ep->lanes[i]->channels; ch; ch = ch->next)
            if (!ready(ch))
                return false;
    return true;
}

static int ask(part *t, dp_error *err) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int st = dp_side_encode(t->qp, &t->ch->layout, DP_ROLE_CLIENT, t->ch->generation, t->results, blob, &len, err);
    if (!st && (st = dp_channel_submit_move(t->ch, blob, len, &t->slot)))
        dp_fail(err, st, 0, "promote: ask the worker");
    return st;
}

static int check_worker(const part *t, const dp_side *side, dp_error *err) {
    const dp_channel *ch = t->ch;
    if (side->generation != ch->generation || side->addr != ch->peer.addr || side->rkey != ch->peer.rkey || side->layout.size != ch->layout.size)
        return dp_fail(err, DP_BAD_BLOB, 0, "promote: another worker answers");
    return DP_OK;
}

/* Takes a worker's answer, and connects to its second queue pair. */
static int meet(part *t, int64_t deadline_ns, dp_error *err) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    dp_started started;
    int st = dp_channel_wait(t->ch, t->slot, deadline_ns);
    if (st) { /* it is unknown which queue pair the worker will use */
        dp_channel_abandon(t->ch, t->slot);
        dp_channel_end_calls(t->ch, DP_CONNECTION);
        return dp_fail(err, st, 0, "promote: the worker does not answer");
    }
    st = dp_channel_finish(t->ch, t->slot, blob, &len, &started);
    if (st)
        return dp_fail(err, st == DP_BAD_REQUEST ? DP_UNSUPPORTED : st, 0, "promote: the worker refuses: %s", dp_status_text(st));
    dp_side side;
    st = dp_side_decode(blob, len, DP_ROLE_WORKER, t->qp->domain->dev->provider, &side, err);
    if (!st)
        st = check_worker(t, &side, err);
    if (!st)
        st = dp_qp_connect(t->qp, side.qp_blob, side.qp_len, err);
    if (st) /* the worker has moved: the old connection cannot be used any more */
        dp_channel_end_calls(t->ch, DP_CONNECTION);
    else
        t->peer = side;
    t->moved = !st;
    return st;
}

int dp_promotion_ask(dp_promotion *p, int64_t deadline_ns, dp_error *err) {
    dp_error first = {0};
    uint32_t alive = 0, moved = 0, lost = 0;
    if (!dp_promotion_possible(p->ep))
        return dp_fail(err, DP_BUSY, 0, "promote: calls are in flight");
    for (uint32_t i = 0; i < p->n; i++) {
        part *t = &p->parts[i];
        dp_error e = {0};
        t->asked = !dp_channel_status(t->ch) && !ask(t, &e);
        alive += !dp_channel_status(t->ch);
        if (!t->asked && e.status && !first.status)
            first = e;
    }
    for (uint32_t i = 0; i < p->n; i++) {
        part *t = &p->parts[i];
        dp_error e = {0};
        if (t->asked && meet(t, deadline_ns, &e) && !first.status)
            first = e;
        moved += t->moved;
        lost += t->asked && !t->moved && dp_channel_status(t->ch);
    }
    if (alive && !moved && !lost) { /* all workers still use the old connections */
        if (err)
            *err = first;
        return first.status ? first.status : DP_UNSUPPORTED;
    }
    return DP_OK;
}

/* ---- switching ---- */

static void switch_part(part *t) {
    dp_channel *ch = t->ch;
    dp_qp *qp = ch->qp;
    int why = dp_qp_broken(qp);
    ch->qp = t->qp;
    ch->qp->user = ch;
    if (why) /* since the worker answered, its death or the end of the lease was noted */
        dp_qp_break(ch->qp, why);
    ch->mapped[0] = ch->results;
    ch->mapped[1] = ch->staging;
    ch->results = t->results;
    ch->staging = t->staging;
    if (t->moved)
        ch->peer = t->peer;
    else
        dp_channel_end_calls(ch, DP_CONNECTION); /* its worker cannot be reached any more */
    t->qp = qp;
    t->results = t->staging = NULL;
}

void dp_promotion_switch(dp_promotion *p) {
    dp_endpoint *ep = p->ep;
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        dp_cq *cq = ep->lanes[i]->cq;
        ep->lanes[i]->cq = p->cqs[i];
        p->cqs[i] = cq;
    }
    for (uint32_t i = 0; i < p->n; i++)
        switch_part(&p->parts[i]);
    ep->brokered = ep->domain;
    ep->domain = p->domain;
    ep->dev = p->dev;
    p->domain = NULL;
    p->switched = true;
}

void dp_promotion_free(dp_promotion *p) {
    if (!p)
        return;
    for (uint32_t i = 0; i < p->n; i++) {
        part *t = &p->parts[i];
        if (p->switched)
            dp_vqp_close(t->qp);
        dp_qp_destroy(t->qp);
        dp_mem_free(t->results);
        dp_mem_free(t->staging);
    }
    for (uint32_t i = 0; i < p->n_lanes; i++)
        dp_cq_destroy(p->cqs[i]);
    dp_domain_destroy(p->domain);
    free(p->cqs);
    free(p->parts);
    free(p);
}
