// Bindings of writing a paged KV cache and of gathering sequences from it.
#include <algorithm>

#include "bind/call.h"
#include "bind/ops.h"

namespace paged_ops::bind {

namespace {

// What numbers times scales may come out as.
DType scaled_dtype(const std::string& dtype, const char* argument) {
  for (const DType plain : {DType::f32, DType::f16, DType::bf16})
    if (dtype == name(plain)) return plain;
  fail<TypeError>(argument, ": dtype is ", dtype, ", wanted float32, float16 or bfloat16");
}

}  // namespace

void write_kv_cache(py::handle key_in, py::handle value_in, py::handle key_cache_in,
                    py::handle value_cache_in, py::handle slot_mapping_in, py::handle k_scale_in,
                    py::handle v_scale_in, bool check) {
  const Array key(key_in, "key");
  const Array value(value_in, "value");
  const Array key_cache(key_cache_in, "key_cache", Array::Use::output);
  const Array value_cache(value_cache_in, "value_cache", Array::Use::output);
  const Array slot_mapping(slot_mapping_in, "slot_mapping");

  CacheWriteParams p{};
  p.kv = paged_kv(key_cache, value_cache);
  p.dtype = is_quantised(p.kv.dtype) ? key.dtype() : p.kv.dtype;
  require_supported(is_quantised(p.kv.dtype) ? key : key_cache, p.dtype, p.kv.num_kv_heads, p.kv);
  fill_rows(p, key, value, slot_mapping);
  WrittenScales scales;
  scales.view(p.kv, k_scale_in, v_scale_in, key_cache, value_cache);
  for (const Array* array : {&key, &value, &slot_mapping}) array->require_same_device(key_cache);
  require_apart({&key_cache, &value_cache, scales.key_output(), scales.value_output()},
                {&key, &value, &slot_mapping, scales.key_input(), scales.value_input()});

  const auto or_key = [&](const std::optional<Array>& array) { return array ? &*array : &key; };
  const bool recording =
      require_no_gradient({&key, &value, &key_cache, &value_cache, or_key(scales.key), or_key(scales.value)});
  const Backend& backend = backend_for(key_cache);
  const Context context = context_for(key_cache, check);
  if (p.num_tokens == 0) return;
  {
    const WithoutGil no_gil;
    backend.cache_write(p, context);
  }
  if (recording) count_writes({&key_cache, &value_cache, scales.key_output(), scales.value_output()});
}

py::tuple gather_kv_cache(py::handle key_cache_in, py::handle value_cache_in, py::handle block_tables_in,
                          py::handle seq_lens_in, py::handle k_scale_in, py::handle v_scale_in,
                          py::handle out_dtype, py::object key_out, py::object value_out,
                          py::object num_tokens, bool check) {
  const Array key_cache(key_cache_in, "key_cache");
  const Array value_cache(value_cache_in, "value_cache");
  const Array block_tables(block_tables_in, "block_tables");
  const Array seq_lens(seq_lens_in, "seq_lens");

  GatherParams p{};
  p.kv = paged_kv(key_cache, value_cache);
  const bool quantised = is_quantised(p.kv.dtype);
  require_supported(key_cache, quantised ? DType::f32 : p.kv.dtype, p.kv.num_kv_heads, p.kv);
  std::optional<Array> k_scale, v_scale;
  const bool scaled = !k_scale_in.is_none() || !v_scale_in.is_none();
  if (scaled) {
    p.kv.key_scale = scale_view(k_scale, k_scale_in, "k_scale", key_cache, false);
    p.kv.value_scale = scale_view(v_scale, v_scale_in, "v_scale", value_cache, false);
  }
  p.tables = block_tables_of(block_tables, seq_lens);
  block_tables.require_same_device(key_cache);
  seq_lens.require_same_device(key_cache);

  // On the CPU the lengths are at hand; on a GPU, reading them would stop the stream.
  const bool on_host = !dlpack::on_cuda(key_cache.device());
  const int64_t bound = int64_t(p.tables.num_seqs) * p.tables.max_blocks_per_seq * p.kv.block_size;
  const int64_t capacity = int64_t(p.tables.max_blocks_per_seq) * p.kv.block_size;
  int64_t exact = 0;
  if (on_host)  // what is no length counts for nothing here: the backend will say so
    for (int i = 0; i < p.tables.num_seqs; i++)
      if (const int64_t length = p.tables.seq_lens[i]; length > 0 && length <= capacity) exact += length;
  PAGED_OPS_REQUIRE(key_out.is_none() == value_out.is_none(),
                    "out: one of (key, value) is None, wanted both or none");
  const bool out_given = !key_out.is_none();
  PAGED_OPS_REQUIRE(!out_given || num_tokens.is_none(),
                    "num_tokens: is given beside out, wanted one of them");
  PAGED_OPS_REQUIRE(out_dtype.is_none() || (scaled && !out_given), "out_dtype: is given ",
                    out_given ? "beside out, wanted one of them"
                              : "without scales, wanted None: rows come out as they are");
  p.dtype = scaled ? DType::f32 : p.kv.dtype;
  if (!out_dtype.is_none()) p.dtype = scaled_dtype(out_dtype.cast<std::string>(), "out_dtype");
  if (!out_given) {
    p.num_rows = on_host ? exact : bound;
    if (!num_tokens.is_none()) {
      p.num_rows = num_tokens.cast<int64_t>();
      PAGED_OPS_REQUIRE(p.num_rows >= 0, "num_tokens: is ", p.num_rows, ", wanted at least 0");
    }
    const int numbers = numbers_per_element(p.dtype);
    key_out = empty_like(key_cache, {p.num_rows, p.kv.num_kv_heads, p.kv.key_head_dim / numbers},
                         element_name(p.dtype));
    value_out = empty_like(key_cache, {p.num_rows, p.kv.num_kv_heads, p.kv.value_head_dim / numbers},
                           element_name(p.dtype));
  }
  const Array key(key_out, "out[0]", Array::Use::output);
  const Array value(value_out, "out[1]", Array::Use::output);
  if (scaled && out_given) p.dtype = scaled_dtype(key.dtype_name(), "out[0]");
  require_rows(key, p.dtype, p.kv, p.kv.key_head_dim, "as in key_cache");
  require_rows(value, p.dtype, p.kv, p.kv.value_head_dim, "as in value_cache");
  value.require_shape(0, key.shape(0), "num_tokens, as in out[0]");
  for (const Array* rows : {&key, &value}) rows->require_same_device(key_cache);
  const auto given = [](const std::optional<Array>& array) { return array ? &*array : nullptr; };
  require_apart({&key, &value},
                {&key_cache, &value_cache, &block_tables, &seq_lens, given(k_scale), given(v_scale)});
  p.num_rows = key.shape(0);
  PAGED_OPS_REQUIRE(!on_host || exact <= p.num_rows, num_tokens.is_none() ? "out" : "num_tokens", ": has ",
                    p.num_rows, " rows, wanted at least ", exact, ", the sum of seq_lens");
  py::object cu_seqlens_object = empty_like(key_cache, {int64_t(p.tables.num_seqs) + 1}, "int32");
  const Array cu_seqlens(cu_seqlens_object, "cu_seqlens", Array::Use::output);
  narrow(on_host ? exact : bound, "the number of tokens to gather");

  p.key = key.data();
  p.value = value.data();
  p.cu_seqlens = static_cast<int32_t*>(cu_seqlens.data());
  p.key_stride_token = key.stride_nbytes(0);
  p.key_stride_head = key.stride_nbytes(1);
  p.value_stride_token = value.stride_nbytes(0);
  p.value_stride_head = value.stride_nbytes(1);

  const auto or_key = [&](const std::optional<Array>& array) { return array ? &*array : &key; };
  const bool recording =
      require_no_gradient({&key_cache, &value_cache, &key, &value, or_key(k_scale), or_key(v_scale)});
  const Backend& backend = backend_for(key_cache);
  const Context context = context_for(key_cache, check);
  {
    const WithoutGil no_gil;
    backend.gather(p, context);
  }
  if (recording) count_writes({&key, &value});
  return py::make_tuple(key_out, value_out, cu_seqlens_object);
}

}  // namespace paged_ops::bind
