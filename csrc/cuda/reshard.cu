// Many strided copies between live tensors in one launch.
//
// The rows of a segment, laid one after the other, are cut into tiles of kTileElements; one block copies one tile. It
// finds its segment by a binary search in the plan's column of tiles before each segment, and moves 16 bytes at a time
// where both sides allow it, less where they do not. The addresses of the tensors travel with every call (one small
// upload), the plan only once.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_bf16.h>

#include <cstring>
#include <optional>
#include <vector>

#include "../segments.h"
#include "launch.h"

namespace megarl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // accesses of a thread in flight

// One tensor as the kernel sees it.
struct Entry {
  char* data;
  int64_t element_bytes;
};
static_assert(sizeof(Entry) == 16);

// A row of the plan on the device.
struct PlacedSegment {
  Segment segment;
  int64_t tiles_before;
};
static_assert(sizeof(PlacedSegment) == (kPlanColumns + 1) * sizeof(int64_t));

// Where the elements of one tile lie: element i of the rows laid one after the other is at row i / width.
struct Tile {
  const char* from;  // of row `row`
  char* to;
  int64_t from_stride, to_stride;  // bytes
  int64_t width;                   // elements of a row
  int64_t column;                  // of the tile's first element
  int32_t count;
};

__device__ __forceinline__ Tile find_tile(
    const Entry* srcs, const Entry* dsts, const Segment& segment, int64_t tile, Entry& src, Entry& dst) {
  src = srcs[segment.src];
  dst = dsts[segment.dst];
  const bool is_one_piece =
      segment.rows == 1 || (segment.src_stride == segment.width && segment.dst_stride == segment.width);
  const int64_t total = segment.rows * segment.width, width = is_one_piece ? total : segment.width;
  const int64_t begin = tile * kTileElements, row = begin / width;
  const int64_t from_stride = segment.src_stride * src.element_bytes;
  const int64_t to_stride = segment.dst_stride * dst.element_bytes;
  return {
      src.data + segment.src_offset * src.element_bytes + row * from_stride,
      dst.data + segment.dst_offset * dst.element_bytes + row * to_stride,
      from_stride,
      to_stride,
      width,
      begin - row * width,
      static_cast<int32_t>(min(kTileElements, total - begin))};
}

// The group that begins at element `i` of the tile: where it is read and where it is written.
template <typename From, typename To>
struct Place {
  const From* from;
  To* to;
};

template <typename From, typename To>
__device__ __forceinline__ Place<From, To> place_of(const Tile& tile, int i) {
  const int64_t first = tile.width - tile.column;  // elements of the tile in its first row
  int64_t row = 0, at = tile.column + i;
  if (i >= first) {
    const uint32_t rest = i - static_cast<int32_t>(first);
    const uint32_t width = static_cast<uint32_t>(min(tile.width, kTileElements));  // longer ones are not passed here
    row = 1 + rest / width;
    at = rest % width;
  }
  return {reinterpret_cast<const From*>(tile.from + row * tile.from_stride) + at,
          reinterpret_cast<To*>(tile.to + row * tile.to_stride) + at};
}

// Moves the elements from `begin` on, kGroup at a time: a few are loaded before the first is stored. A group never
// crosses a row; elements that do not fill a group are left.
template <typename From, typename To, int kGroup, typename Load, typename Store>
__device__ __forceinline__ void move_groups(const Tile& tile, int begin, const Load& load, const Store& store) {
  constexpr int kStep = kThreads * kGroup;
  const int end = begin + (tile.count - begin) / kGroup * kGroup;
  for (int base = begin + threadIdx.x * kGroup; base < end; base += kStep * kUnroll) {
    decltype(load(static_cast<const From*>(nullptr))) held[kUnroll];
    To* to[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (base + j * kStep < end) {
        const Place<From, To> place = place_of<From, To>(tile, base + j * kStep);
        held[j] = load(place.from);
        to[j] = place.to;
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (base + j * kStep < end) store(to[j], held[j]);
    }
  }
}

// True when groups of `group` elements are aligned on both sides and do not cross rows.
__device__ __forceinline__ bool fits(const Tile& tile, int group, int from_bytes, int to_bytes) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(tile.from) + tile.column * from_bytes;
  const uintptr_t to = reinterpret_cast<uintptr_t>(tile.to) + tile.column * to_bytes;
  const uintptr_t from_mask = min(16, group * from_bytes) - 1, to_mask = min(16, group * to_bytes) - 1;
  if ((from & from_mask) != 0 || (to & to_mask) != 0) return false;
  if (tile.column + tile.count <= tile.width) return true;
  return (tile.from_stride & from_mask) == 0 && (tile.to_stride & to_mask) == 0 && tile.width % group == 0 &&
         tile.column % group == 0;
}

