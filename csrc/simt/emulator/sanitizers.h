// What the sanitizers must be told about fibers, shared memory and the emulator's own bookkeeping.
//
// ThreadSanitizer sees one thread per fiber. Switching fibers orders nothing; only a kernel's own
// __syncthreads, __syncwarp and __threadfence do, and the start and end of a launch. So it finds the barrier
// that is missing, though the emulator runs the threads of a block in turns.
#pragma once
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define SIMT_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__)
#define SIMT_TSAN 1
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_write_range(void* address, unsigned long nbytes);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#define SIMT_UNSEEN __attribute__((no_sanitize_thread, noinline))
#else
#define SIMT_TSAN 0
#define SIMT_UNSEEN
#endif

namespace paged_ops::simt {

// While one lives, ThreadSanitizer ignores the memory accesses of this fiber: the emulator's, not the
// kernel's.
struct Quiet {
#if SIMT_TSAN
  SIMT_UNSEEN Quiet() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  SIMT_UNSEEN ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Quiet() {}
  ~Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};

// What came before `publish(token)` in one fiber happens before what follows `observe(token)` in another.
inline void publish([[maybe_unused]] void* token) {
#if SIMT_TSAN
  __tsan_release(token);
#endif
}
inline void observe([[maybe_unused]] void* token) {
#if SIMT_TSAN
  __tsan_acquire(token);
#endif
}
inline void mark_write([[maybe_unused]] void* address, [[maybe_unused]] size_t nbytes) {
#if SIMT_TSAN
  __tsan_write_range(address, nbytes);
#endif
}
inline void forbid([[maybe_unused]] const void* address, [[maybe_unused]] size_t nbytes) {
#if SIMT_ASAN
  __asan_poison_memory_region(address, nbytes);
#endif
}
inline void allow([[maybe_unused]] const void* address, [[maybe_unused]] size_t nbytes) {
#if SIMT_ASAN
  __asan_unpoison_memory_region(address, nbytes);
#endif
}

}  // namespace paged_ops::simt
