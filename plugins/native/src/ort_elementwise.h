// The nodes of what lies between the attentions; see onnxruntime.cc, which registers them.
#pragma once
#include "ort.h"

namespace kvpack::ort {

struct AddRMSNormalization {
  const Op &op;
  Node node;

  explicit AddRMSNormalization(const Op &op) : op(op), node(op.kind) {}
  OrtStatus *configure(const OrtKernelInfo *info) { return read(info, node); }
  OrtStatus *compute(OrtKernelContext *context) {
    Tensors tensors(op, context);
    KVPACK_TRY(tensors.load());
    void *stream, *sum, *out;
    KVPACK_TRY(stream_of(context, &stream));
    const Tensor &x = tensors["x"], &y = tensors["y"], &weight = tensors["weight"];
    const int32_t columns = weight.dim(0);
    if (weight.dims.size() != 1 || x.dims.empty() || x.dims.back() != columns || y.dims != x.dims)
      return failed("AddRMSNormalization takes x and y of one shape and a weight of their last dimension");
    KVPACK_TRY(tensors.output("sum", x.dims, &sum));
    KVPACK_TRY(tensors.output("out", x.dims, &out));
    return told(checked(kvpack_add_rms_norm(op.dtype(), x.rows(), columns, node.epsilon, x.data, y.data, weight.data,
                                            sum, out, stream)));
  }
};

struct GatedActivation {
  const Op &op;
  Node node;

  explicit GatedActivation(const Op &op) : op(op), node(op.kind) {}
  OrtStatus *configure(const OrtKernelInfo *info) { return read(info, node); }
  OrtStatus *compute(OrtKernelContext *context) {
    Tensors tensors(op, context);
    KVPACK_TRY(tensors.load());
    void *stream, *out;
    KVPACK_TRY(stream_of(context, &stream));
    const Tensor &x = tensors["x"];
    if (x.dims.empty() || x.dims.back() % 2)
      return failed("GatedActivation takes gates and factors side by side, an even last dimension");
    std::vector<int64_t> dims = x.dims;
    dims.back() /= 2;
    KVPACK_TRY(tensors.output("out", dims, &out));
    const int32_t columns = static_cast<int32_t>(dims.back());
    return told(checked(kvpack_gated_activation(op.dtype(), node.activation, x.rows(), columns, x.data, out, stream)));
  }
};

}  // namespace kvpack::ort
