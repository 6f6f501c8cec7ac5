// Parameters of attention over a paged KV cache: decode and varlen are one op with one POD.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/paged_kv.h"

namespace paged_ops {

// Query token t of sequence s sits at position seq_lens[s] - num_query_tokens(s) + t and, when
// `causal`, sees the keys at positions 0 .. its own.
struct AttentionParams {
  const void* query;            // [num_tokens, num_q_heads, key_head_dim]
  void* out;                    // [num_tokens, num_q_heads, value_head_dim]
  float* lse;                   // [num_tokens, num_q_heads] natural log, contiguous; null = not wanted
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]; null = decode, one query token per sequence
  int64_t query_stride_token, query_stride_head;  // bytes
  int64_t out_stride_token, out_stride_head;      // bytes
  int32_t num_tokens;
  int32_t num_q_heads;  // a multiple of kv.num_kv_heads
  DType dtype;          // of query and out

  PagedKV kv;
  BlockTables tables;

  float scale;  // multiplies query . key
  bool causal;

  void* workspace;  // at least attention_workspace_nbytes() bytes, 256-byte aligned
  size_t workspace_nbytes;
};

}  // namespace paged_ops
