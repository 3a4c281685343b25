#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dp_channel_impl.h"
#include "dp_vqp.h"

/* ---- endpoints ---- */

static int make_lane(dp_endpoint *ep, int *page, dp_error *err) {
    dp_lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return dp_fail(err, DP_FATAL, ENOMEM, "create endpoint");
    int st = ep->n_lanes ? dp_cq_create_beside(ep->lanes[0]->cq, ep->lane_capacity, &lane->cq, err)
             : page      ? dp_cq_unpack(ep->dev, ep->lane_capacity, page, &lane->cq, err)
                         : dp_cq_create(ep->dev, ep->lane_capacity, &lane->cq, err);
    if (st) {
        free(lane);
        return st;
    }
    lane->ep = ep;
    dp_waiter_init(&lane->waiter, ep->mode);
    lane->waiter.yields = ep->dev->provider == DP_PROVIDER_TCP || dp_vqp_is(ep->dev);
    if (ep->mode == DP_WAIT_HOT)
        dp_cq_promise_hot(lane->cq, true);
    ep->lanes[ep->n_lanes++] = lane;
    return DP_OK;
}

/* Returns the lane for the next channel in *out: the lane with the fewest channels, or a new lane if none is empty and there may be more. */
static int take_lane(dp_endpoint *ep, dp_lane **out, dp_error *err) {
    dp_lane *best = NULL;
    for (uint32_t i = 0; i < ep->n_lanes; i++)
        if (!best || ep->lanes[i]->n_channels < best->n_channels)
            best = ep->lanes[i];
    if (best->n_channels && ep->n_lanes < ep->max_lanes) {
        int st = make_lane(ep, NULL, err);
        if (st)
            return st;
        best = ep->lanes[ep->n_lanes - 1];
    }
    *out = best;
    return DP_OK;
}

/* page: descriptor of the first completion queue, to be unpacked, or NULL for a new one. */
static int make_endpoint(dp_dev *dev, uint32_t max_channels, uint32_t max_depth, dp_wait_mode mode, int *page, dp_endpoint **out,
                         dp_error *err) {
    if (max_channels == 0 || max_channels > 1024 || max_depth == 0 || max_depth > DP_DEPTH_MAX)
        return dp_fail(err, DP_INVALID, 0, "create endpoint: %u channels (1..1024) of depth %u (1..%d)", max_channels,
                       max_depth, DP_DEPTH_MAX);
    if (mode < DP_WAIT_ADAPTIVE || mode > DP_WAIT_WARM)
        return dp_fail(err, DP_INVALID, 0, "create endpoint: unknown wait mode %d", mode);
    dp_endpoint *ep = calloc(1, sizeof *ep);
    if (!ep)
        return dp_fail(err, DP_FATAL, ENOMEM, "create endpoint");
    ep->dev = dev;
    ep->mode = mode;
    ep->max_lanes = max_channels < DP_LANES_MAX ? max_channels : DP_LANES_MAX;
    uint64_t each = 3 * (uint64_t)max_depth + 8, capacity = (max_channels + ep->max_lanes - 1) / ep->max_lanes * each;
    ep->lane_capacity = capacity > 1u << 20 ? 1u << 20 : (uint32_t)capacity;
    ep->lanes = calloc(ep->max_lanes, sizeof(dp_lane *));
    int st = ep->lanes ? dp_domain_create(dev, &ep->domain, err) : dp_fail(err, DP_FATAL, ENOMEM, "create endpoint");
    if (!st)
        st = make_lane(ep, page, err); /* make the first lane at once, so that the device's errors appear here */
    if (st) {
        dp_endpoint_destroy(ep);
        return st;
    }
    *out = ep;
    return DP_OK;
}

int dp_endpoint_create(dp_dev *dev, uint32_t max_channels, uint32_t max_depth, dp_wait_mode mode, dp_endpoint **out,
                       dp_error *err) {
    return make_endpoint(dev, max_channels, max_depth, mode, NULL, out, err);
}

int dp_endpoint_unpack(dp_dev *dev, uint32_t max_channels, uint32_t max_depth, dp_wait_mode mode, int *fd, dp_endpoint **out,
                       dp_error *err) {
    return make_endpoint(dev, max_channels, max_depth, mode, fd, out, err);
}

