// A running block: its threads as fibers, its shared memory, and the two ways in which threads meet.
#pragma once
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "simt/emulator/copy_queue.h"
#include "simt/emulator/fault.h"
#include "simt/emulator/shared_memory.h"
#include "simt/emulator/stack_switch.h"
#include "simt/emulator/types.h"

namespace paged_ops::simt {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kMaxThreadsPerBlock = 1024;

struct Block;

// One CUDA thread.
struct Fiber {
  enum class State : uint8_t { ready, waits_for_warp, waits_for_block, done };

  Context context;
  Block* block = nullptr;
  uint3 thread_idx{};
  int index = 0;  // in the block
  int lane = 0;
  int warp = 0;
  State state = State::done;
  Site waits_at;
  CopyQueue copies;
  bool fenced = false;  // has executed a fence
};

// Where the lanes named in a mask meet and see each other's values. The values of one meeting stay until the
// next but one begins, which no lane can reach before all have left the first: one rendezvous is enough for
// an exchange.
struct Rendezvous {
  static constexpr size_t kSlotNbytes = 64;

  uint32_t mask = 0;
  uint32_t arrived = 0;
  uint32_t meeting = 0;
  Site site;
  bool combined[2] = {};  // scratch of an operation that one lane computes for all, per meeting
  alignas(64) unsigned char slots[2][kWarpSize * kSlotNbytes];
};

struct Warp {
  uint32_t live = 0;  // lanes that exist and have not returned
  // One per mask in use: lanes may wait in one while others pass through another.
  std::deque<Rendezvous> meetings;
};

struct Block {
  // Runs all threads of block `block_idx` to their end. Throws Fault.
  void run(const std::function<void()>& thread_body, dim3 grid, dim3 shape, uint3 index,
           uint64_t linear_index, size_t dynamic_shared_nbytes);

  // __syncthreads: waits for all threads that have not returned; gives the number that said `predicate`.
  int synchronize(bool predicate, const Site& site);
  // Meets the lanes in `mask`. `ordered`: memory accesses before are ordered before those after.
  // Returns the slots that belong to this meeting.
  struct Meeting {
    unsigned char* slots;
    bool* combined;
  };
  Meeting meet(uint32_t mask, const void* value, size_t nbytes, bool ordered, const Site& site);
  // __threadfence, and what it orders. An atomic operation of any thread of the block, followed by a fence of
  // any other, counts as of one thread: there is a barrier between them, or ThreadSanitizer reports another
  // race.
  void fence();
  void before_atomic(void* address);
  void after_atomic(void* address);
  // Whether the next asynchronous copy lands as soon as it is issued.
  bool copy_lands_at_once();

  dim3 grid_dim;
  dim3 block_dim;
  uint3 block_idx{};
  SharedMemory shared;

 private:
  static void thread_main();
  void suspend(Fiber& self, Fiber::State state, const Site& site);
  void leave(Fiber& self);
  Fiber* next();
  void make_ready(Fiber& fiber);
  void release_barrier();
  Rendezvous& rendezvous(Fiber& self, uint32_t mask, const Site& site);
  void report_deadlock() const;
  uint64_t random();
  void* token(int which) const { return &tokens_[8 * which]; }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<int> ready_;
  size_t ready_head_ = 0;
  int num_threads_ = 0;
  int num_done_ = 0;
  int num_at_barrier_ = 0;
  uint32_t barrier_meeting_ = 0;
  int barrier_count_[2] = {};
  Site barrier_site_;
  Context scheduler_;
  std::vector<void*> atomics_seen_;
  const std::function<void()>* thread_body_ = nullptr;
  std::exception_ptr failure_;
  uint64_t random_state_ = 1;
  std::unique_ptr<char[]> tokens_;  // what ThreadSanitizer knows the barriers by, new for each block
};

// The fiber that this OS thread is running. Kernels ask for it all the time; a call to __tls_get_addr each
// time would cost more than the fibers do, hence the TLS model. It is set here and not by a compiler flag,
// which would pull libstdc++'s own thread-locals into the small static block too and make the module
// unloadable once libstdc++ is there.
extern thread_local constinit Fiber* current_fiber [[gnu::tls_model("initial-exec")]];

// What ThreadSanitizer knows the start and the end of launches by.
alignas(8) inline char launch_start[8], launch_end[8];

// A different, well mixed number for each x (splitmix64).
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// Coordinates as text.
std::string describe(const uint3& v);

// The coordinates of number i of a grid or a block.
inline uint3 unflatten(uint64_t i, dim3 shape) {
  return {unsigned(i % shape.x), unsigned(i / shape.x % shape.y),
          unsigned(i / (uint64_t(shape.x) * shape.y))};
}

// All lanes in `mask` give a value and get the table of them, [32], of which only their own entries count.
template <class T>
const T* exchange(uint32_t mask, const T& value, const Site& site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= Rendezvous::kSlotNbytes);
  return reinterpret_cast<const T*>(
      current_fiber->block->meet(mask, &value, sizeof(T), /*ordered=*/false, site).slots);
}

}  // namespace paged_ops::simt
