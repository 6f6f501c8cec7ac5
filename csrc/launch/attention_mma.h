// Launching attention by matrix instructions: what the f16 and bf16 source files instantiate.
#pragma once
#include "kernels/attention_mma.cuh"
#include "kernels/split_columns.cuh"
#include "kernels/split_keys.cuh"
#include "launch/attention_launch.h"

namespace paged_ops::launch {

template <class T>
void launch_attention_mma(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                          cudaStream_t stream) {
  using kernels::MmaTile, kernels::RowCopy, kernels::Rules, kernels::SplitColumns, kernels::SplitKeys;
  dispatch_head_dim(plan.head_dim, [&](auto dim) {
    constexpr int kHeadDim = decltype(dim)::value;
    using Narrow = MmaTile<T, kHeadDim, 1>;
    using Wide = MmaTile<T, kHeadDim, 2>;
    if (!plan.aligned)
      return launch_attention_walk<SplitKeys<Narrow, RowCopy::by_element, Rules::some>>(plan, args, stream);
    const auto launch = [&](auto rules) {
      constexpr Rules kRules = decltype(rules)::value;
      if constexpr (kHeadDim <= kMaxSplitHeadDim)
        if (plan.column_tiles == kSplitColumnTiles)
          return launch_attention_walk<SplitColumns<Wide, kRules>>(plan, args, stream);
      if (plan.column_tiles == 1)
        launch_attention_walk<SplitKeys<Narrow, RowCopy::asynchronous, kRules>>(plan, args, stream);
      else
        launch_attention_walk<SplitKeys<Wide, RowCopy::asynchronous, kRules>>(plan, args, stream);
    };
    if (plan.ruled)
      launch(std::integral_constant<Rules, Rules::some>());
    else
      launch(std::integral_constant<Rules, Rules::none>());
  });
}

}  // namespace paged_ops::launch
