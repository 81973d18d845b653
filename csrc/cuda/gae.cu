// Generalised advantage estimation over packed sequences: a parallel scan inside every sequence.
//
// As in csrc/cpu/gae.cpp each token is an affine map s -> a * s + b of what comes after it:
//
//     policy token:  A = r - V + s        a = gamma * lam, b = gamma * lam * r + (gamma - gamma * lam) * V
//     masked token:  A = 0                a = 1,           b = r, if finite
//
// One block takes one sequence, chunk by chunk from its end. A thread folds kItems neighbouring tokens into one map, a
// warp scans its 32 maps by shuffles, the warps' maps meet in shared memory, and every thread applies what lies after it.
// The next chunk is loaded while this one is scanned. fp64 between load and store.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "../gae.h"
#include "launch.h"

namespace megarl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kItems = 4;
constexpr int kWarp = 32;
constexpr unsigned kEveryLane = 0xffffffffu;

struct Map {
  double a, b;
};

// First `inner`, then `outer`.
__device__ __forceinline__ Map chain(Map outer, Map inner) { return {outer.a * inner.a, outer.a * inner.b + outer.b}; }

template <typename T>
struct Tokens {
  T reward[kItems], value[kItems];
  uint8_t is_policy[kItems];
};

template <typename T>
struct Arguments {
  const T* rewards;
  const T* values;
  const uint8_t* mask;
  const int64_t* starts;
  T* advantages;
  T* returns;
  double gamma, lam;
  PerSequence<T> own;
  int64_t num_tokens;
};

// kItems tokens from `at`, a multiple of kItems. Outside [begin, end) they are masked tokens without a reward.
template <typename T, bool kAligned>
__device__ __forceinline__ void load_tokens(
    const Arguments<T>& args, int64_t at, int64_t begin, int64_t end, Tokens<T>& tokens) {
  if (kAligned && at >= begin && at + kItems <= end) {
    const auto reward = *reinterpret_cast<const Pack<T, kItems>*>(args.rewards + at);
    const auto value = *reinterpret_cast<const Pack<T, kItems>*>(args.values + at);
    const auto mask = *reinterpret_cast<const Pack<uint8_t, kItems>*>(args.mask + at);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      tokens.reward[i] = reward.at[i];
      tokens.value[i] = value.at[i];
      tokens.is_policy[i] = mask.at[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool is_inside = at + i >= begin && at + i < end;
    tokens.reward[i] = is_inside ? args.rewards[at + i] : T(0);
    tokens.value[i] = is_inside ? args.values[at + i] : T(0);
    tokens.is_policy[i] = is_inside ? args.mask[at + i] : uint8_t(0);
  }
}

template <typename T>
__device__ __forceinline__ Map map_of(const Tokens<T>& tokens, int i, double gamma, double decay) {
  const double reward = tokens.reward[i], value = tokens.value[i];
  if (tokens.is_policy[i]) return {decay, decay * reward + (gamma - decay) * value};
  return {1.0, is_finite(reward) ? reward : 0.0};
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store_tokens(
    const Arguments<T>& args, int64_t at, int64_t begin, int64_t end, const T (&advantage)[kItems],
    const T (&returned)[kItems]) {
  if (kAligned && at >= begin && at + kItems <= end) {
    Pack<T, kItems> first, second;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      first.at[i] = advantage[i];
      second.at[i] = returned[i];
    }
    *reinterpret_cast<Pack<T, kItems>*>(args.advantages + at) = first;
    *reinterpret_cast<Pack<T, kItems>*>(args.returns + at) = second;
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (at + i >= begin && at + i < end) {
      args.advantages[at + i] = advantage[i];
      args.returns[at + i] = returned[i];
    }
  }
}

template <typename T, int kThreads, bool kAligned>
__global__ void __launch_bounds__(kThreads) gae_kernel(const Arguments<T> args) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int64_t kChunk = int64_t(kThreads) * kItems;
  __shared__ Map warp_maps[2][kWarps];  // of this chunk and of the one before: one barrier a chunk suffices

  const int sequence = blockIdx.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // clamped: a wrong boundary must not reach outside the tensors
  const int64_t begin = min(max(args.starts[sequence], int64_t(0)), args.num_tokens);
  const int64_t end = min(max(args.starts[sequence + 1], begin), args.num_tokens);
  if (begin == end) return;
  const double gamma = args.own.gammas ? args.own.gammas[sequence] : args.gamma;
  const double decay = gamma * (args.own.lams ? args.own.lams[sequence] : args.lam);
  double after = args.own.bootstrap ? gamma * double(args.own.bootstrap[sequence]) : 0.0;  // after the chunk

  const int64_t first = begin / kItems * kItems;
  const int64_t num_chunks = (end - first + kChunk - 1) / kChunk;
  const int64_t own = first + int64_t(threadIdx.x) * kItems;
  Tokens<T> next;
  load_tokens<T, kAligned>(args, own + (num_chunks - 1) * kChunk, begin, end, next);
  for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) {
    const Tokens<T> tokens = next;
    if (chunk > 0) load_tokens<T, kAligned>(args, own + (chunk - 1) * kChunk, begin, end, next);

    Map mine{1.0, 0.0};
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) mine = chain(map_of(tokens, i, gamma, decay), mine);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const Map other{
          __shfl_down_sync(kEveryLane, mine.a, step), __shfl_down_sync(kEveryLane, mine.b, step)};
      if (lane + step < kWarp) mine = chain(mine, other);
    }
    if (lane == 0) warp_maps[chunk & 1][warp] = mine;
    __syncthreads();
    double here = after;  // what comes after this warp
