/* Moving the channels of an endpoint from virtual queue pairs to private ones. See dp_channel.h.
 *
 * Order. When a worker is asked to move, no other call is in flight on its channel, so it has answered all earlier requests. It connects its
 * second queue pair before it answers, and sends all later replies on it. The client sends all later requests on its private queue pair. So the
 * number of that call separates the two connections, and no request or reply can overtake another.
 *
 * Each lane has one channel. So a lane changes its completion queue together with its channel, and the other channels are not affected. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dp_channel_impl.h"
#include "dp_vqp.h"

/* The new parts of one channel. */
typedef struct part {
    dp_channel *ch;
    dp_cq *cq;
    dp_qp *qp; /* NULL: the channel has taken it */
    dp_mem *results, *staging;
    dp_side peer;
    uint32_t slot; /* of the message */
    bool asked, met, refused;
} part;

struct dp_promotion {
    dp_endpoint *ep;
    dp_dev *dev;
    dp_domain *domain;
    bool shared; /* the domain is the endpoint's */
    part *parts;
    uint32_t n;
};

bool dp_endpoint_brokered(const dp_endpoint *ep) { return dp_vqp_is(ep->dev); }

bool dp_channel_brokered(const dp_channel *ch) { return dp_vqp_is(ch->lane->cq->dev); }

bool dp_channel_given_up(const dp_channel *ch) { return dp_channel_brokered(ch) && dp_vqp_given_up(ch->qp); }

/* ---- preparing ---- */

static int prepare_part(dp_promotion *p, part *t, dp_cq *beside, dp_error *err) {
    dp_channel *ch = t->ch;
    dp_qp_attr a = {.max_send = 2 * ch->cfg.depth + 8, .max_recv = ch->cfg.depth, .max_inline = 256, .n_expose = 1};
    int st = beside ? dp_cq_create_beside(beside, p->ep->lane_capacity, &t->cq, err) : dp_cq_create(p->dev, p->ep->lane_capacity, &t->cq, err);
    if (!st)
        st = dp_mem_register(p->domain, ch->results->addr, ch->results->size, DP_REMOTE_WRITE, &t->results, err);
    if (!st)
        st = dp_mem_register(p->domain, ch->staging->addr, ch->staging->size, 0, &t->staging, err);
    a.expose[0] = t->results;
    if (!st)
        st = dp_qp_create(p->domain, t->cq, &a, &t->qp, err);
    for (uint32_t i = 0; i < ch->cfg.depth && !st; i++)
        if ((st = dp_post_recv(t->qp, 0)))
            dp_fail(err, st, 0, "post receive %u of %u", i, ch->cfg.depth);
    return st;
}

static int prepare(dp_promotion *p, dp_error *err) {
    int st = DP_OK;
    if (p->ep->other && p->ep->other->dev == p->dev) { /* some channels moved with an earlier promotion */
        p->domain = p->ep->other;
        p->shared = true;
    } else {
        st = p->ep->other ? dp_fail(err, DP_INVALID, 0, "promote: some channels use another device") : dp_domain_create(p->dev, &p->domain, err);
    }
    for (uint32_t i = 0; i < p->n && !st; i++)
        st = prepare_part(p, &p->parts[i], i ? p->parts[0].cq : NULL, err);
    return st;
}

int dp_promotion_prepare(dp_endpoint *ep, dp_dev *dev, dp_promotion **out, dp_error *err) {
    if (!dp_vqp_is(ep->dev) || dev->provider != ep->dev->provider)
        return dp_fail(err, DP_INVALID, 0, "promote: the endpoint has no virtual queue pairs, or those of another provider");
    dp_promotion *p = calloc(1, sizeof *p);
    part *parts = calloc(ep->n_lanes, sizeof *parts);
    if (!p || !parts) {
        free(p);
        free(parts);
        return dp_fail(err, DP_FATAL, ENOMEM, "promote");
    }
    *p = (dp_promotion){.ep = ep, .dev = dev, .parts = parts};
    int st = DP_OK;
    for (uint32_t i = 0; i < ep->n_lanes && !st; i++) {
        dp_lane *lane = ep->lanes[i];
        if (lane->n_channels > 1)
            st = dp_fail(err, DP_UNSUPPORTED, 0, "promote: %u channels share a completion queue", lane->n_channels);
        else if (lane->channels && dp_vqp_is(lane->cq->dev))
            parts[p->n++].ch = lane->channels;
    }
    if (!st)
        st = prepare(p, err);
    if (st) {
        dp_promotion_free(p);
        return st;
    }
    *out = p;
    return DP_OK;
}

/* Returns the part of a channel that has not moved, or NULL. */
static part *part_of(dp_promotion *p, const dp_channel *ch) {
    for (uint32_t i = 0; i < p->n; i++)
        if (p->parts[i].ch == ch && p->parts[i].qp)
            return &p->parts[i];
    return NULL;
}

/* ---- asking a worker ---- */

bool dp_promotion_possible(dp_promotion *p, const dp_channel *ch) {
    const part *t = part_of(p, ch);
    return t && !t->asked && !t->refused && !dp_channel_status(ch) && !ch->n_busy && !ch->n_abandoned && ch->n_free;
}

bool dp_promotion_abandoned(const dp_channel *ch) { return ch->n_abandoned; }

