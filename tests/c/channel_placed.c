/* Calls whose payload and result are used in place, in memory that the client shares with its worker (shm). */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "forged.h"

#define MIB (1u << 20)

/* Memory of a program that can be shared with a worker. */
typedef struct lent {
    int fd;
    uint8_t *at;
    uint64_t size;
    dp_mem *mem;
} lent;

static void lent_map(lent *m, uint64_t size, int seals) {
    m->size = size;
    m->fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(m->fd >= 0 && !ftruncate(m->fd, (off_t)size) && !fcntl(m->fd, F_ADD_SEALS, seals));
    m->at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
    CHECK(m->at != MAP_FAILED);
}

static void lent_new(lent *m, dp_domain *d, uint64_t size) {
    dp_error err;
    lent_map(m, size, F_SEAL_SHRINK | F_SEAL_GROW);
    CHECK_OK_ERR(dp_mem_lend(d, m->fd, m->at, size, &m->mem, &err), err);
}

static void lent_free(lent *m) {
    dp_mem_free(m->mem);
    munmap(m->at, m->size);
    close(m->fd);
}

static void call_placed(served *s, int fn, const void *in, uint32_t n, void *out, uint32_t capacity, const dp_mem *in_mem, const dp_mem *out_mem,
                        int want, uint32_t want_size) {
    uint32_t size = 0, slot;
    dp_started started;
    CHECK_STATUS(dp_channel_call_placed(s->ch, (uint32_t)fn, in, n, out, capacity, &(dp_places){in_mem, out_mem}, &size, 0, &started, &slot), want);
    CHECK_EQ(size, want_size);
}

/* Payloads and results far larger than the channel carries, so the channel did not copy them. */
static void in_place(bool process) {
    served s;
    served_open(&s, process, DP_WAIT_ADAPTIVE, 4, 512, 0);
    lent a, b;
    lent_new(&a, dp_endpoint_domain(s.ep), 8 * MIB);
    lent_new(&b, dp_endpoint_domain(s.ep), 8 * MIB);
    static const uint32_t sizes[] = {DP_PLACE_MIN, 4096, 4097, MIB, 8 * MIB - 64};
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint32_t n = sizes[i];
        t_note("%u bytes", n);
        fill_pattern(a.at + 64, n, i);
        memset(b.at, 0xA5, b.size);
        call_placed(&s, FN_ECHO, a.at + 64, n, b.at + 64, n, a.mem, b.mem, DP_OK, n);
        CHECK_PATTERN(b.at + 64, n, i);
        CHECK_PATTERN(a.at + 64, n, i);
        CHECK_BYTES(b.at, 0xA5, 64);
        CHECK_BYTES(b.at + 64 + n, 0xA5, b.size - 64 - n);
    }
    /* One of the two in place, the other in the slot; both in one region. */
    uint32_t n = MIB, got = 0;
    uint8_t small[512];
    call_placed(&s, FN_FILL, &n, sizeof n, b.at, MIB, NULL, b.mem, DP_OK, MIB);
    CHECK_PATTERN(b.at, MIB, MIB);
    memset(small, 0, sizeof small);
    call_placed(&s, FN_ECHO, b.at, DP_PLACE_MIN, small, sizeof small, b.mem, NULL, DP_RESULT_TOO_LARGE, DP_PLACE_MIN);
    call_placed(&s, FN_ECHO, b.at, MIB, b.at + 2 * MIB, MIB, b.mem, b.mem, DP_OK, MIB);
    CHECK_PATTERN(b.at + 2 * MIB, MIB, MIB);
    /* Payloads and results that cannot be in place are copied, or are too large for that. */
    call_placed(&s, FN_ECHO, b.at + 1, 500, small, sizeof small, b.mem, NULL, DP_OK, 500);
    CHECK_SAME(small, b.at + 1, 500);
    call_placed(&s, FN_ECHO, b.at + 1, MIB, small, sizeof small, b.mem, NULL, DP_TOO_LARGE, 0);
    call_placed(&s, FN_ECHO, b.at + b.size - 1024, 2048, small, sizeof small, b.mem, NULL, DP_TOO_LARGE, 0);
    call_placed(&s, FN_ECHO, a.at, 2048, small, sizeof small, b.mem, NULL, DP_TOO_LARGE, 0);
    /* Failures, and results larger than the capacity. */
    call_placed(&s, FN_FAIL, a.at, MIB, b.at, MIB, a.mem, b.mem, DP_FUNCTION_FAILED, 511);
    call_placed(&s, FN_FILL, &n, sizeof n, b.at, 2048, NULL, b.mem, DP_RESULT_TOO_LARGE, MIB);
    call_placed(&s, FN_EMPTY, a.at, MIB, b.at, MIB, a.mem, b.mem, DP_OK, MIB);
    /* Calls in place and copied calls together: bare requests do not repeat headers of calls in place. */
    uint32_t slots[4];
    for (uint32_t round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < 4; i++) {
            fill_pattern(a.at + i * MIB, 4096, round + i);
            if (i % 2)
                CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, a.at + i * MIB, 500, NULL, 500, &slots[i]));
            else
                CHECK_OK(dp_channel_submit_placed(s.ch, FN_ECHO, a.at + i * MIB, 4096, b.at + i * MIB, 4096, &(dp_places){a.mem, b.mem}, 0,
                                                  &slots[i]));
        }
        for (uint32_t i = 0; i < 4; i++) {
            CHECK_OK(dp_channel_wait(s.ch, slots[i], 0));
            CHECK_OK(dp_channel_finish(s.ch, slots[i], b.at + i * MIB, &got, NULL));
            CHECK_EQ(got, i % 2 ? 500 : 4096);
            CHECK_PATTERN(b.at + i * MIB, got, round + i);
        }
    }
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    dp_channel_unshare(s.ch, a.mem);
    dp_channel_unshare(s.ch, b.mem);
    lent_free(&a);
    lent_free(&b);
    served_close(&s);
}

