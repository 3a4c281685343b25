/* Devices and memory regions. */
#include <errno.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ends.h"

T_CASE(unknown_provider, "device/unknown-provider") {
    static const char *const names[] = {"udp", "", "SHM", "shm ", "verbsx", "tcp6"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dp_error err;
        dp_dev *dev = NULL;
        t_note("provider \"%s\"", names[i]);
        CHECK_REFUSED(dp_dev_open(names[i], NULL, &dev, &err), DP_INVALID, err);
        CHECKF(strstr(err.msg, names[i]), "message does not name the value: %s", err.msg);
        CHECK_STATUS(dp_dev_open(names[i], NULL, &dev, NULL), DP_INVALID);
    }
    dp_error err;
    dp_dev *dev = NULL;
    CHECK_REFUSED(dp_dev_open(NULL, NULL, &dev, &err), DP_INVALID, err);
}

T_CASE(bad_options, "device/bad-options", .providers = T_VERBS) {
    static const struct {
        const char *what;
        dp_dev_options o;
        int other; /* a second permitted status */
    } bad[] = {
        {"device", {.device = "nosuchdevice0", .gid_index = -1}, DP_NO_DEVICE},
        {"device name longer than any", {.device = "x123456789012345678901234567890123456789012345678901234567890123456789",
                                         .gid_index = -1}, DP_NO_DEVICE},
        {"port 200", {.port = 200, .gid_index = -1}, DP_NO_DEVICE},
        {"port -1", {.port = -1, .gid_index = -1}, DP_NO_DEVICE},
        {"gid index 60000", {.gid_index = 60000}, DP_NO_DEVICE},
        {"pkey index 60000", {.gid_index = -1, .pkey_index = 60000}, DP_NO_DEVICE},
        {"traffic class 256", {.gid_index = -1, .traffic_class = 256}, 0},
        {"traffic class -1", {.gid_index = -1, .traffic_class = -1}, 0},
        {"service level 16", {.gid_index = -1, .service_level = 16}, 0},
        {"service level -1", {.gid_index = -1, .service_level = -1}, 0},
        {"mtu 100", {.gid_index = -1, .mtu = 100}, 0},
        {"mtu 1500", {.gid_index = -1, .mtu = 1500}, 0},
        {"mtu 8192", {.gid_index = -1, .mtu = 8192}, 0},
        {"mtu -1", {.gid_index = -1, .mtu = -1}, 0},
        {"timeout 32", {.gid_index = -1, .timeout = 32}, 0},
        {"timeout -1", {.gid_index = -1, .timeout = -1}, 0},
        {"retry count 8", {.gid_index = -1, .retry_count = 8}, 0},
        {"retry count -1", {.gid_index = -1, .retry_count = -1}, 0},
        {"keepalive of 3600001 ms", {.gid_index = -1, .keepalive_ms = 3600001}, 0},
        {"keepalive of -1 ms", {.gid_index = -1, .keepalive_ms = -1}, 0},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dp_error err = {0};
        dp_dev *dev = NULL;
        t_note("%s", bad[i].what);
        int st = dp_dev_open(t_provider(), &bad[i].o, &dev, &err);
        CHECKF(st == DP_INVALID || (st && st == bad[i].other), "%s: %d (%s)", bad[i].what, st, dp_status_text(st));
        CHECK_EQ(err.status, st);
        CHECK(err.msg[0]);
        if (bad[i].o.device)
            CHECKF(strstr(err.msg, "nosuchdevice0") || strstr(err.msg, "x1234567890"), "message names no device: %s", err.msg);
    }
}

T_CASE(open_close, "device/open-close") {
    t_usage before, after;
    for (int i = 0; i < 20; i++) {
        dp_dev *dev = NULL;
        dp_error err = {0};
        CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
        CHECK_EQ(dev->provider, t_is_verbs() ? DP_PROVIDER_VERBS : t_is_tcp() ? DP_PROVIDER_TCP : t_is_ofi() ? DP_PROVIDER_OFI : DP_PROVIDER_SHM);
        CHECK(memchr(dev->name, 0, sizeof dev->name) && dev->name[0]);
        CHECK_EQ(dev->caps & ~(DP_CAP_SYNC_SOURCE | DP_CAP_RKEY_PTR | DP_CAP_POLLED_TARGET | DP_CAP_POLLED_SOURCE | DP_CAP_SILENT_DEATH), 0);
        CHECK_GE(dev->max_msg, 1u << 20);
        if (t_is_verbs())
            CHECK_EQ(dev->caps, 0);
        dp_dev_close(dev);
        if (i == 0)
            t_usage_now(&before);
    }
    t_usage_now(&after);
    CHECK_EQ(after.n_fds, before.n_fds);
    CHECK_EQ(after.shared_maps, before.shared_maps);
}

