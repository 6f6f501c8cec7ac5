// The CPU backend's ops, one per Backend entry. Each checks all index values before it writes anything.
#pragma once
#include "params/backend.h"

namespace paged_ops::cpu {

size_t attention_workspace_nbytes(const AttentionParams& params);
void attention(const AttentionParams& params, const Context& context);
void cache_write(const CacheWriteParams& params, const Context& context);
void block_copy(const BlockCopyParams& params, const Context& context);
void block_swap(const BlockSwapParams& params, const Context& context);
void gather(const GatherParams& params, const Context& context);
void merge_states(const MergeStatesParams& params, const Context& context);
void rope_write(const RopeWriteParams& params, const Context& context);

}  // namespace paged_ops::cpu
