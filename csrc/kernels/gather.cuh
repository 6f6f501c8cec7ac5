// Gathering sequences out of a paged KV cache: first where each begins, then row by row.
#pragma once
#include "kernels/packets.cuh"
#include "kernels/warp.cuh"
#include "params/gather.h"

namespace paged_ops::kernels {

// Lengths are clamped to what a row of the block table has room for.
__device__ __forceinline__ int clamped_length(const BlockTables& tables, int block_size, int sequence) {
  const int64_t capacity = int64_t(tables.max_blocks_per_seq) * block_size;
  return int(min(max(int64_t(tables.seq_lens[sequence]), int64_t(0)), capacity));
}

constexpr int kScanThreads = 256;

// cu_seqlens[s] = the lengths before s, summed. One CTA.
static __global__ void __launch_bounds__(kScanThreads) cu_seqlens_kernel(const GatherParams p) {
  constexpr int kWarps = kScanThreads / kWarpSize;
  SIMT_SHARED(int[kWarps], warp_sums);
  const int lane = int(threadIdx.x) % kWarpSize, warp = warp_index();
  int before = 0;  // the sum of all earlier rounds
  for (int first = 0; first < p.tables.num_seqs; first += kScanThreads) {
    const int sequence = first + int(threadIdx.x);
    const int length = sequence < p.tables.num_seqs ? clamped_length(p.tables, p.kv.block_size, sequence) : 0;
    int sum = length;  // inclusive, within the warp
#pragma unroll
    for (int o = 1; o < kWarpSize; o <<= 1) {
      const int lower = __shfl_up_sync(kAllLanes, sum, o);
      if (lane >= o) sum += lower;
    }
    __syncthreads();  // the last round's sums have been read
    if (lane == kWarpSize - 1) warp_sums[warp] = sum;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      if (w < warp) sum += warp_sums[w];
      total += warp_sums[w];
    }
    if (sequence < p.tables.num_seqs) p.cu_seqlens[sequence] = before + sum - length;
    before += total;
  }
  if (threadIdx.x == 0) p.cu_seqlens[p.tables.num_seqs] = before;
}

// One CTA per output row. blockDim: packets of a row, heads, 2 (K and V); whole warps.
// CacheRows: HeadRows, or PackedRows where a cache is not plain.
template <class Packet, class CacheRows>
__global__ void gather_kernel(const GatherParams p) {
  const int64_t row = blockIdx.x;
  const bool is_key = threadIdx.z == 0;
  const HeadRows to{static_cast<unsigned char*>(is_key ? p.key : p.value) +
                        row * (is_key ? p.key_stride_token : p.value_stride_token),
                    is_key ? p.key_stride_head : p.value_stride_head};
  const int nbytes = int(row_nbytes(p.kv.dtype, is_key ? p.kv.key_head_dim : p.kv.value_head_dim));
  const int num_seqs = p.tables.num_seqs;
  if (row >= p.cu_seqlens[num_seqs]) return zero_heads<Packet>(to, p.kv.num_kv_heads, nbytes);

  const int lane = int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarpSize;
  const int sequence = WarpSearch{lane}(num_seqs, row, [&](int s) { return p.cu_seqlens[s]; });
  const int token = int(row) - p.cu_seqlens[sequence];
  const int64_t block = p.tables.block_ids[sequence * p.tables.stride + token / p.kv.block_size];
  const CacheView& cache = is_key ? p.kv.key : p.kv.value;
  const CacheRows from = cache_rows<CacheRows>(cache, block, token % p.kv.block_size, p.kv.dtype);
  copy_heads<Packet>(to, from, p.kv.num_kv_heads, nbytes);
}

}  // namespace paged_ops::kernels
