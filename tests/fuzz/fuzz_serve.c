/* A worker whose client is hostile: the bytes of its requests region, its mailbox and every completion come from the
 * input, at any moment, while it serves.
 *
 * Byte 0: 1 shared memory (mailbox, results in place), 2 posts take their source at once, bits 2 and 3 depth 1 to 4.
 * Byte 1: eager size and bulk area, in 64 bytes, half a byte each. Then operations, a byte each with what act() takes. */
#include "dp_layout.h"
#include "dp_parts.h"
#include "dp_serve.h"
#include "fabric.h"

enum { GENERATION = 0x1a2b3c4d };

typedef struct script {
    fabric f;
    input in;
    dp_server *server;
    dp_layout l;
    uint8_t *requests; /* the worker's region, to which the client may write anything */
} script;

/* ---- functions ---- */

static uint32_t f_echo(void *args, uint32_t n, void *res) {
    uint32_t room = dp_current_invocation()->room;
    memcpy(res, args, n < room ? n : room);
    return n;
}

static uint32_t f_scribble(void *args, uint32_t n, void *res) {
    (void)args, (void)n;
    memset(res, 0xEE, dp_current_invocation()->room);
    return dp_current_invocation()->capacity + 1;
}

static uint32_t f_fail(void *args, uint32_t n, void *res) {
    (void)res;
    dp_invocation *inv = dp_current_invocation();
    inv->failed = 1;
    inv->code = (int32_t)n; /* 0: no code */
    inv->message_len = n < DP_FAILURE_TEXT ? n : DP_FAILURE_TEXT;
    memcpy(inv->message, args, inv->message_len);
    return 0;
}

static uint32_t f_liar(void *args, uint32_t n, void *res) {
    (void)res;
    const volatile uint8_t *p = args;
    uint8_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum ^= p[i];
    return sum & 1 ? UINT32_MAX : 0;
}

static uint32_t f_full(void *args, uint32_t n, void *res) {
    (void)args, (void)n;
    uint32_t size = dp_current_invocation()->capacity;
    MUST(size <= dp_current_invocation()->room);
    memset(res, 0x77, size);
    return size;
}

static const dp_function functions[] = {f_echo, f_scribble, f_fail, f_liar, f_full};

/* ---- the client ---- */

static void write_requests(script *s, uint64_t at, uint32_t n) {
    uint8_t bytes[256];
    n = n < sizeof bytes ? n : sizeof bytes;
    take(&s->in, bytes, n);
    if (at < s->l.size)
        memcpy(s->requests + at, bytes, n < s->l.size - at ? n : s->l.size - at);
}

static int arrive(script *s, dp_wc *wc, uint32_t imm, uint32_t len) {
    if (s->f.recvs == 0)
        return 0; /* no provider delivers more */
    s->f.recvs--;
    *wc = (dp_wc){.qp = s->f.qp, .imm = imm, .byte_len = len, .op = DP_OP_RECV_IMM};
    return 1;
}

/* A request that is correct except for `twist`. */
static int request(script *s, dp_wc *wc) {
    uint32_t slot = take8(&s->in) % s->l.depth, twist = take8(&s->in) % 16;
    dp_request h = {.generation = GENERATION, .call_id = take16(&s->in), .flags = take8(&s->in) & 15};
    h.function = take8(&s->in) % (sizeof functions / sizeof *functions);
    h.size = take16(&s->in) % ((h.flags & DP_REQ_BULK_IN ? s->l.bulk : s->l.eager) + 1);
    h.capacity = take16(&s->in) % ((h.flags & DP_REQ_BULK_OUT ? s->l.bulk : s->l.eager) + 1);
    if (h.flags & DP_REQ_BULK_IN)
        h.in_offset = (uint32_t)((s->l.bulk - h.size) / DP_BULK_UNIT);
    if (h.flags & DP_REQ_BULK_OUT)
        h.out_offset = (uint32_t)((s->l.bulk - h.capacity) / DP_BULK_UNIT);
    uint32_t head = h.flags & (DP_REQ_BULK_IN | DP_REQ_BULK_OUT) ? DP_REQ_LONG : DP_REQ_SHORT;
    uint32_t len = head + (h.flags & DP_REQ_BULK_IN ? 0 : h.size), imm = dp_imm(slot, h.call_id);
    switch (twist) {
    case 1: h.generation ^= take32(&s->in); break;
    case 2: h.call_id ^= take32(&s->in); break;
    case 3: h.size ^= take32(&s->in); break;
    case 4: h.capacity += take16(&s->in); break;
    case 5: h.function ^= take16(&s->in); break;
    case 6: h.flags ^= take16(&s->in); break;
    case 7: h.in_offset ^= take32(&s->in); break;
    case 8: h.out_offset ^= take32(&s->in); break;
    case 9: h.then ^= take32(&s->in); break;
    case 14: h.then = 1 + take8(&s->in) % (sizeof functions / sizeof *functions); break;
    case 10: len ^= take32(&s->in); break;
    case 11: imm ^= take32(&s->in); break;
    case 12: h.size += take16(&s->in), len = head + h.size; break;
    case 13: h.capacity ^= take32(&s->in); break;
    }
    uint64_t words[4];
    dp_request_pack(words, &h);
    memcpy(s->requests + dp_slot_payload(&s->l, slot) - head, (uint8_t *)words + DP_REQ_LONG - head, head);
    return arrive(s, wc, imm, len);
}

