/* Choice of device, port, GID and P_Key; asynchronous events. */
#include "dp_verbs.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void dpv_dev_close(dp_dev *base);

static const dp_ops dpv_ops = {
    .destroys_slowly = true,
    .dev_close = dpv_dev_close,
    .domain_create = dpv_domain_create,
    .domain_destroy = dpv_domain_destroy,
    .mem_alloc = dpv_mem_alloc,
    .mem_register = dpv_mem_register,
    .mem_file = dpv_mem_file,
    .mem_free = dpv_mem_free,
    .cq_create = dpv_cq_create,
    .cq_destroy = dpv_cq_destroy,
    .cq_poll = dpv_cq_poll,
    .cq_arm = dpv_cq_arm,
    .cq_disarm = dpv_cq_disarm,
    .cq_wait = dpv_cq_wait,
    .cq_wait_many = dpv_cq_wait_many,
    .cq_wake = dpv_cq_wake,
    .cq_promise_hot = dpv_cq_promise_hot,
    .qp_create = dpv_qp_create,
    .qp_export = dpv_qp_export,
    .qp_connect = dpv_qp_connect,
    .qp_connect_late = dpv_qp_connect_late,
    .qp_reset = dpv_qp_reset,
    .qp_destroy = dpv_qp_destroy,
    .post_write = dpv_post_write,
    .post_write_imm = dpv_post_write_imm,
    .post_read = dpv_post_read,
    .post_fetch_add = dpv_post_fetch_add,
    .post_compare_swap = dpv_post_compare_swap,
    .post_recv = dpv_post_recv,
    .rkey_ptr = dpv_rkey_ptr,
    .qp_probe = dpv_qp_probe,
    .qp_notify = dpv_qp_notify,
    .qp_events = dpv_qp_events,
};

int dpv_status_of(int sys_errno) {
    switch (sys_errno) {
    case EINVAL: return DP_INVALID;
    case EOPNOTSUPP:
    case ENOSYS: return DP_UNSUPPORTED;
    default: return DP_FATAL;
    }
}

/* Returns the devices present, or NULL with err filled. libibverbs reads its configuration on the first call of the
 * process and never again: if descriptors run out in the middle, there are no devices until it ends. So this looks
 * first whether there are as many as it could need. */
static struct ibv_device **list_devices(int *n, dp_error *err) {
    enum { NEEDED = 8 };
    int fds[NEEDED], got = 0;
    while (got < NEEDED && (fds[got] = eventfd(0, EFD_CLOEXEC)) >= 0)
        got++;
    int e = errno;
    for (int i = 0; i < got; i++)
        close(fds[i]);
    if (got < NEEDED) {
        dp_fail(err, DP_NO_DEVICE, e, "ibv_get_device_list");
        return NULL;
    }
    if (dp_verbs_load(err) != DP_OK)
        return NULL;
    struct ibv_device **list = dpv_ibv.get_device_list(n);
    if (!list)
        dp_fail(err, DP_NO_DEVICE, errno, "ibv_get_device_list");
    return list;
}

/* Reports whether the kernel shows any RDMA device, by its class or by its files. */
static bool any_device(void) {
    static const char *const places[] = {"/sys/class/infiniband", "/dev/infiniband"};
    bool any = false;
    for (size_t i = 0; i < sizeof places / sizeof *places && !any; i++) {
        DIR *d = opendir(places[i]);
        for (struct dirent *e; d && !any && (e = readdir(d));)
            any = e->d_name[0] != '.';
        if (d)
            closedir(d);
    }
    return any;
}

/* Of dp_verbs_preload; never freed. */
static struct ibv_device **preloaded;
static int n_preloaded;

int dp_verbs_preload(dp_error *err) {
    if (err)
        *err = (dp_error){0};
    if (!preloaded && any_device() && !(preloaded = list_devices(&n_preloaded, err)))
        n_preloaded = 0;
    return n_preloaded;
}