T_CASE(placed_process, "channel/placed@processes", .providers = T_SHM) { in_place(true); }
T_CASE(placed_thread, "channel/placed@one-process", .providers = T_SHM) { in_place(false); }

T_CASE(placed_elsewhere, "channel/placed-elsewhere", .providers = T_VERBS | T_TCP | T_OFI) {
    served s;
    dp_error err;
    dp_mem *mem;
    served_open(&s, false, DP_WAIT_ADAPTIVE, 4, 512, 4096);
    lent a;
    lent_map(&a, 8192, F_SEAL_SHRINK | F_SEAL_GROW);
    CHECK_REFUSED(dp_mem_lend(dp_endpoint_domain(s.ep), a.fd, a.at, a.size, &mem, &err), DP_UNSUPPORTED, err);
    fill_pattern(a.at, 2048, 3);
    call_placed(&s, FN_ECHO, a.at, 2048, a.at + 4096, 2048, NULL, NULL, DP_OK, 2048);
    CHECK_PATTERN(a.at + 4096, 2048, 3);
    munmap(a.at, a.size);
    close(a.fd);
    served_close(&s);
}

/* A worker maps memory when a call needs it, and unmaps it when the client has freed it. There are more regions than can be shared at once. */
T_CASE(placed_unshare, "channel/placed-unshare", .providers = T_SHM) {
    enum { TIMES = 3 * DP_SHARED_MAX };
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 512, 0);
    for (uint32_t i = 0; i < TIMES; i++) {
        lent a;
        lent_new(&a, dp_endpoint_domain(s.ep), 8192);
        fill_pattern(a.at, 4096, i);
        call_placed(&s, FN_ECHO, a.at, 4096, a.at + 4096, 4096, a.mem, a.mem, DP_OK, 4096);
        CHECK_PATTERN(a.at + 4096, 4096, i);
        dp_channel_unshare(s.ch, a.mem);
        lent_free(&a);
    }
    static lent all[DP_SHARED_MAX + 1];
    for (uint32_t i = 0; i <= DP_SHARED_MAX; i++) {
        lent_new(&all[i], dp_endpoint_domain(s.ep), 8192);
        fill_pattern(all[i].at, 2048, i);
        call_placed(&s, FN_ECHO, all[i].at, 2048, all[i].at + 4096, 2048, all[i].mem, all[i].mem, i < DP_SHARED_MAX ? DP_OK : DP_TOO_LARGE,
                    i < DP_SHARED_MAX ? 2048 : 0);
    }
    dp_channel_unshare(s.ch, all[0].mem);
    call_placed(&s, FN_ECHO, all[DP_SHARED_MAX].at, 2048, all[DP_SHARED_MAX].at + 4096, 2048, all[DP_SHARED_MAX].mem, all[DP_SHARED_MAX].mem,
                DP_OK, 2048);
    CHECK_PATTERN(all[DP_SHARED_MAX].at + 4096, 2048, DP_SHARED_MAX);
    for (uint32_t i = 0; i <= DP_SHARED_MAX; i++)
        lent_free(&all[i]);
    served_close(&s);
}

