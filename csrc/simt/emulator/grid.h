// Running a grid: its blocks in some order, on one or several OS threads.
#pragma once
#include <cstddef>
#include <functional>

#include "simt/emulator/types.h"

namespace paged_ops::simt {

// Runs all blocks of a grid. Throws the first Fault, and one when CUDA would refuse the launch.
void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_nbytes, const std::function<void()>& thread_body);

}  // namespace paged_ops::simt
