/* The bytes of docs/PROTOCOL.md. internal/conventions compares the strings below with the document, so neither can change
 * alone. */
#include <stdlib.h>

#include "dp_layout.h"
#include "dp_verbs.h"
#include "worker/message.h"
#include "harness.h"

static const char golden_request_short[] = "4d 3c 2b 1a 02 00 01 00 40 00 00 00 00 01 00 00 "
                                           "03 00 04 00 00 00 00 00";
static const char golden_request_keyed[] = "5d 5c 5b 5a 04 03 02 01 10 00 00 00 20 00 00 00 "
                                           "4d 3c 2b 1a 04 00 01 00 00 00 10 00 00 00 20 00 "
                                           "03 00 30 00 00 00 00 00";
static const char golden_request_long[] = "10 00 00 00 20 00 00 00 4d 3c 2b 1a 03 00 01 00 "
                                          "00 00 10 00 00 00 20 00 03 00 03 00 00 00 00 00";
static const char golden_request_chain[] = "4d 3c 2b 1a 02 00 01 00 40 00 00 00 00 01 00 00 "
                                           "03 00 04 00 06 00 00 00";
static const char golden_reply[] = "4d 3c 2b 1a 02 00 01 00 00 00 00 00 40 00 00 00";
static const char golden_reply_too_large[] = "4d 3c 2b 1a 03 00 01 00 6f fe ff ff 00 00 30 00";
static const char golden_reply_failed[] = "4d 3c 2b 1a 04 00 01 00 70 fe ff ff 07 00 00 00 6e 6f 00 d6 ff ff ff";
static const char golden_reply_chain[] = "4d 3c 2b 1a 04 00 01 00 70 fe ff ff 08 00 00 00 6e 6f 00 d6 ff ff ff 01";
static const char golden_mailbox_large[] = "d1 07 03 00 02 00 01 00";
static const char golden_mailbox_small[] = "00 64 03 00 02 00 01 00";
static const char golden_mailbox_sizes[] = "00 08 40 01 4d 3c 2b 1a";
static const char golden_mailbox_reply[] = "e8 03 00 00 02 00 01 00";
static const char golden_channel_blob[] = "52 46 43 48 01 00 01 01 4d 3c 2b 1a 08 00 04 00 "
                                          "00 40 00 00 11 00 00 00 40 33 22 11 00 7f 00 00 "
                                          "00 00 20 00 00 00 00 00 40 35 24 11 00 7f 00 00 "
                                          "11 00 00 00 e9 ac 27 58 01 02 03 04";
static const char golden_verbs_blob[] = "52 46 51 50 01 00 02 02 23 01 00 00 ef cd ab 00 "
                                        "00 00 00 00 00 00 00 00 00 00 ff ff 0a 4d 00 02 "
                                        "00 00 03 01 02 10 ff ff 7a 72 c9 a3";
static const char golden_message_stop[] = "52 46 57 4b 01 00 07 00 07 00 00 00 00 00 00 00";

static size_t unhex(const char *text, uint8_t *out, size_t room) {
    size_t n = 0;
    for (char *end; *text && n < room; text = end) {
        out[n++] = (uint8_t)strtoul(text, &end, 16);
        if (*end == ' ')
            end++;
    }
    return n;
}

/* Checks that the `len` bytes of got are exactly these. */
static void check_golden(const char *text, const void *got, size_t len) {
    uint8_t want[DP_CHANNEL_BLOB_MAX];
    CHECK_EQ(unhex(text, want, sizeof want), len);
    CHECK_SAME(got, want, len);
}

T_CASE(wire_request, "wire/request") {
    dp_request s = {.generation = 0x1a2b3c4d, .call_id = 0x00010002, .size = 64, .capacity = 256, .function = 3,
                    .flags = DP_REQ_EXCLUSIVE};
    check_golden(golden_request_short, (const uint8_t *)&s + DP_REQ_LONG - DP_REQ_SHORT, DP_REQ_SHORT);
    s.then = DP_CHAIN(3, 5) >> 16;
    check_golden(golden_request_chain, (const uint8_t *)&s + DP_REQ_LONG - DP_REQ_SHORT, DP_REQ_SHORT);
    dp_request l = {.in_offset = 16, .out_offset = 32, .generation = 0x1a2b3c4d, .call_id = 0x00010003,
                    .size = 1 << 20, .capacity = 2 << 20, .function = 3, .flags = DP_REQ_BULK_IN | DP_REQ_BULK_OUT};
    check_golden(golden_request_long, &l, DP_REQ_LONG);
    dp_request k = {.in_offset = 16, .out_offset = 32, .generation = 0x1a2b3c4d, .call_id = 0x00010004,
                    .size = 1 << 20, .capacity = 2 << 20, .function = 3, .flags = DP_REQ_PLACED};
    uint64_t words[DP_REQ_KEYED / 8] = {dp_two(0x5a5b5c5d, 0x01020304)};
    dp_request_pack(words + 1, &k);
    check_golden(golden_request_keyed, words, DP_REQ_KEYED);
}

