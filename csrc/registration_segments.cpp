// Schemas of the ops on packed sequences and on lists of segments; csrc/cpu and csrc/cuda hold their kernels.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(megarl, m) {
  // rewards, values [T] fp32 or fp64; mask [T] bool; cu_seqlens [B+1] int64; bootstrap, gammas, lams [B] of the values'
  // dtype (gammas, lams fp64), which stand in for the scalars -> advantages [T], returns [T], 0 outside the mask.
  m.def(
      "gae(Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, float gamma, float lam, "
      "Tensor? bootstrap=None, Tensor? gammas=None, Tensor? lams=None) -> (Tensor, Tensor)");
  // x [T] fp32 or fp64; mask [T] bool -> [3] fp64: count, mean, sum of squared distances from the mean.
  m.def("masked_moments(Tensor x, Tensor mask) -> Tensor");
  // (x - mean) / sqrt(variance + eps) with the unbiased variance of `moments`; 0 outside the mask or if count < 2.
  m.def("whiten(Tensor x, Tensor mask, Tensor moments, float eps) -> Tensor");
  // plan [N, 8] int64 on the host: source, source offset, source row stride, destination, destination offset,
  // destination row stride, rows, elements a row; all in elements. device_plan [N, 9]: the same on the GPU with the
  // number of tiles before each segment, made once by megarl/ops/reshard.py.
  m.def("copy_segments(Tensor[] srcs, Tensor(a!)[] dsts, Tensor plan, Tensor? device_plan=None) -> ()");
}