/* A part of a payload, or a request for a part of a result, right but for what `twist` says. */
static int part(script *s, dp_wc *wc) {
    uint32_t slot = take8(&s->in) % s->l.depth, twist = take8(&s->in) % 8, out = take8(&s->in) & 1, offset = take16(&s->in);
    dp_request h = {.generation = GENERATION, .call_id = take16(&s->in), .flags = out ? DP_REQ_PART_OUT : DP_REQ_PART_IN,
                    .function = take8(&s->in) % (sizeof functions / sizeof *functions), .size = take16(&s->in), .capacity = take16(&s->in)};
    uint32_t left = (out ? h.capacity : h.size) - offset, most = dp_part_max(s->l.bulk), bytes = left < most ? left : most;
    switch (twist) {
    case 1: bytes ^= take32(&s->in); break;
    case 2: offset ^= take32(&s->in); break;
    case 3: h.size ^= take32(&s->in); break;
    case 4: h.capacity ^= take32(&s->in); break;
    case 5: h.in_offset ^= take32(&s->in), h.out_offset ^= take32(&s->in); break;
    case 6: h.flags ^= take16(&s->in); break;
    case 7: bytes = take16(&s->in); break;
    }
    uint64_t words[5];
    words[0] = dp_two(offset, bytes);
    dp_request_pack(words + 1, &h);
    memcpy(s->requests + dp_slot_payload(&s->l, slot) - DP_REQ_KEYED, words, DP_REQ_KEYED);
    return arrive(s, wc, dp_imm(slot, h.call_id), DP_REQ_KEYED);
}

static void mailbox(script *s, bool right) {
    dp_mailbox *m = (dp_mailbox *)(void *)(s->requests + s->l.mailbox_at);
    uint64_t word = take64(&s->in), sizes = take64(&s->in);
    if (right) {
        word = dp_mailbox_request((uint32_t)(word >> 32), (word >> 16) % (sizeof functions / sizeof *functions),
                               (uint32_t)word % (dp_mailbox_most(word >> 32 & 1, s->l.eager) + 1), word >> 32 & 1);
        sizes = dp_mailbox_sizes(GENERATION, (uint32_t)(sizes >> 8) % (s->l.depth + 2), (uint32_t)sizes % (s->l.eager + 65));
    }
    m->sizes = sizes;
    take(&s->in, m->payload, sizeof m->payload);
    m->request = word;
}

