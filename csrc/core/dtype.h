// Element types of tensors: names, sizes, and the narrow storage types with portable conversions.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PAGED_OPS_HOST_DEVICE __host__ __device__
#else
#define PAGED_OPS_HOST_DEVICE
#endif

namespace paged_ops {

// The first three are what attention computes in, the last four what a cache may be quantised to. Numbers of
// i4 lie two in a byte: its tensors are of uint8.
enum class DType : uint8_t { f32, f16, bf16, i32, i64, f8e4m3, f8e5m2, i8, i4 };

// Static, since an inline function of several instruction sets would be linked from any of them
// (cpu/kernels.h).
PAGED_OPS_HOST_DEVICE static constexpr bool is_quantised(DType dtype) { return dtype >= DType::f8e4m3; }

// Bytes of an element of a tensor, and how many numbers are in it.
PAGED_OPS_HOST_DEVICE static constexpr int itemsize(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f16: return 2;
    case DType::bf16: return 2;
    case DType::i32: return 4;
    case DType::i64: return 8;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
    case DType::i4: return 1;
  }
  return 0;
}
PAGED_OPS_HOST_DEVICE static constexpr int numbers_per_element(DType dtype) {
  return dtype == DType::i4 ? 2 : 1;
}

// Bytes of `dim` numbers in a row, which are whole elements.
PAGED_OPS_HOST_DEVICE static constexpr int64_t row_nbytes(DType dtype, int64_t dim) {
  return dim / numbers_per_element(dtype) * itemsize(dtype);
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::f8e4m3: return "float8_e4m3fn";
    case DType::f8e5m2: return "float8_e5m2";
    case DType::i8: return "int8";
    case DType::i4: return "int4";
  }
  return "?";
}

// Of the elements of a tensor.
constexpr const char* element_name(DType dtype) { return dtype == DType::i4 ? "uint8" : name(dtype); }

// Storage only. Arithmetic is done in f32 after to_float(); kernels use their machine's own
// instructions for the conversion where it has them, and these where it has not.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
// 1-4-3 bits without infinities, and 1-5-2 bits (Micikevicius et al. 2022, arXiv:2209.05433).
struct f8e4m3 {
  uint8_t bits;
};
struct f8e5m2 {
  uint8_t bits;
};
struct i8 {
  int8_t bits;
};
// Two numbers of 4 bits, two's complement, the first one in the lower half.
struct i4x2 {
  uint8_t bits;
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

template <>
struct dtype_of<f8e4m3> {
  static constexpr DType value = DType::f8e4m3;
};
template <>
struct dtype_of<f8e5m2> {
  static constexpr DType value = DType::f8e5m2;
};
template <>
struct dtype_of<i8> {
  static constexpr DType value = DType::i8;
};
template <>
struct dtype_of<i4x2> {
  static constexpr DType value = DType::i4;
};

// The greatest number that quantisation gives; what is farther from 0, infinities too, becomes it. (Integers
// are kept symmetric: -128 and -8 can be read, but are not written.)
PAGED_OPS_HOST_DEVICE constexpr float largest(DType quantised) {
  switch (quantised) {
    case DType::f8e4m3: return 448.0f;
    case DType::f8e5m2: return 57344.0f;
    case DType::i8: return 127.0f;
    default: return 7.0f;
  }
}

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

PAGED_OPS_HOST_DEVICE inline float to_float(i8 x) { return float(x.bits); }

PAGED_OPS_HOST_DEVICE inline float first_of(i4x2 x) { return float(((x.bits & 15) ^ 8) - 8); }
PAGED_OPS_HOST_DEVICE inline float second_of(i4x2 x) { return float(((x.bits >> 4) ^ 8) - 8); }

// The upper byte of an f16.
PAGED_OPS_HOST_DEVICE inline float to_float(f8e5m2 x) { return to_float(f16{uint16_t(x.bits << 8)}); }

// Moved to f16's places the bits give the value times 2^-8, subnormals too.
PAGED_OPS_HOST_DEVICE inline float to_float(f8e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7fu, sign = x.bits & 0x80u;
  if (magnitude == 0x7fu) return bit_cast<float>(sign << 24 | 0x7fc00000u);
  return to_float(f16{uint16_t(sign << 8 | magnitude << 7)}) * 256.0f;
}

// To the nearest with saturation, ties to even. NaN stays NaN, and becomes 0 in integers. Without branches,
// so that compilers make vectors of it.
//
// An integer of at most `largest`, two's complement.
PAGED_OPS_HOST_DEVICE inline uint32_t to_integer(float x, float largest) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float y = x < largest ? x : largest;
  y = y > -largest ? y : -largest;
  y = x == x ? y : 0.0f;
  return bit_cast<uint32_t>(y + shift);
}
template <>
PAGED_OPS_HOST_DEVICE inline i8 from_float<i8>(float x) {
  return i8{int8_t(to_integer(x, 127.0f) & 0xffu)};
}
PAGED_OPS_HOST_DEVICE inline i4x2 i4_from_floats(float first, float second) {
  return i4x2{uint8_t((to_integer(first, 7.0f) & 15u) | (to_integer(second, 7.0f) & 15u) << 4)};
}

// kFraction bits of fraction, exponents from kLeast = that of the least normal number on.
template <int kFraction, int kLeast>
PAGED_OPS_HOST_DEVICE inline uint8_t to_f8(float x, float largest, uint8_t nan) {
  constexpr int kDropped = 23 - kFraction;
  const uint32_t sign = bit_cast<uint32_t>(x) >> 24 & 0x80u;
  const float size = bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu);
  const float kept = size < largest ? size : largest;
  const uint32_t bits = bit_cast<uint32_t>(kept);
  const uint32_t rounded = bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1u);
  const uint32_t normal = (rounded - (uint32_t(kLeast + 126) << 23)) >> kDropped;
  // Subnormal: adding a power of two leaves the bits wanted at the bottom, rounded by the addition itself.
  const uint32_t power = uint32_t(kLeast - kFraction + 23 + 127) << 23;
  const uint32_t subnormal = bit_cast<uint32_t>(kept + bit_cast<float>(power)) - power;
  const uint32_t magnitude = bits < uint32_t(kLeast + 127) << 23 ? subnormal : normal;
  return uint8_t(sign | (x == x ? magnitude : nan));
}
template <>
PAGED_OPS_HOST_DEVICE inline f8e4m3 from_float<f8e4m3>(float x) {
  return f8e4m3{to_f8<3, -6>(x, 448.0f, 0x7f)};
}
template <>
PAGED_OPS_HOST_DEVICE inline f8e5m2 from_float<f8e5m2>(float x) {
  return f8e5m2{to_f8<2, -14>(x, 57344.0f, 0x7e)};
}

}  // namespace portable
}  // namespace paged_ops
