// What the CPU and the CUDA kernels of the log-prob ops share: the meaning of their numbers, and the argument checks.
//
// Per row, with x the valid logits of this vocabulary shard, m their maximum, τ the temperature and t = (x - m) / τ:
//
//     statistics [4, T]   m · sum exp(t) · the target's x (0 where another shard holds it) · sum exp(t) · t
//     joined     [3, T]   m and sum exp(t) over all shards · entropy
//
// They are fp32, or fp64 for fp64 logits. m stays in units of x, so that large logits lose nothing to the
// division, and the sum is not kept as its logarithm, whose rounding would be a relative error of every p = exp(t) / sum.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace megarl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kNumStats = 4;
constexpr int64_t kNumJoined = 3;
constexpr float kNoLogit = -1e30f;  // the maximum of no logits: finite, so that differences stay numbers

// Columns of this shard that are tokens.
inline int64_t num_valid_columns(const Tensor& logits, int64_t vocab_start, int64_t vocab_size) {
  return std::clamp<int64_t>(vocab_size - vocab_start, 0, logits.size(1));
}

inline ScalarType stats_dtype(ScalarType logits) {
  return logits == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_rows(const Tensor& logits, const Tensor& targets, const Tensor& temperature, bool is_cuda) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be [T, Vp], they have ", logits.dim(), " dimensions");
  STD_TORCH_CHECK(logits.size(1) <= 1 || logits.stride(1) == 1, "the logits of a token must lie side by side");
  STD_TORCH_CHECK(
      targets.dim() == 1 && targets.size(0) == logits.size(0) && targets.is_contiguous() &&
          targets.scalar_type() == ScalarType::Long,
      "targets must be [T] int64, contiguous, T = ", logits.size(0));
  STD_TORCH_CHECK(
      temperature.dim() == 1 && temperature.is_contiguous() &&
          temperature.scalar_type() == stats_dtype(logits.scalar_type()) &&
          (temperature.size(0) == 1 || temperature.size(0) == logits.size(0)),
      "temperature must be [1] or [T] fp32 (fp64 for fp64 logits), contiguous, T = ", logits.size(0));
  for (const Tensor* each : {&logits, &targets, &temperature})
    STD_TORCH_CHECK(each->is_cuda() == is_cuda, "logits, targets and temperature must be on one device");
}

inline void check_vector(const Tensor& x, const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(
      x.dim() == 1 && x.size(0) == logits.size(0) && x.is_contiguous() &&
          x.scalar_type() == stats_dtype(logits.scalar_type()) && x.is_cuda() == logits.is_cuda(),
      name, " must be [T], contiguous, fp32 (fp64 for fp64 logits), on the device of the logits");
}

inline void check_grad_arguments(
    const Tensor& logits, const Tensor& joined, const Tensor& grad_logprob, const Tensor& grad_entropy,
    const Tensor& out) {
  STD_TORCH_CHECK(
      joined.dim() == 2 && joined.size(0) == kNumJoined && joined.size(1) == logits.size(0) &&
          joined.is_contiguous() && joined.scalar_type() == stats_dtype(logits.scalar_type()) &&
          joined.is_cuda() == logits.is_cuda(),
      "joined must be [3, T], contiguous, fp32 (fp64 for fp64 logits), on the device of the logits");
  check_vector(grad_logprob, logits, "grad_logprob");
  check_vector(grad_entropy, logits, "grad_entropy");
  STD_TORCH_CHECK(
      out.dim() == 2 && out.size(0) == logits.size(0) && out.size(1) == logits.size(1) &&
          (out.size(1) <= 1 || out.stride(1) == 1) && out.is_cuda() == logits.is_cuda() &&
          (out.scalar_type() == logits.scalar_type() || logits.scalar_type() == ScalarType::Float),
      "out must be [T, Vp] in the logits' dtype (any but fp64 for fp32 logits), on their device");
}

}  // namespace megarl
