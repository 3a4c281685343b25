/* The invocation protocol as bytes. docs/PROTOCOL.md draws the same with rulers; static assertions here
 * and golden bytes in the tests bind the two. All integers are little endian.
 *
 * A slot is 64 bytes of header room followed by the payload, so payloads start on a cache line. A
 * header is placed so that it ENDS where the payload begins: header and payload are consecutive and one
 * write carries both.
 *
 *   slot + 0     24, 32 or 40      64                    64 + eager
 *        |  (note)  |   header     |  payload ...         |
 */
#ifndef RFAAS_DP_WIRE_H
#define RFAAS_DP_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rfaas needs a little-endian machine"
#endif

#define DP_WIRE_VERSION 1
#define DP_SLOT_ROOM 64 /* header room before each payload */

#define DP_DEPTH_MAX 1024
#define DP_EAGER_MAX (256u << 10)
#define DP_DEPTH_DEFAULT 8
#define DP_EAGER_DEFAULT (16u << 10)
#define DP_BULK_MAX (1ull << 32)
#define DP_BULK_DEFAULT (2ull << 20)
#define DP_BULK_MAX_DEFAULT (1ull << 30) /* of a payload in parts */
#define DP_PART_MAX (1u << 20) /* most bytes of one part; at most half of the bulk area */
#define DP_BULK_UNIT 64 /* bulk offsets are counted in these */

/* Immediate value, both directions: BARE in the highest bit, slot in the rest of the high half, low half of the call id
 * in the low half.
 *
 * A bare message is payload alone, and its size is what arrived. A bare request means the header that last came for
 * its slot, with this size, and the next call id that ends in the tag. A bare reply means DP_OK. */
#define DP_IMM_BARE 0x80000000u
#define DP_IMM_TAGS 0x10000u /* different tags: a call id further than that from the last header's needs a header */
static inline uint32_t dp_imm(uint32_t slot, uint32_t call_id) { return slot << 16 | (call_id & 0xffff); }
static inline uint32_t dp_imm_slot(uint32_t imm) { return imm >> 16 & 0x7fff; }
static inline uint32_t dp_imm_tag(uint32_t imm) { return imm & 0xffff; }
static inline bool dp_imm_bare(uint32_t imm) { return imm >> 31; }

/* Request flags. */
enum {
    DP_REQ_BULK_IN = 1,    /* the payload is in the worker's bulk area at in_offset, not in the slot */
    DP_REQ_BULK_OUT = 2,   /* the result goes to the client's bulk area at out_offset, not into the slot */
    DP_REQ_EXCLUSIVE = 4,  /* no other call of this channel is outstanding or unread */
    DP_REQ_BATCH = 8,      /* the client waits for several calls together: the worker may send this reply with the next one */
    DP_REQ_PLACED_IN = 16,  /* the payload is in memory that the client shares, at in_offset (shm) */
    DP_REQ_PLACED_OUT = 32, /* the result goes to memory that the client shares, at out_offset (shm) */
    DP_REQ_PART_IN = 64,    /* a part of a payload that is larger than the bulk area allows, at in_offset of the worker's bulk area */
    DP_REQ_PART_OUT = 128,  /* asks for a part of the result of the call in the slot, at out_offset of the client's bulk area */
    /* The payload is the channel blob of the client's other queue pair, and the result is the worker's. When the client has the result, the
     * worker has connected its second queue pair, which all further requests and replies take. No other request is in flight. */
    DP_REQ_MOVE = 256,
};
#define DP_REQ_PARTS (DP_REQ_PART_IN | DP_REQ_PART_OUT)
#define DP_REQ_BULK (DP_REQ_BULK_IN | DP_REQ_BULK_OUT)
#define DP_REQ_PLACED (DP_REQ_PLACED_IN | DP_REQ_PLACED_OUT)

/* Request header. The first 8 bytes travel only when a bulk flag is set (32-byte form); otherwise the
 * message starts at `generation` (24-byte form). With a placed flag, 8 more bytes are before it (40-byte form): the keys of the shared
 * memory of payload and result, 32 bits each. With a part flag, they are offset and size of the part, 32 bits each. */
typedef struct dp_request {
    uint32_t in_offset;  /* in DP_BULK_UNIT bytes */
    uint32_t out_offset; /* in DP_BULK_UNIT bytes */
    uint32_t generation; /* of the channel; another one is refused */
    uint32_t call_id;
    uint32_t size;     /* payload bytes */
    uint32_t capacity; /* result bytes that the caller accepts */
    uint16_t function; /* index into the worker's table */
    uint16_t flags;
    uint32_t then; /* of a chain: 1 + the index of its second function. 0: the request is not a chain */
} dp_request;

/* What a client calls: a function, or a chain, whose second function gets the result of the first as its payload. Either is a number of
 * 32 bits: the index of the (first) function, and in the high half what dp_request.then says. So the second one's index is below 65535. */
