/* Payloads and results in several pieces: random layouts against a byte-by-byte model, sizes, refusals. */
#include <stdlib.h>

#include "ends.h"
#include "served.h"

#define PIECES_MAX 24
#define ARENA (512 << 10)

/* A random layout in an arena. at[i] is the address of its i-th byte. */
typedef struct layout {
    dp_piece piece[PIECES_MAX];
    dp_pieces all;
    uint8_t *arena, **at;
    uint32_t size;
} layout;

static void layout_new(layout *y) {
    y->arena = malloc(ARENA);
    y->at = malloc(ARENA * sizeof *y->at);
}

static void layout_free(layout *y) {
    free(y->arena);
    free(y->at);
}

static void add(layout *y, size_t size, size_t count, ptrdiff_t stride, uint8_t *base) {
    y->piece[y->all.n++] = (dp_piece){base, size, count, stride};
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < size; k++)
            y->at[y->size++] = base + (ptrdiff_t)i * stride + k;
}

/* Pieces that do not overlap, in a random order of directions, of at most `limit` bytes. */
static void layout_random(layout *y, uint32_t limit) {
    static const size_t sizes[] = {1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 64, 100};
    uint8_t *free_from = y->arena;
    y->all = (dp_pieces){y->piece, 0};
    y->size = 0;
    for (size_t n = t_random() % (PIECES_MAX + 1); n; n--) {
        size_t size = t_random() % 4 ? sizes[t_random() % (sizeof sizes / sizeof *sizes)] : t_random() % 5000;
        size_t count = t_random() % 3 ? t_random() % 40 : 1, gap = t_random() % 2 ? t_random() % 64 : 0;
        size_t room = (size + gap) * count + size;
        if (size * count > limit - y->size || room > (size_t)(y->arena + ARENA - free_from))
            continue;
        if (!size || !count)
            add(y, size, count, (ptrdiff_t)gap, t_random() % 2 ? NULL : free_from);
        else if (t_random() % 4 == 0)
            add(y, size, count, -(ptrdiff_t)(size + gap), free_from + (size + gap) * (count - 1));
        else
            add(y, size, count, count == 1 ? 0 : (ptrdiff_t)(size + gap), free_from);
        free_from += room + t_random() % 9;
    }
}

/* One echo from `in` to `out`. The result may be smaller than the pieces of `out`. */
static void echo_once(served *s, layout *in, layout *out, bool in_one) {
    size_t size = 99, capacity = 99, bad;
    static uint8_t *expected;
    if (!expected)
        expected = malloc(ARENA);
    CHECK_EQ(dp_pieces_size(&in->all, &size, &bad), DP_PIECES_GOOD);
    CHECK_EQ(dp_pieces_size(&out->all, &capacity, &bad), DP_PIECES_GOOD);
    CHECK_EQ(size, in->size);
    CHECK_EQ(capacity, out->size);
    fill_pattern(in->arena, ARENA, (uint32_t)t_random());
    memset(out->arena, 0xee, ARENA);
    memset(expected, 0xee, ARENA);
    for (uint32_t i = 0; i < in->size && i < out->size; i++)
        expected[out->at[i] - out->arena] = *in->at[i];
    uint32_t got = 0, slot;
    dp_started started = DP_NOT_STARTED;
    int st;
    if (in_one) {
        st = dp_channel_call_pieces(s->ch, FN_ECHO, &in->all, in->size, &out->all, out->size, &got, 0, &started, &slot);
    } else {
        CHECK_OK(dp_channel_submit_pieces(s->ch, FN_ECHO, &in->all, in->size, out->size, 0, &slot));
        fill_pattern(in->arena, ARENA, 0); /* the payload is on its way */
        CHECK_OK(dp_channel_wait(s->ch, slot, 0));
        st = dp_channel_finish_pieces(s->ch, slot, &out->all, &got, &started);
    }
    CHECK_EQ(got, in->size);
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    if (in->size > out->size) {
        CHECK_STATUS(st, DP_RESULT_TOO_LARGE);
        memset(expected, 0xee, ARENA);
    } else {
        CHECK_OK(st);
    }
    CHECKF(!memcmp(expected, out->arena, ARENA), "%zu pieces of %u bytes to %zu of %u", in->all.n, in->size, out->all.n, out->size);
}

static void random_layouts(dp_wait_mode mode, uint32_t eager, long rounds) {
    served s;
    layout in, out;
    served_open(&s, true, mode, 3, eager, 256 << 10);
    layout_new(&in);
    layout_new(&out);
    for (long i = 0; i < rounds; i++) {
        static const uint32_t limits[] = {16, 24, 256, 4096, 200000};
        t_note("eager %u, round %ld", eager, i);
        uint32_t limit = limits[t_random() % 5];
        layout_random(&in, limit);
        layout_random(&out, t_random() % 2 ? limit : 200000);
        echo_once(&s, &in, &out, t_random() % 2);
        if (t_random() % 4 == 0) /* a contiguous call finds the same slots */
            served_echo(&s, (uint32_t)(t_random() % 6000), (uint32_t)i);
    }
    CHECK_EQ(dp_channel_free_slots(s.ch), 3);
    layout_free(&in);
    layout_free(&out);
    served_close(&s);
}

