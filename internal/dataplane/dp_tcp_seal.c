/* Encryption of the tcp provider: whether a connection is encrypted, its keys, and its records. dp_tcp_seal.h has the description. */
#include "dp_tcp_impl.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

/* ---- records ---- */

/* Derives a value from a secret: SHA-256 over the secret and one byte. */
static bool derive(const uint8_t secret[DP_CRYPTO_SUM], uint8_t what, uint8_t out[DP_CRYPTO_SUM]) {
    uint8_t text[DP_CRYPTO_SUM + 1];
    memcpy(text, secret, DP_CRYPTO_SUM);
    text[DP_CRYPTO_SUM] = what;
    bool done = dp_crypto_sum(text, sizeof text, out);
    explicit_bzero(text, sizeof text);
    return done;
}

static bool set_key(tcp_key *k) {
    uint8_t sum[DP_CRYPTO_SUM];
    bool done = derive(k->secret, 'k', sum) && dp_cipher_key(k->cipher, sum, k->seals);
    memcpy(k->iv, sum + DP_CRYPTO_KEY, sizeof k->iv);
    explicit_bzero(sum, sizeof sum);
    return done;
}

bool tcp_key_start(tcp_key *k, const uint8_t secret[DP_CRYPTO_SUM], bool seals) {
    *k = (tcp_key){.cipher = dp_cipher_new(), .rekey_after = TCP_REKEY_AFTER, .seals = seals};
    memcpy(k->secret, secret, sizeof k->secret);
    return k->cipher && set_key(k);
}

void tcp_key_end(tcp_key *k) {
    dp_cipher_free(k->cipher);
    explicit_bzero(k, sizeof *k);
}

/* Begins the next record: computes its nonce, and changes the key if that is due. */
static bool next_record(tcp_key *k, uint8_t nonce[DP_CRYPTO_IV]) {
    if (k->records && k->records % k->rekey_after == 0) {
        uint8_t next[DP_CRYPTO_SUM];
        if (!derive(k->secret, 'n', next))
            return false;
        memcpy(k->secret, next, sizeof next);
        explicit_bzero(next, sizeof next);
        if (!set_key(k))
            return false;
    }
    memcpy(nonce, k->iv, DP_CRYPTO_IV);
    for (int i = 0; i < 8; i++)
        nonce[i] ^= (uint8_t)(k->records >> 8 * i);
    k->records++;
    return true;
}

bool tcp_key_seal(tcp_key *k, uint8_t *record, uint32_t len) {
    uint8_t nonce[DP_CRYPTO_IV];
    uint32_t head = htole32(len);
    memcpy(record, &head, sizeof head);
    return next_record(k, nonce) &&
           dp_cipher_seal(k->cipher, nonce, record, sizeof head, record + sizeof head, (int)len, record + sizeof head + len);
}

int tcp_key_open(tcp_key *k, const uint8_t *record, uint32_t have, uint8_t *out) {
    uint8_t nonce[DP_CRYPTO_IV];
    uint32_t len;
    if (have < sizeof len)
        return 0;
    memcpy(&len, record, sizeof len);
    len = le32toh(len);
    if (!len || len > TCP_RECORD_MAX)
        return -1;
    if (have < len + TCP_RECORD_EXTRA)
        return 0;
    const uint8_t *body = record + sizeof len;
    if (next_record(k, nonce) && dp_cipher_open(k->cipher, nonce, record, sizeof len, body, (int)len, body + len, out))
        return (int)len;
    return -1;
}

/* ---- whether a connection is encrypted ---- */

void dp_tcp_preload(void) { dp_crypto_load(NULL); }

static bool is_loopback(const tcp_address *a) {
    static const uint8_t v4[13] = {[10] = 0xff, [11] = 0xff, [12] = 127}, v6[16] = {[15] = 1};
    return !memcmp(a->ip, v4, sizeof v4) || !memcmp(a->ip, v6, sizeof v6);
}

static bool all_loopback(const tcp_address *a, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (!is_loopback(&a[i]))
            return false;
    return true;
}

int tcp_seal_open_device(tcp_dev *dev, int wanted, dp_error *err) {
    if (wanted < DP_ENCRYPT_OFF || wanted > DP_ENCRYPT_REQUIRE)
        return dp_fail(err, DP_INVALID, 0, "open tcp: encrypt %d is unknown", wanted);
    dev->encrypt = (uint8_t)wanted;
    /* A worker must load the library now, because it cannot when it connects. Others load it when a connection needs it. */
    if (!dev->handed || !wanted || !dp_crypto_load(err))
        return DP_OK;
    if (wanted == DP_ENCRYPT_REQUIRE || (wanted == DP_ENCRYPT_ON && !all_loopback(dev->addresses, dev->n_addresses)))
        return DP_UNSUPPORTED;
    dev->encrypt = DP_ENCRYPT_OFF;
    return DP_OK;
}

int tcp_seal_decide(const tcp_dev *dev, const tcp_blob *peer, bool *seals, dp_error *err) {
    static const char *const names[] = {"off", "on, with plaintext allowed", "on", "require"};
    int own = dev->encrypt, other = peer->encrypt, most = own > other ? own : other;
    bool near = (dev->active_only || all_loopback(dev->addresses, dev->n_addresses)) && all_loopback(peer->addresses, peer->n_addresses);
    bool wanted = most == DP_ENCRYPT_REQUIRE || (most == DP_ENCRYPT_ON && !near);
    *seals = false;
    if (wanted && (own == DP_ENCRYPT_OFF || other == DP_ENCRYPT_OFF))
        return dp_fail(err, DP_UNSUPPORTED, 0,
                       "connect: data encryption is %s here and %s at the tcp peer: change one of the two, or allow plaintext on both sides",
                       names[own], names[other]);
    if (!wanted)
        return DP_OK;
    *seals = true;
    return dp_crypto_load(err);
}