/* A worker without a free descriptor cannot map memory. The client shares the memory again with the next call. */
T_CASE(placed_without_descriptor, "channel/placed-without-descriptor", .providers = T_SHM) {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 512, 4096);
    lent a;
    uint32_t limits[] = {0, 256};
    lent_new(&a, dp_endpoint_domain(s.ep), 8192);
    fill_pattern(a.at, 2048, 7);
    call_placed(&s, FN_FILES, &limits[0], 4, NULL, 0, NULL, NULL, DP_OK, 0);
    for (int i = 0; i < 2; i++)
        call_placed(&s, FN_ECHO, a.at, 2048, a.at + 4096, 2048, a.mem, a.mem, DP_UNSUPPORTED, 0);
    call_placed(&s, FN_ECHO, a.at, 2048, a.at + 4096, 2048, NULL, NULL, DP_OK, 2048);
    call_placed(&s, FN_FILES, &limits[1], 4, NULL, 0, NULL, NULL, DP_OK, 0);
    memset(a.at + 4096, 0, 2048);
    call_placed(&s, FN_ECHO, a.at, 2048, a.at + 4096, 2048, a.mem, a.mem, DP_OK, 2048);
    CHECK_PATTERN(a.at + 4096, 2048, 7);
    lent_free(&a);
    served_close(&s);
}

/* A function that writes to a payload in place ends its worker and changes nothing. The next worker gets the memory again. */
T_CASE(placed_read_only, "channel/placed-read-only", .providers = T_SHM) {
    served s;
    dp_error err;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 512, 0);
    lent a;
    lent_new(&a, dp_endpoint_domain(s.ep), 8192);
    fill_pattern(a.at, 4096, 7);
    call_placed(&s, FN_SCRIBBLE, a.at, 4096, NULL, 0, a.mem, NULL, DP_PEER_GONE, 0);
    CHECK_PATTERN(a.at, 4096, 7);
    t_peer_kill(&s.peer);
    CHECK_OK_ERR(dp_channel_reset(s.ch, &err), err);
    served_again(&s, false);
    call_placed(&s, FN_ECHO, a.at, 4096, a.at + 4096, 4096, a.mem, a.mem, DP_OK, 4096);
    CHECK_PATTERN(a.at + 4096, 4096, 7);
    lent_free(&a);
    served_close(&s);
}

/* ---- hostile clients ---- */

static void ends_with(raw *r, t_peer *p, int want) {
    int ended;
    t_recv(p->sock, &ended, sizeof ended);
    CHECK_STATUS(ended, want);
    t_peer_join(p);
    end_close(&r->e);
}

