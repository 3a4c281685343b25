#include "dp_wire.h"

/* Bit by bit: it runs over a few hundred bytes per connection. */
uint32_t dp_crc32c(const void *data, size_t len) {
    const uint8_t *p = data;
    uint32_t crc = ~0u;
    while (len--) {
        crc ^= *p++;
        for (int i = 0; i < 8; i++)
            crc = crc >> 1 ^ (0x82f63b78u & -(crc & 1));
    }
    return ~crc;
}
