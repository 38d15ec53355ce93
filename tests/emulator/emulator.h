// Runs CUDA kernels on a CPU, one block at a time, every thread a fiber: what the kernels compute can be tested without
// a GPU. Slow, sequentially consistent, and blind to races and to missing waits for asynchronous copies.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __noinline__
#undef __constant__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __noinline__
#define __constant__ static
#define __grid_constant__
#define KVPACK_DYNAMIC_SHARED(name) unsigned char *name = emulator::shared_memory()

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {
constexpr size_t SHARED = 256 << 10, STACK = 256 << 10;
constexpr uint32_t SHARED_START = 1024;  // address of dynamic shared memory in its window, as on sm_90

inline unsigned char *shared_memory() {
  static unsigned char *memory = static_cast<unsigned char *>(aligned_alloc(1024, SHARED));
  return memory;
}

extern "C" void kvpack_emulator_switch(void **save, void *load);
#ifdef KVPACK_EMULATOR_MAIN
asm(R"(
.text
.globl kvpack_emulator_switch
.type kvpack_emulator_switch,@function
kvpack_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#endif

struct Fiber {
  void *stack_pointer = nullptr;
  std::vector<char> stack;
  dim3 thread;
  bool done = false;
};
struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};
struct Block {
  std::vector<Fiber> fibers;
  std::function<void()> body;
  void *scheduler = nullptr;
  int current = 0, live = 0;
  unsigned long idle = 0;
  Barrier all[16];
  struct Warp {
    Barrier barrier[64];
    uint32_t mask[64] = {};
    uint64_t slot[32][8];
    int live = 0;
  };
  std::vector<Warp> warps;
};
inline Block *block = nullptr;

inline void yield() {
  Fiber &fiber = block->fibers[block->current];
  if (++block->idle > 4ul * 1000 * 1000 * 64) {
    fprintf(stderr, "emulator: deadlock in block (%u, %u, %u)\n", blockIdx.x, blockIdx.y, blockIdx.z);
    abort();
  }
  kvpack_emulator_switch(&fiber.stack_pointer, block->scheduler);
}
inline void wait(Barrier &barrier, const std::function<int()> &expected) {
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  while (barrier.generation == generation) {
    if (barrier.arrived >= expected()) {
      barrier.arrived = 0;
      ++barrier.generation;
      block->idle = 0;
      return;
    }
    yield();
  }
}
inline int lane() { return block->current & 31; }
inline Block::Warp &warp() { return block->warps[block->current >> 5]; }
inline void sync_warp(uint32_t mask) {
  Block::Warp &w = warp();
  int n = 0;
  while (w.mask[n] && w.mask[n] != mask) ++n;
  w.mask[n] = mask;
  const int wanted = __builtin_popcount(mask);
  wait(w.barrier[n], [&w, wanted] { return wanted < w.live ? wanted : w.live; });
}
inline void entry() {
  block->body();
  Fiber &fiber = block->fibers[block->current];
  fiber.done = true;
  --block->live;
  --block->warps[block->current >> 5].live;
  block->idle = 0;
  void *unused;
  kvpack_emulator_switch(&unused, block->scheduler);
}

inline void run_block(const std::function<void()> &body) {
  static std::vector<Fiber> pool;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  Block b;
  b.body = body;
  b.live = threads;
  b.warps.resize((threads + 31) / 32);
  b.fibers.swap(pool);
  if (int(b.fibers.size()) < threads) b.fibers.resize(threads);
  block = &b;
  for (int n = 0; n < threads; ++n) {
    Fiber &f = b.fibers[n];
    if (f.stack.empty()) f.stack.resize(STACK);
    f.done = false;
    f.thread = dim3(n % blockDim.x, n / blockDim.x % blockDim.y, n / (blockDim.x * blockDim.y));
    uintptr_t top = reinterpret_cast<uintptr_t>(f.stack.data() + STACK) & ~uintptr_t(63);
    void **sp = reinterpret_cast<void **>(top) - 1;
    *sp = nullptr;  // return address of entry, never used; keeps the stack aligned
    *--sp = reinterpret_cast<void *>(&entry);
    sp -= 6;
    for (int r = 0; r < 6; ++r) sp[r] = nullptr;
    f.stack_pointer = sp;
    ++b.warps[n >> 5].live;
  }
  while (b.live) {
    for (int n = 0; n < threads; ++n) {
      if (b.fibers[n].done) continue;
      b.current = n;
      threadIdx = b.fibers[n].thread;
      kvpack_emulator_switch(&b.scheduler, b.fibers[n].stack_pointer);
    }
  }
  b.fibers.swap(pool);
  block = nullptr;
}

template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t shared, A... args) {
  if (shared > SHARED) return 1;
  gridDim = grid;
  blockDim = threads;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        memset(shared_memory(), 0xFF, shared);  // NaN: shared memory starts undefined
        run_block([&] { kernel(args...); });
      }
  return 0;
}