int dp_endpoint_pack(const dp_endpoint *ep) { return dp_cq_pack(ep->lanes[0]->cq); }

void dp_endpoint_destroy(dp_endpoint *ep) {
    if (!ep)
        return;
    for (uint32_t i = 0; i < ep->n_lanes; i++) {
        dp_cq_destroy(ep->lanes[i]->cq);
        free(ep->lanes[i]);
    }
    dp_domain_destroy(ep->domain);
    dp_domain_destroy(ep->other);
    free(ep->lanes);
    free(ep);
}

dp_domain *dp_endpoint_domain(dp_endpoint *ep) { return ep->domain; }

dp_dev *dp_endpoint_device(const dp_endpoint *ep) { return dp_vqp_is(ep->dev) && ep->other ? ep->other->dev : ep->dev; }

/* ---- channels ---- */

static void slots_reset(dp_channel *ch) {
    uint32_t depth = ch->cfg.depth;
    for (uint32_t i = 0; i < depth; i++) {
        if (ch->slots[i].parts)
            dp_parts_free(ch, &ch->slots[i]);
        ch->slots[i] = (slot){.state = SLOT_FREE, .in_at = DP_NOTHING, .out_at = DP_NOTHING, .told = DP_UNTOLD};
        ch->free[i] = depth - 1 - i;
    }
    ch->n_free = depth;
    ch->n_busy = ch->n_done = ch->n_abandoned = ch->n_overdue = 0;
    ch->bulk_in.n = ch->bulk_out.n = 0;
    ch->mailbox = NULL;
    ch->mailbox_slot = DP_NOTHING;
    dp_channel_forget_silence(ch);
    ch->failed = 0;
    ch->held = ch->reserved = false;
    do
        dp_random(&ch->generation, sizeof ch->generation);
    while (!ch->generation);
    dp_random(&ch->next_call, sizeof ch->next_call); /* so that wrap-around is nothing special */
}

static int post_receives(dp_channel *ch, dp_error *err) {
    for (uint32_t i = 0; i < ch->cfg.depth; i++) {
        int st = dp_post_recv(ch->qp, 0);
        if (st)
            return dp_fail(err, st, 0, "post receive %u of %u", i, ch->cfg.depth);
    }
    return DP_OK;
}

/* Makes a channel without its memory and queue pair. */
static int new_channel(dp_endpoint *ep, const dp_channel_config *cfg, dp_channel **out, dp_error *err) {
    uint64_t eager = ((uint64_t)cfg->eager + 63) & ~63ull;
    if (cfg->depth == 0 || cfg->depth > DP_DEPTH_MAX)
        return dp_fail(err, DP_INVALID, 0, "create channel: depth %u not in 1..%d", cfg->depth, DP_DEPTH_MAX);
    if (eager == 0 || eager > DP_EAGER_MAX)
        return dp_fail(err, DP_INVALID, 0, "create channel: eager size %u not in 1..%u", cfg->eager, DP_EAGER_MAX);
    if (cfg->bulk > DP_BULK_MAX)
        return dp_fail(err, DP_INVALID, 0, "create channel: bulk size %llu above %llu", (unsigned long long)cfg->bulk,
                       (unsigned long long)DP_BULK_MAX);
    dp_channel *ch = calloc(1, sizeof *ch);
    if (!ch)
        return dp_fail(err, DP_FATAL, ENOMEM, "create channel");
    int lane = take_lane(ep, &ch->lane, err);
    if (lane) {
        free(ch);
        return lane;
    }
    ch->ep = ep;
    ch->cfg = (dp_channel_config){cfg->depth, (uint32_t)eager, (cfg->bulk + 63) & ~63ull};
    dp_layout_set(&ch->layout, ch->cfg.depth, ch->cfg.eager, ch->cfg.bulk);
    ch->bulk_in.total = ch->bulk_out.total = (uint32_t)(ch->cfg.bulk / DP_BULK_UNIT);
    ch->slots = calloc(ch->cfg.depth, sizeof *ch->slots);
    ch->free = calloc(ch->cfg.depth, sizeof *ch->free);
    ch->bulk_in.used = calloc(ch->cfg.depth + 1, sizeof(dp_range));
    ch->bulk_out.used = calloc(ch->cfg.depth + 1, sizeof(dp_range));
    if (!ch->slots || !ch->free || !ch->bulk_in.used || !ch->bulk_out.used) {
        dp_channel_destroy(ch);
        return dp_fail(err, DP_FATAL, ENOMEM, "create channel of depth %u", cfg->depth);
    }
    *out = ch;
    return DP_OK;
}

