// Switching stacks: by hand on x86-64, through ucontext elsewhere, told to the sanitizers either way.
#include "simt/emulator/stack_switch.h"

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

#if !SIMT_UCONTEXT
// void paged_ops_simt_switch(void** save, void* load): the registers that a call preserves go on the old
// stack, its pointer to *save, and those of the new stack come back. The control words of the floating
// point units are preserved too, but nobody changes them.
extern "C" __attribute__((visibility("hidden"))) void paged_ops_simt_switch(void** save, void* load);
asm(R"(
  .text
  .hidden paged_ops_simt_switch
  .globl paged_ops_simt_switch
  .type paged_ops_simt_switch,@function
paged_ops_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size paged_ops_simt_switch,.-paged_ops_simt_switch
)");
#endif

namespace paged_ops::simt {
namespace {

constexpr size_t kPage = 4096;
#if SIMT_ASAN || !defined(__OPTIMIZE__)
constexpr size_t kStackNbytes = 256 * 1024;  // frames with red zones, and unoptimised ones, are large
#else
constexpr size_t kStackNbytes = 64 * 1024;
#endif

char* map_stack() {
  void* base = mmap(nullptr, kPage + kStackNbytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  mprotect(base, kPage, PROT_NONE);  // an overflow faults instead of reaching another fiber's stack
  return static_cast<char*>(base) + kPage;
}

#if SIMT_TSAN
// ThreadSanitizer gives the number of a destroyed fiber to a later one and then takes the two for one,
// which would hide the races between them. So fibers that have run stay until their launch has ended.
std::mutex retired_mutex;
std::vector<void*> retired;
#endif

}  // namespace

Context::~Context() {
#if SIMT_TSAN
  if (tsan_owned_) {
    std::lock_guard<std::mutex> lock(retired_mutex);
    retired.push_back(tsan_fiber_);
  }
#endif
  if (owned_) munmap(stack_ - kPage, kPage + kStackNbytes);
}

void Context::adopt_thread() {
#if SIMT_ASAN
  pthread_attr_t attributes;
  void* lowest = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &lowest, &stack_nbytes_);
  pthread_attr_destroy(&attributes);
  stack_ = static_cast<char*>(lowest);
#endif
#if SIMT_TSAN
  tsan_fiber_ = __tsan_get_current_fiber();
#endif
}

void Context::restart(void (*entry)()) {
  if (!stack_) {
    stack_ = map_stack();
    stack_nbytes_ = kStackNbytes;
    owned_ = true;
  }
#if SIMT_ASAN
  fake_stack_ = nullptr;
#endif
  allow(stack_, stack_nbytes_);  // frames that were left without returning are still marked
#if SIMT_TSAN
  {
    std::lock_guard<std::mutex> lock(retired_mutex);
    if (tsan_owned_) retired.push_back(tsan_fiber_);
  }
  tsan_fiber_ = __tsan_create_fiber(0);
  tsan_owned_ = true;
  // Mapping the stack anew makes ThreadSanitizer forget what the last fiber on it did.
  mmap(stack_, stack_nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
#endif
#if SIMT_UCONTEXT
  getcontext(&registers_);
  registers_.uc_stack.ss_sp = stack_;
  registers_.uc_stack.ss_size = stack_nbytes_;
  registers_.uc_link = nullptr;
  makecontext(&registers_, entry, 0);
#else
  // What paged_ops_simt_switch pops: six registers, then `entry` to return to. Above it a null return
  // address, where a stack walk ends, which also leaves the stack aligned as at any function's entry.
  void** top = reinterpret_cast<void**>(stack_ + stack_nbytes_);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#endif
}

SIMT_UNSEEN void Context::switch_stack(Context& from, Context& to, [[maybe_unused]] bool for_good) {
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack_, to.stack_, to.stack_nbytes_);
#endif
#if SIMT_TSAN
  constexpr unsigned kOrdersNothing = 1;
  __tsan_switch_to_fiber(to.tsan_fiber_, kOrdersNothing);
#endif
#if SIMT_UCONTEXT
  swapcontext(&from.registers_, &to.registers_);
#else
  paged_ops_simt_switch(&from.stack_pointer_, to.stack_pointer_);
#endif
  arrived(from);
}

SIMT_UNSEEN void Context::arrived([[maybe_unused]] Context& self) {
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(self.fake_stack_, nullptr, nullptr);
  self.fake_stack_ = nullptr;
#endif
}

void Context::forget_retired() {
#if SIMT_TSAN
  std::lock_guard<std::mutex> lock(retired_mutex);
  for (void* fiber : retired) __tsan_destroy_fiber(fiber);
  retired.clear();
#endif
}

}  // namespace paged_ops::simt
