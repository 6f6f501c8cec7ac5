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
        turned[x / kWidth].element[x % kWidth] =
            ptx::from_float<T>(__fmaf_rn(from_x, cosine, -(from_y * sine)));
        turned[y / kWidth].element[y % kWidth] = ptx::from_float<T>(__fmaf_rn(from_y, cosine, from_x * sine));
      }
      const auto target = to.template row<T>(head);
      *reinterpret_cast<Packet*>(target + at[0]) = turned[0];
      *reinterpret_cast<Packet*>(target + at[1]) = turned[1];
    }
}

// blockDim: pairs of a row, heads, 2 (queries; keys and values). CacheRows: HeadRows, or PackedRows where a
// cache is not plain.
template <class T, int kWidth, bool kInterleaved, class CacheRows>
__global__ void rope_write_kernel(const RopeWriteParams p) {
  using Packet = RopePacket<T, kWidth>;
  const CacheWriteParams& w = p.write;
  const int64_t token = blockIdx.x;
  // A position out of range is turned by the nearest: nothing is read outside, and the result is undefined.
  int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[token]
                                      : static_cast<const int32_t*>(p.positions)[token];
  position = position < 0 ? 0 : position < p.max_position ? position : p.max_position - 1;
  const float* cos_sin = p.cos_sin + position * p.cos_sin_stride;
  const int half = p.rotary_dim / 2;
  const int rotated_nbytes = p.rotary_dim * int(sizeof(T));
  const int rest_nbytes = w.kv.key_head_dim * int(sizeof(T)) - rotated_nbytes;
  const auto rows = [&](const void* base, int64_t stride_token, int64_t stride_head) {
    return HeadRows{static_cast<unsigned char*>(const_cast<void*>(base)) + token * stride_token, stride_head};
  };
  const auto turn = [&](auto to, HeadRows from, int num_heads) {
    rotate_heads<T, kWidth, kInterleaved>(to, from, num_heads, half, cos_sin);
    if (to.at == from.at) return;
    copy_heads<Packet>(to.behind(rotated_nbytes), from.behind(rotated_nbytes), num_heads, rest_nbytes);
  };
  if (threadIdx.z == 0) {
    turn(rows(p.query_out, p.out_stride_token, p.out_stride_head),
         rows(p.query, p.query_stride_token, p.query_stride_head), p.num_q_heads);
    return;
  }
  const int64_t slot = token < w.num_tokens ? w.slot_mapping[token] : -1;
  if (slot < 0 || slot >= w.kv.num_blocks * w.kv.block_size) return;  // skipped, or nowhere
  const int64_t block = slot / w.kv.block_size, offset = slot % w.kv.block_size;
  const auto place = [&](const CacheView& cache) {
    return cache_rows<CacheRows>(cache, block, offset, w.kv.dtype);
  };
  turn(place(w.kv.key), rows(w.key, w.key_stride_token, w.key_stride_head), w.kv.num_kv_heads);
  copy_heads<Packet>(place(w.kv.value), rows(w.value, w.value_stride_token, w.value_stride_head),
                     w.kv.num_kv_heads, w.kv.value_head_dim * int(sizeof(T)));
}

}  // namespace paged_ops::kernels