/* ---- keys ---- */

/* The secret of a direction is the SHA-256 of this. All fields have a fixed size. */
typedef struct tcp_origin {
    uint8_t secrets[2][DP_TCP_SECRET_SIZE]; /* of the side that opened the socket, and of the other side */
    char label[15];
    uint8_t from; /* side that sends: 0 or 1 */
    tcp_hello hellos[2];
} tcp_origin;
_Static_assert(sizeof(tcp_origin) == 48 + 2 * DP_TCP_HELLO_SIZE, "no padding");

static bool start_keys(tcp_qp *qp, tcp_origin *o, uint8_t secret[DP_CRYPTO_SUM]) {
    tcp_seal *s = qp->seal;
    int own = qp->peer.dialed ? 0 : 1;
    o->from = (uint8_t)own;
    if (!dp_crypto_sum(o, sizeof *o, secret) || !tcp_key_start(&s->tx, secret, true))
        return false;
    o->from = (uint8_t)!own;
    return dp_crypto_sum(o, sizeof *o, secret) && tcp_key_start(&s->rx, secret, false);
}

static bool make_seal(tcp_qp *qp) {
    qp->seal = malloc(sizeof *qp->seal);
    if (qp->seal) /* `in` stays untouched: an idle connection needs no pages for it */
        memset(qp->seal, 0, offsetof(tcp_seal, in));
    return qp->seal;
}

/* Returns DP_OK, or ends a connection that has no keys. */
static int started(tcp_qp *qp, bool done, dp_error *err) {
    if (done)
        return DP_OK;
    tcp_seal_end(qp);
    return dp_fail(err, DP_FATAL, 0, "connect: no memory for the keys of a tcp connection");
}

int tcp_seal_start(tcp_qp *qp, const tcp_blob *peer, dp_error *err) {
    int own = qp->peer.dialed ? 0 : 1;
    tcp_origin o = {.label = "rfaas tcp keys"};
    memcpy(o.secrets[own], qp->secret, sizeof qp->secret);
    memcpy(o.secrets[!own], peer->secret, sizeof peer->secret);
    memcpy(o.hellos, qp->peer.hellos, sizeof o.hellos);
    uint8_t secret[DP_CRYPTO_SUM];
    bool done = make_seal(qp) && start_keys(qp, &o, secret);
    explicit_bzero(&o, sizeof o);
    explicit_bzero(secret, sizeof secret);
    return started(qp, done, err);
}

static bool continue_key(tcp_key *k, const tcp_packed_key *from, bool seals) {
    bool done = tcp_key_start(k, from->secret, seals);
    k->records = from->records;
    return done;
}

int tcp_seal_continue(tcp_qp *qp, const tcp_packed_key *tx, const tcp_packed_key *rx, dp_error *err) {
    return started(qp, make_seal(qp) && continue_key(&qp->seal->tx, tx, true) && continue_key(&qp->seal->rx, rx, false), err);
}

void tcp_seal_end(tcp_qp *qp) {
    if (!qp->seal)
        return;
    tcp_key_end(&qp->seal->tx);
    tcp_key_end(&qp->seal->rx);
    free(qp->seal);
    qp->seal = NULL;
}

/* ---- the stream ---- */

bool tcp_seal_close(tcp_qp *qp) {
    tcp_seal *s = qp->seal;
    uint32_t len = s->open;
    if (!len)
        return true;
    s->open = 0;
    if (!tcp_key_seal(&s->tx, qp->out + qp->out_hi - len - sizeof len, len)) {
        tcp_end(qp, DP_CONNECTION);
        return false;
    }
    qp->out_hi += DP_CRYPTO_TAG;
    return true;
}

bool tcp_seal_append(tcp_qp *qp, const uint8_t *data, size_t len) {
    tcp_seal *s = qp->seal;
    while (len) {
        if (!s->open)
            qp->out_hi += sizeof(uint32_t); /* the length comes later */
        size_t room = TCP_RECORD_MAX - s->open, n = len < room ? len : room;
        memcpy(qp->out + qp->out_hi, data, n);
        qp->out_hi += n;
        s->open += (uint32_t)n;
        data += n;
        len -= n;
        if (s->open == TCP_RECORD_MAX && !tcp_seal_close(qp))
            return false;
    }
    return true;
}

uint32_t tcp_seal_stage(tcp_qp *qp) {
    tcp_seal *s = qp->seal;
    uint32_t got = 0;
    for (;;) {
        int n = TCP_STAGE - qp->hi < TCP_RECORD_MAX ? 0 : tcp_key_open(&s->rx, s->in + s->lo, s->hi - s->lo, qp->stage + qp->hi);
        if (n < 0) {
            __atomic_add_fetch(&tcp_dev_of(qp->q.domain->dev)->forged, 1, __ATOMIC_RELAXED);
            tcp_end(qp, DP_PROTOCOL);
            return 0;
        }
        if (n > 0) {
            qp->hi += (uint32_t)n;
            s->lo += (uint32_t)n + TCP_RECORD_EXTRA;
            got += (uint32_t)n;
        } else if (got || s->drained) {
            return got;
        } else {
            memmove(s->in, s->in + s->lo, s->hi - s->lo);
            s->hi -= s->lo;
            s->lo = 0;
            uint32_t room = TCP_SEAL_IN - s->hi, came = tcp_receive(qp, s->in + s->hi, room);
            if (!came)
                return 0;
            s->hi += came;
            s->drained = came < room;
        }
    }
}