T_CASE(wire_reply, "wire/reply") {
    dp_reply ok = {.generation = 0x1a2b3c4d, .call_id = 0x00010002, .status = DP_OK, .size = 64};
    check_golden(golden_reply, &ok, DP_REPLY_SIZE);
    dp_reply big = {.generation = 0x1a2b3c4d, .call_id = 0x00010003, .status = DP_RESULT_TOO_LARGE, .size = 3 << 20};
    check_golden(golden_reply_too_large, &big, DP_REPLY_SIZE);
    struct {
        dp_reply head;
        char message[2 + DP_FAILURE_TAIL];
    } failed = {{.generation = 0x1a2b3c4d, .call_id = 0x00010004, .status = DP_FUNCTION_FAILED}, "no"};
    failed.head.size = dp_failure_message(failed.message, 2, -42, DP_CHAIN_NONE, DP_EAGER_MAX);
    check_golden(golden_reply_failed, &failed, DP_REPLY_SIZE + failed.head.size);
    failed.head.size = dp_failure_message(failed.message, 2, -42, DP_CHAIN_FIRST, DP_EAGER_MAX);
    check_golden(golden_reply_chain, &failed, DP_REPLY_SIZE + failed.head.size);
}

T_CASE(wire_mailbox, "wire/mailbox") {
    uint64_t word = dp_mailbox_request(0x00010002, 3, 1000, true);
    check_golden(golden_mailbox_large, &word, sizeof word);
    for (uint32_t size = 0; size <= DP_MAILBOX_IN_SLOT; size++) {
        word = dp_mailbox_request(0xfffefdfc, 0xfbfa, size, true);
        CHECK(dp_mailbox_large(word));
        CHECK_EQ(dp_mailbox_size(word), size);
        CHECK_EQ(dp_mailbox_call_id(word), 0xfffefdfc);
        CHECK_EQ(dp_mailbox_function(word), 0xfbfa);
    }
    word = dp_mailbox_request(0x00010002, 3, 200, false);
    check_golden(golden_mailbox_small, &word, sizeof word);
    for (uint32_t size = 0; size <= DP_MAILBOX_SMALL; size++) {
        word = dp_mailbox_request(0xfffefdfc, 0xfbfa, size, false);
        CHECK(!dp_mailbox_large(word));
        CHECK_EQ(dp_mailbox_size(word), size);
    }
    word = dp_mailbox_sizes(0x1a2b3c4d, 5, 2048);
    check_golden(golden_mailbox_sizes, &word, sizeof word);
    word = dp_mailbox_reply(0x00010002, DP_OK, 1000);
    check_golden(golden_mailbox_reply, &word, sizeof word);
}

/* A worker may send anything as the message of a failed function. */
T_CASE(wire_failure, "wire/failure") {
    char message[64 + DP_FAILURE_TAIL];
    uint32_t size;
    uint8_t which;
    for (uint8_t w = DP_CHAIN_NONE; w <= DP_CHAIN_SECOND; w++)
        for (uint32_t tail = w ? DP_FAILURE_TAIL : DP_FAILURE_CODE, room = tail; room <= 64; room++) {
            memset(message, 'x', sizeof message);
            size = dp_failure_message(message, 64, INT32_MIN, w, room);
            CHECK_EQ(size, room);
            CHECK_EQ(dp_failure_code(message, &size, &which), INT32_MIN);
            CHECK_EQ(size, room - tail);
            CHECK_EQ(which, w);
        }
    memset(message, 'x', sizeof message);
    size = dp_failure_message(message, 64, 0, DP_CHAIN_NONE, 64);
    CHECK_EQ(size, 64u);
    CHECK_EQ(dp_failure_code(message, &size, &which), 0);
    CHECK_EQ(size, 64u);
    /* A NUL that anything but a code, or a code and a function, follows ends the text. */
    for (uint32_t behind = 0; behind < 8; behind++) {
        message[10] = 0;
        size = 11 + behind;
        CHECK_EQ(dp_failure_code(message, &size, &which) == 0, behind != 4 && behind != 5);
        CHECK_EQ(which, behind == 5 ? DP_CHAIN_SECOND : DP_CHAIN_NONE);
        CHECK_EQ(size, 10u);
    }
    size = 0;
    CHECK_EQ(dp_failure_code(NULL, &size, &which), 0);
}

T_CASE(wire_immediate, "wire/immediate") {
    CHECK_EQ(dp_imm(5, 0x00010002), 0x00050002u);
    CHECK_EQ(dp_imm_slot(0x00050002), 5u);
    CHECK_EQ(dp_imm_tag(0x00050002), 2u);
    CHECK_EQ(dp_imm(DP_DEPTH_MAX - 1, 0xffffffff), 0x03ffffffu);
    CHECK(!dp_imm_bare(0x7fffffff));
    CHECK(dp_imm_bare(0x80050002));
    CHECK_EQ(dp_imm_slot(0x80050002), 5u);
}

