/* AES-128-GCM and SHA-256 of OpenSSL's libcrypto, loaded when encryption is used. No program links it. The functions use a library
 * context of their own, so neither the configuration of OpenSSL nor a program's use of OpenSSL matters. */
#ifndef RFAAS_DP_TCP_CRYPTO_H
#define RFAAS_DP_TCP_CRYPTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dp_fabric.h"

#define DP_CRYPTO_LIBRARY "libcrypto.so.3"
enum { DP_CRYPTO_KEY = 16, DP_CRYPTO_IV = 12, DP_CRYPTO_TAG = 16, DP_CRYPTO_SUM = 32 }; /* bytes */

/* Loads the library once per process; later calls return the first result. Any thread. A worker calls it before its system calls are
 * restricted. Afterwards the functions below need no system calls but for memory. Errors: DP_UNSUPPORTED, with a message that names the
 * package to install. */
int dp_crypto_load(dp_error *err);
/* The same for another file, without a lasting effect. For tests. */
int dp_crypto_load_from(const char *library, dp_error *err);

/* A key for one direction: it either seals or opens. */
typedef struct dp_cipher dp_cipher;
/* Returns NULL if there is no memory. dp_crypto_load has succeeded before, as for all functions below. */
dp_cipher *dp_cipher_new(void);
/* Wipes the key. NULL is allowed. */
void dp_cipher_free(dp_cipher *c);
bool dp_cipher_key(dp_cipher *c, const uint8_t key[DP_CRYPTO_KEY], bool seals);
/* Encrypts len bytes in place. Writes the tag, which authenticates them and aad. */
bool dp_cipher_seal(dp_cipher *c, const uint8_t iv[DP_CRYPTO_IV], const void *aad, int aad_len, uint8_t *data, int len,
                    uint8_t tag[DP_CRYPTO_TAG]);
/* Decrypts len bytes. False: the tag is wrong, and the bytes in `out` must not be used. */
bool dp_cipher_open(dp_cipher *c, const uint8_t iv[DP_CRYPTO_IV], const void *aad, int aad_len, const uint8_t *data, int len,
                    const uint8_t tag[DP_CRYPTO_TAG], uint8_t *out);
bool dp_crypto_sum(const void *data, size_t len, uint8_t sum[DP_CRYPTO_SUM]);

#endif
