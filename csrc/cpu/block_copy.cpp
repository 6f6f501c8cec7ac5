// Copying whole blocks: inside caches (copy-on-write) and between two pools in host memory (swap).
#include <cstring>

#include "core/check.h"
#include "cpu/index_check.h"
#include "cpu/ops.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

namespace {

int64_t block_nbytes(const BlockShape& block) {
  return block.run_nbytes * block.num_runs[0] * block.num_runs[1];
}

void copy_block(char* to, const BlockShape& to_shape, const char* from, const BlockShape& from_shape) {
  for (int64_t i = 0; i < from_shape.num_runs[0]; i++)
    for (int64_t j = 0; j < from_shape.num_runs[1]; j++)
      std::memcpy(to + i * to_shape.run_stride[0] + j * to_shape.run_stride[1],
                  from + i * from_shape.run_stride[0] + j * from_shape.run_stride[1],
                  size_t(from_shape.run_nbytes));
}

}  // namespace

void block_copy(const BlockCopyParams& p, const Context&) {
  check_block_pairs(p.block_pairs, p.num_pairs, p.num_blocks, p.num_blocks, true);
  const int64_t num_tasks = p.num_caches * p.num_pairs;
  parallel_for(num_tasks, threads_for(2 * num_tasks * block_nbytes(p.block)), [&](int64_t task) {
    char* cache = static_cast<char*>(p.caches[task / p.num_pairs]);
    const int64_t* pair = p.block_pairs + 2 * (task % p.num_pairs);
    if (pair[0] == pair[1]) return;
    copy_block(cache + pair[1] * p.block_stride, p.block, cache + pair[0] * p.block_stride, p.block);
  });
}

void block_swap(const BlockSwapParams& p, const Context&) {
  PAGED_OPS_REQUIRE(!p.source_on_device && !p.destination_on_device,
                    p.source_on_device ? "source" : "destination",
                    ": is on a device; the cpu backend copies between pools in host memory");
  check_block_pairs(p.block_pairs, p.num_pairs, p.source_num_blocks, p.destination_num_blocks, false);
  parallel_for(p.num_pairs, threads_for(2 * p.num_pairs * block_nbytes(p.source_block)), [&](int64_t i) {
    const int64_t* pair = p.block_pairs + 2 * i;
    copy_block(static_cast<char*>(p.destination) + pair[1] * p.destination_block_stride, p.destination_block,
               static_cast<const char*>(p.source) + pair[0] * p.source_block_stride, p.source_block);
  });
}

}  // namespace paged_ops::cpu
