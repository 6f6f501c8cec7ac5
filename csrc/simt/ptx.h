// Every instruction that CUDA C++ has no name for, each with its host twin: the only inline PTX there is.
//
//   addresses      smem_t, smem_addr
//   async copies   cp_async16, cp_async4, cp_commit, cp_wait<N>, cp_wait_all
//   matrices       ldmatrix_x2, ldmatrix_x2_trans, ldmatrix_x4, ldmatrix_x4_trans, movmatrix_trans,
//                  mma_m16n8k16<f16 | bf16>
//   conversions    to_float, from_float<T>, pack2<T>, unpack2<T>, kWidensE4m3, widen_e4m3
//   memory         load16, store16, load16_once, store16_once, load_l2
//   arithmetic     ex2, lg2, fma2<T>, byte_perm, opaque
//
// Fragments, for lane = 4 g + t (PTX ISA, "Matrix Fragments for mma.m16n8k16"); a register is a pair, low
// half first:
//   A 16 x 16   a[0] = A[g][2t, 2t+1]   a[1] = A[g+8][2t, 2t+1]   a[2] = A[g][2t+8, 2t+9]   a[3] =
//   A[g+8][2t+8, 2t+9] B 16 x 8    b[0] = B[2t, 2t+1][g]   b[1] = B[2t+8, 2t+9][g] C 16 x 8    c[0], c[1] =
//   C[g][2t, 2t+1]   c[2], c[3] = C[g+8][2t, 2t+1] 8 x 8       one register of ldmatrix or movmatrix =
//   M[g][2t, 2t+1]
#pragma once
#include "core/dtype.h"
#include "simt/simt.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace paged_ops::ptx {

// An address in shared memory as the instructions take it: 32 bits. Arithmetic on it costs half of that on a
// pointer.
using smem_t = uint32_t;
__device__ __forceinline__ smem_t smem_addr(const void* p) { return smem_t(__cvta_generic_to_shared(p)); }

// Copies 16 bytes from global to shared memory behind the caller's back, past L1, both addresses 16-byte
// aligned. When !valid it writes zeros and does not read `source`. The bytes are there after cp_wait of the
// copy's group, for the thread that issued it; for others after a barrier as well.
__device__ __forceinline__ void cp_async16(smem_t destination, const void* source, bool valid = true) {
  const int nbytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(nbytes)
               : "memory");
}
// The same with 4 bytes, which L1 keeps.
__device__ __forceinline__ void cp_async4(smem_t destination, const void* source, bool valid = true) {
  const int nbytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(nbytes)
               : "memory");
}
// Ends the group of the copies since the last commit; a group may be empty.
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the N youngest groups.
template <int N>
__device__ __forceinline__ void cp_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Waits for all copies, committed or not.
__device__ __forceinline__ void cp_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads 8 x 8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i, 16-byte
// aligned (of an x2, lanes 16 to 31 are ignored). `trans`: transposed.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// Transposes an 8 x 8 matrix held in registers.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// C += A B, products and sums in f32. The order of the sums is the machine's own (the twin's: k ascending,
// each product added to C and rounded).
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<f16>(float (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                   const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  return f16{__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

// Two values as a pair of 16-bit ones, `low` in the low half, and back.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<f16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack2<f16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack2<bf16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
// Four numbers of e4m3 as two pairs of f16, where the machine has an instruction for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kWidensE4m3 = true;
__device__ __forceinline__ void widen_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{ .reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, second; }"
      : "=r"(low), "=r"(high)
      : "r"(four));
}
#else
constexpr bool kWidensE4m3 = false;
__device__ __forceinline__ void widen_e4m3(uint32_t, uint32_t&, uint32_t&) { __trap(); }
#endif

// 16 bytes from and to an aligned address. `once`: nobody reads them again soon, caches need not keep them.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
__device__ __forceinline__ uint4 load16_once(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }
__device__ __forceinline__ void store16_once(void* p, uint4 v) { __stcs(static_cast<uint4*>(p), v); }
// Loads from L2, never from this multiprocessor's L1, which does not see what other blocks write.
template <class V>
__device__ __forceinline__ V load_l2(const V* p) {
  return __ldcg(p);
}

// 2^x to 2 ulp; subnormal results become 0. 2^-inf = 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The base-2 logarithm, to 2^-22 of itself, or of 1 between 1/2 and 2.
__device__ __forceinline__ float lg2(float x) { return __log2f(x); }
// a b + c of pairs, rounded once (the twin rounds to f32 first); subnormal numbers are numbers.
template <class T>
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <>
__device__ __forceinline__ uint32_t fma2<f16>(uint32_t a, uint32_t b, uint32_t c) {
  const auto pair = [](const uint32_t& x) { return *reinterpret_cast<const __half2*>(&x); };
  const __half2 d = __hfma2(pair(a), pair(b), pair(c));
  return *reinterpret_cast<const uint32_t*>(&d);
}
template <>
__device__ __forceinline__ uint32_t fma2<bf16>(uint32_t a, uint32_t b, uint32_t c) {
  const auto pair = [](const uint32_t& x) { return *reinterpret_cast<const __nv_bfloat162*>(&x); };
  const __nv_bfloat162 d = __hfma2(pair(a), pair(b), pair(c));
  return *reinterpret_cast<const uint32_t*>(&d);
}
// Byte i of the result is the byte of {b, a} that nibble i of `selector` names, 0 to 7.
__device__ __forceinline__ uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
// The value itself, but one that ptxas cannot recompute: it rebuilds what derives from threadIdx or from a
// shared array's address in every iteration, to save registers. All lanes must take part.
template <class T>
__device__ __forceinline__ T opaque(T v) {
  return __shfl_sync(0xffffffffu, v, threadIdx.x & 31);
}

}  // namespace paged_ops::ptx