static void add_to_lane(dp_channel *ch) {
    ch->qp->user = ch;
    dp_qp_repost(ch->qp);
    ch->next = ch->lane->channels;
    ch->lane->channels = ch;
    ch->lane->n_channels++;
}

int dp_channel_create(dp_endpoint *ep, const dp_channel_config *cfg, dp_channel **out, dp_error *err) {
    dp_channel *ch;
    int st = new_channel(ep, cfg, &ch, err);
    if (st)
        return st;
    st = dp_layout_alloc(ep->domain, &ch->layout, ch->layout.size, DP_REMOTE_WRITE, &ch->results, err);
    if (!st && !(ep->dev->caps & DP_CAP_SYNC_SOURCE))
        st = dp_layout_alloc(ep->domain, &ch->layout, ch->layout.size, 0, &ch->staging, err);
    if (!st) {
        dp_qp_attr attr = {.max_send = 2 * ch->cfg.depth + 8, .max_recv = ch->cfg.depth, .max_inline = 256,
                           .expose = {ch->results}, .n_expose = 1};
        st = dp_qp_create(ep->domain, ch->lane->cq, &attr, &ch->qp, err);
    }
    if (!st) {
        slots_reset(ch);
        st = post_receives(ch, err);
    }
    if (st) {
        dp_channel_destroy(ch);
        return st;
    }
    add_to_lane(ch);
    *out = ch;
    return DP_OK;
}

void dp_channel_destroy(dp_channel *ch) {
    if (!ch)
        return;
    for (dp_channel **p = &ch->lane->channels; *p; p = &(*p)->next)
        if (*p == ch) {
            *p = ch->next;
            ch->lane->n_channels--;
            break;
        }
    dp_qp_destroy(ch->qp);
    dp_mem_free(ch->results);
    dp_mem_free(ch->staging);
    dp_mem_free(ch->mapped[0]);
    dp_mem_free(ch->mapped[1]);
    for (uint32_t i = 0; ch->slots && i < ch->cfg.depth; i++)
        if (ch->slots[i].parts)
            dp_parts_free(ch, &ch->slots[i]);
    free(ch->gather);
    free(ch->slots);
    free(ch->free);
    free(ch->bulk_in.used);
    free(ch->bulk_out.used);
    free(ch);
}

int dp_channel_offer(dp_channel *ch, void *blob, uint32_t *len, dp_error *err) {
    return dp_side_encode(ch->qp, &ch->layout, DP_ROLE_CLIENT, ch->generation, ch->results, blob, len, err);
}

void dp_channel_hold(dp_channel *ch) {
    ch->held = true;
    if (!ch->failed)
        ch->failed = DP_PEER_GONE;
}

void dp_channel_reserve(dp_channel *ch) {
    if (ch->failed)
        return;
    ch->reserved = true;
    ch->failed = DP_PEER_GONE;
}

void dp_channel_unreserve(dp_channel *ch) {
    if (ch->reserved)
        ch->failed = 0;
    ch->reserved = false;
}

void dp_channel_find_mailbox(dp_channel *ch, bool large) {
    uint64_t at = ch->peer.addr + ch->layout.mailbox_at, carries = ch->cfg.eager > ch->cfg.bulk ? ch->cfg.eager : ch->cfg.bulk;
    /* post_mailbox() reaches the slots from the mailbox, so one region must hold both. The worker chooses the addresses. */
    bool slots = large && dp_rkey_ptr(ch->qp, ch->peer.addr, ch->peer.rkey, ch->layout.mailbox_at + DP_MAILBOX_SLOTS_SIZE);
    ch->mailbox = large ? dp_rkey_ptr(ch->qp, at, ch->peer.rkey, DP_MAILBOX_LARGE_SIZE) : NULL;
    ch->mailbox_large = ch->mailbox != NULL;
    if (!ch->mailbox) /* none, or a worker of an earlier version */
        ch->mailbox = dp_rkey_ptr(ch->qp, at, ch->peer.rkey, sizeof *ch->mailbox);
    uint32_t most = dp_mailbox_most(ch->mailbox_large, slots ? ch->cfg.eager : 0);
    ch->mailbox_max = carries < most ? (uint32_t)carries : most;
    if (ch->mailbox)
        ch->mailbox_last = dp_mailbox_call_id(__atomic_load_n(&ch->mailbox->request, __ATOMIC_RELAXED));
}

