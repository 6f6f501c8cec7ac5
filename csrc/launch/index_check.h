// Checks of what only the device can see, when the caller asks for them. They cost a synchronisation.
#pragma once
#include "core/paged_kv.h"
#include "params/block_copy.h"
#include "params/cache_write.h"
#include "params/rope_write.h"
#include "simt/simt.h"

namespace paged_ops::launch {

// Each throws ValueError that names the first offender, before anything has been written.
void check_block_tables(const BlockTables& tables, const PagedKV& kv, cudaStream_t stream);
void check_cu_seqlens_q(const int32_t* cu_seqlens_q, int num_seqs, int num_tokens, cudaStream_t stream);
void check_tree_widths(const int32_t* cu_seqlens_q, int num_seqs, cudaStream_t stream);
void check_slot_mapping(const CacheWriteParams& p, cudaStream_t stream);
void check_block_pairs(const BlockCopyParams& p, cudaStream_t stream);
void check_positions(const RopeWriteParams& p, cudaStream_t stream);

}  // namespace paged_ops::launch