#else  // ---------------------------------------------------------------------------------- host twins
#include "simt/emulator/mma.h"

namespace paged_ops::ptx {

using simt::current_fiber;
using simt::Site;
using Where = std::source_location;

using smem_t = unsigned char*;
inline smem_t smem_addr(const void* p) { return static_cast<smem_t>(const_cast<void*>(p)); }

inline void check_aligned(const void* p, size_t nbytes, const char* op, const char* what,
                          const Where& where) {
  if (reinterpret_cast<uintptr_t>(p) % nbytes)
    simt::fault(concat(what, " is not ", nbytes, "-byte aligned"), {op, where});
}
inline void check_aligned16(const void* p, const char* op, const char* what, const Where& where) {
  check_aligned(p, 16, op, what, where);
}

inline void cp_async(smem_t destination, const void* source, size_t nbytes, bool valid, const char* op,
                     const Where& where) {
  check_aligned(destination, nbytes, op, "destination", where);
  if (valid) check_aligned(source, nbytes, op, "source", where);
  simt::Block& block = *current_fiber->block;
  current_fiber->copies.issue(destination, valid ? source : nullptr, nbytes, block.copy_lands_at_once(),
                              {op, where});
}
inline void cp_async16(smem_t destination, const void* source, bool valid = true,
                       const Where where = Where::current()) {
  cp_async(destination, source, 16, valid, "cp_async16", where);
}
inline void cp_async4(smem_t destination, const void* source, bool valid = true,
                      const Where where = Where::current()) {
  cp_async(destination, source, 4, valid, "cp_async4", where);
}
inline void cp_commit() { current_fiber->copies.commit(); }
template <int N>
inline void cp_wait() {
  current_fiber->copies.wait(N);
}
inline void cp_wait_all() { current_fiber->copies.wait_all(); }

// Element e of the pair that this lane gets of an 8 x 8 matrix.
inline int fragment_row(int e, bool trans) {
  return trans ? current_fiber->lane % 4 * 2 + e : current_fiber->lane / 4;
}
inline int fragment_column(int e, bool trans) { return fragment_row(e, !trans); }

template <int kMatrices>
inline void ldmatrix(uint32_t (&r)[kMatrices], smem_t row, bool trans, const char* op, const Where& where) {
  const bool used = current_fiber->lane < 8 * kMatrices;
  if (used) check_aligned16(row, op, "row address", where);
  const smem_t* rows = simt::exchange(simt::kAllLanes, row, {op, where});
  for (int i = 0; i < kMatrices; ++i) {
    uint32_t pair[2];
    for (int e = 0; e < 2; ++e) {
      uint16_t element;
      std::memcpy(&element, rows[8 * i + fragment_row(e, trans)] + 2 * fragment_column(e, trans), 2);
      pair[e] = element;
    }
    r[i] = pair[0] | pair[1] << 16;
  }
}
inline void ldmatrix_x2(uint32_t (&r)[2], smem_t row, const Where where = Where::current()) {
  ldmatrix(r, row, false, "ldmatrix_x2", where);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], smem_t row, const Where where = Where::current()) {
  ldmatrix(r, row, true, "ldmatrix_x2_trans", where);
}
inline void ldmatrix_x4(uint32_t (&r)[4], smem_t row, const Where where = Where::current()) {
  ldmatrix(r, row, false, "ldmatrix_x4", where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], smem_t row, const Where where = Where::current()) {
  ldmatrix(r, row, true, "ldmatrix_x4_trans", where);
}

