// The argument checks that the CPU and the CUDA kernel of `add_transposed_` share.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace megarl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_add_transposed(const Tensor& total, const Tensor& part, bool is_cuda) {
  STD_TORCH_CHECK(
      total.dim() == 2 && part.dim() == 2 && total.size(0) == part.size(1) && total.size(1) == part.size(0),
      "total must be [R, H] and part [H, R]");
  STD_TORCH_CHECK(total.scalar_type() == ScalarType::Float, "total must be fp32");
  STD_TORCH_CHECK(
      (total.size(1) <= 1 || total.stride(1) == 1) && (part.size(1) <= 1 || part.stride(1) == 1),
      "the numbers of a row must lie side by side");
  STD_TORCH_CHECK(total.is_cuda() == is_cuda && part.is_cuda() == is_cuda, "total and part must be on one device");
}

}  // namespace megarl
