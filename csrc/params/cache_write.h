// Parameters of writing new keys and values into their slots of a paged KV cache.
#pragma once
#include <cstdint>

#include "core/paged_kv.h"

namespace paged_ops {

struct CacheWriteParams {
  const void* key;                            // [num_tokens, num_kv_heads, key_head_dim]
  const void* value;                          // [num_tokens, num_kv_heads, value_head_dim]
  const int64_t* slot_mapping;                // [num_tokens], block * block_size + offset; negative = skip
  int64_t key_stride_token, key_stride_head;  // bytes
  int64_t value_stride_token, value_stride_head;  // bytes
  int32_t num_tokens;  // what slot_mapping counts; key and value may be padded beyond it
  DType dtype;         // of key and value

  // Where it is quantised, an element is divided by its scale, rounded to the nearest and saturated. Scales
  // per token and head are found here and written too: the greatest finite size in the row over largest(),
  // or 1 for a row of zeros.
  PagedKV kv;
};

}  // namespace paged_ops
