// Attention over a paged KV cache: from the op's parameters to a launch.
#include <type_traits>

#include "core/dispatch.h"
#include "kernels/work_list.cuh"
#include "launch/attention_launch.h"
#include "launch/index_check.h"
#include "launch/ops.h"

namespace paged_ops::launch {

size_t attention_workspace_nbytes(const AttentionParams& p) { return plan_attention(p).workspace_nbytes; }

void run_attention(const AttentionPlan& plan, const AttentionParams& op, cudaStream_t stream) {
  constexpr float kLog2e = 1.44269504088896f;
  kernels::AttentionArgs args{};
  args.op = op;
  args.group = op.num_q_heads / op.kv.num_kv_heads;
  args.capacity = plan.capacity;
  args.block_size = kernels::Divisor(op.kv.block_size);
  args.scale_log2 = op.scale * kLog2e;
  const float soft_cap = op.rules.soft_cap;
  args.ruled_scale = soft_cap == 0.f ? args.scale_log2 : op.scale;
  args.inverse_cap = 1.f / soft_cap;
  args.cap_log2 = soft_cap * kLog2e;
  args.parallel = plan.parallel;
  args.columns = 8 * plan.column_tiles;
  args.slots_per_sequence = kernels::slots_per_sequence(args.group, args.columns);
  args.num_slots = int(plan.num_slots);
  args.max_chunks = plan.max_chunks;
  if (plan.parallel) {
    auto* workspace = static_cast<unsigned char*>(op.workspace);
    args.line = reinterpret_cast<int64_t*>(workspace);
    args.finished = reinterpret_cast<int*>(workspace + plan.finished_offset);
    args.partial_state = reinterpret_cast<float2*>(workspace + plan.state_offset);
    args.partial_out = reinterpret_cast<float*>(workspace + plan.out_offset);
  }
  dispatch<float, f16, bf16>("query", op.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (plan.head_dim > 256) return launch_wide_attention<T>(plan, args, stream);
    if (op.kv.dtype == op.dtype || plan.converted) return launch_attention<T, T>(plan, args, stream);
    if constexpr (!std::is_same_v<T, float>)
      dispatch<f8e4m3, f8e5m2, i8>("key_cache", op.kv.dtype, [&](auto stored) {
        launch_attention<T, typename decltype(stored)::type>(plan, args, stream);
      });
  });
}

void launch_work_list(const kernels::AttentionArgs& args, cudaStream_t stream) {
  simt::launch(kernels::work_list_kernel, 1, kernels::kWorkListThreads, 0, stream, args);
}

void attention(const AttentionParams& p, const Context& context) {
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const AttentionPlan plan = plan_attention(p);
  PAGED_OPS_REQUIRE(p.workspace_nbytes >= plan.workspace_nbytes, "workspace: has ", p.workspace_nbytes,
                    " bytes, wanted at least ", plan.workspace_nbytes);
  if (context.check) {
    check_block_tables(p.tables, p.kv, stream);
    if (p.cu_seqlens_q) check_cu_seqlens_q(p.cu_seqlens_q, p.tables.num_seqs, p.num_tokens, stream);
    if (p.rules.tree_mask) check_tree_widths(p.cu_seqlens_q, p.tables.num_seqs, stream);
  }
  if (p.num_tokens > 0 && plan.num_places > 0) run_attention(plan, p, stream);
}

}  // namespace paged_ops::launch
