// Stacks that one OS thread switches between: the mechanism under the emulator's fibers.
#pragma once
#include <cstddef>

#include "simt/emulator/sanitizers.h"

// Switching by hand is five times as fast as swapcontext, which makes a system call each time.
#if !defined(__x86_64__) || defined(SIMT_USE_UCONTEXT)
#define SIMT_UCONTEXT 1
#include <ucontext.h>
#else
#define SIMT_UCONTEXT 0
#endif

namespace paged_ops::simt {

// A place where execution can be left and resumed: a fiber, or the OS thread's own stack.
class Context {
 public:
  Context() = default;
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // This context becomes the calling OS thread's own stack, for others to switch back to.
  void adopt_thread();
  // This context will run `entry` (which must not return) on its own stack when first switched to.
  // Whatever ran on that stack before is forgotten.
  void restart(void (*entry)());
  // Leaves `from`, which is running, for `to`. Returns when something switches back to `from`.
  // `for_good`: nothing ever will.
  static void switch_stack(Context& from, Context& to, bool for_good = false);
  // First thing to call on a restarted stack.
  static void arrived(Context& self);
  // To call when a launch has ended: nothing that ran in it can race with what follows.
  static void forget_retired();

 private:
  char* stack_ = nullptr;  // lowest usable byte; a guard page lies below
  size_t stack_nbytes_ = 0;
  bool owned_ = false;  // mapped by restart()
#if SIMT_UCONTEXT
  ucontext_t registers_;
#else
  void* stack_pointer_ = nullptr;
#endif
#if SIMT_ASAN
  void* fake_stack_ = nullptr;
#endif
#if SIMT_TSAN
  void* tsan_fiber_ = nullptr;
  bool tsan_owned_ = false;
#endif
};

}  // namespace paged_ops::simt
