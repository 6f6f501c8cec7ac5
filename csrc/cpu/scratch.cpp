// Per-thread scratch memory.
#include "cpu/scratch.h"

#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/check.h"

namespace paged_ops::cpu {

namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

struct Arena {
  std::unique_ptr<void, Free> memory;
  size_t nbytes = 0;
};

}  // namespace

void* thread_scratch(ScratchUse use, size_t nbytes) {
  // A task may run on the thread of the call it belongs to, so the two uses have an arena each.
  thread_local Arena arenas[2];
  Arena& arena = arenas[int(use)];
  if (arena.nbytes < nbytes) {
    constexpr size_t kGrain = 64 << 10;
    const size_t wanted = (nbytes + kGrain - 1) / kGrain * kGrain;
    arena.memory.reset();
    arena.nbytes = 0;
    arena.memory.reset(std::aligned_alloc(64, wanted));
    if (!arena.memory) fail<DeviceError>("out of memory: no ", wanted, " bytes of scratch");
    arena.nbytes = wanted;
  }
#if defined(PAGED_OPS_POISON_SCRATCH)
  std::memset(arena.memory.get(), 0xff, nbytes);  // NaN: a read before a write shows
#endif
  return arena.memory.get();
}

}  // namespace paged_ops::cpu
