/* Attention over the past in a state and the present of this step, one soft maximum over both; float32 arithmetic.

   Cells that the mask hides from all rows are not read: their weight would be exactly 0. */
#include "native.h"

#include <math.h>

enum { F32, F16 };
#define TILE 64 /* cells at a time: the tile of keys, of values and of scores stay in the second cache together */

typedef struct {
    int64_t kv_heads, group, query, depth, cells;
    const float *q;
    int64_t q_head, q_group, q_row; /* strides in elements, here and below */
    const uint16_t *key, *value;
    int64_t key_head, key_cell, value_head, value_cell;
    const char *mask;
    int64_t mask_row, mask_dtype;
    const int32_t *span; /* [rows or 1][2] */
    int64_t span_row;
    const float *new_key, *new_value;
    int64_t new_key_head, new_key_row, new_value_head, new_value_row;
    const float *new_mask; /* [rows or 1, Q], or NULL */
    int64_t new_mask_row;
    const int32_t *new_span; /* [rows or 1][2], or NULL: all */
    int64_t new_span_row;
    float *out;
    int64_t out_head, out_group, out_row;
} Attention;

/* w: mask rows, cells, mask: slot, offset, stride of a row, dtype, out: slot, offset; hidden, as the bits of a float.
   Gives the first cell that each row shows, and the one behind the last: i32 [rows, 2]; 0, 0 if it shows none. */
AVX void run_span(const Run *run, const int64_t *w) {
    int32_t *out = (int32_t *)operand(run, w + 6);
    __m512 hidden = _mm512_set1_ps(float_of(w[8]));
    for (int64_t r = 0; r < w[0]; r++) {
        int64_t first = w[1], end = 0;
        for (int64_t c = 0; c < w[1]; c += 16) {
            __mmask16 m = tail(w[1] - c);
            const char *row = operand(run, w + 2);
            __m512 x = w[5] == F16 ? widened((const uint16_t *)row + r * w[4] + c, m)
                                   : _mm512_maskz_loadu_ps(m, (const float *)row + r * w[4] + c);
            unsigned shown = _mm512_mask_cmp_ps_mask(m, x, hidden, _CMP_NLE_UQ); /* NaN is shown */
            if (!shown) continue;
            if (end == 0) first = c + __builtin_ctz(shown);
            end = c + 32 - __builtin_clz(shown);
        }
        out[2 * r] = end ? (int32_t)first : 0;
        out[2 * r + 1] = (int32_t)end;
    }
}

INLINE void masked(const Attention *a, int64_t row, int64_t cell, int64_t n, float *scores) {
    for (int64_t c = 0; c < n; c += 16) {
        __mmask16 m = tail(n - c);
        int64_t at = row * a->mask_row + cell + c;
        __m512 x = a->mask_dtype == F16 ? widened((const uint16_t *)a->mask + at, m)
                                        : _mm512_maskz_loadu_ps(m, (const float *)a->mask + at);
        _mm512_mask_storeu_ps(scores + c, m, _mm512_add_ps(_mm512_maskz_loadu_ps(m, scores + c), x));
    }
}

