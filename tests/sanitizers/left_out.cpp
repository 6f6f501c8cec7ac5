// In place of kernels that what is built with sanitizers does without: they differ in their types alone from
// others that it has.
#include <stdexcept>

#include "launch/attention_launch.h"

#define LEFT_OUT(T, Stored)                                                                             \
  template <>                                                                                           \
  void launch_attention<T, Stored>(const AttentionPlan&, const kernels::AttentionArgs&, cudaStream_t) { \
    throw std::runtime_error("left out of the sanitized build: " #T ", " #Stored);                      \
  }

namespace paged_ops::launch {
LEFT_OUT(bf16, bf16)
LEFT_OUT(bf16, f8e4m3)
LEFT_OUT(bf16, f8e5m2)
LEFT_OUT(bf16, i8)
LEFT_OUT(f16, f8e4m3)
LEFT_OUT(f16, f8e5m2)
}  // namespace paged_ops::launch
