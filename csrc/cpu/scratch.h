// Working memory of a thread: grows to what was ever asked, is never given back before the thread ends.
#pragma once
#include <cstddef>

namespace paged_ops::cpu {

// At least `nbytes` bytes at a 64-byte boundary, with unspecified contents; valid until this thread asks
// again for the same use.
enum class ScratchUse { task, call };
void* thread_scratch(ScratchUse use, size_t nbytes);

}  // namespace paged_ops::cpu
