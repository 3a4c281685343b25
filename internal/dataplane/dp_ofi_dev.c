/* The ofi provider: the properties of each libfabric provider; devices, domains, memory. */
#include "dp_ofi.h"

#include <string.h>

void dp_ofi_choose(dp_dev_options *o, const char *provider, const char *device) {
    o->ofi_provider = provider;
    if (provider && !strncmp(provider, "tcp", 3))
        o->address = device;
    else
        o->device = device;
}

#ifndef DP_HAVE_LIBFABRIC
void dp_ofi_preload(void) {}

int dp_ofi_open(const dp_dev_options *opts, dp_dev **out, dp_error *err) {
    (void)opts, (void)out;
    return dp_fail(err, DP_UNSUPPORTED, 0,
                   "ofi: this program was built without libfabric's header files; install libfabric-dev (Debian) or libfabric-devel "
                   "(Red Hat) and build again");
}
#else
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Only tcp has been run. It keeps the order because a pair of endpoints has one connection; ofi_rxm promises no order together with
 * atomics. The other lines are what their manual pages and sources say: where in doubt, the slower form.
 */
static const ofi_kind kinds[] = {
    {.name = "tcp", .fi_names = {"tcp;ofi_rxm", "tcp"}, .id = 1, .ordered = true, .polled = true, .silent = true,
     .writedata = true, .atomics = true},
    /* Adaptive routing may reorder requests. Immediate data would need libfabric 2.5 with FI_CXI_ENABLE_WRITEDATA. */
    {.name = "cxi", .fi_names = {"cxi"}, .id = 2, .atomics = true},
    /* 4 bytes of immediate data, no order. Atomics are emulated by the target's polling. */
    {.name = "efa", .fi_names = {"efa"}, .id = 3, .arrival_len = true, .polled = true, .writedata = true, .atomics = true},
    {.name = "opx", .fi_names = {"opx"}, .id = 4, .polled = true, .silent = true, .atomics = true},
    {.name = "psm3", .fi_names = {"psm3"}, .id = 5, .polled = true, .silent = true, .atomics = true},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

void dp_ofi_preload(void) { ofi_load(NULL); }

int ofi_fail(dp_error *err, int status, long e, const char *what, const ofi_dev *dev) {
    return dp_fail(err, status, 0, "%.60s on %.63s: %.80s (%ld)", what, dev->d.name, ofi_lib.strerror((int)-e), e);
}

void ofi_close(struct fid *f) {
    if (f)
        fi_close(f);
}

/* ---- devices ---- */

/* "tcp:NAME" is tcp under the rules of NAME, for tests without that hardware. *fi is the line of the provider to request from libfabric. */
static int find_kind(const char *name, const ofi_kind **out, const ofi_kind **fi, dp_error *err) {
    *fi = &kinds[0];
    bool simulated = !strncmp(name, "tcp:", 4);
    if (simulated)
        name += 4;
    for (int i = 0; i < N_KINDS; i++)
        if (!strcmp(name, kinds[i].name)) {
            *out = &kinds[i];
            if (!simulated)
                *fi = &kinds[i];
            return DP_OK;
        }
    return dp_fail(err, DP_INVALID, 0, "open ofi: ofi-provider \"%.30s\" is not one of tcp, cxi, efa, opx, psm3", name);
}

/* Asks libfabric for endpoints of the given name. 0 or a negative errno. */
static int ask(ofi_dev *dev, const dp_dev_options *o, const char *fi_name, bool delivery) {
    struct fi_info *h = ofi_lib.dupinfo(NULL);
    if (!h)
        return -FI_ENOMEM;
    h->ep_attr->type = FI_EP_RDM;
    h->caps = FI_MSG | FI_RMA | (dev->kind->atomics ? FI_ATOMIC : 0);
    h->mode = FI_CONTEXT | FI_CONTEXT2;
    h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    h->domain_attr->threading = FI_THREAD_SAFE;
    h->domain_attr->data_progress = h->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    h->domain_attr->resource_mgmt = FI_RM_ENABLED;
    h->tx_attr->op_flags = delivery ? FI_DELIVERY_COMPLETE : 0;
    h->fabric_attr->prov_name = strdup(fi_name);
    if (o->device && *o->device)
        h->domain_attr->name = strdup(o->device);
    const char *node = NULL;
    if (dev->fi == &kinds[0]) /* the others have addresses of their own */
        node = o->address && *o->address ? o->address : "127.0.0.1";
    struct fi_info *list = NULL;
    int e = ofi_getinfo(node, node ? FI_SOURCE : 0, h, &list);
    ofi_lib.freeinfo(h);
    if (e)
        return e;
    const struct fi_info *i = list;
    while (i && o->device && *o->device && strcmp(i->domain_attr->name, o->device)) /* ofi_rxm ignores the domain in the hints */
        i = i->next;
    dev->info = i ? ofi_lib.dupinfo(i) : NULL;
    ofi_lib.freeinfo(list);
    return dev->info ? 0 : i ? -FI_ENOMEM : -FI_ENODATA;
}

static int find_info(ofi_dev *dev, const dp_dev_options *o, dp_error *err) {
    int e = -FI_ENODATA;
    for (int delivery = 1; delivery >= 0; delivery--)
        for (int i = 0; i < 2 && dev->fi->fi_names[i]; i++)
            if ((e = ask(dev, o, dev->fi->fi_names[i], delivery)) == 0) {
                dev->delivery = delivery;
                return DP_OK;
            }
    return dp_fail(err, DP_NO_DEVICE, 0,
                   "open ofi: libfabric's provider %s has no endpoint of type RDM%s%.40s: %.60s; `fi_info -p %s -t FI_EP_RDM` shows why",
                   dev->fi->name, o->device && *o->device ? " on " : "", o->device && *o->device ? o->device : "",
                   ofi_lib.strerror(-e), dev->fi->name);
}

static int check_info(ofi_dev *dev, dp_error *err) {
    const struct fi_info *i = dev->info;
    if (i->ep_attr->max_msg_size < 1u << 16 || i->domain_attr->mr_key_size > 8 || i->domain_attr->mr_key_size < 4)
        return dp_fail(err, DP_UNSUPPORTED, 0, "open ofi: libfabric's provider %s has messages of %zu bytes and keys of %zu bytes",
                       dev->kind->name, i->ep_attr->max_msg_size, i->domain_attr->mr_key_size);
    return DP_OK;
}

/* Sets the device's properties from the table and fi_info. */
static void choose_paths(ofi_dev *dev) {
    const struct fi_info *i = dev->info;
    uint64_t mode = (uint64_t)i->domain_attr->mr_mode;
    dev->local = mode & FI_MR_LOCAL;
    dev->virt = mode & FI_MR_VIRT_ADDR;
    dev->own_keys = !(mode & FI_MR_PROV_KEY);
    dev->at_ep = mode & FI_MR_ENDPOINT;
    bool simulated = dev->fi != dev->kind;
    dev->iov_limit = i->tx_attr->iov_limit > 1 && !simulated ? 2 : 1;
    dev->numbered = dev->kind->writedata && dev->kind->ordered && dev->iov_limit == 2 && i->domain_attr->cq_data_size >= 8;
    dev->messages = !dev->kind->writedata || i->domain_attr->cq_data_size < 4 || (!dev->numbered && !dev->fi->arrival_len);
    dev->d.caps = DP_CAP_POLLED_SOURCE | (dev->kind->polled || simulated ? DP_CAP_POLLED_TARGET : 0) |
                  (dev->kind->silent || simulated ? DP_CAP_SILENT_DEATH : 0);
    dev->d.max_msg = i->ep_attr->max_msg_size < OFI_MAX_MSG ? (uint32_t)i->ep_attr->max_msg_size : OFI_MAX_MSG;
}

static void ofi_dev_close(dp_dev *d) {
    ofi_dev *dev = ofi_dev_of(d);
    if (dev->fabric)
        ofi_close(&dev->fabric->fid);
    if (dev->info)
        ofi_lib.freeinfo(dev->info);
    pthread_mutex_destroy(&dev->lock);
    free(dev);
}

static int open_device(ofi_dev *dev, const dp_dev_options *o, dp_error *err) {
    int st = find_info(dev, o, err);
    if (!st)
        st = check_info(dev, err);
    if (st)
        return st;
    choose_paths(dev);
    snprintf(dev->d.name, sizeof dev->d.name, "ofi %s%s %.40s", dev->fi == dev->kind ? "" : "tcp:", dev->kind->name,
             dev->info->domain_attr->name ? dev->info->domain_attr->name : "");
    int e = ofi_lib.fabric(dev->info->fabric_attr, &dev->fabric, NULL);
    return e ? ofi_fail(err, DP_NO_DEVICE, e, "fi_fabric", dev) : DP_OK;
}

/* Checks the address of a device on libfabric's tcp. *loopback: other nodes do not reach it. */
static int check_address(const char *text, bool *loopback, dp_error *err) {
    struct in6_addr v6;
    struct in_addr v4;
    *loopback = true;
    if (!text || !*text)
        return DP_OK;
    if (inet_pton(AF_INET, text, &v4) == 1)
        *loopback = ntohl(v4.s_addr) >> 24 == 127;
    else if (inet_pton(AF_INET6, text, &v6) == 1)
        *loopback = IN6_IS_ADDR_LOOPBACK(&v6);
    else
        return dp_fail(err, DP_INVALID, 0, "open ofi: ofi-device \"%.60s\" is not a numeric IPv4 or IPv6 address, which libfabric's tcp needs", text);
    return DP_OK;
}

static int check_options(const dp_dev_options *o, const ofi_kind *fi, dp_error *err) {
    bool loopback = false;
    int st = fi == &kinds[0] ? check_address(o->address, &loopback, err) : DP_OK;
    if (!st && (o->keepalive_ms < 0 || o->keepalive_ms > 3600000))
        st = dp_fail(err, DP_INVALID, 0, "open ofi: keepalive_ms %d not in 0..3600000", o->keepalive_ms);
    if (!st && (o->encrypt == DP_ENCRYPT_REQUIRE || (o->encrypt == DP_ENCRYPT_ON && !loopback)))
        st = dp_fail(err, DP_UNSUPPORTED, 0,
                     "open ofi: provider ofi does not encrypt the data of calls, and data encryption is %s; use provider tcp, or on a trusted "
                     "network set data encryption to off",
                     o->encrypt == DP_ENCRYPT_REQUIRE ? "required" : "on");
    return st;
}

int dp_ofi_open(const dp_dev_options *o, dp_dev **out, dp_error *err) {
    const ofi_kind *kind = NULL, *fi = NULL;
    const char *name = o->ofi_provider && *o->ofi_provider ? o->ofi_provider : getenv("RFAAS_OFI_PROVIDER");
    int st = find_kind(name && *name ? name : "tcp", &kind, &fi, err);
    if (!st)
        st = check_options(o, fi, err);
    if (!st)
        st = ofi_load(err);
    if (st)
        return st;
    ofi_dev *dev = calloc(1, sizeof *dev);
    if (!dev)
        return dp_fail(err, DP_FATAL, ENOMEM, "open ofi");
    dev->d = (dp_dev){.ops = &ofi_ops, .provider = DP_PROVIDER_OFI};
    dev->kind = kind;
    dev->fi = fi;
    dev->active_only = o->active_side_only;
    dev->keepalive_ns = (o->keepalive_ms ? o->keepalive_ms : OFI_KEEPALIVE_MS) * 1000000ll;
    pthread_mutex_init(&dev->lock, NULL);
    st = open_device(dev, o, err);
    if (st) {
        ofi_dev_close(&dev->d);
        return st;
    }
    *out = &dev->d;
    return DP_OK;
}

/* ---- domains and memory ---- */

static int ofi_domain_create(dp_dev *d, dp_domain **out, dp_error *err) {
    ofi_dev *dev = ofi_dev_of(d);
    ofi_domain *dom = calloc(1, sizeof *dom);
    if (!dom)
        return dp_fail(err, DP_FATAL, ENOMEM, "create domain on %s", d->name);
    dom->d.dev = d;
    int e = fi_domain(dev->fabric, dev->info, &dom->domain, NULL);
    if (e) {
        free(dom);
        return ofi_fail(err, DP_FATAL, e, "fi_domain", dev);
    }
    *out = &dom->d;
    return DP_OK;
}

static void ofi_domain_destroy(dp_domain *d) {
    ofi_domain *dom = ofi_domain_of(d);
    ofi_close(&dom->domain->fid);
    free(dom->local);
    free(dom);
}

int ofi_local_register(ofi_domain *d, void *addr, uint64_t size, struct fid_mr **out, dp_error *err) {
    ofi_dev *dev = ofi_dev_of(d->d.dev);
    *out = NULL;
    if (!dev->local)
        return DP_OK;
    uint64_t key = 0;
    if (dev->own_keys)
        dp_random(&key, dev->info->domain_attr->mr_key_size);
    int e = fi_mr_reg(d->domain, addr, size, FI_SEND | FI_RECV | FI_READ | FI_WRITE, 0, key, 0, out, NULL);
    return e ? ofi_fail(err, DP_FATAL, e, "register local memory: fi_mr_reg", dev) : DP_OK;
}

/* Gives the region a number that posts name as lkey. */
static int number_local(ofi_domain *d, ofi_mem *m, dp_error *err) {
    ofi_dev *dev = ofi_dev_of(d->d.dev);
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    uint32_t i = 0;
    while (i < d->n_local && d->local[i])
        i++;
    if (i == d->n_local) {
        ofi_mem **grown = realloc(d->local, (i + 16) * sizeof *grown);
        if (grown) {
            memset(grown + i, 0, 16 * sizeof *grown);
            d->local = grown;
            d->n_local = i + 16;
        } else {
            st = dp_fail(err, DP_FATAL, ENOMEM, "register region");
        }
    }
    if (!st) {
        d->local[i] = m;
        m->m.lkey = i + 1;
    }
    pthread_mutex_unlock(&dev->lock);
    return st;
}

static int ofi_mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    if (access & DP_REMOTE_ATOMIC && !ofi_dev_of(d->dev)->kind->atomics)
        return dp_fail(err, DP_UNSUPPORTED, 0, "register region: %s has no remote atomics", d->dev->name);
    ofi_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "register region");
    m->m = (dp_mem){.domain = d, .addr = addr, .size = size, .access = access};
    m->refs = 1;
    do
        dp_random(&m->m.rkey, sizeof m->m.rkey);
    while (!m->m.rkey);
    int st = ofi_local_register(ofi_domain_of(d), addr, size, &m->local, err);
    if (!st && m->local && (st = number_local(ofi_domain_of(d), m, err)))
        ofi_close(&m->local->fid);
    if (st) {
        free(m);
        return st;
    }
    *out = &m->m;
    return DP_OK;
}

