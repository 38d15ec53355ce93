// Attention of one new token to DeltaKV's code rows: keys are rebuilt tile by tile and never stored, and values never
// exist. A block takes one KV head of one split; its teams of four warps take the split's tiles in turn, each with a
// maximum and sums of its own, so that one team's gathers pass behind another's products.
#include "deltakv_tile.cuh"

namespace kvpack {
namespace {

// Partial results from the block's sums of latents, float [.., HEADS] at `sum_at`, and of references, float [HEADS, D].
template <class T, class Shape>
KVPACK_D void write_partials(const Decoding &d, int h, const float *latents, const float *means, float *reduce,
                             float *out, int64_t head_stride, int heads) {
  constexpr int D = Shape::D, CHUNKS = D / 8, TOGETHER = 16;  // rows on their way at a time: this is all latency
  const int chunk = int(threadIdx.x) % CHUNKS, part = int(threadIdx.x) / CHUNKS, parts = int(blockDim.x) / CHUNKS;
  const int values = d.latents.count * SLOT;
  const T *matrix = static_cast<const T *>(d.to_value) + int64_t(h) * values * D + chunk * 8;
  for (int head = 0; head < heads; head += 4) {
    if (part < parts) {
      float sum[4][8] = {};
      for (int first = part; first < values; first += TOGETHER * parts) {
        Packed<8> rows[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
          rows[n] = load_packed<8>(matrix + int64_t(min(first + n * parts, values - 1)) * D);
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
          const int at = first + n * parts;
          if (at >= values) break;
          const float4 y = *reinterpret_cast<const float4 *>(latents + sum_at(at) + head);
          const float weight[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 two = unpack2<T>(rows[n].pair[e]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i][2 * e] += weight[i] * two.x, sum[i][2 * e + 1] += weight[i] * two.y;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 8; e += 4)
          *reinterpret_cast<float4 *>(reduce + (part * 4 + i) * D + chunk * 8 + e) =
              make_float4(sum[i][e], sum[i][e + 1], sum[i][e + 2], sum[i][e + 3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * D; i += blockDim.x) {
      const int which = head + i / D;
      if (which >= heads) break;
      float sum = means[which * D + i % D] * d.share;
#pragma unroll 8
      for (int n = 0; n < parts; ++n) sum += reduce[n * 4 * D + i];
      out[which * head_stride + i % D] = sum;
    }
    __syncthreads();
  }
}

// RESIDENT: the head's W_K stays in shared memory and the sums of latents in registers, where latents, rotation and
// group are of the usual kind; else the one is read from global memory and the others are in shared memory.
template <class T, int D, bool RESIDENT>
__global__ void __launch_bounds__(RESIDENT ? 128 * MAX_TEAMS : 256) decode_rows(const __grid_constant__ Decoding d) {
  using Shape = Tile<D>;
  constexpr int ROWS = Shape::ROWS, BLOCKS = Shape::BLOCKS;
  KVPACK_DYNAMIC_SHARED(shared);
  const int split = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int team = int(threadIdx.x) / 128, teams = int(blockDim.x) / 128;
  const int rows = rows_to_read(d, b), used = splits_of(d, rows);
  if (split >= max(used, 1)) return;
  const Decode &decode = d.merge.decode;
  if (used == 0) {
    wait_for_previous_kernel();
    merge_last<T, D>(d.merge, b, h, 0);
    return;
  }
  const int tiles = (rows + ROWS - 1) / ROWS;
  const int begin = int(int64_t(tiles) * split / used), end = int(int64_t(tiles) * (split + 1) / used);
  const int thread = int(threadIdx.x) % 128, values = d.latents.count * SLOT;
  const Work w = {b, h, rows, encoded_rows(d.geometry, d.past_len[b]), thread, thread / 32, thread % 32,
                  shared + d.layout.teams + team * d.layout.team_bytes};
  const int pieces = values * D / 8;  // of 16 bytes
  const uint4 *matrix = d.to_key + int64_t(h) * pieces;
  float2 *stats = reinterpret_cast<float2 *>(shared);  // [MAX_TEAMS, HEADS]
  float *latent_sums = reinterpret_cast<float *>(shared + d.layout.sums);
  uint32_t *query = reinterpret_cast<uint32_t *>(w.shared + d.layout.query);
  float *offsets = reinterpret_cast<float *>(shared + d.layout.offsets);
  const int first_row = (begin + team) * ROWS, last_row = end * ROWS, rows_on = teams * ROWS;

  const int passes = RESIDENT ? 1 : (d.merge.group + HEADS - 1) / HEADS;
  for (int first = 0; first < passes * HEADS; first += HEADS) {
    const int heads = min(d.merge.group - first, HEADS);
    const int64_t head0 = int64_t(b * d.merge.kv_heads + h) * d.merge.group + first;
    int row = first_row < last_row ? fetched_row<Shape>(d, w, first_row) : -1;
    int next = first_row + rows_on < last_row ? fetched_row<Shape>(d, w, first_row + rows_on) : -1;
    int ordinals[ORDINALS<Shape>];
    fetch_ordinals<Shape>(d, w, row, ordinals);
    if (first == 0) {
      if (RESIDENT)
        for (int i = threadIdx.x; i < pieces; i += blockDim.x)
          copy_async_16(shared + d.layout.matrix + i * 16, matrix + i);
      const int count = d.latents.segments * D / 4;
      for (int i = threadIdx.x; i < count; i += blockDim.x)
        copy_async_16(offsets + i * 4, d.offsets + (int64_t(h) * count + i) * 4);
      const T *values_matrix = static_cast<const T *>(d.to_value) + int64_t(h) * values * D;
      prefetch_lines(values_matrix, values * D * 2, int(threadIdx.x) * used + split, int(blockDim.x) * used);
    }
    prefetch_rows<T, Shape>(d, w, row, ordinals);
    float *own_sums = latent_sums + team * sum_at(values);
    if (!RESIDENT)
      for (int i = thread; i < sum_at(values); i += 128) own_sums[i] = 0;
    if (!RESIDENT && codes_of(d.latents.slots[0]) == Codes::WHOLE)  // filling meets zeros, but must be numbers
      for (int i = thread; i < ROWS * d.latents.stride / 16; i += 128)
        reinterpret_cast<uint4 *>(w.shared + d.layout.codes)[i] = make_uint4(0, 0, 0, 0);
    float2 *own_stats = stats + team * HEADS;
    float *means = reinterpret_cast<float *>(w.shared + d.layout.means) + thread;
    if (thread < HEADS) own_stats[thread] = make_float2(NOTHING, 0);
#pragma unroll
    for (int n = 0; n < Shape::EACH * 2; ++n) means[n * 128] = 0;
    if (first_row < last_row) stage<T, Shape>(d, w, row, ordinals);
    copy_async_commit();  // of W_K, by a team without rows
    copy_async_wait<0>();
    __syncthreads();

    float y[RESIDENT ? SLOTS_EACH : 1][2][4] = {};
    int at = first_row;
#pragma unroll 1
    for (; at < last_row; at += rows_on) {
      if (at != first_row) {
        stage<T, Shape>(d, w, row, ordinals);
        meet(w);
      }
      row = next;
      fetch_ordinals<Shape>(d, w, row, ordinals);
      next = at + 2 * rows_on < last_row ? fetched_row<Shape>(d, w, at + 2 * rows_on) : -1;
      Values<Shape> reference_values[1];
      {
        float keys[2][BLOCKS][4], unit[4];
        const uint4 *nearest = RESIDENT ? reinterpret_cast<const uint4 *>(shared + d.layout.matrix) : matrix;
        rebuild<T, Shape, !RESIDENT>(d, w, nearest, offsets, keys, unit);
        prefetch_rows<T, Shape>(d, w, row, ordinals);
        if (at == first_row) {
          wait_for_previous_kernel();
          load_query<T, Shape>(d, w, query, head0, heads);
          meet(w);
        }
        score<T, Shape, RESIDENT>(d, w, query, keys, unit);
      }
      if (w.warp < Shape::SUMMING) load_values<T, Shape>(d, w, 0, reference_values[0]);
      meet(w);
      weigh_rows<T, Shape>(d, w, heads, own_stats);
      meet(w);
      uint32_t weights[ROWS / 16][2];
      const uint16_t *stored = reinterpret_cast<const uint16_t *>(w.shared + d.layout.weights);
      stored += w.lane / 4 * (ROWS + 8) + w.lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < ROWS / 8; ++n)
        weights[n / 2][n % 2] = *reinterpret_cast<const uint32_t *>(stored + n * 8);
      const float2 factor = reinterpret_cast<const float2 *>(w.shared + d.layout.factor)[w.lane % 4];
      if (w.warp < Shape::SUMMING) sum_references<T, Shape>(d, w, weights, factor, reference_values);
      Scaled<T, Shape> scaled;
      int segment = -1;
      if constexpr (RESIDENT) {
#pragma unroll
        for (int n = 0; n < SLOTS_EACH; ++n)
          if (n * 4 + w.warp < d.latents.count) {
            const Slot &slot = d.latents.slots[n * 4 + w.warp];
            if (slot.segment != segment) scale_weights<T, Shape>(d, w, slot, weights, scaled);
            segment = slot.segment;
            if (codes_of(slot) == Codes::SPLICED) sum_slot<T, Shape, Codes::SPLICED>(d, w, slot, scaled, factor, y[n]);
            else sum_slot<T, Shape, Codes::BYTES>(d, w, slot, scaled, factor, y[n]);
          }
      } else {
        for (int n = w.warp; n < d.latents.count; n += 4) {
          float *at = own_sums + sum_at(n * SLOT + w.lane / 4 * 4) + w.lane % 4 * 2;
#pragma unroll
          for (int e = 0; e < 8; ++e) y[0][e / 4][e % 4] = at[e / 2 * HEADS + e % 2];
          const Slot &slot = d.latents.slots[n];
          if (slot.segment != segment) scale_weights<T, Shape>(d, w, slot, weights, scaled);
          segment = slot.segment;
          const Codes codes = codes_of(slot);
          if (codes == Codes::SPLICED) sum_slot<T, Shape, Codes::SPLICED>(d, w, slot, scaled, factor, y[0]);
          else if (codes == Codes::BYTES) sum_slot<T, Shape, Codes::BYTES>(d, w, slot, scaled, factor, y[0]);
          else sum_slot<T, Shape, Codes::WHOLE>(d, w, slot, scaled, factor, y[0]);
#pragma unroll
          for (int e = 0; e < 8; ++e) at[e / 2 * HEADS + e % 2] = y[0][e / 4][e % 4];
        }
      }
      meet(w);
    }
    if (at - team * ROWS < last_row)  // a tile less than others: checkers of races want as many barriers of every team
      for (int n = 0; n < 4; ++n) meet(w);

    if (first_row >= last_row) wait_for_previous_kernel();
    // The teams' sums together, in order.
    __syncthreads();
    float *mean_sums = latent_sums + (RESIDENT ? 1 : teams) * sum_at(values), *reduce = mean_sums + HEADS * D;
    float weight[2], own_means[Shape::EACH * 2];  // which the merged sums may cover
#pragma unroll
    for (int n = 0; n < Shape::EACH * 2; ++n) own_means[n] = means[n * 128];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int head = w.lane % 4 * 2 + n;
      float most = NOTHING;
      for (int t = 0; t < teams; ++t) most = fmaxf(most, stats[t * HEADS + head].x);
      weight[n] = exp2_fast(stats[team * HEADS + head].x - most);
    }
    for (int t = 0; t < teams; ++t) {
      if (t == team) {
        if (w.warp < Shape::SUMMING)
#pragma unroll
          for (int m = 0; m < Shape::EACH / 2; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int column = (w.warp * 8 + w.lane / 4) * Shape::EACH + 2 * m + e / 2;
              float *at = mean_sums + (w.lane % 4 * 2 + e % 2) * D + column;
              *at = (t ? *at : 0) + own_means[m * 4 + e] * weight[e % 2];
            }
        if constexpr (RESIDENT) {
#pragma unroll
          for (int n = 0; n < SLOTS_EACH; ++n)
            if (n * 4 + w.warp < d.latents.count) {
              float *at = latent_sums + sum_at((n * 4 + w.warp) * SLOT + w.lane / 4 * 4) + w.lane % 4 * 2;
#pragma unroll
              for (int e = 0; e < 8; e += 2)
                put(at + e / 2 * HEADS, y[n][e / 4][e % 4] * weight[0], y[n][e / 4][e % 4 + 1] * weight[1], t > 0);
            }
        } else {
          for (int i = thread * 2; i < sum_at(values); i += 256)  // i % HEADS is lane % 4 * 2
            put(latent_sums + i, own_sums[i] * weight[0], own_sums[i + 1] * weight[1], t > 0);
        }
      }
      __syncthreads();
    }
    float *out = decode.partial + (head0 * (decode.splits + 1) + split) * D;
    write_partials<T, Shape>(d, h, latent_sums, mean_sums, reduce, out, int64_t(decode.splits + 1) * D, heads);
    if (threadIdx.x < heads) {
      float most = NOTHING, sum = 0;
      for (int t = 0; t < teams; ++t) most = fmaxf(most, stats[t * HEADS + threadIdx.x].x);
      for (int t = 0; t < teams; ++t) {
        const float2 one = stats[t * HEADS + threadIdx.x];
        sum += one.y * exp2_fast(one.x - most);
      }
      decode.mass[(head0 + threadIdx.x) * (decode.splits + 1) + split] = make_float2(most, sum);
    }
    __syncthreads();
  }
  merge_last<T, D>(d.merge, b, h, splits_of(d, rows_to_read(d, b)));  // anew, to spare a register
}

// -- preparation: W_K in fragments and W_V in rows, both by slots

template <class T, int D>
__global__ void prepare_matrices(LatentSlots latents, const float *decompress, int kv_heads, int half, T *to_key,
                                 T *to_value) {
  using Shape = Tile<D>;
  const int values = latents.count * SLOT;
  const int64_t total = int64_t(kv_heads) * values * D, width = int64_t(2) * kv_heads * D;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += int64_t(gridDim.x) * blockDim.x) {
    const int h = int(i / (int64_t(values) * D)), at = int(i % (int64_t(values) * D));
    {  // number e of a lane's 8: two blocks' two registers of two rows
      const int e = at % 8, lane = at / 8 % 32, rest = at / 256, steps = Shape::ACROSS * (Shape::BLOCKS / 2);
      const int step = rest / steps, across = rest % steps / (Shape::BLOCKS / 2);
      const int block = rest % (Shape::BLOCKS / 2) * 2 + e / 4, column = lane / 4;
      const int place = step % 2 * 16 + lane % 4 * 4 + e % 2 * 2 + e / 2 % 2;
      const Slot &slot = latents.slots[step / 2];
      const int pair = pair_of<Shape>(across, column / 2, block);
      const int64_t dimension = h * D + pair_dimension(pair, column % 2, half);
      to_key[i] = from_float<T>(place < slot.real ? decompress[(slot.first + place) * width + dimension] : 0.f);
    }
    const Slot &slot = latents.slots[at / D / SLOT];
    const int place = at / D % SLOT;
    const int64_t dimension = (kv_heads + h) * D + at % D;
    to_value[i] = from_float<T>(place < slot.real ? decompress[(slot.first + place) * width + dimension] : 0.f);
  }
}

// What `offsets` of Decoding says; a thread for each number.
template <class T, int D>
__global__ void prepare_offsets(LatentSlots latents, const float *decompress, int kv_heads, int half, float *offsets) {
  const int64_t total = int64_t(kv_heads) * latents.segments * D, width = int64_t(2) * kv_heads * D;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= total) return;
  const int h = int(i / D / latents.segments), segment = int(i / D % latents.segments), at = int(i % D);
  const int64_t dimension = h * D + pair_dimension(at / 2, at % 2, half);
  float sum = 0;
  for (int n = 0; n < latents.count; ++n) {
    const Slot &slot = latents.slots[n];
    if (slot.segment != segment) continue;
    float part = 0;
    for (int place = 0; place < slot.real; ++place)
      part += to_float(from_float<T>(decompress[(slot.first + place) * width + dimension]));
    sum -= part * middle_of<T>(slot);
  }
  offsets[i] = sum;
}

template <class Shape> Layout layout_of(const LatentSlots &latents, int neighbors, int teams, bool resident) {
  Layout l = {};
  int used = MAX_TEAMS * HEADS * int(sizeof(float2));
  const auto take = [&](int bytes) {
    const int at = used;
    used += (bytes + 15) / 16 * 16;
    return at;
  };
  const int values = latents.count * SLOT, sums = values * 5 / 4 * HEADS;  // see sum_at
  l.offsets = take(latents.segments * Shape::D * 4);
  l.matrix = l.sums = used;
  l.teams = l.matrix + (resident ? values * Shape::D * 2 : teams * sums * 4);
  used = 0;
  l.query = take(Shape::D * 16);
  l.codes = take(Shape::ROWS * latents.stride);
  l.scores = take(Shape::ACROSS * HEADS * (Shape::ROWS + 4) * 4);
  l.weights = take(HEADS * (Shape::ROWS + 8) * 2);
  l.scales = take(latents.segments * Shape::ROWS * 2);
  l.references = take(Shape::ROWS * neighbors * 8);
  l.positions = take(Shape::ROWS * 4);
  l.factor = take(HEADS * 4);
  l.means = take(Shape::EACH * 2 * 128 * 4);
  l.team_bytes = used;
  const int finish = l.sums + ((resident ? 1 : teams) * sums + HEADS * Shape::D + teams * 128 * 32) * 4;
  l.total = max(l.teams + teams * l.team_bytes, finish);
  return l;
}

struct Plan {
  int teams;  // 0: there is not enough shared memory
  bool resident;
  Layout layout;
};
template <class Shape> Plan plan_of(const kvpack_layer &layer, const LatentSlots &latents, int neighbors) {
  const int limit = shared_limit() - 64;  // merge_last has a flag
  const bool usual = latents.count <= 4 * SLOTS_EACH && latents.slots[0].bits < 16 &&
                     layer.rotary_dim / 2 % Shape::PIECE == 0 && layer.num_heads / layer.num_kv_heads <= HEADS;
  for (const bool resident : {true, false})
    for (int teams = resident ? MAX_TEAMS : 2; teams > resident; --teams) {  // one alone would wait too often
      const Layout layout = layout_of<Shape>(latents, neighbors, teams, resident);
      if ((!resident || usual) && layout.total <= limit) return {teams, resident, layout};
    }
  return {};
}

int check_decode(const kvpack_layer &layer, const kvpack_deltakv &d, const LatentSlots &latents) {
  if (const int error = check_layer(layer)) return error;
  if (d.reference_bits != 16) return fail(KVPACK_UNSUPPORTED, "references of %d bits: only 16", d.reference_bits);
  if (d.neighbors < 1 || d.neighbors > MAX_NEIGHBORS)
    return fail(KVPACK_UNSUPPORTED, "%d neighbors: at most %d", d.neighbors, MAX_NEIGHBORS);
  if (!latents.count) return fail(KVPACK_UNSUPPORTED, "latents of %d values: too many", latent_values(d));
  return KVPACK_OK;
}

}  // namespace

int deltakv_decode_supported(const kvpack_layer &layer, const kvpack_deltakv &d) {
  const LatentSlots latents = latent_slots(d);
  if (const int error = check_decode(layer, d, latents)) return error;
  return choose(layer, [&](auto, auto size) {
    if (plan_of<Tile<decltype(size)::value>>(layer, latents, d.neighbors).teams) return int(KVPACK_OK);
    return fail(KVPACK_UNSUPPORTED, "latents of %d values in %d bytes need more shared memory than this GPU has",
                latent_values(d), latents.row_bytes);
  });
}

size_t deltakv_decode_workspace(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &) { return 0; }

size_t deltakv_decode_prepared(const kvpack_layer &layer, const kvpack_deltakv &d) {
  if (deltakv_sm90_fits(layer, d)) return deltakv_sm90_prepared(layer, d);
  const LatentSlots latents = latent_slots(d);
  return (size_t(2) * 2 * latents.count * SLOT + 4 * latents.segments) * layer.num_kv_heads * layer.head_dim;
}

int deltakv_decode_prepare(const kvpack_layer &layer, const kvpack_deltakv &d, void *prepared, void *stream) {
  const LatentSlots latents = latent_slots(d);
  if (const int error = check_decode(layer, d, latents)) return error;
  if (deltakv_sm90_fits(layer, d)) return deltakv_sm90_prepare(layer, d, prepared, stream);
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    T *to_key = static_cast<T *>(prepared), *to_value = to_key + int64_t(latents.count) * SLOT * layer.num_kv_heads * D;
    const int heads = layer.num_kv_heads, half = layer.rotary_dim / 2;
    float *offsets = reinterpret_cast<float *>(to_value + int64_t(latents.count) * SLOT * heads * D);
    int error = launch(prepare_matrices<T, D>, dim3(min(latents.count * SLOT, 512)), dim3(128), 0, stream, latents,
                       d.decompress, heads, half, to_key, to_value);
    if (!error)
      error = launch(prepare_offsets<T, D>, dim3((heads * latents.segments * D + 127) / 128), dim3(128), 0, stream,
                     latents, d.decompress, heads, half, offsets);
    return launched(error, "deltakv_decode_prepare");
  });
}

