/* Matrices as they lie in a weight file -> as the kernels read them, copied once and by all threads. */
#include "native.h"

#include <string.h>

#define BLOCK 16

/* 16 vectors of 16 numbers of 4 bytes, transposed. */
INLINE void transposed(__m512i r[16]) {
    __m512i s[16];
    for (int i = 0; i < 8; i++) {
        s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* r[4 q + i] holds column i of each lane, of rows 4 q ... 4 q + 3 */
        s[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        s[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        s[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        s[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(s[i], s[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(s[4 + i], s[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(s[i], s[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(s[4 + i], s[12 + i], 0xdd);
    }
}

/* w: rows (N), depth (K), padded depth, in: slot, offset, out: slot, offset. Threads divide the panels of 64 rows.
   i8 [N, K] -> [N / 64][padded / 4][64][4] of w + 128; what pads is 0. */
AVX void run_pack8(const Run *run, const int64_t *w) {
    int64_t rows = w[0], depth = w[1], padded = w[2], from, to;
    const int8_t *in = (const int8_t *)operand(run, w + 3);
    uint8_t *out = (uint8_t *)operand(run, w + 5);
    __m512i flip = _mm512_set1_epi8((char)0x80);
    share(run, (rows + 4 * BLOCK - 1) / (4 * BLOCK), &from, &to);
    for (int64_t b = 4 * from; b < 4 * to; b++)
        for (int64_t k = 0; k < padded; k += 64) {
            __m512i r[16];
            __mmask64 m = depth - k >= 64 ? ~0ull : depth <= k ? 0 : (1ull << (depth - k)) - 1;
            for (int i = 0; i < BLOCK; i++) {
                int64_t row = b * BLOCK + i;
                r[i] = row < rows && m ? _mm512_maskz_loadu_epi8(m, in + row * depth + k) : _mm512_setzero_si512();
            }
            transposed(r);
            int64_t quads = padded - k < 64 ? (padded - k) / 4 : 16;
            uint8_t *place = out + b / 4 * 64 * padded + k * 64 + b % 4 * 64;
            for (int64_t i = 0; i < quads; i++)
                _mm512_stream_si512((void *)(place + 256 * i), _mm512_xor_si512(r[i], flip));
        }
    _mm_sfence();
}

/* w: bytes of an element (2 or 4), rows (N), depth (K), in: slot, offset, out: slot, offset. Threads divide the blocks.
   [N, K] -> [N / 16][K][16]; rows that pad are 0. */
AVX void run_pack_float(const Run *run, const int64_t *w) {
    int64_t size = w[0], rows = w[1], depth = w[2], from, to;
    const char *in = operand(run, w + 3);
    char *out = operand(run, w + 5);
    share(run, (rows + BLOCK - 1) / BLOCK, &from, &to);
    for (int64_t b = from; b < to; b++) {
        char *block = out + b * BLOCK * depth * size;
        if (rows - b * BLOCK < BLOCK) memset(block, 0, (size_t)(BLOCK * depth * size));
        for (int64_t k = 0; k < depth; k += 32) /* a few columns at a time: 16 lines are read, and written to once */
            for (int64_t i = 0; i < BLOCK && b * BLOCK + i < rows; i++) {
                const char *row = in + (b * BLOCK + i) * depth * size;
                for (int64_t c = k; c < k + 32 && c < depth; c++)
                    if (size == 2)
                        ((uint16_t *)block)[c * BLOCK + i] = ((const uint16_t *)row)[c];
                    else
                        ((uint32_t *)block)[c * BLOCK + i] = ((const uint32_t *)row)[c];
            }
    }
}
