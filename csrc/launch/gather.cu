// Gathering sequences out of a paged KV cache into contiguous rows.
#include "kernels/gather.cuh"

#include <algorithm>

#include "core/dispatch.h"
#include "launch/cuda_status.h"
#include "launch/index_check.h"
#include "launch/ops.h"
#include "launch/packet_width.h"

namespace paged_ops::launch {

namespace {

void gather_scaled(const GatherParams& p, cudaStream_t stream) {
  const int most = std::max(p.kv.key_head_dim, p.kv.value_head_dim);
  const dim3 threads = head_threads(most / numbers_per_element(p.kv.dtype), p.kv.num_kv_heads);
  dispatch<float, f16, bf16>("out", p.dtype, [&](auto t) {
    dispatch<f8e4m3, f8e5m2, i8, i4x2>("key_cache", p.kv.dtype, [&](auto q) {
      using T = typename decltype(t)::type;
      simt::launch(kernels::gather_scaled_kernel<T, typename decltype(q)::type>, unsigned(p.num_rows),
                   threads, 0, stream, p);
    });
  });
}

}  // namespace

void gather(const GatherParams& p, const Context& context) {
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  PAGED_OPS_REQUIRE(p.num_rows <= INT32_MAX, "out: has ", p.num_rows, " rows, wanted at most ", INT32_MAX);
  if (context.check) check_block_tables(p.tables, p.kv, stream);

  simt::launch(kernels::cu_seqlens_kernel, 1, kernels::kScanThreads, 0, stream, p);
  if (p.num_rows == 0) return;
  if (p.dtype != p.kv.dtype) return gather_scaled(p, stream);
  const int key_nbytes = int(row_nbytes(p.kv.dtype, p.kv.key_head_dim));
  const int value_nbytes = int(row_nbytes(p.kv.dtype, p.kv.value_head_dim));
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
    const auto kernel = is_plain(p.kv) ? kernels::gather_kernel<Packet, kernels::HeadRows>
                                       : kernels::gather_kernel<Packet, kernels::PackedRows>;
    simt::launch(kernel, unsigned(p.num_rows), threads, 0, stream, p);
  });
}

}  // namespace paged_ops::launch
