// The native functions that paged_ops/ops.py calls, one per op.
#pragma once
#include <optional>
#include <string>

#include "bind/array.h"
#include "params/backend.h"

namespace paged_ops::bind {

// cu_seqlens_q None = decode; out, lse, workspace None = allocated as the query's kind of tensor. Other Nones
// mean that there is none of it.
// Returns out, or (out, lse) when return_lse.
py::object attention(py::handle query, py::handle key_cache, py::handle value_cache, py::handle block_tables,
                     py::handle seq_lens, py::handle cu_seqlens_q, py::handle scale, bool causal,
                     py::handle window, py::handle soft_cap, py::handle alibi_slopes, py::handle sinks,
                     py::handle tree_mask, py::handle k_scale, py::handle v_scale, py::object out,
                     py::object lse, bool return_lse, py::object workspace, bool check);
size_t attention_workspace_nbytes(const std::string& device, int64_t num_tokens, int64_t num_seqs,
                                  int64_t max_blocks_per_seq, int64_t block_size, int64_t num_q_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t value_head_dim,
                                  const std::string& dtype, bool decode);
void write_kv_cache(py::handle key, py::handle value, py::handle key_cache, py::handle value_cache,
                    py::handle slot_mapping, py::handle k_scale, py::handle v_scale, bool check);
py::tuple gather_kv_cache(py::handle key_cache, py::handle value_cache, py::handle block_tables,
                          py::handle seq_lens, py::handle k_scale, py::handle v_scale, py::handle out_dtype,
                          py::object key_out, py::object value_out, py::object num_tokens, bool check);
void copy_blocks(py::handle caches, py::handle block_pairs, bool check);
void swap_blocks(py::handle source, py::handle destination, py::handle block_pairs);
py::tuple merge_attention_states(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b,
                                 py::object out, py::object lse);
// query_out None = allocated. Returns it.
py::object rope_and_write_kv_cache(py::handle query, py::handle key, py::handle value, py::handle key_cache,
                                   py::handle value_cache, py::handle slot_mapping, py::handle positions,
                                   py::handle cos_sin_cache, bool interleaved, py::handle k_scale,
                                   py::handle v_scale, py::object query_out, bool check);

// Why this combination is refused, or an empty string.
std::string refusal_text(const std::string& dtype, const std::string& cache_dtype, int64_t num_q_heads,
                         int64_t num_kv_heads, int64_t head_dim, int64_t value_head_dim, int64_t block_size);

DType dtype_from_name(const std::string& name);
const Backend& backend_named(const std::string& device);  // "cpu" or "cuda"

}  // namespace paged_ops::bind
