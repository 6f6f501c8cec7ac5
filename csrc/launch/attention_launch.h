// Launching the attention kernels of one element type; a source file per type instantiates it.
#pragma once
#include "kernels/attention.cuh"
#include "launch/attention_config.h"
#include "launch/cuda_status.h"

namespace paged_ops::launch {

// Launches the op as `plan` says; its workspace must be as large as the plan's. Any plan gives the same bits.
void run_attention(const AttentionPlan& plan, const AttentionParams& op, cudaStream_t stream);

template <class T>
void launch_attention(const AttentionPlan& plan, const kernels::AttentionArgs& args, cudaStream_t stream);

template <class Tile, kernels::RowCopy kCopy>
void launch_attention_tile(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                           cudaStream_t stream) {
  simt::launch(kernels::attention_kernel<Tile, kCopy>, dim3(unsigned(plan.num_places), unsigned(plan.splits)),
               dim3(Tile::kWarps * kernels::kWarpSize),
               kernels::AttentionShared<Tile, kCopy>::nbytes(plan.parallel), stream, args);
}

// Calls f with the kernel's head dim as a constant.
template <class F>
void dispatch_head_dim(int head_dim, F&& f) {
  switch (head_dim) {
    case 64: return f(std::integral_constant<int, 64>());
    case 128: return f(std::integral_constant<int, 128>());
    default: return f(std::integral_constant<int, 256>());
  }
}

}  // namespace paged_ops::launch