/* One token: the rows of a group against all cells, a few rows at a time. */
INLINE void few_scores(int rows, const Attention *a, const float *q, int64_t q_row, const uint16_t *key, int64_t n,
                       float *scores, int64_t stride) {
    for (int64_t c = 0; c < n; c++) {
        __m512 sum[4];
        for (int i = 0; i < rows; i++) sum[i] = _mm512_setzero_ps();
        for (int64_t d = 0; d < a->depth; d += 16) {
            __mmask16 m = tail(a->depth - d);
            __m512 k = widened(key + c * a->key_cell + d, m);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i] = _mm512_fmadd_ps(k, _mm512_maskz_loadu_ps(m, q + i * q_row + d), sum[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) scores[i * stride + c] = _mm512_reduce_add_ps(sum[i]);
    }
}

INLINE void few_mixes(int rows, const Attention *a, const uint16_t *value, const float *fresh, int64_t n,
                      const float *weights, int64_t stride, float *out, int64_t out_row) {
    for (int64_t d = 0; d < a->depth; d += 32) {
        __mmask16 m[2] = {tail(a->depth - d), tail(a->depth - d - 16)};
        __m512 sum[4][2], v[2];
        for (int j = 0; j < 2; j++) v[j] = _mm512_maskz_loadu_ps(m[j], fresh + d + 16 * j);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < 2; j++) sum[i][j] = _mm512_mul_ps(v[j], _mm512_set1_ps(weights[i * stride + n]));
        for (int64_t c = 0; c < n; c++) {
            for (int j = 0; j < 2; j++) v[j] = widened(value + c * a->value_cell + d + 16 * j, m[j]);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < 2; j++)
                    sum[i][j] = _mm512_fmadd_ps(v[j], _mm512_set1_ps(weights[i * stride + c]), sum[i][j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < 2; j++) _mm512_mask_storeu_ps(out + i * out_row + d + 16 * j, m[j], sum[i][j]);
    }
}

INLINE float soft(float *scores, int64_t n) { /* -> e^(score - largest), and 1 / their sum is returned */
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < n; c += 16) top = _mm512_mask_max_ps(top, tail(n - c), top, _mm512_maskz_loadu_ps(tail(n - c), scores + c));
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t c = 0; c < n; c += 16) {
        __mmask16 m = tail(n - c);
        __m512 e = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, scores + c), top));
        _mm512_mask_storeu_ps(scores + c, m, e);
        sum = _mm512_mask_add_ps(sum, m, sum, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

#define ROWS(n) case n: \
    few_scores(n, a, q, a->q_group, key, cells, scores, stride); \
    break;
#define MIXES(n) case n: \
    few_mixes(n, a, value, a->new_value + head * a->new_value_head, cells, scores, stride, out, a->out_group); \
    break;

AVX static void one_token(const Attention *a, int64_t head, int64_t group, int n, float *scores) {
    int64_t first = a->cells, end = 0, stride = a->cells + 1;
    for (int i = 0; i < n; i++) {
        const int32_t *span = a->span + (group + i) * a->span_row * 2;
        if (span[1] == 0) continue;
        first = span[0] < first ? span[0] : first;
        end = span[1] > end ? span[1] : end;
    }
    if (end == 0) first = 0;
    int64_t cells = end - first;
    const float *q = a->q + head * a->q_head + group * a->q_group;
    const uint16_t *key = a->key + head * a->key_head + first * a->key_cell;
    const uint16_t *value = a->value + head * a->value_head + first * a->value_cell;
    float *out = a->out + head * a->out_head + group * a->out_group;
    switch (n) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) }
    for (int i = 0; i < n; i++) {
        const float *row = q + i * a->q_group, *fresh = a->new_key + head * a->new_key_head;
        float *mine = scores + i * stride;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < a->depth; d += 16) {
            __mmask16 m = tail(a->depth - d);
            sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, row + d), _mm512_maskz_loadu_ps(m, fresh + d), sum);
        }
        masked(a, group + i, first, cells, mine);
        mine[cells] = _mm512_reduce_add_ps(sum);
        if (a->new_mask) mine[cells] += a->new_mask[(group + i) * a->new_mask_row];
        float inverse = soft(mine, cells + 1);
        for (int64_t c = 0; c < cells + 1; c += 16) {
            __mmask16 m = tail(cells + 1 - c);
            _mm512_mask_storeu_ps(mine + c, m, _mm512_mul_ps(_mm512_maskz_loadu_ps(m, mine + c), _mm512_set1_ps(inverse)));
        }
    }
    switch (n) { MIXES(1) MIXES(2) MIXES(3) MIXES(4) }
}

/* A tile of scores [n] enters the soft maximum of a row: largest and sum so far, and the mix so far is scaled. */
INLINE void entered(float *scores, int64_t n, float *top, float *sum, float *mix, int64_t width) {
    float largest = *top;
    __m512 most = _mm512_set1_ps(largest);
    for (int64_t c = 0; c < n; c += 16) most = _mm512_mask_max_ps(most, tail(n - c), most, _mm512_maskz_loadu_ps(tail(n - c), scores + c));
    largest = _mm512_reduce_max_ps(most);
    if (largest != *top) {
        __m512 less = exponential(_mm512_set1_ps(*top - largest));
        if (*top == -INFINITY) less = _mm512_setzero_ps();
        for (int64_t d = 0; d < width; d += 16) _mm512_storeu_ps(mix + d, _mm512_mul_ps(_mm512_loadu_ps(mix + d), less));
        *sum *= _mm512_cvtss_f32(less);
        *top = largest;
    }
    __m512 total = _mm512_setzero_ps();
    for (int64_t c = 0; c < n; c += 16) {
        __mmask16 m = tail(n - c);
        __m512 e = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, scores + c), _mm512_set1_ps(largest)));
        _mm512_storeu_ps(scores + c, _mm512_maskz_mov_ps(m, e));
        total = _mm512_mask_add_ps(total, m, total, e);
    }
    *sum += _mm512_reduce_add_ps(total);
}