int dp_promotion_ask(dp_promotion *p, dp_channel *ch, dp_error *err) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    if (!dp_promotion_possible(p, ch))
        return dp_fail(err, DP_BUSY, 0, "promote: calls are in flight");
    part *t = part_of(p, ch);
    int st = dp_side_encode(t->qp, &ch->layout, DP_ROLE_CLIENT, ch->generation, t->results, blob, &len, err);
    if (!st && (st = dp_channel_submit_move(ch, blob, len, &t->slot)))
        dp_fail(err, st, 0, "promote: ask the worker");
    if (st)
        return st;
    t->asked = true;
    dp_channel_reserve(ch);
    return DP_OK;
}

int dp_promotion_await(dp_promotion *p, dp_channel *ch, int64_t until_ns) {
    const part *t = part_of(p, ch);
    return t && t->asked ? dp_channel_wait(ch, t->slot, until_ns) : DP_OK;
}

static int check_worker(const dp_channel *ch, const dp_side *side, dp_error *err) {
    if (side->generation != ch->generation || side->addr != ch->peer.addr || side->rkey != ch->peer.rkey || side->layout.size != ch->layout.size)
        return dp_fail(err, DP_BAD_BLOB, 0, "promote: another worker answers");
    return DP_OK;
}

int dp_promotion_meet(dp_promotion *p, dp_channel *ch, dp_error *err) {
    part *t = part_of(p, ch);
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    dp_started started;
    dp_side side;
    if (!t || !t->asked)
        return dp_fail(err, DP_INVALID, 0, "promote: the worker was not asked");
    if (dp_channel_result(ch, t->slot, NULL, NULL, NULL) == DP_INVALID)
        return dp_fail(err, DP_BUSY, 0, "promote: the worker has not answered");
    int st = dp_channel_finish(ch, t->slot, blob, &len, &started);
    t->asked = false;
    if (ch->reserved) /* otherwise the channel has failed */
        dp_channel_unreserve(ch);
    if (dp_channel_status(ch))
        return dp_fail(err, dp_channel_status(ch), 0, "promote: the worker does not answer");
    if (st) {
        t->refused = true;
        return dp_fail(err, DP_UNSUPPORTED, 0, "promote: the worker refuses: %s", dp_status_text(st));
    }
    st = dp_side_decode(blob, len, DP_ROLE_WORKER, p->dev->provider, &side, err);
    if (!st)
        st = check_worker(ch, &side, err);
    if (!st)
        st = dp_qp_connect(t->qp, side.qp_blob, side.qp_len, err);
    if (st) { /* the worker has moved: the old connection cannot be used any more */
        dp_channel_fail(ch, DP_CONNECTION);
        dp_channel_end_calls(ch, DP_CONNECTION);
        return st;
    }
    t->peer = side;
    t->met = true;
    return DP_OK;
}

/* ---- switching ---- */

static void end_asking(part *t) {
    dp_started started;
    uint32_t size = 0;
    if (!t->asked)
        return;
    t->asked = false;
    if (dp_channel_result(t->ch, t->slot, NULL, NULL, NULL) == DP_INVALID)
        dp_channel_abandon(t->ch, t->slot);
    else
        dp_channel_finish(t->ch, t->slot, NULL, &size, &started);
}

void dp_promotion_switch(dp_promotion *p, dp_channel *ch) {
    part *t = part_of(p, ch);
    if (!t)
        return;
    dp_qp *old = ch->qp;
    dp_cq *cq = ch->lane->cq;
    int why = dp_qp_broken(old);
    end_asking(t);
    if (!t->met && !why)
        why = DP_CONNECTION; /* its worker cannot be reached any more */
    ch->qp = t->qp;
    ch->qp->user = ch;
    if (why) /* perhaps since the worker answered */
        dp_qp_break(ch->qp, why);
    ch->mapped[0] = ch->results;
    ch->mapped[1] = ch->staging;
    ch->results = t->results;
    ch->staging = t->staging;
    if (t->met)
        ch->peer = t->peer;
    else
        dp_channel_end_calls(ch, why);
    ch->lane->cq = t->cq;
    p->ep->other = p->domain;
    p->shared = true;
    t->qp = NULL;
    t->results = t->staging = NULL;
    t->cq = cq;
    dp_vqp_close(old);
    dp_qp_destroy(old);
}

bool dp_promotion_complete(dp_promotion *p) {
    dp_endpoint *ep = p->ep;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        if (dp_vqp_is(ep->lanes[i]->cq->dev) && ep->lanes[i]->n_channels)
            return false;
    if (!dp_vqp_is(ep->dev))
        return true;
    dp_domain *virtual = ep->domain;
    ep->domain = ep->other;
    ep->other = virtual;
    ep->dev = p->dev;
    return true;
}

bool dp_promotion_over(dp_promotion *p) {
    for (uint32_t i = 0; i < p->n; i++)
        if (p->parts[i].qp && !p->parts[i].refused)
            return false;
    return true;
}

void dp_promotion_free(dp_promotion *p) {
    if (!p)
        return;
    for (uint32_t i = 0; i < p->n; i++) {
        part *t = &p->parts[i];
        dp_qp_destroy(t->qp);
        dp_mem_free(t->results);
        dp_mem_free(t->staging);
        dp_cq_destroy(t->cq);
    }
    if (!p->shared)
        dp_domain_destroy(p->domain);
    free(p->parts);
    free(p);
}
