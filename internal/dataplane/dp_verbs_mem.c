/* Protection domains and memory regions of the verbs provider. */
#include "dp_verbs.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

typedef struct dpv_mem {
    dp_mem base;
    struct ibv_mr *mr;
    void *map;      /* what dpv_mem_free unmaps; NULL for the caller's memory */
    size_t map_len; /* of an allocation: guard page included */
} dpv_mem;

int dpv_domain_create(dp_dev *dev, dp_domain **out, dp_error *err) {
    dpv_domain *d = calloc(1, sizeof *d);
    if (!d)
        return dp_fail(err, DP_FATAL, ENOMEM, "create domain on %s", dev->name);
    d->base.dev = dev;
    d->pd = dpv_ibv.alloc_pd(dpv_dev_of(dev)->ctx);
    if (!d->pd) {
        int e = errno;
        free(d);
        return dp_fail(err, dpv_status_of(e), e, "ibv_alloc_pd on %s", dev->name);
    }
    *out = &d->base;
    return DP_OK;
}

void dpv_domain_destroy(dp_domain *base) {
    dpv_domain *d = dpv_domain_of(base);
    dpv_ibv.dealloc_pd(d->pd);
    free(d);
}

uint32_t dpv_access_flags(uint32_t access) {
    return (access & DP_REMOTE_READ ? IBV_ACCESS_REMOTE_READ : 0u) |
           (access & DP_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0u) |
           (access & DP_REMOTE_ATOMIC ? IBV_ACCESS_REMOTE_ATOMIC : 0u);
}

/* local: IBV_ACCESS_LOCAL_WRITE, or 0 for memory that is mapped for reading. */
static int register_memory(dp_domain *base, void *addr, uint64_t size, uint32_t access, unsigned local, dp_mem **out, dp_error *err) {
    dpv_domain *d = dpv_domain_of(base);
    dpv_dev *dev = dpv_dev_of(base->dev);
    if (access & DP_REMOTE_ATOMIC && !dev->atomics)
        return dp_fail(err, DP_UNSUPPORTED, 0, "register region: %s has no remote atomics", dev->base.name);
    dpv_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "register region of %llu bytes", (unsigned long long)size);
    m->mr = dpv_ibv_reg_mr(d->pd, addr, size, local | dpv_access_flags(access));
    if (!m->mr) {
        int e = errno;
        free(m);
        struct rlimit lim;
        /* The usual reason, and one whose message should name the cure. */
        if (e == ENOMEM && !getrlimit(RLIMIT_MEMLOCK, &lim) && lim.rlim_cur != RLIM_INFINITY)
            return dp_fail(err, DP_FATAL, e, "ibv_reg_mr of %llu bytes on %s (RLIMIT_MEMLOCK is %llu)",
                           (unsigned long long)size, dev->base.name, (unsigned long long)lim.rlim_cur);
        return dp_fail(err, dpv_status_of(e), e, "ibv_reg_mr of %llu bytes at %p on %s",
                       (unsigned long long)size, addr, dev->base.name);
    }
    m->base = (dp_mem){.domain = base,
                       .addr = addr,
                       .size = size,
                       .lkey = m->mr->lkey,
                       .rkey = m->mr->rkey,
                       .access = access};
    *out = &m->base;
    return DP_OK;
}

int dpv_mem_register(dp_domain *base, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    return register_memory(base, addr, size, access, IBV_ACCESS_LOCAL_WRITE, out, err);
}

/* Linux before 6.2 pins pages for writing even if peers only read the region. It refuses a shared mapping of a sealed file with EFAULT. There, a private mapping is registered instead: the kernel copies the file's pages when it pins them, so the
 * file's memory is used twice until the region is freed. */
int dpv_mem_file(dp_domain *base, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err) {
    dp_error first = {0};
    int st = register_memory(base, map, size, DP_REMOTE_READ, 0, out, &first);
    if (st != DP_OK && first.sys_errno != EFAULT && err)
        *err = first;
    if (st == DP_OK || first.sys_errno != EFAULT)
        return st;
    if (size / (uint64_t)sysconf(_SC_PAGESIZE) > (uint64_t)sysconf(_SC_AVPHYS_PAGES))
        return dp_fail(err, DP_FATAL, ENOMEM, "register file: %llu bytes exceed this machine's free memory, and before Linux 6.2 verbs needs a copy",
                       (unsigned long long)size);
    void *private = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (private == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "register file: mmap of %llu bytes", (unsigned long long)size);
    st = register_memory(base, private, size, DP_REMOTE_READ, 0, out, err);
    if (st != DP_OK) {
        munmap(private, size);
        return st;
    }
    dpv_mem *m = (dpv_mem *)*out;
    m->map = private;
    m->map_len = size;
    return DP_OK;
}

char *dp_region_map(uint64_t size, int filled, uint64_t *len) {
    uint64_t all = size + (uint64_t)sysconf(_SC_PAGESIZE);
    char *map = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED | (filled ? MAP_POPULATE : 0);
    if (mmap(map, size, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
        int e = errno;
        munmap(map, all);
        errno = e;
        return NULL;
    }
    *len = all;
    return map;
}

int dpv_mem_alloc(dp_domain *base, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    access &= ~DP_MEM_LAZY; /* the device pins all pages */
    uint64_t body = (size + page - 1) & ~(page - 1);
    /* Under vm.overcommit_memory=1 the mapping itself never fails: filling it would wake the OOM killer. */
    if (body / page > (uint64_t)sysconf(_SC_PHYS_PAGES))
        return dp_fail(err, DP_FATAL, ENOMEM, "allocate region: %llu bytes exceed this machine's memory",
                       (unsigned long long)size);
    uint64_t len = body + page;
    dp_dev *dev = base->dev;
    char *map = dev->take_region ? dev->take_region(dev->take_region_arg, body) : NULL;
    if (!map && !(map = dp_region_map(body, 1, &len)))
        return dp_fail(err, DP_FATAL, errno, "allocate region: mmap of %llu bytes", (unsigned long long)size);
    /* Registered to the byte, so that the device refuses what lies behind the size asked for. */
    int st = dpv_mem_register(base, map, size, access, out, err);
    if (st != DP_OK) {
        munmap(map, len);
        return st;
    }
    dpv_mem *m = (dpv_mem *)*out;
    m->map = map;
    m->map_len = len;
    return DP_OK;
}

void dpv_mem_free(dp_mem *base) {
    dpv_mem *m = (dpv_mem *)base;
    /* Deregister first, because the device may write there until then. If that fails, the device still has
     * the pages: keep them mapped, so that it cannot write into memory that is used for something else. */
    if (dpv_ibv.dereg_mr(m->mr) == 0 && m->map)
        munmap(m->map, m->map_len);
    free(m);
}
