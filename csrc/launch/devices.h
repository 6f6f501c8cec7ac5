// Which GPUs this process can use.
#pragma once
#include <string>
#include <vector>

namespace paged_ops::launch {

// "cuda:0 sm_90, 132 multiprocessors" for each; empty without a driver or a device. Never raises, and creates
// no context.
std::vector<std::string> devices();

}  // namespace paged_ops::launch