T_CASE(two_devices, "device/several-at-once") {
    dp_dev *dev[4];
    dp_error err = {0};
    for (int i = 0; i < 4; i++)
        CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev[i], &err), err);
    for (int i = 3; i >= 0; i--)
        dp_dev_close(dev[i]);
}

T_CASE(null_frees, "device/freeing-nothing") {
    dp_dev_close(NULL);
    dp_domain_destroy(NULL);
    dp_mem_free(NULL);
    dp_cq_destroy(NULL);
    dp_qp_destroy(NULL);
}

/* Every step of a set-up fails once because no descriptor is free: an error, no crash, no leak. */
T_CASE(no_descriptors, "device/no-descriptors-left") {
    dp_dev *first = NULL;
    dp_error first_err = {0};
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &first, &first_err), first_err); /* loads libraries that are loaded only once */
    dp_dev_close(first);
    t_usage before;
    t_usage_now(&before);
    struct rlimit old, lim;
    CHECK(!getrlimit(RLIMIT_NOFILE, &old));
    int stage = 0; /* furthest step that was reached */
    for (int room = 0; room < 40 && stage < 6; room++) {
        lim = old;
        int top = dup(0);
        CHECK(top >= 0);
        close(top);
        lim.rlim_cur = (rlim_t)(top + room);
        t_note("%d free descriptors, reached step %d", room, stage);
        CHECK(!setrlimit(RLIMIT_NOFILE, &lim));
        dp_dev *dev = NULL;
        dp_domain *dom = NULL;
        dp_mem *mem = NULL;
        dp_cq *cq = NULL;
        dp_qp *qp = NULL;
        dp_error err = {0};
        int st = dp_dev_open(t_provider(), NULL, &dev, &err), at = 0;
        if (!st && ++at)
            st = dp_domain_create(dev, &dom, &err);
        if (!st && ++at)
            st = dp_mem_alloc(dom, 4096, ACCESS_ALL, &mem, &err);
        if (!st && ++at)
            st = dp_cq_create(dev, 128, &cq, &err);
        dp_qp_attr attr = {.max_send = 16, .max_recv = 16, .expose = {mem}, .n_expose = 1};
        if (!st && ++at)
            st = dp_qp_create(dom, cq, &attr, &qp, &err);
        uint8_t blob[DP_BLOB_MAX];
        uint32_t len = sizeof blob;
        if (!st && ++at)
            st = dp_qp_export(qp, blob, &len, &err);
        if (!st && ++at)
            CHECK(qp->state == DP_QP_INIT);
        if (st) {
            CHECK_EQ(err.status, st);
            CHECK(err.msg[0]);
        }
        stage = at > stage ? at : stage;
        dp_qp_destroy(qp);
        dp_cq_destroy(cq);
        dp_mem_free(mem);
        dp_domain_destroy(dom);
        dp_dev_close(dev);
        CHECK(!setrlimit(RLIMIT_NOFILE, &old));
        t_usage_check(&before);
    }
    CHECK_EQ(stage, 6);
}

/* ---- memory ---- */

typedef struct bench {
    dp_dev *dev;
    dp_domain *dom;
} bench;

static bench open_domain(void) {
    bench b;
    dp_error err = {0};
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &b.dev, &err), err);
    CHECK_OK_ERR(dp_domain_create(b.dev, &b.dom, &err), err);
    CHECK(b.dom->dev == b.dev);
    return b;
}

static void close_domain(bench b) {
    dp_domain_destroy(b.dom);
    dp_dev_close(b.dev);
}

