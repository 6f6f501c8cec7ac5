// Launching attention by matrix instructions: what the source files for f16 and bf16 queries instantiate.
#pragma once
#include "kernels/attention_fma.cuh"
#include "kernels/attention_mma.cuh"
#include "kernels/split_columns.cuh"
#include "kernels/split_keys.cuh"
#include "launch/attention_launch.h"

namespace paged_ops::launch {

template <class T, class Stored>
void launch_attention_mma(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                          cudaStream_t stream) {
  using kernels::MmaTile, kernels::RowCopy, kernels::Rules, kernels::SplitColumns, kernels::SplitKeys;
  dispatch_head_dim(plan.head_dim, [&](auto dim) {
    constexpr int kHeadDim = decltype(dim)::value;
    using Narrow = MmaTile<T, Stored, kHeadDim, 1>;
    using Wide = MmaTile<T, Stored, kHeadDim, 2>;
    if constexpr (std::is_same_v<T, Stored>)
      if (plan.converted)
        return launch_attention_walk<
            SplitKeys<kernels::FmaTile<T, kHeadDim>, RowCopy::converted, Rules::some>>(plan, args, stream);
    if (!plan.aligned)
      return launch_attention_walk<SplitKeys<Narrow, RowCopy::by_element, Rules::some>>(plan, args, stream);
    const auto launch = [&](auto rules) {
      constexpr Rules kRules = decltype(rules)::value;
      constexpr int kMost = most_column_tiles(dtype_of<Stored>::value, kHeadDim);
      if constexpr (kMost == kSplitColumnTiles)
        if (plan.column_tiles == kSplitColumnTiles)
          return launch_attention_walk<SplitColumns<Wide, kRules>>(plan, args, stream);
      if constexpr (kMost >= 2)
        if (plan.column_tiles == 2)
          return launch_attention_walk<SplitKeys<Wide, RowCopy::asynchronous, kRules>>(plan, args, stream);
      launch_attention_walk<SplitKeys<Narrow, RowCopy::asynchronous, kRules>>(plan, args, stream);
    };
    if constexpr (!is_quantised(dtype_of<Stored>::value))
      if (!plan.ruled) return launch(std::integral_constant<Rules, Rules::none>());
    launch(std::integral_constant<Rules, Rules::some>());
  });
}

}  // namespace paged_ops::launch
