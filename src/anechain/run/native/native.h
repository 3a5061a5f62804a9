/* The native engine: a tape of instructions, run by a few threads. What each instruction is given stands in tape.c. */
#ifndef ANECHAIN_NATIVE_H
#define ANECHAIN_NATIVE_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* The processor that the kernels are written for; anechain_supported() asks for all of it before any of them runs. */
#define AVX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,f16c,fma")))
#define INLINE static inline __attribute__((always_inline)) AVX

#define MAX_DIMS 6

/* What one thread knows while it runs a tape. An operand of an instruction is two words: a slot and an offset in bytes. */
typedef struct {
    char *const *slots;
    int thread, threads;
    char *scratch; /* of this thread alone */
} Run;

typedef void Kernel(const Run *run, const int64_t *w);

INLINE char *operand(const Run *run, const int64_t *w) { return run->slots[w[0]] + w[1]; }

/* The part [*from, *to) of `count` pieces that this thread does. */
INLINE void share(const Run *run, int64_t count, int64_t *from, int64_t *to) {
    *from = count * run->thread / run->threads;
    *to = count * (run->thread + 1) / run->threads;
}

INLINE __mmask16 tail(int64_t n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

INLINE float float_of(int64_t bits) {
    union { uint32_t u; float f; } both = {(uint32_t)bits};
    return both.f;
}

INLINE __m512 widened(const uint16_t *p, __mmask16 m) {
    return _mm512_cvtph_ps(m == 0xFFFF ? _mm256_loadu_si256((const __m256i *)p) : _mm256_maskz_loadu_epi16(m, p));
}

/* e^x to about 1 unit in the last place: x = n ln 2 + r, and a polynomial of degree 7 for r (Taylor). */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), _mm512_min_ps(_mm512_set1_ps(150.0f), x)); /* NaN stays NaN */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

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

/* c [rows, 16 * blocks] = (add ? c : 0) + a [rows, depth] b [depth, 16 * blocks]; rows at most 6, blocks at most 4. */
void float_tile(int rows, int blocks, int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                int64_t ldc, int add);

Kernel run_element, run_copy, run_reduce, run_softmax, run_product, run_quantise, run_linear8, run_linear_float;
Kernel run_span, run_attention, run_pack8, run_pack_float, run_norm, run_rotate, run_read;

#endif