template <typename Unit, int kGroup>
__device__ __forceinline__ void copy_units(const Tile& tile) {
  using Many = Pack<Unit, kGroup>;
  move_groups<Unit, Unit, kGroup>(
      tile, 0, [](const Unit* from) { return *reinterpret_cast<const Many*>(from); },
      [](Unit* to, const Many& held) { *reinterpret_cast<Many*>(to) = held; });
  if (kGroup > 1 && tile.count % kGroup != 0) {
    move_groups<Unit, Unit, 1>(
        tile, tile.count / kGroup * kGroup, [](const Unit* from) { return *from; },
        [](Unit* to, const Unit& held) { *to = held; });
  }
}

template <typename Unit>
__device__ __forceinline__ void copy_same(const Tile& tile) {
  constexpr int kGroup = 16 / sizeof(Unit);
  if (kGroup > 1 && fits(tile, kGroup, sizeof(Unit), sizeof(Unit))) {
    copy_units<Unit, kGroup>(tile);
  } else if (kGroup > 4 && fits(tile, kGroup / 4, sizeof(Unit), sizeof(Unit))) {
    copy_units<Unit, (kGroup > 4 ? kGroup / 4 : 1)>(tile);  // 4 bytes
  } else {
    copy_units<Unit, 1>(tile);
  }
}

using Bfloat16 = __nv_bfloat16;
using EightBfloat16 = Pack<Bfloat16, 8>;

struct EightFloats {
  Pack<float, 4> low, high;
};

__device__ __forceinline__ void narrow_tile(const Tile& tile) {
  const bool is_wide = fits(tile, 8, sizeof(float), sizeof(Bfloat16));
  if (is_wide) {
    move_groups<float, Bfloat16, 8>(
        tile, 0,
        [](const float* from) {
          const auto* parts = reinterpret_cast<const Pack<float, 4>*>(from);
          return EightFloats{parts[0], parts[1]};
        },
        [](Bfloat16* to, const EightFloats& held) {
          EightBfloat16 result;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            result.at[i] = __float2bfloat16_rn(held.low.at[i]);
            result.at[i + 4] = __float2bfloat16_rn(held.high.at[i]);
          }
          *reinterpret_cast<EightBfloat16*>(to) = result;
        });
  }
  move_groups<float, Bfloat16, 1>(
      tile, is_wide ? tile.count / 8 * 8 : 0, [](const float* from) { return *from; },
      [](Bfloat16* to, const float& held) { *to = __float2bfloat16_rn(held); });
}

__device__ __forceinline__ void widen_tile(const Tile& tile) {
  const bool is_wide = fits(tile, 8, sizeof(Bfloat16), sizeof(float));
  if (is_wide) {
    move_groups<Bfloat16, float, 8>(
        tile, 0, [](const Bfloat16* from) { return *reinterpret_cast<const EightBfloat16*>(from); },
        [](float* to, const EightBfloat16& held) {
          EightFloats result;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            result.low.at[i] = __bfloat162float(held.at[i]);
            result.high.at[i] = __bfloat162float(held.at[i + 4]);
          }
          auto* parts = reinterpret_cast<Pack<float, 4>*>(to);
          parts[0] = result.low;
          parts[1] = result.high;
        });
  }
  move_groups<Bfloat16, float, 1>(
      tile, is_wide ? tile.count / 8 * 8 : 0, [](const Bfloat16* from) { return *from; },
      [](float* to, const Bfloat16& held) { *to = __bfloat162float(held); });
}

