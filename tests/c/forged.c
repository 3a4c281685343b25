#include "forged.h"

static const end_opts raw_opts = {.size = 64 << 10, .max_send = 32, .max_recv = 16, .takes_shared = true};

static void raw_open(raw *r) {
    end_open(&r->e, &raw_opts, NULL);
    dp_layout_set(&r->l, 8, 512, 4096);
    CHECK_LE(r->l.size, r->e.mem->size);
    r->generation = 77;
    memset(r->told, 0, sizeof r->told);
}

static void send_blob(raw *r, int sock, uint8_t role) {
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    CHECK_OK_ERR(dp_side_encode(r->e.qp, &r->l, role, r->generation, r->e.mem, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
}

static void recv_blob(raw *r, int sock, uint8_t role) {
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_side_decode(blob, len, role, r->e.dev->provider, &r->peer, &err), err);
}

static void join(raw *r) {
    dp_error err;
    CHECK_OK_ERR(dp_qp_connect(r->e.qp, r->peer.qp_blob, r->peer.qp_len, &err), err);
}

static uint32_t echo(void *args, uint32_t n, void *res) {
    memcpy(res, args, n);
    return n;
}

static void server_side(int sock, void *arg) {
    (void)arg;
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    dp_dev_options o = quick_options();
    o.active_side_only = 1;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, blob, len, &s, &err), err);
    dp_function table[FN_COUNT];
    for (int i = 0; i < FN_COUNT; i++)
        table[i] = echo;
    dp_server_set_functions(s, table, FN_COUNT);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    int st = dp_server_run(s);
    t_send(sock, &st, sizeof st);
    dp_server_destroy(s);
    dp_dev_close(dev);
}

void raw_client(raw *r, t_peer *p) {
    t_peer_start(p, true, server_side, NULL);
    raw_open(r);
    send_blob(r, p->sock, DP_ROLE_CLIENT);
    recv_blob(r, p->sock, DP_ROLE_WORKER);
    join(r);
}

void raw_worker(raw *r, int sock) {
    t_name("forger");
    raw_open(r);
    recv_blob(r, sock, DP_ROLE_CLIENT);
    r->generation = r->peer.generation;
    r->client_polls = false;
    CHECK_EQ(r->peer.layout.depth, 8);
    join(r);
    send_blob(r, sock, DP_ROLE_WORKER);
}

void served_by(served *s, void (*worker)(int sock, void *arg)) {
    dp_error err;
    dp_dev_options o = quick_options();
    *s = (served){.mode = DP_WAIT_ADAPTIVE};
    t_peer_start(&s->peer, true, worker, NULL);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &s->dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(s->dev, 1, 8, s->mode, &s->ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(s->ep, &(dp_channel_config){8, 512, 4096}, &s->ch, &err), err);
    served_again(s, true);
}

void served_by_close(served *s) {
    t_peer_join(&s->peer);
    served_close_client(s);
}

dp_mailbox *raw_mailbox(raw *r, bool own) {
    if (own)
        return (dp_mailbox *)(void *)(end_bytes(&r->e) + r->l.mailbox_at);
    dp_mailbox *m = dp_rkey_ptr(r->e.qp, r->peer.addr + r->l.mailbox_at, r->peer.rkey, DP_MAILBOX_SLOTS_SIZE);
    CHECK(m);
    return m;
}

uint64_t *raw_slot_reply(raw *r, bool worker) {
    uint64_t at = dp_layout_reply(&r->l);
    void *p = worker ? dp_rkey_ptr(r->e.qp, r->peer.addr + at, r->peer.rkey, sizeof(uint64_t)) : end_bytes(&r->e) + at;
    CHECK(p);
    return p;
}

/* Writes the first `len` bytes of local memory so that they end `payload` bytes after the start of slot `at`'s payload. */
static void put(raw *r, uint32_t at, uint32_t len, uint32_t payload, uint32_t imm, uint32_t flags) {
    dp_sge sge = local_sge(&r->e, 0, len);
    end_write_imm(&r->e, &sge, 1, r->peer.addr + dp_slot_payload(&r->l, at) + payload - len, r->peer.rkey, imm, 0, flags);
}