T_CASE(placed_hostile, "channel/placed-hostile-request", .providers = T_SHM) {
    t_peer p;
    raw r;
    raw_client(&r, &p);
    lent a;
    lent_new(&a, r.e.dom, 8192);
    CHECK_OK(dp_qp_share(r.e.qp, a.mem));
    uint32_t key = a.mem->rkey;
    enum { IN = DP_REQ_PLACED_IN, OUT = DP_REQ_PLACED_OUT };
    const dp_request good = {.generation = 77, .call_id = 5, .size = 4096, .capacity = 4096, .flags = IN | OUT, .out_offset = 64};
    struct {
        const char *what;
        dp_request h;
        uint32_t in_key, out_key, payload;
        int status;
    } bad[] = {
        {"good", good, key, key, 0, DP_OK},
        {"unknown memory of the payload", good, key + 1, key, 0, DP_UNSUPPORTED},
        {"unknown memory of the result", good, key, key ^ 1u << 31, 0, DP_UNSUPPORTED},
        {"no memory", good, 0, 0, 0, DP_UNSUPPORTED},
        {"payload beyond", {.generation = 77, .call_id = 5, .size = 4096, .capacity = 8, .flags = IN, .in_offset = 65}, key, key, 0, DP_UNSUPPORTED},
        {"payload of 4 GB", {.generation = 77, .call_id = 5, .size = ~0u, .capacity = 8, .flags = IN}, key, key, 0, DP_UNSUPPORTED},
        {"largest offset", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = IN, .in_offset = ~0u}, key, key, 0, DP_UNSUPPORTED},
        {"result beyond", {.generation = 77, .call_id = 5, .size = 8, .capacity = 4097, .flags = OUT, .out_offset = 64}, key, key, 8, DP_UNSUPPORTED},
        {"capacity of 4 GB", {.generation = 77, .call_id = 5, .size = 8, .capacity = ~0u, .flags = OUT}, key, key, 8, DP_UNSUPPORTED},
        {"payload in place and in the slot", good, key, key, 8, DP_BAD_REQUEST},
        {"payload in place and in bulk", {.generation = 77, .call_id = 5, .size = 64, .capacity = 8, .flags = IN | DP_REQ_BULK_IN}, key, key, 0, DP_BAD_REQUEST},
        {"result in place and in bulk", {.generation = 77, .call_id = 5, .size = 8, .capacity = 64, .flags = OUT | DP_REQ_BULK_OUT}, key, key, 8, DP_BAD_REQUEST},
        {"capacity above the slot", {.generation = 77, .call_id = 5, .size = 64, .capacity = 513, .flags = IN}, key, key, 0, DP_BAD_REQUEST},
        {"size above the slot", {.generation = 77, .call_id = 5, .size = 513, .capacity = 8, .flags = OUT}, key, key, 8, DP_BAD_REQUEST},
        {"bulk of the result beyond", {.generation = 77, .call_id = 5, .size = 64, .capacity = 8, .flags = IN | DP_REQ_BULK_OUT, .out_offset = 65}, key, key, 0, DP_BAD_REQUEST},
        {"good at the end", good, key, key, 0, DP_OK},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t_note("%s", bad[i].what);
        r.keys = (uint64_t)bad[i].out_key << 32 | bad[i].in_key;
        fill_pattern(a.at, 4096, (uint32_t)i);
        uint32_t slot = (uint32_t)i % 8;
        bad[i].h.call_id += 8 * (uint32_t)i; /* each request is another call */
        raw_request(&r, slot, bad[i].h, bad[i].payload, bad[i].h.call_id);
        dp_reply h = raw_reply(&r, slot, bad[i].h.call_id);
        CHECKF(h.status == bad[i].status, "%s: answered %s", bad[i].what, dp_status_text(h.status));
        CHECK_EQ(h.size, bad[i].status == DP_OK ? 4096 : 0);
        if (h.status == DP_OK)
            CHECK_PATTERN(a.at + 4096, 4096, (uint32_t)i);
    }
    /* Bare requests must not repeat a placed one. */
    raw_bare(&r, (uint32_t)(sizeof bad / sizeof *bad - 1) % 8, 8, 4);
    CHECK_STATUS(raw_reply(&r, (uint32_t)(sizeof bad / sizeof *bad - 1) % 8, 0x10004).status, DP_BAD_REQUEST);
    dp_qp_unshare(r.e.qp, a.mem);
    lent_free(&a);
    raw_request_as(&r, 0, good, 0, dp_imm(8, 5)); /* ends the connection */
    ends_with(&r, &p, DP_PROTOCOL);
}

