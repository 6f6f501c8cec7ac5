// The host entry points of the CUDA backend, one per op; params/backend.h says what each does.
#pragma once
#include "params/backend.h"

namespace paged_ops::launch {

size_t attention_workspace_nbytes(const AttentionParams& p);
void attention(const AttentionParams& p, const Context& context);
void cache_write(const CacheWriteParams& p, const Context& context);
void block_copy(const BlockCopyParams& p, const Context& context);
void block_swap(const BlockSwapParams& p, const Context& context);
void gather(const GatherParams& p, const Context& context);
void merge_states(const MergeStatesParams& p, const Context& context);
void rope_write(const RopeWriteParams& p, const Context& context);

}  // namespace paged_ops::launch
