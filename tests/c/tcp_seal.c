/* Encryption of the tcp provider: the library, settings, records, and a man in the middle who changes the stream. */
#include "tcp_peer.h"

#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- the library ---- */

T_CASE(crypto_missing, "tcp/encrypt-library-missing", .providers = T_TCP) {
    static const struct {
        const char *library, *named;
    } bad[] = {{"libcrypto-of-nobody.so.3", "libcrypto-of-nobody.so.3"}, {"libc.so.6", "needs OpenSSL 3"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dp_error err;
        CHECK_REFUSED(dp_crypto_load_from(bad[i].library, &err), DP_UNSUPPORTED, err);
        CHECKF(strstr(err.msg, bad[i].named) && strstr(err.msg, "libssl3"), "the message does not say what to install: %s", err.msg);
    }
    dp_error err;
    CHECK_OK_ERR(dp_crypto_load(&err), err);
}

/* ---- settings ---- */

enum { REFUSED = -1, PLAIN, SEALED };

/* The outcome by the settings of the two sides: off, allow, on, require. */
static const int8_t near[4][4] = {{PLAIN, PLAIN, PLAIN, REFUSED}, {PLAIN, PLAIN, PLAIN, SEALED}, {PLAIN, PLAIN, PLAIN, SEALED},
                                  {REFUSED, SEALED, SEALED, SEALED}},
                    far[4][4] = {{PLAIN, PLAIN, REFUSED, REFUSED}, {PLAIN, PLAIN, SEALED, SEALED}, {REFUSED, SEALED, SEALED, SEALED},
                                 {REFUSED, SEALED, SEALED, SEALED}};

/* The decision of a device with setting `own` about a peer with setting `other`. */
static int decision(dp_dev_options o, int own, int other, const char *address) {
    dp_dev *dev;
    dp_error err;
    bool seals;
    tcp_blob b = rogue_blob((const uint8_t[DP_TCP_TOKEN_SIZE]){1});
    uint32_t n = 0;
    o.encrypt = own;
    b.encrypt = (uint8_t)other;
    if (address)
        CHECK_OK_ERR(tcp_addresses_parse(address, b.addresses, &n, &err), err);
    b.n_addresses = (uint8_t)n;
    CHECK_OK_ERR(dp_dev_open("tcp", &o, &dev, &err), err);
    int st = tcp_seal_decide(tcp_dev_of(dev), &b, &seals, &err);
    if (st)
        CHECK_STATUS(st, DP_UNSUPPORTED);
    dp_dev_close(dev);
    return st ? REFUSED : seals ? SEALED : PLAIN;
}

T_CASE(encrypt_settings, "tcp/encrypt-settings", .providers = T_TCP) {
    static const struct {
        const char *address;
        const int8_t (*want)[4];
    } at[] = {{"127.0.0.1:5", near}, {"[::1]:5,127.9.9.9:5", near}, {"10.0.0.1:5", far}, {"127.0.0.1:5,10.0.0.1:5", far}, {"[fe80::1]:5", far}};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        for (int client = 0; client < 4; client++)
            for (int worker = 0; worker < 4; worker++) {
                t_note("%s, client %d, worker %d", at[i].address, client, worker);
                CHECK_EQ(decision((dp_dev_options){.active_side_only = 1}, client, worker, at[i].address), at[i].want[client][worker]);
                CHECK_EQ(decision((dp_dev_options){.handed = 1, .advertise = at[i].address}, worker, client, NULL), at[i].want[client][worker]);
            }
    dp_dev *dev;
    dp_error err;
    CHECK_REFUSED(dp_dev_open("tcp", &(dp_dev_options){.encrypt = 4}, &dev, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_dev_open("tcp", &(dp_dev_options){.encrypt = -1}, &dev, &err), DP_INVALID, err);
}

T_CASE(encrypt_blobs, "tcp/encrypt-blobs", .providers = T_TCP) {
    tcp_blob good = rogue_blob((const uint8_t[DP_TCP_TOKEN_SIZE]){1}), b, copy;
    dp_error err;
    CHECK_OK_ERR(tcp_blob_check(&good, sizeof good, &copy, &err), err);
    b = good, b.secret[15] = 1;
    CHECK_REFUSED(tcp_blob_check(&b, sizeof b, &copy, &err), DP_BAD_BLOB, err);
    b = good, b.encrypt = DP_ENCRYPT_ALLOW;
    CHECK_REFUSED(tcp_blob_check(&b, sizeof b, &copy, &err), DP_BAD_BLOB, err);
    b.secret[15] = 1;
    CHECK_OK_ERR(tcp_blob_check(&b, sizeof b, &copy, &err), err);
    b.encrypt = DP_ENCRYPT_REQUIRE + 1;
    CHECK_REFUSED(tcp_blob_check(&b, sizeof b, &copy, &err), DP_BAD_BLOB, err);
    b.encrypt = DP_ENCRYPT_ON, b.reserved[6] = 1;
    CHECK_REFUSED(tcp_blob_check(&b, sizeof b, &copy, &err), DP_BAD_BLOB, err);
    /* A queue pair that does not encrypt has no secret in its blob. One that does gets a new secret with each reset. */
    end e;
    card first, second;
    for (int encrypt = DP_ENCRYPT_OFF; encrypt <= DP_ENCRYPT_REQUIRE; encrypt++) {
        dp_dev *dev;
        CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.encrypt = encrypt}, &dev, &err), err);
        end_open(&e, NULL, dev);
        end_card(&e, &first);
        end_reset(&e);
        end_card(&e, &second);
        CHECK_EQ(!memcmp(first.blob + 104, second.blob + 104, DP_TCP_SECRET_SIZE), encrypt == DP_ENCRYPT_OFF);
        end_close(&e);
        dp_dev_close(dev);
    }
}

