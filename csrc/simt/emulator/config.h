// How the emulator runs kernels: the freedom a GPU has, made choosable and repeatable.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/check.h"

namespace paged_ops::simt {

// A kernel broke a rule of CUDA: what, who (block, thread) and where (file:line) are in the message.
struct Fault : DeviceError {
  using DeviceError::DeviceError;
};

// Which of the threads that could go on does go on. `reverse` also runs the blocks in reverse order,
// `random` in a random one.
enum class FiberOrder : uint8_t { forward, reverse, random };

// When the bytes of an asynchronous copy arrive: no earlier than it is issued, no later than it is waited
// for.
enum class CopyLanding : uint8_t { at_wait, at_once, random };

// A launch as the runtime sees it.
struct Launch {
  const void* kernel;        // its address
  unsigned int num_threads;  // of a block
  size_t dynamic_shared_nbytes;
};

struct Config {
  FiberOrder order = FiberOrder::forward;
  CopyLanding landing = CopyLanding::at_wait;
  uint64_t seed = 1;          // of both random choices; a run does not depend on `workers`
  int workers = 1;            // OS threads, each running one block at a time
  bool poison = true;         // shared and allocated memory start as 0xff bytes (NaN, -1), and so does the
                              // destination of an asynchronous copy until it lands
  int multiprocessors = 132;  // what cudaDeviceGetAttribute answers
  bool (*observer)(const Launch&) = nullptr;  // is told of each launch, and says whether to run it
};

constexpr unsigned char kPoison = 0xff;  // NaN in every float type, -1 in every integer type

// The configuration of this process. Change it between launches only.
Config& config();

}  // namespace paged_ops::simt
