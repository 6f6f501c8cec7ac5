// Numbers of quantised caches as pairs of f16 or bf16, on their way from shared memory to the matrix unit.
//
// Every number of 8 bits is one of 16, so that nothing is rounded here, and NaNs and infinities stay what
// they are. Scales come later, to scores and weights (attention_mma.cuh).
#pragma once
#include "simt/ptx.h"

namespace paged_ops::kernels {

// Of four bytes the first and third, and the second and fourth.
struct Widened {
  uint32_t even, odd;
};

namespace widening {

constexpr uint32_t kMinusZero = 0x80008000;

// Each byte with a byte of zeros below it, or with one of `above` over it.
__device__ __forceinline__ Widened on_zeros(uint32_t four) {
  return {ptx::byte_perm(four, 0, 0x2404), four & 0xff00ff00};
}
__device__ __forceinline__ Widened under(uint32_t above, uint32_t four) {
  return {ptx::byte_perm(four, above, 0x4240), ptx::byte_perm(four, above, 0x4341)};
}

// One bit below the top of an f16 the 7 bits of an e4m3 are worth 2^-8 of it. The code of all ones is NaN:
// the bit that carries out of it when 1 is added makes its exponent all ones.
__device__ __forceinline__ Widened from_e4m3(uint32_t four) {
  const uint32_t size = four & 0x7f7f7f7f;
  const Widened marked = on_zeros(size | ((size + 0x01010101) & 0x80808080));
  const auto widen = [](uint32_t marked, uint32_t sign) {
    return ptx::fma2<f16>(marked >> 1 | (sign & 0x80008000), 0x5c005c00 /* 256 */, kMinusZero);
  };
  return {widen(marked.even, four << 8), widen(marked.odd, four)};
}

}  // namespace widening

template <class T, class Q>
__device__ __forceinline__ Widened widen(uint32_t four) {
  using namespace widening;
  if constexpr (dtype_of<Q>::value == DType::i8) {
    if constexpr (dtype_of<T>::value == DType::f16) {
      // 1024 + (x + 128) - 1152
      const Widened x = under(0x64646464, four ^ 0x80808080);
      return {ptx::fma2<f16>(x.even, 0x3c003c00, 0xe480e480), ptx::fma2<f16>(x.odd, 0x3c003c00, 0xe480e480)};
    } else {
      // 128 + the lower 7 bits, less 128 or, where the upper one is set, 256
      const Widened x = under(0x43434343, four);
      const auto difference = [](uint32_t x) {
        return ptx::fma2<bf16>(x & 0xff7fff7f, 0x3f803f80, (x & 0xff80ff80) | 0x80008000);
      };
      return {difference(x.even), difference(x.odd)};
    }
  } else if constexpr (dtype_of<T>::value == DType::bf16) {
    const Widened x = widen<f16, Q>(four);
    const auto through_f32 = [](uint32_t pair) {
      const float2 both = ptx::unpack2<f16>(pair);
      return ptx::pack2<bf16>(both.x, both.y);
    };
    return {through_f32(x.even), through_f32(x.odd)};
  } else if constexpr (dtype_of<Q>::value == DType::f8e5m2) {
    return on_zeros(four);
  } else if constexpr (ptx::kWidensE4m3) {
    Widened x;
    ptx::widen_e4m3(ptx::byte_perm(four, 0, 0x3120), x.even, x.odd);
    return x;
  } else {
    return from_e4m3(four);
  }
}

// Whether all elements in 32 bits are finite.
template <class Element>
__device__ __forceinline__ bool all_finite(uint32_t bits) {
  if constexpr (dtype_of<Element>::value == DType::f16 || dtype_of<Element>::value == DType::bf16) {
    constexpr uint32_t kExponent = dtype_of<Element>::value == DType::f16 ? 0x7c00u : 0x7f80u;
    return (bits & kExponent) != kExponent && (bits >> 16 & kExponent) != kExponent;
  } else if constexpr (dtype_of<Element>::value == DType::f8e4m3) {
    return (((bits & 0x7f7f7f7f) + 0x01010101) & 0x80808080) == 0;
  } else if constexpr (dtype_of<Element>::value == DType::f8e5m2) {
    return (((bits & 0x7c7c7c7c) + 0x04040404) & 0x80808080) == 0;
  } else {
    return true;
  }
}

}  // namespace paged_ops::kernels
