// The attention kernels for bf16 queries and caches of int8.
#include "launch/attention_mma.h"

namespace paged_ops::launch {

template <>
void launch_attention<bf16, i8>(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                                cudaStream_t stream) {
  launch_attention_mma<bf16, i8>(plan, args, stream);
}

}  // namespace paged_ops::launch
