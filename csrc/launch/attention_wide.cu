// The attention kernels for heads wider than 256. One each for calls with rules and without: they are not
// many.
#include "kernels/share_fma.cuh"
#include "kernels/share_mma.cuh"
#include "kernels/split_dims.cuh"
#include "launch/attention_launch.h"

namespace paged_ops::launch {

namespace {

template <class Share, kernels::RowCopy kCopy>
using Walk = kernels::SplitDims<Share, kCopy, kernels::Rules::some>;

}  // namespace

template <class T>
void launch_wide_attention(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                           cudaStream_t stream) {
  using kernels::MmaShare, kernels::RowCopy;
  using Narrow = MmaShare<T, kMaxHeadDim, 1>;
  if (plan.converted)
    launch_attention_walk<Walk<kernels::FmaShare<T, kMaxHeadDim>, RowCopy::converted>>(plan, args, stream);
  else if (!plan.aligned)
    launch_attention_walk<Walk<Narrow, RowCopy::by_element>>(plan, args, stream);
  else if (plan.column_tiles == 1)
    launch_attention_walk<Walk<Narrow, RowCopy::asynchronous>>(plan, args, stream);
  else
    launch_attention_walk<Walk<MmaShare<T, kMaxHeadDim, 2>, RowCopy::asynchronous>>(plan, args, stream);
}

template <>
void launch_wide_attention<float>(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                                  cudaStream_t stream) {
  using kernels::FmaShare, kernels::RowCopy;
  if (plan.converted)
    launch_attention_walk<Walk<FmaShare<float, kMaxHeadDim>, RowCopy::converted>>(plan, args, stream);
  else if (plan.aligned)
    launch_attention_walk<Walk<FmaShare<float, kMaxHeadDim>, RowCopy::asynchronous>>(plan, args, stream);
  else
    launch_attention_walk<Walk<FmaShare<float, kMaxHeadDim>, RowCopy::by_element>>(plan, args, stream);
}

template void launch_wide_attention<f16>(const AttentionPlan&, const kernels::AttentionArgs&, cudaStream_t);
template void launch_wide_attention<bf16>(const AttentionPlan&, const kernels::AttentionArgs&, cudaStream_t);

}  // namespace paged_ops::launch
