// What the kernels use of CUDA beyond plain C++: one home for inline PTX, launches and number formats. With
// KVPACK_EMULATE everything runs on a CPU instead (tests/emulator).
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#ifdef KVPACK_EMULATE
#include "emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define KVPACK_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

namespace kvpack {

using half_t = __half;
using bf16_t = __nv_bfloat16;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // the maximum of no scores: finite, so that exp2(NOTHING - NOTHING) is not NaN

#ifdef KVPACK_EMULATE
using ::barrier_arrive;
using ::barrier_init;
using ::barrier_wait;
using ::ldmatrix;
using ::mma_16816;
using ::mma_16816_from;
using ::shared_address;
using ::wgmma_64x64x16;
#define KVPACK_D inline
KVPACK_D float exp2_fast(float x) { return exp2f(x); }
KVPACK_D float tanh_fast(float x) { return tanhf(x); }
KVPACK_D void copy_async_16(void *shared, const void *global) { memcpy(shared, global, 16); }
KVPACK_D void copy_async_4(void *shared, const void *global) { memcpy(shared, global, 4); }
KVPACK_D void copy_async_16_or_zero(void *shared, const void *global, bool real) {
  if (real) memcpy(shared, global, 16); else memset(shared, 0, 16);
}
KVPACK_D void copy_async_commit() {}
template <int LEFT> KVPACK_D void copy_async_wait() {}
template <class W> KVPACK_D W load_streamed(const W *p) { return *p; }
KVPACK_D uint32_t load_shared_32(uint32_t a) { uint32_t x; memcpy(&x, ::shared_pointer(a), 4); return x; }
KVPACK_D uint2 load_shared_64(uint32_t a) { uint2 x; memcpy(&x, ::shared_pointer(a), 8); return x; }
template <uint32_t S> KVPACK_D uint32_t permute(uint32_t a, uint32_t b) { return __byte_perm(a, b, S); }
KVPACK_D float4 load_cached(const float *p) { return *reinterpret_cast<const float4 *>(p); }
KVPACK_D void wgmma_fence() {}
KVPACK_D void wgmma_commit() {}
template <int LEFT> KVPACK_D void wgmma_wait() {}
template <int N> KVPACK_D void hold(float (&)[N]) {}
KVPACK_D int computed_here(int x) { return x; }
KVPACK_D uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) { return (a & b) ^ c; }
template <int NAME, int COUNT> KVPACK_D void named_barrier() { ::named_barrier(NAME, COUNT); }
KVPACK_D void prefetch(const void *) {}
KVPACK_D void wait_for_previous_kernel() {}
KVPACK_D void let_next_kernel_start() {}
KVPACK_D void fence_async() {}
KVPACK_D void copy_bulk(void *shared, const void *global, int bytes, int count, int stride, uint64_t *barrier) {
  for (int n = 0; n < count; ++n) memcpy((char *)shared + n * stride, (const char *)global + n * stride, bytes);
  ::barrier_arrive(barrier);
}
#else
#define KVPACK_D __device__ __forceinline__
KVPACK_D float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
KVPACK_D float tanh_fast(float x) { return tanhf(x); }
KVPACK_D uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }
KVPACK_D void copy_async_16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
KVPACK_D void copy_async_4(void *shared, const void *global) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
KVPACK_D void copy_async_16_or_zero(void *shared, const void *global, bool real) {  // `global` must be readable anyhow
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(real ? 16 : 0) : "memory");
}
KVPACK_D void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> KVPACK_D void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
KVPACK_D uint4 load_streamed(const uint4 *p) {  // read once: keep it out of L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
KVPACK_D uint2 load_streamed(const uint2 *p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
KVPACK_D uint32_t load_streamed(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
KVPACK_D uint32_t load_shared_32(uint32_t a) { uint32_t x; asm volatile("ld.shared.b32 %0,[%1];" : "=r"(x) : "r"(a)); return x; }
KVPACK_D uint2 load_shared_64(uint32_t a) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "r"(a));
  return x;
}
template <uint32_t S> KVPACK_D uint32_t permute(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "n"(S));
  return d;
}
KVPACK_D uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {  // (a & b) ^ c, in one instruction even of constants
  uint32_t d;
  asm("lop3.b32 %0,%1,%2,%3,0x6A;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <int NAME, int COUNT> KVPACK_D void named_barrier() {
  asm volatile("bar.sync %0,%1;" ::"n"(NAME), "n"(COUNT) : "memory");
}
KVPACK_D void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
KVPACK_D void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
KVPACK_D void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// A barrier in shared memory that one may arrive at without waiting. Its phases 0, 1, .. end with `count` arrivals each;
// a phase may be waited for until the next one ends.
KVPACK_D void barrier_init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
KVPACK_D void barrier_arrive(uint64_t *barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state,[%0];}" ::"r"(shared_address(barrier)) : "memory");
}
KVPACK_D void barrier_wait(uint64_t *barrier, int phase) {
  uint32_t ended = 0;
  while (!ended)
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p,[%1],%2; selp.b32 %0,1,0,p;}"
                 : "=r"(ended) : "r"(shared_address(barrier)), "r"(phase & 1) : "memory");
}
// Before copy_bulk to where threads have written or with a barrier that was made.
KVPACK_D void fence_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// By one thread: arrives at a barrier, the phase of which does not end before `count` pieces of `bytes` were copied,
// `stride` apart at both ends. All are multiples of 16.
KVPACK_D void copy_bulk(void *shared, const void *global, int bytes, int count, int stride, uint64_t *barrier) {
  char *to = static_cast<char *>(shared);
  const char *from = static_cast<const char *>(global);
#if __CUDA_ARCH__ >= 900
  const uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(at), "r"(count * bytes) : "memory");
  for (int n = 0; n < count; ++n)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
                 ::"r"(shared_address(to + n * stride)), "l"(from + n * stride), "r"(bytes), "r"(at) : "memory");
