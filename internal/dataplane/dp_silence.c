/* Workers that do not answer. The client cannot tell a worker that runs a long function from one whose memory a function has damaged, so
 * that it sees no request and posts no reply: both are silent, and their devices still acknowledge. The client only knows that calls are
 * in flight and should have arrived. It calls the endpoint's silence function, which can ask the worker's executor. */
#include "dp_channel_impl.h"

#define SILENT_NS 2000000000  /* if the peer's device is known to have all that was posted, the last keepalive included */
#define UNSENT_NS 10000000000 /* if it is not: the transport would have given up by then, if the path were at fault */
#define NS_PER_BYTE 100       /* added for each byte that may be on its way: 10 MB/s */
#define TELL_EVERY_NS 250000000
#define PROGRESS 65536            /* bytes of payloads that count as a sign of life: 32 KB/s with SILENT_NS */
/* Most time between two probes that counts as silence. On a device with DP_CAP_POLLED_TARGET, a side that did not poll for longer has
 * received nothing from the worker, and may have sent nothing to it. */
#define LISTENED_MAX_NS 500000000

static uint64_t bytes_in(const dp_bulk *b) {
    uint64_t units = 0;
    for (uint32_t i = 0; i < b->n; i++)
        units += b->used[i].len;
    return units * DP_BULK_UNIT;
}

/* How long requests and replies in flight may take to arrive, if the worker has just finished. */
static int64_t patience(const dp_channel *ch) {
    uint64_t bytes = bytes_in(&ch->bulk_in) + bytes_in(&ch->bulk_out) + 2ull * ch->cfg.eager * (ch->n_busy + ch->n_abandoned);
    return (ch->qp->arrived == ch->qp->posted ? SILENT_NS : UNSENT_NS) + (int64_t)(bytes * NS_PER_BYTE);
}

void dp_channel_forget_silence(dp_channel *ch) { ch->quiet.since = 0; }

/* Bytes of payloads that the connection has carried since the last answer. What the worker sends counts only up to the size of the
 * results that calls in flight may have, so that a worker cannot avoid its call limit by sending bytes that no call waits for. */
static uint64_t moved(const dp_channel *ch) {
    uint64_t results = bytes_in(&ch->bulk_out) + (uint64_t)ch->cfg.eager * (ch->n_busy + ch->n_abandoned);
    uint64_t received = ch->qp->bytes_received - ch->quiet.received;
    return ch->qp->bytes_acked - ch->quiet.acked + (received < results ? received : results);
}

void dp_channel_listen(dp_channel *ch, int64_t now) {
    quiet *q = &ch->quiet;
    uint64_t answers = ch->stats.replies + ch->stats.late_replies;
    if (!q->since || q->answers != answers) {
        *q = (quiet){.since = now, .at = now, .answers = answers, .acked = ch->qp->bytes_acked, .received = ch->qp->bytes_received,
                     .told_at = q->told_at};
        return;
    }
    uint64_t bytes = moved(ch);
    if (bytes >= q->moved + PROGRESS) {
        q->moved = bytes;
        q->since = q->at = now;
        q->listened = 0;
        return;
    }
    q->listened += now - q->at < LISTENED_MAX_NS ? now - q->at : LISTENED_MAX_NS;
    q->at = now;
    if (q->listened < patience(ch))
        return;
    dp_endpoint *ep = ch->ep;
    if (ep->silence_fn && now - q->told_at >= TELL_EVERY_NS) {
        q->told_at = now;
        ep->silence_fn(ep->silence_arg, ch, (dp_silence){q->since, now});
    }
}

void dp_lane_probe(dp_lane *lane, int64_t now) {
    if (now < lane->waiter.probe_at)
        return;
    lane->waiter.probe_at = now + DP_PROBE_EVERY_NS;
    for (dp_channel *ch = lane->channels; ch; ch = ch->next)
        if (dp_channel_serves(ch) && (ch->n_busy || ch->n_abandoned || ch->submitting)) {
            dp_qp_probe(ch->qp);
            /* Only this side writes this word. If a function has overwritten it, its worker may have executed garbage as a request, and
             * the answer to that may look like the reply. */
            if (ch->mailbox_slot != DP_NOTHING && dp_mailbox_call_id(__atomic_load_n(&ch->mailbox->request, __ATOMIC_RELAXED)) !=
                                                   ch->slots[ch->mailbox_slot].call_id)
                dp_qp_break(ch->qp, DP_PROTOCOL);
            dp_channel_listen(ch, now);
        }
    if (lane->ep->idle_fn)
        lane->ep->idle_fn(lane->ep->idle_arg, now, true);
}

void dp_lane_attend(dp_lane *lane, int64_t now) {
    if (lane->ep->idle_fn)
        lane->ep->idle_fn(lane->ep->idle_arg, now, false);
    dp_lane_probe(lane, now);
    dp_lane_reap(lane);
}

void dp_endpoint_on_silence(dp_endpoint *ep, dp_silence_fn fn, void *arg) {
    ep->silence_fn = fn;
    ep->silence_arg = arg;
}

void dp_endpoint_on_idle(dp_endpoint *ep, dp_idle_fn fn, void *arg) {
    ep->idle_fn = fn;
    ep->idle_arg = arg;
}
