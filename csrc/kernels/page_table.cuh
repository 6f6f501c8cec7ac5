// Where the tokens of a sequence lie, by its block table.
#pragma once
#include "kernels/attention_args.h"

namespace paged_ops::kernels {

class PageTable {
 public:
  struct Place {
    int block, slot;
  };

  __device__ __forceinline__ PageTable(const AttentionArgs& a, int sequence)
      : blocks_(a.op.tables.block_ids + sequence * a.op.tables.stride),
        block_size_(a.op.kv.block_size),
        divisor_(a.block_size) {}

  // Entries of tokens from `end` on are not read.
  __device__ __forceinline__ Place find(int token, int end) const {
    const int i = divisor_.quotient(token);
    return {token < end ? __ldg(blocks_ + i) : 0, token - i * block_size_};
  }

 private:
  const int32_t* blocks_;
  int block_size_;
  Divisor divisor_;
};

}  // namespace paged_ops::kernels
