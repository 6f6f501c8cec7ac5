// Writing new keys and values into slots of a quantised cache: one CTA per token, one warp per row.
#pragma once
#include "kernels/quantise.cuh"
#include "params/cache_write.h"

namespace paged_ops::kernels {

// The warp's share of a token's keys, or values. threadIdx.x: its lanes, threads y: heads. load(x, row, i):
// as quantise_row() has it, of a row of T.
template <class T, class Q, int kNbytes, class Load>
__device__ __forceinline__ void quantise_heads(const CacheWriteParams& p, int64_t token, bool is_key,
                                               Load load) {
  const int64_t slot = token < p.num_tokens ? p.slot_mapping[token] : -1;
  if (slot < 0 || slot >= p.kv.num_blocks * p.kv.block_size) return;  // skipped, or nowhere
  const int64_t block = slot / p.kv.block_size, offset = slot % p.kv.block_size;
  const int head_dim = is_key ? p.kv.key_head_dim : p.kv.value_head_dim;
  const auto* rows = static_cast<const unsigned char*>(is_key ? p.key : p.value) +
                     token * (is_key ? p.key_stride_token : p.value_stride_token);
  const int64_t stride_head = is_key ? p.key_stride_head : p.value_stride_head;
  for (int head = threadIdx.y; head < p.kv.num_kv_heads; head += blockDim.y) {
    const QuantisedRow to(is_key ? p.kv.key : p.kv.value, is_key ? p.kv.key_scale : p.kv.value_scale,
                          head_dim, block, offset, head);
    const T* row = reinterpret_cast<const T*>(rows + head * stride_head);
    quantise_row<Q, kNbytes>(to, head_dim, int(threadIdx.x),
                             [&](float (&x)[kElementsOf<Q, kNbytes>], int i) { load(x, row, i); });
  }
}

template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Elements {
  T element[kCount];
};

template <class T, int kCount>
__device__ __forceinline__ void load_elements(float (&x)[kCount], const T* at) {
  const auto elements = *reinterpret_cast<const Elements<T, kCount>*>(at);
#pragma unroll
  for (int k = 0; k < kCount; k++) x[k] = ptx::to_float(elements.element[k]);
}

// blockDim: a warp, heads, 2 (K and V).
template <class T, class Q, int kNbytes>
__global__ void cache_quantise_kernel(const CacheWriteParams p) {
  quantise_heads<T, Q, kNbytes>(p, blockIdx.x, threadIdx.z == 0,
                                [](auto& x, const T* row, int i) { load_elements(x, row + i); });
}

}  // namespace paged_ops::kernels
