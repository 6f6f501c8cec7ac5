// Parameters of attention over a paged KV cache: decode and varlen are one op with one POD.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/paged_kv.h"

namespace paged_ops {

// What a query token sees and what becomes of its logits, beyond `scale` and `causal`. Zeros and nulls do
// nothing.
//
// A tree mask narrows `causal` among a sequence's query tokens, of which there are at most kMaxTreeTokens:
// token t sees itself and those tokens i < t whose bit i is set in its mask; keys before the query tokens it
// sees all. It then stands where it would if the ones that it sees were the only ones. That place is what
// the window and ALiBi go by, for queries and for keys; it is a token's position where there is no tree.
struct AttentionRules {
  int32_t window;             // a token sees its own place and the window - 1 places before it; 0 = all
  float soft_cap;             // scale * query . key = x becomes soft_cap * tanh(x / soft_cap); 0 = it stays x
  const float* alibi_slopes;  // [num_q_heads] logits gain slope * (place of key - place of query); null
  const float* sinks;         // [num_q_heads] each row has one more logit, whose value is 0; null
  const int64_t* tree_mask;   // [num_tokens] bits; null. Only with cu_seqlens_q and causal
};
constexpr int kMaxTreeTokens = 64;

// What kernels share about sight. Static, since an inline function of several instruction sets would be
// linked from any of them (cpu/kernels.h).
//
// The first key that a query token at `place` sees with a window; 0 stands for none.
PAGED_OPS_HOST_DEVICE static constexpr int32_t first_visible_key(int32_t window, int32_t place) {
  return window > 0 && place >= window ? place - window + 1 : 0;
}
PAGED_OPS_HOST_DEVICE static constexpr uint32_t lowest_bits(int n) {
  return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
}

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
  AttentionRules rules;

  void* workspace;  // at least attention_workspace_nbytes() bytes, 256-byte aligned
  size_t workspace_nbytes;
};

}  // namespace paged_ops
