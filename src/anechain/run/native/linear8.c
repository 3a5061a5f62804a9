/* int8 matrices times activations that are rounded to 8 or to 15 bits, group by group, when the product begins.

   A matrix [N, K] is packed as [N / 64][K / 4][64][4] of w + 128, unsigned: one vector instruction multiplies 16 rows
   with the same four inputs. The 128 is taken out again exactly: every sum starts from -128 times the group's inputs.
   Rounded inputs lie as [K / group][T / R][group / 4][R][4], R tokens that are multiplied at once (1 where there is but
   one), so that what a group needs lies together. */
#include "native.h"

#define PANEL 64 /* rows of the matrix at once: four vectors */

/* 8 bits: a step is 1/127 of the group's largest value. 15 bits: value = 128 * high + low,
   which is finer than fp16, and the matrix is still read once. */
enum { BITS8, BITS15 };

INLINE int64_t tokens_at_once(int64_t bits, int64_t tokens) { return tokens == 1 ? 1 : bits == BITS15 ? 3 : 6; }

/* Tokens that there is room for: a multiple of those that are multiplied at once. */
INLINE int64_t places(int64_t bits, int64_t tokens) {
    int64_t at_once = tokens_at_once(bits, tokens);
    return (tokens + at_once - 1) / at_once * at_once;
}

/* 16 numbers, four and four, with room for the other tokens between. */
INLINE void spread(int8_t *p, int64_t at_once, __m128i x) {
    if (at_once == 1) {
        _mm_storeu_si128((__m128i *)p, x);
        return;
    }
    *(int32_t *)p = _mm_extract_epi32(x, 0);
    *(int32_t *)(p + 4 * at_once) = _mm_extract_epi32(x, 1);
    *(int32_t *)(p + 8 * at_once) = _mm_extract_epi32(x, 2);
    *(int32_t *)(p + 12 * at_once) = _mm_extract_epi32(x, 3);
}

/* A place in a row whose numbers lie in pieces of the same length, a multiple of 16 unless there is but one. */
typedef struct {
    const float *p;
    int64_t left; /* of the piece */
} Pieces;

/* The next 16 numbers. Stepped, not computed: two divisions for 16 numbers took a quarter of the time of rounding them. */
INLINE const float *stepped(Pieces *at, int64_t inner, int64_t outer) {
    if (at->left <= 0) at->p += outer - inner, at->left = inner;
    at->left -= 16;
    at->p += 16;
    return at->p - 16;
}

/* w: bits, tokens, depth (K), padded depth, group, x: slot, offset, stride of a token, inner K, stride of outer K,
   high: slot, offset, low: slot, offset, scales: slot, offset, starts: slot, offset. Threads divide the tokens.
   x f32 [T, K] -> high, low i8 [padded / group][T / R][group / 4][R][4], scales f32 and starts i32 [T, padded / group]. */
AVX void run_quantise(const Run *run, const int64_t *w) {
    int64_t depth = w[2], padded = w[3], group = w[4], inner = w[8], begin, end;
    float steps = w[0] == BITS15 ? 16256.0f : 127.0f;
    share(run, w[1], &begin, &end);
    for (int64_t t = begin; t < end; t++) {
        const float *x = (const float *)operand(run, w + 5) + t * w[7];
        int64_t at_once = tokens_at_once(w[0], w[1]), place = t / at_once * at_once * group + t % at_once * 4;
        float *scales = (float *)operand(run, w + 14) + t * (padded / group);
        int32_t *starts = (int32_t *)operand(run, w + 16) + t * (padded / group);
        Pieces from = {x, inner};
        for (int64_t g = 0; g < padded / group; g++, place += places(w[0], w[1]) * group) {
            int8_t *high = (int8_t *)operand(run, w + 10) + place, *low = (int8_t *)operand(run, w + 12) + place;
            __m512 top = _mm512_setzero_ps();
            Pieces at = from;
            for (int64_t k = g * group; k < (g + 1) * group; k += 16)
                top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_maskz_loadu_ps(tail(depth - k), stepped(&at, inner, w[9]))));
            float largest = _mm512_reduce_max_ps(top), inverse = largest > 0 ? steps / largest : 0.0f;
            __m512i sum = _mm512_setzero_si512();
            for (int64_t k = 0; k < group; k += 16) {
                __m512 v = _mm512_maskz_loadu_ps(tail(depth - g * group - k), stepped(&from, inner, w[9]));
                __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
                sum = _mm512_add_epi32(sum, q);
                if (w[0] == BITS15) {
                    __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
                    __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 7));
                    spread(low + k * at_once, at_once, _mm512_cvtepi32_epi8(l));
                    q = h;
                }
                spread(high + k * at_once, at_once, _mm512_cvtepi32_epi8(q));
            }
            scales[g] = largest / steps;
            starts[g] = -128 * _mm512_reduce_add_epi32(sum);
        }
    }
}