#pragma unroll
    for (int i = kWarps - 1; i >= 0; --i) {
      const Map map = warp_maps[chunk & 1][i];
      after = map.a * after + map.b;
      if (i > warp) here = after;
    }
    // what comes after this thread: the maps of the lanes behind it applied to what comes after the warp
    const double a = __shfl_down_sync(kEveryLane, mine.a, 1), b = __shfl_down_sync(kEveryLane, mine.b, 1);
    if (lane + 1 < kWarp) here = a * here + b;

    T advantage[kItems], returned[kItems];
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      const double value = tokens.value[i], result = double(tokens.reward[i]) - value + here;
      advantage[i] = tokens.is_policy[i] ? T(result) : T(0);
      returned[i] = tokens.is_policy[i] ? T(result + value) : T(0);
      const Map map = map_of(tokens, i, gamma, decay);
      here = map.a * here + map.b;
    }
    store_tokens<T, kAligned>(args, own + chunk * kChunk, begin, end, advantage, returned);
  }
}

template <typename T, int kThreads>
void launch(const Arguments<T>& args, int64_t num_sequences, bool is_aligned, cudaStream_t stream) {
  if (is_aligned) {
    gae_kernel<T, kThreads, true><<<num_sequences, kThreads, 0, stream>>>(args);
  } else {
    gae_kernel<T, kThreads, false><<<num_sequences, kThreads, 0, stream>>>(args);
  }
}

template <typename T>
void run_gae(const Arguments<T>& args, int64_t num_sequences, cudaStream_t stream) {
  auto is_aligned = [](const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
  const bool all_aligned = is_aligned(args.rewards, sizeof(T) * kItems) && is_aligned(args.values, sizeof(T) * kItems) &&
                           is_aligned(args.advantages, sizeof(T) * kItems) &&
                           is_aligned(args.returns, sizeof(T) * kItems) && is_aligned(args.mask, kItems);
  // a block as long as the mean sequence asks for: the lengths themselves are on the device
  const int64_t mean_length = args.num_tokens / num_sequences;
  if (mean_length >= 512) {
    launch<T, 256>(args, num_sequences, all_aligned, stream);
  } else if (mean_length >= 128) {
    launch<T, 64>(args, num_sequences, all_aligned, stream);
  } else {
    launch<T, 32>(args, num_sequences, all_aligned, stream);
  }
  check_launch("gae");
}

std::tuple<Tensor, Tensor> gae(
    const Tensor& rewards, const Tensor& values, const Tensor& mask, const Tensor& cu_seqlens, double gamma, double lam,
    const std::optional<Tensor>& bootstrap, const std::optional<Tensor>& gammas, const std::optional<Tensor>& lams) {
  check_gae(rewards, values, mask, cu_seqlens, bootstrap, gammas, lams);
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  Tensor advantages = torch::stable::empty_like(values), returns = torch::stable::empty_like(values);
  const int64_t num_sequences = cu_seqlens.numel() - 1, num_tokens = values.numel();
  if (num_sequences == 0 || num_tokens == 0) return {advantages, returns};
  auto run = [&](auto zero) {
    using T = decltype(zero);
    run_gae<T>(
        {static_cast<const T*>(rewards.const_data_ptr()), static_cast<const T*>(values.const_data_ptr()),
         static_cast<const uint8_t*>(mask.const_data_ptr()), static_cast<const int64_t*>(cu_seqlens.const_data_ptr()),
         static_cast<T*>(advantages.mutable_data_ptr()), static_cast<T*>(returns.mutable_data_ptr()), gamma, lam,
         per_sequence<T>(bootstrap, gammas, lams), num_tokens},
        num_sequences, current_stream(values));
  };
  if (values.scalar_type() == ScalarType::Double) {
    run(double(0));
  } else {
    run(float(0));
  }
  return {advantages, returns};
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) { m.impl("gae", TORCH_BOX(&megarl::gae)); }
