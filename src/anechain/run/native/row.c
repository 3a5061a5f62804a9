/* Row by row what programs say in a dozen ops: RMSNorm in the form that fp16 survives, and the rotary embedding. */
#include "native.h"

#include <math.h>

/* w: axes (of rows), dims[6], out: slot, offset, strides[6], in: slot, offset, strides[6], n, gain: slot, offset, and as
   bits of floats: the least k, epsilon, and what rsqrt adds. Threads divide the first axis. All f32, rows of n.
   k = max(max|x|, least); y = x / k; out = y / sqrt(mean(y^2) + (epsilon / k)^2 + added) * gain. */
AVX void run_norm(const Run *run, const int64_t *w) {
    int axes = (int)w[0];
    const int64_t *dims = w + 1, *to = w + 9, *of = w + 17;
    int64_t n = w[23], from, end, at[MAX_DIMS] = {0};
    const float *gain = (const float *)operand(run, w + 24);
    float least = float_of(w[26]), epsilon = float_of(w[27]), added = float_of(w[28]);
    share(run, dims[0], &from, &end);
    float *out = (float *)operand(run, w + 7) + from * to[0];
    const float *in = (const float *)operand(run, w + 15) + from * of[0];
    int64_t lines = end - from;
    for (int i = 1; i < axes; i++) lines *= dims[i];
    while (lines-- > 0) {
        __m512 tops[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t i = 0; i < n; i += 32)
            for (int j = 0; j < 2; j++)
                tops[j] = _mm512_max_ps(_mm512_abs_ps(_mm512_maskz_loadu_ps(tail(n - i - 16 * j), in + i + 16 * j)), tops[j]);
        float k = fmaxf(_mm512_reduce_max_ps(_mm512_max_ps(tops[0], tops[1])), least);
        __m512 inverse = _mm512_set1_ps(1.0f / k);
        for (int64_t i = 0; i < n; i += 32)
            for (int j = 0; j < 2; j++) {
                __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(tail(n - i - 16 * j), in + i + 16 * j), inverse);
                sums[j] = _mm512_fmadd_ps(y, y, sums[j]);
            }
        float mean = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])) / (float)n, e = epsilon / k;
        __m512 root = _mm512_set1_ps(1.0f / k / sqrtf(mean + e * e + added));
        for (int64_t i = 0; i < n; i += 16) {
            __mmask16 m = tail(n - i);
            __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, in + i), root);
            _mm512_mask_storeu_ps(out + i, m, _mm512_mul_ps(y, _mm512_maskz_loadu_ps(m, gain + i)));
        }
        for (int i = axes - 1; i >= 0; i--) {
            out += to[i], in += of[i];
            if (i == 0 || ++at[i] < dims[i]) break;
            out -= dims[i] * to[i], in -= dims[i] * of[i];
            at[i] = 0;
        }
    }
}

/* w: axes (of rows), dims[6], then slot, offset, strides[6] of out, in, cosine and sine; half of a row's length; factor
   as bits of a float. Threads divide the first axis. All f32.
   out = factor * (x * cos + (-second half of x, first half of x) * sin). */
AVX void run_rotate(const Run *run, const int64_t *w) {
    int axes = (int)w[0];
    const int64_t *dims = w + 1, *s[4] = {w + 9, w + 17, w + 25, w + 33};
    int64_t half = w[39], from, end, at[MAX_DIMS] = {0};
    share(run, dims[0], &from, &end);
    float *p[4];
    for (int k = 0; k < 4; k++) p[k] = (float *)operand(run, w + 7 + 8 * k) + from * s[k][0];
    __m512 factor = _mm512_set1_ps(float_of(w[40]));
    int64_t lines = end - from;
    for (int i = 1; i < axes; i++) lines *= dims[i];
    while (lines-- > 0) {
        for (int64_t i = 0; i < half; i += 16) {
            __mmask16 m = tail(half - i);
            __m512 a = _mm512_maskz_loadu_ps(m, p[1] + i), b = _mm512_maskz_loadu_ps(m, p[1] + half + i);
            __m512 first = _mm512_mul_ps(b, _mm512_maskz_loadu_ps(m, p[3] + i));
            __m512 second = _mm512_mul_ps(a, _mm512_maskz_loadu_ps(m, p[3] + half + i));
            first = _mm512_fmsub_ps(a, _mm512_maskz_loadu_ps(m, p[2] + i), first);
            second = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(m, p[2] + half + i), second);
            _mm512_mask_storeu_ps(p[0] + i, m, _mm512_mul_ps(first, factor));
            _mm512_mask_storeu_ps(p[0] + half + i, m, _mm512_mul_ps(second, factor));
        }
        for (int i = axes - 1; i >= 0; i--) {
            for (int k = 0; k < 4; k++) p[k] += s[k][i];
            if (i == 0 || ++at[i] < dims[i]) break;
            for (int k = 0; k < 4; k++) p[k] -= dims[i] * s[k][i];
            at[i] = 0;
        }
    }
}