template <class V>
V exchange(uint32_t mask, V value, int from) {
  Block::Warp &w = warp();
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(V));
  w.slot[lane()][0] = bits;
  sync_warp(mask);
  V out;
  memcpy(&out, &w.slot[from & 31][0], sizeof(V));
  sync_warp(mask);
  return out;
}
}  // namespace emulator

inline void __syncthreads() {
  emulator::wait(emulator::block->all[0], [] { return emulator::block->live; });
}
inline int __syncthreads_or(int p) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= p != 0;
  __syncthreads();
  return any;
}
inline void __syncwarp(uint32_t mask = ~0u) { emulator::sync_warp(mask); }
inline void named_barrier(int name, int threads) {
  emulator::wait(emulator::block->all[name], [threads] { return threads; });
}
// In a barrier's 64 bits: how many arrivals end a phase (16), how many there were (16), the phase (32).
inline void barrier_init(uint64_t *barrier, int count) { *barrier = uint64_t(count); }
inline void barrier_arrive(uint64_t *barrier) {
  *barrier += 1 << 16;
  if ((*barrier >> 16 & 0xFFFF) == (*barrier & 0xFFFF)) *barrier = (*barrier & 0xFFFF) | ((*barrier >> 32) + 1) << 32;
}
inline void barrier_wait(uint64_t *barrier, int phase) {
  while ((*barrier >> 32 & 1) == uint64_t(phase & 1)) emulator::yield();
}
template <class V> V __shfl_sync(uint32_t m, V v, int from, int width = 32) {
  const int lane = emulator::lane();
  return emulator::exchange(m, v, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class V> V __shfl_xor_sync(uint32_t m, V v, int x, int = 32) {
  return emulator::exchange(m, v, emulator::lane() ^ x);
}
template <class V> V __shfl_up_sync(uint32_t m, V v, unsigned n, int width = 32) {
  const int lane = emulator::lane();
  return emulator::exchange(m, v, (lane & (width - 1)) >= int(n) ? lane - int(n) : lane);
}
inline uint32_t __ballot_sync(uint32_t mask, int p) {
  auto &w = emulator::warp();
  w.slot[emulator::lane()][0] = p != 0;
  emulator::sync_warp(mask);
  uint32_t out = 0;
  for (int n = 0; n < 32; ++n)
    if (mask >> n & 1 && w.slot[n][0]) out |= 1u << n;
  emulator::sync_warp(mask);
  return out;
}
inline int __any_sync(uint32_t m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(uint32_t m, int p) { return __ballot_sync(m, !p) == 0; }
template <class V, class F> V reduce_sync(uint32_t m, V v, F &&f) {  // m: the whole warp
  for (int n = 16; n; n >>= 1) v = f(v, __shfl_xor_sync(m, v, n));
  return v;
}
template <class V> V __reduce_add_sync(uint32_t m, V v) { return reduce_sync(m, v, [](V a, V b) { return a + b; }); }
template <class V> V __reduce_min_sync(uint32_t m, V v) {
  return reduce_sync(m, v, [](V a, V b) { return a < b ? a : b; });
}
template <class V> V __reduce_max_sync(uint32_t m, V v) {
  return reduce_sync(m, v, [](V a, V b) { return a > b ? a : b; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class V> V __ldg(const V *p) { return *p; }
template <class V> V __ldcg(const V *p) { return *p; }
template <class V> void __stcg(V *p, V v) { *p = v; }
template <class V, class W> V atomicAdd(V *p, W v) { V old = *p; *p = old + V(v); return old; }
template <class V, class W> V atomicMax(V *p, W v) { V old = *p; if (V(v) > old) *p = V(v); return old; }
template <class V, class W> V atomicMin(V *p, W v) { V old = *p; if (V(v) < old) *p = V(v); return old; }
template <class V, class W> V atomicOr(V *p, W v) { V old = *p; *p = old | V(v); return old; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned pick = s >> (4 * n) & 15;
    unsigned byte = unsigned(both >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << (8 * n);
  }
  return out;
}
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline unsigned __float2uint_rn(float x) { return unsigned(nearbyintf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __fmul_rn(float a, float b) { volatile float y = a * b; return y; }
inline float __fadd_rn(float a, float b) { volatile float y = a + b; return y; }
inline float __fsub_rn(float a, float b) { volatile float y = a - b; return y; }
inline float __fdiv_rn(float a, float b) { volatile float y = a / b; return y; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
using std::max;
using std::min;
inline int min(int a, unsigned b) { return a < int(b) ? a : int(b); }
inline int max(int a, unsigned b) { return a > int(b) ? a : int(b); }

// The PTX that src/device.cuh wraps.
inline uint32_t shared_address(const void *p) {
  return uint32_t(static_cast<const unsigned char *>(p) - emulator::shared_memory()) + emulator::SHARED_START;
}
inline unsigned char *shared_pointer(uint32_t a) { return emulator::shared_memory() + (a - emulator::SHARED_START); }

template <class T> void mma_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  auto &w = emulator::warp();
  const int lane = emulator::lane();
  for (int n = 0; n < 4; ++n) w.slot[lane][n] = a[n];
  for (int n = 0; n < 2; ++n) w.slot[lane][4 + n] = b[n];
  emulator::sync_warp(~0u);
  auto half_of = [](uint64_t word, int part) {
    uint16_t bits = uint16_t(word >> (16 * part));
    T value;
    memcpy(&value, &bits, 2);
    return float(value);
  };
  for (int n = 0; n < 4; ++n) {
    const int row = lane / 4 + 8 * (n >> 1), column = lane % 4 * 2 + (n & 1);
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int quad = k % 8 / 2, high = k / 8;
      const float x = half_of(w.slot[row % 8 * 4 + quad][(row >= 8) + 2 * high], k & 1);
      const float y = half_of(w.slot[column * 4 + quad][4 + high], k & 1);
      sum += x * y;
    }
    c[n] += sum;
  }
  emulator::sync_warp(~0u);
}

// b by its descriptor: no swizzle, the rest as wgmma_matrix of src/device.cuh.
template <class T> void wgmma_64x64x16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  auto &w = emulator::warp();
  const int lane = emulator::lane();
  for (int n = 0; n < 4; ++n) w.slot[lane][n] = a[n];
  emulator::sync_warp(~0u);
  const unsigned char *start = shared_pointer(uint32_t(b & 0x3FFF) << 4);
  const size_t halves = (b >> 16 & 0x3FFF) << 4, columns = (b >> 32 & 0x3FFF) << 4;
  if (b >> 62) abort();
  float rows[2][16];
  for (int k = 0; k < 16; ++k)
    for (int r = 0; r < 2; ++r) {
      const uint64_t word = w.slot[lane / 4 * 4 + k % 8 / 2][r + k / 8 * 2];
      const uint16_t bits = uint16_t(word >> (k % 2 * 16));
      T value;
      memcpy(&value, &bits, 2);
      rows[r][k] = float(value);
    }
  for (int n = 0; n < 32; ++n) {
    const int column = n / 4 * 8 + lane % 4 * 2 + n % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      T value;
      memcpy(&value, start + k / 8 * halves + column / 8 * columns + column % 8 * 16 + k % 8 * 2, 2);
      sum += rows[n / 2 % 2][k] * float(value);
    }
    d[n] += sum;
  }
  emulator::sync_warp(~0u);
}

inline void mma_16816_from(float (&d)[4], const float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  for (int n = 0; n < 4; ++n) d[n] = c[n];
  mma_16816<__half>(d, a, b);
}

template <int N, bool TRANSPOSED> void ldmatrix(uint32_t *out, const void *row) {
  auto &w = emulator::warp();
  const int lane = emulator::lane();
  w.slot[lane][0] = reinterpret_cast<uint64_t>(row);
  emulator::sync_warp(~0u);
  for (int m = 0; m < N; ++m) {
    uint16_t part[2];
    for (int e = 0; e < 2; ++e) {
      const int r = TRANSPOSED ? lane % 4 * 2 + e : lane / 4, c = TRANSPOSED ? lane / 4 : lane % 4 * 2 + e;
      part[e] = reinterpret_cast<const uint16_t *>(w.slot[8 * m + r][0])[c];
    }
    out[m] = part[0] | uint32_t(part[1]) << 16;
  }
  emulator::sync_warp(~0u);
}