/* Whether this byte is readable. Asks the kernel, because an access could crash. */
static bool readable(const void *p) {
    int fds[2];
    CHECK(!pipe(fds));
    ssize_t n = write(fds[1], p, 1);
    CHECK(n == 1 || errno == EFAULT);
    close(fds[0]);
    close(fds[1]);
    return n == 1;
}

T_CASE(memory_sizes, "memory/sizes") {
    static const uint64_t sizes[] = {1, 7, 63, 64, 4095, 4096, 4097, 8192, 65536 + 1, 2u << 20, 16u << 20};
    bench b = open_domain();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes - (t_is_verbs() ? 1 : 0); i++) {
        for (uint32_t access = 0; access < 8; access++) {
            t_note("size %llu access %u", (unsigned long long)sizes[i], access);
            if (access != 7 && sizes[i] > 8192)
                continue;
            dp_mem *m = NULL;
            dp_error err = {0};
            CHECK_OK_ERR(dp_mem_alloc(b.dom, sizes[i], access, &m, &err), err);
            CHECK(m->domain == b.dom);
            CHECK_EQ((uintptr_t)m->addr % 4096, 0);
            CHECK_GE(m->size, sizes[i]);
            CHECK_EQ(m->access, access);
            uint64_t pages = (m->size + 4095) / 4096;
            unsigned char *p = m->addr;
            struct rusage r0, r1;
            CHECK(!getrusage(RUSAGE_THREAD, &r0));
            for (uint64_t k = 0; k < pages; k++)
                ((volatile unsigned char *)p)[k * 4096] = 0;
            CHECK(!getrusage(RUSAGE_THREAD, &r1));
            if (!T_ASAN && !T_TSAN && pages >= 16)
                CHECKF(r1.ru_minflt - r0.ru_minflt < (long)pages / 4, "not prefaulted: %ld faults on %llu pages",
                       r1.ru_minflt - r0.ru_minflt, (unsigned long long)pages);
            CHECK_BYTES(p, 0, sizes[i]);
            memset(p, 0xAB, sizes[i]); /* local access is always read and write */
            CHECK_BYTES(p, 0xAB, sizes[i]);
            CHECK(readable(p + pages * 4096 - 1));
            CHECKF(!readable(p + pages * 4096), "the page after the region is accessible");
            dp_mem_free(m);
        }
    }
    close_domain(b);
}

T_CASE(memory_zeroed_again, "memory/zeroed-after-reuse") {
    bench b = open_domain();
    for (int i = 0; i < 50; i++) {
        dp_mem *m = NULL;
        dp_error err = {0};
        CHECK_OK_ERR(dp_mem_alloc(b.dom, 65536, ACCESS_ALL, &m, &err), err);
        CHECK_BYTES(m->addr, 0, 65536);
        memset(m->addr, 0xFF, 65536);
        dp_mem_free(m);
    }
    close_domain(b);
}

T_CASE(memory_many, "memory/many-regions-no-leak") {
    bench b = open_domain();
    t_usage before, after;
    t_usage_now(&before);
    enum { N = 60 };
    for (int round = 0; round < 3; round++) {
        dp_mem *m[N];
        dp_error err = {0};
        for (int i = 0; i < N; i++) {
            CHECK_OK_ERR(dp_mem_alloc(b.dom, 4096, ACCESS_ALL, &m[i], &err), err);
            for (int k = 0; k < i; k++) {
                CHECKF(m[k]->rkey != m[i]->rkey, "regions %d and %d have the same rkey %#x", k, i, m[i]->rkey);
                CHECK(m[k]->addr != m[i]->addr);
            }
        }
        for (int i = 0; i < N; i++)
            dp_mem_free(m[(i * 7) % N]);
    }
    t_usage_now(&after);
    CHECK_EQ(after.n_fds, before.n_fds);
    CHECK_EQ(after.shared_maps, before.shared_maps);
    if (!T_ASAN)
        CHECK_LE(after.maps, before.maps + 8);
    close_domain(b);
}

