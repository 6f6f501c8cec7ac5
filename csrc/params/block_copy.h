// Parameters of copying whole blocks: inside caches (copy-on-write) and between pools (swap).
#pragma once
#include <cstdint>

namespace paged_ops {

// What a block of one cache tensor is made of: `num_runs[0] x num_runs[1]` contiguous runs of
// `run_nbytes` bytes. A dense block is one run; a block of a strided view is several.
struct BlockShape {
  int64_t run_nbytes;
  int64_t num_runs[2];
  int64_t run_stride[2];  // bytes
};

// Blocks within each of `num_caches` tensors (say, K and V of every layer) that share one geometry.
// For each pair (source, destination) the block is copied in every tensor. No block is both a source
// and a destination in one call, and destinations differ.
struct BlockCopyParams {
  void* const* caches;  // HOST array [num_caches] of the tensors' addresses
  int32_t num_caches;
  BlockShape block;
  int64_t block_stride;  // bytes from a block to the next, the same in every tensor
  int64_t num_blocks;
  const int64_t* block_pairs;  // [num_pairs, 2], contiguous, on the caches' device
  int64_t num_pairs;
};

// Blocks from one pool to another, on the same or on different devices.
struct BlockSwapParams {
  const void* source;
  void* destination;
  BlockShape source_block, destination_block;             // run_nbytes and num_runs are equal
  int64_t source_block_stride, destination_block_stride;  // bytes
  int64_t source_num_blocks, destination_num_blocks;
  const int64_t* block_pairs;  // HOST array [num_pairs, 2] of (source block, destination block)
  int64_t num_pairs;
  bool source_on_device, destination_on_device;  // false = host memory
};

}  // namespace paged_ops
