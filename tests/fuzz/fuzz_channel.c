/* A client whose worker is hostile: results, mailbox and completions come from the input, between calls of the
 * program. What must hold: caller memory of exactly the announced size is never exceeded, and every slot is in
 * one state.
 *
 * Byte 0: 1 shared memory (mailbox), 2 posts take their source at once, bits 2 to 4 depth 1 to 8, bit 5 calls in parts, bit 6 the large mailbox. Byte 1: eager
 * size and bulk area, in 64 bytes, half a byte each. Then operations, a byte each with the arguments that act() reads. */
#include "dp_channel_impl.h"
#include "fabric.h"

enum { PENDING = 32, REQUESTS = 8 };

typedef struct script {
    fabric f;
    input in;
    dp_channel *ch;
    dp_endpoint *ep;
    dp_mem *reg; /* registered memory of the program's */
    dp_wc pending[PENDING];
    int n_pending;
    uint32_t imm[REQUESTS]; /* of the last request in each slot */
} script;

static int poll(void *arg, dp_wc *wc, int n) {
    script *s = arg;
    n = n < s->n_pending ? n : s->n_pending;
    memcpy(wc, s->pending, (size_t)n * sizeof *wc);
    s->n_pending -= n;
    memmove(s->pending, s->pending + n, (size_t)s->n_pending * sizeof *wc);
    return n;
}

static void push(script *s, dp_wc wc) {
    if (s->n_pending == PENDING)
        return;
    if (wc.op == DP_OP_RECV || wc.op == DP_OP_RECV_IMM) {
        if (s->f.recvs == 0)
            return; /* no provider delivers more */
        s->f.recvs--;
    }
    wc.qp = s->ch->qp;
    s->pending[s->n_pending++] = wc;
}

static void on_request(void *arg, uint32_t imm, uint64_t raddr, uint64_t len) {
    script *s = arg;
    const dp_layout *l = &s->ch->layout;
    uint32_t which = dp_imm_slot(imm);
    MUST(which < l->depth);
    uint64_t payload = FABRIC_BASE + dp_slot_payload(l, which);
    MUST(raddr >= payload - DP_SLOT_ROOM && raddr <= payload && raddr + len <= payload + l->eager);
    s->imm[which] = imm;
}

/* ---- the worker ---- */

static int32_t status_of(uint8_t kind) {
    static const int32_t statuses[] = {DP_OK, DP_OK, DP_FUNCTION_FAILED, DP_RESULT_TOO_LARGE, DP_BAD_REQUEST, DP_NO_FUNCTION,
                                       DP_TOO_LARGE, DP_FATAL, DP_UNSUPPORTED};
    return statuses[kind % 9];
}

static void write_results(script *s, uint64_t at, uint32_t n) {
    uint8_t bytes[256];
    const dp_layout *l = &s->ch->layout;
    n = n < sizeof bytes ? n : sizeof bytes;
    take(&s->in, bytes, n);
    if (at < l->size)
        memcpy((uint8_t *)s->ch->results->addr + at, bytes, n < l->size - at ? n : l->size - at);
}

/* A reply to the last request in a slot, correct except for `twist`. */
static void reply(script *s) {
    const dp_layout *l = &s->ch->layout;
    uint32_t which = take8(&s->in) % l->depth, twist = take8(&s->in) % 12;
    dp_reply h = {.generation = s->ch->generation, .call_id = s->ch->slots[which].call_id,
                  .status = status_of(take8(&s->in)), .size = take16(&s->in)};
    if (h.size > l->eager)
        h.size = l->eager;
    uint32_t len = DP_REPLY_SIZE + h.size, imm = dp_imm(which, h.call_id);
    switch (twist) {
    case 1: h.generation ^= take32(&s->in); break;
    case 2: h.call_id ^= take32(&s->in); break;
    case 3: h.status ^= (int32_t)take32(&s->in); break;
    case 4: h.size ^= take32(&s->in); break;
    case 8: h.size += take16(&s->in), len = DP_REPLY_SIZE + h.size; break;
    case 5: len ^= take32(&s->in); break;
    case 6: imm ^= take32(&s->in); break;
    case 10: imm |= DP_IMM_BARE, len = take16(&s->in); break;
    case 7: len = DP_REPLY_SIZE; break; /* as for a result in the bulk area */
    case 9: imm |= DP_IMM_BARE, len = h.size; break;
    }
    uint64_t words[2];
    dp_reply_pack(words, &h);
    memcpy((uint8_t *)s->ch->results->addr + dp_slot_payload(l, which) - DP_REPLY_SIZE, words, DP_REPLY_SIZE);
    push(s, (dp_wc){.imm = imm, .byte_len = len, .op = DP_OP_RECV_IMM});
}

