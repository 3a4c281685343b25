// SHA-256 (FIPS 180-4) of sixteen messages of the same size at a time. Each 32-bit lane of a vector belongs to one message.

#include "lanes.h"

#include <immintrin.h>
#include <string.h>

#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 64, WORDS = 16, ROUNDS = 64, STATE = 8 };

typedef __m512i vec;

static const uint32_t constants[ROUNDS] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74,
    0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d,
    0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e,
    0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5,
    0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t initial[STATE] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// Immediate operands of the ternary logic instruction.
enum { XOR3 = 0x96, CHOOSE = 0xca, MAJORITY = 0xe8 };

AVX512 INLINE vec add(vec a, vec b) { return _mm512_add_epi32(a, b); }

#define ROTATIONS(x, a, b, c) _mm512_ternarylogic_epi32(_mm512_ror_epi32(x, a), _mm512_ror_epi32(x, b), _mm512_ror_epi32(x, c), XOR3)
#define SCHEDULE(x, a, b, c) _mm512_ternarylogic_epi32(_mm512_ror_epi32(x, a), _mm512_ror_epi32(x, b), _mm512_srli_epi32(x, c), XOR3)

// load reads a block of each message. It transposes the words, so that w[i] has word i of all messages.
AVX512 INLINE void load(vec w[WORDS], const uint8_t *const from[LANES], size_t at) {
    const vec swap = _mm512_set4_epi32(0x0c0d0e0f, 0x08090a0b, 0x04050607, 0x00010203);
    vec a[LANES], b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        a[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(from[i] + at), swap);
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vec even = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), odd = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        vec even2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88), odd2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        w[i] = _mm512_shuffle_i32x4(even, even2, 0x88);
        w[i + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        w[i + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        w[i + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
}

// compress adds a block to the states. Instead of moving a to b, b to c and so on after each round, it renames them.
AVX512 INLINE void compress(vec state[STATE], vec w[WORDS]) {
    vec s[STATE];
    memcpy(s, state, sizeof s);
#pragma GCC unroll 64
    for (int r = 0; r < ROUNDS; r++) {
        vec *x = &w[r % WORDS], *h = &s[(71 - r) % STATE];
        if (r >= WORDS) {
            vec y = w[(r + 1) % WORDS], z = w[(r + 14) % WORDS];
            *x = add(add(*x, w[(r + 9) % WORDS]), add(SCHEDULE(y, 7, 18, 3), SCHEDULE(z, 17, 19, 10)));
        }
        vec a = s[(64 - r) % STATE], b = s[(65 - r) % STATE], c = s[(66 - r) % STATE];
        vec e = s[(68 - r) % STATE], f = s[(69 - r) % STATE], g = s[(70 - r) % STATE];
        vec input = add(*h, add(*x, _mm512_set1_epi32((int)constants[r])));
        vec t = add(input, add(ROTATIONS(e, 6, 11, 25), _mm512_ternarylogic_epi32(e, f, g, CHOOSE)));
        s[(67 - r) % STATE] = add(s[(67 - r) % STATE], t);
        *h = add(t, add(ROTATIONS(a, 2, 13, 22), _mm512_ternarylogic_epi32(a, b, c, MAJORITY)));
    }
#pragma GCC unroll 8
    for (int i = 0; i < STATE; i++)
        state[i] = add(state[i], s[i]);
}

AVX512 static void sixteen(uint32_t state[STATE][LANES], const uint8_t *const from[LANES], size_t size) {
    vec s[STATE], w[WORDS];
    for (int i = 0; i < STATE; i++)
        s[i] = _mm512_set1_epi32((int)initial[i]);
    for (size_t at = 0; at < size; at += BLOCK) {
        load(w, from, at);
        compress(s, w);
    }
    for (int i = 0; i < WORDS; i++)
        w[i] = _mm512_setzero_si512();
    w[0] = _mm512_set1_epi32((int)0x80000000); // the padding: one bit, zeros, and the number of bits
    w[14] = _mm512_set1_epi32((int)(size >> 29));
    w[15] = _mm512_set1_epi32((int)(uint32_t)(size << 3));
    compress(s, w);
    for (int i = 0; i < STATE; i++)
        _mm512_storeu_si512(state[i], s[i]);
}

void leafsum_lanes(uint8_t *out, const uint8_t *data, size_t n, size_t size) {
    for (size_t leaf = 0; leaf < n; leaf += LANES) {
        const uint8_t *from[LANES];
        uint32_t state[STATE][LANES];
        for (size_t i = 0; i < LANES; i++) // lanes beyond the last leaf hash it once more
            from[i] = data + (leaf + i < n ? leaf + i : n - 1) * size;
        sixteen(state, from, size);
        for (size_t i = 0; i < LANES && leaf + i < n; i++) {
            for (int k = 0; k < STATE; k++) {
                uint32_t word = __builtin_bswap32(state[k][i]);
                memcpy(out + (leaf + i) * sizeof word * STATE + (size_t)k * sizeof word, &word, sizeof word);
            }
        }
    }
}
