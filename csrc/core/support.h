// What attention and the cache ops accept: one predicate, asked by the bindings before every call,
// by supports() in Python, and by the generated tables and tests.
#pragma once
#include <string>

#include "core/check.h"
#include "core/dtype.h"
#include "core/paged_kv.h"

namespace paged_ops {

struct Geometry {
  DType dtype;  // of query and output, or of new keys and values
  DType cache_dtype;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t key_head_dim;
  int64_t value_head_dim;
  int64_t block_size;
};

struct Refusal {
  const char* argument;  // whose fault it is; null = of whoever is asked about
  std::string why;       // empty when there is none
};

// Why `g` is refused, if it is. Every backend supports the same set.
inline Refusal refusal(const Geometry& g) {
  if (g.dtype != DType::f32 && g.dtype != DType::f16 && g.dtype != DType::bf16)
    return {nullptr, concat("dtype is ", name(g.dtype), ", wanted one of float32, float16, bfloat16")};
  if (g.cache_dtype != g.dtype && !is_quantised(g.cache_dtype))
    return {nullptr, concat("dtype is ", name(g.dtype), " beside a cache of ", name(g.cache_dtype),
                            ", wanted one dtype, or a cache of float8_e4m3fn, float8_e5m2, int8, int4")};
  const auto refused_dim = [](int64_t dim) {
    return dim < kHeadDimMultiple || dim > kMaxHeadDim || dim % kHeadDimMultiple != 0;
  };
  const auto about = [](const char* what, int64_t dim) {
    return concat(what, " is ", dim, ", wanted a multiple of ", kHeadDimMultiple, " from ", kHeadDimMultiple,
                  " to ", kMaxHeadDim);
  };
  if (refused_dim(g.key_head_dim)) return {"key_cache", about("head_dim", g.key_head_dim)};
  if (refused_dim(g.value_head_dim)) return {"value_cache", about("value head_dim", g.value_head_dim)};
  if (g.num_kv_heads < 1)
    return {"key_cache", concat("num_kv_heads is ", g.num_kv_heads, ", wanted at least 1")};
  if (g.num_q_heads < 1 || g.num_q_heads % g.num_kv_heads != 0)
    return {nullptr, concat("num_q_heads is ", g.num_q_heads,
                            ", wanted a positive multiple of num_kv_heads = ", g.num_kv_heads)};
  if (g.block_size < 1 || g.block_size > (int64_t(1) << 30))
    return {"key_cache", concat("block_size is ", g.block_size, ", wanted 1 to 2^30")};
  return {};
}

}  // namespace paged_ops