int dp_channel_connect(dp_channel *ch, const void *blob, uint32_t len, dp_error *err) {
    dp_side side;
    int st = dp_side_decode(blob, len, DP_ROLE_WORKER, ch->ep->dev->provider, &side, err);
    if (st)
        return st;
    if (side.generation != ch->generation)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect channel: the worker answers generation %#x, not %#x",
                       side.generation, ch->generation);
    if (side.layout.depth != ch->layout.depth || side.layout.eager != ch->layout.eager ||
        side.layout.bulk != ch->layout.bulk)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect channel: the worker has depth %u, eager %u, bulk %llu",
                       side.layout.depth, side.layout.eager, (unsigned long long)side.layout.bulk);
    st = dp_qp_connect(ch->qp, side.qp_blob, side.qp_len, err);
    if (st)
        return st;
    ch->peer = side;
    dp_channel_find_mailbox(ch, true);
    if (ch->held && !dp_qp_broken(ch->qp))
        ch->failed = 0;
    ch->held = false;
    return DP_OK;
}

bool dp_channel_idle(const dp_channel *ch) {
    return ch->qp->state == DP_QP_CONNECTED && !dp_channel_status(ch) && ch->n_free == ch->cfg.depth;
}

void dp_channel_expect(dp_channel *ch) { dp_waiter_expect(&ch->lane->waiter); }

int dp_channel_next_generation(dp_channel *ch, dp_error *err) {
    if (!dp_channel_idle(ch))
        return dp_fail(err, DP_CONNECTION, 0, "next generation of the channel: %u of %u slots are free, status %d", ch->n_free, ch->cfg.depth,
                       dp_channel_status(ch));
    __atomic_store_n(&ch->lane->interrupted, 0, __ATOMIC_RELAXED);
    ch->generation = dp_generation_after(ch->generation);
    for (uint32_t i = 0; i < ch->cfg.depth; i++)
        ch->slots[i].told = DP_UNTOLD; /* the worker has forgotten all headers */
    dp_channel_expect(ch);
    return DP_OK;
}

int dp_channel_resume(dp_channel *ch, const void *blob, uint32_t len, dp_error *err) {
    dp_side side;
    int st = dp_side_decode(blob, len, DP_ROLE_WORKER, ch->ep->dev->provider, &side, err);
    if (st)
        return st;
    const dp_side *was = &ch->peer;
    if (side.addr != was->addr || side.rkey != was->rkey || side.qp_len != was->qp_len ||
        memcmp(side.qp_blob, was->qp_blob, was->qp_len) || side.layout.size != was->layout.size)
        return dp_fail(err, DP_BAD_BLOB, 0, "resume channel: another worker answers");
    return dp_channel_status(ch);
}

/* ---- handing over to another process ---- */

int dp_channel_pack(dp_channel *ch, dp_packed_channel *out, int *fds, dp_error *err) {
    if (!dp_channel_idle(ch))
        return dp_fail(err, DP_BUSY, 0, "pack: %u of %u slots are free, status %d", ch->n_free, ch->cfg.depth, dp_channel_status(ch));
    *out = (dp_packed_channel){.version = DP_PACKED_VERSION, .cfg = ch->cfg, .generation = ch->generation, .next_call = ch->next_call,
                               .rkey = ch->peer.rkey, .addr = ch->peer.addr, .blob_len = ch->peer.qp_len};
    memcpy(out->blob, ch->peer.qp_blob, ch->peer.qp_len);
    return dp_qp_pack(ch->qp, &out->qp, fds, err);
}

