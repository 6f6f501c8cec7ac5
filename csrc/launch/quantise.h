// The parts of writing a cache that are for quantised ones.
#pragma once
#include "params/rope_write.h"
#include "simt/simt.h"

namespace paged_ops::launch {

void cache_quantise(const CacheWriteParams& p, cudaStream_t stream);
void rope_quantise(const RopeWriteParams& p, cudaStream_t stream);

}  // namespace paged_ops::launch
