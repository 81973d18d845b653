// What the extension offers: every op's schema, once for all devices. csrc/cpu and csrc/cuda hold the kernels under
// the same names; megarl/ops/dispatch.py loads this library and gives the ops their fake (meta) kernels.
//
// Everything here uses torch's stable ABI and Python's limited API, so one build serves several versions of both.

#include <Python.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "version.h"

namespace {

int64_t version() { return MEGARL_OPS_VERSION; }

}  // namespace

STABLE_TORCH_LIBRARY(megarl, m) {
  // Which edition of the schemas this library was built with; dispatch.py refuses another than its own.
  m.def("version() -> int");

  // The numbers are explained in logprob.h. logits [T, Vp]; targets [T] int64; temperature [1] or [T]. Columns whose
  // id is vocab_size or more take no mass; a target outside the vocabulary gives NaN, one equal to ignore_index nothing.
  m.def(
      "logprob_stats(Tensor logits, Tensor targets, Tensor temperature, int vocab_start, int vocab_size, "
      "int ignore_index) -> Tensor");
  // Writes the gradient of the logits into `out`, which may be of a narrower dtype; `logprob_grad_` over the logits.
  m.def(
      "logprob_grad(Tensor logits, Tensor targets, Tensor temperature, Tensor joined, Tensor grad_logprob, "
      "Tensor grad_entropy, int vocab_start, int vocab_size, int ignore_index, Tensor(a!) out) -> ()");
  m.def(
      "logprob_grad_(Tensor(a!) logits, Tensor targets, Tensor temperature, Tensor joined, Tensor grad_logprob, "
      "Tensor grad_entropy, int vocab_start, int vocab_size, int ignore_index) -> ()");

  // total [R, H] fp32 += part [H, R] transposed.
  m.def("add_transposed_(Tensor(a!) total, Tensor part) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megarl, CompositeExplicitAutograd, m) { m.impl("version", TORCH_BOX(&version)); }

// `import megarl._C` runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
