/* A receive ring of shm that its writer fills with any bytes. Byte 0 is the number of posted receives. Entries of 32 bytes follow:
 * a control byte (1: the sequence number is right, so the entry counts; 2: the peer takes back memory at the same time), 7 unused
 * bytes, 8 of `what`, 8 of `offset`, 8 of data. */
#include <fcntl.h>
#include <sys/mman.h>

#include "dp_shm.h"
#include "fuzz.h"

enum { RING = 8, REGION = 4096 };

static dp_dev *dev;
static dp_domain *domain;
static dp_mem *writable, *readable;
static dp_cq *cq;
static dp_qp *qp;

static void set_up(void) {
    dp_error err;
    MUST(dp_dev_open("shm", &(dp_dev_options){.active_side_only = 1}, &dev, &err) == DP_OK);
    MUST(dp_domain_create(dev, &domain, &err) == DP_OK);
    MUST(dp_mem_alloc(domain, REGION, DP_REMOTE_WRITE, &writable, &err) == DP_OK);
    MUST(dp_mem_alloc(domain, REGION, DP_REMOTE_READ, &readable, &err) == DP_OK);
    MUST(dp_cq_create(dev, 64, &cq, &err) == DP_OK);
    dp_qp_attr attr = {.max_send = 8, .max_recv = RING, .expose = {writable, readable}, .n_expose = 2};
    MUST(dp_qp_create(domain, cq, &attr, &qp, &err) == DP_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!dev)
        set_up();
    shm_qp *q = (shm_qp *)qp;
    memset(q->segment, 0, sizeof *q->segment + RING * sizeof(shm_entry));
    memset(writable->addr, 0x11, REGION);
    q->rpos = q->rposted = 0;
    q->q.state = DP_QP_CONNECTED;
    q->q.broken = 0;
    shm_show_next((shm_cq *)cq);
    input in = {data, size};
    uint8_t posted = take8(&in) % (RING + 1);
    for (int i = 0; i < posted; i++)
        MUST(dp_post_recv(qp, (uint64_t)i) == DP_OK);
    uint32_t pos = 0;
    for (int taken = 0; in.left && taken < 4 * RING; taken++) {
        shm_entry *e = &q->segment->ring[pos & (RING - 1)];
        uint64_t control = take64(&in);
        e->what = take64(&in);
        e->offset = take64(&in);
        take(&in, e->data, 8);
        e->seq_imm = control & 1 ? (control & ~0xffffffffull) | (pos + 1) : control;
        if (control & 2)
            fallocate(q->expose[0]->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, REGION);
        dp_wc wc[2];
        int n = dp_cq_poll(cq, wc, 2);
        MUST(n >= 0 && n <= 1); /* the next entry has another number */
        if (n == 0)
            continue;
        pos++;
        MUST(wc[0].qp == qp);
        if (wc[0].status) {
            MUST(qp->state == DP_QP_ERROR);
            MUST(dp_cq_poll(cq, wc, 2) == 0);
            break;
        }
        MUST(pos <= posted && wc[0].op == DP_OP_RECV_IMM);
    }
    const uint8_t *r = readable->addr;
    for (int i = 0; i < REGION; i++)
        MUST(r[i] == 0);
    return 0;
}
