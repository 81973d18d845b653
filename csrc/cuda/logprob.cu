// Log-prob statistics and gradients of rows of logits, on the GPU: one block a row, 16 bytes a thread and access.
//
// Both kernels are bound by memory: the statistics read each logit once (an online softmax, Milakov and Gimelshein
// 2018, with sum exp(t) t carried along), the gradient reads and writes each once.
#include "../logprob.h"

#include <torch/csrc/stable/ops.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "launch.h"

namespace megarl {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
constexpr int kPackWidth = 16 / sizeof(T);

template <typename Stat, typename T>
__device__ __forceinline__ Stat widen(T x) { return static_cast<Stat>(x); }
template <>
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <>
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <typename Out, typename Stat>
__device__ __forceinline__ Out narrow(Stat x) { return static_cast<Out>(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }

// x / τ for a reciprocal of more digits than Stat holds: its rounding would move all of a row's exponents one way.
template <typename Stat>
struct Reciprocal {
  Stat high, low, lowest;  // x below `lowest` count as minus infinity: their exp is 0

  __device__ __forceinline__ explicit Reciprocal(Stat temperature)
      : high(Stat(1) / temperature),
        low(fma(-high, temperature, Stat(1)) / temperature),
        lowest(temperature * (sizeof(Stat) == 8 ? Stat(-800) : Stat(-88))) {}

  __device__ __forceinline__ Stat operator()(Stat x) const { return fma(x, low, x * high); }
};

// What some of a row's columns say: their maximum, sum exp(t), sum exp(t) t.
template <typename Stat>
struct Part {
  Stat top = kNoLogit, sum = 0, weighted = 0;

  __device__ __forceinline__ void raise(Stat higher, Reciprocal<Stat> divide) {
    const Stat shift = max(divide(top - higher), Stat(-1000));
    const Stat scale = exp(shift);
    weighted = scale * (weighted + shift * sum);
    sum *= scale;
    top = higher;
  }

  __device__ __forceinline__ void add(Stat x, Reciprocal<Stat> divide) {
    if (x - top < divide.lowest) return;  // a NaN goes on, and is seen in the sums
    const Stat t = divide(x - top);
    const Stat e = exp(t);
    sum += e;
    weighted += e * t;
  }

  __device__ __forceinline__ void merge(Part other, Reciprocal<Stat> divide) {
    if (other.top > top) raise(other.top, divide);
    else other.raise(top, divide);
    sum += other.sum;
    weighted += other.weighted;
  }
};

template <typename Stat>
__device__ __forceinline__ Part<Stat> shuffle_down(const Part<Stat>& part, int offset) {
  Part<Stat> other;
  other.top = __shfl_down_sync(kAllLanes, part.top, offset);
  other.sum = __shfl_down_sync(kAllLanes, part.sum, offset);
  other.weighted = __shfl_down_sync(kAllLanes, part.weighted, offset);
  return other;
}

// The whole row's part, in thread 0.
template <typename Stat>
__device__ Part<Stat> reduce_block(Part<Stat> part, Reciprocal<Stat> divide) {
  __shared__ Part<Stat> of_warp[kMaxThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) part.merge(shuffle_down(part, offset), divide);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  if (lane == 0) of_warp[warp] = part;
  __syncthreads();
  if (warp == 0) {
    part = lane < num_warps ? of_warp[lane] : Part<Stat>();
    for (int offset = kWarp / 2; offset > 0; offset /= 2) part.merge(shuffle_down(part, offset), divide);
  }
  return part;
}

// Columns before the first that lies on 16 bytes; all of them where the row's packs would not fit `out`'s.
template <typename T, typename Out>
__device__ __forceinline__ int64_t find_head(const T* x, const Out* out, int64_t count) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t head = (16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T);
  if (out != nullptr && reinterpret_cast<uintptr_t>(out + head) % sizeof(Pack<Out, kWidth>) != 0) return count;
  return min(head, count);
}

template <typename T, typename Stat>
__global__ void __launch_bounds__(kMaxThreads) stats_kernel(
    const T* __restrict__ logits, int64_t stride, const int64_t* __restrict__ targets,
    const Stat* __restrict__ temperature, int temperature_step, int64_t rows, int64_t count, int64_t vocab_start,
    int64_t vocab_size, int64_t ignore_index, Stat* __restrict__ stats) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t row = blockIdx.x, target = targets[row];
  if (target == ignore_index) {
    if (threadIdx.x < kNumStats) stats[threadIdx.x * rows + row] = threadIdx.x == 1 ? 1 : 0;
    return;
  }
  const T* x = logits + row * stride;
  const Reciprocal<Stat> divide(temperature[row * temperature_step]);
  Part<Stat> part;
  const auto add = [&](T logit) {
    const Stat wide = widen<Stat>(logit);
    if (wide > part.top) part.raise(wide, divide);
    part.add(wide, divide);
  };
  const int64_t head = find_head<T, T>(x, nullptr, count);
  const int64_t num_packs = (count - head) / kWidth;
  for (int64_t i = threadIdx.x; i < head; i += blockDim.x) add(x[i]);
  const auto* packs = reinterpret_cast<const Pack<T, kWidth>*>(x + head);
#pragma unroll 2
  for (int64_t i = threadIdx.x; i < num_packs; i += blockDim.x) {
    const Pack<T, kWidth> pack = packs[i];
    Stat wide[kWidth], top = part.top;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      wide[k] = widen<Stat>(pack.at[k]);
      top = wide[k] > top ? wide[k] : top;
    }
    if (top > part.top) part.raise(top, divide);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) part.add(wide[k], divide);
  }
  for (int64_t i = head + num_packs * kWidth + threadIdx.x; i < count; i += blockDim.x) add(x[i]);
  part = reduce_block(part, divide);
  if (threadIdx.x != 0) return;
  const int64_t column = target - vocab_start;
  Stat chosen = column >= 0 && column < count ? widen<Stat>(x[column]) : Stat(0);
  if (target < 0 || target >= vocab_size) chosen = std::numeric_limits<Stat>::quiet_NaN();
  stats[row] = part.top;
  stats[rows + row] = part.sum;
  stats[2 * rows + row] = chosen;
  stats[3 * rows + row] = part.weighted;
}

