// The checks that several ops share.
#include "bind/call.h"

#include <limits>

#include "core/support.h"

namespace paged_ops::bind {

Context context_for(const Array& array, bool check) {
  return Context{array.device().device_id, current_stream(array), check};
}

int32_t narrow(int64_t value, const char* what) {
  PAGED_OPS_REQUIRE(value <= std::numeric_limits<int32_t>::max(), what, " is ", value,
                    ", wanted less than 2^31");
  return int32_t(value);
}

DType cache_dtype(const Array& cache) { return cache.is(DType::i4) ? DType::i4 : cache.dtype(); }

namespace {

void require_cache(const Array& cache) {
  PAGED_OPS_REQUIRE(cache.ndim() == 4 || cache.ndim() == 5, cache.name(), ": shape is ", cache.shape_text(),
                    ", wanted [num_blocks, block_size, num_kv_heads, head_dim] or [num_blocks, block_size, "
                    "num_kv_heads, head_dim / x, x]");
  if (cache.ndim() == 5) cache.require_last_contiguous();
}

int64_t head_dim_of(const Array& cache) {
  // Each extent by itself first: a view of no memory may have any, and their product would overflow.
  const int64_t packs = narrow(cache.shape(3), "head_dim"),
                elements = packs * (cache.ndim() == 5 ? narrow(cache.shape(4), "head_dim") : 1);
  return elements * numbers_per_element(cache_dtype(cache));
}

CacheView view_of(const Array& cache) {
  CacheView view{cache.data(), cache.stride_nbytes(0), cache.stride_nbytes(1), cache.stride_nbytes(2)};
  const int64_t pack = cache.ndim() == 5 ? cache.shape(4) : 1;
  if (cache.stride(3) == pack || cache.shape(3) <= 1) return view;  // packs touch, or there is one
  view.pack = int32_t(pack * numbers_per_element(cache_dtype(cache)));
  view.stride_pack = cache.stride_nbytes(3);
  return view;
}

}  // namespace

PagedKV paged_kv(const Array& key_cache, const Array& value_cache) {
  require_cache(key_cache);
  require_cache(value_cache);
  value_cache.require_same_device(key_cache);
  const DType dtype = cache_dtype(key_cache);
  value_cache.require_dtype(dtype);  // plain and quantised ones do not mix
  value_cache.require_shape(0, key_cache.shape(0), "num_blocks, as in key_cache");
  value_cache.require_shape(1, key_cache.shape(1), "block_size, as in key_cache");
  value_cache.require_shape(2, key_cache.shape(2), "num_kv_heads, as in key_cache");
  return PagedKV{.key = view_of(key_cache),
                 .value = view_of(value_cache),
                 .num_blocks = key_cache.shape(0),
                 .block_size = narrow(key_cache.shape(1), "block_size of key_cache"),
                 .num_kv_heads = narrow(key_cache.shape(2), "num_kv_heads of key_cache"),
                 .key_head_dim = narrow(head_dim_of(key_cache), "head_dim of key_cache"),
                 .value_head_dim = narrow(head_dim_of(value_cache), "head_dim of value_cache"),
                 .dtype = dtype};
}

double number(py::handle object, const char* name, const char* wanted) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    fail<TypeError>(name, ": is a ", Py_TYPE(object.ptr())->tp_name, ", wanted ", wanted);
  }
  return value;
}

namespace {

void require_scale(double scale, const char* name) {
  PAGED_OPS_REQUIRE(scale > 0 && scale <= std::numeric_limits<float>::max(), name, ": is ", scale,
                    ", wanted a finite number above 0");
}

// Scales per token and head, and with `grouped` per group of a row's elements.
ScaleView token_scales(const Array& array, const Array& cache, bool grouped) {
  array.require_shape(0, cache.shape(0), "num_blocks, as in the cache");
  array.require_shape(1, cache.shape(1), "block_size, as in the cache");
  array.require_shape(2, cache.shape(2), "num_kv_heads, as in the cache");
  ScaleView view{.data = static_cast<float*>(array.data()),
                 .per_token = true,
                 .stride_block = array.stride_nbytes(0),
                 .stride_token = array.stride_nbytes(1),
                 .stride_head = array.stride_nbytes(2)};
  if (!grouped) return view;
  const int64_t head_dim = head_dim_of(cache);
  const int64_t num_groups = array.shape(3);
  PAGED_OPS_REQUIRE(num_groups > 0 && num_groups <= head_dim / kScaleGroupMultiple &&
                        head_dim % (num_groups * kScaleGroupMultiple) == 0,
                    array.name(), ": shape is ", array.shape_text(),
                    ", wanted in dimension 3 a number of groups that cuts ", head_dim, ", the head_dim of ",
                    cache.name(), ", into multiples of ", kScaleGroupMultiple);
  view.group = int32_t(head_dim / num_groups);
  view.stride_group = array.stride_nbytes(3);
  return view;
}

}  // namespace

