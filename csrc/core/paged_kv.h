// The paged KV cache as kernels see it: two strided views and the geometry of their blocks.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace paged_ops {

// Head dims that kernels take, of keys and of values: up to those of latent attention, 512 + 64.
constexpr int kHeadDimMultiple = 8;
constexpr int kMaxHeadDim = 576;

// One of K or V: [num_blocks, block_size, num_kv_heads, head_dim]. NHD, HND, K and V interleaved, and
// block-major pools over all layers differ in strides only. So do rows whose head dims do not lie together:
// `pack` dims do, and packs are `stride_pack` bytes apart. A plain row is one pack of all.
// Strides are in bytes and 64-bit: a pool may exceed 2^31 bytes and 2^31 elements.
struct CacheView {
  void* data;
  int64_t stride_block;
  int64_t stride_token;
  int64_t stride_head;
  int64_t stride_pack = 0;
  int32_t pack = 1 << 20;  // divides the head dim, or is more
};

PAGED_OPS_HOST_DEVICE static constexpr bool is_plain(const CacheView& cache, int head_dim) {
  return cache.pack >= head_dim;
}

// Bytes from a row's first dim to dim `dim`.
PAGED_OPS_HOST_DEVICE static constexpr int64_t dim_offset(const CacheView& cache, int dim, int itemsize) {
  return dim / cache.pack * cache.stride_pack + dim % cache.pack * itemsize;
}

constexpr int kScaleGroupMultiple = 8;

// The scales of a quantised cache: an element is worth its number times the scale of its token, its head and
// its group of elements. In 8 bits a row is one group, and there is one scale for all (all strides 0), one
// per head, or one per token and head; in 4 bits there is one per token, head and group.
struct ScaleView {
  float* data = nullptr;  // null: `uniform` is the scale of all; 1 of a cache that is not quantised
  float uniform = 1.0f;
  bool per_token = false;                                       // written together with what it scales
  int64_t stride_block = 0, stride_token = 0, stride_head = 0;  // bytes
  int32_t group =
      0;  // elements of a row that share a scale, a multiple of kScaleGroupMultiple; 0: all of them
  int64_t stride_group = 0;  // bytes
};

struct PagedKV {
  CacheView key;    // [num_blocks, block_size, num_kv_heads, key_head_dim]
  CacheView value;  // [num_blocks, block_size, num_kv_heads, value_head_dim]
  int64_t num_blocks;
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t key_head_dim;
  int32_t value_head_dim;
  DType dtype;
  ScaleView key_scale{}, value_scale{};  // [num_blocks, block_size, num_kv_heads, head_dim / group]
};

PAGED_OPS_HOST_DEVICE static constexpr bool is_plain(const PagedKV& kv) {
  return is_plain(kv.key, kv.key_head_dim) && is_plain(kv.value, kv.value_head_dim);
}

// Where a sequence's tokens lie: row s of `block_tables` lists the blocks of sequence s in order.
// Entries past ceil(seq_lens[s] / block_size) are never read.
struct BlockTables {
  const int32_t* block_ids;  // [num_seqs, max_blocks_per_seq], rows `stride` entries apart
  const int32_t* seq_lens;   // [num_seqs], tokens in the cache, the query's own included
  int64_t stride;
  int32_t num_seqs;
  int32_t max_blocks_per_seq;
};

}  // namespace paged_ops
