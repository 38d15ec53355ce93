// What the two halves of encoding share: the search for candidates (deltakv_nearest.cu) and what is made of them
// (deltakv_encode.cu, deltakv_latent.cu).
#pragma once
#include "deltakv.cuh"
#include "gemm.cuh"

namespace kvpack {

constexpr int ENCODE_THREADS = TILE_THREADS, ENCODE_WARPS = ENCODE_THREADS / 32;
constexpr int CANDIDATES = 8;  // references per row that are compared again, in float32
constexpr float FAR = 3e38f;   // the distance of no reference
constexpr int NOBODY = 0x7FFFFFFF;
constexpr int FEW_ROWS = 64;  // up to so many rows per sequence tiles are small, for blocks enough

struct Candidate {
  float distance;
  int ordinal;
};
// Nearer, or of the lower ordinal where equal.
KVPACK_D bool before(const Candidate &a, const Candidate &b) {
  return (a.distance < b.distance) | ((a.distance == b.distance) & (a.ordinal < b.ordinal));
}

struct Encode {
  const void *ring;  // T
  NewRows key, value;
  const int32_t *past_len, *new_len, *source, *target;
  void *references, *index, *latents, *scales;
  const void *shift;
  void *sinks;               // T [B, sinks, X]
  float *energy;             // [B, ordinals]
  Candidate *found;          // [B, E, splits, CANDIDATES], nearest first
  float *residual, *latent;  // [B, chunk, X], [B, chunk, latent values]
  // With hidden units only: x and the mean of its references less the centre, [B, chunk, X] each; the units' gates and
  // factors for either, [B, chunk, pitch] each.
  const float *center;
  float *centered[2], *units[4];
  kvpack_geometry geometry;
  Segments segments;
  int count, width, ring_rows, code_rows, ref_rows, stride, neighbors, index_bytes;
  int hidden, pitch;
  int ordinals, splits;
};

// x of one token: [H, D] of keys and [H, D] of values.
template <class T>
struct Token {
  const T *k, *v;
};
template <class T>
KVPACK_D Token<T> token_at(const Encode &p, int b, int source) {  // as enc_src counts: exact rows, then new tokens
  if (source < p.ring_rows) {
    const T *row = static_cast<const T *>(p.ring) + (int64_t(b) * p.ring_rows + source) * p.width;
    return {row, row + p.width / 2};
  }
  return {new_row<T>(p.key, b, 0, source - p.ring_rows), new_row<T>(p.value, b, 0, source - p.ring_rows)};
}
template <class T>
KVPACK_D const T *part_of(const Token<T> &token, const Encode &p, int column) {
  return column < p.width / 2 ? token.k + column : token.v + (column - p.width / 2);
}
template <class T>
KVPACK_D const T *reference_at(const Encode &p, int b, int ordinal) {
  const int sinks = p.geometry.sinks;
  if (ordinal < sinks) return static_cast<const T *>(p.sinks) + (int64_t(b) * sinks + ordinal) * p.width;
  return static_cast<const T *>(p.references) + (int64_t(b) * p.ref_rows + ordinal - sinks) * p.width;
}
// The code row that row e of the step is stored in, -1 for padding.
KVPACK_D int code_row(const Encode &p, int b, int e) {
  const int row = e < p.count ? p.target[int64_t(b) * p.count + e] : -1;
  return row < p.code_rows - 1 ? row : -1;
}
KVPACK_D bool encodes(const Encode &p, int b) { return code_row(p, b, 0) >= 0; }  // padding comes last

// Takes a candidate into a list that the warp's first CANDIDATES lanes hold in order; all lanes call.
KVPACK_D void insert(Candidate &mine, const Candidate &one) {
  const Candidate left = {__shfl_up_sync(~0u, mine.distance, 1), __shfl_up_sync(~0u, mine.ordinal, 1)};
  const bool moves = before(one, mine), is_here = (threadIdx.x % 32 == 0) | before(left, one);
  mine.distance = moves ? is_here ? one.distance : left.distance : mine.distance;
  mine.ordinal = moves ? is_here ? one.ordinal : left.ordinal : mine.ordinal;
}
KVPACK_D Candidate of_lane(const Candidate &mine, int lane) {
  return {__shfl_sync(~0u, mine.distance, lane), __shfl_sync(~0u, mine.ordinal, lane)};
}

// A warp for each of `rows` per sequence.
inline dim3 warp_per_row(int rows, int batch) { return dim3((rows + ENCODE_WARPS - 1) / ENCODE_WARPS, batch); }

// Latents of rows first, first + 1, ... of the step from their residuals (deltakv_latent.cu); returns the CUDA error.
int make_latents(const kvpack_step &, const kvpack_deltakv &, const Encode &, int first, int chunk);
// Writes the references among the rows and finds every other row's candidates (deltakv_nearest.cu).
int find_candidates(const kvpack_layer &, const kvpack_step &, const Encode &);

}  // namespace kvpack
