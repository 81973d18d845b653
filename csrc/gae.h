// The checks of `gae`, the same for CPU and CUDA.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "check.h"

namespace megarl {

// What each sequence is computed with; a null pointer = the scalar, or 0.
template <typename T>
struct PerSequence {
  const T* bootstrap;
  const double* gammas;
  const double* lams;
};

inline void check_gae(
    const torch::stable::Tensor& rewards, const torch::stable::Tensor& values, const torch::stable::Tensor& mask,
    const torch::stable::Tensor& cu_seqlens, const std::optional<torch::stable::Tensor>& bootstrap,
    const std::optional<torch::stable::Tensor>& gammas, const std::optional<torch::stable::Tensor>& lams) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = values.scalar_type();
  check(is_fp32_or_fp64(dtype), "gae: values are ", dtype_name(dtype), ", must be fp32 or fp64");
  check_packed(values, "values", values, "values", dtype, "gae");
  check_packed(rewards, "rewards", values, "values", dtype, "gae");
  check_packed(mask, "mask", values, "values", ScalarType::Bool, "gae");
  check_packed(cu_seqlens, "cu_seqlens", cu_seqlens, "cu_seqlens", ScalarType::Long, "gae");
  check(cu_seqlens.numel() >= 1, "gae: cu_seqlens is empty; for no sequences it is [0]");
  check(cu_seqlens.is_cuda() == values.is_cuda(), "gae: cu_seqlens is on another device than values");
  const int64_t num_sequences = cu_seqlens.numel() - 1;
  auto check_one = [&](const std::optional<torch::stable::Tensor>& x, const char* name, ScalarType wanted) {
    if (!x.has_value()) return;
    check(x->numel() == num_sequences, "gae: ", name, " has ", x->numel(), " elements for ", num_sequences,
          " sequences");
    check_packed(*x, name, *x, name, wanted, "gae");
    check(x->is_cuda() == values.is_cuda(), "gae: ", name, " is on another device than values");
  };
  check_one(bootstrap, "bootstrap", dtype);
  check_one(gammas, "gammas", ScalarType::Double);
  check_one(lams, "lams", ScalarType::Double);
}

template <typename T>
PerSequence<T> per_sequence(
    const std::optional<torch::stable::Tensor>& bootstrap, const std::optional<torch::stable::Tensor>& gammas,
    const std::optional<torch::stable::Tensor>& lams) {
  return {
      bootstrap.has_value() ? static_cast<const T*>(bootstrap->const_data_ptr()) : nullptr,
      gammas.has_value() ? static_cast<const double*>(gammas->const_data_ptr()) : nullptr,
      lams.has_value() ? static_cast<const double*>(lams->const_data_ptr()) : nullptr};
}

}  // namespace megarl
