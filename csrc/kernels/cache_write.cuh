// Writing new keys and values into their slots: one CTA per token, K and V side by side.
#pragma once
#include "kernels/packets.cuh"
#include "params/cache_write.h"

namespace paged_ops::kernels {

// blockDim: packets of a row, heads, 2 (K and V).
// CacheRows: HeadRows, or PackedRows where a cache is not plain.
template <class Packet, class CacheRows>
__global__ void cache_write_kernel(const CacheWriteParams p) {
  const int token = blockIdx.x;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0 || slot >= p.kv.num_blocks * p.kv.block_size) return;  // skipped, or nowhere
  int64_t block, offset;
  if (slot <= UINT32_MAX) {  // a 64-bit division costs several times as much
    block = uint32_t(slot) / uint32_t(p.kv.block_size);
    offset = uint32_t(slot) % uint32_t(p.kv.block_size);
  } else {
    block = slot / p.kv.block_size;
    offset = slot % p.kv.block_size;
  }
  const bool is_key = threadIdx.z == 0;
  const CacheView& cache = is_key ? p.kv.key : p.kv.value;
  const CacheRows to = cache_rows<CacheRows>(cache, block, offset, p.kv.dtype);
  const auto* rows = static_cast<const unsigned char*>(is_key ? p.key : p.value);
  const HeadRows from{
      const_cast<unsigned char*>(rows) + token * (is_key ? p.key_stride_token : p.value_stride_token),
      is_key ? p.key_stride_head : p.value_stride_head};
  const int head_dim = is_key ? p.kv.key_head_dim : p.kv.value_head_dim;
  copy_heads<Packet>(to, from, p.kv.num_kv_heads, head_dim * itemsize(p.dtype));
}

}  // namespace paged_ops::kernels
