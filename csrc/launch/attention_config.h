// How attention is launched: pure functions of what the host knows, i.e. of shapes, strides and addresses.
//
// Nothing here changes a bit of the result: the chunk grid is fixed by position, and these choices only say
// which CTA does which chunk of which rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/check.h"
#include "kernels/attention_args.h"
#include "kernels/column_map.cuh"

namespace paged_ops::launch {

struct AttentionPlan {
  int head_dim;      // the kernel's: 64, 128, 256 or kMaxHeadDim, the next one up
  int column_tiles;  // of 8 columns per CTA: 1, 2 or kSplitColumnTiles
  bool aligned;      // K and V rows are plain and can be copied 16 bytes at a time, as they are
  bool converted;    // they are numbers of a quantised cache, and become f32 when they are copied
  bool ruled;        // the kernels that know of windows, soft caps, ALiBi and trees; they need no such rule
  bool parallel;     // CTAs share chunks by the work list
  int capacity;      // tokens a row of the block table has room for
  int max_chunks;
  int64_t num_slots;   // of tiles of rows
  int64_t num_places;  // (tile of rows, KV head)

  // The workspace: the line of work, then these offsets in bytes, each a multiple of 256.
  size_t finished_offset, state_offset, out_offset, workspace_nbytes;

  // How many CTAs could find anything to do: what bounds the parallel grid on a chip that holds more.
  int64_t max_ctas() const { return num_places * max_chunks; }
};

// With so many tiles of columns, a CTA's warps split the columns and share the keys (split_columns.cuh). Two
// states of a column must fit in the registers, so that there is no such kernel for wider heads.
constexpr int kSplitColumnTiles = 8, kMaxSplitHeadDim = 128;
// The most tiles of columns for which there is a kernel of a head dim that copies 16 bytes at a time: what
// registers allow beside the scales of a quantised cache and the rows that are widened.
constexpr int most_column_tiles(DType cache_dtype, int kernel_head_dim) {
  if (is_quantised(cache_dtype))
    return kernel_head_dim <= 64 ? kSplitColumnTiles : kernel_head_dim <= 128 ? 2 : 1;
  return kernel_head_dim <= kMaxSplitHeadDim ? kSplitColumnTiles : 2;
}
// From so many places on a prefill keeps every multiprocessor busy without sharing chunks.
constexpr int64_t kPrefillCtas = 264;
// Partial states beyond this much memory are not worth their parallelism.
constexpr size_t kMaxWorkspaceNbytes = size_t(1) << 30;

inline bool multiple_of_16(const CacheView& cache) {
  return (reinterpret_cast<uintptr_t>(cache.data) | uint64_t(cache.stride_block) |
          uint64_t(cache.stride_token) | uint64_t(cache.stride_head)) %
             16 ==
         0;
}

inline AttentionPlan plan_attention(const AttentionParams& op) {
  const PagedKV& kv = op.kv;
  AttentionPlan plan{};
  const int head_dim = std::max(kv.key_head_dim, kv.value_head_dim);
  plan.head_dim = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : kMaxHeadDim;
  const bool quantised = is_quantised(kv.dtype);
  plan.converted =
      quantised && (op.dtype == DType::f32 || kv.dtype == DType::i4 || plan.head_dim == kMaxHeadDim);
  const auto whole_pieces = [&](int dim) { return row_nbytes(kv.dtype, dim) % 16 == 0; };
  plan.aligned = is_plain(kv) && multiple_of_16(kv.key) && multiple_of_16(kv.value) &&
                 whole_pieces(kv.key_head_dim) && whole_pieces(kv.value_head_dim) && !plan.converted;
  // A sink concerns a row's end only. Copies by element are slow whatever else there is: one kernel for all.
  const AttentionRules& rules = op.rules;
  const bool has_rules = rules.window || rules.soft_cap != 0.f || rules.alibi_slopes || rules.tree_mask;
  // So are quantised caches, whose kernels are many.
  plan.ruled = has_rules || !plan.aligned || quantised;

  // Positions and look-ahead must stay within 32 bits.
  constexpr int64_t kMaxTokens = INT32_MAX - 8 * kernels::kChunkTokens;
  plan.capacity = int(std::min(int64_t(op.tables.max_blocks_per_seq) * kv.block_size, kMaxTokens));
  plan.max_chunks = std::max(1, (plan.capacity + kernels::kChunkTokens - 1) / kernels::kChunkTokens);

  const int64_t num_seqs = std::max(op.tables.num_seqs, 1);
  const int64_t group = op.num_q_heads / kv.num_kv_heads;
  const auto num_slots = [&](int column_tiles) { return kernels::num_slots(op, 8 * column_tiles); };
  const auto padded = [](size_t nbytes) { return (nbytes + 255) / 256 * 256; };
  const size_t states = size_t(op.num_tokens) * op.num_q_heads * plan.max_chunks;
  plan.finished_offset = padded(size_t(num_slots(1) + 2) * sizeof(int64_t));
  plan.state_offset = plan.finished_offset + padded(size_t(num_slots(1)) * kv.num_kv_heads * sizeof(int));
  plan.out_offset = plan.state_offset + padded(states * sizeof(float2));
  plan.workspace_nbytes = plan.out_offset + padded(states * kv.value_head_dim * sizeof(float));
  const bool can_share = op.num_tokens > 0 && op.tables.num_seqs > 0 && plan.max_chunks > 1 &&
                         plan.workspace_nbytes <= kMaxWorkspaceNbytes;

  // Two tiles of columns in one pass halve the traffic where a sequence has more than 8 columns. Many tiles
  // quarter it again, but make the work coarse: all of the chip must have some, and where it cannot be
  // shared, much.
  const bool few_tokens = op.cu_seqlens_q == nullptr || op.num_tokens <= 8 * num_seqs;
  const bool wide = group * op.num_tokens > 8 * num_seqs && op.dtype != DType::f32;
  const bool split = wide && !few_tokens && head_dim <= kMaxSplitHeadDim &&
                     group * op.num_tokens >= 8 * kSplitColumnTiles * num_seqs &&
                     num_slots(kSplitColumnTiles) * kv.num_kv_heads >= (can_share ? 1 : 2) * kPrefillCtas;
  const int column_tiles = split ? kSplitColumnTiles : wide ? 2 : 1;

  // The workspace is sized without knowing addresses, so that alignment has no say in what is shared. Nor
  // have rules, of which a caller who asks for the size says nothing.
  const int64_t enough = (split ? 2 : 1) * kPrefillCtas;
  plan.parallel = can_share && (few_tokens || num_slots(column_tiles) * kv.num_kv_heads < enough);
  if (!plan.parallel) plan.workspace_nbytes = 0;

  plan.column_tiles = plan.aligned ? std::min(column_tiles, most_column_tiles(kv.dtype, plan.head_dim)) : 1;
  plan.num_slots = num_slots(plan.column_tiles);
  plan.num_places = plan.num_slots * kv.num_kv_heads;
  PAGED_OPS_REQUIRE(plan.num_places <= INT32_MAX, "query: ", op.num_tokens, " tokens of ", op.num_q_heads,
                    " heads are too many for one launch");
  return plan;
}

// Multiprocessors x CTAs that each holds, but no more in all than could have work, or little more.
inline dim3 parallel_grid(int64_t max_ctas, int multiprocessors, int ctas_per_multiprocessor) {
  if (max_ctas < multiprocessors) return dim3(unsigned(std::max<int64_t>(max_ctas, 1)));
  const int64_t each = (max_ctas + multiprocessors - 1) / multiprocessors;
  return dim3(unsigned(multiprocessors),
              unsigned(std::clamp<int64_t>(each, 1, std::max(ctas_per_multiprocessor, 1))));
}

}  // namespace paged_ops::launch
