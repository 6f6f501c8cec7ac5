// Launching attention by matrix instructions: what the f16 and bf16 source files instantiate.
#pragma once
#include "kernels/attention_mma.cuh"
#include "launch/attention_launch.h"

namespace paged_ops::launch {

template <class T>
void launch_attention_mma(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                          cudaStream_t stream) {
  using kernels::RowCopy;
  dispatch_head_dim(plan.head_dim, [&](auto dim) {
    constexpr int kHeadDim = decltype(dim)::value;
    const auto launch = [&](auto column_tiles) {
      using Tile = kernels::MmaTile<T, kHeadDim, decltype(column_tiles)::value>;
      if (plan.aligned)
        launch_attention_tile<Tile, RowCopy::asynchronous>(plan, args, stream);
      else
        launch_attention_tile<Tile, RowCopy::by_element>(plan, args, stream);
    };
    if (plan.column_tiles == 1)
      launch(std::integral_constant<int, 1>());
    else
      launch(std::integral_constant<int, 2>());
  });
}

}  // namespace paged_ops::launch