__global__ void __launch_bounds__(kThreads) copy_kernel(
    const Entry* srcs, const Entry* dsts, const PlacedSegment* plan, int num_segments) {
  // the last segment with no more tiles before it than this block's number; empty ones among them come first
  int low = 0, high = num_segments;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (plan[middle].tiles_before <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  Entry src, dst;
  const Tile tile = find_tile(srcs, dsts, plan[low].segment, blockIdx.x - plan[low].tiles_before, src, dst);
  if (src.element_bytes == 4 && dst.element_bytes == 2) {
    narrow_tile(tile);
  } else if (src.element_bytes == 2 && dst.element_bytes == 4) {
    widen_tile(tile);
  } else if (dst.element_bytes == 2) {
    copy_same<uint16_t>(tile);
  } else if (dst.element_bytes == 4) {
    copy_same<uint32_t>(tile);
  } else if (dst.element_bytes == 1) {
    copy_same<uint8_t>(tile);
  } else if (dst.element_bytes == 8) {
    copy_same<uint64_t>(tile);
  } else {
    copy_same<uint4>(tile);
  }
}

// The entries of sources and destinations, one after the other, on the device.
Tensor upload_entries(const Side& srcs, const Side& dsts, const Tensor& like) {
  std::vector<Entry> entries;
  for (const Side* side : {&srcs, &dsts}) {
    for (size_t i = 0; i < side->data.size(); ++i) {
      check(side->element_bytes[i] < 16 || reinterpret_cast<uintptr_t>(side->data[i]) % 16 == 0,
            "copy_segments: a tensor of 16-byte elements begins at an address that is no multiple of 16");
      entries.push_back({side->data[i], side->element_bytes[i]});
    }
  }
  const int64_t bytes = static_cast<int64_t>(entries.size() * sizeof(Entry));
  Tensor host = torch::stable::empty({bytes}, ScalarType::Byte, std::nullopt, std::nullopt, true);  // pinned
  std::memcpy(host.mutable_data_ptr(), entries.data(), bytes);
  Tensor device = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  torch::stable::copy_(device, host, true);
  return device;
}

Tensor upload_plan(const Segment* segments, int64_t count, const Tensor& like) {
  Tensor host = torch::stable::empty({count, kPlanColumns + 1}, ScalarType::Long, std::nullopt, std::nullopt, true);
  PlacedSegment* placed = static_cast<PlacedSegment*>(host.mutable_data_ptr());
  int64_t tiles = 0;
  for (int64_t i = 0; i < count; ++i) {
    placed[i] = {segments[i], tiles};
    tiles += (segments[i].elements() + kTileElements - 1) / kTileElements;
  }
  Tensor device = torch::stable::new_empty(like, {count, kPlanColumns + 1}, ScalarType::Long);
  torch::stable::copy_(device, host, true);
  return device;
}

void copy_segments(
    const std::vector<Tensor>& srcs, const std::vector<Tensor>& dsts, const Tensor& plan,
    const std::optional<Tensor>& device_plan) {
  if (plan.size(0) == 0 || dsts.empty()) return;
  const Tensor& like = dsts[0];
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  const Side from = read_side(srcs, "srcs", false, true, like.get_device_index());
  const Side to = read_side(dsts, "dsts", true, true, like.get_device_index());
  const Segment* segments = read_plan(plan, from, to);
  const int64_t count = plan.size(0);
  int64_t num_tiles = 0;
  for (int64_t i = 0; i < count; ++i) num_tiles += (segments[i].elements() + kTileElements - 1) / kTileElements;
  if (num_tiles == 0) return;
  check(num_tiles < (int64_t(1) << 31), "copy_segments: ", num_tiles, " tiles in one call; split the plan");
  if (device_plan.has_value()) {
    check(device_plan->is_cuda() && device_plan->scalar_type() == ScalarType::Long && device_plan->is_contiguous() &&
              device_plan->numel() == count * (kPlanColumns + 1),
          "copy_segments: device_plan is not this plan as place_plan makes it");
  }
  const Tensor placed = device_plan.has_value() ? *device_plan : upload_plan(segments, count, like);
  const Tensor entries = upload_entries(from, to, like);
  const Entry* table = static_cast<const Entry*>(entries.const_data_ptr());
  copy_kernel<<<static_cast<unsigned>(num_tiles), kThreads, 0, current_stream(like)>>>(
      table, table + srcs.size(), static_cast<const PlacedSegment*>(placed.const_data_ptr()),
      static_cast<int>(count));
  check_launch("copy_segments");
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) { m.impl("copy_segments", TORCH_BOX(&megarl::copy_segments)); }
