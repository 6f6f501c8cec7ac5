// Rotating queries and keys while new keys and values are written.
#include "kernels/rope_write.cuh"

#include <algorithm>
#include <type_traits>

#include "core/dispatch.h"
#include "launch/cuda_status.h"
#include "launch/index_check.h"
#include "launch/ops.h"
#include "launch/packet_width.h"
#include "launch/quantise.h"

namespace paged_ops::launch {

void rope_write(const RopeWriteParams& p, const Context& context) {
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const CacheWriteParams& w = p.write;
  if (context.check) {
    if (w.num_tokens > 0) check_slot_mapping(w, stream);
    check_positions(p, stream);
  }
  if (is_quantised(w.kv.dtype)) return rope_quantise(p, stream);
  constexpr int kWidth = 4;
  const int64_t item = itemsize(w.dtype), half = p.rotary_dim / 2;
  PacketWidth bits;
  bits.cache(w.kv.key, w.kv.dtype).cache(w.kv.value, w.kv.dtype);
  for (const void* tensor : {p.query, static_cast<const void*>(p.query_out), w.key, w.value})
    bits.address(tensor);
  for (const int64_t nbytes :
       {p.query_stride_token, p.query_stride_head, p.out_stride_token, p.out_stride_head, w.key_stride_token,
        w.key_stride_head, w.value_stride_token, w.value_stride_head, half * item, w.kv.key_head_dim * item,
        w.kv.value_head_dim * item})
    bits.nbytes(nbytes);
  // Into packs, element by element.
  const bool plain = is_plain(w.kv), wide = plain && bits.divisible_by(int(kWidth * item));
  const int packets = std::max(p.rotary_dim / 2, w.kv.value_head_dim) / (wide ? kWidth : 1);
  const dim3 threads = head_threads(packets, std::max(p.num_q_heads, w.kv.num_kv_heads));
  dispatch<float, f16, bf16>("key", w.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    using kernels::HeadRows, kernels::PackedRows, kernels::rope_write_kernel;
    const auto choose = [&](auto interleaved) {
      constexpr bool kInterleaved = decltype(interleaved)::value;
      return !plain ? rope_write_kernel<T, 1, kInterleaved, PackedRows>
             : wide ? rope_write_kernel<T, kWidth, kInterleaved, HeadRows>
                    : rope_write_kernel<T, 1, kInterleaved, HeadRows>;
    };
    const auto kernel = p.interleaved ? choose(std::true_type()) : choose(std::false_type());
    simt::launch(kernel, unsigned(p.num_tokens), threads, 0, stream, p);
  });
}

}  // namespace paged_ops::launch