/* sum + four products in each lane. Written out, because compilers copy the sum back and forth around the intrinsic and
   run out of registers: the kernel took twice as long. */
INLINE __m512i dot(__m512i sum, __m512i part, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(part), "v"(x));
    return sum;
}

typedef struct {
    const uint8_t *matrix;
    const int8_t *high, *low;
    const float *scales;      /* of the inputs [T, groups] */
    const int32_t *starts;    /* [T, groups] */
    const float *row_scales;  /* of the matrix [N], or NULL */
    const float *part_scales; /* of the matrix [N / 64][groups][64], or NULL */
    const float *bias;        /* [N], or NULL */
    float *out;
    int64_t depth, group, out_stride, rows;
    int64_t places; /* of tokens */
} Linear;

/* What one group of inputs adds to a panel of 64 rows: `tokens` of `at_once` tokens that lie together, from token t on. */
INLINE void sums(int tokens, int at_once, int wide, const Linear *l, int64_t t, int64_t p, int64_t g, const char *ahead,
                 const char *near, __m512i whole[6][4]) {
    int64_t groups = l->depth / l->group, from = g * l->group;
    const uint8_t *matrix = l->matrix + (p * l->depth + from) * PANEL;
    int64_t place = from * l->places + t * l->group;
    const int8_t *high = l->high + place, *low = l->low + place;
    __m512i fine[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < tokens; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512i start = _mm512_set1_epi32(l->starts[(t + i) * groups + g]);
            whole[i][j] = wide ? _mm512_setzero_si512() : start;
            if (wide) fine[i][j] = start;
        }
#pragma GCC unroll 4
    for (int64_t k = 0; k < l->group; k += 4) {
        __m512i part[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) part[j] = _mm512_load_si512((const void *)(matrix + k * PANEL + 64 * j));
        if (tokens > 1 && ahead) _mm_prefetch(ahead + k * 16, _MM_HINT_T1);
        if (tokens > 1 && near) _mm_prefetch(near + k * 16, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < tokens; i++) {
            __m512i x = _mm512_set1_epi32(*(const int32_t *)(high + k * at_once + 4 * i));
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) whole[i][j] = dot(whole[i][j], part[j], x);
            if (wide) {
                x = _mm512_set1_epi32(*(const int32_t *)(low + k * at_once + 4 * i));
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) fine[i][j] = dot(fine[i][j], part[j], x);
            }
        }
    }
    if (wide)
#pragma GCC unroll 6
        for (int i = 0; i < tokens; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) whole[i][j] = _mm512_add_epi32(_mm512_slli_epi32(whole[i][j], 7), fine[i][j]);
}

INLINE __m512 scaled(const Linear *l, int parts, int64_t p, int64_t g, int j, __m512i whole) {
    __m512 x = _mm512_cvtepi32_ps(whole);
    if (!parts) return x;
    return _mm512_mul_ps(x, _mm512_loadu_ps(l->part_scales + (p * (l->depth / l->group) + g) * PANEL + 16 * j));
}

INLINE void finished(const Linear *l, int64_t t, int64_t p, int j, __m512 y) {
    int64_t row = p * PANEL + 16 * j;
    __mmask16 m = tail(l->rows - row);
    if (l->row_scales) y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(m, l->row_scales + row));
    if (l->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(m, l->bias + row));
    _mm512_mask_storeu_ps(l->out + t * l->out_stride + row, m, y);
}

