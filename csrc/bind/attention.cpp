// Binding of paged attention, decode and varlen.
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "bind/call.h"
#include "bind/ops.h"
#include "core/support.h"

namespace paged_ops::bind {

namespace {

constexpr size_t kWorkspaceAlignment = 256;

size_t padded(size_t nbytes) { return nbytes ? nbytes + kWorkspaceAlignment : 0; }

// Logits are taken to base 2: so much larger a factor becomes.
constexpr double kLargestFactor = std::numeric_limits<float>::max() / 1.4427;

float scale_or_default(py::handle scale, int head_dim) {
  if (scale.is_none()) return 1.0f / std::sqrt(float(head_dim));
  const double value = number(scale, "scale", "a number");
  PAGED_OPS_REQUIRE(std::abs(value) < kLargestFactor, "scale: is ", value, ", wanted a number below ",
                    kLargestFactor);
  return float(value);
}

float soft_cap_or_none(py::handle soft_cap) {
  if (soft_cap.is_none()) return 0.0f;
  const double value = number(soft_cap, "soft_cap", "a number");
  // A reciprocal of it is taken, too.
  constexpr double kLeast = 1e-30;
  PAGED_OPS_REQUIRE(value >= kLeast && value < kLargestFactor, "soft_cap: is ", value,
                    ", wanted None or a number from ", kLeast, " to ", kLargestFactor);
  return float(value);
}

int32_t window_or_none(py::handle window) {
  if (window.is_none()) return 0;
  if (PyBool_Check(window.ptr()) || !PyIndex_Check(window.ptr()))
    fail<TypeError>("window: is a ", Py_TYPE(window.ptr())->tp_name, ", wanted None or an integer");
  const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(window.ptr()));
  if (!index) throw py::error_already_set();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  PAGED_OPS_REQUIRE(overflow >= 0 && (overflow > 0 || value >= 1), "window: is ", std::string(py::str(index)),
                    ", wanted None or at least 1");
  constexpr long long kWider = std::numeric_limits<int32_t>::max();  // than any sequence
  return overflow > 0 || value >= kWider ? 0 : int32_t(value);
}

// A tensor of one number per query head, or per query token.
template <class T>
const T* vector_or_none(std::optional<Array>& array, py::handle object, const char* name, DType dtype,
                        int64_t extent, const char* what, const Array& query) {
  if (object.is_none()) return nullptr;
  array.emplace(object, name);
  array->require_ndim(1, what);
  array->require_dtype(dtype);
  array->require_shape(0, extent, what);
  array->require_contiguous();
  array->require_same_device(query);
  return static_cast<const T*>(array->data());
}

}  // namespace

