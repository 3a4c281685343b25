/* A model of a channel's slots: what the client's functions return and which state each slot is in, given the replies
 * that a worker has sent. Functions named m_ change the model as the client's function changes the channel. */
#ifndef RFAAS_CTEST_MODEL_H
#define RFAAS_CTEST_MODEL_H

#include "dp_channel_impl.h"
#include "forged.h"

enum { DEPTH_MAX = 8, EAGER = 512, BULK = 4096, UNITS = BULK / DP_BULK_UNIT, ANY_BYTES = -1 };

/* The model of a slot. */
typedef struct m_slot {
    slot_state state;
    uint32_t id, size, capacity, function;
    uint32_t in_at, in_units, out_at, out_units;
    bool mailbox;  /* the request came by the mailbox */
    bool answered; /* by a valid reply, which may still be in flight */
    int status;    /* of a DONE call */
    uint32_t result;
    dp_started started;
    int fill;      /* value of the result's bytes; ANY_BYTES: they were overwritten */
} m_slot;

/* A reply that the client has not polled yet. */
typedef struct m_reply {
    uint32_t slot, tag, byte_len;
    bool bare;
    dp_reply h;
    int fill;
    uint32_t at; /* slot in whose memory it is */
    uint32_t payload;
    bool in_bulk; /* the result, in the call's range */
} m_reply;

/* The last header for a slot, and the id of its last request. A request that would repeat the header is bare. */
typedef struct m_told {
    bool any;
    uint32_t capacity, function, id;
    bool exclusive;
} m_told;

typedef struct model {
    uint64_t random;
    uint64_t seed;
    int step;
    bool trace;
    /* the channel under test */
    dp_dev *dev;
    dp_endpoint *ep;
    dp_channel *ch;
    raw worker;
    /* its model */
    uint32_t depth, last_id;
    m_slot slots[DEPTH_MAX];
    m_told told[DEPTH_MAX];
    uint64_t in_used, out_used; /* units of the bulk areas */
    int mailbox_slot;           /* -1: none */
    uint64_t words[3];          /* the mailbox: request, reply, long reply */
    uint64_t slot_word;         /* the reply that announces a result in a slot */
    int mailbox_fill;
    m_reply pending[DEPTH_MAX];
    uint32_t n_pending;
    uint32_t lost; /* receives that a failed channel did not post again */
    bool connected, any_call; /* any_call: since the last reset */
    int broken, failed;
    uint64_t ended, seen;
    dp_channel_stats stats;
} model;

/* 0..n-1, from the run's seed. */
static inline uint32_t pick(model *m, uint32_t n) {
    uint64_t z = m->random += 0x9E3779B97F4A7C15ull; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)((z ^ (z >> 31)) % n);
}

/* Notes the next step (t_note). */
#define STEP(m, ...)                                                                                                   \
    do {                                                                                                               \
        char what_[80];                                                                                                \
        snprintf(what_, sizeof what_, __VA_ARGS__);                                                                    \
        t_note("RFAAS_MODEL_SEED=%llu, step %d: %s", (unsigned long long)(m)->seed, (m)->step, what_);                 \
        if ((m)->trace)                                                                                                \
            printf("    %3d %s\n", (m)->step, what_);                                                                  \
    } while (0)

uint32_t m_count(const model *m, slot_state s);
void m_free(model *m, m_slot *s);
/* The channel has failed. */
void m_fail(model *m, int status);
/* The client checks the channel's mark, */
void m_reap(model *m);
/* the mailbox, */
void m_mailbox(model *m);
/* the word that announces a reply by the mailbox, */
uint64_t *m_word(model *m, uint32_t capacity);
/* or all arrivals, the mailbox included. */
void m_progress(model *m);
/* The status of a submit of call s. Takes its bulk ranges. *mailbox: whether it goes by the mailbox. */
int m_submit(model *m, m_slot *s, bool *mailbox);
/* Compares the channel with the model. */
void m_compare(const model *m);

/* ---- the worker's steps (model_worker.c); each may find nothing to do ---- */

/* The reply in that slot's memory which the client has not seen yet, or NULL. */
const m_reply *w_unseen(const model *m, uint32_t at);
/* Whether the client has a receive for one more. */
bool w_can_reply(const model *m);
/* Writes a reply and updates the model. */
void w_put(model *m, m_reply r);
/* Sends the reply of a call, good or malformed. */
void w_reply(model *m);
/* Sends a reply to no call. */
void w_stray(model *m);
/* Repeats a reply: together with the first one, or later, when its slot may have another call. */
void w_repeat(model *m);
/* Writes a word to the mailbox for a call that has ended or was not made yet. */
void w_odd_mailbox(model *m);

#endif
