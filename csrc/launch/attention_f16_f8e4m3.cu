// The attention kernels for f16 queries and caches of float8_e4m3fn.
#include "launch/attention_mma.h"

namespace paged_ops::launch {

template <>
void launch_attention<f16, f8e4m3>(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                                   cudaStream_t stream) {
  launch_attention_mma<f16, f8e4m3>(plan, args, stream);
}

}  // namespace paged_ops::launch
