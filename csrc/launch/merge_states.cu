// Merging two partial attention results.
#include "kernels/merge_states.cuh"

#include "core/dispatch.h"
#include "launch/cuda_status.h"
#include "launch/ops.h"
#include "launch/packet_width.h"

namespace paged_ops::launch {

void merge_states(const MergeStatesParams& p, const Context& context) {
  if (p.num_tokens == 0 || p.num_heads == 0) return;
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  constexpr int kWidth = 4;
  PacketWidth bits;
  for (const void* tensor : {p.out_a, p.out_b, static_cast<const void*>(p.out)}) bits.address(tensor);
  for (const int64_t stride : {p.a_stride_token, p.a_stride_head, p.b_stride_token, p.b_stride_head,
                               p.out_stride_token, p.out_stride_head})
    bits.nbytes(stride);
  const bool wide = bits.divisible_by(kWidth * itemsize(p.dtype)) && p.head_dim % kWidth == 0;
  dispatch<float, f16, bf16>("out_a", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    simt::launch(wide ? kernels::merge_states_kernel<T, kWidth> : kernels::merge_states_kernel<T, 1>,
                 unsigned(p.num_tokens), kernels::kMergeWarps * kernels::kWarpSize, 0, stream, p);
  });
}

}  // namespace paged_ops::launch
