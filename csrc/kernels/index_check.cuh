// Finding the first bad index among what only the device can see: lengths, block ids, slots, block pairs.
#pragma once
#include "core/paged_kv.h"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// Where the smallest position of an offender is left; kNoneBad when there is none.
using FirstBad = unsigned long long;
constexpr FirstBad kNoneBad = ~0ull;

__device__ __forceinline__ void report(FirstBad* first, int64_t position) {
  atomicMin(first, FirstBad(position));
}

// One thread per value, grid-stride: values[i] must lie in [low, high).
template <class Int>
__global__ void check_range_kernel(const Int* values, int64_t count, int64_t low, int64_t high,
                                   FirstBad* first) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * blockDim.x)
    if (values[i] < low || values[i] >= high) report(first, i);
}

// One warp per sequence, grid-stride: its used entries must be blocks. Positions count
// [num_seqs, max_blocks_per_seq].
static __global__ void check_block_ids_kernel(const BlockTables tables, int block_size, int64_t num_blocks,
                                              FirstBad* first) {
  const int lane = int(threadIdx.x) % kWarpSize, num_warps = int(blockDim.x) / kWarpSize;
  for (int sequence = int(blockIdx.x) * num_warps + warp_index(); sequence < tables.num_seqs;
       sequence += int(gridDim.x) * num_warps) {
    const int64_t length = max(tables.seq_lens[sequence], 0);
    const int64_t used = min((length + block_size - 1) / block_size, int64_t(tables.max_blocks_per_seq));
    for (int64_t i = lane; i < used; i += kWarpSize) {
      const int32_t block = tables.block_ids[sequence * tables.stride + i];
      if (block < 0 || block >= num_blocks) report(first, sequence * int64_t(tables.max_blocks_per_seq) + i);
    }
  }
}

// cu_seqlens_q [num_seqs + 1] starts at 0, never falls and ends within num_tokens.
static __global__ void check_cu_seqlens_q_kernel(const int32_t* cu_seqlens_q, int num_seqs, int num_tokens,
                                                 FirstBad* first) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= num_seqs; i += gridDim.x * blockDim.x) {
    const int value = cu_seqlens_q[i];
    if ((i == 0 ? value != 0 : value < cu_seqlens_q[i - 1]) || value > num_tokens) report(first, i);
  }
}

// No sequence has more than `most` query tokens.
static __global__ void check_widths_kernel(const int32_t* cu_seqlens_q, int num_seqs, int most,
                                           FirstBad* first) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_seqs; i += gridDim.x * blockDim.x)
    if (cu_seqlens_q[i + 1] - cu_seqlens_q[i] > most) report(first, i);
}

// One thread per pair: its destination is no earlier pair's destination, and its source no other pair's, but
// for pairs of a block with itself, which do nothing.
// Quadratic, and only run when checks are asked for.
static __global__ void check_distinct_kernel(const int64_t* block_pairs, int64_t num_pairs, FirstBad* twice,
                                             FirstBad* both) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= num_pairs) return;
  for (int64_t j = 0; j < num_pairs; j++) {
    const int64_t destination = block_pairs[2 * j + 1];
    if (j < i && destination == block_pairs[2 * i + 1]) report(twice, i);
    if (destination == block_pairs[2 * i] && destination != block_pairs[2 * j]) report(both, i);
  }
}

}  // namespace paged_ops::kernels
