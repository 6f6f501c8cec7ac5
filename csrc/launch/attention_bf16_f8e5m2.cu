// The attention kernels for bf16 queries and caches of float8_e5m2.
#include "launch/attention_mma.h"

namespace paged_ops::launch {

template <>
void launch_attention<bf16, f8e5m2>(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                                    cudaStream_t stream) {
  launch_attention_mma<bf16, f8e5m2>(plan, args, stream);
}

}  // namespace paged_ops::launch
