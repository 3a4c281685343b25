/* Sending and receiving messages, and their validation. */
#include "message.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* ---- sending ---- */

int dp_msg_send_fds(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, const int *fds, int n) {
    dp_msg_head head = {DP_MSG_MAGIC, DP_WIRE_VERSION, type, id, len};
    struct iovec iov[2] = {{&head, sizeof head}, {(void *)body, len}};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(DP_MSG_FDS_MAX * sizeof(int))];
    } control;
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = len ? 2 : 1};
    if (n > 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE((size_t)n * sizeof *fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)n * sizeof *fds);
        memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof *fds);
    }
    for (;;) {
        if (sendmsg(sock, &m, MSG_NOSIGNAL) >= 0)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

/* Messages without a descriptor use send(): a sealed worker may not use sendmsg(), which could pass on its device. */
int dp_msg_send(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, int fd) {
    if (fd >= 0)
        return dp_msg_send_fds(sock, type, id, body, len, &fd, 1);
    unsigned char packet[DP_MSG_MAX];
    dp_msg_head head = {DP_MSG_MAGIC, DP_WIRE_VERSION, type, id, len};
    if (len > sizeof packet - sizeof head)
        return EMSGSIZE;
    memcpy(packet, &head, sizeof head);
    if (len)
        memcpy(packet + sizeof head, body, len);
    for (;;) {
        if (send(sock, packet, sizeof head + len, MSG_NOSIGNAL) >= 0)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

int dp_msg_send_failure_fds(int sock, uint16_t type, uint32_t id, int status, const char *text, const int *fds, int n_fds) {
    char body[DP_MSG_MAX - sizeof(dp_msg_head)];
    int32_t st = status;
    size_t n = strlen(text);
    if (n > sizeof body - sizeof st)
        n = sizeof body - sizeof st;
    memcpy(body, &st, sizeof st);
    memcpy(body + sizeof st, text, n);
    uint32_t len = (uint32_t)(sizeof st + n);
    return n_fds ? dp_msg_send_fds(sock, type, id, body, len, fds, n_fds) : dp_msg_send(sock, type, id, body, len, -1);
}

int dp_msg_send_failure(int sock, uint16_t type, uint32_t id, int status, const char *text) {
    return dp_msg_send_failure_fds(sock, type, id, status, text, NULL, 0);
}

/* ---- receiving ---- */

void dp_packet_close(dp_packet *p) {
    for (int i = 0; i < p->n_fds; i++)
        close(p->fds[i]);
    p->n_fds = 0;
}

int dp_packet_recv(int sock, dp_packet *p) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(DP_PACKET_FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = {p->bytes, sizeof p->bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    do
        n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    p->len = (size_t)n;
    p->cut = m.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    p->n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        int got = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < got && p->n_fds < DP_PACKET_FDS_MAX; i++)
            memcpy(&p->fds[p->n_fds++], CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof(int));
    }
    /* An empty packet with descriptors is not the end of file, but no peer sends one. */
    return n > 0 || p->n_fds > 0;
}

/* ---- validation ---- */

static bool all_zero(const void *from, size_t n) {
    const unsigned char *b = from;
    while (n)
        if (b[--n])
            return false;
    return true;
}

static int check_spawn_range(const char *what, int64_t v, int64_t low, int64_t high, dp_error *err) {
    if (v < low || v > high)
        return dp_fail(err, DP_INVALID, 0, "spawn: %s %lld not in %lld..%lld", what, (long long)v, (long long)low,
                       (long long)high);
    return DP_OK;
}

static int check_device(const char *device, size_t room, dp_error *err) {
    size_t n = strnlen(device, room);
    if (n == room)
        return dp_fail(err, DP_INVALID, 0, "spawn: device name is longer than %zu bytes", room - 1);
    for (size_t i = 0; i < n; i++)
        if (device[i] <= ' ' || device[i] > '~')
            return dp_fail(err, DP_INVALID, 0, "spawn: byte %zu of the device name is %#x", i,
                           (unsigned)(unsigned char)device[i]);
    if (!all_zero(device + n, room - n))
        return dp_fail(err, DP_INVALID, 0, "spawn: bytes after the end of the device name");
    return DP_OK;
}

/* Checks a PREPARE: everything that a pooled worker needs, and no field of a lease. */
static int check_prepare(const dp_msg_spawn *m, dp_error *err) {
    if (m->n_functions || m->blob_len || m->memory_limit || m->channel_depth || m->channel_eager || m->channel_bulk ||
        !all_zero(m->cpus, sizeof m->cpus) || !all_zero(m->blob, sizeof m->blob))
        return dp_fail(err, DP_INVALID, 0, "prepare: the message has a lease's functions, blob, channel, memory limit or CPUs");
    if (check_spawn_range("provider", m->provider, DP_PROVIDER_SHM, DP_PROVIDER_TCP, err) != DP_OK ||
        check_spawn_range("encryption", m->encrypt, DP_ENCRYPT_OFF, DP_ENCRYPT_REQUIRE, err) != DP_OK ||
        check_spawn_range("depth", m->max_depth, 0, DP_DEPTH_MAX, err) != DP_OK)
        return DP_INVALID;
    bool sizes = m->max_eager && m->max_eager <= DP_EAGER_MAX && m->max_eager % DP_CACHE_LINE == 0 && m->max_bulk <= DP_BULK_MAX &&
                 m->max_bulk % DP_BULK_UNIT == 0;
    if (m->max_depth && !sizes)
        return dp_fail(err, DP_INVALID, 0, "prepare: eager size %u, bulk size %llu", m->max_eager, (unsigned long long)m->max_bulk);
    return check_device(m->device, sizeof m->device, err);
}

static int check_spawn(const dp_msg_spawn *m, dp_error *err) {
    const struct {
        const char *what;
        int64_t v, low, high;
    } ranges[] = {
        {"provider", m->provider, DP_PROVIDER_SHM, DP_PROVIDER_OFI},
        {"wait mode", m->wait_mode, DP_WAIT_ADAPTIVE, DP_WAIT_WARM},
        {"encryption", m->encrypt, DP_ENCRYPT_OFF, DP_ENCRYPT_REQUIRE},
        {"channel depth", m->channel_depth, 0, DP_DEPTH_MAX},
        {"channel eager size", m->channel_eager, 0, DP_EAGER_MAX},
        {"GID index", m->gid_index, -1, 255},
        {"P_Key index", m->pkey_index, 0, 65535},
        {"traffic class", m->traffic_class, 0, 255},
        {"service level", m->service_level, 0, 15},
        {"MTU", m->mtu, 0, 4096},
        {"depth limit", m->max_depth, 0, DP_DEPTH_MAX},
        {"eager limit", m->max_eager, 0, DP_EAGER_MAX},
        {"function count", m->n_functions, 1, DP_FUNCTIONS_MAX},
        {"blob length", m->blob_len, 1, DP_CHANNEL_BLOB_MAX},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (check_spawn_range(ranges[i].what, ranges[i].v, ranges[i].low, ranges[i].high, err) != DP_OK)
            return DP_INVALID;
    if (m->channel_bulk > DP_BULK_MAX)
        return dp_fail(err, DP_INVALID, 0, "spawn: channel bulk size %llu not in 0..%llu", (unsigned long long)m->channel_bulk,
                       (unsigned long long)DP_BULK_MAX);
    if (m->max_bulk > DP_BULK_MAX)
        return dp_fail(err, DP_INVALID, 0, "spawn: bulk limit %llu not in 0..%llu", (unsigned long long)m->max_bulk,
                       (unsigned long long)DP_BULK_MAX);
    if (!all_zero(m->blob + m->blob_len, sizeof m->blob - m->blob_len))
        return dp_fail(err, DP_INVALID, 0, "spawn: bytes after the end of the client's blob");
    return check_device(m->device, sizeof m->device, err);
}

static int check_head(const dp_packet *p, dp_error *err) {
    if (p->len < sizeof(dp_msg_head))
        return dp_fail(err, DP_PROTOCOL, 0, "message of %zu bytes is shorter than its head of %zu", p->len,
                       sizeof(dp_msg_head));
    if (p->head.magic != DP_MSG_MAGIC)
        return dp_fail(err, DP_PROTOCOL, 0, "message begins with %#x, not %#x", p->head.magic, DP_MSG_MAGIC);
    if (p->head.version != DP_WIRE_VERSION)
        return dp_fail(err, DP_PROTOCOL, 0, "message of wire version %u, this is rfaas-worker of version %d",
                       p->head.version, DP_WIRE_VERSION);
    return DP_OK;
}

/* Checks the length and the number of descriptors: fds, and up to `more` additional ones. */
static int check_size(const dp_packet *p, const char *what, size_t body, int fds, int more, dp_error *err) {
    if (p->cut)
        return dp_fail(err, DP_PROTOCOL, 0, "%s: more than %d bytes or %d descriptors", what, DP_MSG_MAX, DP_PACKET_FDS_MAX);
    if (p->head.len != p->len - sizeof(dp_msg_head) || p->head.len != body)
        return dp_fail(err, DP_PROTOCOL, 0, "%s: body of %zu bytes, %u announced, %zu needed", what, p->len - sizeof(dp_msg_head),
                       p->head.len, body);
    if (p->n_fds < fds || p->n_fds > fds + more)
        return dp_fail(err, DP_PROTOCOL, 0, "%s: %d descriptors, %d needed", what, p->n_fds, fds);
    return DP_OK;
}

int dp_packet_spawn(const dp_packet *p, dp_msg_spawn *m, dp_error *err) {
    int st = check_head(p, err);
    if (st != DP_OK)
        return st;
    bool prepare = p->head.type == DP_MSG_PREPARE;
    if (p->head.type != DP_MSG_SPAWN && !prepare)
        return dp_fail(err, DP_PROTOCOL, 0, "message of type %u, not SPAWN", p->head.type);
    st = check_size(p, "spawn", sizeof *m, prepare ? DP_PREPARE_FDS : DP_SPAWN_FDS, DP_JOIN_FDS_MAX, err);
    if (st != DP_OK)
        return st;
    memcpy(m, p->bytes + sizeof p->head, sizeof *m);
    if (m->seed_units)
        return dp_fail(err, DP_INVALID, 0, "spawn: a seed, which only a prepared worker can take");
    return prepare ? check_prepare(m, err) : check_spawn(m, err);
}

bool dp_msg_pinned_channel(const dp_msg_spawn *m, dp_channel_config *sizes) {
    *sizes = (dp_channel_config){m->channel_depth, m->channel_eager, m->channel_bulk};
    return m->provider == DP_PROVIDER_VERBS && m->n_functions;
}

/* Checks an INSPECT or SYMBOLS. Its length depends on the number of offsets. */
static int check_inspect(const dp_packet *p, dp_msg_inspect *m, dp_error *err) {
    const size_t fixed = offsetof(dp_msg_inspect, offsets);
    bool symbols = p->head.type == DP_MSG_SYMBOLS;
    memset(m, 0, sizeof *m);
    if (p->len >= sizeof p->head + fixed)
        memcpy(m, p->bytes + sizeof p->head, fixed);
    if (m->n_offsets > DP_ELF_OFFSETS_MAX || symbols != (m->n_offsets > 0))
        return dp_fail(err, DP_INVALID, 0, "inspect: %u offsets", m->n_offsets);
    int st = check_size(p, "inspect", fixed + m->n_offsets * sizeof *m->offsets, DP_LEASE_FDS, 0, err);
    if (st != DP_OK)
        return st;
    if (!m->cpu_seconds)
        return dp_fail(err, DP_INVALID, 0, "inspect: no processor time");
    memcpy(m->offsets, p->bytes + sizeof p->head + fixed, m->n_offsets * sizeof *m->offsets);
    return DP_OK;
}

static int check_seed(const dp_packet *p, dp_msg_seed *m, dp_error *err) {
    int st = check_size(p, "seed", sizeof *m, DP_SEED_FDS, 0, err);
    if (st != DP_OK)
        return st;
    memcpy(m, p->bytes + sizeof p->head, sizeof *m);
    return m->seed_units < 2 ? dp_fail(err, DP_INVALID, 0, "seed: a heap of %u units, at least 2 are needed", m->seed_units) : DP_OK;
}

int dp_packet_task(const dp_packet *p, dp_msg_task *task, dp_error *err) {
    int st = check_head(p, err);
    if (st != DP_OK)
        return st;
    task->type = p->head.type;
    if (task->type == DP_MSG_INSPECT || task->type == DP_MSG_SYMBOLS)
        return check_inspect(p, &task->inspect, err);
    if (task->type == DP_MSG_SEED)
        return check_seed(p, &task->seed, err);
    if (task->type != DP_MSG_SPAWN)
        return dp_fail(err, DP_PROTOCOL, 0, "message of type %u, not SPAWN, SEED, INSPECT or SYMBOLS", task->type);
    st = check_size(p, "spawn", sizeof task->lease, DP_LEASE_FDS, 1, err);
    if (st != DP_OK)
        return st;
    memcpy(&task->lease, p->bytes + sizeof p->head, sizeof task->lease);
    if (p->n_fds != DP_LEASE_FDS + (task->lease.seed_units > 0) || task->lease.seed_units == 1)
        return dp_fail(err, DP_INVALID, 0, "spawn: %d descriptors, and a seed with %u units", p->n_fds, task->lease.seed_units);
    return check_spawn(&task->lease, err);
}

int dp_msg_recv_task(int sock, dp_msg_task *task, int fds[DP_TASK_FDS_MAX], dp_error *err) {
    dp_packet p;
    int got = dp_packet_recv(sock, &p);
    if (got <= 0 || (p.len == sizeof p.head && (p.head.type == DP_MSG_STOP || p.head.type == DP_MSG_FINISH))) {
        if (got > 0)
            dp_packet_close(&p);
        return DP_CANCELLED;
    }
    int st = dp_packet_task(&p, task, err);
    if (st != DP_OK) {
        dp_packet_close(&p);
        return st;
    }
    for (int i = 0; i < DP_TASK_FDS_MAX; i++)
        fds[i] = i < p.n_fds ? p.fds[i] : -1;
    return DP_OK;
}
