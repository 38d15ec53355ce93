// DeltaKVAttention on the device: what its parts share. A token is one vector x of X = 2 H D numbers, all keys before
// RoPE and then all values; see plugins/deltakv/reference.py.
#pragma once
#include "device.cuh"
#include "kvpack.h"
#include "step.cuh"

namespace kvpack {

constexpr int MAX_NEIGHBORS = 4, MAX_WIDTH = 4096;
constexpr int DELTAKV_SPLITS = 128;  // pieces of a sequence's code rows in a decode step, at most: Decode::splits

inline int deltakv_width(const kvpack_layer &layer) { return 2 * layer.num_kv_heads * layer.head_dim; }
inline int deltakv_ring_rows(const kvpack_deltakv &d) {
  return d.geometry.sinks + d.geometry.window + d.geometry.block;
}
// Values of a latent, and the bytes that hold them.
inline int latent_values(const kvpack_deltakv &d) {
  int values = 0;
  for (int n = 0; n < d.segment_count; ++n) values += d.latent_sizes[n];
  return values;
}
inline int latent_bytes(const kvpack_deltakv &d) {
  int bits = 0;
  for (int n = 0; n < d.segment_count; ++n) bits += d.latent_sizes[n] * d.latent_bits[n];
  return bits / 8;
}

// The segments of a latent, for kernels.
struct Segments {
  int count, values, bytes;
  int sizes[KVPACK_MAX_SEGMENTS], bits[KVPACK_MAX_SEGMENTS];
};
inline Segments segments_of(const kvpack_deltakv &d) {
  Segments s = {d.segment_count, latent_values(d), latent_bytes(d), {}, {}};
  for (int n = 0; n < d.segment_count; ++n) s.sizes[n] = d.latent_sizes[n], s.bits[n] = d.latent_bits[n];
  return s;
}

// 8 numbers of a row.
template <class T>
KVPACK_D void load8(const T *from, float (&x)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4 *>(from);
  const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 y = unpack2<T>(pairs[i]);
    x[2 * i] = y.x;
    x[2 * i + 1] = y.y;
  }
}

template <class T>
KVPACK_D void store8(T *to, const float (&x)[8]) {
  *reinterpret_cast<uint4 *>(to) =
      make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
}
KVPACK_D void load8(const float *from, float (&x)[8]) {
  const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
KVPACK_D void store8(float *to, const float (&x)[8]) {
  reinterpret_cast<float4 *>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4 *>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// What kvpack_deltakv_prepare writes: `shift` and `restore` for the kernels of this op, `decode` for deltakv_decode.
struct DeltaKVTables {
  void *shift;    // T [X]: the centre, rounded
  void *restore;  // T [X, depth]: decompress transposed; columns in the order of the stored codes, then zeros
  void *decode;
};
constexpr int RESTORE_DEPTH = 32;  // columns of `restore` are a multiple of this
inline int restore_columns(const kvpack_deltakv &d) {
  return (latent_values(d) + RESTORE_DEPTH - 1) / RESTORE_DEPTH * RESTORE_DEPTH;
}

// Encoding the rows that leave the window (deltakv_encode.cu). References among them are written first.
size_t deltakv_encode_workspace(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &);
int deltakv_encode(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &, const DeltaKVTables &,
                   void *workspace);

// Code rows before the step to dense keys, rotated, and values, T [B, H, rows, D] (deltakv_restore.cu).
int deltakv_restore(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &, const DeltaKVTables &,
                    void *dense_k, void *dense_v, int rows);
int deltakv_restore_prepare(const kvpack_layer &, const kvpack_deltakv &, const DeltaKVTables &, void *stream);

// Attention of one new token, which is then stored (deltakv_decode.cu). `prepared` is DeltaKVTables::decode.
int deltakv_decode_supported(const kvpack_layer &, const kvpack_deltakv &);  // KVPACK_OK or fails with the reason
size_t deltakv_decode_workspace(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &);
int deltakv_decode(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &, const void *prepared,
                   const ExactRows &, const Decode &, void *workspace);
size_t deltakv_decode_prepared(const kvpack_layer &, const kvpack_deltakv &);
int deltakv_decode_prepare(const kvpack_layer &, const kvpack_deltakv &, void *prepared, void *stream);
// The same by a kernel for sm_90, of what deltakv_decode supports (deltakv_decode_sm90.cu). fits: on the current device.
bool deltakv_sm90_fits(const kvpack_layer &, const kvpack_deltakv &);
int deltakv_sm90_decode(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &, const void *prepared,
                        const ExactRows &, const Decode &);
size_t deltakv_sm90_prepared(const kvpack_layer &, const kvpack_deltakv &);
int deltakv_sm90_prepare(const kvpack_layer &, const kvpack_deltakv &, void *prepared, void *stream);

}  // namespace kvpack
