/* int8 matrices times activations that are rounded to 8 or to 15 bits, group by group, when the product begins.

   A matrix [N, K] is packed as [N / 16][K / 4][16][4] of w + 128, unsigned: one vector instruction multiplies 16 rows
   with the same four inputs. The 128 is taken out again exactly: every sum starts from -128 times the group's inputs. */
#include "native.h"

#include <math.h>

#define BLOCK 16 /* rows in a vector */

/* Two tokens of 8 bits at a time would be enough for a scale of the group's largest value / 127: that is `fast`. With
   15 bits, value = 128 * high + low, the rounding is finer than that of fp16, and the matrix is still read once. */
enum { BITS8, BITS15 };

/* w: bits, tokens, depth (K), padded depth, group, x: slot, offset, stride of a token, inner K, stride of outer K,
   high: slot, offset, low: slot, offset, scales: slot, offset, starts: slot, offset. Threads divide the tokens.
   x f32 [T, K] -> high, low i8 [T, padded], scales f32 and starts i32 [T, padded / group]. */
AVX void run_quantise(const Run *run, const int64_t *w) {
    int64_t depth = w[2], padded = w[3], group = w[4], inner = w[8], from, to;
    float steps = w[0] == BITS15 ? 16256.0f : 127.0f;
    share(run, w[1], &from, &to);
    for (int64_t t = from; t < to; t++) {
        const float *x = (const float *)operand(run, w + 5) + t * w[7];
        int8_t *high = (int8_t *)operand(run, w + 10) + t * padded, *low = (int8_t *)operand(run, w + 12) + t * padded;
        float *scales = (float *)operand(run, w + 14) + t * (padded / group);
        int32_t *starts = (int32_t *)operand(run, w + 16) + t * (padded / group);
        for (int64_t g = 0; g < padded / group; g++) {
            __m512 top = _mm512_setzero_ps();
            for (int64_t k = g * group; k < (g + 1) * group && k < depth; k += 16) {
                const float *p = x + k / inner * w[9] + k % inner;
                top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_maskz_loadu_ps(tail(depth - k), p)));
            }
            float largest = _mm512_reduce_max_ps(top), inverse = largest > 0 ? steps / largest : 0.0f;
            __m512i sum = _mm512_setzero_si512();
            for (int64_t k = g * group; k < (g + 1) * group; k += 16) {
                const float *p = x + k / inner * w[9] + k % inner;
                __m512 v = k < depth ? _mm512_maskz_loadu_ps(tail(depth - k), p) : _mm512_setzero_ps();
                __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
                sum = _mm512_add_epi32(sum, q);
                if (w[0] == BITS15) {
                    __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
                    __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 7));
                    _mm_storeu_si128((__m128i *)(low + k), _mm512_cvtepi32_epi8(l));
                    q = h;
                }
                _mm_storeu_si128((__m128i *)(high + k), _mm512_cvtepi32_epi8(q));
            }
            scales[g] = largest / steps;
            starts[g] = -128 * _mm512_reduce_add_epi32(sum);
        }
    }
}

typedef struct {
    const uint8_t *matrix;
    const int8_t *high, *low;
    const float *scales;      /* of the inputs [T, groups] */
    const int32_t *starts;    /* [T, groups] */
    const float *row_scales;  /* of the matrix [N], or NULL */
    const float *part_scales; /* of the matrix [N / 16][groups][16], or NULL */
    const float *bias;        /* [N], or NULL */
    float *out;
    int64_t depth, group, out_stride, rows;
} Linear;

/* `tokens` rows of inputs times `blocks` blocks of 16 rows of the matrix, from token t and block b on. */
INLINE void tile(int tokens, int blocks, int wide, const Linear *l, int64_t t, int64_t b, const char *ahead) {
    int64_t groups = l->depth / l->group, block_bytes = l->depth * BLOCK;
    const uint8_t *matrix = l->matrix + b * block_bytes;
    __m512 total[6][4];
    __m512i sum[6][4], fine[6][4];
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j < blocks; j++) total[i][j] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        for (int i = 0; i < tokens; i++)
            for (int j = 0; j < blocks; j++) {
                __m512i start = _mm512_set1_epi32(l->starts[(t + i) * groups + g]);
                sum[i][j] = wide ? _mm512_setzero_si512() : start;
                if (wide) fine[i][j] = start;
            }
        const int8_t *high = l->high + t * l->depth, *low = l->low + t * l->depth;
#pragma GCC unroll 2
        for (int64_t k = g * l->group; k < (g + 1) * l->group; k += 4) {
            __m512i part[4];
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++)
                part[j] = _mm512_load_si512((const void *)(matrix + j * block_bytes + k * BLOCK));
            if (tokens > 1) _mm_prefetch(ahead + k * BLOCK, _MM_HINT_T1);
