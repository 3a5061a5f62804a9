/* Matrices as they lie in a weight file -> as the kernels read them, copied once and by all threads. */
#include "native.h"

#include <string.h>

#define BLOCK 16

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

/* w: bytes, in: slot, offset. Threads divide the bytes. Reads, for the speed at which memory can be read. */
AVX void run_read(const Run *run, const int64_t *w) {
    int64_t from, to;
    share(run, w[0] / 256, &from, &to);
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    const char *in = operand(run, w + 1);
    for (int64_t i = from; i < to; i++)
        for (int j = 0; j < 4; j++)
            sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512((const void *)(in + 256 * i + 64 * j)));
    for (int j = 1; j < 4; j++) sums[0] = _mm512_add_epi64(sums[0], sums[j]);
    *(volatile int64_t *)run->scratch = _mm512_reduce_add_epi64(sums[0]);
}
