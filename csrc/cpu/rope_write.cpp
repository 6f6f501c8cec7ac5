// Rotating queries and keys while new keys and values are written into their slots.
#include "cpu/index_check.h"
#include "cpu/isa.h"
#include "cpu/ops.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

void rope_write(const RopeWriteParams& p, const Context&) {
  check_slot_mapping(p.write.slot_mapping, p.write.num_tokens, p.write.kv);
  check_positions(p);
  const Kernels& kernels = cpu::kernels();
  const PagedKV& kv = p.write.kv;
  const int64_t row_elements = int64_t(p.num_q_heads + kv.num_kv_heads) * kv.key_head_dim +
                               int64_t(kv.num_kv_heads) * kv.value_head_dim;
  constexpr int32_t kTokensPerTask = 16;
  const int64_t num_tasks = (int64_t(p.num_tokens) + kTokensPerTask - 1) / kTokensPerTask;
  const int64_t nbytes = 2 * p.num_tokens * row_elements * itemsize(p.write.dtype);
  parallel_for(num_tasks, threads_for(nbytes), [&](int64_t task) {
    const int32_t begin = int32_t(task) * kTokensPerTask;
    const int32_t end = p.num_tokens - begin < kTokensPerTask ? p.num_tokens : begin + kTokensPerTask;
    kernels.rope_write[int(p.write.dtype)](p, begin, end);
  });
}

}  // namespace paged_ops::cpu