// `logits` and `grads` may be the same memory: each column is read and then written by one thread.
template <typename T, typename Out, typename Stat>
__global__ void __launch_bounds__(kMaxThreads) grad_kernel(
    const T* logits, int64_t stride, const int64_t* __restrict__ targets, const Stat* __restrict__ temperature,
    int temperature_step, const Stat* __restrict__ joined, const Stat* __restrict__ grad_logprob,
    const Stat* __restrict__ grad_entropy, int64_t rows, int64_t count, int64_t width, int64_t vocab_start,
    int64_t ignore_index, Out* grads, int64_t out_stride) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t row = blockIdx.x, target = targets[row];
  const T* x = logits + row * stride;
  Out* out = grads + row * out_stride;
  const bool is_ignored = target == ignore_index;
  for (int64_t i = (is_ignored ? 0 : count) + threadIdx.x; i < width; i += blockDim.x) out[i] = narrow<Out>(Stat(0));
  if (is_ignored) return;
  const Reciprocal<Stat> divide(temperature[row * temperature_step]);
  const Stat inverse = divide.high;
  const Stat top = joined[row], sum = joined[rows + row], entropy = joined[2 * rows + row];
  const Stat log_sum = log(sum);
  const Stat d_logprob = grad_logprob[row], d_entropy = grad_entropy[row];
  const Stat slope = -d_entropy * inverse / sum;
  const Stat offset = -(d_logprob + d_entropy * (entropy - log_sum)) * inverse / sum;
  const int64_t column = target - vocab_start;
  const auto grad = [&](T logit, int64_t i) {
    const Stat below = widen<Stat>(logit) - top, t = divide(below);
    if (below < divide.lowest) return i == column ? d_logprob * inverse : Stat(0);
    const Stat e = exp(t);
    if (i != column) return e * (t * slope + offset);
    const Stat p = e / sum;  // 1 - p of the target keeps what e and the sum have in common
    return ((sum - e) / sum * d_logprob - d_entropy * p * (t - log_sum + entropy)) * inverse;
  };
  const int64_t head = find_head<T, Out>(x, out, count);
  const int64_t num_packs = (count - head) / kWidth;
  for (int64_t i = threadIdx.x; i < head; i += blockDim.x) out[i] = narrow<Out>(grad(x[i], i));
  const auto* packs = reinterpret_cast<const Pack<T, kWidth>*>(x + head);
  auto* out_packs = reinterpret_cast<Pack<Out, kWidth>*>(out + head);
  for (int64_t i = threadIdx.x; i < num_packs; i += blockDim.x) {
    const Pack<T, kWidth> pack = packs[i];
    Pack<Out, kWidth> result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) result.at[k] = narrow<Out>(grad(pack.at[k], head + i * kWidth + k));
    out_packs[i] = result;
  }
  for (int64_t i = head + num_packs * kWidth + threadIdx.x; i < count; i += blockDim.x)
    out[i] = narrow<Out>(grad(x[i], i));
}

int num_threads(int64_t count, int pack_width) {
  const int64_t wanted = (count + pack_width - 1) / pack_width;
  return static_cast<int>(std::clamp<int64_t>((wanted + kWarp - 1) / kWarp * kWarp, kWarp, kMaxThreads));
}