#pragma GCC unroll 6
            for (int i = 0; i < tokens; i++) {
                __m512i x = _mm512_set1_epi32(*(const int32_t *)(high + i * l->depth + k));
#pragma GCC unroll 4
                for (int j = 0; j < blocks; j++) sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], part[j], x);
                if (wide) {
                    x = _mm512_set1_epi32(*(const int32_t *)(low + i * l->depth + k));
#pragma GCC unroll 4
                    for (int j = 0; j < blocks; j++) fine[i][j] = _mm512_dpbusd_epi32(fine[i][j], part[j], x);
                }
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < tokens; i++) {
            __m512 scale = _mm512_set1_ps(l->scales[(t + i) * groups + g]);
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) {
                __m512i whole = wide ? _mm512_add_epi32(_mm512_slli_epi32(sum[i][j], 7), fine[i][j]) : sum[i][j];
                __m512 x = _mm512_cvtepi32_ps(whole);
                if (l->part_scales)
                    x = _mm512_mul_ps(x, _mm512_loadu_ps(l->part_scales + ((b + j) * groups + g) * BLOCK));
                total[i][j] = _mm512_fmadd_ps(x, scale, total[i][j]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < tokens; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) {
            int64_t row = (b + j) * BLOCK;
            __mmask16 m = tail(l->rows - row);
            __m512 y = total[i][j];
            if (l->row_scales) y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(m, l->row_scales + row));
            if (l->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(m, l->bias + row));
            _mm512_mask_storeu_ps(l->out + (t + i) * l->out_stride + row, m, y);
        }
}

#define ONE(n, b) case n: tile(n, b, wide, l, t, at, ahead); break;

/* All tokens times `blocks` blocks. The next blocks are fetched meanwhile: one line for each step of K. */
#define PANEL(b, most, cases) \
    for (int64_t t = 0, n; t < tokens; t += n) { \
        n = tokens - t < (most) ? tokens - t : (most); \
        const char *ahead = (const char *)l->matrix + (at + (b)) * l->depth * BLOCK + t / (most) % (b) * l->depth * BLOCK; \
        switch (n) { cases } \
    }

INLINE void panels(int wide, const Linear *l, int64_t tokens, int64_t from, int64_t to) {
    int64_t at = from;
    if (wide) {
        for (; at + 4 <= to; at += 4) PANEL(4, 3, ONE(1, 4) ONE(2, 4) ONE(3, 4))
        for (; at < to; at++) PANEL(1, 6, ONE(1, 1) ONE(2, 1) ONE(3, 1) ONE(4, 1) ONE(5, 1) ONE(6, 1))
    } else {
        for (; at + 4 <= to; at += 4) PANEL(4, 6, ONE(1, 4) ONE(2, 4) ONE(3, 4) ONE(4, 4) ONE(5, 4) ONE(6, 4))
        for (; at < to; at++) PANEL(1, 6, ONE(1, 1) ONE(2, 1) ONE(3, 1) ONE(4, 1) ONE(5, 1) ONE(6, 1))
    }
}

AVX __attribute__((noinline)) static void panels8(const Linear *l, int64_t tokens, int64_t from, int64_t to) {
    panels(0, l, tokens, from, to);
}
AVX __attribute__((noinline)) static void panels15(const Linear *l, int64_t tokens, int64_t from, int64_t to) {
    panels(1, l, tokens, from, to);
}

/* w: bits, tokens, rows (N), padded depth, group, matrix: slot, offset, high, low, scales, starts: slot, offset each,
   row scales, part scales, bias: slot, offset each (slot -1: none), out: slot, offset, stride of a token.
   Threads divide the blocks of rows. out f32 [T, N]. */
AVX void run_linear8(const Run *run, const int64_t *w) {
    Linear l = {
        .matrix = (const uint8_t *)operand(run, w + 5),
        .high = (const int8_t *)operand(run, w + 7),
        .low = (const int8_t *)operand(run, w + 9),
        .scales = (const float *)operand(run, w + 11),
        .starts = (const int32_t *)operand(run, w + 13),
        .row_scales = w[15] < 0 ? NULL : (const float *)operand(run, w + 15),
        .part_scales = w[17] < 0 ? NULL : (const float *)operand(run, w + 17),
        .bias = w[19] < 0 ? NULL : (const float *)operand(run, w + 19),
        .out = (float *)operand(run, w + 21),
        .depth = w[3], .group = w[4], .out_stride = w[23], .rows = w[2],
    };
    int64_t blocks = (w[2] + BLOCK - 1) / BLOCK, from, to;
    share(run, (blocks + 3) / 4, &from, &to);
    from *= 4, to = to * 4 < blocks ? to * 4 : blocks;
    if (w[0] == BITS15)
        panels15(&l, w[1], from, to);
    else
        panels8(&l, w[1], from, to);
}