/* Sends bytes to the worker through the socket for shared memory, with a descriptor, several times, if fd is not -1. */
static void say_times(raw *r, const void *bytes, size_t len, int fd, size_t times) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(3 * sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)bytes, len};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = control.buf;
        m.msg_controllen = CMSG_SPACE(times * sizeof fd);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(times * sizeof fd);
        for (size_t i = 0; i < times; i++)
            memcpy(CMSG_DATA(c) + i * sizeof fd, &fd, sizeof fd);
    }
    CHECK_EQ(sendmsg(dp_qp_peer_fd(r->e.qp), &m, MSG_NOSIGNAL), (long)len);
}

static void say(raw *r, const void *bytes, size_t len, int fd) { say_times(r, bytes, len, fd, 1); }

typedef struct message { /* dp_shm_share.c */
    uint32_t magic;
    uint16_t version, what;
    uint32_t rkey, zero;
    uint64_t size;
} message;

static const message share = {0x52534652u, 4, 1, 9, 0, 8192};

enum { SHORT, LONG, MAGIC, VERSION, WHAT, ZERO, SIZE_0, SIZE_BEYOND, SIZE_HUGE, NO_MEMORY, MAY_SHRINK, MAY_GROW, NO_FILE, UNSHARE_WITH_FILE, TWO_FILES, THREE_FILES, TOO_MANY, KINDS };

static void malformed(const t_case *c) {
    t_peer p;
    raw r;
    lent a;
    raw_client(&r, &p);
    lent_map(&a, 8192, c->variant == MAY_SHRINK ? F_SEAL_GROW : c->variant == MAY_GROW ? F_SEAL_SHRINK : F_SEAL_SHRINK | F_SEAL_GROW);
    message m = share;
    int fd = c->variant == NO_MEMORY ? -1 : c->variant == NO_FILE ? p.sock : a.fd;
    size_t len = c->variant == SHORT ? sizeof m - 1 : sizeof m;
    uint8_t longer[sizeof m + 1] = {0};
    m.magic += c->variant == MAGIC;
    m.version -= c->variant == VERSION;
    m.what = c->variant == WHAT ? 3 : c->variant == UNSHARE_WITH_FILE ? 2 : 1;
    m.zero = c->variant == ZERO;
    m.size = c->variant == SIZE_0 ? 0 : c->variant == SIZE_BEYOND ? 8193 : c->variant == SIZE_HUGE ? ~0ull : m.size;
    memcpy(longer, &m, sizeof m);
    if (c->variant == LONG)
        len = sizeof longer;
    if (c->variant == TOO_MANY) {
        for (uint32_t i = 0; i <= DP_SHARED_MAX; i++) {
            m.rkey = i + 1;
            say(&r, &m, sizeof m, fd);
        }
    } else {
        say_times(&r, longer, len, fd, c->variant == TWO_FILES ? 2 : c->variant == THREE_FILES ? 3 : 1);
    }
    munmap(a.at, a.size);
    close(a.fd);
    ends_with(&r, &p, DP_PROTOCOL);
}

__attribute__((constructor)) static void malformed_register(void) {
    static const char *const names[KINDS] = {"short", "long", "magic", "version", "kind", "reserved", "size-0", "size-beyond", "size-huge",
                                             "no-descriptor", "may-shrink", "may-grow", "no-memory-file", "unshare-with-descriptor", "two-descriptors", "three-descriptors", "too-many"};
    static t_case cases[KINDS];
    static char text[KINDS][64];
    for (int i = 0; i < KINDS; i++) {
        snprintf(text[i], sizeof text[i], "channel/placed-malformed@%s", names[i]);
        cases[i] = (t_case){.name = text[i], .run = malformed, .variant = i, .providers = T_SHM};
        t_register(&cases[i]);
    }
}

