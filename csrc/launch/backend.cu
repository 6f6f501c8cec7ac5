// The CUDA backend's table of ops.
#include "launch/ops.h"

namespace paged_ops::launch {

const Backend& backend() {
  static const Backend table{
      .name = "cuda",
      .attention_workspace_nbytes = attention_workspace_nbytes,
      .attention = attention,
      .cache_write = cache_write,
      .block_copy = block_copy,
      .block_swap = block_swap,
      .gather = gather,
      .merge_states = merge_states,
      .rope_write = rope_write,
  };
  return table;
}

}  // namespace paged_ops::launch
