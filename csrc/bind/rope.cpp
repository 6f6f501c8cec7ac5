// Binding of rotary position embedding fused with the write of keys and values.
#include <optional>

#include "bind/call.h"
#include "bind/ops.h"

namespace paged_ops::bind {

namespace {

void require_queries(const Array& queries, const Array& key, const CacheWriteParams& w) {
  queries.require_ndim(3, "[num_tokens, num_q_heads, head_dim]");
  queries.require_dtype(w.dtype);
  queries.require_shape(0, key.shape(0), "num_tokens, as in key");
  queries.require_shape(2, w.kv.key_head_dim, "as in key_cache");
  queries.require_last_contiguous();
}

}  // namespace

py::object rope_and_write_kv_cache(py::handle query_in, py::handle key_in, py::handle value_in,
                                   py::handle key_cache_in, py::handle value_cache_in,
                                   py::handle slot_mapping_in, py::handle positions_in,
                                   py::handle cos_sin_cache_in, bool interleaved, py::handle k_scale_in,
                                   py::handle v_scale_in, py::object query_out_in, bool check) {
  const Array query(query_in, "query");
  const Array key(key_in, "key");
  const Array value(value_in, "value");
  const Array key_cache(key_cache_in, "key_cache", Array::Use::output);
  const Array value_cache(value_cache_in, "value_cache", Array::Use::output);
  const Array slot_mapping(slot_mapping_in, "slot_mapping");
  const Array positions(positions_in, "positions");
  const Array cos_sin(cos_sin_cache_in, "cos_sin_cache");

  RopeWriteParams p{};
  CacheWriteParams& w = p.write;
  w.kv = paged_kv(key_cache, value_cache);
  w.dtype = is_quantised(w.kv.dtype) ? key.dtype() : w.kv.dtype;
  require_supported(is_quantised(w.kv.dtype) ? key : key_cache, w.dtype, w.kv.num_kv_heads, w.kv);
  fill_rows(w, key, value, slot_mapping);
  WrittenScales scales;
  scales.view(w.kv, k_scale_in, v_scale_in, key_cache, value_cache);
  require_queries(query, key, w);
  positions.require_ndim(1, "[num_tokens]");
  if (!positions.is(DType::i32) && !positions.is(DType::i64))
    fail<TypeError>("positions: dtype is ", positions.dtype_name(), ", wanted int64 or int32");
  positions.require_shape(0, key.shape(0), "num_tokens, as in key");
  positions.require_contiguous();
  cos_sin.require_ndim(2, "[max_position, rotary_dim]");
  cos_sin.require_dtype(DType::f32);
  cos_sin.require_last_contiguous();
  const int64_t rotary_dim = cos_sin.shape(1);
  PAGED_OPS_REQUIRE(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= w.kv.key_head_dim,
                    "cos_sin_cache: rotary_dim is ", rotary_dim, ", wanted an even number from 2 to ",
                    w.kv.key_head_dim, ", the head_dim of key_cache");
  PAGED_OPS_REQUIRE(cos_sin.shape(0) > 0 || key.shape(0) == 0,
                    "cos_sin_cache: has no positions, wanted at least one row");

  if (query_out_in.is_none())
    query_out_in = empty_like(query, {query.shape(0), query.shape(1), query.shape(2)}, name(w.dtype));
  const Array query_out(query_out_in, "query_out", Array::Use::output);
  require_queries(query_out, key, w);
  query_out.require_shape(1, query.shape(1), "num_q_heads, as in query");
  for (const Array* array : {&query, &key, &value, &slot_mapping, &positions, &cos_sin, &query_out})
    array->require_same_device(key_cache);
  require_same_or_apart(query_out, query);
  require_apart(
      {&key_cache, &value_cache, &query_out, scales.key_output(), scales.value_output()},
      {&key, &value, &slot_mapping, &positions, &cos_sin, scales.key_input(), scales.value_input()});
  require_apart({&key_cache, &value_cache, scales.key_output(), scales.value_output()}, {&query});

  p.query = query.data();
  p.query_out = query_out.data();
  p.query_stride_token = query.stride_nbytes(0);
  p.query_stride_head = query.stride_nbytes(1);
  p.out_stride_token = query_out.stride_nbytes(0);
  p.out_stride_head = query_out.stride_nbytes(1);
  p.num_tokens = narrow(query.shape(0), "num_tokens of query");
  p.num_q_heads = narrow(query.shape(1), "num_q_heads of query");
  p.positions = positions.data();
  p.wide_positions = positions.is(DType::i64);
  p.cos_sin = static_cast<const float*>(cos_sin.data());
  p.cos_sin_stride = cos_sin.stride(0);
  p.max_position = cos_sin.shape(0);
  p.rotary_dim = int32_t(rotary_dim);
  p.interleaved = interleaved;

  const auto or_key = [&](const std::optional<Array>& array) { return array ? &*array : &key; };
  const bool recording = require_no_gradient(
      {&query, &key, &value, &key_cache, &value_cache, &query_out, or_key(scales.key), or_key(scales.value)});
  const Backend& backend = backend_for(key_cache);
  const Context context = context_for(key_cache, check);
  if (p.num_tokens == 0) return query_out_in;
  {
    const WithoutGil no_gil;
    backend.rope_write(p, context);
  }
  if (recording)
    count_writes({&key_cache, &value_cache, &query_out, scales.key_output(), scales.value_output()});
  return query_out_in;
}

}  // namespace paged_ops::bind