/* ---- records ---- */

enum { ROOM = TCP_RECORD_MAX + TCP_RECORD_EXTRA };
typedef struct keys {
    tcp_key tx, rx;
    uint8_t record[2][ROOM], out[TCP_RECORD_MAX];
} keys;

static void keys_open(keys *k) {
    static const uint8_t secret[DP_CRYPTO_SUM] = {1, 2, 3};
    CHECK_OK(dp_crypto_load(NULL));
    CHECK(tcp_key_start(&k->tx, secret, true) && tcp_key_start(&k->rx, secret, false));
}

static void keys_close(keys *k) {
    tcp_key_end(&k->tx);
    tcp_key_end(&k->rx);
    CHECK_BYTES((uint8_t *)&k->tx, 0, sizeof k->tx);
}

/* Makes record i of len bytes with a pattern. */
static void make_record(keys *k, int i, uint32_t len) {
    fill_pattern(k->record[i] + 4, len, i);
    CHECK(tcp_key_seal(&k->tx, k->record[i], len));
}

T_CASE(records, "tcp/encrypt-records", .providers = T_TCP) {
    static const uint32_t sizes[] = {1, 15, 16, 17, 24, 4096, TCP_RECORD_MAX - 1, TCP_RECORD_MAX};
    keys *k = calloc(1, sizeof *k);
    keys_open(k);
    k->tx.rekey_after = k->rx.rekey_after = 3; /* so that keys change on the way */
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t len = sizes[i % 8];
        t_note("record %u of %u bytes", i, len);
        make_record(k, 0, len);
        for (uint32_t have = 0; have < len + TCP_RECORD_EXTRA; have += have < 40 ? 1 : 997)
            CHECK_EQ(tcp_key_open(&k->rx, k->record[0], have, k->out), 0);
        CHECK_EQ(tcp_key_open(&k->rx, k->record[0], len + TCP_RECORD_EXTRA, k->out), (int)len);
        CHECK_PATTERN(k->out, len, 0);
    }
    CHECK_EQ(k->rx.records, 64);
    keys_close(k);
    free(k);
}

