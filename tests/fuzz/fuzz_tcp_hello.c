/* Blobs and hellos of tcp. Byte 0: 1 the input is a blob, else a hello; 2: it gets a good magic and version. Accepted input is
 * within the bounds that the provider relies on. */
#include "dp_tcp_impl.h"
#include "fuzz.h"

static void try_blob(uint8_t *bytes, uint32_t len) {
    tcp_blob b;
    dp_error err = {0};
    int st = tcp_blob_check(bytes, len, &b, &err);
    if (st) {
        MUST(st == DP_BAD_BLOB && err.msg[0] && !dp_tcp_blob_token(bytes, len));
        return;
    }
    MUST(len == sizeof b && !memcmp(&b, bytes, sizeof b) && b.n_addresses <= DP_TCP_ADDRESSES);
    MUST(dp_tcp_blob_token(bytes, len) == bytes + DP_TCP_BLOB_TOKEN_AT);
    for (int i = 0; i < b.n_addresses; i++) {
        struct sockaddr_storage at;
        tcp_address again;
        tcp_address_to(&b.addresses[i], &at);
        MUST(tcp_address_of(&at, &again) && !memcmp(&again, &b.addresses[i], sizeof again));
    }
}

static void try_hello(const uint8_t *bytes) {
    tcp_hello h;
    tcp_link l;
    memcpy(&h, bytes, sizeof h);
    if (!tcp_hello_check(&h, &l))
        return;
    MUST(dp_tcp_hello_token(bytes) == bytes + DP_TCP_HELLO_TOKEN_AT && l.n_regions <= DP_EXPOSE_MAX);
    for (uint32_t i = 0; i < l.n_regions; i++)
        MUST(l.regions[i].base + l.regions[i].size >= l.regions[i].base && l.regions[i].access <= 7);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, size};
    uint8_t how = take8(&in);
    uint8_t bytes[DP_TCP_HELLO_SIZE] = {0};
    uint32_t len = in.left < sizeof bytes ? (uint32_t)in.left : sizeof bytes;
    take(&in, bytes, len);
    if (how & 2) {
        uint32_t magic = how & 1 ? DP_TCP_BLOB_MAGIC : DP_TCP_HELLO_MAGIC;
        memcpy(bytes, &magic, sizeof magic);
        bytes[4] = DP_TCP_VERSION;
        bytes[5] = 0;
        if (how & 1)
            bytes[6] = DP_PROVIDER_TCP;
    }
    if (how & 1) {
        uint8_t *exact = calloc(1, len ? len : 1); /* of exactly this length, so that the sanitizer detects reads beyond it */
        MUST(exact);
        memcpy(exact, bytes, len);
        try_blob(exact, len);
        free(exact);
    } else {
        try_hello(bytes);
    }
    return 0;
}
