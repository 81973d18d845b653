// Eight fp64 numbers side by side, written with the compiler's own vector types: one AVX-512 register, two AVX2
// registers or four of SSE2 or NEON. fp32 memory is widened on load and rounded on store.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace megarl::lanes {

constexpr int kWidth = 8;

typedef double Lanes __attribute__((vector_size(64)));
typedef int64_t Select __attribute__((vector_size(64)));  // per lane: all bits = yes, 0 = no
typedef float Floats __attribute__((vector_size(32)));

constexpr uint64_t kAll = 0x0101010101010101ull;  // eight true booleans

template <typename T, typename From>
inline T read_as(const From* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline Lanes load(const double* from) { return read_as<Lanes>(from); }
inline void store(double* to, Lanes value) { std::memcpy(to, &value, sizeof(value)); }

#ifdef __AVX512F__  // GCC takes the general form below apart into halves, and warns about the forms without a mask
inline Lanes load(const float* from) { return (Lanes)_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(from)); }
inline void store(float* to, Lanes value) { _mm256_storeu_ps(to, _mm512_maskz_cvtpd_ps(0xff, (__m512d)value)); }
#else
inline Lanes load(const float* from) { return __builtin_convertvector(read_as<Floats>(from), Lanes); }
inline void store(float* to, Lanes value) {
  const Floats narrow = __builtin_convertvector(value, Floats);
  std::memcpy(to, &narrow, sizeof(narrow));
}
#endif

template <typename T>
inline void store_zeros(T* to) {
  std::memset(to, 0, kWidth * sizeof(T));
}

inline Lanes broadcast(double value) { return Lanes{} + value; }

// Eight booleans as one number: `kAll`, 0 or something between.
inline uint64_t load_mask(const bool* from) { return read_as<uint64_t>(from); }

inline Select expand(uint64_t mask) {
  const Select own_byte{0xff, 0xff << 8, 0xff << 16, 0xffll << 24, 0xffll << 32, 0xffll << 40, 0xffll << 48,
                        static_cast<int64_t>(0xffull << 56)};
  return ((Select{} + static_cast<int64_t>(mask)) & own_byte) != 0;  // lane i looks at byte i (little-endian)
}

inline bool is_any(Select select) {
#ifdef __AVX512F__
  return _mm512_test_epi64_mask((__m512i)select, (__m512i)select) != 0;
#else
  int64_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= select[lane];
  return any != 0;
#endif
}

// x - x is 0 for every finite number and NaN for the others.
inline Select is_finite(Lanes x) { return (x - x) == 0.0; }
inline bool is_finite(double x) { return x - x == 0.0; }

inline double sum(Lanes x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// Lane i gets lane i + kBy of `x`, the last ones the first ones of `then`.
template <int kBy>
inline Lanes shift_down(Lanes x, Lanes then) {
  static_assert(kBy == 1 || kBy == 2 || kBy == 4);
  if constexpr (kBy == 1) {
    return __builtin_shufflevector(x, then, 1, 2, 3, 4, 5, 6, 7, 8);
  } else if constexpr (kBy == 2) {
    return __builtin_shufflevector(x, then, 2, 3, 4, 5, 6, 7, 8, 9);
  } else {
    return __builtin_shufflevector(x, then, 4, 5, 6, 7, 8, 9, 10, 11);
  }
}

}  // namespace megarl::lanes
