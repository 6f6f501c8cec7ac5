// The attention kernels for bf16.
#include "launch/attention_mma.h"

namespace paged_ops::launch {

template <>
void launch_attention<bf16, bf16>(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                                  cudaStream_t stream) {
  launch_attention_mma<bf16, bf16>(plan, args, stream);
}

}  // namespace paged_ops::launch