void raw_request_as(raw *r, uint32_t at, dp_request h, uint32_t payload, uint32_t imm) {
    uint32_t head = h.flags & (DP_REQ_PLACED | DP_REQ_PARTS) ? DP_REQ_KEYED : h.flags & DP_REQ_BULK ? DP_REQ_LONG : DP_REQ_SHORT;
    uint8_t bytes[DP_REQ_KEYED];
    memcpy(bytes, &r->keys, sizeof r->keys);
    memcpy(bytes + DP_REQ_KEYED - DP_REQ_LONG, &h, DP_REQ_LONG);
    memcpy(local_bytes(&r->e), bytes + DP_REQ_KEYED - head, head);
    put(r, at, head + payload, payload, imm, 0);
}

void raw_request(raw *r, uint32_t slot, dp_request h, uint32_t payload, uint32_t tag) {
    raw_request_as(r, slot, h, payload, dp_imm(slot, tag));
}

void raw_bare(raw *r, uint32_t slot, uint32_t payload, uint32_t tag) {
    put(r, slot, payload, payload, DP_IMM_BARE | dp_imm(slot, tag), 0);
}

dp_reply raw_reply(raw *r, uint32_t slot, uint32_t call_id) {
    dp_wc wc = end_imm(&r->e);
    CHECK_EQ(dp_imm_slot(wc.imm), slot);
    CHECK_EQ(dp_imm_tag(wc.imm), call_id & 0xffff);
    if (dp_imm_bare(wc.imm))
        return (dp_reply){.call_id = call_id, .status = DP_OK, .size = wc.byte_len};
    dp_reply h;
    memcpy(&h, end_bytes(&r->e) + dp_slot_payload(&r->l, slot) - DP_REPLY_SIZE, sizeof h);
    CHECK_EQ(h.call_id, call_id);
    return h;
}

uint32_t raw_take(raw *r, dp_request *q, bool *bare) {
    dp_wc wc = end_imm(&r->e);
    uint32_t slot = dp_imm_slot(wc.imm);
    CHECK_LT(slot, 8);
    dp_request *told = &r->told[slot];
    if (dp_imm_bare(wc.imm)) {
        CHECKF(told->generation == r->generation, "bare request in slot %u, where no header has come", slot);
        told->call_id += (dp_imm_tag(wc.imm) - told->call_id) & 0xffff;
        told->size = wc.byte_len;
    } else {
        memcpy(told, end_bytes(&r->e) + dp_slot_payload(&r->l, slot) - DP_REQ_LONG, sizeof *told);
    }
    CHECK_EQ(told->call_id & 0xffff, dp_imm_tag(wc.imm));
    *q = *told;
    if (bare)
        *bare = dp_imm_bare(wc.imm);
    return slot;
}

/* Waits until the post has arrived, unless that needs polls by the client, and the client is another process. */
static void put_and_wait(raw *r, uint32_t at, uint32_t size, uint32_t payload, uint32_t imm) {
    bool wait = r->client_polls || !(r->e.dev->caps & DP_CAP_POLLED_TARGET);
    put(r, at, size, payload, imm, wait ? DP_SIGNALED : 0);
    if (wait)
        end_sent(&r->e, 0, DP_OP_WRITE);
}

void raw_answer(raw *r, uint32_t at, dp_reply h, uint32_t payload, int fill, uint32_t imm) {
    memcpy(local_bytes(&r->e), &h, sizeof h);
    memset(local_bytes(&r->e) + sizeof h, fill, payload);
    put_and_wait(r, at, DP_REPLY_SIZE + payload, payload, imm);
}

void raw_answer_bare(raw *r, uint32_t at, uint32_t payload, int fill, uint32_t imm) {
    memset(local_bytes(&r->e), fill, payload);
    put_and_wait(r, at, payload, payload, imm);
}
