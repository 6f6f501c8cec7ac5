// Which rows a CTA of attention works on: the columns of its matrix products.
//
// For one KV head of one sequence, a column is a pair (query token, query head of the group), numbered token
// by token: column c is token c / group, head c % group. All of them meet the same keys, so a tile of
// consecutive columns shares every byte of K and V that it reads. Decode is the case of one token.
#pragma once
#include "kernels/attention_args.h"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// Tiles of a batch are numbered without a prefix sum: sequence s has the slots from
// floor(cu_seqlens_q[s] * group / columns) + s on. That leaves room for its ceil(tokens * group / columns)
// tiles, at the price of at most one idle slot per sequence, and increases strictly with s.
PAGED_OPS_HOST_DEVICE inline int64_t first_slot(int64_t first_token, int64_t sequence, int group,
                                                int columns) {
  return first_token * group / columns + sequence;
}

// In decode, where every sequence has one token.
PAGED_OPS_HOST_DEVICE inline int slots_per_sequence(int group, int columns) {
  return (group + columns - 1) / columns;
}

// Slots of the whole batch. Rows beyond cu_seqlens_q[num_seqs] are one more sequence, of length 0.
PAGED_OPS_HOST_DEVICE inline int64_t num_slots(const AttentionParams& op, int columns) {
  const int group = op.num_q_heads / op.kv.num_kv_heads;
  if (op.cu_seqlens_q == nullptr) return int64_t(op.tables.num_seqs) * slots_per_sequence(group, columns);
  return first_slot(op.num_tokens, op.tables.num_seqs, group, columns) + 1;
}

struct ColumnTile {
  int sequence;
  int first_row;     // index in `query` of the sequence's first token
  int num_tokens;    // query tokens of the sequence
  int first_column;  // of this tile, among the sequence's num_tokens * group
  int num_columns;   // at most `columns`; 0 = nothing to do
  int length;        // tokens in the cache

  // How many keys column `c` of the tile sees: those at positions [0, visible).
  __device__ __forceinline__ int visible(const AttentionArgs& a, int c) const {
    if (!a.op.causal) return length;
    return max(0, length - num_tokens + (first_column + c) / a.group + 1);
  }
  // The columns from `first` on, at most `count`.
  __device__ __forceinline__ ColumnTile part(int first, int count) const {
    ColumnTile tile = *this;
    tile.first_column += first;
    tile.num_columns = max(0, min(count, num_columns - first));
    return tile;
  }
};

// Slot `slot` of tiles of `columns` columns. `search` finds the sequence: WarpSearch where a whole warp asks
// for one slot, ThreadSearch where each thread asks for its own.
template <class Search>
__device__ __forceinline__ ColumnTile column_tile(const AttentionArgs& a, int slot, int columns,
                                                  Search search) {
  const AttentionParams& op = a.op;
  const int num_seqs = op.tables.num_seqs;
  ColumnTile tile;
  int first_column_slot;
  if (op.cu_seqlens_q == nullptr) {
    tile.sequence = slot / a.slots_per_sequence;
    tile.first_row = tile.sequence;
    tile.num_tokens = 1;
    first_column_slot = tile.sequence * a.slots_per_sequence;
  } else {
    const auto first_row = [&](int s) {
      return s > num_seqs ? op.num_tokens : min(max(op.cu_seqlens_q[s], 0), op.num_tokens);
    };
    const auto first = [&](int s) { return first_slot(first_row(s), s, a.group, columns); };
    tile.sequence = search(num_seqs + 1, slot, first);
    tile.first_row = first_row(tile.sequence);
    tile.num_tokens = first_row(tile.sequence + 1) - tile.first_row;
    first_column_slot = int(first(tile.sequence));
  }
  tile.first_column = (slot - first_column_slot) * columns;
  tile.num_columns = max(0, min(columns, tile.num_tokens * a.group - tile.first_column));
  tile.length = tile.sequence < num_seqs ? min(max(op.tables.seq_lens[tile.sequence], 0), a.capacity) : 0;
  return tile;
}

// A row of query, output and LSE.
struct Row {
  int token, head;
  __device__ __forceinline__ int64_t index(const AttentionArgs& a) const {
    return int64_t(token) * a.op.num_q_heads + head;
  }
};

__device__ __forceinline__ Row row_of(const AttentionArgs& a, const ColumnTile& tile, int kv_head, int c) {
  const int column = tile.first_column + c;
  return {tile.first_row + column / a.group, kv_head * a.group + column % a.group};
}

}  // namespace paged_ops::kernels
