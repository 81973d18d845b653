// Generalised advantage estimation over packed sequences, one backward sweep per sequence.
//
// Going backwards, everything a token needs of the tokens after it is one number,
//
//     s = gamma * V_next + gamma * lam * A_next + rewards of masked tokens in between
//     policy token:  A = r - V + s        s <- gamma * lam * A + gamma * V = c * s + (c * r + (gamma - c) * V)
//     masked token:  A = 0                s <- s + r
//
// with c = gamma * lam: an affine map of s for either kind of token. Eight maps are joined by a scan inside the lanes
// of one vector, so the chain from token to token costs one multiplication in eight tokens, and no token needs a branch.
// Everything is fp64 between load and store.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "../gae.h"
#include "lanes.h"

namespace megarl {
namespace {

using namespace lanes;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTokensPerThread = 16384;  // below this a second thread costs more than it saves

// One step of the scan: joins the map of each lane, s -> a * s + b, with the map of `kBy` lanes further.
template <int kBy>
inline void join_maps(Lanes& a, Lanes& b) {
  b += a * shift_down<kBy>(b, Lanes{});
  a *= shift_down<kBy>(a, broadcast(1.0));
}

template <typename T>
class Sweep {
 public:
  Sweep(double gamma, double lam, double next_value)
      : gamma_(gamma), decay_(gamma * lam), powers_(powers_of(gamma * lam)), s_(gamma * next_value) {}

  void run(const T* rewards, const T* values, const bool* mask, int64_t length, T* advantages, T* returns) {
    int64_t t = length;
    while (t >= kWidth) {
      t -= kWidth;
      const uint64_t policy = load_mask(mask + t);
      if (policy == kAll) {
        run_policy(rewards + t, values + t, advantages + t, returns + t);
      } else if (policy == 0) {
        run_masked(rewards + t, advantages + t, returns + t);
      } else {
        run_mixed(rewards + t, values + t, expand(policy), advantages + t, returns + t);
      }
    }
    while (t > 0) {
      --t;
      run_one(rewards[t], values[t], mask[t], advantages[t], returns[t]);
    }
  }

 private:
  void run_policy(const T* rewards, const T* values, T* advantages, T* returns) {
    const Lanes value = load(values), reward = load(rewards);
    Lanes b = decay_ * reward + (gamma_ - decay_) * value;
    b += powers_[7] * shift_down<1>(b, Lanes{});
    b += powers_[6] * shift_down<2>(b, Lanes{});
    b += powers_[4] * shift_down<4>(b, Lanes{});
    const Lanes after = b + powers_ * s_;
    const Lanes advantage = reward - value + shift_down<1>(after, broadcast(s_));
    s_ = after[0];
    store(advantages, advantage);
    store(returns, advantage + value);
  }

  void run_masked(const T* rewards, T* advantages, T* returns) {
    const Lanes reward = load(rewards);
    if (is_any(reward != 0.0)) s_ += sum(is_finite(reward) ? reward : Lanes{});
    store_zeros(advantages);
    store_zeros(returns);
  }

  void run_mixed(const T* rewards, const T* values, Select policy, T* advantages, T* returns) {
    const Lanes value = load(values), reward = load(rewards);
    Lanes a = policy ? broadcast(decay_) : broadcast(1.0);
    Lanes b = policy ? decay_ * reward + (gamma_ - decay_) * value : (is_finite(reward) ? reward : Lanes{});
    join_maps<1>(a, b);
    join_maps<2>(a, b);
    join_maps<4>(a, b);
    const Lanes after = b + a * s_;
    const Lanes advantage = reward - value + shift_down<1>(after, broadcast(s_));
    s_ = after[0];
    store(advantages, policy ? advantage : Lanes{});
    store(returns, policy ? advantage + value : Lanes{});
  }

