/* Which pages of the client's memory a worker prefaults, and which it does not touch. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dp_serve_impl.h"
#include "harness.h"

enum { PAGE = 4096 };

/* How many of the pages from at are in this process' page tables. */
static uint64_t present(const void *at, uint64_t len) {
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    CHECKF(fd >= 0, "open the page map");
    uint64_t n = 0, entry, first = (uintptr_t)at / PAGE, last = ((uintptr_t)at + len - 1) / PAGE;
    for (uint64_t page = first; page <= last; page++) {
        CHECK(pread(fd, &entry, sizeof entry, (off_t)(page * sizeof entry)) == sizeof entry);
        n += entry >> 63;
    }
    close(fd);
    return n;
}

typedef struct client {
    dp_dev *dev;
    dp_domain *domain;
    dp_cq *cq;
    dp_mem *mem;
    dp_qp *qp;
} client;

static void client_open(client *c, const dp_layout *l) {
    dp_error err;
    CHECK_OK_ERR(dp_dev_open("shm", NULL, &c->dev, &err), err);
    CHECK_OK_ERR(dp_domain_create(c->dev, &c->domain, &err), err);
    CHECK_OK_ERR(dp_cq_create(c->dev, 16, &c->cq, &err), err);
    CHECK_OK_ERR(dp_layout_alloc(c->domain, l, l->size, DP_REMOTE_WRITE, &c->mem, &err), err);
    dp_qp_attr attr = {.max_send = 4, .max_recv = 4, .expose = {c->mem}, .n_expose = 1};
    CHECK_OK_ERR(dp_qp_create(c->domain, c->cq, &attr, &c->qp, &err), err);
}

static void client_close(client *c) {
    dp_qp_destroy(c->qp);
    dp_mem_free(c->mem);
    dp_cq_destroy(c->cq);
    dp_domain_destroy(c->domain);
    dp_dev_close(c->dev);
}

/* Connecting takes no page of the client's, touching those that calls use, and none that the client has left out itself: they
 * would be allocated at the worker's expense. */
T_CASE(touch, "channel/pages-that-calls-use", .providers = T_SHM) {
    client c;
    dp_layout l;
    dp_dev *dev;
    dp_server *s;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    dp_layout_set(&l, 8, 16 << 10, 2 << 20);
    client_open(&c, &l);
    if (sysconf(_SC_PAGESIZE) != PAGE || madvise(c.mem->addr, PAGE, MADV_POPULATE_WRITE))
        t_skip("needs pages of 4 KiB and MADV_POPULATE_WRITE (Linux 5.14)");
    uint64_t slots = (l.bulk_at + PAGE - 1) / PAGE, bulk = l.mailbox_at / PAGE - slots, mailbox = (l.size - 1) / PAGE - l.mailbox_at / PAGE + 1;
    CHECK(slots > 1 && bulk > 1);
    uint64_t had = present((uint8_t *)c.mem->addr + slots * PAGE, bulk * PAGE); /* none, unless the node uses huge pages */
    CHECK_OK_ERR(dp_side_encode(c.qp, &l, DP_ROLE_CLIENT, 7, c.mem, blob, &len, &err), err);
    CHECK_OK_ERR(dp_dev_open("shm", &(dp_dev_options){.active_side_only = 1}, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_WARM}, blob, len, &s, &err), err);

    CHECKF(present(s->out, l.size) == 0, "%llu pages after connecting", (unsigned long long)present(s->out, l.size));
    dp_server_touch(s);
    uint64_t there = present(s->out, slots * PAGE);
    CHECKF(there == slots, "%llu of %llu pages of slots", (unsigned long long)there, (unsigned long long)slots);
    there = present(s->out + l.mailbox_at, l.size - l.mailbox_at);
    CHECKF(there == mailbox, "%llu of %llu pages of the mailbox", (unsigned long long)there, (unsigned long long)mailbox);
    there = present((uint8_t *)c.mem->addr + slots * PAGE, bulk * PAGE);
    CHECKF(there == had, "%llu pages of the client's bulk area, it had %llu", (unsigned long long)there, (unsigned long long)had);
    there = present(s->out + slots * PAGE, bulk * PAGE);
    CHECKF(there == 0 || had, "%llu pages of the bulk area, which nobody has used", (unsigned long long)there);

    dp_server_destroy(s);
    dp_dev_close(dev);
    client_close(&c);
}
