// Writing new keys and values into a paged KV cache.
#include "kernels/cache_write.cuh"

#include <algorithm>

#include "launch/cuda_status.h"
#include "launch/index_check.h"
#include "launch/ops.h"
#include "launch/packet_width.h"
#include "launch/quantise.h"

namespace paged_ops::launch {

void cache_write(const CacheWriteParams& p, const Context& context) {
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (context.check) check_slot_mapping(p, stream);
  if (is_quantised(p.kv.dtype)) return cache_quantise(p, stream);

  const int key_nbytes = p.kv.key_head_dim * itemsize(p.dtype),
            value_nbytes = p.kv.value_head_dim * itemsize(p.dtype);
  const int width = PacketWidth()
                        .cache(p.kv.key, p.kv.dtype)
                        .cache(p.kv.value, p.kv.dtype)
                        .address(p.key)
                        .nbytes(p.key_stride_token)
                        .nbytes(p.key_stride_head)
                        .address(p.value)
                        .nbytes(p.value_stride_token)
                        .nbytes(p.value_stride_head)
                        .nbytes(key_nbytes)
                        .nbytes(value_nbytes)
                        .get();
  const dim3 threads = head_threads(std::max(key_nbytes, value_nbytes) / width, p.kv.num_kv_heads);
  dispatch_packet(width, [&](auto packet) {
    using Packet = typename decltype(packet)::type;
    const auto kernel = is_plain(p.kv) ? kernels::cache_write_kernel<Packet, kernels::HeadRows>
                                       : kernels::cache_write_kernel<Packet, kernels::PackedRows>;
    simt::launch(kernel, unsigned(p.num_tokens), threads, 0, stream, p);
  });
}

}  // namespace paged_ops::launch
