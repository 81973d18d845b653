// Checks that say what was given, as one error for Python.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace megarl {

template <typename... Parts>
inline void check(bool holds, const Parts&... parts) {
  if (__builtin_expect(holds, 1)) return;
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

inline const char* dtype_name(torch::headeronly::ScalarType dtype) { return torch::headeronly::toString(dtype); }

// A packed vector: one dimension, contiguous, on the device of `like` with its length.
inline void check_packed(
    const torch::stable::Tensor& x, const char* name, const torch::stable::Tensor& like, const char* like_name,
    torch::headeronly::ScalarType dtype, const char* op) {
  check(x.dim() == 1 && x.is_contiguous(), op, ": ", name, " must be one contiguous dimension, has ", x.dim(),
        " dimensions");
  check(x.scalar_type() == dtype, op, ": ", name, " is ", dtype_name(x.scalar_type()), ", must be ", dtype_name(dtype));
  check(x.numel() == like.numel(), op, ": ", name, " has ", x.numel(), " elements, ", like_name, " has ",
        like.numel());
  check(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(), op, ": ", name,
        " is on another device than ", like_name);
}

inline bool is_fp32_or_fp64(torch::headeronly::ScalarType dtype) {
  return dtype == torch::headeronly::ScalarType::Float || dtype == torch::headeronly::ScalarType::Double;
}

}  // namespace megarl