T_CASE(memory_bad, "memory/bad-arguments") {
    bench b = open_domain();
    dp_mem *m = NULL;
    dp_error err;
    CHECK_REFUSED(dp_mem_alloc(b.dom, 0, ACCESS_ALL, &m, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_mem_alloc(b.dom, (1ull << 40) + 1, ACCESS_ALL, &m, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_mem_alloc(b.dom, UINT64_MAX, ACCESS_ALL, &m, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_mem_alloc(b.dom, 4096, 16, &m, &err), DP_INVALID, err);
    char *own = malloc(4096);
    CHECK_REFUSED(dp_mem_register(b.dom, NULL, 4096, 0, &m, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_mem_register(b.dom, own, 0, 0, &m, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_mem_register(b.dom, own, (1ull << 40) + 1, 0, &m, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_mem_register(b.dom, own, 4096, 16, &m, &err), DP_INVALID, err);
    CHECK(!m);
    free(own);
    close_domain(b);
}

T_CASE(memory_register, "memory/register") {
    bench b = open_domain();
    unsigned char *own = malloc(10000);
    for (uint32_t access = 0; access < 8; access++) {
        dp_mem *m = NULL;
        dp_error err = {0};
        t_note("access %u", access);
        int st = dp_mem_register(b.dom, own + 1, 9999, access, &m, &err);
        if (access && t_is_shm()) {
            CHECK_STATUS(st, DP_UNSUPPORTED);
            CHECK_EQ(err.status, DP_UNSUPPORTED);
            CHECK(err.msg[0]);
            continue;
        }
        CHECKF(st == DP_OK, "register: %d %s", st, err.msg);
        CHECK(m->addr == own + 1);
        CHECK_EQ(m->size, 9999);
        CHECK_EQ(m->access, access);
        dp_mem_free(m);
        memset(own, 1, 10000); /* still the caller's */
    }
    free(own);
    close_domain(b);
}

T_CASE(memory_exhausted, "memory/no-address-space") {
    if (T_ASAN)
        t_skip("the address sanitizer needs the address space");
    bench b = open_domain();
    t_usage before;
    t_usage_now(&before);
    struct rlimit old, lim;
    CHECK(!getrlimit(RLIMIT_AS, &old));
    lim = old;
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    CHECK(f && fscanf(f, "%lu", &pages) == 1);
    fclose(f);
    lim.rlim_cur = pages * 4096 + (32u << 20);
    CHECK(!setrlimit(RLIMIT_AS, &lim));
    dp_mem *m = NULL;
    dp_error err;
    CHECK_REFUSED(dp_mem_alloc(b.dom, 1u << 30, ACCESS_ALL, &m, &err), DP_FATAL, err);
    CHECK_OK_ERR(dp_mem_alloc(b.dom, 65536, ACCESS_ALL, &m, &err), err);
    dp_mem_free(m);
    CHECK(!setrlimit(RLIMIT_AS, &old));
    t_usage_check(&before);
    close_domain(b);
}

static void churn_memory(int sock, void *arg) {
    bench *b = arg;
    for (int i = 0; i < t_pick(200, 40); i++) {
        dp_domain *dom = NULL;
        dp_mem *m = NULL, *k = NULL;
        dp_cq *cq = NULL;
        dp_qp *qp = NULL;
        dp_error err = {0};
        CHECK_OK_ERR(dp_domain_create(b->dev, &dom, &err), err);
        CHECK_OK_ERR(dp_mem_alloc(dom, 4096, ACCESS_ALL, &m, &err), err);
        CHECK_OK_ERR(dp_mem_alloc(b->dom, 4096, ACCESS_ALL, &k, &err), err); /* in the shared domain */
        CHECK_BYTES(k->addr, 0, 4096);
        memset(k->addr, 1, 4096);
        CHECK_OK_ERR(dp_cq_create(b->dev, 64, &cq, &err), err);
        dp_qp_attr attr = {.max_send = 8, .max_recv = 8, .expose = {m}, .n_expose = 1};
        CHECK_OK_ERR(dp_qp_create(dom, cq, &attr, &qp, &err), err);
        dp_qp_destroy(qp);
        dp_cq_destroy(cq);
        dp_mem_free(k);
        dp_mem_free(m);
        dp_domain_destroy(dom);
    }
    t_sync(sock);
}

T_CASE(threads, "device/threads-share-it") {
    bench b = open_domain();
    t_peer p;
    t_peer_start(&p, false, churn_memory, &b);
    churn_memory(p.sock, &b);
    t_peer_join(&p);
    close_domain(b);
}
