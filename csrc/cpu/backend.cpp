// The CPU backend's table of ops.
#include "cpu/ops.h"

namespace paged_ops::cpu {

const Backend& backend() {
  static constexpr Backend table{.name = "cpu",
                                 .attention_workspace_nbytes = attention_workspace_nbytes,
                                 .attention = attention,
                                 .cache_write = cache_write,
                                 .block_copy = block_copy,
                                 .block_swap = block_swap,
                                 .gather = gather,
                                 .merge_states = merge_states,
                                 .owns_scratch = true,
                                 .rope_write = rope_write};
  return table;
}

}  // namespace paged_ops::cpu