static int ofi_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), body = (size + page - 1) & ~(page - 1), len;
    /* A network card pins all pages when the region is registered. */
    bool lazy = access & DP_MEM_LAZY && ofi_dev_of(d->dev)->fi == &kinds[0];
    if (!lazy && body / page > (uint64_t)sysconf(_SC_PHYS_PAGES))
        return dp_fail(err, DP_FATAL, ENOMEM, "allocate region: %llu bytes exceed this machine's memory", (unsigned long long)size);
    char *map = dp_region_map(body, !lazy, &len);
    if (!map)
        return dp_fail(err, DP_FATAL, errno, "allocate region: mmap of %llu bytes", (unsigned long long)size);
    int st = ofi_mem_register(d, map, size, access & ~DP_MEM_LAZY, out, err);
    if (st) {
        munmap(map, len);
        return st;
    }
    ((ofi_mem *)*out)->map = map;
    ((ofi_mem *)*out)->map_len = len;
    return DP_OK;
}

/* Closing libfabric's region is not a fence: a transfer that has begun still writes. So memory that a queue pair exposes
 * stays mapped until that queue pair is destroyed. */
void ofi_mem_unref(ofi_dev *dev, ofi_mem *m) {
    pthread_mutex_lock(&dev->lock);
    bool last = --m->refs == 0;
    pthread_mutex_unlock(&dev->lock);
    if (!last)
        return;
    if (m->map)
        munmap(m->map, m->map_len);
    free(m);
}

