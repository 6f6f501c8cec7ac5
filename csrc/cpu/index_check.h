// Checks of what only the tensors' contents tell: lengths, block ids, slots. Nothing is written before.
#pragma once
#include "params/attention.h"
#include "params/cache_write.h"
#include "params/rope_write.h"

namespace paged_ops::cpu {

// seq_lens within the tables' width, and every used entry of block_tables a block of the cache.
void check_block_tables(const BlockTables& tables, const PagedKV& kv);

// cu_seqlens_q starts at 0, does not fall, and ends within num_tokens.
void check_cu_seqlens_q(const int32_t* cu_seqlens_q, int32_t num_seqs, int32_t num_tokens);

// No sequence has more query tokens than a tree mask has bits.
void check_tree_widths(const int32_t* cu_seqlens_q, int32_t num_seqs);

// Every slot that is not negative lies in the cache.
void check_slot_mapping(const int64_t* slot_mapping, int32_t num_tokens, const PagedKV& kv);

// block_pairs [num_pairs, 2]: sources and destinations in range and no destination twice; with
// `in_place` no block is both a source and a destination.
void check_block_pairs(const int64_t* block_pairs, int64_t num_pairs, int64_t source_num_blocks,
                       int64_t destination_num_blocks, bool in_place);

// Every position has a row of cosines and sines.
void check_positions(const RopeWriteParams& p);

}  // namespace paged_ops::cpu
