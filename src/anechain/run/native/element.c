/* Element by element: arithmetic of one or two operands, and copies between dtypes, over up to MAX_DIMS strided axes. */
#include "native.h"

#include <math.h>

enum { ADD, SUB, MUL, DIV, MAX, MIN, ABS, EXP, SIGMOID, SQRT, TANH, SILU, SQUARE, GELU_ERF, GELU_TANH, GELU_SIGMOID,
       RSQRT, SILU_MUL };
enum { F32, F16 };

/* 1 / (1 + e^-x), with an estimate of 14 bits and one step of Newton's, in a third of a division's time; 0 where it is
   too small for a normal number, because the estimate of infinity's inverse has no such step. NaN stays NaN. */
INLINE __m512 sigmoid(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), least = _mm512_set1_ps(-87.0f);
    __m512 d = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))), y = _mm512_rcp14_ps(d);
    return _mm512_maskz_fmadd_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y, _mm512_fnmadd_ps(d, y, one), y);
}

INLINE __m512 tangent(__m512 x) { /* tanh x = 1 - 2 / (e^2x + 1) */
    __m512 one = _mm512_set1_ps(1.0f), e = exponential(_mm512_add_ps(x, x));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
}

INLINE __m512 gelu_erf(__m512 x) {
    float each[16];
    _mm512_storeu_ps(each, x);
    for (int i = 0; i < 16; i++) each[i] = 0.5f * each[i] * (1.0f + erff(each[i] * 0.70710678f));
    return _mm512_loadu_ps(each);
}

INLINE __m512 gelu_tanh(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
    __m512 inner = _mm512_mul_ps(_mm512_add_ps(x, cube), _mm512_set1_ps(0.79788456f));
    return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_add_ps(tangent(inner), _mm512_set1_ps(1.0f)));
}

INLINE __m512 computed(int kind, __m512 a, __m512 b, __m512 p) {
    switch (kind) {
    case ADD: return _mm512_add_ps(a, b);
    case SUB: return _mm512_sub_ps(a, b);
    case MUL: return _mm512_mul_ps(a, b);
    case DIV: return _mm512_div_ps(a, b);
    case MAX: return _mm512_max_ps(a, b);
    case MIN: return _mm512_min_ps(a, b);
    case ABS: return _mm512_abs_ps(a);
    case EXP: return exponential(a);
    case SIGMOID: return sigmoid(a);
    case SQRT: return _mm512_sqrt_ps(a);
    case TANH: return tangent(a);
    case SILU: return _mm512_mul_ps(a, sigmoid(a));
    case SQUARE: return _mm512_mul_ps(a, a);
    case GELU_ERF: return gelu_erf(a);
    case GELU_TANH: return gelu_tanh(a);
    case GELU_SIGMOID: return _mm512_mul_ps(a, sigmoid(_mm512_mul_ps(a, _mm512_set1_ps(1.702f))));
    case RSQRT: return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(_mm512_add_ps(a, p)));
    default: return _mm512_mul_ps(_mm512_mul_ps(a, sigmoid(a)), b); /* SILU_MUL */
    }
}

INLINE __m512 loaded(const float *p, int64_t stride, __mmask16 m) {
    if (stride == 1) return _mm512_maskz_loadu_ps(m, p);
    if (stride == 0) return _mm512_set1_ps(*p);
    __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)stride));
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, places, p, 4);
}

INLINE void stored(float *p, int64_t stride, __mmask16 m, __m512 x) {
    if (stride == 1) {
        _mm512_mask_storeu_ps(p, m, x);
        return;
    }
    __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    _mm512_mask_i32scatter_ps(p, m, _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)stride)), x, 4);
}

INLINE void line(int kind, int64_t n, float *o, int64_t so, const float *a, int64_t sa, const float *b, int64_t sb,
                 __m512 p) {
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = tail(n - i);
        stored(o + i * so, so, m, computed(kind, loaded(a + i * sa, sa, m), loaded(b + i * sb, sb, m), p));
    }
}

