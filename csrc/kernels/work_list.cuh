// How the chunks of a batch are dealt to a fixed number of CTAs, with lengths that only the device knows.
//
// Lay all work on a line: the slots of column tiles in order, the KV heads of each, their chunks, each as
// long as it costs. CTA i of n does the chunks that begin in the i-th of n equal parts of the line. So no CTA
// is without work while others have much, a long sequence spreads over many and short ones share one, and the
// host needs no length. A row's bits do not change: which CTA does a chunk has no say in them.
#pragma once
#include "kernels/column_map.cuh"

namespace paged_ops::kernels {

constexpr int kTilesPerChunk = kChunkTokens / kTileTokens;
// Costs are in tiles. Filling the ring and folding the warps' states take a chunk about as long as so many.
constexpr int kChunkOverhead = 4;
constexpr int kChunkCost = kTilesPerChunk + kChunkOverhead;

// Rows that see nothing have one chunk too, an empty one: it writes them.
PAGED_OPS_HOST_DEVICE inline int num_chunks(int keys) {
  return keys > kChunkTokens ? (keys + kChunkTokens - 1) / kChunkTokens : 1;
}

// Of the chunks of one place, i.e. of one tile of columns and one KV head.
PAGED_OPS_HOST_DEVICE inline int place_cost(int keys) {
  return (keys + kTileTokens - 1) / kTileTokens + num_chunks(keys) * kChunkOverhead;
}

// Where the i-th of n parts of a line begins.
PAGED_OPS_HOST_DEVICE inline int64_t part_begin(int64_t length, int i, int n) { return length * i / n; }

// Which of the chunks of a place begin before `end`, when the place begins at `begin`. All but the last are
// whole, so that chunk c begins at c times the same cost.
PAGED_OPS_HOST_DEVICE inline int chunks_before(int64_t begin, int num_chunks, int64_t end) {
  if (end <= begin) return 0;
  const int64_t chunks = (end - begin + kChunkCost - 1) / kChunkCost;
  return chunks < num_chunks ? int(chunks) : num_chunks;
}

constexpr int kWorkListThreads = 512;

// Writes where each slot begins on the line, and resets the counters of finished chunks. One CTA.
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
      if (columns.num_columns > 0)
        cost = int64_t(num_kv_heads) * place_cost(columns.visible(a, columns.num_columns - 1));
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
    if (slot < a.num_slots) a.slot_begin[slot] = before + sum - cost;
    __syncthreads();  // all have read the sums, which the next round overwrites
  }
  if (threadIdx.x == 0) a.slot_begin[a.num_slots] = done;
}

}  // namespace paged_ops::kernels
