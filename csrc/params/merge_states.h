// Parameters of merging two partial attention results over disjoint sets of keys.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace paged_ops {

// lse = log(exp(lse_a) + exp(lse_b)); out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse).
// A state with LSE -inf is the identity. `out` may be out_a or out_b itself, `lse` lse_a or lse_b.
struct MergeStatesParams {
  const void* out_a;                          // [num_tokens, num_heads, head_dim]
  const void* out_b;                          // the same
  const float* lse_a;                         // [num_tokens, num_heads], contiguous
  const float* lse_b;                         // the same
  void* out;                                  // [num_tokens, num_heads, head_dim]
  float* lse;                                 // [num_tokens, num_heads], contiguous
  int64_t a_stride_token, a_stride_head;      // bytes
  int64_t b_stride_token, b_stride_head;      // bytes
  int64_t out_stride_token, out_stride_head;  // bytes
  int32_t num_tokens, num_heads, head_dim;
  DType dtype;  // of out_a, out_b and out
};

}  // namespace paged_ops
