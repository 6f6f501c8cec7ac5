// Copying whole blocks inside caches.
#include "kernels/block_copy.cuh"

#include <algorithm>

#include "launch/cuda_status.h"
#include "launch/index_check.h"
#include "launch/ops.h"
#include "launch/packet_width.h"

namespace paged_ops::launch {

void block_copy(const BlockCopyParams& p, const Context& context) {
  if (p.num_pairs == 0 || p.num_caches == 0) return;
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  PAGED_OPS_REQUIRE(p.num_pairs <= INT32_MAX, "block_pairs: has ", p.num_pairs, " pairs, wanted at most ",
                    INT32_MAX);
  if (context.check) check_block_pairs(p, stream);

  PacketWidth packet_width;
  packet_width.nbytes(p.block.run_nbytes).nbytes(p.block_stride);
  for (int i = 0; i < 2; i++)
    if (p.block.num_runs[i] > 1) packet_width.nbytes(p.block.run_stride[i]);
  for (int i = 0; i < p.num_caches; i++) packet_width.address(p.caches[i]);
  const int width = packet_width.get();

  const int64_t num_packets = p.block.run_nbytes / width * p.block.num_runs[0] * p.block.num_runs[1];
  constexpr int64_t kSlice = kernels::kBlockCopyThreads * kernels::kBlockCopyPackets;
  const auto slices = unsigned(std::clamp<int64_t>((num_packets + kSlice - 1) / kSlice, 1, 65535));
  for (int first = 0; first < p.num_caches; first += kernels::CacheAddresses::kMax) {
    const int count = std::min(p.num_caches - first, kernels::CacheAddresses::kMax);
    kernels::CacheAddresses addresses{};
    for (int i = 0; i < count; i++) addresses.cache[i] = static_cast<unsigned char*>(p.caches[first + i]);
    dispatch_packet(width, [&](auto packet) {
      simt::launch(kernels::block_copy_kernel<typename decltype(packet)::type>,
                   dim3(unsigned(p.num_pairs), unsigned(count), slices), kernels::kBlockCopyThreads, 0,
                   stream, addresses, p);
    });
  }
}

}  // namespace paged_ops::launch
