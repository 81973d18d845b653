// Mean and variance of the policy tokens in one pass, and the whitening that follows.
//
// A thread takes kItems tokens at a time: their mean and squared distances in registers, joined to what it has (Chan et
// al.). Warps join by shuffles, a block writes one partial result, and a second launch of one block joins those. The
// order is fixed by the length alone, so the same input gives the same bits.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "../moments.h"
#include "launch.h"

namespace megarl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kItems = 8;
constexpr int64_t kBlockTokens = int64_t(kThreads) * kItems;
constexpr int kMaxBlocks = 1024;
constexpr unsigned kEveryLane = 0xffffffffu;

__device__ __forceinline__ Moments join_block(Moments mine) {
  __shared__ Moments of_warps[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Moments other{
        __shfl_down_sync(kEveryLane, mine.count, step), __shfl_down_sync(kEveryLane, mine.mean, step),
        __shfl_down_sync(kEveryLane, mine.m2, step)};
    mine = join(mine, other);
  }
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / kWarp; ++i) mine = join(mine, of_warps[i]);
  }
  return mine;  // whole in thread 0
}

// Tokens `at`, `at + kThreads`, ...: neighbouring threads read neighbouring tokens.
template <typename T>
__device__ __forceinline__ Moments of_items(const T* x, const uint8_t* mask, int64_t at, int64_t num_tokens) {
  double item[kItems];
  bool is_chosen[kItems];
  double sum = 0.0;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t t = at + int64_t(i) * kThreads;
    is_chosen[i] = t < num_tokens && mask[t];
    item[i] = t < num_tokens ? double(x[t]) : 0.0;
    sum += is_chosen[i] ? item[i] : 0.0;
    count += is_chosen[i];
  }
  const double mean = count ? sum / count : 0.0;
  double m2 = 0.0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const double distance = is_chosen[i] ? item[i] - mean : 0.0;
    m2 += distance * distance;
  }
  return {double(count), mean, m2};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
partial_kernel(const T* x, const uint8_t* mask, int64_t num_tokens, Moments* partial) {
  Moments mine{0.0, 0.0, 0.0};
  for (int64_t start = blockIdx.x * kBlockTokens; start < num_tokens; start += gridDim.x * kBlockTokens) {
    mine = join(mine, of_items(x, mask, start + threadIdx.x, num_tokens));
  }
  mine = join_block(mine);
  if (threadIdx.x == 0) partial[blockIdx.x] = mine;
}

__global__ void __launch_bounds__(kThreads) total_kernel(const Moments* partial, int count, Moments* total) {
  Moments mine{0.0, 0.0, 0.0};
  for (int i = threadIdx.x; i < count; i += kThreads) mine = join(mine, partial[i]);
  mine = join_block(mine);
  if (threadIdx.x == 0) *total = mine;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
whiten_kernel(const T* x, const uint8_t* mask, const double* moments, double eps, int64_t num_tokens, T* out) {
  const double scale = whitening_scale(moments[0], moments[2], eps), mean = scale == 0.0 ? 0.0 : moments[1];
  const int64_t start = blockIdx.x * kBlockTokens + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t t = start + int64_t(i) * kThreads;
    if (t < num_tokens) out[t] = mask[t] ? T((double(x[t]) - mean) * scale) : T(0);
  }
}

int64_t count_blocks(int64_t num_tokens) { return (num_tokens + kBlockTokens - 1) / kBlockTokens; }

void check_input(const Tensor& x, const Tensor& mask, const char* op) {
  check(is_fp32_or_fp64(x.scalar_type()), op, ": x is ", dtype_name(x.scalar_type()), ", must be fp32 or fp64");
  check_packed(x, "x", x, "x", x.scalar_type(), op);
  check_packed(mask, "mask", x, "x", ScalarType::Bool, op);
}

template <typename T>
void run_moments(const Tensor& x, const Tensor& mask, int blocks, Moments* partial, cudaStream_t stream) {
  partial_kernel<T><<<blocks, kThreads, 0, stream>>>(
      static_cast<const T*>(x.const_data_ptr()), static_cast<const uint8_t*>(mask.const_data_ptr()), x.numel(),
      partial);
}

Tensor masked_moments(const Tensor& x, const Tensor& mask) {
  check_input(x, mask, "masked_moments");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const int blocks = static_cast<int>(std::clamp<int64_t>(count_blocks(x.numel()), 1, kMaxBlocks));
  Tensor partial = torch::stable::new_empty(x, {3 * blocks}, ScalarType::Double);
  Tensor total = torch::stable::new_empty(x, {3}, ScalarType::Double);
  Moments* parts = static_cast<Moments*>(partial.mutable_data_ptr());
  if (x.scalar_type() == ScalarType::Double) {
    run_moments<double>(x, mask, blocks, parts, stream);
  } else {
    run_moments<float>(x, mask, blocks, parts, stream);
  }
  total_kernel<<<1, kThreads, 0, stream>>>(parts, blocks, static_cast<Moments*>(total.mutable_data_ptr()));
  check_launch("masked_moments");
  return total;
}

template <typename T>
void run_whiten(
    const Tensor& x, const Tensor& mask, const Tensor& moments, double eps, Tensor& out, cudaStream_t stream) {
  whiten_kernel<T><<<count_blocks(x.numel()), kThreads, 0, stream>>>(
      static_cast<const T*>(x.const_data_ptr()), static_cast<const uint8_t*>(mask.const_data_ptr()),
      static_cast<const double*>(moments.const_data_ptr()), eps, x.numel(), static_cast<T*>(out.mutable_data_ptr()));
}

Tensor whiten(const Tensor& x, const Tensor& mask, const Tensor& moments, double eps) {
  check_input(x, mask, "whiten");
  check_packed(moments, "moments", moments, "moments", ScalarType::Double, "whiten");
  check(moments.numel() == 3 && moments.is_cuda(), "whiten: moments must be count, mean, M2 on the GPU");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) return out;
  if (x.scalar_type() == ScalarType::Double) {
    run_whiten<double>(x, mask, moments, eps, out, current_stream(x));
  } else {
    run_whiten<float>(x, mask, moments, eps, out, current_stream(x));
  }
  check_launch("whiten");
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("masked_moments", TORCH_BOX(&megarl::masked_moments));
  m.impl("whiten", TORCH_BOX(&megarl::whiten));
}