int deltakv_decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d, const void *prepared,
                   const ExactRows &exact, const Decode &decode, void *) {
  if (const int error = deltakv_decode_supported(layer, d)) return error;
  if (deltakv_sm90_fits(layer, d)) return deltakv_sm90_decode(layer, step, d, prepared, exact, decode);
  if (const int error = decode_begin(layer, step, exact, decode)) return error;
  Decoding x = decoding_of(layer, step, d, decode);
  x.to_key = static_cast<const uint4 *>(prepared);
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    const T *to_value = static_cast<const T *>(prepared) + int64_t(x.latents.count) * SLOT * layer.num_kv_heads * D;
    x.to_value = to_value;
    x.offsets = reinterpret_cast<const float *>(to_value + int64_t(x.latents.count) * SLOT * layer.num_kv_heads * D);
    const Plan plan = plan_of<Tile<D>>(layer, x.latents, d.neighbors);
    x.layout = plan.layout;
    const dim3 grid(most_splits(x), layer.num_kv_heads, step.batch);
    const auto kernel = plan.resident ? decode_rows<T, D, true> : decode_rows<T, D, false>;
    const dim3 threads(plan.teams * 128);
    return launched(launch_early(kernel, grid, threads, plan.layout.total, step.stream, x), "deltakv_decode");
  });
}

}  // namespace kvpack