inline uint32_t movmatrix_trans(uint32_t a, const Where where = Where::current()) {
  const uint32_t* pairs = simt::exchange(simt::kAllLanes, a, {"movmatrix_trans", where});
  uint32_t result = 0;
  for (int e = 0; e < 2; ++e) {
    const int row = fragment_row(e, true), column = fragment_column(e, true);
    result |= (pairs[row * 4 + column / 2] >> 16 * (column % 2) & 0xffffu) << 16 * e;
  }
  return result;
}

inline float to_float(float x) { return x; }
inline float to_float(f16 x) { return portable::to_float(x); }
inline float to_float(bf16 x) { return portable::to_float(x); }
template <class T>
inline T from_float(float x) {
  return portable::from_float<T>(x);
}
template <class T>
inline uint32_t pack2(float low, float high) {
  return from_float<T>(low).bits | uint32_t(from_float<T>(high).bits) << 16;
}
template <class T>
inline float2 unpack2(uint32_t pair) {
  return {to_float(T{uint16_t(pair)}), to_float(T{uint16_t(pair >> 16)})};
}

constexpr bool kWidensE4m3 = false;  // so that what other machines do is run
inline void widen_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
  const auto at = [&](int i) { return portable::to_float(f8e4m3{uint8_t(four >> 8 * i)}); };
  low = pack2<f16>(at(0), at(1));
  high = pack2<f16>(at(2), at(3));
}

template <class T>
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const Where where = Where::current()) {
  simt::MmaOperands mine;
  for (int i = 0; i < 4; ++i) mine.a[i] = unpack2<T>(a[i]);
  for (int i = 0; i < 2; ++i) mine.b[i] = unpack2<T>(b[i]);
  for (int i = 0; i < 4; ++i) mine.c[i] = c[i];
  simt::multiply_accumulate(mine, {"mma_m16n8k16", where});
  for (int i = 0; i < 4; ++i) c[i] = mine.c[i];
}

inline uint4 load16(const void* p, const Where where = Where::current()) {
  check_aligned16(p, "load16", "address", where);
  return *static_cast<const uint4*>(p);
}
inline void store16(void* p, uint4 v, const Where where = Where::current()) {
  check_aligned16(p, "store16", "address", where);
  *static_cast<uint4*>(p) = v;
}
inline uint4 load16_once(const void* p, const Where where = Where::current()) { return load16(p, where); }
inline void store16_once(void* p, uint4 v, const Where where = Where::current()) { store16(p, v, where); }
template <class V>
inline V load_l2(const V* p) {
  return *p;
}

inline float ex2(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;  // NaN is not less
}
inline float lg2(float x) { return std::log2(x); }
template <class T>
inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = unpack2<T>(a), y = unpack2<T>(b), z = unpack2<T>(c);
  return pack2<T>(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
template <class T>
inline T opaque(T v) {
  return v;
}

}  // namespace paged_ops::ptx
#endif
