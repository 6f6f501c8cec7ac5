// Copying whole blocks inside caches: all caches and all pairs in one launch.
#pragma once
#include "params/block_copy.h"
#include "simt/simt.h"

namespace paged_ops::kernels {

// The caches' addresses travel in the kernel's parameters: no copy of an address table to the device, and
// nothing that a captured graph could find stale.
struct CacheAddresses {
  static constexpr int kMax = 256;
  unsigned char* cache[kMax];
};

constexpr int kBlockCopyThreads = 256;
constexpr int kBlockCopyPackets = 4;  // in flight per thread

// Grid: pairs, caches, slices of a block.
template <class Packet>
__global__ void __launch_bounds__(kBlockCopyThreads)
    block_copy_kernel(const CacheAddresses caches, const BlockCopyParams p) {
  const int64_t source = p.block_pairs[2 * int64_t(blockIdx.x)],
                destination = p.block_pairs[2 * int64_t(blockIdx.x) + 1];
  if (source < 0 || source >= p.num_blocks || destination < 0 || destination >= p.num_blocks) return;
  if (source == destination) return;
  const unsigned char* from = caches.cache[blockIdx.y] + source * p.block_stride;
  unsigned char* to = caches.cache[blockIdx.y] + destination * p.block_stride;

  const int64_t run_packets = p.block.run_nbytes / int(sizeof(Packet));
  const int64_t num_packets = run_packets * p.block.num_runs[0] * p.block.num_runs[1];
  const auto offset = [&](int64_t i) {
    if (run_packets == num_packets) return i * int64_t(sizeof(Packet));  // a dense block
    const int64_t run = i / run_packets;
    return run / p.block.num_runs[1] * p.block.run_stride[0] +
           run % p.block.num_runs[1] * p.block.run_stride[1] + i % run_packets * int64_t(sizeof(Packet));
  };
  constexpr int64_t kSlice = kBlockCopyThreads * kBlockCopyPackets;
  for (int64_t first = blockIdx.z * kSlice + threadIdx.x; first < num_packets; first += gridDim.z * kSlice) {
    Packet packets[kBlockCopyPackets];
    int64_t at[kBlockCopyPackets];
#pragma unroll
    for (int i = 0; i < kBlockCopyPackets; i++) {  // all loads before the first store
      const int64_t packet = first + i * kBlockCopyThreads;
      if (packet >= num_packets) break;
      at[i] = offset(packet);
      packets[i] = *reinterpret_cast<const Packet*>(from + at[i]);
    }
#pragma unroll
    for (int i = 0; i < kBlockCopyPackets; i++) {
      if (first + i * kBlockCopyThreads >= num_packets) break;
      *reinterpret_cast<Packet*>(to + at[i]) = packets[i];
    }
  }
}

}  // namespace paged_ops::kernels