ScaleView scale_view(std::optional<Array>& array, py::handle scale, const char* name, const Array& cache,
                     bool writes) {
  const DType dtype = cache_dtype(cache);
  if (!is_quantised(dtype)) {
    PAGED_OPS_REQUIRE(scale.is_none(), name, ": is given, and ", cache.name(), " is ", cache.dtype_name(),
                      ", which has no scales");
    return {};
  }
  const bool grouped = dtype == DType::i4;
  const char* wanted =
      grouped ? "float32 [num_blocks, block_size, num_kv_heads, num_groups]"
              : "a number or float32 [1], [num_kv_heads] or [num_blocks, block_size, num_kv_heads]";
  PAGED_OPS_REQUIRE(!scale.is_none(), name, ": is None, wanted ", wanted, ", for ", cache.name(), " is ",
                    cache.dtype_name(), grouped ? ", of int4" : "");
  if (PyFloat_Check(scale.ptr()) || PyLong_Check(scale.ptr()) || !py::hasattr(scale, "__dlpack__")) {
    const double value = number(scale, name, wanted);
    if (grouped) fail(name, ": is a number, wanted ", wanted, ", for ", cache.name(), " is of int4");
    require_scale(value, name);
    require_scale(float(value), name);  // no longer above 0, perhaps
    return {.uniform = float(value)};
  }
  array.emplace(scale, name);
  array->require_dtype(DType::f32);
  array->require_same_device(cache);
  if (array->ndim() == (grouped ? 4 : 3)) {
    const ScaleView view = token_scales(*array, cache, grouped);
    if (writes) array.emplace(scale, name, Array::Use::output);
    return view;
  }
  const bool per_head = array->ndim() == 1 && array->shape(0) == cache.shape(2);
  PAGED_OPS_REQUIRE(!grouped && (per_head || array->size() == 1), name, ": shape is ", array->shape_text(),
                    ", wanted ", wanted);
  ScaleView view{.data = static_cast<float*>(array->data())};
  if (per_head) view.stride_head = array->stride_nbytes(0);
  if (!dlpack::on_cuda(cache.device()))
    for (int64_t i = 0; i < array->size(); i++)
      require_scale(view.data[i * view.stride_head / int64_t(sizeof(float))], name);
  return view;
}

void WrittenScales::view(PagedKV& kv, py::handle k_scale, py::handle v_scale, const Array& key_cache,
                         const Array& value_cache) {
  kv.key_scale = scale_view(key, k_scale, "k_scale", key_cache, true);
  kv.value_scale = scale_view(value, v_scale, "v_scale", value_cache, true);
  key_is_output_ = kv.key_scale.per_token;
  value_is_output_ = kv.value_scale.per_token;
}

BlockTables block_tables_of(const Array& block_tables, const Array& seq_lens) {
  block_tables.require_ndim(2, "[num_seqs, max_blocks_per_seq]");
  seq_lens.require_ndim(1, "[num_seqs]");
  block_tables.require_dtype(DType::i32);
  seq_lens.require_dtype(DType::i32);
  seq_lens.require_shape(0, block_tables.shape(0), "num_seqs, as in block_tables");
  block_tables.require_last_contiguous();
  seq_lens.require_contiguous();
  return BlockTables{
      .block_ids = static_cast<const int32_t*>(block_tables.data()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.data()),
      .stride = block_tables.stride(0),
      .num_seqs = narrow(block_tables.shape(0), "num_seqs of block_tables"),
      .max_blocks_per_seq = narrow(block_tables.shape(1), "max_blocks_per_seq of block_tables")};
}

void require_supported(const Array& array, DType dtype, int64_t num_q_heads, const PagedKV& kv) {
  const Refusal refused = refusal({.dtype = dtype,
                                   .cache_dtype = kv.dtype,
                                   .num_q_heads = num_q_heads,
                                   .num_kv_heads = kv.num_kv_heads,
                                   .key_head_dim = kv.key_head_dim,
                                   .value_head_dim = kv.value_head_dim,
                                   .block_size = kv.block_size});
  PAGED_OPS_REQUIRE(refused.why.empty(), refused.argument ? refused.argument : array.name(), ": ",
                    refused.why);
}

void require_rows(const Array& rows, DType dtype, const PagedKV& kv, int head_dim, const char* cache_name) {
  rows.require_ndim(3, "[num_tokens, num_kv_heads, head_dim]");
  rows.require_dtype(dtype);
  rows.require_shape(1, kv.num_kv_heads, cache_name);
  rows.require_shape(2, head_dim / numbers_per_element(dtype), cache_name);
  rows.require_last_contiguous();
}

void fill_rows(CacheWriteParams& p, const Array& key, const Array& value, const Array& slot_mapping) {
  require_rows(key, p.dtype, p.kv, p.kv.key_head_dim, "as in key_cache");
  require_rows(value, p.dtype, p.kv, p.kv.value_head_dim, "as in value_cache");
  value.require_shape(0, key.shape(0), "num_tokens, as in key");
  slot_mapping.require_ndim(1, "[num_tokens]");
  slot_mapping.require_dtype(DType::i64);
  slot_mapping.require_contiguous();
  PAGED_OPS_REQUIRE(slot_mapping.shape(0) <= key.shape(0), "slot_mapping: shape is ",
                    slot_mapping.shape_text(), ", wanted at most the ", key.shape(0), " tokens of key");
  p.key = key.data();
  p.value = value.data();
  p.slot_mapping = static_cast<const int64_t*>(slot_mapping.data());
  p.key_stride_token = key.stride_nbytes(0);
  p.key_stride_head = key.stride_nbytes(1);
  p.value_stride_token = value.stride_nbytes(0);
  p.value_stride_head = value.stride_nbytes(1);
  p.num_tokens = narrow(slot_mapping.shape(0), "num_tokens of slot_mapping");
}

void require_same_or_apart(const Array& output, const Array& input) {
  bool same = output.data() == input.data();
  for (int i = 0; i < output.ndim(); i++)
    same = same && (output.stride(i) == input.stride(i) || output.shape(i) <= 1);
  if (!same) output.require_no_overlap(input);
}

}  // namespace paged_ops::bind
