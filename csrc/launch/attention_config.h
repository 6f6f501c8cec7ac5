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
  int head_dim;      // the kernel's: 64, 128 or 256, the next one up
  int column_tiles;  // of 8 columns per CTA
  bool aligned;      // K and V rows can be copied 16 bytes at a time
  bool parallel;     // chunks of the same rows on several CTAs
  int capacity;      // tokens a row of the block table has room for
  int max_chunks;
  int64_t num_places;  // (tile of rows, KV head): the grid's x
  int splits;          // CTAs that share the chunks of a place: the grid's y

  // The workspace: offsets in bytes, each a multiple of 256.
  size_t finished_nbytes;  // counters, first
  size_t state_offset, out_offset, workspace_nbytes;
};

// Enough CTAs to fill the largest chips several times over, so that the tail of uneven lengths is short. More
// would only add CTAs that find nothing to do.
constexpr int64_t kWantedCtas = 4096;
// From so many places on a prefill keeps every multiprocessor busy without sharing chunks.
constexpr int64_t kPrefillCtas = 264;
// Partial states beyond this much memory are not worth their parallelism.
constexpr size_t kMaxWorkspaceNbytes = size_t(1) << 30;
constexpr int kMaxGridY = 65535;

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
  PAGED_OPS_REQUIRE(head_dim <= 256, "head_dim: is ", head_dim, ", wanted at most 256");
  plan.head_dim = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  plan.aligned = multiple_of_16(kv.key) && multiple_of_16(kv.value);

  // Two tiles of columns in one pass halve the traffic where a sequence has more than 8 columns.
  const bool decode = op.cu_seqlens_q == nullptr;
  const int64_t num_seqs = std::max(op.tables.num_seqs, 1);
  const int64_t group = op.num_q_heads / kv.num_kv_heads;
  const bool wide = group * op.num_tokens > 8 * num_seqs && op.dtype != DType::f32;
  plan.column_tiles = wide && plan.aligned ? 2 : 1;
  const auto num_places = [&](int column_tiles) {
    return kernels::num_slots(op, 8 * column_tiles) * kv.num_kv_heads;
  };
  plan.num_places = num_places(plan.column_tiles);
  PAGED_OPS_REQUIRE(plan.num_places <= INT32_MAX, "query: ", op.num_tokens, " tokens of ", op.num_q_heads,
                    " heads are too many for one launch");

  // Positions and look-ahead must stay within 32 bits.
  constexpr int64_t kMaxTokens = INT32_MAX - 8 * kernels::kChunkTokens;
  plan.capacity = int(std::min(int64_t(op.tables.max_blocks_per_seq) * kv.block_size, kMaxTokens));
  plan.max_chunks = std::max(1, (plan.capacity + kernels::kChunkTokens - 1) / kernels::kChunkTokens);

  const auto padded = [](size_t nbytes) { return (nbytes + 255) / 256 * 256; };
  const size_t states = size_t(op.num_tokens) * op.num_q_heads * plan.max_chunks;
  plan.finished_nbytes = padded(size_t(num_places(1)) * sizeof(int));
  plan.state_offset = plan.finished_nbytes;
  plan.out_offset = plan.state_offset + padded(states * sizeof(float2));
  plan.workspace_nbytes = plan.out_offset + padded(states * kv.value_head_dim * sizeof(float));

  // The workspace is sized without knowing addresses, so that alignment has no say here.
  const bool few_tokens = decode || op.num_tokens <= 8 * num_seqs;
  plan.parallel = plan.max_chunks > 1 &&
                  num_places(wide ? 2 : 1) < (few_tokens ? kWantedCtas : kPrefillCtas) &&
                  plan.workspace_nbytes <= kMaxWorkspaceNbytes;
  if (plan.parallel) {
    const int64_t wanted = (kWantedCtas + plan.num_places - 1) / std::max<int64_t>(plan.num_places, 1);
    plan.splits = int(std::min<int64_t>({wanted, plan.max_chunks, kMaxGridY}));
  } else {
    plan.splits = 1;
    plan.finished_nbytes = plan.workspace_nbytes = 0;
  }
  return plan;
}

}  // namespace paged_ops::launch