#else  // nothing but correct: no GPU before sm_90 has the shared memory for a kernel that copies so
  for (int n = 0; n < count; ++n)
    for (int m = 0; m < bytes; m += 16)
      *reinterpret_cast<uint4 *>(to + n * stride + m) = *reinterpret_cast<const uint4 *>(from + n * stride + m);
  barrier_arrive(barrier);
#endif
}
KVPACK_D float4 load_cached(const float *p) {  // where it stands: the compiler does not move it
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
// d [64, 64] += a [64, 16] b [16, 64], by the four warps of a group; sm_90a alone. A warp has 16 rows of a and d,
// whose fragments are those of mma.m16n8k16: d[4 n + e] is number e of columns 8 n ... b is in shared memory, see
// wgmma_matrix. It runs on its own: wgmma_fence comes before the first of a series, wgmma_commit after the last, and
// neither d nor a may be touched until wgmma_wait<LEFT> leaves only LEFT younger series. hold keeps uses of d after it.
KVPACK_D void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KVPACK_D void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> KVPACK_D void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int N> KVPACK_D void hold(float (&d)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(d[n])::"memory");
}
KVPACK_D int computed_here(int x) {  // what is made of it is not kept in registers from before a loop
  asm volatile("" : "+r"(x));
  return x;
}
template <class T> KVPACK_D void wgmma_64x64x16(float (&d)[32], const uint32_t (&a)[4], uint64_t b);
#define KVPACK_WGMMA(TYPE)                                                                                    \
  asm volatile(                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"      \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"                                     \
      "{%32,%33,%34,%35},%36,p,1,1,0;}"                                                                       \
      :                                                                                                       \
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),       \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),\
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])\
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <> KVPACK_D void wgmma_64x64x16<half_t>(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  KVPACK_WGMMA("f16");
}
template <> KVPACK_D void wgmma_64x64x16<bf16_t>(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  KVPACK_WGMMA("bf16");
}
#undef KVPACK_WGMMA
// c [16, 8] += a [16, 16] b [16, 8]; fragments as in PTX's mma.m16n8k16.
template <class T> KVPACK_D void mma_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> KVPACK_D void mma_16816<half_t>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> KVPACK_D void mma_16816<bf16_t>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same into d, of half_t: d = c + a b.
KVPACK_D void mma_16816_from(float (&d)[4], const float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                 "f"(c[3]));
}
// N (1, 2 or 4) 8x8 matrices of 16-bit numbers from shared memory; lane n gives the address of row n % 8 of matrix n / 8.
template <int N, bool TRANSPOSED> KVPACK_D void ldmatrix(uint32_t *out, const void *row) {
  const uint32_t a = shared_address(row);
  if constexpr (N == 4 && !TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(a) : "memory");
  else if constexpr (N == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(a) : "memory");
  else if constexpr (N == 2 && !TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(a) : "memory");
  else if constexpr (N == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                 : "=r"(out[0]), "=r"(out[1]) : "r"(a) : "memory");
  else if constexpr (!TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];" : "=r"(out[0]) : "r"(a) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0},[%1];" : "=r"(out[0]) : "r"(a) : "memory");
}
#endif
// The descriptor of b for wgmma: T [2, columns / 8, 8, 8] at `address`, 8 numbers of k of 8 columns in 128 bytes,
// without swizzle. Both strides are in bytes: between the halves of k, and between 8 columns.
KVPACK_D uint64_t wgmma_matrix(uint32_t address, int halves, int columns) {
  return uint64_t(address >> 4 & 0x3FFF) | uint64_t(halves >> 4) << 16 | uint64_t(columns >> 4) << 32;
}

