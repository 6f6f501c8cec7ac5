// Copying whole blocks between pools, in host memory or on a GPU, by the copy engines on the caller's stream.
#include <algorithm>
#include <vector>

#include "launch/block_swap_config.h"
#include "launch/cuda_status.h"
#include "launch/ops.h"

namespace paged_ops::launch {

namespace {

// The ids are in host memory, so they are always checked.
void check_ids(const BlockSwapParams& p) {
  const int64_t num_blocks[2] = {p.source_num_blocks, p.destination_num_blocks};
  std::vector<int64_t> destinations;
  for (int64_t i = 0; i < p.num_pairs; i++) {
    for (int side = 0; side < 2; side++) {
      const int64_t block = p.block_pairs[2 * i + side];
      PAGED_OPS_REQUIRE(block >= 0 && block < num_blocks[side], "block_pairs[", i, ", ", side, "] = ", block,
                        ": wanted 0 <= ", side ? "destination" : "source", " block < ", num_blocks[side]);
    }
    destinations.push_back(p.block_pairs[2 * i + 1]);
  }
  std::sort(destinations.begin(), destinations.end());
  const auto twice = std::adjacent_find(destinations.begin(), destinations.end());
  PAGED_OPS_REQUIRE(twice == destinations.end(), "block_pairs: ", *twice,
                    " is a destination more than once; wanted each destination once");
}

}  // namespace

void block_swap(const BlockSwapParams& p, const Context& context) {
  check_ids(p);
  const DeviceGuard guard(context.device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto* source = static_cast<const unsigned char*>(p.source);
  auto* destination = static_cast<unsigned char*>(p.destination);
  const cudaMemcpyKind kind =
      p.source_on_device ? (p.destination_on_device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost)
                         : (p.destination_on_device ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost);
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> nbytes;
  for (const CopyPiece& piece : plan_block_swap(p)) {
    if (piece.height == 1) {
      to.push_back(destination + piece.destination);
      from.push_back(source + piece.source);
      nbytes.push_back(size_t(piece.width));
    } else {
      PAGED_OPS_CUDA_CHECK(cudaMemcpy2DAsync(destination + piece.destination, size_t(piece.destination_pitch),
                                             source + piece.source, size_t(piece.source_pitch),
                                             size_t(piece.width), size_t(piece.height), kind, stream));
    }
  }
  simt::memcpy_batch_async(to.data(), from.data(), nbytes.data(), to.size(), stream);
}

}  // namespace paged_ops::launch
