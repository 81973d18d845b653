// Adds a narrow, transposed piece of a weight gradient to the fp32 gradient.
//
// A product of two row-major matrices is faster than one whose first factor is transposed, so the gradient of a weight
// [V, H] is made as [H, V], piece by piece, each small enough to stay in the second-level cache until it is added here.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "../accumulate.h"
#include "vector.h"

namespace megarl {
namespace {

// Rows become columns, in rounds: each swaps the off-diagonal halves of ever smaller blocks.
inline void transpose(Floats (&x)[kLanes]) {
#define MEGARL_SWAP(STEP, LOW, HIGH)                                    \
  for (int i = 0; i < kLanes; ++i)                                      \
    if ((i & STEP) == 0) {                                              \
      const Floats first = x[i], second = x[i + STEP];                  \
      x[i] = __builtin_shuffle(first, second, Ints LOW);                \
      x[i + STEP] = __builtin_shuffle(first, second, Ints HIGH);        \
    }
#define MEGARL_LIST(...) {__VA_ARGS__}
#ifdef __AVX512F__
  MEGARL_SWAP(
      8, MEGARL_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
      MEGARL_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  MEGARL_SWAP(
      4, MEGARL_LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
      MEGARL_LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  MEGARL_SWAP(
      2, MEGARL_LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
      MEGARL_LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  MEGARL_SWAP(
      1, MEGARL_LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
      MEGARL_LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#else
  MEGARL_SWAP(4, MEGARL_LIST(0, 1, 2, 3, 8, 9, 10, 11), MEGARL_LIST(4, 5, 6, 7, 12, 13, 14, 15))
  MEGARL_SWAP(2, MEGARL_LIST(0, 1, 8, 9, 4, 5, 12, 13), MEGARL_LIST(2, 3, 10, 11, 6, 7, 14, 15))
  MEGARL_SWAP(1, MEGARL_LIST(0, 8, 2, 10, 4, 12, 6, 14), MEGARL_LIST(1, 9, 3, 11, 5, 13, 7, 15))
#endif
#undef MEGARL_LIST
#undef MEGARL_SWAP
}

template <typename T>
void add_blocks(float* total, int64_t total_stride, const T* part, int64_t part_stride, int64_t rows, int64_t width) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_width = width / kLanes * kLanes;
  for (int64_t r = 0; r < whole_rows; r += kLanes)
    for (int64_t h = 0; h < whole_width; h += kLanes) {
      Floats block[kLanes];
      for (int64_t k = 0; k < kLanes; ++k) block[k] = load(part + (h + k) * part_stride + r);
      transpose(block);
      for (int64_t k = 0; k < kLanes; ++k) {
        float* to = total + (r + k) * total_stride + h;
        store(to, load(to) + block[k]);
      }
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = r < whole_rows ? whole_width : 0; h < width; ++h)
      total[r * total_stride + h] += static_cast<float>(part[h * part_stride + r]);
}

template <typename T>
void add_in_parallel(Tensor& total, const Tensor& part) {
  float* to = static_cast<float*>(total.data_ptr());
  const T* from = static_cast<const T*>(part.data_ptr());
  const int64_t rows = total.size(0), width = total.size(1);
  const int64_t total_stride = total.stride(0), part_stride = part.stride(0);
  const int64_t num_blocks = (rows + kLanes - 1) / kLanes;
  torch::stable::parallel_for(0, num_blocks, 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLanes, last = std::min(end * kLanes, rows);
    add_blocks(to + first * total_stride, total_stride, from + first, part_stride, last - first, width);
  });
}

void add_transposed_(Tensor total, const Tensor& part) {
  check_add_transposed(total, part, false);
  switch (part.scalar_type()) {
    case ScalarType::BFloat16: add_in_parallel<torch::headeronly::BFloat16>(total, part); break;
    case ScalarType::Half: add_in_parallel<torch::headeronly::Half>(total, part); break;
    case ScalarType::Float: add_in_parallel<float>(total, part); break;
    default: STD_TORCH_CHECK(false, "part must be bf16, fp16 or fp32");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) { m.impl("add_transposed_", TORCH_BOX(&add_transposed_)); }

}  // namespace megarl
