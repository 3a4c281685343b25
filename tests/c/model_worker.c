/* The worker of the model test. It sends right replies, and replies of a hostile or broken worker. */
#include "model.h"

/* Writes a reply and updates the model. */
void w_put(model *m, m_reply r) {
    raw *w = &m->worker;
    if (m->mailbox_slot == (int)r.at) /* it may overwrite a result of the mailbox */
        m->mailbox_fill = ANY_BYTES;
    uint32_t imm = (r.bare ? DP_IMM_BARE : 0) | dp_imm(r.slot, r.tag);
    r.byte_len = r.payload + (r.bare ? 0 : DP_REPLY_SIZE);
    if (r.in_bulk && r.bare) {
        memset(local_bytes(&w->e), r.fill, r.payload);
        dp_sge sge = local_sge(&w->e, 0, r.payload);
        uint64_t at = w->peer.addr + dp_bulk_at(&w->l, m->slots[r.slot].out_at);
        end_write_imm(&w->e, &sge, 1, at, w->peer.rkey, imm, 0, DP_SIGNALED);
        end_sent(&w->e, 0, DP_OP_WRITE);
    } else if (r.bare) {
        raw_answer_bare(w, r.at, r.payload, r.fill, imm);
    } else {
        if (r.in_bulk) { /* the result first, then the header */
            uint32_t n = r.h.size;
            memset(local_bytes(&w->e), r.fill, n);
            dp_sge sge = local_sge(&w->e, 0, n);
            end_write(&w->e, &sge, 1, w->peer.addr + dp_bulk_at(&w->l, m->slots[r.slot].out_at), w->peer.rkey, 0, 0);
        }
        raw_answer(w, r.at, r.h, r.payload, r.fill, imm);
    }
    m->pending[m->n_pending++] = r;
}

/* The reply in that slot's memory which the client has not seen yet, or NULL. */
const m_reply *w_unseen(const model *m, uint32_t at) {
    for (uint32_t k = 0; k < m->n_pending; k++)
        if (m->pending[k].at == at)
            return &m->pending[k];
    return NULL;
}

bool w_can_reply(const model *m) { return m->connected && m->n_pending + m->lost < m->depth; }

/* A call that waits for its reply, or -1. */
static int unanswered(model *m) {
    uint32_t start = pick(m, m->depth);
    for (uint32_t k = 0; k < m->depth; k++) {
        uint32_t i = (start + k) % m->depth;
        const m_slot *s = &m->slots[i];
        if ((s->state == SLOT_BUSY || s->state == SLOT_ABANDONED) && !s->answered)
            return (int)i;
    }
    return -1;
}

/* The place of the word that announces a reply by the mailbox. */
static uint64_t *place_of_word(model *m, uint32_t capacity) {
    dp_mailbox *b = raw_mailbox(&m->worker, true);
    return capacity <= DP_MAILBOX_RESULT ? &b->reply : dp_mailbox_in_slot(m->ch, capacity) ? raw_slot_reply(&m->worker, true) : &b->long_reply;
}

static void reply_by_mailbox(model *m, uint32_t i, int status, uint32_t size, int fill) {
    m_slot *s = &m->slots[i];
    raw *w = &m->worker;
    dp_mailbox *b = raw_mailbox(w, true);
    uint64_t *place = place_of_word(m, s->capacity);
    if (status == DP_OK && s->capacity <= DP_MAILBOX_RESULT)
        memset(b->result, fill, sizeof b->result);
    else if (status == DP_OK && dp_mailbox_in_slot(m->ch, s->capacity))
        memset(dp_rkey_ptr(w->e.qp, w->peer.addr + dp_slot_payload(&w->l, i), w->peer.rkey, EAGER), fill, EAGER);
    else if (status == DP_OK)
        memset(b->more_result, fill, sizeof b->more_result);
    uint64_t word = dp_mailbox_reply(s->id, status, size);
    __atomic_store_n(place, word, __ATOMIC_RELEASE);
    dp_qp_notify(m->worker.e.qp);
    *m_word(m, s->capacity) = word;
    m->mailbox_fill = fill;
}

/* Sends the reply of a call, good or malformed. */
void w_reply(model *m) {
    int i = unanswered(m);
    if (i < 0 || !w_can_reply(m) || w_unseen(m, (uint32_t)i))
        return;
    m_slot *s = &m->slots[i];
    static const int statuses[] = {DP_BAD_REQUEST, DP_NO_FUNCTION, DP_TOO_LARGE,  DP_FUNCTION_FAILED, DP_RESULT_TOO_LARGE,
                                   DP_BUSY,        DP_CONNECTION,  DP_LEASE_ENDED, DP_WORKER_DIED,    -12345};
    bool ok = pick(m, 3), bulk = s->out_units != 0;
    int status = ok ? DP_OK : statuses[pick(m, 10)], fill = 1 + (int)pick(m, 200);
    uint32_t size = ok ? pick(m, s->capacity + 1) : status == DP_FUNCTION_FAILED ? pick(m, 100) : 0;
    if (status == DP_RESULT_TOO_LARGE)
        size = s->capacity + 1;
    bool malformed = ok && pick(m, 6) == 0, bare = ok && pick(m, 3);
    s->answered = true;
    if (s->mailbox && pick(m, 4)) {
        uint32_t form = dp_mailbox_in_slot(m->ch, s->capacity) ? EAGER : DP_MAILBOX_SMALL, most = s->capacity < form ? s->capacity : form;
        size = malformed ? most + 1 + pick(m, 60) : ok ? pick(m, most + 1) : status == DP_FUNCTION_FAILED ? 0 : size;
        STEP(m, "reply to slot %d by mailbox: %s, %u bytes", i, dp_status_text(status), size);
        reply_by_mailbox(m, (uint32_t)i, status, size, fill);
        return;
    }
    if (malformed && bulk) /* a bare one would overwrite other ranges */
        bare = false;
    m_reply r = {.slot = (uint32_t)i, .tag = s->id & 0xffff, .bare = bare, .fill = fill, .at = (uint32_t)i};
    r.payload = status == DP_OK || status == DP_FUNCTION_FAILED ? size : 0;
    if (malformed && pick(m, 2) && (bulk || s->capacity < EAGER)) { /* larger than it accepts */
        size = s->capacity + 1;
        r.payload = bulk ? 0 : size;
    } else if (malformed && !bare && size && !bulk) { /* a header with another size than arrived */
        r.payload = size - 1;
    } else if (malformed && bulk) {
        r.payload = 1;
    } else if (bulk && ok && !bare) {
        r.payload = 0;
    }
    r.h = (dp_reply){m->ch->generation, s->id, status, size};
    r.in_bulk = bulk && ok && size <= s->capacity;
    STEP(m, "reply to slot %d%s: %s, %u bytes, %u of payload", i, bare ? " bare" : "", dp_status_text(status), size, r.payload);
    w_put(m, r);
}

