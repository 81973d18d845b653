// What every launch needs: torch's current stream, and an error that is not lost.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "../check.h"

namespace megarl {

inline cudaStream_t current_stream(const torch::stable::Tensor& x) {
  void* stream = nullptr;
  const AOTITorchError error = aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  check(error == AOTI_TORCH_SUCCESS, "torch gave no CUDA stream for device ", x.get_device_index());
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  check(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

inline int num_multiprocessors(const torch::stable::Tensor& x) {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, x.get_device_index());
  check(error == cudaSuccess, "cudaDeviceGetAttribute: ", cudaGetErrorString(error));
  return count;
}

// Neighbouring elements that one thread moves with one access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};

template <typename T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

}  // namespace megarl
