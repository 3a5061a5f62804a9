/* fp16 and float32 matrices times float32 activations. A matrix [N, K] is packed as [N / 16][K][16]. */
#include "native.h"

#define BLOCK 16

typedef struct {
    const char *matrix;
    const float *x, *bias;
    float *out;
    int64_t depth, x_stride, out_stride, rows;
} Linear;

INLINE void tile(int tokens, int blocks, int half, const Linear *l, int64_t t, int64_t b) {
    int64_t block = l->depth * BLOCK;
    const uint16_t *halves = (const uint16_t *)l->matrix + b * block;
    const float *singles = (const float *)l->matrix + b * block, *x = l->x + t * l->x_stride;
    __m512 sum[6][4];
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j < blocks; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < l->depth; k++) {
        __m512 part[4];
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++)
            part[j] = half ? _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(halves + j * block + k * BLOCK)))
                           : _mm512_load_ps(singles + j * block + k * BLOCK);
#pragma GCC unroll 6
        for (int i = 0; i < tokens; i++) {
            __m512 in = _mm512_set1_ps(x[i * l->x_stride + k]);
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) sum[i][j] = _mm512_fmadd_ps(part[j], in, sum[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < tokens; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) {
            int64_t row = (b + j) * BLOCK;
            __mmask16 m = tail(l->rows - row);
            __m512 y = l->bias ? _mm512_add_ps(sum[i][j], _mm512_maskz_loadu_ps(m, l->bias + row)) : sum[i][j];
            _mm512_mask_storeu_ps(l->out + (t + i) * l->out_stride + row, m, y);
        }
}

#define ONE(n, b) case n: tile(n, b, half, l, t, at); break;
#define PANEL(b) \
    for (int64_t t = 0, n; t < tokens; t += n) { \
        n = tokens - t < 6 ? tokens - t : 6; \
        switch (n) { ONE(1, b) ONE(2, b) ONE(3, b) ONE(4, b) ONE(5, b) ONE(6, b) } \
    }

INLINE void panels(int half, const Linear *l, int64_t tokens, int64_t from, int64_t to) {
    int64_t at = from;
    for (; at + 4 <= to; at += 4) PANEL(4)
    for (; at < to; at++) PANEL(1)
}

AVX __attribute__((noinline)) static void panels16(const Linear *l, int64_t tokens, int64_t from, int64_t to) {
    panels(1, l, tokens, from, to);
}
AVX __attribute__((noinline)) static void panels32(const Linear *l, int64_t tokens, int64_t from, int64_t to) {
    panels(0, l, tokens, from, to);
}

/* w: half (else float32), tokens, rows (N), depth (K), matrix: slot, offset, x: slot, offset, stride of a token, bias:
   slot, offset (slot -1: none), out: slot, offset, stride of a token. Threads divide the blocks of rows. */
AVX void run_linear_float(const Run *run, const int64_t *w) {
    Linear l = {
        .matrix = operand(run, w + 4),
        .x = (const float *)operand(run, w + 6),
        .bias = w[9] < 0 ? NULL : (const float *)operand(run, w + 9),
        .out = (float *)operand(run, w + 11),
        .depth = w[3], .x_stride = w[8], .out_stride = w[13], .rows = w[2],
    };
    int64_t blocks = (w[2] + BLOCK - 1) / BLOCK, from, to;
    share(run, (blocks + 3) / 4, &from, &to);
    from *= 4, to = to * 4 < blocks ? to * 4 : blocks;
    (w[0] ? panels16 : panels32)(&l, w[1], from, to);
}

INLINE void float_tile_of(int rows, int blocks, int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb,
                          float *c, int64_t ldc, int add) {
    __m512 sum[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) sum[i][j] = add ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m512 part[4];
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) part[j] = _mm512_loadu_ps(b + k * ldb + 16 * j);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m512 in = _mm512_set1_ps(a[i * lda + k]);
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) sum[i][j] = _mm512_fmadd_ps(part[j], in, sum[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, sum[i][j]);
}

#define FLOAT(r, b) case 10 * r + b: float_tile_of(r, b, depth, a, lda, bm, ldb, c, ldc, add); break;
#define FLOATS(b) FLOAT(1, b) FLOAT(2, b) FLOAT(3, b) FLOAT(4, b) FLOAT(5, b) FLOAT(6, b)

AVX void float_tile(int rows, int blocks, int64_t depth, const float *a, int64_t lda, const float *bm, int64_t ldb,
                    float *c, int64_t ldc, int add) {
    switch (10 * rows + blocks) { FLOATS(1) FLOATS(2) FLOATS(3) FLOATS(4) }
}
