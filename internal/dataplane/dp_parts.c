/* The client's side of calls in parts: what dp_parts.h says. */
#include <stdlib.h>
#include <string.h>

#include "dp_channel_impl.h"
#include "dp_parts.h"

/* A call in parts, from its submit until its slot is free. */
struct parts {
    const uint8_t *in; /* the payload; NULL after its last part */
    uint8_t *copy;     /* it, if it had to be copied */
    uint32_t size, sent;
    uint32_t total, got; /* bytes of the result (0: not known yet), and how many of them have arrived */
    uint32_t wanted;     /* bytes of the result that the outstanding message asks for */
    uint8_t *out;        /* the result, if it is larger than a part */
    bool started;        /* the worker has the whole payload, or the message with its last part was posted */
    bool due;            /* no message of this call is outstanding: the next one is to be posted */
};

void dp_channel_carry(dp_channel *ch, uint64_t most) {
    ch->most = dp_part_max(ch->cfg.bulk) == 0 ? 0 : most < UINT32_MAX ? (uint32_t)most : UINT32_MAX;
}

bool dp_parts_started(const slot *s) { return s->parts->started; }

bool dp_parts_due(const slot *s) { return s->parts->due; }

static void no_longer_due(dp_channel *ch, struct parts *p) {
    ch->n_due -= p->due;
    p->due = false;
}

void dp_parts_free(dp_channel *ch, slot *s) {
    no_longer_due(ch, s->parts);
    free(s->parts->copy);
    free(s->parts->out);
    free(s->parts);
    s->parts = NULL;
}

void dp_parts_end(dp_channel *ch, slot *s) { no_longer_due(ch, s->parts); }

/* Takes the bulk ranges through which the parts pass. */
static int take_ranges(dp_channel *ch, slot *s, uint32_t size, uint32_t capacity) {
    uint32_t most = dp_part_max(ch->cfg.bulk), in = size < most ? size : most, out = capacity < most ? capacity : most;
    if (in && dp_bulk_take(&ch->bulk_in, (in + DP_BULK_UNIT - 1) / DP_BULK_UNIT, &s->in_at)) {
        s->in_at = DP_NOTHING;
        return DP_BUSY;
    }
    if (capacity > ch->cfg.eager && dp_bulk_take(&ch->bulk_out, (out + DP_BULK_UNIT - 1) / DP_BULK_UNIT, &s->out_at)) {
        s->out_at = DP_NOTHING; /* dp_slot_free gives back the other */
        return DP_BUSY;
    }
    return DP_OK;
}

int dp_parts_begin(dp_channel *ch, slot *s, const void *in, const dp_pieces *pieces, uint32_t size, uint32_t capacity) {
    if (take_ranges(ch, s, size, capacity))
        return DP_BUSY;
    struct parts *p = calloc(1, sizeof *p);
    if (!p)
        return DP_FATAL;
    if (pieces || !ch->lasting) {
        p->copy = malloc(size ? size : 1);
        if (!p->copy) {
            free(p);
            return DP_FATAL;
        }
        if (pieces)
            dp_gather(p->copy, pieces, size);
        else if (size)
            memcpy(p->copy, in, size);
    }
    p->in = p->copy ? p->copy : in;
    p->size = size;
    p->due = true;
    ch->n_due++;
    s->parts = p;
    return DP_OK;
}

/* Posts a part of the payload, which the header must follow. */
static int post_data(dp_channel *ch, const slot *s, const uint8_t *data, uint32_t size) {
    uint64_t at = dp_bulk_at(&ch->layout, s->in_at), raddr = ch->peer.addr + at;
    uint32_t lkey = 0;
    if (ch->staging) {
        data = memcpy((uint8_t *)ch->staging->addr + at, data, size);
        lkey = ch->staging->lkey;
    }
    while (size) {
        uint32_t n = size < ch->ep->dev->max_msg ? size : ch->ep->dev->max_msg;
        dp_sge sge = {data, n, lkey};
        int st = dp_post_write(ch->qp, &sge, 1, raddr, ch->peer.rkey, 0, DP_MORE);
        if (st)
            return st;
        data += n;
        raddr += n;
        size -= n;
    }
    return DP_OK;
}