static void mailbox(script *s) {
    if (!(s->f.dev.caps & DP_CAP_RKEY_PTR))
        return;
    dp_mailbox *m = (dp_mailbox *)(void *)(s->f.peer + s->ch->layout.mailbox_at);
    uint64_t word = take64(&s->in);
    uint8_t how = take8(&s->in);
    if (how & 1)
        word = dp_mailbox_reply(dp_mailbox_call_id(m->request), status_of((uint8_t)(word >> 8)), (uint32_t)word % (DP_MAILBOX_SMALL + DP_CACHE_LINE * 16));
    *(!(how & 2) ? &m->reply : how & 4 ? (uint64_t *)(void *)((uint8_t *)s->ch->results->addr + dp_layout_reply(&s->ch->layout)) : &m->long_reply) = word;
}

/* ---- the program ---- */

static void submit(script *s) {
    static const uint32_t limit = 4096;
    uint32_t fn = take8(&s->in), size = take16(&s->in) % limit, capacity = take16(&s->in) % limit, which = 77777;
    uint8_t how = take8(&s->in);
    void *in = how & 1 ? NULL : exact_copy(s->reg->addr, size);
    uint32_t at = (how & 2 ? take16(&s->in) : 0);
    int st = dp_channel_submit(s->ch, how & 4 ? fn * 4096u : fn, in ? in : (uint8_t *)s->reg->addr + at, size,
                               in ? NULL : s->reg, capacity, &which);
    free(in);
    if (st == DP_OK)
        MUST(which < s->ch->cfg.depth && s->ch->slots[which].capacity == capacity &&
             (s->ch->slots[which].state == SLOT_BUSY || (s->ch->slots[which].parts && s->ch->failed)));
    else
        MUST(st < 0);
}

static void finish(script *s, bool only_look) {
    uint32_t which = take8(&s->in) % (s->ch->cfg.depth + 1), size = 77777;
    bool done = which < s->ch->cfg.depth && s->ch->slots[which].state == SLOT_DONE;
    uint32_t capacity = which < s->ch->cfg.depth ? s->ch->slots[which].capacity : 0;
    dp_started started;
    if (only_look) {
        const uint8_t *res = NULL;
        int st = dp_channel_result(s->ch, which, (const void **)&res, &size, &started);
        MUST(done || st == DP_INVALID);
        volatile uint8_t sum = 0;
        for (uint32_t i = 0; (st == DP_OK || st == DP_FUNCTION_FAILED) && done && i < size; i++)
            sum ^= res[i];
        return;
    }
    uint8_t *out = malloc(capacity ? capacity : 1);
    int st = dp_channel_finish(s->ch, which, out, &size, &started);
    MUST(done || st == DP_INVALID);
    MUST(st != DP_OK || size <= capacity);
    if (st == DP_FUNCTION_FAILED && done) {
        uint32_t len;
        const char *text = dp_channel_message(s->ch, &len);
        volatile char sum = 0;
        MUST(len <= DP_FAILURE_TEXT + DP_FAILURE_TAIL);
        for (uint32_t i = 0; i < len; i++)
            sum ^= text[i];
    }
    free(out);
}

static void connect_again(script *s) {
    dp_error err = {0};
    uint8_t blob[DP_CHANNEL_BLOB_MAX] = {0};
    const dp_layout *l = &s->ch->layout;
    dp_channel_blob b = {.magic = DP_CHANNEL_MAGIC, .version = DP_WIRE_VERSION, .role = DP_ROLE_WORKER,
                         .provider = (uint8_t)s->f.dev.provider, .generation = s->ch->generation, .depth = (uint16_t)l->depth,
                         .qp_len = 4, .eager = l->eager, .slots_rkey = FABRIC_RKEY, .slots_addr = FABRIC_BASE, .bulk = l->bulk,
                         .bulk_addr = FABRIC_BASE + l->bulk_at, .bulk_rkey = FABRIC_RKEY};
    uint32_t len = sizeof blob;
    MUST(dp_channel_offer(s->ch, blob, &len, &err) == DP_OK);
    len = sizeof b + 4;
    memset(blob, 0, sizeof blob);
    memcpy(blob, &b, sizeof b);
    b.crc = dp_crc32c(blob, len);
    memcpy(blob, &b, sizeof b);
    MUST(dp_channel_connect(s->ch, blob, len, &err) == DP_OK);
}

