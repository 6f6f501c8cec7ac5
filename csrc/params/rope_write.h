// Parameters of rotating queries and keys by their positions while new keys and values are written.
#pragma once
#include "params/cache_write.h"

namespace paged_ops {

// Rotary position embedding: of the first `rotary_dim` elements of a row, element pairs (x, y) become
// (x cos - y sin, y cos + x sin), with the pair's cos and sin of the token's position; the rest stays.
// Queries go to `query_out`, which may be `query` itself; keys go straight to their slots, of a quantised
// cache when they have been rounded to their dtype.
struct RopeWriteParams {
  CacheWriteParams write;  // the keys to rotate, the values, and where they go; its num_tokens may be fewer
  const void* query;       // [num_tokens, num_q_heads, key_head_dim]
  void* query_out;         // the same
  int64_t query_stride_token, query_stride_head;  // bytes
  int64_t out_stride_token, out_stride_head;      // bytes
  int32_t num_tokens;
  int32_t num_q_heads;

  const void* positions;   // [num_tokens] int32 or int64, 0 .. max_position - 1
  bool wide_positions;     // int64
  const float* cos_sin;    // [max_position, rotary_dim]: half of a row cosines, then the sines
  int64_t cos_sin_stride;  // floats from a row to the next
  int64_t max_position;
  int32_t rotary_dim;  // even, at most key_head_dim
  bool interleaved;    // pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2)
};

}  // namespace paged_ops
