// Log-prob statistics and gradients of rows of logits, on the CPU: threads over rows, vectors within a row.
#include "../logprob.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <limits>

#include "vector.h"

namespace megarl {
namespace {

constexpr int64_t kBlock = 4096;  // columns looked at twice, for the maximum and for the sums, while in the L1 cache
constexpr int64_t kFew = 512;  // columns added up apart: a sum of many small numbers onto a large one loses them
constexpr int64_t kUnroll = 4;
constexpr int64_t kAhead = 1024;  // columns fetched before they are needed
constexpr int64_t kGrain = 1 << 14;  // logits that are worth a thread

struct Row {
  double top, sum, weighted;
};

struct RowGrad {
  double inverse, top, sum, log_sum, entropy, logprob, entropy_grad;
};

// The lines that two vectors lie in.
template <typename T>
void prefetch_two(const T* from) {
  __builtin_prefetch(from);
  if (sizeof(T) > 2) __builtin_prefetch(from + kLanes);
}

template <typename T>
float find_largest(const T* x, int64_t count) {
  Floats top[kUnroll];
  for (auto& each : top) each = fill(kNoLogit);
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes)
    for (int64_t k = 0; k < kUnroll; ++k) top[k] = larger(load(x + i + k * kLanes), top[k]);
  for (; i + kLanes <= count; i += kLanes) top[0] = larger(load(x + i), top[0]);
  if (i < count) top[0] = larger(load_some(x + i, count - i, kNoLogit), top[0]);
  return largest_of(larger(larger(top[0], top[1]), larger(top[2], top[3])));
}

// x / τ for x <= 0, in the range of `exp_of`; what lies below, minus infinity too, comes out where exp gives 0. The
// reciprocal has more digits than fp32 holds: its rounding would move all of a row's exponents one way.
struct Divide {
  float high, low, lowest;

  explicit Divide(double inverse)
      : high(inverse), low(inverse - static_cast<double>(high)), lowest(kLowestExponent / inverse) {}

  Floats operator()(Floats x) const {
    x = cut(x, lowest);
    return x * high + x * low;
  }
};

template <typename T>
Row reduce_row(const T* x, int64_t count, double inverse) {
  const Divide divide(inverse);
  float top = kNoLogit;
  double sum = 0, weighted = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const T* block = x + begin;
    const int64_t width = std::min(kBlock, count - begin);
    const float block_top = find_largest(block, width);
    if (block_top > top) {  // what was summed so far is relative to the old maximum
      const double shift = (static_cast<double>(top) - block_top) * inverse;
      const double scale = std::exp(shift);
      weighted = scale == 0 ? 0 : scale * (weighted + shift * sum);
      sum *= scale;
      top = block_top;
    }
    Floats block_sum = {}, block_weighted = {};
    for (int64_t first = 0; first < width; first += kFew) {
      Floats sums[2] = {}, weighteds[2] = {};
      const auto add = [&](Floats logits, int64_t k) {
        const Floats exponent = divide(logits - top);
        const Floats e = exp_of(exponent);
        sums[k] += e;
        weighteds[k] += e * exponent;
      };
      const int64_t last = std::min(first + kFew, width);
      int64_t i = first;
      for (; i + 2 * kLanes <= last; i += 2 * kLanes) {
        prefetch_two(block + i + kBlock);
        add(load(block + i), 0);
        add(load(block + i + kLanes), 1);
      }
      for (; i < last; i += kLanes) {
        const int64_t left = last - i;
        add(left >= kLanes ? load(block + i) : load_some(block + i, left, -std::numeric_limits<float>::infinity()), 0);
      }
      block_sum += sums[0] + sums[1];
      block_weighted += weighteds[0] + weighteds[1];
    }
    sum += sum_of(block_sum);
    weighted += sum_of(block_weighted);
  }
  return {top, sum, weighted};
}

template <>
Row reduce_row<double>(const double* x, int64_t count, double inverse) {
  double top = kNoLogit, sum = 0, weighted = 0;
  for (int64_t i = 0; i < count; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < count; ++i) {
    const double difference = (x[i] - top) * inverse, exponent = difference < -800 ? -800 : difference;
    const double e = std::exp(exponent);
    sum += e;
    weighted += e * exponent;
  }
  return {top, sum, weighted};
}

// d / d x_j without the target's own term: -p_j (g_logprob + g_entropy (log p_j + entropy)) / τ, in terms of t
template <typename T, typename Out>
void write_row_grad(const T* x, Out* out, int64_t count, const RowGrad& row) {
  const float top = row.top;
  const Divide divide(row.inverse);
  const float slope = -row.entropy_grad * row.inverse / row.sum;
  const float offset = -(row.logprob + row.entropy_grad * (row.entropy - row.log_sum)) * row.inverse / row.sum;
  const auto grad = [&](Floats logits) {
    const Floats exponent = divide(logits - top);
    return exp_of(exponent) * (exponent * slope + offset);
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    prefetch_two(x + i + kAhead);
    const Floats first = grad(load(x + i)), second = grad(load(x + i + kLanes));
    store_two(out + i, first, second);
  }
  for (; i + kLanes <= count; i += kLanes) store(out + i, grad(load(x + i)));
  if (i < count) store_some(out + i, grad(load_some(x + i, count - i, 0.0f)), count - i);
}

template <>
void write_row_grad<double, double>(const double* x, double* out, int64_t count, const RowGrad& row) {
  for (int64_t i = 0; i < count; ++i) {
    const double difference = (x[i] - row.top) * row.inverse - row.log_sum;
    const double log_p = difference < -800 ? -800 : difference;
    out[i] = -std::exp(log_p) * (row.logprob + row.entropy_grad * (log_p + row.entropy)) * row.inverse;
  }
}

