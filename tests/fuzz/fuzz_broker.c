/* The page and the ring of a virtual queue pair that its client fills with any bytes, between the steps of the broker. Commands: 0 a request
 * (its slot, then its fields), 1 a number for a field of the page, 2 a completion of the real queue pair, 3 posts that find it full, 4 a step. */
#include "dp_broker.c"
#include "fabric.h"

enum { DEPTH = 4, PEER = 4096, ARRIVALS = DEPTH };

static fabric f;
static dp_broker broker;
static uint32_t arrivals;

static int poll_cq(void *arg, dp_wc *wc, int n) {
    int got = 0;
    (void)arg;
    for (; arrivals && got < n && f.recvs; arrivals--, f.recvs--)
        wc[got++] = (dp_wc){.qp = f.qp, .op = DP_OP_RECV_IMM, .imm = arrivals};
    return got;
}

static dp_brokered *make(void) {
    dp_brokered *c;
    dp_error err;
    arrivals = 0;
    fabric_init(&f, 0, DP_VQP_MESSAGE);
    f.poll = poll_cq;
    static uint8_t *peer;
    MUST(peer || (peer = calloc(1, PEER)));
    f.peer = peer;
    f.peer_size = PEER;
    broker = (dp_broker){.dev = &f.dev};
    MUST(!dp_brokered_create(&broker, &(dp_channel_config){DEPTH, 256, 0}, &c, &err));
    c->qp->state = DP_QP_CONNECTED;
    c->peer = (dp_side){.layout.size = PEER, .addr = FABRIC_BASE, .rkey = FABRIC_RKEY};
    return c;
}

static void put_request(dp_brokered *c, input *in) {
    dp_vqp_request *r = &c->requests[take8(in) & (c->l.n_requests - 1)];
    take(in, r, offsetof(dp_vqp_request, bytes));
    if (take8(in) & 1) {
        r->raddr += FABRIC_BASE;
        r->rkey = FABRIC_RKEY;
        memset(r->reserved, 0, sizeof r->reserved);
    }
}

static void set_field(dp_brokered *c, input *in) {
    uint32_t *fields[] = {&c->page->posted,        &c->page->receives, &c->page->taken,  &c->page->client_sleeps,          &c->page->served, &c->page->done,
                          &c->page->broker_sleeps, &c->page->blob_len, (uint32_t *)&c->page->gate, (uint32_t *)&c->page->broken};
    uint8_t which = take8(in);
    uint32_t *field = fields[which % (sizeof fields / sizeof *fields)];
    *field = which & 0x80 ? *field + take8(in) : (uint32_t)take64(in);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    dp_brokered *c = make();
    input in = {data, size};
    while (in.left) {
        uint32_t done = c->done;
        switch (take8(&in) % 5) {
        case 0: put_request(c, &in); break;
        case 1: set_field(c, &in); break;
        case 2: arrivals += take8(&in) % (ARRIVALS + 1); break;
        case 3: f.busy = take8(&in) % 4; break;
        default: serve(c);
        }
        MUST(c->done - done <= 2 * BATCH + 1);
        MUST(c->receives <= c->qp->max_recv);
        MUST(c->qp->state == DP_QP_CONNECTED && !c->qp->broken && !c->broken);
        MUST(c->peer.addr == FABRIC_BASE && c->peer.rkey == FABRIC_RKEY && c->peer.layout.size == PEER);
    }
    dp_brokered_drop(c);
    return 0;
}
