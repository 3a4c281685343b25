#include "model.h"

uint32_t m_count(const model *m, slot_state s) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->depth; i++)
        n += m->slots[i].state == s;
    return n;
}

static uint64_t mask(uint32_t at, uint32_t units) {
    return units == 64 ? ~0ull : ((1ull << units) - 1) << at;
}

/* The lowest gap. False: none is wide enough. */
static bool take_units(uint64_t *used, uint32_t units, uint32_t *at) {
    for (*at = 0; units <= UNITS && *at + units <= UNITS; ++*at)
        if (!(*used & mask(*at, units))) {
            *used |= mask(*at, units);
            return true;
        }
    return false;
}

static void m_give(model *m, const m_slot *s) {
    if (s->in_units)
        m->in_used &= ~mask(s->in_at, s->in_units);
    if (s->out_units)
        m->out_used &= ~mask(s->out_at, s->out_units);
}

void m_free(model *m, m_slot *s) {
    m_give(m, s);
    *s = (m_slot){.state = SLOT_FREE};
}

void m_fail(model *m, int status) {
    if (m->failed)
        return;
    m->failed = status;
    m->mailbox_slot = -1;
    for (uint32_t i = 0; i < m->depth; i++) {
        m_slot *s = &m->slots[i];
        if (s->state == SLOT_BUSY) {
            s->state = SLOT_DONE;
            s->status = status;
            s->result = 0;
            s->started = DP_MAYBE_EXECUTED;
            m->ended++;
        } else if (s->state == SLOT_ABANDONED) {
            s->state = SLOT_FENCED;
            m->ended++;
        }
    }
}

/* The reply to an outstanding call has come. */
static void m_settle(model *m, uint32_t i, int status, uint32_t size, int fill) {
    m_slot *s = &m->slots[i];
    if (m->mailbox_slot == (int)i)
        m->mailbox_slot = -1;
    m->ended++;
    if (s->state == SLOT_ABANDONED) {
        m->stats.late_replies++;
        m_free(m, s);
        return;
    }
    m->stats.replies++;
    s->state = SLOT_DONE;
    s->status = status;
    s->fill = fill;
    s->result = status == DP_OK || status == DP_FUNCTION_FAILED || status == DP_RESULT_TOO_LARGE ? size : 0;
    s->started = status == DP_BAD_REQUEST || status == DP_NO_FUNCTION || status == DP_TOO_LARGE ? DP_NOT_STARTED
                                                                                               : DP_MAYBE_EXECUTED;
    m->stats.bytes_out += status == DP_OK ? size : 0;
}

/* Only these are a worker's to say. */
static int worker_status(int status) {
    switch (status) {
    case DP_OK:
    case DP_BAD_REQUEST:
    case DP_NO_FUNCTION:
    case DP_TOO_LARGE:
    case DP_FUNCTION_FAILED:
    case DP_RESULT_TOO_LARGE: return status;
    default: return DP_PROTOCOL;
    }
}

static void m_arrival(model *m, const m_reply *r) {
    m_slot *s = r->slot < m->depth ? &m->slots[r->slot] : NULL;
    bool ours = s && (s->state == SLOT_BUSY || s->state == SLOT_ABANDONED) && r->tag == (s->id & 0xffff) &&
                (r->bare || (r->h.generation == m->ch->generation && r->h.call_id == s->id));
    if (!ours) {
        m->stats.strays++;
        return;
    }
    uint32_t size = r->bare ? r->byte_len : r->h.size;
    int status = r->bare ? DP_OK : worker_status(r->h.status);
    if (status == DP_OK && (size > s->capacity || (!r->bare && r->byte_len != 16 + (s->out_units ? 0 : size))))
        status = DP_PROTOCOL;
    if (status == DP_FUNCTION_FAILED && (size > EAGER || r->byte_len != 16 + size))
        size = 0; /* a message that did not come */
    m_settle(m, r->slot, status, size, r->fill);
}

uint64_t *m_word(model *m, uint32_t capacity) {
    return capacity <= DP_MAILBOX_RESULT ? &m->words[1] : dp_mailbox_in_slot(m->ch, capacity) ? &m->slot_word : &m->words[2];
}

void m_mailbox(model *m) {
    if (m->mailbox_slot < 0)
        return;
    m_slot *s = &m->slots[m->mailbox_slot];
    uint64_t word = *m_word(m, s->capacity);
    if (dp_mailbox_call_id(word) != s->id)
        return;
    int status = worker_status(dp_mailbox_status(word));
    uint32_t size = dp_mailbox_result_size(word);
    if (status == DP_OK && (size > s->capacity || (!dp_mailbox_in_slot(m->ch, s->capacity) && size > DP_MAILBOX_SMALL)))
        status = DP_PROTOCOL;
    m_settle(m, (uint32_t)m->mailbox_slot, status, status == DP_FUNCTION_FAILED ? 0 : size, m->mailbox_fill);
}

