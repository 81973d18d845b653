// Mean and variance of the policy tokens in one pass over memory, and the whitening that follows.
//
// The tokens are cut into blocks of a fixed size that stay in the cache: a block's mean first, then its squared
// distances from that mean, both fp64. Blocks are joined in order, so the result is the same on any number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "../check.h"
#include "../moments.h"
#include "lanes.h"

namespace megarl {
namespace {

using namespace lanes;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlockTokens = 2048;
constexpr int64_t kBlocksPerThread = 8;

inline int count_true(uint64_t mask) { return static_cast<int>((mask * kAll) >> 56); }

// The same tokens as eight vectors of eight, so that the additions do not wait for each other.
template <typename T, typename Each>
inline double sum_selected(const T* x, const bool* mask, int64_t length, const Each& each) {
  constexpr int kStreams = 4;
  Lanes sums[kStreams] = {};
  int64_t t = 0;
  for (; t + kStreams * kWidth <= length; t += kStreams * kWidth) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const int64_t at = t + stream * kWidth;
      sums[stream] += expand(load_mask(mask + at)) ? each(load(x + at)) : Lanes{};
    }
  }
  double total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; t < length; ++t) {
    if (mask[t]) total += each(broadcast(x[t]))[0];
  }
  return total;
}

inline int64_t count_selected(const bool* mask, int64_t length) {
  int64_t count = 0, t = 0;
  for (; t + kWidth <= length; t += kWidth) count += count_true(load_mask(mask + t));
  for (; t < length; ++t) count += mask[t];
  return count;
}

template <typename T>
Moments block_moments(const T* x, const bool* mask, int64_t length) {
  const int64_t count = count_selected(mask, length);
  if (count == 0) return {0.0, 0.0, 0.0};
  const double mean = sum_selected(x, mask, length, [](Lanes each) { return each; }) / count;
  const double m2 = sum_selected(x, mask, length, [mean](Lanes each) { return (each - mean) * (each - mean); });
  return {static_cast<double>(count), mean, m2};
}

template <typename T>
Moments total_moments(const T* x, const bool* mask, int64_t num_tokens) {
  const int64_t num_blocks = (num_tokens + kBlockTokens - 1) / kBlockTokens;
  std::vector<Moments> blocks(num_blocks);
  torch::stable::parallel_for(0, num_blocks, kBlocksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t start = block * kBlockTokens;
      blocks[block] = block_moments(x + start, mask + start, std::min(kBlockTokens, num_tokens - start));
    }
  });
  Moments total{0.0, 0.0, 0.0};
  for (const Moments& block : blocks) total = join(total, block);
  return total;
}

Tensor masked_moments(const Tensor& x, const Tensor& mask) {
  check(is_fp32_or_fp64(x.scalar_type()), "masked_moments: x is ", dtype_name(x.scalar_type()),
        ", must be fp32 or fp64");
  check_packed(x, "x", x, "x", x.scalar_type(), "masked_moments");
  check_packed(mask, "mask", x, "x", ScalarType::Bool, "masked_moments");
  const bool* m = static_cast<const bool*>(mask.const_data_ptr());
  const Moments total = x.scalar_type() == ScalarType::Double
                            ? total_moments(static_cast<const double*>(x.const_data_ptr()), m, x.numel())
                            : total_moments(static_cast<const float*>(x.const_data_ptr()), m, x.numel());
  Tensor result = torch::stable::new_empty(x, {3}, ScalarType::Double);
  double* out = static_cast<double*>(result.mutable_data_ptr());
  out[0] = total.count;
  out[1] = total.mean;
  out[2] = total.m2;
  return result;
}

template <typename T>
void whiten_range(const T* x, const bool* mask, int64_t begin, int64_t end, double mean, double scale, T* out) {
  int64_t t = begin;
  for (; t + kWidth <= end; t += kWidth) {
    store(out + t, expand(load_mask(mask + t)) ? (load(x + t) - mean) * scale : Lanes{});
  }
  for (; t < end; ++t) out[t] = mask[t] ? static_cast<T>((x[t] - mean) * scale) : T(0);
}

template <typename T>
void run_whiten(const Tensor& x, const bool* mask, double mean, double scale, Tensor& out) {
  const T* from = static_cast<const T*>(x.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, x.numel(), kBlockTokens * kBlocksPerThread, [&](int64_t begin, int64_t end) {
    whiten_range(from, mask, begin, end, mean, scale, to);
  });
}

Tensor whiten(const Tensor& x, const Tensor& mask, const Tensor& moments, double eps) {
  check(is_fp32_or_fp64(x.scalar_type()), "whiten: x is ", dtype_name(x.scalar_type()), ", must be fp32 or fp64");
  check_packed(x, "x", x, "x", x.scalar_type(), "whiten");
  check_packed(mask, "mask", x, "x", ScalarType::Bool, "whiten");
  check_packed(moments, "moments", moments, "moments", ScalarType::Double, "whiten");
  check(moments.numel() == 3, "whiten: moments has ", moments.numel(), " elements, must be count, mean, M2");
  const double* given = static_cast<const double*>(moments.const_data_ptr());
  const double mean = given[0] < 2.0 ? 0.0 : given[1], scale = whitening_scale(given[0], given[2], eps);
  const bool* m = static_cast<const bool*>(mask.const_data_ptr());
  Tensor out = torch::stable::empty_like(x);
  if (x.scalar_type() == ScalarType::Double) {
    run_whiten<double>(x, m, mean, scale, out);
  } else {
    run_whiten<float>(x, m, mean, scale, out);
  }
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("masked_moments", TORCH_BOX(&megarl::masked_moments));
  m.impl("whiten", TORCH_BOX(&megarl::whiten));
}
