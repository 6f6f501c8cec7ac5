// Launching a kernel in the emulator.
#pragma once
#include <cstddef>
#include <tuple>
#include <utility>

#include "simt/emulator/config.h"
#include "simt/emulator/grid.h"
#include "simt/emulator/runtime.h"

namespace paged_ops::simt {

struct Residency {
  int multiprocessors, ctas_per_multiprocessor;
};

// How many CTAs of a kernel an H200 holds at once, as far as threads and shared memory say; the emulator
// knows no registers.
template <class... Parameters>
Residency residency(void (*)(Parameters...), unsigned threads, size_t shared_nbytes) {
  constexpr size_t kShared = 228 * 1024, kSystem = 1024;
  const int by_threads = int(2048 / threads), by_shared = int(kShared / (shared_nbytes + kSystem));
  return {config().multiprocessors, by_threads < by_shared ? by_threads : by_shared};
}

// kernel<<<grid, block, shared_nbytes, stream>>>(arguments...): the arguments are copied now, the kernel runs
// when the stream comes to it. Throws Fault when the launch or the kernel breaks a rule of CUDA, and
// DeviceError when the stream is not one.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_nbytes, cudaStream_t stream,
            Arguments&&... arguments) {
  std::tuple<std::remove_const_t<Parameters>...> copies(std::forward<Arguments>(arguments)...);
  const Launch what{reinterpret_cast<const void*>(kernel), block.x * block.y * block.z, shared_nbytes};
  const auto work = [=] {
    const auto observer = config().observer;
    if (observer && !observer(what)) return;
    run_grid(grid, block, shared_nbytes, [&] { std::apply(kernel, copies); });
  };
  check(enqueue(stream, work), "kernel launch");
}

}  // namespace paged_ops::simt
