// What attention and the cache ops accept: one predicate, asked by the bindings before every call,
// by supports() in Python, and by the generated tables and tests.
#pragma once
#include <string>

#include "core/check.h"
#include "core/dtype.h"

namespace paged_ops {

constexpr int kHeadDimMultiple = 8;
constexpr int kMaxHeadDim = 256;

struct Geometry {
  DType dtype;  // of query and output, or of new keys and values
  DType cache_dtype;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t key_head_dim;
  int64_t value_head_dim;
  int64_t block_size;
};

// Why `g` is refused, or an empty string when it is supported. Every backend supports the same set.
inline std::string refusal(const Geometry& g) {
  if (g.dtype != DType::f32 && g.dtype != DType::f16 && g.dtype != DType::bf16)
    return concat("dtype is ", name(g.dtype), ", wanted one of float32, float16, bfloat16");
  if (g.cache_dtype != g.dtype)
    return concat("dtype is ", name(g.dtype), " beside a cache of ", name(g.cache_dtype),
                  ", wanted one dtype");
  for (const auto& [what, dim] :
       {std::pair{"head_dim", g.key_head_dim}, {"value head_dim", g.value_head_dim}})
    if (dim < kHeadDimMultiple || dim > kMaxHeadDim || dim % kHeadDimMultiple != 0)
      return concat(what, " is ", dim, ", wanted a multiple of ", kHeadDimMultiple, " from ",
                    kHeadDimMultiple, " to ", kMaxHeadDim);
  if (g.num_kv_heads < 1) return concat("num_kv_heads is ", g.num_kv_heads, ", wanted at least 1");
  if (g.num_q_heads < 1 || g.num_q_heads % g.num_kv_heads != 0)
    return concat("num_q_heads is ", g.num_q_heads,
                  ", wanted a positive multiple of num_kv_heads = ", g.num_kv_heads);
  if (g.block_size < 1 || g.block_size > (int64_t(1) << 30))
    return concat("block_size is ", g.block_size, ", wanted 1 to 2^30");
  return {};
}

}  // namespace paged_ops
