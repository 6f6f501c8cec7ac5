// Gathering sequences out of a paged KV cache: first where each begins, then row by row.
#pragma once
#include "kernels/packets.cuh"
#include "kernels/warp.cuh"
#include "params/gather.h"
#include "simt/ptx.h"

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

// Where the token of output row `row` is; block < 0 where no token belongs. The whole CTA asks.
struct GatherPlace {
  int64_t block, offset;
};
__device__ __forceinline__ GatherPlace gather_place(const GatherParams& p, int64_t row) {
  const int num_seqs = p.tables.num_seqs;
  if (row >= p.cu_seqlens[num_seqs]) return {-1, 0};
  const int lane = int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarpSize;
  const int sequence = WarpSearch{lane}(num_seqs, row, [&](int s) { return p.cu_seqlens[s]; });
  const int token = int(row) - p.cu_seqlens[sequence];
  return {p.tables.block_ids[sequence * p.tables.stride + token / p.kv.block_size], token % p.kv.block_size};
}

// One CTA per output row. blockDim: packets of a row, heads, 2 (K and V); whole warps. Calls
// f(rows of the output, bytes of each, the token's place, of K) for what the thread has to do with.
template <class Packet, class F>
__device__ __forceinline__ void gather_rows(const GatherParams& p, F f) {
  const int64_t row = blockIdx.x;
  const bool is_key = threadIdx.z == 0;
  const HeadRows to{static_cast<unsigned char*>(is_key ? p.key : p.value) +
                        row * (is_key ? p.key_stride_token : p.value_stride_token),
                    is_key ? p.key_stride_head : p.value_stride_head};
  const int nbytes = int(row_nbytes(p.dtype, is_key ? p.kv.key_head_dim : p.kv.value_head_dim));
  const GatherPlace place = gather_place(p, row);
  if (place.block < 0) return zero_heads<Packet>(to, p.kv.num_kv_heads, nbytes);
  f(to, nbytes, place, is_key);
}

// CacheRows: HeadRows, or PackedRows where a cache is not plain.
template <class Packet, class CacheRows>
__global__ void gather_kernel(const GatherParams p) {
  gather_rows<Packet>(p, [&](HeadRows to, int nbytes, GatherPlace place, bool is_key) {
    const CacheView& cache = is_key ? p.kv.key : p.kv.value;
    copy_heads<Packet>(to, cache_rows<CacheRows>(cache, place.block, place.offset, p.kv.dtype),
                       p.kv.num_kv_heads, nbytes);
  });
}

__device__ __forceinline__ float scale_of(const ScaleView& view, int64_t block, int64_t offset, int head,
                                          int element) {
  if (!view.data) return view.uniform;
  const auto* row = reinterpret_cast<const unsigned char*>(view.data) + block * view.stride_block +
                    offset * view.stride_token + head * view.stride_head;
  const int64_t group = view.group ? element / view.group : 0;
  return *reinterpret_cast<const float*>(row + group * view.stride_group);
}

// The same of a quantised cache of Q, plain or not: numbers times their scales in f32, rounded to T.
template <class T, class Q>
__global__ void gather_scaled_kernel(const GatherParams p) {
  constexpr int kNumbers = numbers_per_element(dtype_of<Q>::value);
  struct Packet {
    T element[kNumbers];
  };
  gather_rows<Packet>(p, [&](HeadRows to, int nbytes, GatherPlace place, bool is_key) {
    const CacheView& cache = is_key ? p.kv.key : p.kv.value;
    const PackedRows from = cache_rows<PackedRows>(cache, place.block, place.offset, p.kv.dtype);
    const ScaleView& scales = is_key ? p.kv.key_scale : p.kv.value_scale;
    write_heads<Packet>(to, p.kv.num_kv_heads, nbytes, [&](int head, int i) {
      const Q x = *(from.template row<const Q>(head) + i);
      const float scale = scale_of(scales, place.block, place.offset, head, i * kNumbers);
      Packet out;
      if constexpr (kNumbers == 1) {
        out.element[0] = ptx::from_float<T>(portable::to_float(x) * scale);
      } else {
        out.element[0] = ptx::from_float<T>(portable::first_of(x) * scale);
        out.element[1] = ptx::from_float<T>(portable::second_of(x) * scale);
      }
      return out;
    });
  });
}

}  // namespace paged_ops::kernels