/* Each bit of length, ciphertext and tag. A length that is larger but permitted waits for the rest, which then fails. */
T_CASE(records_damaged, "tcp/encrypt-records-damaged", .providers = T_TCP) {
    enum { LEN = 40 };
    keys *k = calloc(1, sizeof *k);
    for (uint32_t bit = 0; bit < 8 * (LEN + TCP_RECORD_EXTRA); bit++) {
        keys_open(k);
        make_record(k, 0, LEN);
        k->record[0][bit / 8] ^= (uint8_t)(1 << bit % 8);
        t_note("bit %u", bit);
        CHECK_EQ(tcp_key_open(&k->rx, k->record[0], ROOM, k->out), -1);
        keys_close(k);
    }
    keys_open(k);
    make_record(k, 0, LEN);
    make_record(k, 1, LEN);
    t_note("the second record first");
    CHECK_EQ(tcp_key_open(&k->rx, k->record[1], ROOM, k->out), -1);
    keys_close(k);
    keys_open(k);
    make_record(k, 0, LEN);
    t_note("a record twice");
    CHECK_EQ(tcp_key_open(&k->rx, k->record[0], ROOM, k->out), LEN);
    CHECK_EQ(tcp_key_open(&k->rx, k->record[0], ROOM, k->out), -1);
    t_note("no bytes");
    CHECK_EQ(tcp_key_open(&k->rx, (const uint8_t[ROOM]){0}, ROOM, k->out), -1);
    keys_close(k);
    t_note("a record under the key that was replaced");
    keys_open(k);
    k->rx.rekey_after = 1;
    make_record(k, 0, LEN);
    CHECK_EQ(tcp_key_open(&k->rx, k->record[0], ROOM, k->out), LEN);
    make_record(k, 0, LEN);
    CHECK_EQ(tcp_key_open(&k->rx, k->record[0], ROOM, k->out), -1);
    keys_close(k);
    free(k);
}

/* ---- a man in the middle ---- */

typedef struct middle {
    end a, b;
    dp_dev *dev_a, *dev_b;
    card of_a, of_b; /* as the control plane passes them on; of_b has the address of the middle */
    card real_b;
    int listen_fd, to_a, to_b;
    int hello_byte; /* byte of the first hello that the middle changes; -1: none */
} middle;

static void pass_hello(int from, int to, int change) {
    uint8_t hello[DP_TCP_HELLO_SIZE];
    CHECK_EQ(recv(from, hello, sizeof hello, MSG_WAITALL), (ssize_t)sizeof hello);
    if (change >= 0)
        hello[change] ^= 1;
    CHECK_EQ(send(to, hello, sizeof hello, MSG_NOSIGNAL), (ssize_t)sizeof hello);
}

static void pass_hellos(int sock, void *arg) {
    middle *m = arg;
    (void)sock;
    m->to_a = accept4(m->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    m->to_b = rogue_dial(&m->real_b);
    dp_tcp_prepare(m->to_a);
    pass_hello(m->to_a, m->to_b, m->hello_byte);
    pass_hello(m->to_b, m->to_a, -1);
}

static const end_opts size = {.size = 64 << 10, .max_send = 8, .max_recv = 8};

/* Connects a, which opens the socket, to b through the middle. */
static void middle_open(middle *m, int hello_byte) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    dp_error err;
    t_peer p;
    m->hello_byte = hello_byte;
    m->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(!bind(m->listen_fd, (struct sockaddr *)&at, len) && !listen(m->listen_fd, 1));
    CHECK(!getsockname(m->listen_fd, (struct sockaddr *)&at, &len));
    CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.active_side_only = 1, .encrypt = DP_ENCRYPT_REQUIRE}, &m->dev_a, &err), err);
    CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.encrypt = DP_ENCRYPT_REQUIRE}, &m->dev_b, &err), err);
    end_open(&m->a, &size, m->dev_a);
    end_open(&m->b, &size, m->dev_b);
    end_card(&m->a, &m->of_a);
    end_card(&m->b, &m->of_b);
    m->real_b = m->of_b;
    ((tcp_blob *)(void *)m->of_b.blob)->addresses[0].port = ntohs(at.sin_port);
    t_peer_start(&p, false, pass_hellos, m);
    end_connect(&m->a, &m->of_b);
    t_peer_join(&p);
    end_connect(&m->b, &m->of_a);
}

static void middle_close(middle *m) {
    end_close(&m->a);
    end_close(&m->b);
    dp_dev_close(m->dev_a);
    dp_dev_close(m->dev_b);
    close(m->listen_fd);
    close(m->to_a);
    close(m->to_b);
}

