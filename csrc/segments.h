// A plan of copies as both devices read it, and its checks: nothing is written when one of them fails.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "check.h"

namespace megarl {

constexpr int64_t kPlanColumns = 8;
constexpr int64_t kTileElements = 8192;  // what one CUDA block copies; TILE_ELEMENTS in megarl/ops/reshard.py

// One row of the plan. Offsets, strides and widths are in elements of the tensor they belong to.
struct Segment {
  int64_t src, src_offset, src_stride, dst, dst_offset, dst_stride, rows, width;

  int64_t elements() const { return rows * width; }
};
static_assert(sizeof(Segment) == kPlanColumns * sizeof(int64_t));

// How elements get from one dtype to another.
enum class Cast : int32_t { kNone = 0, kFloatToBfloat16 = 1, kBfloat16ToFloat = 2 };

struct Side {
  std::vector<char*> data;
  std::vector<int64_t> elements, element_bytes;
  std::vector<torch::headeronly::ScalarType> dtypes;
};

inline Side read_side(
    const std::vector<torch::stable::Tensor>& tensors, const char* name, bool is_written, bool is_cuda, int device) {
  Side side;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const torch::stable::Tensor& x = tensors[i];
    check(x.is_contiguous(), "copy_segments: ", name, "[", i, "] is not contiguous");
    check(x.is_cuda() == is_cuda && (!is_cuda || x.get_device_index() == device), "copy_segments: ", name, "[", i,
          "] is on another device than dsts[0]");
    void* data = is_written ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr());
    side.data.push_back(static_cast<char*>(data));
    side.elements.push_back(x.numel());
    side.element_bytes.push_back(static_cast<int64_t>(x.element_size()));
    side.dtypes.push_back(x.scalar_type());
  }
  return side;
}

inline Cast pick_cast(const Side& srcs, const Side& dsts, const Segment& segment, int64_t index) {
  using torch::headeronly::ScalarType;
  const ScalarType from = srcs.dtypes[segment.src], to = dsts.dtypes[segment.dst];
  if (from == to) return Cast::kNone;
  if (from == ScalarType::Float && to == ScalarType::BFloat16) return Cast::kFloatToBfloat16;
  if (from == ScalarType::BFloat16 && to == ScalarType::Float) return Cast::kBfloat16ToFloat;
  check(false, "copy_segments: segment ", index, " goes from srcs[", segment.src, "] of dtype ", dtype_name(from),
        " to dsts[", segment.dst, "] of dtype ", dtype_name(to),
        "; only equal dtypes, fp32 to bf16 and bf16 to fp32 are copied");
  return Cast::kNone;
}

// One side of one segment: an existing tensor, no negative number, and an end inside the tensor.
inline void check_side(
    const Side& side, const char* name, const char* verb, int64_t tensor, int64_t offset, int64_t stride,
    const Segment& segment, int64_t index) {
  const int64_t count = static_cast<int64_t>(side.data.size());
  check(tensor >= 0 && tensor < count, "copy_segments: segment ", index, " names ", name, "[", tensor, "], there are ",
        count);
  const int64_t size = side.elements[tensor];
  check(offset >= 0 && stride >= 0, "copy_segments: segment ", index, " has offset ", offset, " and row stride ", stride,
        " in ", name, "[", tensor, "]; neither may be negative");
  if (segment.rows == 0 || segment.width == 0) return;
  // in 128 bits: a wild plan must not overflow into the tensor
  const __int128 end = static_cast<__int128>(offset) + static_cast<__int128>(segment.rows - 1) * stride + segment.width;
  check(end <= size, "copy_segments: segment ", index, " ", verb, " elements up to ", static_cast<double>(end), " of ",
        name, "[", tensor, "], which has ", size);
}

inline void check_segment(const Side& srcs, const Side& dsts, const Segment& segment, int64_t index) {
  check(segment.rows >= 0 && segment.width >= 0, "copy_segments: segment ", index, " has ", segment.rows, " rows of ",
        segment.width, " elements; neither may be negative");
  check_side(srcs, "srcs", "reads", segment.src, segment.src_offset, segment.src_stride, segment, index);
  check_side(dsts, "dsts", "writes", segment.dst, segment.dst_offset, segment.dst_stride, segment, index);
  check(segment.rows <= 1 || segment.dst_stride >= segment.width, "copy_segments: segment ", index, " writes rows of ",
        segment.width, " elements every ", segment.dst_stride, " elements of dsts[", segment.dst,
        "]: they overlap");
  pick_cast(srcs, dsts, segment, index);
}

// No source may share memory with a destination: what a segment reads would depend on what ran before it.
inline void check_apart(const Side& srcs, const Side& dsts) {
  std::vector<size_t> order;
  for (size_t i = 0; i < dsts.data.size(); ++i) {
    if (dsts.elements[i] > 0) order.push_back(i);
  }
  auto end_of = [](const Side& side, size_t i) { return side.data[i] + side.elements[i] * side.element_bytes[i]; };
  std::sort(order.begin(), order.end(), [&](size_t i, size_t j) { return dsts.data[i] < dsts.data[j]; });
  std::vector<char*> furthest;  // the furthest end of the destinations up to here
  for (size_t i : order) {
    furthest.push_back(furthest.empty() ? end_of(dsts, i) : std::max(furthest.back(), end_of(dsts, i)));
  }
  for (size_t i = 0; i < srcs.data.size(); ++i) {
    if (srcs.elements[i] == 0) continue;
    // destinations that begin before this source ends
    const auto before = std::partition_point(
        order.begin(), order.end(), [&](size_t j) { return dsts.data[j] < end_of(srcs, i); }) - order.begin();
    check(before == 0 || furthest[before - 1] <= srcs.data[i], "copy_segments: srcs[", i,
          "] shares memory with one of dsts");
  }
}

// The rows of the plan, all checked.
inline const Segment* read_plan(const torch::stable::Tensor& plan, const Side& srcs, const Side& dsts) {
  using torch::headeronly::ScalarType;
  check(plan.dim() == 2 && plan.size(1) == kPlanColumns && plan.is_contiguous(),
        "copy_segments: plan must be contiguous of shape [N, ", kPlanColumns, "]");
  check(plan.scalar_type() == ScalarType::Long && plan.is_cpu(), "copy_segments: plan must be int64 on the host");
  const Segment* segments = static_cast<const Segment*>(plan.const_data_ptr());
  for (int64_t i = 0; i < plan.size(0); ++i) check_segment(srcs, dsts, segments[i], i);
  check_apart(srcs, dsts);
  return segments;
}

}  // namespace megarl