// -- numbers

KVPACK_D float to_float(half_t x) { return __half2float(x); }
KVPACK_D float to_float(bf16_t x) { return __bfloat162float(x); }
KVPACK_D float to_float(float x) { return x; }
template <class T> KVPACK_D T from_float(float x);
template <> KVPACK_D half_t from_float<half_t>(float x) { return __float2half_rn(x); }
template <> KVPACK_D bf16_t from_float<bf16_t>(float x) { return __float2bfloat16_rn(x); }
template <> KVPACK_D float from_float<float>(float x) { return x; }
template <class To, class From> KVPACK_D To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
#ifdef KVPACK_EMULATE
  memcpy(&y, &x, sizeof(To));
#else
  y = *reinterpret_cast<To *>(&x);
#endif
  return y;
}
// Two numbers as the 16-bit pair that an mma takes, the first in the low half; and back.
template <class T> KVPACK_D uint32_t pack2(float low, float high) {
  return uint32_t(bits_as<uint16_t>(from_float<T>(low))) | uint32_t(bits_as<uint16_t>(from_float<T>(high))) << 16;
}
template <class T> KVPACK_D float2 unpack2(uint32_t pair) {
  return make_float2(to_float(bits_as<T>(uint16_t(pair))), to_float(bits_as<T>(uint16_t(pair >> 16))));
}
// The differences of two pairs, rounded to T.
#ifdef KVPACK_EMULATE
template <class T> KVPACK_D uint32_t difference2(uint32_t a, uint32_t b) {
  const float2 x = unpack2<T>(a), y = unpack2<T>(b);
  return pack2<T>(x.x - y.x, x.y - y.y);
}
#else
template <class T> KVPACK_D uint32_t difference2(uint32_t a, uint32_t b);
template <> KVPACK_D uint32_t difference2<half_t>(uint32_t a, uint32_t b) {
  return bits_as<uint32_t>(__hsub2(bits_as<__half2>(a), bits_as<__half2>(b)));
}
template <> KVPACK_D uint32_t difference2<bf16_t>(uint32_t a, uint32_t b) {
  return bits_as<uint32_t>(__hsub2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
}
#endif
#ifndef KVPACK_EMULATE
template <> KVPACK_D uint32_t pack2<half_t>(float low, float high) {
  return bits_as<uint32_t>(__floats2half2_rn(low, high));
}
template <> KVPACK_D uint32_t pack2<bf16_t>(float low, float high) {
  return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
}
#endif
// mma_16816 of half_t with c in half precision, too: rows 0-7 in c[0], rows 8-15 in c[1].
KVPACK_D void mma_16816_half(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef KVPACK_EMULATE
  const float2 x = unpack2<half_t>(c[0]), y = unpack2<half_t>(c[1]);
  float sums[4] = {x.x, x.y, y.x, y.y};
  mma_16816<half_t>(sums, a, b);
  c[0] = pack2<half_t>(sums[0], sums[1]), c[1] = pack2<half_t>(sums[2], sums[3]);
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
KVPACK_D uint32_t sum2(uint32_t a, uint32_t b) {  // of pairs of half_t, rounded to half_t
#ifdef KVPACK_EMULATE
  const float2 x = unpack2<half_t>(a), y = unpack2<half_t>(b);
  return pack2<half_t>(x.x + y.x, x.y + y.y);
#else
  return bits_as<uint32_t>(__hadd2(bits_as<__half2>(a), bits_as<__half2>(b)));
#endif
}
// Pairs of T, element by element.
template <class T> KVPACK_D uint32_t mul2(uint32_t a, uint32_t b) {
#ifdef KVPACK_EMULATE
  const float2 x = unpack2<T>(a), y = unpack2<T>(b);
  return pack2<T>(x.x * y.x, x.y * y.y);
#else
  if constexpr (std::is_same_v<T, bf16_t>)
    return bits_as<uint32_t>(__hmul2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
  else
    return bits_as<uint32_t>(__hmul2(bits_as<__half2>(a), bits_as<__half2>(b)));
#endif
}
template <class T> KVPACK_D uint32_t sub2(uint32_t a, uint32_t b) {
#ifdef KVPACK_EMULATE
  const float2 x = unpack2<T>(a), y = unpack2<T>(b);
  return pack2<T>(x.x - y.x, x.y - y.y);
#else
  if constexpr (std::is_same_v<T, bf16_t>)
    return bits_as<uint32_t>(__hsub2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
  else
    return bits_as<uint32_t>(__hsub2(bits_as<__half2>(a), bits_as<__half2>(b)));
#endif
}
template <class T> KVPACK_D uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {  // a * b + c
#ifdef KVPACK_EMULATE
  const float2 x = unpack2<T>(a), y = unpack2<T>(b), z = unpack2<T>(c);
  return pack2<T>(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
#else
  if constexpr (std::is_same_v<T, bf16_t>)
    return bits_as<uint32_t>(
        __hfma2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b), bits_as<__nv_bfloat162>(c)));
  else
    return bits_as<uint32_t>(__hfma2(bits_as<__half2>(a), bits_as<__half2>(b), bits_as<__half2>(c)));
#endif
}

// -- launches (host)

#ifdef KVPACK_EMULATE
template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t shared, void *, A... args) {
  return emulator::launch(kernel, grid, threads, shared, P(args)...);
}
template <class... P, class... A>
int launch_early(void (*kernel)(P...), dim3 grid, dim3 threads, size_t shared, void *stream, A... args) {
  return launch(kernel, grid, threads, shared, stream, args...);
}
inline int clear_async(void *p, size_t bytes, void *) { memset(p, 0, bytes); return 0; }
inline size_t shared_limit() { return 227 << 10; }
inline int multiprocessors() { return 3; }
inline bool device_is_sm90() {  // as a test wants it
  const char *said = getenv("KVPACK_EMULATE_SM90");
  return said && *said == '1';
}
#else
// Starts a kernel on `stream`; returns the CUDA error, 0 when there is none.
template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t shared, void *stream, A... args) {
  if (shared > (48 << 10)) {
    const cudaError_t error =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) { cudaGetLastError(); return error; }
  }
  kernel<<<grid, threads, shared, cudaStream_t(stream)>>>(P(args)...);
  return cudaGetLastError();
}
// The same for a kernel that may start once all blocks of the one before it have called let_next_kernel_start: each of
// its blocks must call wait_for_previous_kernel. Devices below sm_90 start it in turn.
template <class... P, class... A>
int launch_early(void (*kernel)(P...), dim3 grid, dim3 threads, size_t shared, void *stream, A... args) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error && major < 9) return launch(kernel, grid, threads, shared, stream, args...);
  if (!error && shared > (48 << 10))
    error = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = cudaStream_t(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  if (!error) error = cudaLaunchKernelEx(&config, kernel, P(args)...);
  if (error) cudaGetLastError();
  return error;
}
inline int clear_async(void *p, size_t bytes, void *stream) { return cudaMemsetAsync(p, 0, bytes, cudaStream_t(stream)); }
inline size_t shared_limit() {  // bytes that a block of the current device can have
  int device = 0, bytes = 227 << 10;  // of sm_90, where there is no device
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return size_t(bytes);
}
inline bool device_is_sm90() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
}
inline int multiprocessors() {  // of the current device
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}
#endif

}  // namespace kvpack