static void check(const script *s) {
    const dp_channel *ch = s->ch;
    uint32_t count[SLOT_FENCED + 1] = {0};
    uint32_t due = 0;
    for (uint32_t i = 0; i < ch->cfg.depth; i++) {
        count[ch->slots[i].state]++;
        due += ch->slots[i].parts && dp_parts_due(&ch->slots[i]);
        MUST(!ch->slots[i].parts || ch->slots[i].state != SLOT_FREE);
    }
    MUST(due == ch->n_due);
    MUST(count[SLOT_FREE] == ch->n_free && count[SLOT_BUSY] == ch->n_busy && count[SLOT_DONE] == ch->n_done &&
         count[SLOT_ABANDONED] == ch->n_abandoned);
    MUST(!ch->failed || (count[SLOT_BUSY] == 0 && count[SLOT_ABANDONED] == 0));
    for (uint32_t i = 0; i < ch->n_free; i++)
        MUST(ch->slots[ch->free[i]].state == SLOT_FREE);
}

static void act(script *s) {
    static const int statuses[] = {DP_OK, DP_INVALID, DP_PEER_GONE, DP_CONNECTION};
    uint32_t depth = s->ch->cfg.depth;
    switch (take8(&s->in) % 14) {
    case 0:
    case 1: submit(s); break;
    case 2: {
        uint64_t at = take32(&s->in) % s->ch->layout.size;
        write_results(s, at, take8(&s->in));
        break;
    }
    case 3: reply(s); break;
    case 4: mailbox(s); break;
    case 5:
        push(s, (dp_wc){.status = statuses[take8(&s->in) % 4], .imm = take32(&s->in), .byte_len = take32(&s->in),
                        .op = take8(&s->in) % 8});
        break;
    case 6: dp_channel_test(s->ch, take8(&s->in) % (depth + 1)); break;
    case 7: dp_channel_wait(s->ch, take8(&s->in) % (depth + 1), 1); break;
    case 8: finish(s, false); break;
    case 9: finish(s, true); break;
    case 10: dp_channel_abandon(s->ch, take8(&s->in) % (depth + 1)); break;
    case 11: dp_endpoint_wait_any(s->ep, 1); break;
    case 12: s->f.busy = take8(&s->in) % 16; break;
    default: {
        uint8_t how = take8(&s->in);
        if (how == 1)
            dp_channel_fail(s->ch, DP_WORKER_DIED);
        if (how == 2 && dp_channel_reset(s->ch, NULL) == DP_OK) {
            s->n_pending = 0;
            connect_again(s);
        }
        break;
    }
    }
    check(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    script s = {.in = {data, size}};
    dp_error err = {0};
    uint8_t how = take8(&s.in), sizes = take8(&s.in);
    fabric_init(&s.f, (how & 1 ? DP_CAP_RKEY_PTR : 0) | (how & 3 ? DP_CAP_SYNC_SOURCE : 0), 1024);
    dp_channel_config cfg = {1 + (how >> 2) % 8, DP_CACHE_LINE * (1u + sizes % 16), DP_BULK_UNIT * (sizes >> 4) * 4ull};
    s.f.poll = poll;
    s.f.on_imm = on_request;
    s.f.arg = &s;
    MUST(dp_endpoint_create(&s.f.dev, 1, cfg.depth, DP_WAIT_WARM, &s.ep, &err) == DP_OK);
    MUST(dp_channel_create(s.ep, &cfg, &s.ch, &err) == DP_OK);
    MUST(dp_mem_alloc(dp_endpoint_domain(s.ep), 4096, 0, &s.reg, &err) == DP_OK);
    dp_channel_carry(s.ch, how & 32 ? 4096 : 0);
    s.f.peer_size = how & 64 ? dp_layout_large(&s.ch->layout) : s.ch->layout.size;
    MUST(posix_memalign((void **)&s.f.peer, 128, s.f.peer_size) == 0);
    memset(s.f.peer, 0, s.f.peer_size);
    connect_again(&s);
    /* A fixed value, so that an input always gives the same run. */
    s.ch->next_call = 0x00010002;
    while (s.in.left)
        act(&s);
    dp_channel_destroy(s.ch);
    dp_mem_free(s.reg);
    dp_endpoint_destroy(s.ep);
    free(s.f.peer);
    return 0;
}
