/* Address blobs of verbs queue pairs. Byte 0: 1 corrects the checksum. An accepted blob encodes to the same bytes. */
#include "dp_verbs.h"
#include "dp_wire.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, size};
    uint8_t how = take8(&in);
    uint8_t *blob = exact_copy(in.at, in.left), again[DP_BLOB_MAX];
    uint32_t len = (uint32_t)in.left;
    if ((how & 1) && len == 44) {
        uint32_t crc = dp_crc32c(blob, 40);
        memcpy(blob + 40, &crc, sizeof crc);
    }
    dpv_blob b;
    dp_error err = {0};
    int st = dpv_blob_decode(blob, len, &b, &err);
    if (st)
        MUST(st == DP_BAD_BLOB && err.msg[0]);
    else
        MUST(dpv_blob_encode(&b, again) == len && !memcmp(again, blob, len));
    free(blob);
    return 0;
}