/* Whether a device that was listed earlier is still there: its number may have become another one's. */
static bool is_there(struct ibv_device *d) {
    char path[sizeof d->dev_path + 8], text[sizeof d->name + 1];
    snprintf(path, sizeof path, "%s/ibdev", d->dev_path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (fd >= 0)
        close(fd);
    return n > 1 && text[n - 1] == '\n' && (size_t)n - 1 == strlen(d->name) && !memcmp(text, d->name, (size_t)n - 1);
}

/* ---- options ---- */

static int mtu_code(int bytes) {
    switch (bytes) {
    case 256: return IBV_MTU_256;
    case 512: return IBV_MTU_512;
    case 1024: return IBV_MTU_1024;
    case 2048: return IBV_MTU_2048;
    case 4096: return IBV_MTU_4096;
    default: return 0;
    }
}

static int check_range(const char *what, int value, int low, int high, dp_error *err) {
    if (value < low || value > high)
        return dp_fail(err, DP_INVALID, 0, "open verbs device: %s %d not in %d..%d", what, value, low, high);
    return DP_OK;
}

/* What can be judged without a device; the rest is checked against its tables. */
static int check_options(const dp_dev_options *o, dp_error *err) {
    int st = check_range("port", o->port, 0, 255, err);
    if (st == DP_OK)
        st = check_range("gid_index", o->gid_index, -1, 255, err);
    if (st == DP_OK)
        st = check_range("pkey_index", o->pkey_index, 0, 65535, err);
    if (st == DP_OK)
        st = check_range("traffic_class", o->traffic_class, 0, 255, err);
    if (st == DP_OK)
        st = check_range("service_level", o->service_level, 0, 15, err);
    if (st == DP_OK)
        st = check_range("timeout", o->timeout, 0, 31, err);
    if (st == DP_OK)
        st = check_range("retry_count", o->retry_count, 0, 7, err);
    if (st == DP_OK)
        st = check_range("keepalive_ms", o->keepalive_ms, 0, 3600000, err);
    if (st == DP_OK && o->mtu && !mtu_code(o->mtu))
        st = dp_fail(err, DP_INVALID, 0, "open verbs device: mtu %d is not one of 256, 512, 1024, 2048, 4096",
                     o->mtu);
    return st;
}

/* ---- device and port ---- */

static bool port_is_active(struct ibv_context *ctx, int port, struct ibv_port_attr *out) {
    return dpv_ibv_query_port(ctx, (uint8_t)port, out) == 0 && out->state == IBV_PORT_ACTIVE;
}

/* Finds the port asked for, or the first active one. */
static int choose_port(dpv_dev *dev, const dp_dev_options *o, struct ibv_port_attr *port, dp_error *err) {
    const char *name = dev->ctx->device->name;
    int ports = dev->attr.phys_port_cnt;
    if (o->port > ports)
        return dp_fail(err, DP_NO_DEVICE, 0, "RDMA device %s has no port %d (ports 1..%d)", name, o->port,
                       ports);
    if (o->port) {
        if (!port_is_active(dev->ctx, o->port, port))
            return dp_fail(err, DP_NO_DEVICE, 0, "port %d of RDMA device %s is not active", o->port, name);
        dev->port = (uint8_t)o->port;
        return DP_OK;
    }
    for (int i = 1; i <= ports; i++)
        if (port_is_active(dev->ctx, i, port)) {
            dev->port = (uint8_t)i;
            return DP_OK;
        }
    return dp_fail(err, DP_NO_DEVICE, 0, "RDMA device %s has no active port", name);
}

/* Opens one device and settles its port. */
static int try_device(dpv_dev *dev, struct ibv_device *d, const dp_dev_options *o, struct ibv_port_attr *port,
                      dp_error *err) {
    const char *name = d->name;
    if (d->transport_type != IBV_TRANSPORT_IB)
        return dp_fail(err, DP_NO_DEVICE, 0, "RDMA device %s is neither InfiniBand nor RoCE", name);
    dev->ctx = dpv_ibv.open_device(d);
    if (!dev->ctx)
        return dp_fail(err, DP_NO_DEVICE, errno ? errno : EIO, "ibv_open_device %s", name);
    int st = DP_OK;
    int e = dpv_ibv.query_device(dev->ctx, &dev->attr);
    if (e)
        st = dp_fail(err, DP_NO_DEVICE, e, "ibv_query_device %s", name);
    else
        st = choose_port(dev, o, port, err);
    if (st != DP_OK) {
        dpv_ibv.close_device(dev->ctx);
        dev->ctx = NULL;
    }
    return st;
}

/* With a name: that device or a reason. Without: the first that works; the last reason if none does. */
static int choose_device(dpv_dev *dev, const dp_dev_options *o, struct ibv_port_attr *port, dp_error *err) {
    const char *want = o->device && *o->device ? o->device : NULL;
    for (int i = 0; i < n_preloaded; i++)
        if ((!want || !strcmp(want, preloaded[i]->name)) && is_there(preloaded[i]) &&
            try_device(dev, preloaded[i], o, port, err) == DP_OK)
            return DP_OK;
    int n = 0; /* what is wrong, or one that is new, the list of now tells */
    dp_error why = {0};
    struct ibv_device **list = list_devices(&n, &why);
    if (!list && why.status == DP_NO_DEVICE)
        return dp_fail(err, DP_NO_DEVICE, why.sys_errno, "no RDMA device%s%.63s found: ibv_get_device_list",
                       want ? " " : "", want ? want : "");
    if (!list)
        return dp_fail(err, why.status, 0, "%s", why.msg);
    char seen[120] = "";
    size_t used = 0;
    int st = want ? DP_NO_DEVICE : dp_fail(err, DP_NO_DEVICE, 0, "no RDMA device found");
    bool found = false;
    for (int i = 0; i < n && st != DP_OK; i++) {
        const char *name = list[i]->name;
        if (!want || !strcmp(want, name)) {
            st = try_device(dev, list[i], o, port, err);
            found = true;
        } else if (used < sizeof seen) {
            used += (size_t)snprintf(seen + used, sizeof seen - used, "%s%s", used ? ", " : "", name);
        }
        if (want && found)
            break;
    }
    dpv_ibv.free_device_list(list);
    if (want && !found)
        return dp_fail(err, DP_NO_DEVICE, 0, "no RDMA device \"%.63s\" (present: %s)", want,
                       n ? seen : "none");
    return st;
}

/* ---- GID ---- */

static bool gid_is_ipv4(const union ibv_gid *g) {
    static const uint8_t prefix[12] = {[10] = 0xff, [11] = 0xff};
    return !memcmp(g->raw, prefix, sizeof prefix);
}

static bool gid_is_link_local(const union ibv_gid *g) {
    return g->raw[0] == 0xfe && (g->raw[1] & 0xc0) == 0x80;
}

/* RoCE v2 is routable and v1 is not; an IPv4 GID is there on both ends more often than a routable IPv6 one.
 * Link-local GIDs need a scope that the peer cannot know. */
static int gid_rank(const struct ibv_gid_entry *e) {
    bool v2 = e->gid_type == IBV_GID_TYPE_ROCE_V2;
    if (v2 && gid_is_ipv4(&e->gid))
        return 4;
    if (v2 && !gid_is_link_local(&e->gid))
        return 3;
    return v2 ? 2 : 1;
}

static int choose_roce_gid(dpv_dev *dev, const struct ibv_port_attr *port, struct ibv_gid_entry *out,
                           dp_error *err) {
    size_t room = 0;
    for (int i = 1; i <= dev->attr.phys_port_cnt; i++) {
        struct ibv_port_attr p;
        room += i == dev->port ? (size_t)port->gid_tbl_len
                               : (dpv_ibv_query_port(dev->ctx, (uint8_t)i, &p) ? 0 : (size_t)p.gid_tbl_len);
    }
    struct ibv_gid_entry *table = calloc(room ? room : 1, sizeof *table);
    if (!table)
        return dp_fail(err, DP_FATAL, ENOMEM, "GID table of %zu entries", room);
    ssize_t n = dpv_ibv_query_gid_table(dev->ctx, table, room);
    const char *name = dev->ctx->device->name;
    if (n < 0) {
        free(table);
        return dp_fail(err, DP_NO_DEVICE, (int)-n, "GID table of %s", name);
    }
    int best = 0;
    for (ssize_t i = 0; i < n; i++)
        if (table[i].port_num == dev->port && table[i].gid_index < 256 && gid_rank(&table[i]) > best) {
            best = gid_rank(&table[i]);
            *out = table[i];
        }
    free(table);
    if (!best)
        return dp_fail(err, DP_NO_DEVICE, 0,
                       "RDMA device %s port %d has no GID (is its network interface up?)", name, dev->port);
    return DP_OK;
}

static int choose_gid(dpv_dev *dev, const struct ibv_port_attr *port, int index, dp_error *err) {
    bool ethernet = dev->link_layer == IBV_LINK_LAYER_ETHERNET;
    struct ibv_gid_entry e = {.gid_type = IBV_GID_TYPE_IB};
    dev->use_grh = ethernet || index >= 0 || port->flags & IBV_QPF_GRH_REQUIRED;
    if (index < 0 && ethernet) {
        int st = choose_roce_gid(dev, port, &e, err);
        if (st != DP_OK)
            return st;
    } else {
        /* InfiniBand exports GID 0 even when routing by LID: the peer may need it. */
        uint32_t at = index < 0 ? 0 : (uint32_t)index;
        int rc = dpv_ibv_query_gid_ex(dev->ctx, dev->port, at, &e);
        if (rc && dev->use_grh)
            return dp_fail(err, DP_NO_DEVICE, rc,
                           "RDMA device %s port %d has no GID at index %u (table of %d)",
                           dev->ctx->device->name, dev->port, at, port->gid_tbl_len);
        if (rc)
            e = (struct ibv_gid_entry){.gid_type = IBV_GID_TYPE_IB};
    }
    dev->gid = e.gid;
    dev->gid_type = e.gid_type;
    dev->gid_index = (uint8_t)e.gid_index;
    return DP_OK;
}

/* ---- the rest of the settings ---- */

static int choose_pkey(dpv_dev *dev, const struct ibv_port_attr *port, int index, dp_error *err) {
    if (index >= port->pkey_tbl_len)
        return dp_fail(err, DP_INVALID, 0,
                       "open verbs device: pkey_index %d, table of %s port %d has %d entries", index,
                       dev->ctx->device->name, dev->port, port->pkey_tbl_len);
    __be16 pkey = 0;
    if (dpv_ibv.query_pkey(dev->ctx, dev->port, index, &pkey))
        return dp_fail(err, DP_NO_DEVICE, errno, "P_Key at index %d", index);
    dev->pkey = ntohs(pkey);
    if (!(dev->pkey & 0x7fff))
        return dp_fail(err, DP_INVALID, 0, "open verbs device: pkey_index %d holds no P_Key (%#x)", index,
                       dev->pkey);
    dev->pkey_index = (uint16_t)index;
    return DP_OK;
}

static uint8_t clamp_rd_atomic(const struct ibv_device_attr *a) {
    int n = a->max_qp_rd_atom < a->max_qp_init_rd_atom ? a->max_qp_rd_atom : a->max_qp_init_rd_atom;
    if (n < 1)
        return 1;
    return (uint8_t)(n < DPV_RD_ATOMIC ? n : DPV_RD_ATOMIC);
}

static int configure(dpv_dev *dev, const struct ibv_port_attr *port, const dp_dev_options *o, dp_error *err) {
    /* Old kernels leave the link layer unspecified; only InfiniBand existed then. */
    dev->link_layer =
        port->link_layer == IBV_LINK_LAYER_ETHERNET ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
    dev->lid = dev->link_layer == IBV_LINK_LAYER_INFINIBAND ? port->lid : 0;
    dev->mtu = (uint8_t)port->active_mtu;
    if (o->mtu) {
        if (mtu_code(o->mtu) > (int)port->active_mtu)
            return dp_fail(err, DP_INVALID, 0, "open verbs device: mtu %d above the port's active %d", o->mtu,
                           128 << port->active_mtu);
        dev->mtu = (uint8_t)mtu_code(o->mtu);
    }
    int st = choose_gid(dev, port, o->gid_index, err);
    if (st == DP_OK)
        st = choose_pkey(dev, port, o->pkey_index, err);
    if (st != DP_OK)
        return st;
    dev->traffic_class = (uint8_t)o->traffic_class;
    dev->service_level = (uint8_t)o->service_level;
    dev->timeout = (uint8_t)(o->timeout ? o->timeout : DPV_TIMEOUT);
    dev->retry_count = (uint8_t)(o->retry_count ? o->retry_count : DPV_RETRY_COUNT);
    dev->keepalive_ns = (int64_t)(o->keepalive_ms ? o->keepalive_ms : DPV_KEEPALIVE_MS) * 1000000;
    dev->rd_atomic = clamp_rd_atomic(&dev->attr);
    dev->atomics = dev->attr.atomic_cap != IBV_ATOMIC_NONE;
    dev->inline_cap = DPV_MAX_INLINE;
    return DP_OK;
}

static void describe(dpv_dev *dev, const struct ibv_port_attr *port) {
    dp_dev *b = &dev->base;
    b->ops = &dpv_ops;
    b->provider = DP_PROVIDER_VERBS;
    b->caps = 0;
    b->max_msg = port->max_msg_sz;
    b->link = dev->link_layer == IBV_LINK_LAYER_INFINIBAND ? 1 : 2;
    b->lid = dev->lid;
    memcpy(b->gid, dev->gid.raw, sizeof b->gid);
    const char *name = dev->ctx->device->name;
    if (dev->use_grh)
        snprintf(b->name, sizeof b->name, "%.40s port %u gid %u", name, dev->port, dev->gid_index);
    else
        snprintf(b->name, sizeof b->name, "%.40s port %u lid %u", name, dev->port, dev->lid);
}

int dp_verbs_open(const dp_dev_options *opts, dp_dev **out, dp_error *err) {
    static const dp_dev_options defaults = {.gid_index = -1};
    const dp_dev_options *o = opts ? opts : &defaults;
    int st = check_options(o, err);
    if (st != DP_OK)
        return st;
    dpv_dev *dev = calloc(1, sizeof *dev);
    if (!dev)
        return dp_fail(err, DP_FATAL, ENOMEM, "open verbs device");
    struct ibv_port_attr port;
    memset(&port, 0, sizeof port);
    st = choose_device(dev, o, &port, err);
    if (!dev->ctx) {
        free(dev);
        return st;
    }
    st = configure(dev, &port, o, err);
    if (st == DP_OK) {
        int fl = fcntl(dev->ctx->async_fd, F_GETFL);
        if (fl < 0 || fcntl(dev->ctx->async_fd, F_SETFL, fl | O_NONBLOCK) < 0)
            st = dp_fail(err, DP_FATAL, errno, "open verbs device: event descriptor");
    }
    if (st != DP_OK) {
        dpv_ibv.close_device(dev->ctx);
        free(dev);
        return st;
    }
    pthread_mutex_init(&dev->lock, NULL);
    describe(dev, &port);
    *out = &dev->base;
    return DP_OK;
}

static void dpv_dev_close(dp_dev *base) {
    dpv_dev *dev = dpv_dev_of(base);
    dpv_ibv.close_device(dev->ctx);
    pthread_mutex_destroy(&dev->lock);
    free(dev);
}

/* ---- asynchronous events ---- */

static void mark_cq(dpv_cq *cq) {
    __atomic_store_n(&cq->fatal, 1, __ATOMIC_RELEASE); /* pairs with the acquire in dpv_cq_poll and _wait */
    dpv_cq_wake(&cq->base);
}

static void mark_device(dpv_dev *dev) {
    for (dpv_cq *cq = dev->cqs; cq; cq = cq->next)
        mark_cq(cq);
}

static void handle_event(dpv_dev *dev, const struct ibv_async_event *ev) {
    switch (ev->event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
        /* Valid until we acknowledge: ibv_destroy_qp waits for that. */
        dp_qp_break(ev->element.qp->qp_context, DP_CONNECTION);
        break;
    case IBV_EVENT_CQ_ERR: mark_cq(ev->element.cq->cq_context); break;
    case IBV_EVENT_DEVICE_FATAL: mark_device(dev); break;
    default:
        /* A port that goes down may come back before the retries run out; if it does not, they tell. */
        break;
    }
}

void dpv_dev_drain_events_locked(dpv_dev *dev) {
    struct ibv_async_event ev;
    for (;;) {
        if (dpv_ibv.get_async_event(dev->ctx, &ev) == 0) {
            handle_event(dev, &ev);
            dpv_ibv.ack_async_event(&ev);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != EINTR) {
            mark_device(dev); /* the kernel has taken the device away */
            return;
        }
    }
}

void dpv_dev_drain_events(dpv_dev *dev) {
    pthread_mutex_lock(&dev->lock);
    dpv_dev_drain_events_locked(dev);
    pthread_mutex_unlock(&dev->lock);
}