/* Posts the next message of a call. DP_BUSY: there is no room; posting the same message again does no harm. */
static int post_next(dp_channel *ch, uint32_t i) {
    const slot *s = &ch->slots[i];
    struct parts *p = s->parts;
    bool out = p->started;
    uint32_t most = dp_part_max(ch->cfg.bulk), offset = out ? p->got : p->sent, left = out ? p->total - p->got : p->size - p->sent;
    uint32_t bytes = left < most ? left : most;
    dp_request h = {.in_offset = out || s->in_at == DP_NOTHING ? 0 : s->in_at, .out_offset = s->out_at == DP_NOTHING ? 0 : s->out_at,
                    .generation = ch->generation, .call_id = s->call_id, .size = p->size, .capacity = s->capacity,
                    .function = (uint16_t)s->function, .then = s->function >> 16, .flags = out ? DP_REQ_PART_OUT : DP_REQ_PART_IN};
    uint64_t words[5];
    words[0] = dp_two(offset, bytes);
    dp_request_pack(words + 1, &h);
    int st = out || !bytes ? DP_OK : post_data(ch, s, p->in + offset, bytes);
    if (st)
        return st;
    uint64_t at = dp_slot_payload(&ch->layout, i) - DP_REQ_KEYED;
    dp_sge sge = {words, DP_REQ_KEYED, 0};
    if (ch->staging && DP_REQ_KEYED > ch->qp->max_inline)
        sge = (dp_sge){memcpy((uint8_t *)ch->staging->addr + at, words, DP_REQ_KEYED), DP_REQ_KEYED, ch->staging->lkey};
    st = dp_post_write_imm(ch->qp, &sge, 1, ch->peer.addr + at, ch->peer.rkey, dp_imm(i, s->call_id), i, 0);
    if (st)
        return st;
    no_longer_due(ch, p);
    p->wanted = out ? bytes : 0;
    if (!out) {
        p->sent += bytes;
        p->started = p->sent == p->size;
    }
    return DP_OK;
}

void dp_parts_post(dp_channel *ch) {
    for (uint32_t i = 0; i < ch->cfg.depth && ch->n_due && dp_channel_serves(ch); i++) {
        if (!ch->slots[i].parts || !ch->slots[i].parts->due)
            continue;
        int st = post_next(ch, i);
        if (st == DP_BUSY)
            return;
        if (st) {
            int why = dp_qp_broken(ch->qp);
            dp_channel_end_calls(ch, why ? why : DP_CONNECTION);
        }
    }
}

/* The next message can be posted. */
static dp_part_reply go_on(dp_channel *ch, struct parts *p) {
    p->due = true;
    ch->n_due++;
    dp_channel_forget_silence(ch); /* the worker has answered */
    return DP_PARTS_GO_ON;
}

/* Copies a part of the result that has arrived. */
static dp_part_reply keep(dp_channel *ch, slot *s, uint32_t bytes) {
    struct parts *p = s->parts;
    memcpy(p->out + p->got, (const uint8_t *)ch->results->addr + dp_bulk_at(&ch->layout, s->out_at), bytes);
    p->got += bytes;
    if (p->got < p->total)
        return go_on(ch, p);
    s->result = p->out;
    s->size = p->total;
    return DP_PARTS_ENDED;
}

dp_part_reply dp_parts_reply(dp_channel *ch, slot *s, dp_reply *h, bool bare, uint32_t arrived) {
    struct parts *p = s->parts;
    uint32_t most = dp_part_max(ch->cfg.bulk);
    if (p->due)
        return DP_PARTS_STRAY; /* it answers nothing */
    if (h->status == DP_BAD_REQUEST && p->sent <= most && !p->total) {
        h->status = DP_TOO_LARGE; /* a worker of an earlier version */
        ch->most = 0;
    }
    if (h->status != DP_OK)
        return DP_PARTS_LAST;
    if (!p->started)
        return go_on(ch, p);
    if (s->out_at == DP_NOTHING)
        return DP_PARTS_LAST; /* the result is in the slot */
    if (bare || arrived != DP_REPLY_SIZE || h->size > s->capacity || (p->out && h->size != p->wanted))
        return DP_PARTS_WRONG;
    if (p->out)
        return keep(ch, s, p->wanted);
    if (h->size <= most)
        return DP_PARTS_LAST;
    p->total = h->size;
    p->out = malloc(p->total);
    return p->out ? keep(ch, s, most) : DP_PARTS_NO_MEMORY;
}
