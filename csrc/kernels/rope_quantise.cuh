// Rotating queries and keys while new keys and values are written to a quantised cache: one CTA per token.
#pragma once
#include "kernels/cache_quantise.cuh"
#include "kernels/rope_write.cuh"

namespace paged_ops::kernels {

// Element i of a row, as rotate_heads() would leave it.
template <class T, bool kInterleaved>
__device__ __forceinline__ float rotated_element(const T* row, int i, int half, const float* cos_sin) {
  if (i >= 2 * half) return ptx::to_float(row[i]);
  const int pair = kInterleaved ? i / 2 : i % half;
  const bool is_x = kInterleaved ? i % 2 == 0 : i < half;
  const float x = ptx::to_float(row[kInterleaved ? 2 * pair : pair]);
  const float y = ptx::to_float(row[kInterleaved ? 2 * pair + 1 : half + pair]);
  const float cosine = cos_sin[pair], sine = cos_sin[half + pair];
  const float turned = is_x ? rotated_x(x, y, cosine, sine) : rotated_y(x, y, cosine, sine);
  return ptx::to_float(ptx::from_float<T>(turned));
}

// blockDim: a warp, heads, 3 (queries, K and V).
template <class T, class Q, bool kInterleaved>
__global__ void rope_quantise_kernel(const RopeWriteParams p) {
  const int64_t token = blockIdx.x;
  const float* cos_sin = cos_sin_of(p, token);
  if (threadIdx.z == 0) return turn_queries<T, 1, kInterleaved>(p, token, cos_sin);
  const bool is_key = threadIdx.z == 1;
  quantise_heads<T, Q, 1>(p.write, token, is_key, [&](auto& x, const T* row, int i) {
#pragma unroll
    for (int k = 0; k < kElementsOf<Q, 1>; k++)
      x[k] = is_key ? rotated_element<T, kInterleaved>(row, i + k, p.rotary_dim / 2, cos_sin)
                    : ptx::to_float(row[i + k]);
  });
}

}  // namespace paged_ops::kernels