template <typename T, typename Stat>
void reduce_rows(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index, Tensor& stats) {
  const int64_t rows = logits.size(0), count = num_valid_columns(logits, vocab_start, vocab_size);
  stats_kernel<T, Stat><<<rows, num_threads(count, kPackWidth<T>), 0, current_stream(logits)>>>(
      static_cast<const T*>(logits.data_ptr()), logits.stride(0), static_cast<const int64_t*>(targets.data_ptr()),
      static_cast<const Stat*>(temperature.data_ptr()), temperature.size(0) == 1 ? 0 : 1, rows, count, vocab_start,
      vocab_size, ignore_index, static_cast<Stat*>(stats.data_ptr()));
  check_launch("logprob_stats");
}

template <typename T, typename Out, typename Stat>
void write_grads(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, const Tensor& joined,
    const Tensor& grad_logprob, const Tensor& grad_entropy, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index, Tensor& out) {
  const int64_t rows = logits.size(0), count = num_valid_columns(logits, vocab_start, vocab_size);
  grad_kernel<T, Out, Stat><<<rows, num_threads(logits.size(1), kPackWidth<T>), 0, current_stream(logits)>>>(
      static_cast<const T*>(logits.data_ptr()), logits.stride(0), static_cast<const int64_t*>(targets.data_ptr()),
      static_cast<const Stat*>(temperature.data_ptr()), temperature.size(0) == 1 ? 0 : 1,
      static_cast<const Stat*>(joined.data_ptr()), static_cast<const Stat*>(grad_logprob.data_ptr()),
      static_cast<const Stat*>(grad_entropy.data_ptr()), rows, count, logits.size(1), vocab_start, ignore_index,
      static_cast<Out*>(out.data_ptr()), out.stride(0));
  check_launch("logprob_grad");
}

Tensor logprob_stats(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index) {
  check_rows(logits, targets, temperature, true);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor stats = torch::stable::new_empty(logits, {kNumStats, logits.size(0)}, stats_dtype(logits.scalar_type()));
  if (logits.size(0) == 0) return stats;
  const auto run = [&](auto reduce) {
    reduce(logits, targets, temperature, vocab_start, vocab_size, ignore_index, stats);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Float: run(reduce_rows<float, float>); break;
    case ScalarType::BFloat16: run(reduce_rows<__nv_bfloat16, float>); break;
    case ScalarType::Half: run(reduce_rows<__half, float>); break;
    case ScalarType::Double: run(reduce_rows<double, double>); break;
    default: STD_TORCH_CHECK(false, "logits must be fp32, bf16, fp16 or fp64");
  }
  return stats;
}

void logprob_grad(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, const Tensor& joined,
    const Tensor& grad_logprob, const Tensor& grad_entropy, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index, Tensor out) {
  check_rows(logits, targets, temperature, true);
  check_grad_arguments(logits, joined, grad_logprob, grad_entropy, out);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  if (logits.numel() == 0) return;
  const auto run = [&](auto write) {
    write(
        logits, targets, temperature, joined, grad_logprob, grad_entropy, vocab_start, vocab_size, ignore_index, out);
  };
  const ScalarType to = out.scalar_type();
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16: run(write_grads<__nv_bfloat16, __nv_bfloat16, float>); break;
    case ScalarType::Half: run(write_grads<__half, __half, float>); break;
    case ScalarType::Double: run(write_grads<double, double, double>); break;
    case ScalarType::Float:
      if (to == ScalarType::Float) run(write_grads<float, float, float>);
      else if (to == ScalarType::BFloat16) run(write_grads<float, __nv_bfloat16, float>);
      else if (to == ScalarType::Half) run(write_grads<float, __half, float>);
      else STD_TORCH_CHECK(false, "the gradient of fp32 logits must be fp32, bf16 or fp16");
      break;
    default: STD_TORCH_CHECK(false, "logits must be fp32, bf16, fp16 or fp64");
  }
}

void logprob_grad_(
    Tensor logits, const Tensor& targets, const Tensor& temperature, const Tensor& joined, const Tensor& grad_logprob,
    const Tensor& grad_entropy, int64_t vocab_start, int64_t vocab_size, int64_t ignore_index) {
  logprob_grad(
      logits, targets, temperature, joined, grad_logprob, grad_entropy, vocab_start, vocab_size, ignore_index, logits);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("logprob_stats", TORCH_BOX(&logprob_stats));
  m.impl("logprob_grad", TORCH_BOX(&logprob_grad));
  m.impl("logprob_grad_", TORCH_BOX(&logprob_grad_));
}

}  // namespace megarl
