// Many strided copies between live tensors in one call, the bytes shared evenly by the threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "../segments.h"

namespace megarl {
namespace {

using torch::stable::Tensor;

constexpr int64_t kBytesPerThread = 256 << 10;  // below this a second thread costs more than it saves

// To the nearest, ties to even; every NaN becomes the quiet NaN. Integer arithmetic, so that denormals survive.
void narrow(const char* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint16_t result = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : static_cast<uint16_t>(rounded);
    std::memcpy(to + 2 * i, &result, 2);
  }
}

void widen(const char* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    const uint32_t result = static_cast<uint32_t>(bits) << 16;
    std::memcpy(to + 4 * i, &result, 4);
  }
}

// One segment with its addresses; widths and strides in bytes of their own side.
struct Job {
  const char* from;
  char* to;
  int64_t from_stride, to_stride, from_bytes, to_bytes, width, elements;
  Cast cast;

  int64_t weight() const { return from_bytes + to_bytes; }  // bytes moved for one element

  // Elements [begin, end) of the rows laid one after the other.
  void run(int64_t begin, int64_t end) const {
    int64_t row = begin / width, column = begin % width;
    while (begin < end) {
      const int64_t count = std::min(width - column, end - begin);
      const char* src = from + row * from_stride + column * from_bytes;
      char* dst = to + row * to_stride + column * to_bytes;
      switch (cast) {
        case Cast::kNone: std::memcpy(dst, src, count * to_bytes); break;
        case Cast::kFloatToBfloat16: narrow(src, dst, count); break;
        case Cast::kBfloat16ToFloat: widen(src, dst, count); break;
      }
      begin += count;
      column = 0;
      ++row;
    }
  }
};

Job build_job(const Side& srcs, const Side& dsts, Segment segment, int64_t index) {
  const bool is_one_piece = segment.src_stride == segment.width && segment.dst_stride == segment.width;
  const int64_t from_bytes = srcs.element_bytes[segment.src], to_bytes = dsts.element_bytes[segment.dst];
  return {
      srcs.data[segment.src] + segment.src_offset * from_bytes,
      dsts.data[segment.dst] + segment.dst_offset * to_bytes,
      segment.src_stride * from_bytes,
      segment.dst_stride * to_bytes,
      from_bytes,
      to_bytes,
      is_one_piece ? segment.elements() : segment.width,
      segment.elements(),
      pick_cast(srcs, dsts, segment, index)};
}

void copy_segments(
    const std::vector<Tensor>& srcs, const std::vector<Tensor>& dsts, const Tensor& plan,
    const std::optional<Tensor>& device_plan) {
  const Side from = read_side(srcs, "srcs", false, false, 0), to = read_side(dsts, "dsts", true, false, 0);
  const Segment* segments = read_plan(plan, from, to);
  check(!device_plan.has_value(), "copy_segments: device_plan is for tensors on a GPU");
  std::vector<Job> jobs;
  std::vector<int64_t> ends;  // bytes moved up to the end of each job
  int64_t total = 0;
  for (int64_t i = 0; i < plan.size(0); ++i) {
    if (segments[i].elements() == 0) continue;
    jobs.push_back(build_job(from, to, segments[i], i));
    ends.push_back(total += jobs.back().elements * jobs.back().weight());
  }
  const int64_t num_parts =
      std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), total / kBytesPerThread));
  torch::stable::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t last) {
    const int64_t begin = total / num_parts * first, end = last == num_parts ? total : total / num_parts * last;
    size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; i < jobs.size(); ++i) {
      const Job& job = jobs[i];
      const int64_t weight = job.weight(), start = ends[i] - job.elements * weight;
      if (start >= end) break;
      // an element belongs to the part in which its first byte lies
      auto element_at = [&](int64_t byte) {
        return std::clamp<int64_t>((byte - start + weight - 1) / weight, 0, job.elements);
      };
      const int64_t from_element = begin <= start ? 0 : element_at(begin);
      job.run(from_element, std::max(from_element, element_at(end)));
    }
  });
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) { m.impl("copy_segments", TORCH_BOX(&megarl::copy_segments)); }
