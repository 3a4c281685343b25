/* Encryption of the tcp provider: what follows the hellos travels in records (docs/PROTOCOL.md). A record is 4 bytes of length, that many
 * bytes of ciphertext, and a tag. Frames are written into records and read from them as from a plain stream. Nothing of a record is used
 * before its tag has been checked.
 *
 * Keys. Each queue pair has a secret of its own, which its blob carries and which changes with its token. The keys of a connection follow
 * from the secrets of both sides and from both hellos, one for each direction. So two connections never have the same key, and a hello that
 * was changed on its way makes the first record fail. Blobs travel over the control plane only. */
#ifndef RFAAS_DP_TCP_SEAL_H
#define RFAAS_DP_TCP_SEAL_H

#include "dp_tcp_crypto.h"

#define TCP_RECORD_MAX (16u << 10)        /* bytes of frames in a record, at least 1 */
#define TCP_RECORD_EXTRA 20               /* length and tag */
#define TCP_SEAL_IN (66u << 10)           /* bytes of records received by one call */
#define TCP_SEAL_SEND (32u << 10)         /* sealed bytes that are sent before the rest of a message is sealed */
#define TCP_REKEY_AFTER (1ull << 24)      /* records under one key */
_Static_assert(TCP_SEAL_IN >= TCP_RECORD_MAX + TCP_RECORD_EXTRA, "a record fits");

/* One direction of a connection. */
typedef struct tcp_key {
    dp_cipher *cipher;
    uint64_t records;               /* sealed or opened so far, with all keys together; never wraps */
    uint64_t rekey_after;           /* TCP_REKEY_AFTER, or less in tests */
    uint8_t iv[DP_CRYPTO_IV];
    uint8_t secret[DP_CRYPTO_SUM];  /* key, iv and the next secret follow from it */
    bool seals;
} tcp_key;

/* Makes the key that follows from a secret. False: no memory. */
bool tcp_key_start(tcp_key *k, const uint8_t secret[DP_CRYPTO_SUM], bool seals);
/* Wipes it. */
void tcp_key_end(tcp_key *k);
/* Completes a record in place: `record` has room for the length, len bytes of frames, and behind them room for the tag. */
bool tcp_key_seal(tcp_key *k, uint8_t *record, uint32_t len);
/* Opens the record at the beginning of `have` bytes into out, which has room for TCP_RECORD_MAX bytes. Returns the number of bytes of frames,
 * 0 if the record is incomplete, or -1 if it is not the next record of the peer. */
int tcp_key_open(tcp_key *k, const uint8_t *record, uint32_t have, uint8_t *out);

typedef struct tcp_seal {
    tcp_key tx, rx;
    uint32_t open; /* bytes of frames in the record at the end of tcp_qp.out that is not sealed yet; 0: there is none */
    bool drained;  /* the socket was empty in this call of tcp_take */
    uint32_t lo, hi;
    uint8_t in[TCP_SEAL_IN]; /* [lo, hi) are received but not opened */
} tcp_seal;

#endif
