// Launching attention by matrix instructions: what the f16 and bf16 source files instantiate.
#pragma once
#include "kernels/attention_mma.cuh"
#include "launch/attention_launch.h"

namespace paged_ops::launch {

template <class T>
void launch_attention_mma(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                          cudaStream_t stream) {
  using kernels::MmaTile, kernels::RowCopy;
  dispatch_head_dim(plan.head_dim, [&](auto dim) {
    constexpr int kHeadDim = decltype(dim)::value;
    if (!plan.aligned)
      launch_attention_tile<MmaTile<T, kHeadDim, 1>, RowCopy::by_element>(plan, args, stream);
    else if (plan.column_tiles == 1)
      launch_attention_tile<MmaTile<T, kHeadDim, 1>, RowCopy::asynchronous>(plan, args, stream);
    else
      launch_attention_tile<MmaTile<T, kHeadDim, 2>, RowCopy::asynchronous>(plan, args, stream);
  });
}

}  // namespace paged_ops::launch
