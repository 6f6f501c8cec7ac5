// Walks the tokens of a sequence through its block table, a constant number of tokens at a time.
#pragma once
#include "core/paged_kv.h"
#include "simt/simt.h"

namespace paged_ops::kernels {

// Block and slot advance by constants, so that any block size is served without a division per step.
class PageWalk {
 public:
  struct Place {
    int block, slot;
  };

  // `table` is the sequence's row of the block table; step() moves `stride` tokens on.
  __device__ __forceinline__ PageWalk(const int32_t* table, int block_size, int stride)
      : table_(table),
        block_size_(block_size),
        stride_(stride),
        step_blocks_(stride / block_size),
        step_slots_(stride % block_size) {}

  __device__ __forceinline__ void start(int token) {
    token_ = token;
    entry_ = table_ + token / block_size_;
    slot_ = token % block_size_;
  }

  // Where the current token lies; moves on. Table entries of tokens from `end` on are not read.
  __device__ __forceinline__ Place step(int end) {
    Place place{0, slot_};
    if (token_ < end) place.block = __ldg(entry_);
    token_ += stride_;
    entry_ += step_blocks_;
    slot_ += step_slots_;
    if (slot_ >= block_size_) {
      slot_ -= block_size_;
      entry_++;
    }
    return place;
  }

 private:
  const int32_t* table_;
  const int32_t* entry_ = nullptr;
  int block_size_, stride_, step_blocks_, step_slots_;
  int token_ = 0, slot_ = 0;
};

}  // namespace paged_ops::kernels