#define DP_CHAIN(first, second) ((uint32_t)(first) | ((uint32_t)(second) + 1) << 16)
#define DP_CHAIN_SECOND_MAX 0xfffeu
static inline bool dp_is_chain(uint32_t function) { return function >> 16; }
static inline uint32_t dp_chain_first(uint32_t function) { return function & 0xffff; }
static inline uint32_t dp_chain_second(uint32_t function) { return (function >> 16) - 1; }

#define DP_REQ_LONG 32
#define DP_REQ_SHORT 24
#define DP_REQ_KEYED 40

/* Reply header. It travels when the status is not DP_OK, and with a result too large for one message. */
typedef struct dp_reply {
    uint32_t generation;
    uint32_t call_id;
    int32_t status; /* a dp_status: DP_OK, or why there is no result */
    uint32_t size;  /* result bytes; with DP_RESULT_TOO_LARGE the bytes that the result has; with
                       DP_FUNCTION_FAILED the bytes of the function's message in the slot */
} dp_reply;

#define DP_REPLY_SIZE 16

/* The message of DP_FUNCTION_FAILED: the function's text without its NUL. If the function gave a code, or the call is a chain, a NUL and
 * the code's 4 bytes follow. In a chain, one more byte says which function failed. */
#define DP_FAILURE_TEXT 511 /* most bytes of the text */
#define DP_FAILURE_CODE 5   /* bytes of NUL and code */
#define DP_FAILURE_TAIL 6   /* most bytes behind the text */
enum { DP_CHAIN_NONE, DP_CHAIN_FIRST, DP_CHAIN_SECOND }; /* which function of a chain; NONE: the call is not a chain */

/* Appends code and `which` to a text of `size` bytes. message has room for DP_FAILURE_TAIL more bytes than the text. Returns the bytes of
 * the message, at most `room`. The text is cut if all of it does not fit. */
static inline uint32_t dp_failure_message(char *message, uint32_t size, int32_t code, uint8_t which, uint32_t room) {
    uint32_t extra = which ? DP_FAILURE_TAIL : code ? DP_FAILURE_CODE : 0;
    if (size > room - extra)
        size = room - extra;
    if (extra) {
        message[size] = 0;
        __builtin_memcpy(message + size + 1, &code, sizeof code);
    }
    if (which)
        message[size + DP_FAILURE_CODE] = (char)which;
    return size + extra;
}

/* Returns the code of a message, 0 if it has none. Sets *size to the bytes of the text, and *which to DP_CHAIN_*. The message may contain
 * any bytes. */
static inline int32_t dp_failure_code(const void *message, uint32_t *size, uint8_t *which) {
    const uint8_t *nul = *size ? (const uint8_t *)__builtin_memchr(message, 0, *size) : NULL;
    uint32_t text = nul ? (uint32_t)(nul - (const uint8_t *)message) : *size, tail = *size - text;
    int32_t code = 0;
    *which = DP_CHAIN_NONE;
    if (tail == DP_FAILURE_CODE || tail == DP_FAILURE_TAIL)
        __builtin_memcpy(&code, nul + 1, sizeof code);
    if (tail == DP_FAILURE_TAIL)
        *which = nul[DP_FAILURE_CODE] == DP_CHAIN_FIRST ? DP_CHAIN_FIRST : DP_CHAIN_SECOND;
    *size = text;
    return code;
}

/* The word at the beginning of a slot of the client: the call id of the chain whose first function has returned last. The client reads it
 * to name the function that still runs when a deadline has passed. */
#define DP_SLOT_NOTE 4

_Static_assert(sizeof(dp_request) == DP_REQ_LONG, "request header");
_Static_assert(offsetof(dp_request, generation) == DP_REQ_LONG - DP_REQ_SHORT, "short form is the tail");
_Static_assert(offsetof(dp_request, call_id) == 12 && offsetof(dp_request, size) == 16 &&
                   offsetof(dp_request, capacity) == 20 && offsetof(dp_request, function) == 24 &&
                   offsetof(dp_request, flags) == 26 && offsetof(dp_request, then) == 28,
               "request header layout");
_Static_assert(sizeof(dp_reply) == DP_REPLY_SIZE && offsetof(dp_reply, call_id) == 4 &&
                   offsetof(dp_reply, status) == 8 && offsetof(dp_reply, size) == 12,
               "reply header layout");

/* ---- headers as words ----
 *
 * Headers are made, moved and read in 8-byte words: a load that is wider than the store before it cannot be served
 * from the store buffer and waits for it, which costs more than the rest of the work on a header. */

static inline uint64_t dp_two(uint32_t low, uint32_t high) { return low | (uint64_t)high << 32; }