/* Keys [n, D] -> [D, TILE], and values [n, D] -> [n, width], as f32; what pads is 0. */
INLINE void unpacked(int half, const char *key, int64_t key_cell, const char *value, int64_t value_cell, int64_t n,
                     int64_t depth, int64_t width, float *keys, float *values) {
    int64_t size = half ? 2 : 4;
    for (int64_t c = 0; c < TILE; c += 16)
        for (int64_t d = 0; d < depth; d += 16) {
            __m512i block[16];
            for (int64_t i = 0; i < 16; i++) {
                __mmask16 m = c + i < n ? tail(depth - d) : 0;
                const char *k = key + ((c + i) * key_cell + d) * size, *v = value + ((c + i) * value_cell + d) * size;
                __m512 x = _mm512_setzero_ps(), y = x;
                if (m) {
                    x = half ? widened((const uint16_t *)k, m) : _mm512_maskz_loadu_ps(m, (const float *)k);
                    y = half ? widened((const uint16_t *)v, m) : _mm512_maskz_loadu_ps(m, (const float *)v);
                }
                block[i] = _mm512_castps_si512(x);
                _mm512_storeu_ps(values + (c + i) * width + d, y);
            }
            transposed(block);
            for (int64_t i = 0; i < 16 && d + i < depth; i++) _mm512_storeu_si512(keys + (d + i) * TILE + c, block[i]);
        }
}

/* The rows [0, n) of one head, whose queries, largest scores, sums and mixes lie in `q`, `top`, `sum` and `mix`,
   against a tile of `cells` cells: `limit[r]` of them, from the first on, are shown to row r. */
INLINE void tiled(int64_t n, int64_t depth, int64_t width, const float *q, const float *keys, const float *values,
                  float *scores, const int64_t *limit, float *top, float *sum, float *mix, const Attention *a,
                  int64_t row, int64_t cell, int present) {
    for (int64_t r = 0, some; r < n; r += some) {
        some = n - r < 6 ? n - r : 6;
        int64_t most = 0;
        for (int64_t i = 0; i < some; i++) most = limit[r + i] > most ? limit[r + i] : most;
        if (most == 0) continue;
        float_tile((int)some, (int)((most + 15) / 16), depth, q + r * depth, depth, keys, TILE, scores, TILE, 0);
        for (int64_t i = 0; i < some; i++) {
            float *mine = scores + i * TILE;
            int64_t at = row + r + i;
            if (!present)
                masked(a, at, cell, most, mine);
            else if (a->new_mask)
                for (int64_t c = 0; c < most; c++) mine[c] += a->new_mask[at * a->new_mask_row + cell + c];
            entered(mine, most, top + r + i, sum + r + i, mix + (r + i) * width, width);
        }
        for (int64_t d = 0; d < width; d += 64)
            float_tile((int)some, 4, most, scores, TILE, values + d, width, mix + r * width + d, width, 1);
    }
}