py::object attention(py::handle query_in, py::handle key_cache_in, py::handle value_cache_in,
                     py::handle block_tables_in, py::handle seq_lens_in, py::handle cu_seqlens_q_in,
                     py::handle scale, bool causal, py::handle window, py::handle soft_cap,
                     py::handle alibi_slopes_in, py::handle sinks_in, py::handle tree_mask_in,
                     py::handle k_scale_in, py::handle v_scale_in, py::object out_in, py::object lse_in,
                     bool return_lse, py::object workspace_in, bool check) {
  const Array query(query_in, "query");
  const Array key_cache(key_cache_in, "key_cache");
  const Array value_cache(value_cache_in, "value_cache");
  const Array block_tables(block_tables_in, "block_tables");
  const Array seq_lens(seq_lens_in, "seq_lens");
  // All views live to the end of the call: they hold the memory that a capsule lends.
  std::optional<Array> cu_seqlens_q, alibi_slopes, sinks, tree_mask, k_scale, v_scale, lse, workspace;

  query.require_ndim(3, "[num_tokens, num_q_heads, head_dim]");
  query.require_last_contiguous();
  AttentionParams p{};
  p.kv = paged_kv(key_cache, value_cache);
  p.tables = block_tables_of(block_tables, seq_lens);
  p.dtype = query.dtype();
  p.num_tokens = narrow(query.shape(0), "num_tokens of query");
  p.num_q_heads = narrow(query.shape(1), "num_q_heads of query");
  query.require_shape(2, p.kv.key_head_dim, "head_dim, as in key_cache");
  require_supported(query, p.dtype, p.num_q_heads, p.kv);
  for (const Array* array : {&key_cache, &block_tables, &seq_lens}) array->require_same_device(query);
  p.kv.key_scale = scale_view(k_scale, k_scale_in, "k_scale", key_cache, false);
  p.kv.value_scale = scale_view(v_scale, v_scale_in, "v_scale", value_cache, false);
  p.query = query.data();
  p.query_stride_token = query.stride_nbytes(0);
  p.query_stride_head = query.stride_nbytes(1);
  p.scale = scale_or_default(scale, p.kv.key_head_dim);
  p.causal = causal;
  p.rules = {.window = window_or_none(window),
             .soft_cap = soft_cap_or_none(soft_cap),
             .alibi_slopes = vector_or_none<float>(alibi_slopes, alibi_slopes_in, "alibi_slopes", DType::f32,
                                                   p.num_q_heads, "[num_q_heads]", query),
             .sinks = vector_or_none<float>(sinks, sinks_in, "sinks", DType::f32, p.num_q_heads,
                                            "[num_q_heads]", query),
             .tree_mask = vector_or_none<int64_t>(tree_mask, tree_mask_in, "tree_mask", DType::i64,
                                                  p.num_tokens, "[num_tokens]", query)};
  PAGED_OPS_REQUIRE(!p.rules.tree_mask || causal, "tree_mask: is given without causal, which it narrows");
  PAGED_OPS_REQUIRE(!p.rules.tree_mask || !cu_seqlens_q_in.is_none(),
                    "tree_mask: is given without cu_seqlens_q, for one query token per sequence");

  if (cu_seqlens_q_in.is_none()) {
    query.require_shape(0, p.tables.num_seqs,
                        "num_seqs, as in block_tables: decode takes one token per sequence");
  } else {
    cu_seqlens_q.emplace(cu_seqlens_q_in, "cu_seqlens_q");
    cu_seqlens_q->require_ndim(1, "[num_seqs + 1]");
    cu_seqlens_q->require_dtype(DType::i32);
    cu_seqlens_q->require_shape(0, int64_t(p.tables.num_seqs) + 1, "num_seqs + 1");
    cu_seqlens_q->require_contiguous();
    cu_seqlens_q->require_same_device(query);
    p.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q->data());
  }

  const Backend& backend = backend_for(query);
  py::object out_object = std::move(out_in);
  if (out_object.is_none())
    out_object = empty_like(query, {p.num_tokens, p.num_q_heads, p.kv.value_head_dim}, name(p.dtype));
  const Array out(out_object, "out", Array::Use::output);
  out.require_ndim(3, "[num_tokens, num_q_heads, value_head_dim]");
  out.require_shape(0, p.num_tokens, "num_tokens, as in query");
  out.require_shape(1, p.num_q_heads, "num_q_heads, as in query");
  out.require_shape(2, p.kv.value_head_dim, "head_dim of value_cache");
  out.require_dtype(p.dtype);
  out.require_last_contiguous();
  out.require_same_device(query);
  p.out = out.data();
  p.out_stride_token = out.stride_nbytes(0);
  p.out_stride_head = out.stride_nbytes(1);

  const Context context = context_for(query, check);
  py::object lse_object = std::move(lse_in);
  if (return_lse && lse_object.is_none())
    lse_object = empty_like(query, {p.num_tokens, p.num_q_heads}, "float32");
  if (!lse_object.is_none()) {
    lse.emplace(lse_object, "lse", Array::Use::output);
    lse->require_ndim(2, "[num_tokens, num_q_heads]");
    lse->require_shape(0, p.num_tokens, "num_tokens, as in query");
    lse->require_shape(1, p.num_q_heads, "num_q_heads, as in query");
    lse->require_dtype(DType::f32);
    lse->require_contiguous();
    lse->require_same_device(query);
    p.lse = static_cast<float*>(lse->data());
  }

  py::object workspace_object = std::move(workspace_in);
  if (!workspace_object.is_none() || !backend.owns_scratch) {
    const size_t needed = backend.attention_workspace_nbytes(p);
    if (workspace_object.is_none() && needed)
      workspace_object = empty_like(query, {int64_t(padded(needed))}, "uint8");
    if (!workspace_object.is_none()) {
      workspace.emplace(workspace_object, "workspace", Array::Use::output);
      workspace->require_contiguous();
      workspace->require_same_device(query);
      const size_t nbytes = size_t(workspace->size()) * workspace->itemsize();
      PAGED_OPS_REQUIRE(nbytes >= padded(needed), "workspace: has ", nbytes, " bytes, wanted at least ",
                        padded(needed), " (see workspace_size())");
      if (needed) {
        const auto address = reinterpret_cast<uintptr_t>(workspace->data());
        const auto aligned = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
        p.workspace = reinterpret_cast<void*>(aligned);
        p.workspace_nbytes = nbytes - (aligned - address);
      }
    }
  }

  const auto or_out = [&](const std::optional<Array>& array) { return array ? &*array : &out; };
  const bool recording =
      require_no_gradient({&query, &key_cache, &value_cache, &out, or_out(lse), or_out(alibi_slopes),
                           or_out(sinks), or_out(k_scale), or_out(v_scale)});
  const auto given = [](const std::optional<Array>& array) { return array ? &*array : nullptr; };
  require_apart({&out, given(lse), given(workspace)},
                {&query, &key_cache, &value_cache, &block_tables, &seq_lens, given(cu_seqlens_q),
                 given(alibi_slopes), given(sinks), given(tree_mask), given(k_scale), given(v_scale)});
  if (p.num_tokens > 0) {
    const WithoutGil no_gil;
    backend.attention(p, context);
  }
  if (recording) count_writes({&out, given(lse)});
  if (return_lse) return py::make_tuple(out_object, lse_object);
  return out_object;
}

