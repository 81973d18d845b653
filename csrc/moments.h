// Count, mean and sum of squared distances from the mean, and how those of two groups are joined.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEGARL_BOTH __host__ __device__ __forceinline__
#else
#define MEGARL_BOTH inline
#endif

namespace megarl {

struct Moments {
  double count, mean, m2;
};

// Chan, Golub and LeVeque 1983: exact whatever the groups' means, and 0 + x = x.
MEGARL_BOTH Moments join(const Moments& x, const Moments& y) {
  const double count = x.count + y.count;
  if (count == 0.0) return {0.0, 0.0, 0.0};
  const double share = y.count / count, distance = y.mean - x.mean;
  return {count, x.mean + distance * share, x.m2 + y.m2 + distance * distance * share * x.count};
}

// What multiplies a distance from the mean; 0 when fewer than two numbers have no variance.
MEGARL_BOTH double whitening_scale(double count, double m2, double eps) {
#ifdef __CUDA_ARCH__
  return count < 2.0 ? 0.0 : 1.0 / sqrt(m2 / (count - 1.0) + eps);
#else
  return count < 2.0 ? 0.0 : 1.0 / __builtin_sqrt(m2 / (count - 1.0) + eps);
#endif
}

}  // namespace megarl