/* One action of the client. Returns the number of its completions. */
static int act(script *s, dp_wc *wc) {
    static const int statuses[] = {DP_OK, DP_INVALID, DP_PEER_GONE, DP_CONNECTION};
    switch (take8(&s->in) % 10) {
    case 0: {
        uint32_t at = take32(&s->in) % s->l.size;
        write_requests(s, at, take8(&s->in));
        return 0;
    }
    case 1: { /* raw bytes before and in the payload, and their arrival */
        uint32_t slot = take8(&s->in), before = take8(&s->in) % 41, n = take8(&s->in);
        uint32_t imm = dp_imm(slot, take16(&s->in)), len = take32(&s->in);
        if (slot < s->l.depth)
            write_requests(s, dp_slot_payload(&s->l, slot) - before, n);
        return arrive(s, wc, imm, len);
    }
    case 2: return request(s, wc);
    case 3: mailbox(s, false); return 0;
    case 4: mailbox(s, true); return 0;
    case 5: {
        dp_wc any = {.qp = s->f.qp, .status = statuses[take8(&s->in) % 4], .imm = take32(&s->in),
                     .byte_len = take32(&s->in), .op = take8(&s->in) % 8};
        if (any.op == DP_OP_RECV || any.op == DP_OP_RECV_IMM) {
            if (s->f.recvs == 0)
                return 0;
            s->f.recvs--;
        }
        *wc = any;
        return 1;
    }
    case 6: s->f.busy = take8(&s->in) % 16; return 0;
    case 7: { /* a bare request: repeats the slot's last header, with this size */
        uint32_t slot = take8(&s->in) % s->l.depth, tag = take16(&s->in), len = take16(&s->in);
        return arrive(s, wc, DP_IMM_BARE | dp_imm(slot, tag), len % (s->l.eager + 2));
    }
    case 8: return part(s, wc);
    default:
        if (take8(&s->in) == 0x99)
            dp_qp_break(s->f.qp, DP_PEER_GONE);
        return 0;
    }
}

static int poll(void *arg, dp_wc *wc, int n) {
    script *s = arg;
    if (n < 1)
        return 0;
    if (s->in.left == 0) {
        dp_server_stop(s->server);
        return 0;
    }
    return act(s, wc);
}

static void on_reply(void *arg, uint32_t imm, uint64_t raddr, uint64_t len) {
    script *s = arg;
    uint32_t slot = dp_imm_slot(imm);
    MUST(slot < s->l.depth);
    uint64_t payload = FABRIC_BASE + dp_slot_payload(&s->l, slot), bulk = FABRIC_BASE + s->l.bulk_at;
    bool in_slot = raddr >= payload - DP_SLOT_ROOM && raddr <= payload && raddr + len <= payload + s->l.eager;
    bool in_bulk = dp_imm_bare(imm) && raddr >= bulk && raddr + len <= bulk + s->l.bulk;
    MUST(in_slot || in_bulk);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    script s = {.in = {data, size}};
    uint8_t how = take8(&s.in), sizes = take8(&s.in);
    fabric_init(&s.f, (how & 1 ? DP_CAP_RKEY_PTR : 0) | (how & 3 ? DP_CAP_SYNC_SOURCE : 0), 1024);
    dp_layout_set(&s.l, 1 + (how >> 2) % 4, DP_CACHE_LINE * (1 + sizes % 16), DP_BULK_UNIT * (sizes >> 4) * 4ull);
    s.f.peer_size = s.l.size;
    MUST(posix_memalign((void **)&s.f.peer, 128, s.l.size) == 0);
    memset(s.f.peer, 0, s.l.size);
    s.f.poll = poll;
    s.f.on_imm = on_reply;
    s.f.arg = &s;
    uint8_t blob[DP_CHANNEL_BLOB_MAX] = {0};
    dp_channel_blob b = {.magic = DP_CHANNEL_MAGIC, .version = DP_WIRE_VERSION, .role = DP_ROLE_CLIENT,
                         .provider = (uint8_t)s.f.dev.provider, .generation = GENERATION, .depth = (uint16_t)s.l.depth,
                         .qp_len = 4, .eager = s.l.eager, .slots_rkey = FABRIC_RKEY, .slots_addr = FABRIC_BASE,
                         .bulk = s.l.bulk, .bulk_addr = FABRIC_BASE + s.l.bulk_at, .bulk_rkey = FABRIC_RKEY};
    uint32_t len = sizeof b + 4;
    memcpy(blob, &b, sizeof b);
    b.crc = dp_crc32c(blob, len);
    memcpy(blob, &b, sizeof b);
    dp_error err = {0};
    MUST(dp_server_create(&s.f.dev, &(dp_server_config){.mode = DP_WAIT_WARM, .max_bulk = 1 << 17}, blob, len, &s.server, &err) == DP_OK);
    dp_server_set_functions(s.server, functions, sizeof functions / sizeof *functions);
    len = sizeof blob;
    MUST(dp_server_blob(s.server, blob, &len, &err) == DP_OK);
    memcpy(&b, blob, sizeof b);
    s.requests = (uint8_t *)(uintptr_t)b.slots_addr;
    int st = dp_server_run(s.server);
    MUST(st <= 0 && (st == DP_OK || dp_status_class(st) == 5 || st == DP_INVALID));
    dp_server_destroy(s.server);
    free(s.f.peer);
    return 0;
}
