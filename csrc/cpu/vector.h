// Several fp32 numbers at a time, in the compiler's own vector types: sixteen with AVX-512, else eight.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace megarl {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats fill(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const torch::headeronly::BFloat16* from) {
  Halves narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return (Floats)(__builtin_convertvector(narrow, Words) << 16);
}

inline Floats load(const torch::headeronly::Half* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(from[i]);
  return x;
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Round to nearest, ties to even; a NaN stays one.
inline void store(torch::headeronly::BFloat16* to, Floats x) {
#ifdef __AVX512BF16__
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves narrow = __builtin_convertvector(x == x ? rounded : (Words{} + 0x7fc0), Halves);
  std::memcpy(to, &narrow, sizeof narrow);
#endif
}

inline void store(torch::headeronly::Half* to, Floats x) {
#ifdef __AVX512F__
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<torch::headeronly::Half>(x[i]);
#endif
}

// Two vectors side by side, where that is one instruction.
template <typename T>
void store_two(T* to, Floats first, Floats second) {
  store(to, first);
  store(to + kLanes, second);
}

#ifdef __AVX512BF16__
inline void store_two(torch::headeronly::BFloat16* to, Floats first, Floats second) {
  const __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  std::memcpy(to, &narrow, sizeof narrow);
}
#endif

// The `count` numbers at `from`, and `rest` in the remaining lanes.
template <typename T>
Floats load_some(const T* from, int64_t count, float rest) {
  float numbers[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) numbers[i] = i < count ? static_cast<float>(from[i]) : rest;
  return load(numbers);
}

template <typename T>
void store_some(T* to, Floats x, int64_t count) {
  T numbers[kLanes];
  store(numbers, x);
  std::memcpy(to, numbers, count * sizeof(T));
}

// The larger one; where `x` is NaN, `y`.
inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

inline float sum_of(Floats x) {
  float sum = 0;
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  sum = x[0];
  return sum;
}

inline float largest_of(Floats x) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}

constexpr float kLowestExponent = -88.0f;

// x, or `lowest` where that is more; NaN for NaN.
inline Floats cut(Floats x, float lowest) { return lowest > x ? fill(lowest) : x; }

// exp(x) for -88 <= x <= 88 to 1 ulp; where it falls below the normal fp32 numbers, 0; NaN for NaN. x = n log 2 + r with
// |r| <= log 2 / 2, and exp(r) by the polynomial of Cephes' expf.
inline Floats exp_of(Floats x) {
  const Floats magic = fill(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer, found in the low bits
  const Floats shifted = x * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  // n = -127, the lowest, leaves no exponent bits: the factor 0. The bits above the exponent are shifted out.
  return p * (Floats)(((Words)shifted + 127) << 23);
}

}  // namespace megarl