/* a writes 1000 bytes of a pattern and an immediate: one record, which this takes from the wire. Returns its size. */
static size_t take_record(middle *m, uint8_t *record, uint32_t imm) {
    enum { LEN = 1000, WHOLE = 4 + 24 + LEN + 16 };
    memset(local_bytes(&m->a), 0xAB, LEN);
    dp_sge s = local_sge(&m->a, 0, LEN);
    CHECK_OK(dp_post_write_imm(m->a.qp, &s, 1, m->of_b.regions[0].addr, m->of_b.regions[0].rkey, imm, 1, 0));
    CHECK_EQ(recv(m->to_a, record, WHOLE, MSG_WAITALL), WHOLE);
    CHECK_EQ(record[0] | record[1] << 8, 24 + LEN);
    for (int i = 0; i + 3 < WHOLE; i++)
        CHECK(memcmp(record + i, "\xAB\xAB\xAB\xAB", 4)); /* one time in four million tries by chance */
    return WHOLE;
}

static void pass_on(middle *m, const void *bytes, size_t len) {
    CHECK_EQ(send(m->to_b, bytes, len, MSG_NOSIGNAL), (ssize_t)len);
}

/* b ends the connection and has received nothing more. Its memory has what was written before. */
static void b_ends(middle *m, int status, bool written) {
    int64_t until = dp_now_ns() + poll_ns();
    dp_tcp_counts counts;
    for (; !dp_qp_broken(m->b.qp); sched_yield()) {
        end_drain(&m->b);
        CHECKF(dp_now_ns() < until, "the connection stays");
    }
    CHECK_STATUS(dp_qp_broken(m->b.qp), status);
    CHECK_EQ(m->b.received.tail, m->b.received.head);
    CHECK_BYTES(end_bytes(&m->b), written ? 0xAB : 0, 1000);
    CHECK_BYTES(end_bytes(&m->b) + 1000, 0, 63 << 10);
    dp_tcp_count(m->dev_b, &counts);
    CHECK_EQ(counts.forged, status == DP_PROTOCOL);
    middle_close(m);
}

T_CASE(middle_changes, "tcp/encrypt-changed-on-the-way", .providers = T_TCP) {
    static const uint16_t at[] = {0, 1, 2, 3, 4, 20, 500, 1027, 1028, 1043}; /* in length, frame, payload and tag */
    uint8_t record[TCP_RECORD_MAX + TCP_RECORD_EXTRA];
    middle m;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        t_note("byte %d of a record", at[i]);
        middle_open(&m, -1);
        memset(record, 0, sizeof record);
        take_record(&m, record, 1);
        record[at[i]] ^= 4;
        pass_on(&m, record, sizeof record); /* the bytes behind it make a longer one whole */
        b_ends(&m, DP_PROTOCOL, false);
    }
}

T_CASE(middle_replays, "tcp/encrypt-replayed", .providers = T_TCP) {
    uint8_t r[2][2048];
    middle m;
    t_note("a record twice");
    middle_open(&m, -1);
    size_t len = take_record(&m, r[0], 1);
    pass_on(&m, r[0], len);
    CHECK_EQ(end_imm(&m.b).imm, 1);
    pass_on(&m, r[0], len);
    b_ends(&m, DP_PROTOCOL, true);
    t_note("two records in the other order");
    middle_open(&m, -1);
    take_record(&m, r[0], 1);
    take_record(&m, r[1], 2);
    pass_on(&m, r[1], len);
    pass_on(&m, r[0], len);
    b_ends(&m, DP_PROTOCOL, false);
    t_note("a record is left out");
    middle_open(&m, -1);
    take_record(&m, r[0], 1);
    take_record(&m, r[1], 2);
    pass_on(&m, r[1], len);
    b_ends(&m, DP_PROTOCOL, false);
    t_note("a record goes back to its sender");
    middle_open(&m, -1);
    take_record(&m, r[0], 1);
    CHECK_EQ(send(m.to_a, r[0], len, MSG_NOSIGNAL), (ssize_t)len);
    for (int64_t until = dp_now_ns() + poll_ns(); !dp_qp_broken(m.a.qp); sched_yield()) {
        end_drain(&m.a);
        CHECK(dp_now_ns() < until);
    }
    CHECK_STATUS(dp_qp_broken(m.a.qp), DP_PROTOCOL);
    middle_close(&m);
}