/* n (0 .. 63) bytes in words, never wider; no call. */
static inline void dp_copy_small(void *dst, const void *src, uint32_t n) {
    uint8_t *d = dst;
    const uint8_t *s = src;
    uint64_t t;
#define DP_COPY_WORD                                                                                                   \
    __builtin_memcpy(&t, s, 8);                                                                                        \
    __asm__("" : "+r"(t)); /* keeps the compiler from joining words to vectors */                                      \
    __builtin_memcpy(d, &t, 8);                                                                                        \
    s += 8;                                                                                                            \
    d += 8;
    if (n & 32) {
        DP_COPY_WORD DP_COPY_WORD DP_COPY_WORD DP_COPY_WORD
    }
    if (n & 16) {
        DP_COPY_WORD DP_COPY_WORD
    }
    if (n & 8) {
        DP_COPY_WORD
    }
#undef DP_COPY_WORD
    if (n & 7) {
        if (n & 4) {
            __builtin_memcpy(d, s, 4);
            s += 4;
            d += 4;
        }
        if (n & 2) {
            __builtin_memcpy(d, s, 2);
            s += 2;
            d += 2;
        }
        if (n & 1)
            *d = *s;
    }
}

/* Makes a request header of four words. */
static inline void dp_request_pack(uint64_t w[4], const dp_request *h) {
    w[0] = dp_two(h->in_offset, h->out_offset);
    w[1] = dp_two(h->generation, h->call_id);
    w[2] = dp_two(h->size, h->capacity);
    w[3] = dp_two(h->function | (uint32_t)h->flags << 16, h->then);
}

/* Reads each word of a header in shared memory once. */
static inline dp_request dp_request_load(const void *at) {
    const volatile uint64_t *p = (const volatile uint64_t *)at;
    uint64_t a = p[0], b = p[1], c = p[2], d = p[3];
    return (dp_request){(uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b,  (uint32_t)(b >> 32),
                        (uint32_t)c, (uint32_t)(c >> 32), (uint16_t)d, (uint16_t)(d >> 16), (uint32_t)(d >> 32)};
}

static inline void dp_reply_pack(uint64_t w[2], const dp_reply *h) {
    w[0] = dp_two(h->generation, h->call_id);
    w[1] = dp_two((uint32_t)h->status, h->size);
}

static inline dp_reply dp_reply_load(const void *at) {
    const volatile uint64_t *p = (const volatile uint64_t *)at;
    uint64_t a = p[0], b = p[1];
    return (dp_reply){(uint32_t)a, (uint32_t)(a >> 32), (int32_t)b, (uint32_t)(b >> 32)};
}

/* Channel blob: what one side tells the other, carried opaquely by the control plane. */
#define DP_CHANNEL_MAGIC 0x48434652u /* "RFCH" */
#define DP_CHANNEL_BLOB_MAX 256
/* BROKER: a client whose connection passes through its agent at first. The worker prepares a second queue pair, for DP_REQ_MOVE. */
enum { DP_ROLE_CLIENT = 1, DP_ROLE_WORKER = 2, DP_ROLE_BROKER = 3 };

typedef struct dp_channel_blob {
    uint32_t magic;
    uint16_t version;  /* DP_WIRE_VERSION */
    uint8_t role;      /* DP_ROLE_* */
    uint8_t provider;  /* dp_provider_id */
    uint32_t generation; /* client's choice, never 0; the worker repeats it */
    uint16_t depth;    /* slots, 1..DP_DEPTH_MAX */
    uint16_t qp_len;   /* bytes of the queue-pair blob that follows */
    uint32_t eager;    /* payload bytes per slot, multiple of 64 */
    uint32_t slots_rkey;
    uint64_t slots_addr; /* first slot in the sender's memory */
    uint64_t bulk;       /* bytes of the bulk area, multiple of 64; may be 0 */
    uint64_t bulk_addr;
    uint32_t bulk_rkey;
    uint32_t crc; /* CRC32C of the whole blob with this field 0 */
} dp_channel_blob; /* queue-pair blob follows */

_Static_assert(sizeof(dp_channel_blob) == 56, "channel blob");
_Static_assert(offsetof(dp_channel_blob, slots_addr) == 24 && offsetof(dp_channel_blob, bulk) == 32 &&
                   offsetof(dp_channel_blob, bulk_rkey) == 48 && offsetof(dp_channel_blob, crc) == 52,
               "channel blob layout");

/* CRC32C (Castagnoli), bit-reflected, initial and final inversion. */
uint32_t dp_crc32c(const void *data, size_t len);

/* The generation after this one, for the next lease on a channel. Both sides compute it, so that a claim needs no message. It is never 0, and
 * repeats after 2^32 - 1 leases. */
static inline uint32_t dp_generation_after(uint32_t generation) {
    uint32_t next = generation * 1664525u + 1013904223u;
    return next ? next : 1013904223u;
}

#endif
