// Rows of new keys and values to the numbers of a quantised cache, a row by a warp.
#pragma once
#include "core/paged_kv.h"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// Where a row's numbers go, and the scale of its first group; null: `uniform`, of all.
struct QuantisedRow {
  const CacheView& cache;
  unsigned char* numbers;
  float* scale;
  float uniform;
  bool per_token;  // the scales are found here
  int group;       // elements with one scale
  int64_t stride_group;

  __device__ __forceinline__ QuantisedRow(const CacheView& cache, const ScaleView& scales, int head_dim,
                                          int64_t block, int64_t offset, int head)
      : cache(cache),
        numbers(static_cast<unsigned char*>(cache.data) + block * cache.stride_block +
                offset * cache.stride_token + head * cache.stride_head),
        scale(scales.data),
        uniform(scales.uniform),
        per_token(scales.per_token),
        group(scales.group == 0 ? head_dim : scales.group),
        stride_group(scales.stride_group) {
    if (scale != nullptr)
      scale = reinterpret_cast<float*>(reinterpret_cast<char*>(scale) + block * scales.stride_block +
                                       offset * scales.stride_token + head * scales.stride_head);
  }
  // Of dim `dim`, for Q.
  template <class Q>
  __device__ __forceinline__ unsigned char* at(int dim) const {
    const int pack = dim / cache.pack;
    return numbers + pack * cache.stride_pack + row_nbytes(dtype_of<Q>::value, dim - pack * cache.pack);
  }
};

// The byte of the number, or numbers, that x / scale rounds to.
template <class Q>
__device__ __forceinline__ uint8_t quantised(const float* x, float scale) {
  if constexpr (dtype_of<Q>::value == DType::i4)
    return portable::i4_from_floats(x[0] / scale, x[1] / scale).bits;
  else
    return uint8_t(portable::from_float<Q>(x[0] / scale).bits);
}

// The scale with which the greatest finite size becomes the greatest number: of the sizes' bits, each lane's.
template <class Q>
__device__ __forceinline__ float scale_of(uint32_t greatest) {
#pragma unroll
  for (int o = 1; o < kWarpSize; o <<= 1) greatest = max(greatest, __shfl_xor_sync(kAllLanes, greatest, o));
  const float scale = __uint_as_float(greatest) / largest(dtype_of<Q>::value);
  return scale > 0.f ? scale : 1.f;  // of the smallest numbers there is no quotient any more
}

// Elements that become `kNbytes` bytes.
template <class Q, int kNbytes>
constexpr int kElementsOf = kNbytes * numbers_per_element(dtype_of<Q>::value);

// By all lanes of a warp. load(x, i): elements i, i + 1, ... as f32; what is stored is that of
// cpu/quantise.h, bit for bit. A lane has kNbytes bytes at a time, which must divide a group's and a pack's.
template <class Q, int kNbytes, class Load>
__device__ __forceinline__ void quantise_row(const QuantisedRow& to, int head_dim, int lane, Load load) {
  constexpr int kCount = kElementsOf<Q, kNbytes>;
  for (int begin = 0, g = 0; begin < head_dim; begin += to.group, g++) {
    const auto for_each = [&](auto f) {
      for (int i = lane * kCount; i < to.group; i += kWarpSize * kCount) {
        float x[kCount];
        load(x, begin + i);
        f(x, begin + i);
      }
    };
    float* own = to.scale;
    if (own != nullptr) own = reinterpret_cast<float*>(reinterpret_cast<char*>(own) + g * to.stride_group);
    float scale = own == nullptr || to.per_token ? to.uniform : *own;
    if (to.per_token) {
      uint32_t greatest = 0;
      for_each([&](const float (&x)[kCount], int) {
#pragma unroll
        for (int k = 0; k < kCount; k++) {
          const uint32_t size = __float_as_uint(x[k]) & 0x7fffffffu;
          greatest = max(greatest, size < 0x7f800000u ? size : 0u);
        }
      });
      scale = scale_of<Q>(greatest);
      if (lane == 0) *own = scale;
    }
    for_each([&](const float (&x)[kCount], int i) {
      uint32_t bytes = 0;
#pragma unroll
      for (int k = 0; k < kNbytes; k++)
        bytes |= uint32_t(quantised<Q>(x + k * (kCount / kNbytes), scale)) << 8 * k;
      unsigned char* at = to.template at<Q>(i);
      if constexpr (kNbytes == 4)
        *reinterpret_cast<uint32_t*>(at) = bytes;
      else
        *at = uint8_t(bytes);
    });
  }
}

}  // namespace paged_ops::kernels
