/* The mailbox: the form of a small call between processes that share memory when nothing else is under way on
 * their channel. Request and reply use the same cache line, and neither passes through a queue:
 *
 *     0           8            16          32           40              64
 *     | request   | sizes      | payload   | reply      | result        |   first line, in the worker's memory
 *       published                            published
 *     64          ... 320      payload of more than 16 bytes
 *     384         reply, when the capacity is more than 24 bytes
 *     448         ... 704      its result
 *
 *   request  call id (32 bits) | function (16) | payload bytes (9) | 0
 *   sizes    generation (32)   | slot (10)     | 0 (2) | capacity (20)
 *   reply    call id (32)      | minus status (16) | result bytes (16)
 *
 * Processors fetch lines in aligned pairs, so a word and the data that it announces share a pair, and what one side
 * writes while the other spins on a word does not. The first field stands in the high bits. Each side writes its words, then publishes its first one by a release
 * store; the other spins on that word. Both check what they read as they do headers. A result that does not
 * fit, and a function's failure message, go to the slot by way of the queue pair; the client looks at both.
 * The client starts no second call in the mailbox before the first has ended, in whatever way.
 */
#ifndef RFAAS_DP_MAILBOX_H
#define RFAAS_DP_MAILBOX_H

#include <stddef.h>
#include <stdint.h>

#define DP_MAILBOX_MAX 256      /* bytes of payload, and of result */
#define DP_MAILBOX_PAYLOAD 16   /* of them in the line */
#define DP_MAILBOX_RESULT 24

typedef struct dp_mailbox {
    uint64_t request;
    uint64_t sizes;
    uint64_t payload[2];
    uint64_t reply;
    uint64_t result[3];
    uint8_t more_payload[DP_MAILBOX_MAX];
    uint8_t gap[64];
    uint64_t long_reply;
    uint8_t pad[56];
    uint8_t more_result[DP_MAILBOX_MAX];
} dp_mailbox;
#define DP_MAILBOX_ALIGN 128
_Static_assert(offsetof(dp_mailbox, reply) == 32 && offsetof(dp_mailbox, more_payload) == 64 &&
                   offsetof(dp_mailbox, long_reply) == 384 && offsetof(dp_mailbox, more_result) == 448 &&
                   sizeof(dp_mailbox) == 704,
               "mailbox layout");

/* n bytes, most likely 17 to 64 of them: two or four pieces of 16, which overlap, and no call. */
static inline void dp_copy_mailbox(void *dst, const void *src, uint32_t n) {
    typedef uint64_t piece __attribute__((vector_size(16), aligned(1), may_alias));
    uint8_t *d = dst;
    const uint8_t *s = src;
    if (__builtin_expect(n - 17 > 64 - 17, 0)) {
        __builtin_memcpy(d, s, n);
        return;
    }
    piece first = *(const piece *)s, last = *(const piece *)(s + n - 16);
    if (n > 32) {
        piece second = *(const piece *)(s + 16), third = *(const piece *)(s + n - 32);
        *(piece *)(d + 16) = second;
        *(piece *)(d + n - 32) = third;
    }
    *(piece *)d = first;
    *(piece *)(d + n - 16) = last;
}

static inline uint64_t dp_mailbox_request(uint32_t call_id, uint32_t function, uint32_t size) {
    return (uint64_t)call_id << 32 | function << 16 | size << 7;
}
static inline uint32_t dp_mailbox_call_id(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint32_t dp_mailbox_function(uint64_t word) { return word >> 16 & 0xffff; }
static inline uint32_t dp_mailbox_size(uint64_t word) { return word >> 7 & 0x1ff; }

static inline uint64_t dp_mailbox_sizes(uint32_t generation, uint32_t slot, uint32_t capacity) {
    return (uint64_t)generation << 32 | slot << 22 | capacity;
}
static inline uint32_t dp_mailbox_generation(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint32_t dp_mailbox_slot(uint64_t word) { return word >> 22 & 0x3ff; }
static inline uint32_t dp_mailbox_capacity(uint64_t word) { return word & 0xfffff; }

static inline uint64_t dp_mailbox_reply(uint32_t call_id, int status, uint32_t size) {
    return (uint64_t)call_id << 32 | (uint64_t)(uint16_t)-status << 16 | size;
}
static inline int dp_mailbox_status(uint64_t word) { return -(int)(word >> 16 & 0xffff); }
static inline uint32_t dp_mailbox_result_size(uint64_t word) { return word & 0xffff; }

#endif
