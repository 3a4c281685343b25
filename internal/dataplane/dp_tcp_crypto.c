/* Loads libcrypto. Its functions are declared here, because programs are built without OpenSSL's headers; its interface is stable within
 * version 3. */
#include "dp_tcp_crypto.h"

#include <dlfcn.h>
#include <stdbool.h>

#include "dp_load.h"

enum { GET_TAG = 0x10, SET_TAG = 0x11 }; /* EVP_CTRL_AEAD_* */

/* X(member, function, result, parameters) */
#define CRYPTO_FUNCTIONS(X)                                                                                                              \
    X(context_new, OSSL_LIB_CTX_new, void *, (void))                                                                                     \
    X(context_free, OSSL_LIB_CTX_free, void, (void *))                                                                                   \
    X(cipher_fetch, EVP_CIPHER_fetch, void *, (void *, const char *, const char *))                                                      \
    X(digest_fetch, EVP_MD_fetch, void *, (void *, const char *, const char *))                                                          \
    X(digest, EVP_Digest, int, (const void *, size_t, unsigned char *, unsigned *, const void *, void *))                                \
    X(ctx_new, EVP_CIPHER_CTX_new, void *, (void))                                                                                       \
    X(ctx_free, EVP_CIPHER_CTX_free, void, (void *))                                                                                     \
    X(ctrl, EVP_CIPHER_CTX_ctrl, int, (void *, int, int, void *))                                                                        \
    X(encrypt_init, EVP_EncryptInit_ex, int, (void *, const void *, void *, const unsigned char *, const unsigned char *))               \
    X(encrypt, EVP_EncryptUpdate, int, (void *, unsigned char *, int *, const unsigned char *, int))                                     \
    X(encrypt_end, EVP_EncryptFinal_ex, int, (void *, unsigned char *, int *))                                                           \
    X(decrypt_init, EVP_DecryptInit_ex, int, (void *, const void *, void *, const unsigned char *, const unsigned char *))               \
    X(decrypt, EVP_DecryptUpdate, int, (void *, unsigned char *, int *, const unsigned char *, int))                                     \
    X(decrypt_end, EVP_DecryptFinal_ex, int, (void *, unsigned char *, int *))

typedef struct crypto {
#define MEMBER(member, function, result, parameters) result(*member) parameters;
    CRYPTO_FUNCTIONS(MEMBER)
#undef MEMBER
    void *context, *aes, *sha; /* never freed: forked workers use them */
} crypto;

static crypto lib; /* constant once dp_crypto_load has succeeded */

static int load_from(const char *library, crypto *c, dp_error *err) {
    /* Local: the names of libcrypto must not reach libraries of the user. */
    void *so = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        const char *why = dlerror();
        return dp_fail(err, DP_UNSUPPORTED, 0, "encryption of data on tcp needs %.40s: %.90s; install libssl3 (Debian) or openssl-libs (Red Hat)",
                       library, why ? why : "unknown error");
    }
#define RESOLVE(member, function, result, parameters)                                                                                   \
    if (!(c->member = (__typeof__(c->member))dlsym(so, #function))) {                                                                   \
        dlclose(so);                                                                                                                     \
        return dp_fail(err, DP_UNSUPPORTED, 0,                                                                                           \
                       "encryption of data on tcp needs OpenSSL 3: %.40s has no " #function                                              \
                       "; install libssl3 (Debian) or openssl-libs (Red Hat)",                                                           \
                       library);                                                                                                         \
    }
    CRYPTO_FUNCTIONS(RESOLVE)
#undef RESOLVE
    c->context = c->context_new();
    c->aes = c->context ? c->cipher_fetch(c->context, "AES-128-GCM", NULL) : NULL;
    c->sha = c->context ? c->digest_fetch(c->context, "SHA256", NULL) : NULL;
    if (c->aes && c->sha)
        return DP_OK;
    return dp_fail(err, DP_UNSUPPORTED, 0, "encryption of data on tcp: %.40s has no AES-128-GCM or SHA-256; reinstall OpenSSL 3", library);
}

int dp_crypto_load_from(const char *library, dp_error *err) { return load_from(library, &(crypto){0}, err); }

int dp_crypto_load(dp_error *err) {
    static dp_error first;
    static bool tried;
    dp_load_lock();
    if (!tried) {
        crypto c = {0};
        if (!load_from(DP_CRYPTO_LIBRARY, &c, &first))
            lib = c;
        tried = true;
    }
    if (first.status && err)
        *err = first;
    int st = first.status;
    dp_load_unlock();
    return st;
}

/* ---- ciphers ---- */

/* dp_cipher is libcrypto's context. */
dp_cipher *dp_cipher_new(void) { return lib.ctx_new(); }

void dp_cipher_free(dp_cipher *c) {
    if (c)
        lib.ctx_free(c);
}

bool dp_cipher_key(dp_cipher *c, const uint8_t key[DP_CRYPTO_KEY], bool seals) {
    return (seals ? lib.encrypt_init(c, lib.aes, NULL, key, NULL) : lib.decrypt_init(c, lib.aes, NULL, key, NULL)) == 1;
}

bool dp_cipher_seal(dp_cipher *c, const uint8_t iv[DP_CRYPTO_IV], const void *aad, int aad_len, uint8_t *data, int len,
                    uint8_t tag[DP_CRYPTO_TAG]) {
    int n;
    return lib.encrypt_init(c, NULL, NULL, NULL, iv) == 1 && lib.encrypt(c, NULL, &n, aad, aad_len) == 1 &&
           lib.encrypt(c, data, &n, data, len) == 1 && n == len && lib.encrypt_end(c, tag, &n) == 1 && n == 0 &&
           lib.ctrl(c, GET_TAG, DP_CRYPTO_TAG, tag) == 1;
}

bool dp_cipher_open(dp_cipher *c, const uint8_t iv[DP_CRYPTO_IV], const void *aad, int aad_len, const uint8_t *data, int len,
                    const uint8_t tag[DP_CRYPTO_TAG], uint8_t *out) {
    int n;
    uint8_t none[DP_CRYPTO_TAG];
    return lib.decrypt_init(c, NULL, NULL, NULL, iv) == 1 && lib.decrypt(c, NULL, &n, aad, aad_len) == 1 &&
           lib.decrypt(c, out, &n, data, len) == 1 && n == len && lib.ctrl(c, SET_TAG, DP_CRYPTO_TAG, (void *)(uintptr_t)tag) == 1 &&
           lib.decrypt_end(c, none, &n) == 1 && n == 0;
}

bool dp_crypto_sum(const void *data, size_t len, uint8_t sum[DP_CRYPTO_SUM]) {
    return lib.digest(data, len, sum, NULL, lib.sha, NULL) == 1;
}
