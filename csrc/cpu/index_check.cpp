// Index checks. Each first looks for any fault in one plain pass, and only then for the one to report.
#include "cpu/index_check.h"

#include <algorithm>
#include <vector>

#include "core/check.h"

namespace paged_ops::cpu {

void check_block_tables(const BlockTables& tables, const PagedKV& kv) {
  const int64_t capacity = int64_t(tables.max_blocks_per_seq) * kv.block_size;
  for (int32_t seq = 0; seq < tables.num_seqs; seq++) {
    const int64_t seq_len = tables.seq_lens[seq];
    PAGED_OPS_REQUIRE(seq_len >= 0 && seq_len <= capacity, "seq_lens[", seq, "] = ", seq_len,
                      ": wanted 0 <= length <= ", capacity, " (", tables.max_blocks_per_seq,
                      " blocks per sequence of ", kv.block_size, " tokens)");
    const int64_t num_used = (seq_len + kv.block_size - 1) / kv.block_size;
    const int32_t* block_ids = tables.block_ids + seq * tables.stride;
    const auto bad = [&](int32_t block) { return block < 0 || block >= kv.num_blocks; };
    bool any = false;
    for (int64_t i = 0; i < num_used; i++) any |= bad(block_ids[i]);
    if (!any) continue;
    const int64_t at = std::find_if(block_ids, block_ids + num_used, bad) - block_ids;
    fail("block_tables[", seq, ", ", at, "] = ", block_ids[at], ": wanted 0 <= block < ", kv.num_blocks);
  }
}

void check_cu_seqlens_q(const int32_t* cu_seqlens_q, int32_t num_seqs, int32_t num_tokens) {
  PAGED_OPS_REQUIRE(cu_seqlens_q[0] == 0, "cu_seqlens_q[0] = ", cu_seqlens_q[0], ": wanted 0");
  for (int32_t seq = 0; seq < num_seqs; seq++)
    PAGED_OPS_REQUIRE(cu_seqlens_q[seq + 1] >= cu_seqlens_q[seq], "cu_seqlens_q[", seq + 1,
                      "] = ", cu_seqlens_q[seq + 1], ": wanted at least cu_seqlens_q[", seq,
                      "] = ", cu_seqlens_q[seq]);
  PAGED_OPS_REQUIRE(cu_seqlens_q[num_seqs] <= num_tokens, "cu_seqlens_q[", num_seqs,
                    "] = ", cu_seqlens_q[num_seqs], ": wanted at most ", num_tokens, ", the tokens of query");
}

void check_tree_widths(const int32_t* cu_seqlens_q, int32_t num_seqs) {
  for (int32_t seq = 0; seq < num_seqs; seq++) {
    const int32_t num_tokens = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq];
    PAGED_OPS_REQUIRE(num_tokens <= kMaxTreeTokens, "tree_mask: sequence ", seq, " has ", num_tokens,
                      " query tokens, wanted at most ", kMaxTreeTokens, ", the bits of a mask");
  }
}

void check_slot_mapping(const int64_t* slot_mapping, int32_t num_tokens, const PagedKV& kv) {
  const int64_t num_slots = kv.num_blocks * kv.block_size;
  for (int32_t i = 0; i < num_tokens; i++)
    PAGED_OPS_REQUIRE(slot_mapping[i] < num_slots, "slot_mapping[", i, "] = ", slot_mapping[i],
                      ": wanted slot < ", num_slots, " (", kv.num_blocks, " blocks of ", kv.block_size,
                      " tokens), or negative to skip");
}

void check_block_pairs(const int64_t* block_pairs, int64_t num_pairs, int64_t source_num_blocks,
                       int64_t destination_num_blocks, bool in_place) {
  const int64_t num_blocks[2] = {source_num_blocks, destination_num_blocks};
  for (int64_t i = 0; i < num_pairs; i++)
    for (int side = 0; side < 2; side++) {
      const int64_t block = block_pairs[2 * i + side];
      PAGED_OPS_REQUIRE(block >= 0 && block < num_blocks[side], "block_pairs[", i, ", ", side, "] = ", block,
                        ": wanted 0 <= ", side ? "destination" : "source", " block < ", num_blocks[side]);
    }

  std::vector<int64_t> by_destination(num_pairs);
  for (int64_t i = 0; i < num_pairs; i++) by_destination[i] = i;
  const auto destination = [&](int64_t i) { return block_pairs[2 * i + 1]; };
  std::stable_sort(by_destination.begin(), by_destination.end(),
                   [&](int64_t a, int64_t b) { return destination(a) < destination(b); });
  for (int64_t i = 1; i < num_pairs; i++) {
    const int64_t a = by_destination[i - 1], b = by_destination[i];
    PAGED_OPS_REQUIRE(destination(a) != destination(b), "block_pairs[", b, ", 1] = ", destination(b),
                      ": is the destination of block_pairs[", a, "] too; wanted each destination once");
  }
  if (!in_place) return;
  for (int64_t i = 0; i < num_pairs; i++) {
    const int64_t source = block_pairs[2 * i];
    const auto found =
        std::lower_bound(by_destination.begin(), by_destination.end(), source,
                         [&](int64_t pair, int64_t block) { return destination(pair) < block; });
    const bool chained = found != by_destination.end() && destination(*found) == source &&
                         block_pairs[2 * *found] != source;  // a pair of a block with itself does nothing
    PAGED_OPS_REQUIRE(!chained, "block_pairs[", i, ", 0] = ", source, ": is the destination of block_pairs[",
                      *found, "]; wanted no block both as source and as destination in one call");
  }
}

void check_positions(const RopeWriteParams& p) {
  for (int32_t i = 0; i < p.num_tokens; i++) {
    const int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[i]
                                              : static_cast<const int32_t*>(p.positions)[i];
    PAGED_OPS_REQUIRE(position >= 0 && position < p.max_position, "positions[", i, "] = ", position,
                      ": wanted 0 <= position < ", p.max_position, ", the rows of cos_sin_cache");
  }
}

}  // namespace paged_ops::cpu
