/* Reductions, soft maxima and products of any strides: right for every program, quick for the common strides. */
#include "native.h"

#include <math.h>

enum { LARGEST, SUM, MEAN };
enum { F32, F16 };

INLINE float number(const char *p, int64_t at, int dtype) {
    return dtype == F16 ? _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(((const uint16_t *)p)[at]))) : ((const float *)p)[at];
}

INLINE float reduced(int largest, const float *a, int64_t n, int64_t stride) {
    if (stride != 1) {
        float r = a[0];
        for (int64_t i = 1; i < n; i++) r = largest ? fmaxf(r, a[i * stride]) : r + a[i * stride];
        return r;
    }
    __m512 none = _mm512_set1_ps(largest ? -INFINITY : 0.0f), r[4] = {none, none, none, none};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; j++) {
            __m512 x = _mm512_loadu_ps(a + i + 16 * j);
            r[j] = largest ? _mm512_max_ps(r[j], x) : _mm512_add_ps(r[j], x);
        }
    for (; i < n; i += 16) {
        __m512 x = _mm512_mask_loadu_ps(none, tail(n - i), a + i);
        r[0] = largest ? _mm512_max_ps(r[0], x) : _mm512_add_ps(r[0], x);
    }
    for (int j = 1; j < 4; j++) r[0] = largest ? _mm512_max_ps(r[0], r[j]) : _mm512_add_ps(r[0], r[j]);
    return largest ? _mm512_reduce_max_ps(r[0]) : _mm512_reduce_add_ps(r[0]);
}

/* Steps `at` to the next place of `axes` dims and moves the offsets by the strides with it. */
INLINE void step(int axes, const int64_t *dims, int64_t *at, int operands, int64_t *offsets,
                 const int64_t *const *strides) {
    for (int i = axes - 1; i >= 0; i--) {
        for (int k = 0; k < operands; k++) offsets[k] += strides[k][i];
        if (++at[i] < dims[i]) return;
        for (int k = 0; k < operands; k++) offsets[k] -= dims[i] * strides[k][i];
        at[i] = 0;
    }
}

/* w: kind, axes, dims[6], out: slot, offset, strides[6], in: slot, offset, strides[6], then the axes that are reduced:
   n[2], strides[2], the second one inside. Threads divide the first axis. All f32. */
AVX void run_reduce(const Run *run, const int64_t *w) {
    int kind = (int)w[0], axes = (int)w[1];
    const int64_t *dims = w + 2, *strides[2] = {w + 10, w + 18}, *n = w + 24, *inside = w + 26;
    int64_t from, to, at[MAX_DIMS] = {0}, offsets[2], lines;
    share(run, dims[0], &from, &to);
    lines = to - from;
    for (int i = 1; i < axes; i++) lines *= dims[i];
    for (int k = 0; k < 2; k++) offsets[k] = from * strides[k][0];
    float *out = (float *)operand(run, w + 8);
    const float *in = (const float *)operand(run, w + 16);
    for (; lines > 0; lines--) {
        float r = kind == LARGEST ? -INFINITY : 0.0f;
        for (int64_t i = 0; i < n[0]; i++) {
            const float *a = in + offsets[1] + i * inside[0];
            r = kind == LARGEST ? fmaxf(r, reduced(1, a, n[1], inside[1])) : r + reduced(0, a, n[1], inside[1]);
        }
        out[offsets[0]] = kind == MEAN ? r / (float)(n[0] * n[1]) : r;
        step(axes, dims, at, 2, offsets, strides);
    }
}

/* w: axes, dims[6], out: slot, offset, strides[6], in: slot, offset, strides[6], n: along which the results add up to
   1, with a stride of 1 in both. Threads divide the first axis. All f32. */
AVX void run_softmax(const Run *run, const int64_t *w) {
    int axes = (int)w[0];
    const int64_t *dims = w + 1, *strides[2] = {w + 9, w + 17};
    int64_t from, to, at[MAX_DIMS] = {0}, offsets[2], lines, n = w[23];
    share(run, dims[0], &from, &to);
    lines = to - from;
    for (int i = 1; i < axes; i++) lines *= dims[i];
    for (int k = 0; k < 2; k++) offsets[k] = from * strides[k][0];
    for (; lines > 0; lines--) {
        float *out = (float *)operand(run, w + 7) + offsets[0];
        const float *in = (const float *)operand(run, w + 15) + offsets[1];
        __m512 top = _mm512_set1_ps(reduced(1, in, n, 1)), sums = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i += 16) {
            __mmask16 m = tail(n - i);
            __m512 e = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, in + i), top));
            _mm512_mask_storeu_ps(out + i, m, e);
            sums = _mm512_mask_add_ps(sums, m, sums, e);
        }
        __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(sums));
        for (int64_t i = 0; i < n; i += 16) {
            __mmask16 m = tail(n - i);
            _mm512_mask_storeu_ps(out + i, m, _mm512_div_ps(_mm512_maskz_loadu_ps(m, out + i), sum));
        }
        step(axes, dims, at, 2, offsets, strides);
    }
}

/* out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n]. w: axes of b, dims[6], M, N, K, then out: slot, offset,
   strides[6], of m, of n; a: slot, offset, strides[6], of m, of k, dtype; b: slot, offset, strides[6], of k, of n,
   dtype. Threads divide the rows of all products. */
AVX void run_product(const Run *run, const int64_t *w) {
    int axes = (int)w[0];
    const int64_t *dims = w + 1, *o = w + 10, *a = w + 20, *b = w + 31;
    int64_t rows = w[7], columns = w[8], depth = w[9], batches = 1, from, to;
    for (int i = 0; i < axes; i++) batches *= dims[i];
    share(run, batches * rows, &from, &to);
    for (int64_t r = from; r < to; r++) {
        int64_t batch = r / rows, m = r % rows, at_o = m * o[8], at_a = m * a[8], at_b = 0;
        for (int i = axes - 1; i >= 0; i--) {
            int64_t place = batch % dims[i];
            batch /= dims[i];
            at_o += place * o[2 + i], at_a += place * a[2 + i], at_b += place * b[2 + i];
        }
        float *out = (float *)operand(run, o) + at_o;
        const char *left = operand(run, a), *right = operand(run, b);
        for (int64_t n = 0; n < columns; n++) {
            double sum = 0;
            for (int64_t k = 0; k < depth; k++)
                sum += (double)number(left, at_a + k * a[9], (int)a[10]) *
                       number(right, at_b + k * b[8] + n * b[9], (int)b[10]);
            out[n * o[9]] = (float)sum;
        }
    }
}
