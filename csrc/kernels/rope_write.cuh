// Rotating queries and keys while new keys and values are written: one CTA per token.
#pragma once
#include "kernels/packets.cuh"
#include "params/rope_write.h"
#include "simt/ptx.h"

namespace paged_ops::kernels {

template <class T, int kWidth>
struct alignas(kWidth * sizeof(T)) RopePacket {
  T element[kWidth];
};

__device__ __forceinline__ float rotated_x(float x, float y, float cosine, float sine) {
  return __fmaf_rn(x, cosine, -(y * sine));
}
__device__ __forceinline__ float rotated_y(float x, float y, float cosine, float sine) {
  return __fmaf_rn(y, cosine, x * sine);
}

// The cosines of a token's position and, behind them, the sines. A position out of range is turned by the
// nearest: nothing is read outside, and the result is undefined.
__device__ __forceinline__ const float* cos_sin_of(const RopeWriteParams& p, int64_t token) {
  int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[token]
                                      : static_cast<const int32_t*>(p.positions)[token];
  position = position < 0 ? 0 : position < p.max_position ? position : p.max_position - 1;
  return p.cos_sin + position * p.cos_sin_stride;
}

// The thread's share of the rotation of a token's heads: kWidth pairs at a time, in two packets. All that a
// packet needs is read by the thread that writes it, so that `to` may be `from`.
template <class T, int kWidth, bool kInterleaved, class Rows>
__device__ __forceinline__ void rotate_heads(Rows to, HeadRows from, int num_heads, int half,
                                             const float* cos_sin) {
  using Packet = RopePacket<T, kWidth>;
  for (int head = threadIdx.y; head < num_heads; head += blockDim.y)
    for (int i = threadIdx.x * kWidth; i < half; i += blockDim.x * kWidth) {
      const int at[2] = {kInterleaved ? 2 * i : i, kInterleaved ? 2 * i + kWidth : half + i};
      const T* source = from.row<const T>(head);
      const Packet packets[2] = {*reinterpret_cast<const Packet*>(source + at[0]),
                                 *reinterpret_cast<const Packet*>(source + at[1])};
      Packet turned[2];
#pragma unroll
      for (int k = 0; k < kWidth; k++) {
        // Pair k: neighbours in the two packets as one row, or element k of each.
        const int x = kInterleaved ? 2 * k : k, y = kInterleaved ? 2 * k + 1 : kWidth + k;
        const float cosine = cos_sin[i + k], sine = cos_sin[half + i + k];
        const float from_x = ptx::to_float(packets[x / kWidth].element[x % kWidth]);
        const float from_y = ptx::to_float(packets[y / kWidth].element[y % kWidth]);
        turned[x / kWidth].element[x % kWidth] = ptx::from_float<T>(rotated_x(from_x, from_y, cosine, sine));
        turned[y / kWidth].element[y % kWidth] = ptx::from_float<T>(rotated_y(from_x, from_y, cosine, sine));
      }
      const auto target = to.template row<T>(head);
      *reinterpret_cast<Packet*>(target + at[0]) = turned[0];
      *reinterpret_cast<Packet*>(target + at[1]) = turned[1];
    }
}

__device__ __forceinline__ HeadRows rows_of(const void* base, int64_t stride_token, int64_t stride_head,
                                            int64_t token) {
  return {static_cast<unsigned char*>(const_cast<void*>(base)) + token * stride_token, stride_head};
}

// The same of whole rows, whose dims behind the rotated ones stay.
template <class T, int kWidth, bool kInterleaved, class Rows>
__device__ __forceinline__ void turn_heads(const RopeWriteParams& p, Rows to, HeadRows from, int num_heads,
                                           const float* cos_sin) {
  rotate_heads<T, kWidth, kInterleaved>(to, from, num_heads, p.rotary_dim / 2, cos_sin);
  if (to.at == from.at) return;
  const int rotated_nbytes = p.rotary_dim * int(sizeof(T));
  copy_heads<RopePacket<T, kWidth>>(to.behind(rotated_nbytes), from.behind(rotated_nbytes), num_heads,
                                    p.write.kv.key_head_dim * int(sizeof(T)) - rotated_nbytes);
}
template <class T, int kWidth, bool kInterleaved>
__device__ __forceinline__ void turn_queries(const RopeWriteParams& p, int64_t token, const float* cos_sin) {
  turn_heads<T, kWidth, kInterleaved>(p, rows_of(p.query_out, p.out_stride_token, p.out_stride_head, token),
                                      rows_of(p.query, p.query_stride_token, p.query_stride_head, token),
                                      p.num_q_heads, cos_sin);
}

// blockDim: pairs of a row, heads, 2 (queries; keys and values). CacheRows: HeadRows, or PackedRows where a
// cache is not plain.
template <class T, int kWidth, bool kInterleaved, class CacheRows>
__global__ void rope_write_kernel(const RopeWriteParams p) {
  const CacheWriteParams& w = p.write;
  const int64_t token = blockIdx.x;
  const float* cos_sin = cos_sin_of(p, token);
  if (threadIdx.z == 0) return turn_queries<T, kWidth, kInterleaved>(p, token, cos_sin);
  const int64_t slot = token < w.num_tokens ? w.slot_mapping[token] : -1;
  if (slot < 0 || slot >= w.kv.num_blocks * w.kv.block_size) return;  // skipped, or nowhere
  const int64_t block = slot / w.kv.block_size, offset = slot % w.kv.block_size;
  const auto place = [&](const CacheView& cache) {
    return cache_rows<CacheRows>(cache, block, offset, w.kv.dtype);
  };
  turn_heads<T, kWidth, kInterleaved>(p, place(w.kv.key),
                                      rows_of(w.key, w.key_stride_token, w.key_stride_head, token),
                                      w.kv.num_kv_heads, cos_sin);
  copy_heads<RopePacket<T, kWidth>>(place(w.kv.value),
                                    rows_of(w.value, w.value_stride_token, w.value_stride_head, token),
                                    w.kv.num_kv_heads, w.kv.value_head_dim * int(sizeof(T)));
}

}  // namespace paged_ops::kernels
