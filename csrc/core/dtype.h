// Element types of tensors: names, sizes, and the 16-bit storage types with portable conversions.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PAGED_OPS_HOST_DEVICE __host__ __device__
#else
#define PAGED_OPS_HOST_DEVICE
#endif

namespace paged_ops {

enum class DType : uint8_t { f32, f16, bf16, i32, i64 };

PAGED_OPS_HOST_DEVICE constexpr int itemsize(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f16: return 2;
    case DType::bf16: return 2;
    case DType::i32: return 4;
    case DType::i64: return 8;
  }
  return 0;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
  }
  return "?";
}

// Storage only. Arithmetic is done in f32 after to_float(); kernels use their machine's own
// instructions for the conversion where it has them, and these where it has not.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};

namespace portable {

template <class To, class From>
PAGED_OPS_HOST_DEVICE inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

PAGED_OPS_HOST_DEVICE inline float to_float(float x) { return x; }

PAGED_OPS_HOST_DEVICE inline float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

PAGED_OPS_HOST_DEVICE inline float to_float(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Moving the bits to f32's places gives the value times 2^-112; a multiplication by a power of
  // two mends the exponent and normalises subnormals exactly.
  const float scaled = bit_cast<float>(magnitude << 13) * bit_cast<float>((127u + 112u) << 23);
  return bit_cast<float>(sign | bit_cast<uint32_t>(scaled));
}

// Round to nearest, ties to even. NaN stays NaN (quiet, sign kept).
template <class T>
PAGED_OPS_HOST_DEVICE T from_float(float x);

template <>
PAGED_OPS_HOST_DEVICE inline float from_float<float>(float x) {
  return x;
}

template <>
PAGED_OPS_HOST_DEVICE inline bf16 from_float<bf16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t(bits >> 16 | 0x40u)};
  return bf16{uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
PAGED_OPS_HOST_DEVICE inline f16 from_float<f16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return f16{uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return f16{uint16_t(sign | 0x7c00u)};  // rounds past 65504, or infinite
  if (magnitude < 0x38800000u) {
    // Subnormal in f16: adding 0.5 leaves the 10 bits wanted at the bottom of the f32, rounded by
    // the addition itself.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return f16{uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rebased = magnitude - (112u << 23);
  return f16{uint16_t(sign | (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13)};
}

}  // namespace portable
}  // namespace paged_ops