template <typename T, typename Stat>
void reduce_rows(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index, Tensor& stats) {
  const int64_t rows = logits.size(0), count = num_valid_columns(logits, vocab_start, vocab_size);
  const int64_t stride = logits.stride(0), temperature_step = temperature.size(0) == 1 ? 0 : 1;
  const T* x = static_cast<const T*>(logits.data_ptr());
  const int64_t* target = static_cast<const int64_t*>(targets.data_ptr());
  const Stat* temperatures = static_cast<const Stat*>(temperature.data_ptr());
  Stat* out = static_cast<Stat*>(stats.data_ptr());
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / (count + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Row row{0, 1, 0};
      Stat chosen = 0;
      if (target[i] != ignore_index) {
        row = reduce_row<T>(x + i * stride, count, 1.0 / temperatures[i * temperature_step]);
        const int64_t column = target[i] - vocab_start;
        if (column >= 0 && column < count) chosen = static_cast<Stat>(x[i * stride + column]);
        if (target[i] < 0 || target[i] >= vocab_size) chosen = std::numeric_limits<Stat>::quiet_NaN();
      }
      out[i] = row.top;
      out[rows + i] = row.sum;
      out[2 * rows + i] = chosen;
      out[3 * rows + i] = row.weighted;
    }
  });
}

template <typename T, typename Out, typename Stat>
void write_grads(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, const Tensor& joined,
    const Tensor& grad_logprob, const Tensor& grad_entropy, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index, Tensor& grads) {
  const int64_t rows = logits.size(0), width = logits.size(1);
  const int64_t count = num_valid_columns(logits, vocab_start, vocab_size);
  const int64_t stride = logits.stride(0), out_stride = grads.stride(0);
  const int64_t temperature_step = temperature.size(0) == 1 ? 0 : 1;
  const T* x = static_cast<const T*>(logits.data_ptr());
  const int64_t* target = static_cast<const int64_t*>(targets.data_ptr());
  const Stat* temperatures = static_cast<const Stat*>(temperature.data_ptr());
  const Stat* join = static_cast<const Stat*>(joined.data_ptr());
  const Stat* d_logprob = static_cast<const Stat*>(grad_logprob.data_ptr());
  const Stat* d_entropy = static_cast<const Stat*>(grad_entropy.data_ptr());
  Out* out = static_cast<Out*>(grads.data_ptr());
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / (width + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Out* to = out + i * out_stride;
      if (target[i] == ignore_index) {
        std::fill(to, to + width, Out(0));
        continue;
      }
      const T* from = x + i * stride;
      const int64_t column = target[i] - vocab_start;
      const bool is_here = column >= 0 && column < count;
      const RowGrad row{
          1.0 / temperatures[i * temperature_step], join[i], join[rows + i], std::log(double(join[rows + i])),
          join[2 * rows + i], d_logprob[i], d_entropy[i]};
      double at_target = 0;  // in full precision: 1 - p loses nothing to the rounding of p
      if (is_here) {
        const double log_p = (static_cast<double>(from[column]) - row.top) * row.inverse - row.log_sum;
        const double p = std::exp(log_p);
        at_target = row.logprob * (1 - p) - (p == 0 ? 0 : row.entropy_grad * p * (log_p + row.entropy));
      }
      write_row_grad<T, Out>(from, to, count, row);
      if (is_here) to[column] = static_cast<Out>(static_cast<Stat>(at_target * row.inverse));
      std::fill(to + count, to + width, Out(0));
    }
  });
}

Tensor logprob_stats(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index) {
  check_rows(logits, targets, temperature, false);
  Tensor stats = torch::stable::new_empty(logits, {kNumStats, logits.size(0)}, stats_dtype(logits.scalar_type()));
  const auto run = [&](auto reduce) {
    reduce(logits, targets, temperature, vocab_start, vocab_size, ignore_index, stats);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Float: run(reduce_rows<float, float>); break;
    case ScalarType::BFloat16: run(reduce_rows<torch::headeronly::BFloat16, float>); break;
    case ScalarType::Half: run(reduce_rows<torch::headeronly::Half, float>); break;
    case ScalarType::Double: run(reduce_rows<double, double>); break;
    default: STD_TORCH_CHECK(false, "logits must be fp32, bf16, fp16 or fp64");
  }
  return stats;
}

void logprob_grad(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, const Tensor& joined,
    const Tensor& grad_logprob, const Tensor& grad_entropy, int64_t vocab_start, int64_t vocab_size,
    int64_t ignore_index, Tensor out) {
  using torch::headeronly::BFloat16;
  using torch::headeronly::Half;
  check_rows(logits, targets, temperature, false);
  check_grad_arguments(logits, joined, grad_logprob, grad_entropy, out);
  const auto run = [&](auto write) {
    write(
        logits, targets, temperature, joined, grad_logprob, grad_entropy, vocab_start, vocab_size, ignore_index, out);
  };
  const ScalarType to = out.scalar_type();
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16: run(write_grads<BFloat16, BFloat16, float>); break;
    case ScalarType::Half: run(write_grads<Half, Half, float>); break;
    case ScalarType::Double: run(write_grads<double, double, double>); break;
    case ScalarType::Float:
      if (to == ScalarType::Float) run(write_grads<float, float, float>);
      else if (to == ScalarType::BFloat16) run(write_grads<float, BFloat16, float>);
      else if (to == ScalarType::Half) run(write_grads<float, Half, float>);
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

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("logprob_stats", TORCH_BOX(&logprob_stats));
  m.impl("logprob_grad", TORCH_BOX(&logprob_grad));
  m.impl("logprob_grad_", TORCH_BOX(&logprob_grad_));
}

}  // namespace megarl