T_CASE(wire_layout, "wire/layout") {
    dp_layout l;
    dp_layout_set(&l, 8, 16384, 2 << 20);
    CHECK_EQ(dp_slot_payload(&l, 0), 64u);
    CHECK_EQ(dp_slot_payload(&l, 1), 16512u);
    CHECK_EQ(l.bulk_at, 131584u);
    CHECK_EQ(dp_bulk_at(&l, 2), 131584u + 128);
    CHECK_EQ(l.mailbox_at, 131584u + (2 << 20));
    CHECK_EQ(l.size, l.mailbox_at + 704);
    CHECK_EQ(dp_layout_large(&l), l.mailbox_at + 4928);
}

T_CASE(wire_crc, "wire/crc32c") {
    CHECK_EQ(dp_crc32c("123456789", 9), 0xe3069283u);
    CHECK_EQ(dp_crc32c("", 0), 0u);
}

/* The blob of the document: read as its fields, and refused with any byte changed. */
T_CASE(wire_channel_blob, "wire/channel-blob") {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = (uint32_t)unhex(golden_channel_blob, blob, sizeof blob);
    CHECK_EQ(len, sizeof(dp_channel_blob) + 4);

    dp_channel_blob b = {.magic = DP_CHANNEL_MAGIC, .version = DP_WIRE_VERSION, .role = DP_ROLE_CLIENT,
                         .provider = DP_PROVIDER_SHM, .generation = 0x1a2b3c4d, .depth = 8, .qp_len = 4,
                         .eager = 16384, .slots_rkey = 0x11, .slots_addr = 0x7f0011223340, .bulk = 2 << 20,
                         .bulk_addr = 0x7f0011243540, .bulk_rkey = 0x11};
    uint8_t made[sizeof b + 4];
    memcpy(made, &b, sizeof b);
    memcpy(made + sizeof b, "\1\2\3\4", 4);
    b.crc = dp_crc32c(made, sizeof made);
    memcpy(made, &b, sizeof b);
    check_golden(golden_channel_blob, made, sizeof made);

    dp_error err;
    dp_side side;
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_CLIENT, DP_PROVIDER_SHM, &side, &err), err);
    CHECK_EQ(side.generation, 0x1a2b3c4du);
    CHECK_EQ(side.layout.depth, 8u);
    CHECK_EQ(side.layout.eager, 16384u);
    CHECK_EQ(side.layout.bulk, 2u << 20);
    CHECK_EQ(side.addr, 0x7f0011223340u);
    CHECK_EQ(side.rkey, 0x11u);
    CHECK_EQ(side.qp_len, 4u);
    CHECK_SAME(side.qp_blob, "\1\2\3\4", 4);

    for (uint32_t i = 0; i < len; i++) {
        t_note("byte %u changed", i);
        blob[i] ^= 0x10;
        CHECK_REFUSED(dp_side_decode(blob, len, DP_ROLE_CLIENT, DP_PROVIDER_SHM, &side, &err), DP_BAD_BLOB, err);
        blob[i] ^= 0x10;
    }
    for (uint32_t cut = 0; cut < len; cut++) {
        t_note("cut to %u bytes", cut);
        CHECK_REFUSED(dp_side_decode(blob, cut, DP_ROLE_CLIENT, DP_PROVIDER_SHM, &side, &err), DP_BAD_BLOB, err);
    }
    t_note("another role, another provider");
    CHECK_REFUSED(dp_side_decode(blob, len, DP_ROLE_WORKER, DP_PROVIDER_SHM, &side, &err), DP_BAD_BLOB, err);
    CHECK_REFUSED(dp_side_decode(blob, len, DP_ROLE_CLIENT, DP_PROVIDER_VERBS, &side, &err), DP_BAD_BLOB, err);
}

T_CASE(wire_verbs_blob, "wire/verbs-blob") {
    dpv_blob b = {.qpn = 0x123, .psn = 0xabcdef, .pkey = 0xffff, .link_layer = IBV_LINK_LAYER_ETHERNET,
                  .mtu = IBV_MTU_1024, .gid_type = IBV_GID_TYPE_ROCE_V2, .rd_atomic = 16, .grh = true,
                  .gid = {.raw = {[10] = 0xff, 0xff, 10, 77, 0, 2}}};
    uint8_t made[DP_BLOB_MAX];
    check_golden(golden_verbs_blob, made, dpv_blob_encode(&b, made));
    dp_error err;
    dpv_blob back;
    CHECK_OK_ERR(dpv_blob_decode(made, 44, &back, &err), err);
    CHECK_EQ(back.psn, 0xabcdefu);
}

T_CASE(wire_message, "wire/worker-message") {
    dp_msg_head h = {.magic = DP_MSG_MAGIC, .version = DP_WIRE_VERSION, .type = DP_MSG_STOP, .id = 7};
    check_golden(golden_message_stop, &h, sizeof h);
}
