// Vectors of float32 numbers, as wide as the processor has them, and what is done with one.

#pragma once

#if defined(__AVX2__) && defined(__FMA__)
#define OUTRIDER_VECTORS
#include <immintrin.h>

#include <initializer_list>

namespace vectors {

typedef unsigned short Bfloat16;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// The processor multiplies pairs of bfloat16 numbers, and does so fast.
#if defined(__AVX512BF16__) && !defined(OUTRIDER_NO_PAIRS)
#define OUTRIDER_PAIRS
#endif
typedef __m512 Vector;
constexpr int LANES = 16;

inline Vector all(float x) { return _mm512_set1_ps(x); }
inline float first(Vector x) { return _mm512_cvtss_f32(x); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline Vector load(const Bfloat16* from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
inline void store(Bfloat16* to, Vector value) {
  // To the nearest, of two to the even one.
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
  bits = _mm512_mask_blend_epi32(number, _mm512_set1_epi32(0x7fc00000), bits);
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

inline Vector fused(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline float largest(Vector x) { return _mm512_reduce_max_ps(x); }
inline Vector nearest(Vector x) { return _mm512_roundscale_ps(x, 0); }
inline Vector magnitude(Vector x) { return _mm512_abs_ps(x); }
// `x`, which is not below 0, with the sign of `y`.
inline Vector with_sign(Vector x, Vector y) {
  const Vector zero = _mm512_setzero_ps();
  return _mm512_mask_sub_ps(x, _mm512_cmp_ps_mask(y, zero, _CMP_LT_OQ), zero, x);
}
// `x` times 2^power, which is e^of; 0 where that is next to nothing.
inline Vector raised(Vector x, Vector power, Vector of) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(of, all(-150.0f), _CMP_NLE_UQ), x, power);
}
#else
typedef __m256 Vector;
constexpr int LANES = 8;

inline Vector all(float x) { return _mm256_set1_ps(x); }
inline float first(Vector x) { return _mm256_cvtss_f32(x); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline Vector load(const Bfloat16* from) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
inline void store(Bfloat16* to, Vector value) {
  __m256i bits = _mm256_castps_si256(value);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i number = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_ORD_Q));
  bits = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc00000), bits, number);
  bits = _mm256_srli_epi32(bits, 16);
  __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
  _mm_storeu_si128((__m128i*)to, _mm_packus_epi32(low, high));
}

inline Vector fused(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline float largest(Vector x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline Vector nearest(Vector x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vector magnitude(Vector x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Vector with_sign(Vector x, Vector y) {
  return _mm256_blendv_ps(x, _mm256_setzero_ps() - x, y);
}
inline Vector raised(Vector x, Vector power, Vector of) {
  // 2^power is made of its bits; below the least normal number, which is slow to reckon with, is 0.
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  Vector seen = _mm256_cmp_ps(of, all(-87.33f), _CMP_NLE_UQ);
  return _mm256_and_ps(seen, x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
#endif

// e^x for x <= 0, within two units in the last place; 0 for -inf.
inline Vector exponential(Vector x) {
  Vector power = larger(nearest(x * all(1.44269504f)), all(-200.0f));
  Vector rest = fused(power, all(-0.693359375f), x);
  rest = fused(power, all(2.12194440e-4f), rest);
  Vector sum = all(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f})
    sum = fused(sum, rest, all(next));
  return raised(fused(rest * rest, sum, rest + all(1.0f)), power, x);
}

}  // namespace vectors
#endif