void m_progress(model *m) {
    m_mailbox(m);
    for (uint32_t i = 0; i < m->n_pending; i++)
        if (m->failed)
            m->lost++;
        else
            m_arrival(m, &m->pending[i]);
    m->n_pending = 0;
}

/* What arrived before the mark counts. */
void m_reap(model *m) {
    if (!m->broken || m->failed)
        return;
    m_progress(m);
    m_fail(m, m->broken);
}

int m_submit(model *m, m_slot *s, bool *mailbox) {
    uint32_t next = m->ch->next_call;
    *mailbox = false;
    m_reap(m);
    if (m->failed)
        return m->failed;
    if (m->ch->mailbox && m_count(m, SLOT_FREE) == m->depth && s->size <= m->ch->mailbox_max && s->capacity <= EAGER) {
        /* A word with this id would be taken for its answer, or hide it. */
        *mailbox = dp_mailbox_call_id(m->words[0]) != next &&
                dp_mailbox_call_id(*m_word(m, s->capacity)) != next;
        if (*mailbox)
            return DP_OK;
    }
    if (s->size > BULK || s->capacity > BULK)
        return DP_TOO_LARGE;
    if (!m_count(m, SLOT_FREE)) {
        m_progress(m);
        m_reap(m);
        if (m->failed)
            return m->failed;
        if (!m_count(m, SLOT_FREE)) {
            m->stats.busy++;
            return DP_BUSY;
        }
    }
    for (int try = 0;; try++) {
        bool in = s->size > EAGER, out = s->capacity > EAGER;
        s->in_units = in ? (s->size + 63) / 64 : 0;
        s->out_units = out ? (s->capacity + 63) / 64 : 0;
        bool got_in = !in || take_units(&m->in_used, s->in_units, &s->in_at);
        bool got_out = got_in && (!out || take_units(&m->out_used, s->out_units, &s->out_at));
        if (got_out)
            break;
        s->out_units = 0; /* not taken */
        s->in_units = got_in ? s->in_units : 0;
        m_give(m, s);
        s->in_units = 0;
        if (!try) {
            m_progress(m);
            m_reap(m);
        }
        if (try || m->failed) {
            m->stats.busy++;
            return m->failed ? m->failed : DP_BUSY;
        }
    }
    if (m->connected)
        return DP_OK;
    m_give(m, s);
    m_fail(m, DP_CONNECTION);
    return DP_CONNECTION;
}

void m_compare(const model *m) {
    const dp_channel *ch = m->ch;
    for (uint32_t i = 0; i < m->depth; i++) {
        const slot *s = &ch->slots[i];
        const m_slot *x = &m->slots[i];
        CHECKF(s->state == x->state, "slot %u is in state %d, the model says %d", i, s->state, x->state);
        if (x->state == SLOT_BUSY || x->state == SLOT_ABANDONED)
            CHECK_EQ(s->call_id, x->id);
    }
    CHECK_EQ(dp_channel_free_slots(ch), m_count(m, SLOT_FREE));
    CHECK_EQ(ch->n_busy, m_count(m, SLOT_BUSY));
    CHECK_EQ(ch->n_done, m_count(m, SLOT_DONE));
    CHECK_EQ(ch->n_abandoned, m_count(m, SLOT_ABANDONED));
    CHECK_EQ(ch->mailbox_slot, m->mailbox_slot < 0 ? DP_NOTHING : (uint32_t)m->mailbox_slot);
    CHECK_STATUS(dp_channel_status(ch), m->failed ? m->failed : m->broken);
    uint64_t listed = 0;
    for (uint32_t i = 0; i < ch->n_free; i++) {
        CHECK_LT(ch->free[i], m->depth);
        listed |= 1ull << ch->free[i];
        CHECK_EQ(ch->slots[ch->free[i]].state, SLOT_FREE);
    }
    CHECK_EQ((uint32_t)__builtin_popcountll(listed), ch->n_free);
    dp_channel_stats st;
    dp_channel_get_stats(ch, &st);
    CHECK_EQ(st.calls, m->stats.calls);
    CHECK_EQ(st.replies, m->stats.replies);
    CHECK_EQ(st.abandoned, m->stats.abandoned);
    CHECK_EQ(st.late_replies, m->stats.late_replies);
    CHECK_EQ(st.strays, m->stats.strays);
    CHECK_EQ(st.busy, m->stats.busy);
    CHECK_EQ(st.bytes_in, m->stats.bytes_in);
    CHECK_EQ(st.bytes_out, m->stats.bytes_out);
}