/* Takes over the worker's side and the state of calls from a packed channel. */
static int unpack_sides(dp_channel *ch, const dp_packed_channel *p, uint32_t exposed, dp_error *err) {
    const dp_mem *m = ch->results;
    if (exposed != (dp_vqp_is(ch->ep->dev) ? 2u : 1u) || m->size < ch->layout.size || m->access != DP_REMOTE_WRITE || ch->qp->max_recv != ch->cfg.depth ||
        ch->qp->max_send != 2 * ch->cfg.depth + 8)
        return dp_fail(err, DP_BAD_BLOB, 0, "take over a channel: its queue pair is not that of a channel of depth %u", ch->cfg.depth);
    slots_reset(ch);
    ch->generation = p->generation;
    ch->next_call = p->next_call; /* the mailbox still holds the words of the last call */
    ch->peer = (dp_side){.layout = ch->layout, .generation = p->generation, .addr = p->addr, .rkey = p->rkey, .qp_len = p->blob_len};
    memcpy(ch->peer.qp_blob, p->blob, p->blob_len);
    if (p->addr % DP_CACHE_LINE == 0)
        dp_channel_find_mailbox(ch, true);
    if ((!ch->mailbox && ch->ep->dev->caps & DP_CAP_RKEY_PTR) || p->addr % DP_CACHE_LINE)
        return dp_fail(err, DP_BAD_BLOB, 0, "take over a channel: the worker's memory has no mailbox");
    return DP_OK;
}

int dp_channel_unpack(dp_endpoint *ep, const dp_packed_channel *p, int *fds, dp_channel **out, dp_error *err) {
    dp_channel *ch;
    dp_mem *exposed[DP_EXPOSE_MAX];
    uint32_t n = 0;
    if (p->version != DP_PACKED_VERSION || p->blob_len > sizeof p->blob || p->generation == 0)
        return dp_fail(err, DP_BAD_BLOB, 0, "take over a channel: version %u, this side %u, or its description is malformed", p->version,
                       DP_PACKED_VERSION);
    int st = new_channel(ep, &p->cfg, &ch, err);
    if (st)
        return st;
    st = dp_qp_unpack(ep->domain, ch->lane->cq, &p->qp, fds, exposed, &n, &ch->qp, err);
    if (n)
        ch->results = exposed[0];
    if (n == 2 && dp_vqp_is(ep->dev))
        ch->staging = exposed[1];
    if (!st)
        st = unpack_sides(ch, p, n, err);
    if (st) {
        dp_channel_destroy(ch);
        for (uint32_t i = 1; i < n && !dp_vqp_is(ep->dev); i++)
            dp_mem_free(exposed[i]);
        return st;
    }
    add_to_lane(ch);
    *out = ch;
    return DP_OK;
}

int dp_channel_reset(dp_channel *ch, dp_error *err) {
    if (ch->n_done || (ch->n_busy && dp_channel_serves(ch)))
        return dp_fail(err, DP_BUSY, 0, "reset channel: %u calls under way, %u ended but not finished", ch->n_busy,
                       ch->n_done);
    /* From here on the worker's memory may be unmapped: should the reset fail, the channel is and stays failed. */
    dp_channel_end_calls(ch, DP_CONNECTION);
    ch->mailbox = NULL;
    int st = dp_qp_reset(ch->qp, err);
    if (!st)
        st = post_receives(ch, err);
    if (!st)
        slots_reset(ch);
    return st;
}

void dp_channel_fail(dp_channel *ch, int status) { dp_qp_break(ch->qp, status); }

int dp_channel_status(const dp_channel *ch) { return ch->failed ? ch->failed : dp_qp_broken(ch->qp); }

int dp_channel_broken(const dp_channel *ch) { return dp_qp_broken(ch->qp); }

void dp_channel_get_stats(const dp_channel *ch, dp_channel_stats *out) {
    *out = ch->stats;
    out->blocked_waits = 0;
    for (uint32_t i = 0; i < ch->ep->n_lanes; i++)
        out->blocked_waits += ch->ep->lanes[i]->waiter.blocked;
}

uint32_t dp_channel_free_slots(const dp_channel *ch) { return ch->n_free; }

const dp_channel_config *dp_channel_get_config(const dp_channel *ch) { return &ch->cfg; }
