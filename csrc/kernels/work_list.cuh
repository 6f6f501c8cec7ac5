// Lays out the work of a batch from lengths that lie on the device, for attention's CTAs to share
// (work_line.cuh).
#pragma once
#include "kernels/attention_work.cuh"
#include "kernels/sight.cuh"
#include "kernels/work_line.cuh"

namespace paged_ops::kernels {

constexpr int kWorkListThreads = 512;

// Writes where each slot begins on the line of work and how long a part of it is, and resets the counters of
// finished chunks. One CTA.
__global__ void __launch_bounds__(kWorkListThreads) work_list_kernel(const AttentionArgs a) {
  constexpr int kWarps = kWorkListThreads / kWarpSize;
  SIMT_SHARED(int64_t[kWarps], warp_sum);
  const int lane = int(threadIdx.x) % kWarpSize, warp = warp_index();
  const int num_kv_heads = a.op.kv.num_kv_heads;
  for (int i = threadIdx.x; i < a.num_slots * num_kv_heads; i += kWorkListThreads) a.finished[i] = 0;

  int64_t done = 0;  // cost of the slots before `first`
  for (int first = 0; first < a.num_slots; first += kWorkListThreads) {
    const int slot = first + int(threadIdx.x);
    int64_t cost = 0;
    if (slot < a.num_slots) {
      const ColumnTile columns = column_tile(a, slot, a.columns, ThreadSearch());
      if (columns.num_columns > 0) {
        const int origin = chunks_origin(Places{a, columns}.first_seen());
        cost = int64_t(num_kv_heads) * place_cost(columns.visible(a, columns.num_columns - 1) - origin);
      }
    }
    int64_t sum = cost;  // of this warp's threads up to this one
#pragma unroll
    for (int o = 1; o < kWarpSize; o <<= 1) {
      const int64_t lower = __shfl_up_sync(kAllLanes, sum, o);
      if (lane >= o) sum += lower;
    }
    if (lane == kWarpSize - 1) warp_sum[warp] = sum;
    __syncthreads();
    int64_t before = done;
    for (int w = 0; w < kWarps; w++) {
      if (w < warp) before += warp_sum[w];
      done += warp_sum[w];
    }
    if (slot < a.num_slots) a.line[slot] = before + sum - cost;
    __syncthreads();  // all have read the sums, which the next round overwrites
  }
  if (threadIdx.x == 0) {
    a.line[a.num_slots] = done;
    a.line[a.num_slots + 1] = part_length(done, a.num_parts);
  }
}

}  // namespace paged_ops::kernels
