// What kernels are written in, on the host: CUDA's keywords, built-in variables and functions.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#include "simt/emulator/block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(nbytes) __attribute__((aligned(nbytes)))

#define threadIdx (::paged_ops::simt::current_fiber->thread_idx)
#define blockIdx (::paged_ops::simt::current_fiber->block->block_idx)
#define blockDim (::paged_ops::simt::current_fiber->block->block_dim)
#define gridDim (::paged_ops::simt::current_fiber->block->grid_dim)
inline constexpr int warpSize = 32;

#define SIMT_SHARED(type, name)         \
  static constexpr char name##_key = 0; \
  auto& name = ::paged_ops::simt::shared_variable<type>(&name##_key)
#define SIMT_DYNAMIC_SHARED(name) \
  unsigned char* const name = ::paged_ops::simt::current_fiber->block->shared.dynamic()

namespace paged_ops::simt {

template <class T>
T& shared_variable(const void* key, const std::source_location where = std::source_location::current()) {
  static_assert(std::is_trivially_default_constructible_v<T>);
  return *static_cast<T*>(
      current_fiber->block->shared.variable(key, sizeof(T), alignof(T), {"SIMT_SHARED", where}));
}

// The value that lane `source` of `mask` gave.
template <class T>
T from_lane(uint32_t mask, const T& value, int source, const Site& site) {
  const T* values = exchange(mask, value, site);
  if (!(mask >> source & 1)) fault(concat("reads lane ", source, ", which is not in the mask"), site);
  return values[source];
}

inline void check_width(int width, const Site& site) {
  if (width < 1 || width > kWarpSize || (width & (width - 1)))
    fault(concat("width ", width, " is not a power of two up to 32"), site);
}

// Atomically replaces *p by f(*p) and returns what it was. Orders nothing, as on a GPU.
template <class T, class F>
T atomic_update(T* p, F f, const char* op, const std::source_location& where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) fault("misaligned address", {op, where});
  Block& block = *current_fiber->block;
  block.before_atomic(p);
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  Bits* bits = reinterpret_cast<Bits*>(p);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &old, std::bit_cast<Bits>(T(f(std::bit_cast<T>(old)))), false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  block.after_atomic(p);
  return std::bit_cast<T>(old);
}

}  // namespace paged_ops::simt

// ---- barriers and fences ------------------------------------------------------------------------

inline void __syncthreads(const std::source_location where = std::source_location::current()) {
  ::paged_ops::simt::current_fiber->block->synchronize(false, {"__syncthreads", where});
}
inline int __syncthreads_count(int predicate,
                               const std::source_location where = std::source_location::current()) {
  return ::paged_ops::simt::current_fiber->block->synchronize(predicate != 0, {"__syncthreads_count", where});
}
inline int __syncthreads_or(int predicate,
                            const std::source_location where = std::source_location::current()) {
  return ::paged_ops::simt::current_fiber->block->synchronize(predicate != 0, {"__syncthreads_or", where}) !=
         0;
}
inline int __syncthreads_and(int predicate,
                             const std::source_location where = std::source_location::current()) {
  return ::paged_ops::simt::current_fiber->block->synchronize(predicate == 0, {"__syncthreads_and", where}) ==
         0;
}
inline void __syncwarp(uint32_t mask = 0xffffffffu,
                       const std::source_location where = std::source_location::current()) {
  ::paged_ops::simt::current_fiber->block->meet(mask, nullptr, 0, /*ordered=*/true, {"__syncwarp", where});
}

inline void __threadfence() { ::paged_ops::simt::current_fiber->block->fence(); }
inline void __threadfence_block() {}

// ---- warp collectives -----------------------------------------------------------------------------

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32,
              const std::source_location where = std::source_location::current()) {
  const ::paged_ops::simt::Site site{"__shfl_sync", where};
  ::paged_ops::simt::check_width(width, site);
  const int lane = ::paged_ops::simt::current_fiber->lane;
  return ::paged_ops::simt::from_lane(mask, value, (lane & -width) | (source & (width - 1)), site);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                 const std::source_location where = std::source_location::current()) {
  const ::paged_ops::simt::Site site{"__shfl_up_sync", where};
  ::paged_ops::simt::check_width(width, site);
  const int lane = ::paged_ops::simt::current_fiber->lane;
  const bool inside = delta <= unsigned(lane & (width - 1));
  return ::paged_ops::simt::from_lane(mask, value, inside ? lane - int(delta) : lane, site);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                   const std::source_location where = std::source_location::current()) {
  const ::paged_ops::simt::Site site{"__shfl_down_sync", where};
  ::paged_ops::simt::check_width(width, site);
  const int lane = ::paged_ops::simt::current_fiber->lane;
  const bool inside = delta < unsigned(width - (lane & (width - 1)));
  return ::paged_ops::simt::from_lane(mask, value, inside ? lane + int(delta) : lane, site);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32,
                  const std::source_location where = std::source_location::current()) {
  const ::paged_ops::simt::Site site{"__shfl_xor_sync", where};
  ::paged_ops::simt::check_width(width, site);
  const int lane = ::paged_ops::simt::current_fiber->lane, source = lane ^ lane_mask;
  // Earlier groups of `width` lanes can be read, later ones give the lane's own value.
  const bool inside = source < (lane & -width) + width && source >= 0;
  return ::paged_ops::simt::from_lane(mask, value, inside ? source : lane, site);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate,
                              const std::source_location where = std::source_location::current()) {
  const bool* votes = ::paged_ops::simt::exchange(mask, predicate != 0, {"__ballot_sync", where});
  uint32_t ballot = 0;
  for (int lane = 0; lane < warpSize; ++lane)
    if (mask >> lane & 1) ballot |= uint32_t(votes[lane]) << lane;
  return ballot;
}
inline int __any_sync(uint32_t mask, int predicate,
                      const std::source_location where = std::source_location::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(uint32_t mask, int predicate,
                      const std::source_location where = std::source_location::current()) {
  return __ballot_sync(mask, predicate, where) == mask;
}

// ---- atomics --------------------------------------------------------------------------------------

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v,
            const std::source_location where = std::source_location::current()) {
  return ::paged_ops::simt::atomic_update(p, [v](T old) { return old + v; }, "atomicAdd", where);
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v,
            const std::source_location where = std::source_location::current()) {
  static_assert(std::is_integral_v<T>);
  return ::paged_ops::simt::atomic_update(p, [v](T old) { return old > v ? old : v; }, "atomicMax", where);
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v,
            const std::source_location where = std::source_location::current()) {
  static_assert(std::is_integral_v<T>);
  return ::paged_ops::simt::atomic_update(p, [v](T old) { return old < v ? old : v; }, "atomicMin", where);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v,
             const std::source_location where = std::source_location::current()) {
  return ::paged_ops::simt::atomic_update(p, [v](T) { return v; }, "atomicExch", where);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v,
            const std::source_location where = std::source_location::current()) {
  static_assert(std::is_integral_v<T>);
  return ::paged_ops::simt::atomic_update(
      p, [=](T old) { return old == expected ? v : old; }, "atomicCAS", where);
}

// ---- memory, bits and arithmetic -------------------------------------------------------------------

template <class T>
T __ldg(const T* p) {
  return *p;
}

inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(uint32_t(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(uint32_t(x)) + 1 : 0; }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }

// Rounded once per operation and never contracted, on either side.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

#define SIMT_MIN_MAX(type)                                     \
  constexpr type min(type a, type b) { return b < a ? b : a; } \
  constexpr type max(type a, type b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned int)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
