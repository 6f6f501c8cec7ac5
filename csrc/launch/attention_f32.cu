// The attention kernels for f32.
#include "kernels/attention_fma.cuh"
#include "kernels/split_keys.cuh"
#include "launch/attention_launch.h"

namespace paged_ops::launch {

template <>
void launch_attention<float, float>(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                                    cudaStream_t stream) {
  using kernels::FmaTile, kernels::RowCopy, kernels::Rules, kernels::SplitKeys;
  dispatch_head_dim(plan.head_dim, [&](auto dim) {
    using Tile = FmaTile<float, decltype(dim)::value>;
    if (plan.converted)
      launch_attention_walk<SplitKeys<Tile, RowCopy::converted, Rules::some>>(plan, args, stream);
    else if (!plan.aligned)
      launch_attention_walk<SplitKeys<Tile, RowCopy::by_element, Rules::some>>(plan, args, stream);
    else if (plan.ruled)
      launch_attention_walk<SplitKeys<Tile, RowCopy::asynchronous, Rules::some>>(plan, args, stream);
    else
      launch_attention_walk<SplitKeys<Tile, RowCopy::asynchronous, Rules::none>>(plan, args, stream);
  });
}

}  // namespace paged_ops::launch