T_CASE(middle_injects, "tcp/encrypt-plain-frames", .providers = T_TCP) {
    middle m;
    middle_open(&m, -1);
    struct {
        tcp_frame f;
        uint8_t payload[1000];
    } plain = {.f = {.op = TCP_WRITE, .len = 1000, .rkey = m.of_b.regions[0].rkey, .raddr = m.of_b.regions[0].addr}};
    memset(plain.payload, 0xAB, sizeof plain.payload);
    pass_on(&m, &plain, sizeof plain);
    b_ends(&m, DP_PROTOCOL, false);
}

T_CASE(middle_cuts, "tcp/encrypt-cut", .providers = T_TCP) {
    uint8_t record[2048];
    middle m;
    for (size_t part = 0; part < 1044; part += part < 6 ? 1 : 346) {
        t_note("%zu bytes of the second record", part);
        middle_open(&m, -1);
        size_t len = take_record(&m, record, 1);
        pass_on(&m, record, len);
        CHECK_EQ(end_imm(&m.b).imm, 1);
        take_record(&m, record, 2);
        pass_on(&m, record, part);
        shutdown(m.to_b, SHUT_WR);
        b_ends(&m, DP_PEER_GONE, true);
    }
}

/* The regions in a hello are in the clear. Keys follow from both hellos, so a changed one ends the connection at the first record. */
T_CASE(middle_hello, "tcp/encrypt-changed-hello", .providers = T_TCP) {
    uint8_t record[2048];
    middle m;
    middle_open(&m, 64 + 8 + 2); /* the address of the first region */
    pass_on(&m, record, take_record(&m, record, 1));
    b_ends(&m, DP_PROTOCOL, false);
}

/* The control plane carried another secret. */
T_CASE(wrong_secret, "tcp/encrypt-wrong-secret", .providers = T_TCP) {
    uint8_t record[2048];
    middle m;
    middle_open(&m, -1);
    end_reset(&m.a); /* a new token, and a new secret */
    end_reset(&m.b);
    close(m.to_a);
    close(m.to_b);
    end_card(&m.a, &m.of_a);
    end_card(&m.b, &m.real_b);
    uint16_t port = ((tcp_blob *)(void *)m.of_b.blob)->addresses[0].port;
    m.of_b = m.real_b;
    ((tcp_blob *)(void *)m.of_b.blob)->addresses[0].port = port;
    ((tcp_blob *)(void *)m.of_b.blob)->secret[3] ^= 1;
    t_peer p;
    t_peer_start(&p, false, pass_hellos, &m);
    end_connect(&m.a, &m.of_b);
    t_peer_join(&p);
    end_connect(&m.b, &m.of_a);
    pass_on(&m, record, take_record(&m, record, 1));
    b_ends(&m, DP_PROTOCOL, false);
}

/* If a record cannot be sealed, the post fails, and nothing of it is sent. */
T_CASE(seal_fails, "tcp/encrypt-seal-fails", .providers = T_TCP) {
    static const uint32_t sizes[] = {8, TCP_RECORD_MAX - sizeof(tcp_frame), TCP_RECORD_MAX, 4 * TCP_RECORD_MAX - 64};
    uint8_t byte;
    middle m;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        t_note("a write of %u bytes", sizes[i]);
        middle_open(&m, -1);
        tcp_key *tx = &tcp_qp_of(m.a.qp)->seal->tx;
        dp_cipher_free(tx->cipher);
        tx->cipher = dp_cipher_new(); /* without a key */
        dp_sge s = local_sge(&m.a, 0, sizes[i]);
        CHECK_STATUS(dp_post_write(m.a.qp, &s, 1, m.of_b.regions[0].addr, m.of_b.regions[0].rkey, 1, DP_SIGNALED), DP_CONNECTION);
        CHECK_STATUS(dp_qp_broken(m.a.qp), DP_CONNECTION);
        CHECK_LE(recv(m.to_a, &byte, 1, MSG_DONTWAIT), 0);
        middle_close(&m);
    }
}
