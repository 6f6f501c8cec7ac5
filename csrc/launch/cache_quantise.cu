// Writing new keys and values into a quantised cache, keys rotated or as they are.
#include "kernels/cache_quantise.cuh"

#include <algorithm>

#include "core/dispatch.h"
#include "kernels/rope_quantise.cuh"
#include "launch/packet_width.h"
#include "launch/quantise.h"

namespace paged_ops::launch {

namespace {

// A warp, heads, and so many kinds of rows.
dim3 warps_of_heads(int num_heads, unsigned kinds) {
  unsigned heads = 1;
  while (heads < 4 && heads < unsigned(num_heads)) heads *= 2;
  return dim3(kernels::kWarpSize, heads, kinds);
}

}  // namespace

void cache_quantise(const CacheWriteParams& p, cudaStream_t stream) {
  constexpr int kWide = 4;
  const int element_nbytes = itemsize(p.dtype) * numbers_per_element(p.kv.dtype);
  const bool wide =
      PacketWidth().cache(p.kv.key, p.kv.dtype).cache(p.kv.value, p.kv.dtype).divisible_by(kWide) &&
      PacketWidth()
          .address(p.key)
          .nbytes(p.key_stride_token)
          .nbytes(p.key_stride_head)
          .address(p.value)
          .nbytes(p.value_stride_token)
          .nbytes(p.value_stride_head)
          .divisible_by(std::min(kWide * element_nbytes, 16));
  const dim3 threads = warps_of_heads(p.kv.num_kv_heads, 2);
  dispatch<float, f16, bf16>("key", p.dtype, [&](auto t) {
    dispatch<f8e4m3, f8e5m2, i8, i4x2>("key_cache", p.kv.dtype, [&](auto q) {
      using T = typename decltype(t)::type;
      using Q = typename decltype(q)::type;
      const auto kernel =
          wide ? kernels::cache_quantise_kernel<T, Q, kWide> : kernels::cache_quantise_kernel<T, Q, 1>;
      simt::launch(kernel, unsigned(p.num_tokens), threads, 0, stream, p);
    });
  });
}

void rope_quantise(const RopeWriteParams& p, cudaStream_t stream) {
  const dim3 threads = warps_of_heads(std::max(p.num_q_heads, p.write.kv.num_kv_heads), 3);
  dispatch<float, f16, bf16>("key", p.write.dtype, [&](auto t) {
    dispatch<f8e4m3, f8e5m2, i8, i4x2>("key_cache", p.write.kv.dtype, [&](auto q) {
      using T = typename decltype(t)::type;
      using Q = typename decltype(q)::type;
      const auto kernel = p.interleaved ? kernels::rope_quantise_kernel<T, Q, true>
                                        : kernels::rope_quantise_kernel<T, Q, false>;
      simt::launch(kernel, unsigned(p.num_tokens), threads, 0, stream, p);
    });
  });
}

}  // namespace paged_ops::launch