/* One token: the matrix is read once, from memory. */
INLINE void one_token(int wide, int parts, const Linear *l, int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++) {
        __m512 total[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t g = 0; g < l->depth / l->group; g++) {
            __m512i whole[6][4];
            sums(1, 1, wide, l, 0, p, g, NULL, NULL, whole);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                total[j] = _mm512_fmadd_ps(scaled(l, parts, p, g, j, whole[0][j]), _mm512_set1_ps(l->scales[g]), total[j]);
        }
        for (int j = 0; j < 4; j++) finished(l, 0, p, j, total[j]);
    }
}

/* A tile of several tokens. `totals` [T, 64] holds what the groups so far have made. */
INLINE void tile(int tokens, int at_once, int wide, int parts, const Linear *l, int64_t t, int64_t p, int64_t g,
                 const char *ahead, const char *near, float *totals) {
    int64_t groups = l->depth / l->group;
    __m512i whole[6][4];
    sums(tokens, at_once, wide, l, t, p, g, ahead, near, whole);
    totals += t * PANEL;
#pragma GCC unroll 6
    for (int i = 0; i < tokens; i++) {
        __m512 scale = _mm512_set1_ps(l->scales[(t + i) * groups + g]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            float *so_far = totals + i * PANEL + 16 * j;
            _mm512_store_ps(so_far, _mm512_fmadd_ps(scaled(l, parts, p, g, j, whole[i][j]), scale, _mm512_load_ps(so_far)));
        }
    }
}

#define TILE(n, r) case n: tile(n, r, wide, parts, l, t, p, g, ahead, near, totals); break;

/* Group by group, so that a group of a panel stays in the first cache for all tokens; the panel that follows is fetched
   meanwhile, a line for each step of K. */
INLINE void several(int wide, int parts, const Linear *l, int64_t tokens, int64_t from, int64_t to, float *totals) {
    int64_t at_once = tokens_at_once(wide ? BITS15 : BITS8, tokens);
    for (int64_t p = from; p < to; p++) {
        for (int64_t i = 0; i < tokens * PANEL; i += 16) _mm512_store_ps(totals + i, _mm512_setzero_ps());
        for (int64_t g = 0; g < l->depth / l->group; g++)
            for (int64_t t = 0, n; t < tokens; t += n) {
                int64_t turn = t / at_once, quarter = turn % 4 * 16 * l->group;
                const char *slice = (const char *)l->matrix + (p * l->depth + g * l->group) * PANEL + quarter;
                const char *ahead = slice + (turn < 4 ? l->depth * PANEL : 0);
                const char *near = slice + (turn >= 4 && turn < 8 ? l->group * PANEL : 0);
                n = tokens - t < at_once ? tokens - t : at_once;
                if (wide)
                    switch (n) { TILE(1, 3) TILE(2, 3) TILE(3, 3) }
                else
                    switch (n) { TILE(1, 6) TILE(2, 6) TILE(3, 6) TILE(4, 6) TILE(5, 6) TILE(6, 6) }
            }
        for (int64_t t = 0; t < tokens; t++)
            for (int j = 0; j < 4; j++) finished(l, t, p, j, _mm512_load_ps(totals + t * PANEL + 16 * j));
    }
}

#define KERNEL(name, wide, parts) \
    AVX __attribute__((noinline)) static void name(const Linear *l, int64_t tokens, int64_t from, int64_t to, float *totals) { \
        if (tokens == 1) \
            one_token(wide, parts, l, from, to); \
        else \
            several(wide, parts, l, tokens, from, to, totals); \
    }

KERNEL(bits8, 0, 0)
KERNEL(bits8_parts, 0, 1)
KERNEL(bits15, 1, 0)
KERNEL(bits15_parts, 1, 1)

/* w: bits, tokens, rows (N), padded depth, group, matrix: slot, offset, high, low, scales, starts: slot, offset each,
   row scales, part scales, bias: slot, offset each (slot -1: none), out: slot, offset, stride of a token.
   Threads divide the panels. out f32 [T, N]. */
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
        .depth = w[3], .group = w[4], .out_stride = w[23], .rows = w[2], .places = places(w[0], w[1]),
    };
    int64_t from, to;
    share(run, (w[2] + PANEL - 1) / PANEL, &from, &to);
    float *totals = (float *)run->scratch; /* [T, 64] */
    if (w[0] == BITS15)
        (l.part_scales ? bits15_parts : bits15)(&l, w[1], from, to, totals);
    else
        (l.part_scales ? bits8_parts : bits8)(&l, w[1], from, to, totals);
}
