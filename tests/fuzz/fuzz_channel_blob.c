/* Channel blobs, as either side reads the other's. Byte 0: 1 corrects the checksum, which random bytes never have; 2 the
 * role; 4 the provider. */
#include "dp_layout.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, size};
    uint8_t how = take8(&in);
    uint8_t *blob = exact_copy(in.at, in.left);
    uint32_t len = (uint32_t)in.left;
    if ((how & 1) && len >= sizeof(dp_channel_blob)) {
        dp_channel_blob b;
        memcpy(&b, blob, sizeof b);
        b.crc = 0;
        memcpy(blob, &b, sizeof b);
        b.crc = dp_crc32c(blob, len);
        memcpy(blob, &b, sizeof b);
    }
    dp_side s;
    dp_error err = {0};
    int st = dp_side_decode(blob, len, how & 2 ? DP_ROLE_WORKER : DP_ROLE_CLIENT,
                            how & 4 ? DP_PROVIDER_VERBS : DP_PROVIDER_SHM, &s, &err);
    if (st) {
        MUST(st == DP_BAD_BLOB && err.status == st && err.msg[0]);
    } else {
        const dp_layout *l = &s.layout;
        MUST(s.generation && s.qp_len <= DP_BLOB_MAX && sizeof(dp_channel_blob) + s.qp_len == len);
        MUST(l->depth && l->depth <= DP_DEPTH_MAX && l->eager && l->eager <= DP_EAGER_MAX && l->bulk <= DP_BULK_MAX);
        MUST(s.addr + l->size >= s.addr && l->bulk_at + l->bulk <= l->mailbox_at && l->mailbox_at < l->size);
        MUST(dp_slot_payload(l, l->depth - 1) + l->eager <= l->bulk_at);
    }
    free(blob);
    return 0;
}
