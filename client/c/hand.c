/* Handing over cached grants to other processes of this user, on shm and tcp. The agent holds the descriptors of the grants' channels.
 *
 *   release ── HAND, RELEASE ──▶ agent ◀── ACQUIRE ── a process without a cached grant of these terms
 *                                  └────── HAND, candidate ──▶ makes the channels, and offers them to the same workers
 *
 *   release ── RELEASE ──▶ agent, which has a spare lease of these terms
 *      ◀── HAND, released ──┘     makes the channels of the spare lease, which the next lease claims without asking the agent
 *
 * A channel is packed at rest, so its description stays valid until a lease takes the grant. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

/* Some channels of a grant, as one message. */
typedef struct load {
    rfaas_agent_hand hand;
    dp_packed_channel *channels;
    int fds[RFAAS_AGENT_FDS];
} load;

static bool send_load(load *o) {
    rfaas_request_parts parts = {.body = &o->hand, .body_size = sizeof o->hand, .tail = o->channels,
                                 .tail_size = o->hand.count * sizeof *o->channels, .fd = -1,
                                 .fds = o->hand.held ? NULL : o->fds, .n_fds = o->hand.fds};
    bool sent = rfaas_agent_pass(RFAAS_AGENT_HAND, &parts);
    o->hand.first += o->hand.count;
    o->hand.count = o->hand.fds = 0;
    return sent;
}

void rfaas_api_hand_over(rfaas_grant *h) {
    enum { MOST = RFAAS_AGENT_FDS / 6 }; /* most channels of one message */
    int page = dp_endpoint_pack(h->ep);
    load o = {.hand = {.key = h->key, .size = sizeof *o.channels, .held = h->held_by && h->held_by == rfaas_agent_generation()}};
    if (page < 0 || !(o.channels = malloc((h->n_workers < MOST ? h->n_workers : MOST) * sizeof *o.channels)))
        return;
    o.fds[o.hand.fds++] = page;
    bool good = true;
    for (uint32_t i = 0; i < h->n_workers && good; i++) {
        if (o.hand.count == MOST || o.hand.fds + DP_PACKED_FDS > RFAAS_AGENT_FDS)
            good = send_load(&o);
        dp_packed_channel *p = &o.channels[o.hand.count];
        good = good && !dp_channel_pack(h->workers[i].ch, p, o.fds + o.hand.fds, NULL);
        o.hand.count += good;
        o.hand.fds += good ? p->qp.n_fds : 0;
    }
    if (good) /* otherwise the agent notices that channels are missing */
        send_load(&o);
    free(o.channels);
}

int rfaas_api_unpack_channels(rfaas_lease *l, rfaas_grant *h, const char *provider, const rfaas_reply *r) {
    const rfaas_lease_options *o = &l->options;
    dp_dev *dev = NULL;
    dp_error err = {0};
    uint32_t at = 1;
    if (r->n_channels != h->n_workers || r->n_fds < 1)
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the agent sent %u of %u channels", r->n_channels, h->n_workers);
    /* No process can take over a connection on verbs: the agent keeps it, and posts for this process. */
    int status = rfaas_api_session_device(l->session, strcmp(provider, "verbs") ? provider : "brokered", &dev);
    if (status)
        return status;
    if (dp_endpoint_unpack(dev, o->workers, o->depth, (dp_wait_mode)o->wait_mode, &r->fds[0], &h->ep, &err))
        return rfaas_api_fail_dp("lease", &err);
    for (uint32_t i = 0; i < h->n_workers; i++) {
        const dp_packed_channel *p = &r->channels[i];
        rfaas_worker *w = &h->workers[i];
        if (p->qp.n_fds > r->n_fds - at)
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the agent sent %u descriptors for %u channels", r->n_fds, h->n_workers);
        if (dp_channel_unpack(h->ep, p, r->fds + at, &w->ch, &err))
            return rfaas_api_fail_dp("lease", &err);
        at += p->qp.n_fds;
        h->cfg = *dp_channel_get_config(w->ch);
        if (h->cfg.depth != o->depth || h->cfg.eager != ((o->eager + 63) & ~63u) || h->cfg.bulk != ((o->bulk + 63) & ~63ull))
            return rfaas_api_fail(RFAAS_PROTOCOL, 0, "lease: the agent sent channels of depth %u, want %u", h->cfg.depth, o->depth);
    }
    snprintf(h->provider, sizeof h->provider, "%s", provider);
    return RFAAS_OK;
}

bool rfaas_api_take_over(rfaas_lease *l, rfaas_grant *h, const char *provider, const rfaas_reply *r) {
    dp_error err = {0};
    bool good = !rfaas_api_unpack_channels(l, h, provider, r);
    for (uint32_t i = 0; i < h->n_workers && good; i++) {
        good = !dp_channel_next_generation(h->workers[i].ch, &err);
        h->workers[i].resumes = true;
    }
    return good;
}