/* Memory under a key that is shared again replaces the old; unsharing what is unknown is nothing. */
T_CASE(placed_replaced, "channel/placed-replaced", .providers = T_SHM) {
    t_peer p;
    raw r;
    lent a, b;
    raw_client(&r, &p);
    lent_map(&a, 8192, F_SEAL_SHRINK | F_SEAL_GROW);
    lent_map(&b, 8192, F_SEAL_SHRINK | F_SEAL_GROW);
    message m = share, un = share;
    un.what = 2;
    un.rkey = 1234;
    say(&r, &un, sizeof un, -1);
    say(&r, &m, sizeof m, a.fd);
    say(&r, &m, sizeof m, b.fd);
    fill_pattern(b.at, 4096, 9);
    r.keys = 9ull << 32 | 9;
    raw_request(&r, 0, (dp_request){.generation = 77, .call_id = 5, .size = 4096, .capacity = 4096, .flags = DP_REQ_PLACED, .out_offset = 64}, 0, 5);
    CHECK_STATUS(raw_reply(&r, 0, 5).status, DP_OK);
    CHECK_PATTERN(b.at + 4096, 4096, 9);
    raw_request_as(&r, 0, (dp_request){.generation = 77, .call_id = 5}, 0, dp_imm(8, 5));
    munmap(a.at, a.size);
    munmap(b.at, b.size);
    close(a.fd);
    close(b.fd);
    ends_with(&r, &p, DP_PROTOCOL);
}

/* A hostile worker may say nothing through the socket, and no reply of it can make the client look elsewhere for the result. */
static void forger(int sock, void *arg) {
    (void)arg;
    raw r;
    raw_worker(&r, sock);
    for (int k = 0; k < 4; k++) {
        dp_request q;
        uint32_t slot = raw_take(&r, &q, NULL);
        CHECK_EQ(q.flags & DP_REQ_PLACED, DP_REQ_PLACED_OUT);
        if (k == 0) /* more than the capacity */
            raw_answer(&r, slot, (dp_reply){q.generation, q.call_id, DP_OK, 4097}, 0, 0, dp_imm(slot, q.call_id));
        else if (k == 1) /* a result in the slot, too */
            raw_answer(&r, slot, (dp_reply){q.generation, q.call_id, DP_OK, 64}, 64, 0, dp_imm(slot, q.call_id));
        else if (k == 2)
            raw_answer_bare(&r, slot, 64, 1, DP_IMM_BARE | dp_imm(slot, q.call_id));
        else
            CHECK_EQ(send(dp_qp_peer_fd(r.e.qp), &share, sizeof share, MSG_NOSIGNAL), (long)sizeof share);
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(placed_hostile_worker, "channel/placed-hostile-worker", .providers = T_SHM) {
    served s;
    served_by(&s, forger);
    lent a;
    uint8_t in[300] = {0};
    lent_new(&a, dp_endpoint_domain(s.ep), 4096);
    memset(a.at, 0xA5, 4096);
    call_placed(&s, FN_ECHO, in, sizeof in, a.at, 4096, NULL, a.mem, DP_PROTOCOL, 0);
    call_placed(&s, FN_ECHO, in, sizeof in, a.at, 4096, NULL, a.mem, DP_PROTOCOL, 0);
    call_placed(&s, FN_ECHO, in, sizeof in, a.at, 4096, NULL, a.mem, DP_OK, 64); /* the worker can write there anyway */
    CHECK_BYTES(a.at, 0xA5, 4096);
    call_placed(&s, FN_ECHO, in, sizeof in, a.at, 4096, NULL, a.mem, DP_PEER_GONE, 0);
    t_sync(s.peer.sock);
    lent_free(&a);
    served_by_close(&s);
}