/* It may overwrite a result that was not read yet. If its slot has a call with the same tag when the client polls, 65,536 calls
 * later, it counts as that call's reply, whose bytes may be elsewhere. */
static void put_unasked(model *m, m_reply r) {
    m->slots[r.at].fill = ANY_BYTES;
    w_put(m, r);
    m->pending[m->n_pending - 1].fill = ANY_BYTES;
}

void w_stray(model *m) {
    if (!w_can_reply(m) || !m->any_call)
        return;
    uint32_t i = pick(m, m->depth), kind = pick(m, 7);
    if (w_unseen(m, i))
        return;
    const m_slot *s = &m->slots[i];
    bool outstanding = s->state == SLOT_BUSY || s->state == SLOT_ABANDONED;
    uint32_t id = outstanding ? s->id : m->last_id, size = pick(m, 9);
    m_reply r = {.slot = i, .tag = id & 0xffff, .bare = false, .fill = 222,
                 .h = {m->ch->generation, id, DP_OK, size}, .at = i, .payload = size};
    switch (kind) {
    case 0: /* of another generation */
        r.h.generation ^= 1u << pick(m, 32);
        break;
    case 1: /* of an older or later call with the same tag */
        r.h.call_id += 65536;
        break;
    case 2: /* the tag of another call */
        r.tag = (r.tag + 1 + pick(m, 65535)) & 0xffff;
        break;
    case 3: /* the same, bare */
        r.tag = (r.tag + 1 + pick(m, 65535)) & 0xffff;
        r.bare = true;
        break;
    case 4: /* header and tag agree, but there is no such call */
        r.h.call_id -= 1 + pick(m, 1000);
        r.tag = r.h.call_id & 0xffff;
        break;
    case 5: /* no such slot */
        r.slot = pick(m, 2) ? m->depth : m->depth + pick(m, 32768 - m->depth);
        r.bare = pick(m, 2);
        break;
    default: /* right except for its slot, which has no call */
        if (outstanding)
            return;
        r.bare = pick(m, 2);
    }
    STEP(m, "stray of kind %u to slot %u", kind, r.slot);
    put_unasked(m, r);
}

/* Repeats a reply: together with the first one, or later, when its slot may have another call. */
void w_repeat(model *m) {
    if (!w_can_reply(m) || !m->any_call)
        return;
    uint32_t i = pick(m, m->depth);
    const m_reply *first = w_unseen(m, i);
    if (first) {
        STEP(m, "the reply in slot %u twice", i);
        w_put(m, *first);
        return;
    }
    const m_slot *s = &m->slots[i];
    uint32_t id = m->last_id - pick(m, 3), size = pick(m, 9);
    if ((s->state == SLOT_BUSY || s->state == SLOT_ABANDONED) && (id & 0xffff) == (s->id & 0xffff))
        return; /* a bare reply would count as the first one */
    bool bare = pick(m, 2);
    STEP(m, "late%s repetition of the reply to call %#x in slot %u", bare ? " bare" : "", id, i);
    put_unasked(m, (m_reply){.slot = i, .tag = id & 0xffff, .bare = bare, .fill = 221, .at = i, .payload = size,
                             .h = {m->ch->generation, id, DP_OK, size}});
}

void w_odd_mailbox(model *m) {
    if (!m->connected || !m->ch->mailbox || !m->any_call || m->failed)
        return;
    uint32_t which = pick(m, 3), id = m->last_id + 1 - 2 * pick(m, 2);
    uint64_t word = which ? dp_mailbox_reply(id, DP_OK, 8) : dp_mailbox_request(id, 0, 8, m->ch->mailbox_large);
    for (uint32_t i = 0; i < m->depth; i++)
        if (m->slots[i].mailbox && m->slots[i].state != SLOT_FREE)
            return; /* its mailbox words or result are still in use */
    STEP(m, "mailbox word %u for call %#x", which, id);
    uint32_t capacity = which == 1 ? 0 : pick(m, 2) ? EAGER : DP_MAILBOX_SMALL;
    __atomic_store_n(which ? place_of_word(m, capacity) : &raw_mailbox(&m->worker, true)->request, word, __ATOMIC_RELEASE);
    *(which ? m_word(m, capacity) : &m->words[0]) = word;
    if (!which)
        m->ch->mailbox_last = id; /* as if the client had written this word 2^32 calls ago */
}
