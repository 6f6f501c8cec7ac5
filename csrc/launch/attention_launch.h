// Launching the attention kernels of one element type; a source file per type instantiates it.
#pragma once
#include "kernels/attention.cuh"
#include "launch/attention_config.h"
#include "launch/cuda_status.h"

namespace paged_ops::launch {

// Launches the op as `plan` says; its workspace must be as large as the plan's. Any plan gives the same bits.
void run_attention(const AttentionPlan& plan, const AttentionParams& op, cudaStream_t stream);

// T: of the query. Stored: as rows come to shared memory, T or numbers of 8 bits.
template <class T, class Stored>
void launch_attention(const AttentionPlan& plan, const kernels::AttentionArgs& args, cudaStream_t stream);

// The same for heads wider than 256.
template <class T>
void launch_wide_attention(const AttentionPlan& plan, const kernels::AttentionArgs& args,
                           cudaStream_t stream);

// Lays out the work that the CTAs of a parallel launch share.
void launch_work_list(const kernels::AttentionArgs& args, cudaStream_t stream);

template <class Walk>
void launch_attention_walk(const AttentionPlan& plan, kernels::AttentionArgs args, cudaStream_t stream) {
  const auto kernel = kernels::attention_kernel<Walk>;
  constexpr unsigned kThreads = Walk::kWarps * kernels::kWarpSize;
  constexpr size_t kShared = Walk::Shared::kNbytes;
  dim3 grid(unsigned(plan.num_places));
  if (plan.parallel) {
    const simt::Residency chip = simt::residency(kernel, kThreads, kShared);
    grid = parallel_grid(plan.max_ctas(), chip.multiprocessors, chip.ctas_per_multiprocessor);
    args.num_parts = int(grid.x * grid.y);
    launch_work_list(args, stream);
  }
  simt::launch(kernel, grid, dim3(kThreads), kShared, stream, args);
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