size_t attention_workspace_nbytes(const std::string& device, int64_t num_tokens, int64_t num_seqs,
                                  int64_t max_blocks_per_seq, int64_t block_size, int64_t num_q_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t value_head_dim,
                                  const std::string& dtype, bool decode) {
  AttentionParams p{};
  p.dtype = dtype_from_name(dtype);
  const std::string why =
      refusal({p.dtype, p.dtype, num_q_heads, num_kv_heads, head_dim, value_head_dim, block_size}).why;
  PAGED_OPS_REQUIRE(why.empty(), why);
  for (const auto& [what, value] : {std::pair{"num_seqs", num_seqs},
                                    {"num_tokens", num_tokens},
                                    {"max_blocks_per_seq", max_blocks_per_seq}})
    PAGED_OPS_REQUIRE(value >= 0, what, ": is ", value, ", wanted at least 0");
  static const int32_t not_read = 0;  // its address says "varlen"; only shapes count here
  p.cu_seqlens_q = decode ? nullptr : &not_read;
  p.num_tokens = narrow(num_tokens, "num_tokens");
  p.num_q_heads = narrow(num_q_heads, "num_q_heads");
  p.tables.num_seqs = narrow(num_seqs, "num_seqs");
  p.tables.max_blocks_per_seq = narrow(max_blocks_per_seq, "max_blocks_per_seq");
  p.kv.block_size = narrow(block_size, "block_size");
  p.kv.num_kv_heads = narrow(num_kv_heads, "num_kv_heads");
  p.kv.key_head_dim = narrow(head_dim, "head_dim");
  p.kv.value_head_dim = narrow(value_head_dim, "value_head_dim");
  p.kv.dtype = p.dtype;
  return padded(backend_named(device).attention_workspace_nbytes(p));
}

}  // namespace paged_ops::bind
