// IntKVAttention: what its kernels share. A stored row is read as (code * scale + zero) @ hadamard + center, with codes
// whole numbers below 2^bits; see plugins/intkv.
#pragma once
#include "step.cuh"

namespace kvpack {

// One side (keys or values). A word of `planes` bytes holds 8 planes / bits codes; with P words a row, byte n of word j
// is at n * P + j and holds its value - 128, code i of word j is that of column i * P + j, the lowest bits first.
struct IntSide {
  int bits, planes, row_bytes;
  int tokens;      // neighbouring rows that share their scales, 1 or the block
  int scales;      // of such rows
  int scale_rows;  // of scale and zero
  int8_t *codes;       // [B, H, code_rows, row_bytes]
  void *scale, *zero;  // T [B, H, scale_rows, scales]
  const float *center;  // [H, D]; NULL: 0
};
IntSide intkv_side(const kvpack_layer &, const kvpack_intkv &, bool values);  // (intkv.cu)

// A decode step over the codes (intkv_decode.cu), scratch from carve_decode with this many splits.
int intkv_splits(const kvpack_layer &, const kvpack_intkv &);
int intkv_decode(const kvpack_layer &, const kvpack_step &, const kvpack_intkv &, const Decode &);
// Code rows below encoded(past_len) to rows sinks + j of T [B, H, rows, D] keys (rotated) and values (intkv_encode.cu).
int intkv_restore(const kvpack_layer &, const kvpack_step &, const kvpack_intkv &, void *dense_k, void *dense_v,
                  int rows);
// The rows that enc_src names to codes (intkv_encode.cu). keys: the new ones in the key space.
int intkv_encode(const kvpack_layer &, const kvpack_step &, const kvpack_intkv &, const NewRows &keys);

// -- the rotation of plugins.intkv.config.hadamard

template <int D> constexpr int HADAMARD = D & -D;  // columns that are mixed
template <int D> constexpr float HADAMARD_SCALE = HADAMARD<D> == 32 ? 0.17677669529f : HADAMARD<D> == 64 ? 0.125f
                                                : HADAMARD<D> == 128 ? 0.08838834765f : 0.0625f;

// A row by the matrix, by a warp: a lane has the columns lane + 32 n.
template <int D> KVPACK_D void hadamard_row(float (&x)[D / 32]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1)
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      const float other = __shfl_xor_sync(~0u, x[n], step);
      x[n] = lane & step ? __fsub_rn(other, x[n]) : __fadd_rn(x[n], other);
    }
#pragma unroll
  for (int step = 1; step < HADAMARD<D> / 32; step <<= 1)
#pragma unroll
    for (int n = 0; n < D / 32; ++n)
      if (!(n & step)) {
        const float low = x[n], high = x[n | step];
        x[n] = __fadd_rn(low, high), x[n | step] = __fsub_rn(low, high);
      }
#pragma unroll
  for (int n = 0; n < D / 32; ++n) x[n] = __fmul_rn(x[n], HADAMARD_SCALE<D>);
}

}  // namespace kvpack
