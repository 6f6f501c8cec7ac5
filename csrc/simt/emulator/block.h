// A running block: its threads as fibers, its shared memory, and the two ways in which threads meet.
#pragma once
#include <array>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "simt/emulator/config.h"
#include "simt/emulator/sanitizers.h"
#include "simt/emulator/stack_switch.h"
#include "simt/emulator/types.h"

namespace paged_ops::simt {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kMaxThreadsPerBlock = 1024;
constexpr size_t kMaxStaticSharedNbytes = 48 * 1024;
constexpr size_t kMaxSharedNbytes = 227 * 1024;  // static and dynamic of one block, sm_90 and sm_100
constexpr size_t kSharedAlignment = 128;

// A call of a synchronising function: which one, and where in the kernel's source.
struct Site {
  Site() = default;
  Site(const char* op, const std::source_location& where) : op(op), where(where) {}

  const char* op = "";
  std::source_location where;

  bool operator==(const Site& other) const {
    // The compiler keeps one record per place, mostly: comparing texts is for when it did not.
    return (op == other.op && std::memcmp(&where, &other.where, sizeof where) == 0) || same_text(other);
  }

 private:
  bool same_text(const Site& other) const;
};

struct Block;

// The asynchronous copies of one thread, oldest first.
class CopyQueue {
 public:
  // Copies 16 bytes, or writes 16 zeros when `source` is null.
  void issue(Block& block, void* destination, const void* source, const Site& site);
  void commit() {
    Quiet quiet;
    ++num_groups_;
  }
  // Lands all but the `num_left` youngest committed groups.
  void wait(uint64_t num_left);
  void wait_all();
  // Where the oldest copy was issued that nobody has waited for; null if there is none.
  const Site* in_flight() const { return first_ < copies_.size() ? &copies_[first_].site : nullptr; }
  void clear();

 private:
  struct Copy {
    void* destination;
    const void* source;
    uint64_t group;
    bool landed;
    Site site;
  };
  static void land(Copy& copy);
  void land_groups_below(uint64_t end);

  std::vector<Copy> copies_;
  size_t first_ = 0;         // of those not yet waited for
  uint64_t num_groups_ = 0;  // committed; the group that is open has this number
};

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
  std::deque<Rendezvous>
      meetings;  // one per mask in use; lanes may wait in one while others pass through another
};

// The shared memory of a block: dynamic memory first, then each SIMT_SHARED variable as it is reached.
class SharedMemory {
 public:
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void reset(size_t dynamic_nbytes, bool poison);
  unsigned char* dynamic() const { return base_; }
  // The variable known by `key`, the same for all threads of the block.
  void* variable(const void* key, size_t nbytes, size_t alignment, const Site& site);

 private:
  struct Variable {
    const void* key;
    void* address;
  };
  unsigned char* base_;
  size_t dynamic_nbytes_ = 0;
  size_t static_nbytes_ = 0;
  size_t end_ = 0;    // of what is in use
  size_t dirty_ = 0;  // the most that was ever in use
  std::vector<Variable> variables_;
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
  uint64_t random();

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

// Ends the launch with a Fault that says `what`, and which thread of which block did it where.
[[noreturn]] void fault(const std::string& what, const Site& site);

// Runs all blocks of a grid. Throws the first Fault.
void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_nbytes, const std::function<void()>& thread_body);

// All lanes in `mask` give a value and get the table of them, [32], of which only their own entries count.
template <class T>
const T* exchange(uint32_t mask, const T& value, const Site& site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= Rendezvous::kSlotNbytes);
  return reinterpret_cast<const T*>(
      current_fiber->block->meet(mask, &value, sizeof(T), /*ordered=*/false, site).slots);
}

}  // namespace paged_ops::simt
