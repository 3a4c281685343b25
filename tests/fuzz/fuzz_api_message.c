/* Messages between the C API and its control part. */
#include "rfaas_api_msg.c"

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *copy = exact_copy(data, size);
    rfaas_msg m = {.data = copy, .len = size};
    if (rfaas_msg_check(&m)) {
        uint64_t total = 0;
        for (uint16_t tag = 0; tag < 40; tag++) {
            uint32_t len = 77;
            const uint8_t *p;
            for (uint32_t n = 0; (p = rfaas_msg_find(&m, tag, n, &len)); n++) {
                MUST(p >= copy && p + len <= copy + size);
                total += FIELD_HEAD + len;
                rfaas_msg_nth_u64(&m, tag, n, 7);
            }
            MUST(len == 0);
            char out[16];
            rfaas_msg_get_str(&m, tag, out, sizeof out);
            MUST(memchr(out, 0, sizeof out));
        }
        MUST(total <= size);
    }
    free(copy);
    return 0;
}