#define CASE(kind) case kind: line(kind, n, o, so, a, sa, b, sb, p); break;

AVX static void one_line(int kind, int64_t n, float *o, int64_t so, const float *a, int64_t sa, const float *b,
                         int64_t sb, float parameter) {
    __m512 p = _mm512_set1_ps(parameter);
    switch (kind) {
        CASE(ADD) CASE(SUB) CASE(MUL) CASE(DIV) CASE(MAX) CASE(MIN) CASE(ABS) CASE(EXP) CASE(SIGMOID) CASE(SQRT)
        CASE(TANH) CASE(SILU) CASE(SQUARE) CASE(GELU_ERF) CASE(GELU_TANH) CASE(GELU_SIGMOID) CASE(RSQRT) CASE(SILU_MUL)
    }
}

AVX static void copied(int64_t n, char *o, int64_t so, int to, const char *a, int64_t sa, int from) {
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = tail(n - i);
        __m512 x;
        uint16_t halves[16] = {0};
        if (from == F32)
            x = loaded((const float *)a + i * sa, sa, m);
        else if (sa == 1)
            x = widened((const uint16_t *)a + i, m);
        else {
            for (int64_t j = 0; j < 16 && i + j < n; j++) halves[j] = ((const uint16_t *)a)[(i + j) * sa];
            x = widened(halves, 0xFFFF);
        }
        if (to == F32) {
            stored((float *)o + i * so, so, m, x);
            continue;
        }
        __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        if (so == 1)
            _mm256_mask_storeu_epi16((uint16_t *)o + i, m, h);
        else {
            _mm256_storeu_si256((__m256i *)halves, h);
            for (int64_t j = 0; j < 16 && i + j < n; j++) ((uint16_t *)o)[(i + j) * so] = halves[j];
        }
    }
}

/* w: kind, parameter, axes, dims[6], then for each of three operands: slot, offset, strides[6], dtype.
   The first axis is what threads divide, the last one is the inner loop; strides count elements. */
INLINE void every(const Run *run, const int64_t *w, int copy) {
    int kind = (int)w[0], axes = (int)w[2];
    const int64_t *dims = w + 3, *out = w + 9, *left = w + 18, *right = w + 27;
    int64_t size_o = out[8] == F16 ? 2 : 4, size_a = left[8] == F16 ? 2 : 4;
    int64_t from = 0, to = dims[0], at[MAX_DIMS] = {0}, n = dims[axes - 1];
    share(run, dims[0], &from, &to);
    if (axes == 1) n = to - from;
    char *o = operand(run, out) + from * out[2] * size_o;
    const char *a = operand(run, left) + from * left[2] * size_a, *b = operand(run, right) + from * right[2] * 4;
    int64_t lines = axes == 1 ? (n > 0) : to - from;
    for (int i = 1; i + 1 < axes; i++) lines *= dims[i];
    while (lines-- > 0) {
        if (copy)
            copied(n, o, out[1 + axes], (int)out[8], a, left[1 + axes], (int)left[8]);
        else
            one_line(kind, n, (float *)o, out[1 + axes], (const float *)a, left[1 + axes], (const float *)b,
                     right[1 + axes], float_of(w[1]));
        for (int i = axes - 2; i >= 0; i--) {
            o += out[2 + i] * size_o, a += left[2 + i] * size_a, b += right[2 + i] * 4;
            if (i == 0 || ++at[i] < dims[i]) break;
            o -= dims[i] * out[2 + i] * size_o, a -= dims[i] * left[2 + i] * size_a, b -= dims[i] * right[2 + i] * 4;
            at[i] = 0;
        }
    }
}

AVX void run_element(const Run *run, const int64_t *w) { every(run, w, 0); }
AVX void run_copy(const Run *run, const int64_t *w) { every(run, w, 1); }