static void ofi_mem_free(dp_mem *mem) {
    ofi_mem *m = (ofi_mem *)mem;
    ofi_domain *d = ofi_domain_of(mem->domain);
    ofi_dev *dev = ofi_dev_of(mem->domain->dev);
    if (m->local) {
        pthread_mutex_lock(&dev->lock);
        d->local[mem->lkey - 1] = NULL;
        pthread_mutex_unlock(&dev->lock);
        ofi_close(&m->local->fid);
    }
    ofi_mem_unref(dev, m);
}

/* ---- operations without a counterpart in libfabric ---- */

static void *ofi_rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len) {
    (void)q, (void)raddr, (void)rkey, (void)len;
    return NULL;
}

static void ofi_qp_notify(dp_qp *q) { (void)q; }

const dp_ops ofi_ops = {
    .destroys_slowly = true,
    .dev_close = ofi_dev_close,
    .domain_create = ofi_domain_create,
    .domain_destroy = ofi_domain_destroy,
    .mem_alloc = ofi_mem_alloc,
    .mem_register = ofi_mem_register,
    .mem_free = ofi_mem_free,
    .cq_create = ofi_cq_create,
    .cq_destroy = ofi_cq_destroy,
    .cq_poll = ofi_cq_poll,
    .cq_arm = ofi_cq_arm,
    .cq_disarm = ofi_cq_disarm,
    .cq_wait = ofi_cq_wait,
    .cq_wake = ofi_cq_wake,
    .cq_promise_hot = ofi_cq_promise_hot,
    .qp_create = ofi_qp_create,
    .qp_export = ofi_qp_export,
    .qp_connect = ofi_qp_connect,
    .qp_reset = ofi_qp_reset,
    .qp_destroy = ofi_qp_destroy,
    .post_write = ofi_post_write,
    .post_write_imm = ofi_post_write_imm,
    .post_read = ofi_post_read,
    .post_fetch_add = ofi_post_fetch_add,
    .post_compare_swap = ofi_post_compare_swap,
    .post_recv = ofi_post_recv,
    .rkey_ptr = ofi_rkey_ptr,
    .qp_probe = ofi_qp_probe,
    .qp_notify = ofi_qp_notify,
};
#endif