T_CASE(pieces_hot, "channel/pieces-random-hot", .seconds = 30, .verbs_seconds = 60) {
    random_layouts(DP_WAIT_HOT, 4096, t_pick(1500, 150));
}
T_CASE(pieces_warm, "channel/pieces-random-warm", .seconds = 30, .verbs_seconds = 60) {
    random_layouts(DP_WAIT_WARM, 256, t_pick(1500, 150));
}

/* Calls in flight together keep their payloads apart, also where they share the memory in which they are gathered. */
T_CASE(pieces_many, "channel/pieces-in-flight", .seconds = 20, .verbs_seconds = 60) {
    served s;
    uint32_t slot[8];
    static uint8_t data[8][3][21504], back[3 * 21504];
    served_open(&s, true, DP_WAIT_ADAPTIVE, 8, 16384, 1 << 20);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 8; i++) {
            fill_pattern(data[i], sizeof data[i], (uint32_t)(i + round));
            dp_piece p[3] = {{data[i][0], 21504, 1, 0}, {data[i][1], 1024, 21, 1024}, {data[i][2], 21504, 1, 0}};
            CHECK_OK(dp_channel_submit_pieces(s.ch, FN_ECHO, &(dp_pieces){p, 3}, sizeof data[i], sizeof back, 0, &slot[i]));
        }
        for (int i = 7; i >= 0; i--) {
            uint32_t got;
            dp_piece one = {back, sizeof back, 1, 0};
            CHECK_OK(dp_channel_wait(s.ch, slot[i], 0));
            CHECK_OK(dp_channel_finish_pieces(s.ch, slot[i], &(dp_pieces){&one, 1}, &got, NULL));
            CHECK_EQ(got, sizeof back);
            CHECK_PATTERN(back, sizeof back, (uint32_t)(i + round));
        }
    }
    served_close(&s);
}

T_CASE(pieces_wrong, "channel/pieces-refused") {
    served s;
    uint8_t byte[64] = {0};
    size_t size, bad = 9;
    dp_piece p[3] = {{byte, 8, 2, 8}, {byte, 8, 2, 7}, {byte, SIZE_MAX / 2, 3, PTRDIFF_MAX}};
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 2}, &size, &bad), DP_PIECES_STRIDE);
    CHECK_EQ(bad, 1);
    p[1].stride = -7;
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 2}, &size, &bad), DP_PIECES_STRIDE);
    p[1].stride = PTRDIFF_MIN;
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 2}, &size, &bad), DP_PIECES_GOOD);
    CHECK_EQ(size, 32);
    p[1].stride = -8;
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 3}, &size, &bad), DP_PIECES_GOOD);
    CHECK_EQ(size, SIZE_MAX); /* 2^64 and more */
    p[2] = (dp_piece){byte, SIZE_MAX - 30, 1, 0};
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 3}, &size, &bad), DP_PIECES_GOOD);
    CHECK_EQ(size, SIZE_MAX);
    p[0].base = NULL;
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 3}, &size, &bad), DP_PIECES_NULL);
    CHECK_EQ(bad, 0);
    p[0].count = 0;
    CHECK_EQ(dp_pieces_size(&(dp_pieces){p, 1}, &size, &bad), DP_PIECES_GOOD);
    CHECK_EQ(size, 0);

    uint32_t slot;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 1, 64, 4096);
    dp_piece large = {byte, 64, 1000, 64};
    CHECK_STATUS(dp_channel_submit_pieces(s.ch, FN_ECHO, &(dp_pieces){&large, 1}, 64000, 8, 0, &slot), DP_TOO_LARGE);
    CHECK_OK(dp_channel_submit_pieces(s.ch, FN_ECHO, &(dp_pieces){NULL, 0}, 0, 0, 0, &slot));
    CHECK_STATUS(dp_channel_submit_pieces(s.ch, FN_ECHO, &(dp_pieces){NULL, 0}, 0, 0, 0, &slot), DP_BUSY);
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_OK(dp_channel_finish_pieces(s.ch, slot, &(dp_pieces){NULL, 0}, NULL, NULL));
    /* A failed channel. */
    dp_piece word = {byte, 8, 1, 0};
    dp_channel_fail(s.ch, DP_CONNECTION);
    CHECK_STATUS(dp_channel_submit_pieces(s.ch, FN_ECHO, &(dp_pieces){&word, 1}, 8, 8, 0, &slot), DP_CONNECTION);
    served_close(&s);
}
