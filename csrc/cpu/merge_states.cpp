// Merging of partial attention states.
#include "cpu/isa.h"
#include "cpu/ops.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

void merge_states(const MergeStatesParams& p, const Context&) {
  const Kernels& kernels = cpu::kernels();
  constexpr int32_t kTokensPerTask = 16;
  const int64_t num_tasks = (int64_t(p.num_tokens) + kTokensPerTask - 1) / kTokensPerTask;
  const int64_t nbytes = 3 * int64_t(p.num_tokens) * p.num_heads * p.head_dim * itemsize(p.dtype);
  parallel_for(num_tasks, threads_for(nbytes), [&](int64_t task) {
    const int32_t begin = int32_t(task) * kTokensPerTask;
    const int32_t end = p.num_tokens - begin < kTokensPerTask ? p.num_tokens : begin + kTokensPerTask;
    kernels.merge_states[int(p.dtype)](p, begin, end);
  });
}

}  // namespace paged_ops::cpu
