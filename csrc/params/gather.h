// Parameters of gathering sequences out of a paged KV cache into contiguous rows.
#pragma once
#include <cstdint>

#include "core/paged_kv.h"

namespace paged_ops {

// Row cu_seqlens[s] + t of the outputs is token t of sequence s. Rows from cu_seqlens[num_seqs] on
// are written as zeros. Out of a quantised cache come its numbers as they are, or times their scales.
struct GatherParams {
  void* key;                                      // [num_rows, num_kv_heads, key_head_dim]
  void* value;                                    // [num_rows, num_kv_heads, value_head_dim]
  int32_t* cu_seqlens;                            // [num_seqs + 1], output
  int64_t key_stride_token, key_stride_head;      // bytes
  int64_t value_stride_token, value_stride_head;  // bytes
  int64_t num_rows;
  DType dtype;  // of the outputs: the cache's, or what its numbers times their scales are rounded to

  PagedKV kv;
  BlockTables tables;
};

}  // namespace paged_ops
