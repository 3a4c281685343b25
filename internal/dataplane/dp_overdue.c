/* Calls that are given up. The overdue ones among them are those whose deadlines have passed, but which the worker has not answered. A worker
 * runs calls one after the other, so later calls wait for them. */
#include "dp_channel_impl.h"

void dp_channel_abandon(dp_channel *ch, uint32_t i) {
    if (i >= ch->cfg.depth)
        return;
    slot *s = &ch->slots[i];
    if (s->state == SLOT_BUSY && s->parts && dp_parts_due(s)) { /* no reply will come */
        ch->n_busy--;
        ch->stats.abandoned++;
        dp_slot_free(ch, i);
    } else if (s->state == SLOT_BUSY) {
        s->state = SLOT_ABANDONED;
        ch->n_busy--;
        ch->n_abandoned++;
        ch->stats.abandoned++;
    } else if (s->state == SLOT_DONE) {
        ch->n_done--;
        dp_slot_free(ch, i);
    }
}

dp_started dp_channel_overdue(dp_channel *ch, uint32_t i) {
    bool busy = i < ch->cfg.depth && ch->slots[i].state == SLOT_BUSY;
    bool runs = !busy || !ch->slots[i].parts || dp_parts_started(&ch->slots[i]);
    dp_channel_abandon(ch, i);
    if (!runs)
        return DP_NOT_STARTED;
    if (busy && ch->slots[i].state == SLOT_ABANDONED) {
        ch->slots[i].overdue_since = dp_now_ns();
        ch->n_overdue++;
    }
    return DP_MAYBE_EXECUTED;
}

/* Returns which function of the call in a slot runs, as far as the worker has said. */
static uint32_t runs_now(const dp_channel *ch, uint32_t i) {
    const slot *s = &ch->slots[i];
    const uint32_t *note = (const void *)((const uint8_t *)ch->results->addr + (uint64_t)i * ch->layout.stride);
    if (!dp_is_chain(s->function))
        return s->function;
    return __atomic_load_n(note, __ATOMIC_RELAXED) == s->call_id ? dp_chain_second(s->function) : dp_chain_first(s->function);
}

bool dp_channel_runs_overdue(const dp_channel *ch, uint32_t *function, int64_t *since) {
    const slot *oldest = NULL;
    if (!ch->n_overdue)
        return false;
    for (uint32_t i = 0; i < ch->cfg.depth; i++) {
        const slot *s = &ch->slots[i];
        if ((s->state == SLOT_BUSY || s->state == SLOT_ABANDONED) && (!oldest || (int32_t)(s->call_id - oldest->call_id) < 0))
            oldest = s;
    }
    if (!oldest || oldest->state != SLOT_ABANDONED || !oldest->overdue_since)
        return false;
    *function = runs_now(ch, (uint32_t)(oldest - ch->slots));
    *since = oldest->overdue_since;
    return true;
}

int64_t dp_channel_give_up_at(const dp_channel *ch) {
    uint32_t function;
    int64_t since;
    return ch->ep->overdue_ns && dp_channel_runs_overdue(ch, &function, &since) ? since + ch->ep->overdue_ns : 0;
}

void dp_endpoint_set_overdue(dp_endpoint *ep, int64_t ns) { ep->overdue_ns = ns; }
