// What is stored of the tokens that leave the window: their nearest references, and what remains beside those.
#include "deltakv_encode.cuh"

namespace kvpack {
namespace {

// -- the neighbours among the candidates, and the row less their mean; a warp per row

template <class T>
__global__ void __launch_bounds__(ENCODE_THREADS, 2) residual_kernel(Encode p, int first, int chunk) {
  const int b = blockIdx.y, lane = threadIdx.x % 32, place = blockIdx.x * ENCODE_WARPS + threadIdx.x / 32;
  const int e = first + place, code = place < chunk ? code_row(p, b, e) : -1;
  if (code < 0) return;
  const Token<T> token = token_at<T>(p, b, p.source[int64_t(b) * p.count + e]);
  int named[MAX_NEIGHBORS];
  if (code % p.stride == 0) {
#pragma unroll
    for (int n = 0; n < MAX_NEIGHBORS; ++n) named[n] = p.geometry.sinks + code / p.stride;
  } else {
    const Candidate *found = p.found + (int64_t(b) * p.count + e) * p.splits * CANDIDATES;
    Candidate mine = {FAR, NOBODY};  // the best of all splits
    for (int n = 0; n < p.splits * CANDIDATES; n += 32) {
      const Candidate one = n + lane < p.splits * CANDIDATES ? found[n + lane] : Candidate{FAR, NOBODY};
      uint32_t better = __ballot_sync(~0u, before(one, of_lane(mine, CANDIDATES - 1)));
      for (; better; better &= better - 1) insert(mine, of_lane(one, __ffs(better) - 1));
    }
    int tried[CANDIDATES];
#pragma unroll
    for (int c = 0; c < CANDIDATES; ++c) tried[c] = __shfl_sync(~0u, mine.ordinal, c);
    const T *row[CANDIDATES];
#pragma unroll
    for (int c = 0; c < CANDIDATES; ++c) row[c] = reference_at<T>(p, b, tried[c] == NOBODY ? 0 : tried[c]);
    float distance[CANDIDATES] = {};
    for (int column = 8 * lane; column < p.width; column += 256) {
      float x[8];
      load8(part_of(token, p, column), x);
#pragma unroll
      for (int c = 0; c < CANDIDATES; ++c) {
        float r[8];
        load8(row[c] + column, r);
#pragma unroll
        for (int i = 0; i < 8; ++i) distance[c] = __fmaf_rn(x[i] - r[i], x[i] - r[i], distance[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < CANDIDATES; ++c) {
#pragma unroll
      for (int n = 16; n; n >>= 1) distance[c] += __shfl_xor_sync(~0u, distance[c], n);
      if (tried[c] == NOBODY) distance[c] = FAR;
    }
    Candidate last = {-1, -1};
#pragma unroll
    for (int n = 0; n < MAX_NEIGHBORS; ++n) {
      Candidate best = {FAR, NOBODY};
#pragma unroll
      for (int c = 0; c < CANDIDATES; ++c) {
        const Candidate one = {distance[c], tried[c]};
        if (before(last, one) && before(one, best)) best = one;
      }
      named[n] = min(best.ordinal, p.geometry.sinks + code / p.stride);  // in bounds for NaN too
      last = best;
    }
  }
  if (lane == 0) {
    const int64_t at = (int64_t(b) * p.code_rows + code) * p.neighbors;
#pragma unroll
    for (int n = 0; n < MAX_NEIGHBORS; ++n) {
      if (n >= p.neighbors) break;
      if (p.index_bytes == 2) static_cast<int16_t *>(p.index)[at + n] = int16_t(named[n]);
      else static_cast<int32_t *>(p.index)[at + n] = named[n];
    }
  }
  const int64_t at = (int64_t(b) * chunk + place) * p.width;
  for (int column = 8 * lane; column < p.width; column += 256) {
    float x[8], near[8], sum[8] = {};
    load8(part_of(token, p, column), x);
    load8(reference_at<T>(p, b, named[0]) + column, near);
#pragma unroll
    for (int n = 1; n < MAX_NEIGHBORS; ++n) {
      if (n >= p.neighbors) break;
      float other[8];
      load8(reference_at<T>(p, b, named[n]) + column, other);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += other[i] - near[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) near[i] += __fdiv_rn(sum[i], float(p.neighbors));  // exact for equal ones
    float rest[8], center[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rest[i] = x[i] - near[i];
    store8(p.residual + at + column, rest);
    if (!p.hidden) continue;
    load8(p.center + column, center);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] -= center[i], near[i] -= center[i];
    store8(p.centered[0] + at + column, x);
    store8(p.centered[1] + at + column, near);
  }
}

// -- codes and scales; a warp per row

template <class T, int BITS>
KVPACK_D void quantise(const float *z, int size, unsigned char *bytes, T *scale_out) {
  constexpr int HALF = 1 << (BITS - 1), PER_BYTE = 8 / BITS;
  constexpr float BEST = BITS == 2 ? 0.9957f : BITS == 4 ? 0.3352f : 0.0308f;  // STEPS of plugins/deltakv/config.py
  const int lane = threadIdx.x % 32, count = size / PER_BYTE;
  float largest = 0, energy = 0;
  for (int n = lane; n < size; n += 32) {
    largest = fmaxf(largest, fabsf(z[n]));
    energy = __fmaf_rn(z[n], z[n], energy);
  }
#pragma unroll
  for (int n = 16; n; n >>= 1) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, n));
    energy += __shfl_xor_sync(~0u, energy, n);
  }
  const float best = BEST * sqrtf(energy / float(size));
  const T stored = from_float<T>(fminf(largest / HALF, best));
  const float scale = to_float(stored);
  if (lane == 0) *scale_out = stored;
  for (int byte = lane; byte < count; byte += 32) {  // codes byte, byte + count, ..., the first in the lowest bits
    uint32_t packed = 0;
#pragma unroll
    for (int n = 0; n < PER_BYTE; ++n) {
      const float steps = scale > 0 ? __fdiv_rn(z[byte + n * count], scale) : 0;
      const float code = fminf(fmaxf(floorf(steps) + HALF, 0), 2 * HALF - 1);
      packed |= uint32_t(code) << (BITS * n);
    }
    bytes[byte] = static_cast<unsigned char>(packed ^ 128);  // int8 of packed - 128
  }
}

template <class T>
__global__ void __launch_bounds__(ENCODE_THREADS) quantise_kernel(Encode p, int first, int chunk) {
  const int b = blockIdx.y, place = blockIdx.x * ENCODE_WARPS + threadIdx.x / 32;
  const int code = place < chunk ? code_row(p, b, first + place) : -1;
  if (code < 0) return;
  const Segments &segments = p.segments;
  const int64_t row = int64_t(b) * p.code_rows + code;
  const float *z = p.latent + (int64_t(b) * chunk + place) * segments.values;
  unsigned char *bytes = static_cast<unsigned char *>(p.latents) + row * segments.bytes;
  if (segments.bits[0] == 16) {
    T *values = reinterpret_cast<T *>(bytes);
    for (int n = threadIdx.x % 32; n < segments.values; n += 32) values[n] = from_float<T>(z[n]);
    return;
  }
  T *scale = static_cast<T *>(p.scales) + row * segments.count;
  for (int n = 0; n < segments.count; ++n) {
    const int size = segments.sizes[n], bits = segments.bits[n];
    if (bits == 2) quantise<T, 2>(z, size, bytes, scale + n);
    else if (bits == 4) quantise<T, 4>(z, size, bytes, scale + n);
    else quantise<T, 8>(z, size, bytes, scale + n);
    z += size;
    bytes += size * bits / 8;
  }
}

// -- host

constexpr int MAX_SPLITS = 128, BUSY = 528;  // of the references; blocks to aim at
constexpr size_t SCRATCH = 64 << 20, SCRATCH_HIDDEN = 256 << 20;  // bytes of residuals, or with units, at a time

struct Plan {
  Encode p;
  int chunk;  // rows per sequence whose residuals are held at a time
};

Plan plan_encode(Carver &carver, const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d) {
  Encode p = {};
  p.geometry = d.geometry;
  p.segments = segments_of(d);
  p.count = step.encode;
  p.width = deltakv_width(layer);
  p.ring_rows = deltakv_ring_rows(d);
  p.code_rows = d.code_rows;
  p.ref_rows = d.ref_rows;
  p.stride = d.stride;
  p.neighbors = d.neighbors;
  p.index_bytes = d.index_bytes;
  p.hidden = d.hidden;
  p.pitch = (d.hidden + 63) / 64 * 64;
  p.ordinals = d.geometry.sinks + d.ref_rows;
  const int rows = p.count <= FEW_ROWS ? 64 : 128;  // of a tile, against 128 references
  const int blocks = step.batch * ((p.count + rows - 1) / rows), tiles = (p.ordinals + 127) / 128;
  p.splits = min(min((BUSY + blocks - 1) / max(blocks, 1), MAX_SPLITS), tiles);
  const size_t batch = step.batch;
  const size_t row = 4 * (d.hidden ? 3 * size_t(p.width) + 4 * size_t(p.pitch) : size_t(p.width));
  const size_t room = max((d.hidden ? SCRATCH_HIDDEN : SCRATCH) / (batch * row) / 128 * 128, size_t(128));
  const int chunk = int(min(room, size_t(p.count)));
  p.sinks = carver.take<uint16_t>(batch * d.geometry.sinks * p.width);
  p.energy = carver.take<float>(batch * p.ordinals);
  p.found = carver.take<Candidate>(batch * p.count * p.splits * CANDIDATES);
  p.residual = carver.take<float>(batch * chunk * p.width);
  p.latent = carver.take<float>(batch * chunk * p.segments.values);
  if (d.hidden) {
    for (float *&centered : p.centered) centered = carver.take<float>(batch * chunk * p.width);
    for (float *&units : p.units) units = carver.take<float>(batch * chunk * p.pitch);
  }
  return {p, chunk};
}

template <class T>
int store(const kvpack_step &step, const kvpack_deltakv &d, const Plan &plan) {
  const Encode &p = plan.p;
  const int batch = step.batch, chunk = plan.chunk;
  const dim3 threads(ENCODE_THREADS);
  int error = 0;
  for (int first = 0; first < p.count && !error; first += chunk) {
    const dim3 grid = warp_per_row(min(chunk, p.count - first), batch);
    error = launch(residual_kernel<T>, grid, threads, 0, step.stream, p, first, chunk);
    if (!error) error = make_latents(step, d, p, first, chunk);
    if (!error) error = launch(quantise_kernel<T>, grid, threads, 0, step.stream, p, first, chunk);
  }
  return error;
}

}  // namespace

size_t deltakv_encode_workspace(const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d) {
  Carver carver{nullptr};
  if (step.encode) plan_encode(carver, layer, step, d);
  return carver.used;
}

int deltakv_encode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d,
                   const DeltaKVTables &tables, void *workspace) {
  Carver carver{static_cast<char *>(workspace)};
  Plan plan = plan_encode(carver, layer, step, d);
  Encode &p = plan.p;
  p.ring = d.ring, p.key = rows_of(layer, step, step.k), p.value = rows_of(layer, step, step.v);
  p.past_len = step.past_len, p.new_len = step.new_len, p.source = step.enc_src, p.target = step.enc_dst;
  p.references = d.references, p.index = d.index, p.latents = d.latents, p.scales = d.scales;
  p.shift = tables.shift, p.center = d.center;
  int error = find_candidates(layer, step, p);
  if (!error)
    error = layer.dtype == KVPACK_FP16 ? store<half_t>(step, d, plan) : store<bf16_t>(step, d, plan);
  return launched(error, "encoding of DeltaKV rows");
}

}  // namespace kvpack