/* Several tokens: rows [row, row + n) of a head (n at most `group * query`) against tiles of the past and the present. */
AVX static void many_tokens(const Attention *a, int64_t head, int64_t row, int64_t n, float *scratch) {
    int64_t depth = a->depth, width = (depth + 63) / 64 * 64, first = a->cells, end = 0;
    float *q = scratch, *mix = q + n * depth, *keys = mix + n * width, *values = keys + depth * TILE;
    float *scores = values + TILE * width, *top = scores + 6 * TILE, *sum = top + n;
    int64_t *limit = (int64_t *)(((uintptr_t)(sum + n) + 63) / 64 * 64);
    for (int64_t r = 0; r < n; r++) {
        int64_t g = (row + r) / a->query, i = (row + r) % a->query;
        const float *from = a->q + head * a->q_head + g * a->q_group + i * a->q_row;
        for (int64_t d = 0; d < depth; d += 16)
            _mm512_mask_storeu_ps(q + r * depth + d, tail(depth - d), _mm512_maskz_loadu_ps(tail(depth - d), from + d));
        for (int64_t d = 0; d < width; d += 16) _mm512_storeu_ps(mix + r * width + d, _mm512_setzero_ps());
        top[r] = -INFINITY, sum[r] = 0;
        const int32_t *span = a->span + (row + r) * a->span_row * 2;
        if (span[1] == 0) continue;
        first = span[0] < first ? span[0] : first;
        end = span[1] > end ? span[1] : end;
    }
    for (int64_t cell = first; cell < end; cell += TILE) {
        int64_t count = end - cell < TILE ? end - cell : TILE;
        unpacked(1, (const char *)(a->key + head * a->key_head + cell * a->key_cell), a->key_cell,
                 (const char *)(a->value + head * a->value_head + cell * a->value_cell), a->value_cell, count, depth,
                 width, keys, values);
        for (int64_t r = 0; r < n; r++) {
            const int32_t *span = a->span + (row + r) * a->span_row * 2;
            int64_t shown = span[1] - cell;
            limit[r] = span[0] >= cell + count || shown < 0 ? 0 : shown < count ? shown : count;
        }
        tiled(n, depth, width, q, keys, values, scores, limit, top, sum, mix, a, row, cell, 0);
    }
    for (int64_t cell = 0; cell < a->query; cell += TILE) {
        int64_t count = a->query - cell < TILE ? a->query - cell : TILE;
        unpacked(0, (const char *)(a->new_key + head * a->new_key_head + cell * a->new_key_row), a->new_key_row,
                 (const char *)(a->new_value + head * a->new_value_head + cell * a->new_value_row), a->new_value_row,
                 count, depth, width, keys, values);
        for (int64_t r = 0; r < n; r++) {
            const int32_t *span = a->new_span ? a->new_span + (row + r) * a->new_span_row * 2 : NULL;
            int64_t shown = (span ? span[1] : a->query) - cell;
            limit[r] = (span && span[0] >= cell + count) || shown < 0 ? 0 : shown < count ? shown : count;
        }
        tiled(n, depth, width, q, keys, values, scores, limit, top, sum, mix, a, row, cell, 1);
    }
    for (int64_t r = 0; r < n; r++) {
        int64_t g = (row + r) / a->query, i = (row + r) % a->query;
        float *out = a->out + head * a->out_head + g * a->out_group + i * a->out_row;
        __m512 inverse = _mm512_set1_ps(1.0f / sum[r]);
        for (int64_t d = 0; d < depth; d += 16)
            _mm512_mask_storeu_ps(out + d, tail(depth - d), _mm512_mul_ps(_mm512_loadu_ps(mix + r * width + d), inverse));
    }
}

/* w: kv heads, group, query, depth, cells, then slot, offset and strides of: q (head, group, row), key and value of the
   past (head, cell), mask (row) and its dtype, span (row), key and value of the present (head, row), mask of the present
   (row; slot -1: none), its span (row; slot -1: none), out (head, group, row). Threads divide heads, or single rows of
   their groups. q and out f32 [n_kv, G, Q, D], past f16 [n_kv, cells, D], present f32 [n_kv, Q, D]. */
AVX void run_attention(const Run *run, const int64_t *w) {
    Attention a = {w[0], w[1], w[2], w[3], w[4],
        (const float *)operand(run, w + 5), w[7], w[8], w[9],
        (const uint16_t *)operand(run, w + 10), (const uint16_t *)operand(run, w + 14), w[12], w[13], w[16], w[17],
        operand(run, w + 18), w[20], w[21],
        (const int32_t *)operand(run, w + 22), w[24],
        (const float *)operand(run, w + 25), (const float *)operand(run, w + 29), w[27], w[28], w[31], w[32],
        w[33] < 0 ? NULL : (const float *)operand(run, w + 33), w[35],
        w[36] < 0 ? NULL : (const int32_t *)operand(run, w + 36), w[38],
        (float *)operand(run, w + 39), w[41], w[42], w[43]};
    int64_t from, to;
    if (a.query == 1) {
        int64_t pieces = (a.group + 3) / 4;
        share(run, a.kv_heads * pieces, &from, &to);
        for (int64_t i = from; i < to; i++) {
            int64_t group = i % pieces * 4, rest = a.group - group;
            one_token(&a, i / pieces, group, (int)(rest < 4 ? rest : 4), (float *)run->scratch);
        }
        return;
    }
    int64_t cut = a.kv_heads % run->threads ? a.group : 1, rows = a.group / cut * a.query;
    share(run, a.kv_heads * cut, &from, &to);
    for (int64_t i = from; i < to; i++) many_tokens(&a, i / cut, i % cut * rows, rows, (float *)run->scratch);
}
