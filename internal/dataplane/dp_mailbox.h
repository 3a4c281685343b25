/* The mailbox: the form of a call between processes that share memory when nothing else is under way on their channel. Request and
 * reply pass through no queue. A call with a payload and a capacity of at most 64 bytes has the small form, others the large form. Only a
 * worker whose region ends behind the large form serves it. Earlier workers and clients know the small form, up to 256 bytes.
 * In the large form, a payload of more than 4096 bytes is in the worker's slot. A worker takes such payloads if its region has 64 bytes more.
 *
 *     0           8            16          32           40              64
 *     | request   | sizes      | payload   | reply      | result        |   first line, in the worker's memory
 *       published                            published
 *     64    ... 320    payload of 17 to 64 bytes (in the small form, to 256)
 *     384   reply, if the capacity is 25 to 64 bytes (in the small form, or more)
 *     448   ... 704    its result
 *     768   ... 4864   large form: payload of more than 64 bytes
 *
 * If the capacity is more than 64 bytes, the large form has its result in the client's slot, and its reply in the client's memory, 640 bytes
 * behind the place at which the worker has its mailbox.
 *
 *   request  call id (32 bits) | function (16) | small: payload bytes (9) | 0 (7)
 *                                                large: payload bytes (15) | 1
 *   sizes    generation (32)   | slot (10)     | 0 (2) | capacity (20)
 *   reply    call id (32)      | minus status (16) | result bytes (16)
 *
 * The first field stands in the high bits. Each side writes its words, then publishes its first one by a release store; the other spins on
 * that word. Both check what they read as they do headers. Processors fetch lines in aligned pairs, so a word and up to 64 bytes that it
 * announces share a pair, and what one side writes while the other spins on a word does not. More data has pairs of its own: an early look
 * at the word would take its first line from the side that still writes the rest. A result that does not
 * fit, and a function's failure message, go to the slot by way of the queue pair; the client looks at both.
 * The client starts no second call in the mailbox before the first has ended, in whatever way.
 */
#ifndef RFAAS_DP_MAILBOX_H
#define RFAAS_DP_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DP_MAILBOX_PAIR 64      /* bytes that share a pair of lines with the word that announces them */
#define DP_MAILBOX_SMALL 256    /* bytes of payload, and of result, in the small form */
#define DP_MAILBOX_LARGE 4096   /* bytes of payload in the mailbox in the large form; larger payloads are in the slot */
#define DP_MAILBOX_IN_SLOT 0x7fff /* most bytes of a payload in the slot, if a slot has as many */
#define DP_MAILBOX_RESULT_MAX UINT16_MAX /* bytes of result in the large form; the slot may have room for more */
#define DP_MAILBOX_PAYLOAD 16   /* of them in the line */
#define DP_MAILBOX_RESULT 24

/* The small form. */
typedef struct dp_mailbox {
    uint64_t request;
    uint64_t sizes;
    uint64_t payload[2];
    uint64_t reply;
    uint64_t result[3];
    uint8_t more_payload[DP_MAILBOX_SMALL];
    uint8_t gap[64];
    uint64_t long_reply;
    uint8_t pad[56];
    uint8_t more_result[DP_MAILBOX_SMALL];
} dp_mailbox;
#define DP_MAILBOX_ALIGN 128
#define DP_MAILBOX_REPLY_AT 640    /* offset, from where the client's region could have a mailbox, of the word that announces a result in a slot */
#define DP_MAILBOX_LARGE_AT 768    /* offset of the large form's payload */
#define DP_MAILBOX_LARGE_SIZE 4864 /* bytes of the mailbox with the large form */
#define DP_MAILBOX_SLOTS_SIZE 4928 /* the same for a worker that takes larger payloads in its slots */
_Static_assert(offsetof(dp_mailbox, reply) == 32 && offsetof(dp_mailbox, more_payload) == 64 &&
                   offsetof(dp_mailbox, long_reply) == 384 && offsetof(dp_mailbox, more_result) == 448 &&
                   sizeof(dp_mailbox) == 704,
               "mailbox layout");
_Static_assert(DP_MAILBOX_REPLY_AT % DP_MAILBOX_ALIGN == 0 && DP_MAILBOX_REPLY_AT + 8 <= sizeof(dp_mailbox), "the word is in the client's region");
_Static_assert(DP_MAILBOX_LARGE_SIZE == DP_MAILBOX_LARGE_AT + DP_MAILBOX_LARGE && DP_MAILBOX_LARGE_AT % DP_MAILBOX_ALIGN == 0, "layout of the large form");

/* Returns where a payload is that does not fit into the line. slot: the place for a payload in the call's slot. */
static inline uint8_t *dp_mailbox_payload(dp_mailbox *m, uint32_t size, bool large, uint8_t *slot) {
    return size <= DP_MAILBOX_PAIR || !large ? m->more_payload : size <= DP_MAILBOX_LARGE ? (uint8_t *)m + DP_MAILBOX_LARGE_AT : slot;
}
/* Reports whether a worker that serves both forms gets the large one. */
static inline bool dp_mailbox_wants_large(uint32_t size, uint32_t capacity) { return size > DP_MAILBOX_PAIR || capacity > DP_MAILBOX_PAIR; }
/* Returns the most bytes of a payload. eager: the size of a slot if the worker takes payloads there, otherwise 0. */
static inline uint32_t dp_mailbox_most(bool large, uint32_t eager) {
    uint32_t slot = eager < DP_MAILBOX_IN_SLOT ? eager : DP_MAILBOX_IN_SLOT;
    return !large ? DP_MAILBOX_SMALL : slot > DP_MAILBOX_LARGE ? slot : DP_MAILBOX_LARGE;
}

/* Returns value, and keeps it in *last. If both were equal, the result depends on *last alone. The processor predicts the comparison, so
 * whatever is computed from the result, such as the addresses of a copy, does not wait for the line that the value is in. Between
 * far cores, calls of 256 and 512 bytes took 1.37 and 1.31 of their floors without it, and take 1.12 to 1.15 and 1.05 to 1.13 in three
 * quiet runs (RATIONALE.md, benchmarks/README.md). */
static inline uint64_t dp_mailbox_predict(uint64_t value, uint64_t *last) {
    uint64_t guess = *last;
    if (__builtin_expect(value == guess, 1)) {
        __asm__ volatile("" : "+r"(guess)); /* the compiler knows no longer that both are equal */
        return guess;
    }
    return *last = value;
}

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

static inline uint64_t dp_mailbox_request(uint32_t call_id, uint32_t function, uint32_t size, bool large) {
    return (uint64_t)call_id << 32 | function << 16 | (large ? size << 1 | 1 : size << 7);
}
static inline uint32_t dp_mailbox_call_id(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint32_t dp_mailbox_function(uint64_t word) { return word >> 16 & 0xffff; }
static inline bool dp_mailbox_large(uint64_t word) { return word & 1; }
static inline uint32_t dp_mailbox_size(uint64_t word) { return dp_mailbox_large(word) ? word >> 1 & 0x7fff : word >> 7 & 0x1ff; }

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