  void run_one(double reward, double value, bool is_policy, T& advantage, T& returned) {
    const double a = reward - value + s_;
    advantage = is_policy ? static_cast<T>(a) : T(0);
    returned = is_policy ? static_cast<T>(a + value) : T(0);
    const double moved = is_finite(reward) ? s_ + reward : s_;
    s_ = is_policy ? decay_ * a + gamma_ * value : moved;
  }

  static Lanes powers_of(double decay) {
    const double two = decay * decay, four = two * two;
    return Lanes{four * four, four * two * decay, four * two, four * decay, four, two * decay, two, decay};
  }

  const double gamma_, decay_;
  const Lanes powers_;  // decay ** (8 - lane)
  double s_;
};

template <typename T>
void run_gae(
    const Tensor& rewards, const Tensor& values, const Tensor& mask, const int64_t* starts, int64_t num_sequences,
    double gamma, double lam, const PerSequence<T>& own, Tensor& advantages, Tensor& returns) {
  const T* r = static_cast<const T*>(rewards.const_data_ptr());
  const T* v = static_cast<const T*>(values.const_data_ptr());
  const bool* m = static_cast<const bool*>(mask.const_data_ptr());
  T* adv = static_cast<T*>(advantages.mutable_data_ptr());
  T* ret = static_cast<T*>(returns.mutable_data_ptr());
  const int64_t num_tokens = starts[num_sequences];
  const int64_t num_parts = std::max<int64_t>(
      1, std::min<int64_t>(torch::stable::get_num_threads(), num_tokens / kTokensPerThread));
  // part i takes the sequences that begin in its equal share of the tokens
  auto first_of_part = [&](int64_t part) {
    if (part == num_parts) return num_sequences;
    return static_cast<int64_t>(
        std::lower_bound(starts, starts + num_sequences, num_tokens * part / num_parts) - starts);
  };
  torch::stable::parallel_for(0, num_parts, 1, [&](int64_t begin, int64_t end) {
    const int64_t last = first_of_part(end);
    for (int64_t i = first_of_part(begin); i < last; ++i) {
      const int64_t start = starts[i];
      Sweep<T> sweep(
          own.gammas ? own.gammas[i] : gamma, own.lams ? own.lams[i] : lam, own.bootstrap ? own.bootstrap[i] : T(0));
      sweep.run(r + start, v + start, m + start, starts[i + 1] - start, adv + start, ret + start);
    }
  });
}

std::tuple<Tensor, Tensor> gae(
    const Tensor& rewards, const Tensor& values, const Tensor& mask, const Tensor& cu_seqlens, double gamma, double lam,
    const std::optional<Tensor>& bootstrap, const std::optional<Tensor>& gammas, const std::optional<Tensor>& lams) {
  check_gae(rewards, values, mask, cu_seqlens, bootstrap, gammas, lams);
  const int64_t* starts = static_cast<const int64_t*>(cu_seqlens.const_data_ptr());
  const int64_t num_sequences = cu_seqlens.numel() - 1, num_tokens = values.numel();
  check(starts[0] == 0 && starts[num_sequences] == num_tokens, "gae: cu_seqlens runs from ", starts[0], " to ",
        starts[num_sequences], ", must run from 0 to the number of tokens, ", num_tokens);
  for (int64_t i = 0; i < num_sequences; ++i) {
    check(starts[i] <= starts[i + 1], "gae: cu_seqlens[", i + 1, "]=", starts[i + 1], " is less than the entry before, ",
          starts[i]);
  }
  Tensor advantages = torch::stable::empty_like(values), returns = torch::stable::empty_like(values);
  if (values.scalar_type() == ScalarType::Double) {
    run_gae<double>(rewards, values, mask, starts, num_sequences, gamma, lam,
                    per_sequence<double>(bootstrap, gammas, lams), advantages, returns);
  } else {
    run_gae<float>(rewards, values, mask, starts, num_sequences, gamma, lam,
                   per_sequence<float>(bootstrap, gammas, lams), advantages, returns);
  }
  return {advantages, returns};
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) { m.impl("gae", TORCH_BOX(&megarl::gae)); }
