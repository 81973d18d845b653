// Adds a narrow, transposed piece of a weight gradient to the fp32 gradient; see csrc/cpu/accumulate.cpp.
#include "../accumulate.h"

#include <torch/csrc/stable/library.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace megarl {
namespace {

constexpr int kTile = 32;
constexpr int kTileRows = 8;

// A tile is read along r, turned in shared memory (one column of padding keeps its banks apart), and added along h.
template <typename T>
__global__ void __launch_bounds__(kTile* kTileRows) add_transposed_kernel(
    float* __restrict__ total, int64_t total_stride, const T* __restrict__ part, int64_t part_stride, int64_t rows,
    int64_t width) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t r = blockIdx.x * kTile + threadIdx.x;
  for (int64_t h0 = blockIdx.y * kTile; h0 < width; h0 += gridDim.y * kTile) {
    for (int k = threadIdx.y; k < kTile; k += kTileRows)
      if (r < rows && h0 + k < width) tile[k][threadIdx.x] = static_cast<float>(part[(h0 + k) * part_stride + r]);
    __syncthreads();
    const int64_t h = h0 + threadIdx.x;
    for (int k = threadIdx.y; k < kTile; k += kTileRows) {
      const int64_t to_row = blockIdx.x * kTile + k;
      if (to_row < rows && h < width) total[to_row * total_stride + h] += tile[threadIdx.x][k];
    }
    __syncthreads();
  }
}

template <typename T>
void launch(Tensor& total, const Tensor& part) {
  const int64_t rows = total.size(0), width = total.size(1);
  const auto blocks = [](int64_t count) { return static_cast<unsigned>((count + kTile - 1) / kTile); };
  const dim3 grid(blocks(rows), std::min(blocks(width), 65535u));
  add_transposed_kernel<T><<<grid, dim3(kTile, kTileRows), 0, current_stream(total)>>>(
      static_cast<float*>(total.data_ptr()), total.stride(0), static_cast<const T*>(part.data_ptr()), part.stride(0),
      rows, width);
  check_launch("add_transposed_");
}

void add_transposed_(Tensor total, const Tensor& part) {
  check_add_transposed(total, part, true);
  const torch::stable::accelerator::DeviceGuard guard(total.get_device_index());
  if (total.numel() == 0) return;
  switch (part.scalar_type()) {
    case ScalarType::BFloat16: launch<__nv_bfloat16>(total, part); break;
    case ScalarType::Half: launch<__half>(total, part); break;
    case ScalarType::Float: launch<float>(total, part); break;
    default: STD_TORCH_CHECK(false, "part must be bf16, fp16 or fp32");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) { m.impl("add_transposed_", TORCH_BOX(&add_transposed_)); }

}  // namespace megarl
