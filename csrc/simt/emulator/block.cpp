// Scheduling the fibers of a block, and the rules that their meetings keep.
#include "simt/emulator/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "core/check.h"

namespace paged_ops::simt {

thread_local constinit Fiber* current_fiber [[gnu::tls_model("initial-exec")]] = nullptr;

Config& config() {
  static Config config;
  return config;
}

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMasksKept = 8;         // from block to block, so that common masks allocate nothing
constexpr unsigned char kPoison = 0xff;  // NaN in every float type, -1 in every integer type

std::string describe(const Site& site) {
  if (!*site.op) return "start";
  if (site.where.line() == 0) return site.op;
  const char* file = site.where.file_name();
  const char* slash = std::strrchr(file, '/');
  return concat(site.op, " at ", slash ? slash + 1 : file, ":", site.where.line());
}

std::string describe(const uint3& v) { return concat("(", v.x, ", ", v.y, ", ", v.z, ")"); }

std::string hex(uint32_t mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

// Anonymous memory, new or anew: under ThreadSanitizer nothing is known about who used it.
char* map_pages(void* where, size_t nbytes) {
  void* p = mmap(where, nbytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (where ? MAP_FIXED : 0), -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

uint3 unflatten(uint64_t i, dim3 shape) {
  return {unsigned(i % shape.x), unsigned(i / shape.x % shape.y),
          unsigned(i / (uint64_t(shape.x) * shape.y))};
}

// What ThreadSanitizer knows the start and the end of launches by.
alignas(8) char launch_start[8], launch_end[8];
// Tokens of a block: its barrier's and its warps' barriers', of even and of odd meetings.
constexpr int kNumTokens = 2 + 2 * kMaxThreadsPerBlock / kWarpSize;
int barrier_token(uint32_t meeting) { return int(meeting & 1); }
int warp_token(int warp, uint32_t meeting) { return 2 + warp * 2 + int(meeting & 1); }

// A different, well mixed number for each x (splitmix64).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

bool Site::same_text(const Site& other) const {
  return std::strcmp(op, other.op) == 0 && where.line() == other.where.line() &&
         where.column() == other.where.column() &&
         std::strcmp(where.file_name(), other.where.file_name()) == 0;
}

void fault(const std::string& what, const Site& site) {
  std::string who;
  if (const Fiber* self = current_fiber)
    who = concat(" [block ", describe(self->block->block_idx), " thread ", describe(self->thread_idx), "]");
  throw Fault(concat("simt: ", describe(site), ": ", what, who));
}

// ---- asynchronous copies -----------------------------------------------------------------------

void CopyQueue::land(Copy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  if (copy.source)
    std::memcpy(copy.destination, copy.source, 16);
  else
    std::memset(copy.destination, 0, 16);
}

void CopyQueue::issue(Block& block, void* destination, const void* source, const Site& site) {
  mark_write(destination, 16);  // the bytes may arrive at any time from now on
  Copy copy{destination, source, num_groups_, false, site};
  bool at_once = false;
  {
    Quiet quiet;
    const CopyLanding landing = config().landing;
    at_once = landing == CopyLanding::at_once || (landing == CopyLanding::random && block.random() & 1);
  }
  if (at_once)
    land(copy);
  else if (config().poison)
    std::memset(destination, kPoison, 16);
  Quiet quiet;
  copies_.push_back(copy);
}

void CopyQueue::land_groups_below(uint64_t end) {
  while (true) {
    Copy copy;
    {
      Quiet quiet;
      if (first_ == copies_.size() || copies_[first_].group >= end) break;
      copy = copies_[first_++];
    }
    land(copy);
  }
  Quiet quiet;
  if (first_ == copies_.size()) {
    copies_.clear();
    first_ = 0;
  }
}

void CopyQueue::wait(uint64_t num_left) {
  land_groups_below(num_groups_ > num_left ? num_groups_ - num_left : 0);
}

void CopyQueue::wait_all() {
  commit();
  wait(0);
}

void CopyQueue::clear() {
  copies_.clear();
  first_ = 0;
  num_groups_ = 0;
}

// ---- fences ------------------------------------------------------------------------------------
//
// ThreadSanitizer knows no fences, so it is told what they order: what a thread wrote before a fence and a
// later atomic operation on x is seen by who did an atomic operation on x and then a fence.

void Block::fence() {
#if SIMT_TSAN
  Quiet quiet;
  current_fiber->fenced = true;
  for (void* address : atomics_seen_) observe(address);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

void Block::before_atomic(void* address) {
  if (!SIMT_TSAN) return;
  Quiet quiet;
  if (current_fiber->fenced) publish(address);
}

void Block::after_atomic(void* address) {
  if (!SIMT_TSAN) return;
  Quiet quiet;
  if (std::find(atomics_seen_.begin(), atomics_seen_.end(), address) == atomics_seen_.end())
    atomics_seen_.push_back(address);
}

// ---- shared memory -----------------------------------------------------------------------------

namespace {
constexpr size_t kRedZone = 128;
constexpr size_t kArenaNbytes = round_up(kMaxSharedNbytes + 64 * 1024, kPage);  // and the red zones
}  // namespace

SharedMemory::SharedMemory() : base_(reinterpret_cast<unsigned char*>(map_pages(nullptr, kArenaNbytes))) {}

SharedMemory::~SharedMemory() {
  allow(base_, kArenaNbytes);
  munmap(base_, kArenaNbytes);
}

void SharedMemory::reset(size_t dynamic_nbytes, bool poison) {
  allow(base_, kArenaNbytes);
  dirty_ = std::max({dirty_, end_, dynamic_nbytes});
  if (SIMT_TSAN && dirty_) map_pages(base_, round_up(dirty_, kPage));
  if (poison) std::memset(base_, kPoison, dirty_);
  forbid(base_ + dynamic_nbytes, kArenaNbytes - dynamic_nbytes);
  dynamic_nbytes_ = dynamic_nbytes;
  static_nbytes_ = 0;
  end_ = round_up(dynamic_nbytes, kSharedAlignment) + kRedZone;
  variables_.clear();
}

void* SharedMemory::variable(const void* key, size_t nbytes, size_t alignment, const Site& site) {
  Quiet quiet;
  for (const Variable& variable : variables_)
    if (variable.key == key) return variable.address;
  static_nbytes_ = round_up(static_nbytes_, alignment) + nbytes;
  if (static_nbytes_ > kMaxStaticSharedNbytes)
    fault(concat(static_nbytes_, " bytes of static shared memory, at most ", kMaxStaticSharedNbytes), site);
  if (static_nbytes_ + dynamic_nbytes_ > kMaxSharedNbytes)
    fault(concat(static_nbytes_, " + ", dynamic_nbytes_,
                 " bytes of static and dynamic shared memory, at most ", kMaxSharedNbytes),
          site);
  unsigned char* address = base_ + round_up(end_, std::max(alignment, kSharedAlignment));
  end_ = size_t(address - base_) + round_up(nbytes, kSharedAlignment) + kRedZone;
  if (end_ > kArenaNbytes) fault("too many SIMT_SHARED variables", site);
  allow(address, nbytes);
  if (config().poison) std::memset(address, kPoison, nbytes);
  variables_.push_back({key, address});
  return address;
}

// ---- the scheduler -----------------------------------------------------------------------------

uint64_t Block::random() {
  random_state_ = mix(random_state_);
  return random_state_ >> 20;
}

SIMT_UNSEEN void Block::make_ready(Fiber& fiber) {
  fiber.state = Fiber::State::ready;
  ready_.push_back(fiber.index);
}

// Takes a fiber off the ready list; null when it is empty.
SIMT_UNSEEN Fiber* Block::next() {
  const size_t num_ready = ready_.size() - ready_head_;
  if (num_ready == 0) return nullptr;
  int index;
  switch (config().order) {
    case FiberOrder::reverse:
      index = ready_.back();
      ready_.pop_back();
      return fibers_[index].get();
    case FiberOrder::random:
      std::swap(ready_[ready_head_ + random() % num_ready], ready_[ready_head_]);
      break;
    case FiberOrder::forward: break;
  }
  index = ready_[ready_head_++];
  if (ready_head_ == ready_.size()) {
    ready_.clear();
    ready_head_ = 0;
  }
  return fibers_[index].get();
}

// The calling fiber waits until some other makes it ready again.
SIMT_UNSEEN void Block::suspend(Fiber& self, Fiber::State state, const Site& site) {
  self.state = state;
  self.waits_at = site;
  Fiber* other = next();  // never self, which is not ready
  if (other) {
    current_fiber = other;
    Context::switch_stack(self.context, other->context);
  } else {
    current_fiber = nullptr;
    Context::switch_stack(self.context, scheduler_);  // which reports the deadlock
  }
}

// The calling fiber has ended, or failed; the scheduler's own stack takes over.
SIMT_UNSEEN void Block::leave(Fiber& self) {
  Fiber* other;
  {
    Quiet quiet;
    other = failure_ ? nullptr : next();
    current_fiber = other;
  }
  Context::switch_stack(self.context, other ? other->context : scheduler_, /*for_good=*/true);
}

SIMT_UNSEEN void Block::thread_main() {
  Fiber& self = *current_fiber;
  Block& block = *self.block;
  Context::arrived(self.context);
  observe(launch_start);
  // Nothing may unwind past this frame: there is no caller. And the handler must end before the switch,
  // because exceptions being handled belong to the OS thread, not to the fiber.
  try {
    (*block.thread_body_)();
    publish(launch_end);  // before what follows the launch, not before other blocks
    Quiet quiet;
    if (const Site* site = self.copies.in_flight())
      fault("a thread returns with this copy still in flight", *site);
    Warp& warp = *block.warps_[self.warp];
    for (const Rendezvous& meeting : warp.meetings)
      if (meeting.arrived && meeting.mask >> self.lane & 1)
        fault(concat("lane ", self.lane, " returns while others in mask ", hex(meeting.mask), " wait for it"),
              meeting.site);
    warp.live &= ~(1u << self.lane);
    self.state = Fiber::State::done;
    ++block.num_done_;
    if (block.num_at_barrier_ && block.num_at_barrier_ == block.num_threads_ - block.num_done_)
      block.release_barrier();
  } catch (...) {
    if (!block.failure_) block.failure_ = std::current_exception();
  }
  block.leave(self);
  __builtin_unreachable();
}

SIMT_UNSEEN void Block::release_barrier() {
  num_at_barrier_ = 0;
  ++barrier_meeting_;
  barrier_count_[barrier_meeting_ & 1] = 0;
  for (int i = 0; i < num_threads_; ++i)
    if (fibers_[i]->state == Fiber::State::waits_for_block) make_ready(*fibers_[i]);
}

SIMT_UNSEEN int Block::synchronize(bool predicate, const Site& site) {
  Quiet quiet;
  Fiber& self = *current_fiber;
  const uint32_t meeting = barrier_meeting_;
  if (num_at_barrier_ == 0)
    barrier_site_ = site;
  else if (!(barrier_site_ == site))
    fault(concat("divergent barrier: other threads wait in ", describe(barrier_site_)), site);
  barrier_count_[meeting & 1] += predicate;
  publish(token(barrier_token(meeting)));
  if (++num_at_barrier_ == num_threads_ - num_done_)
    release_barrier();
  else
    suspend(self, Fiber::State::waits_for_block, site);
  observe(token(barrier_token(meeting)));
  return barrier_count_[meeting & 1];
}

SIMT_UNSEEN Rendezvous& Block::rendezvous(Fiber& self, uint32_t mask, const Site& site) {
  Warp& warp = *warps_[self.warp];
  if (!(mask >> self.lane & 1))
    fault(concat("lane ", self.lane, " is not in its own mask ", hex(mask)), site);
  if (mask & ~warp.live)
    fault(
        concat("mask ", hex(mask), " names lanes that have returned or never were: ", hex(mask & ~warp.live)),
        site);
  Rendezvous* mine = nullptr;
  for (Rendezvous& place : warp.meetings)
    if (place.mask == mask) mine = &place;
  if (!mine) {
    mine = &warp.meetings.emplace_back();
    mine->mask = mask;
  }
  if (!mine->arrived)
    mine->site = site;
  else if (!(mine->site == site))
    fault(concat("divergent warp: other lanes of mask ", hex(mask), " wait in ", describe(mine->site)), site);
  return *mine;
}

SIMT_UNSEEN Block::Meeting Block::meet(uint32_t mask, const void* value, size_t nbytes, bool ordered,
                                       const Site& site) {
  Quiet quiet;
  Fiber& self = *current_fiber;
  Rendezvous& place = rendezvous(self, mask, site);
  const uint32_t meeting = place.meeting;
  unsigned char* slots = place.slots[meeting & 1];
  if (nbytes) std::memcpy(slots + self.lane * nbytes, value, nbytes);
  place.arrived |= 1u << self.lane;
  if (ordered) publish(token(warp_token(self.warp, meeting)));
  if (place.arrived == mask) {
    place.arrived = 0;
    place.combined[meeting & 1] = false;
    ++place.meeting;
    for (uint32_t others = mask & ~(1u << self.lane); others; others &= others - 1)
      make_ready(*fibers_[self.warp * kWarpSize + __builtin_ctz(others)]);
  } else {
    suspend(self, Fiber::State::waits_for_warp, site);
  }
  if (ordered) observe(token(warp_token(self.warp, meeting)));
  return {slots, &place.combined[meeting & 1]};
}

void Block::report_deadlock() const {
  std::string waiting;
  int num_told = 0;
  const Site* last = nullptr;
  for (int i = 0; i < num_threads_ && num_told < 8; ++i) {
    const Fiber& fiber = *fibers_[i];
    if (fiber.state == Fiber::State::done || (last && *last == fiber.waits_at)) continue;
    last = &fiber.waits_at;
    ++num_told;
    waiting += concat(num_told > 1 ? "; " : "", "from thread ", describe(fiber.thread_idx), " on in ",
                      describe(fiber.waits_at));
  }
  throw Fault(concat("simt: deadlock in block ", describe(block_idx), ": ", num_threads_ - num_done_, " of ",
                     num_threads_, " threads wait for each other: ", waiting));
}

void Block::run(const std::function<void()>& thread_body, dim3 grid, dim3 shape, uint3 index,
                uint64_t linear_index, size_t dynamic_shared_nbytes) {
  Quiet quiet;
  num_threads_ = int(shape.x * shape.y * shape.z);
  const int num_warps = (num_threads_ + kWarpSize - 1) / kWarpSize;
  while (int(fibers_.size()) < num_threads_) fibers_.push_back(std::make_unique<Fiber>());
  while (int(warps_.size()) < num_warps) warps_.push_back(std::make_unique<Warp>());
  grid_dim = grid;
  block_dim = shape;
  block_idx = index;
  thread_body_ = &thread_body;
  failure_ = nullptr;
  atomics_seen_.clear();
  random_state_ = mix(config().seed) ^ mix(linear_index);
  num_done_ = num_at_barrier_ = 0;
  barrier_meeting_ = 0;
  barrier_count_[0] = barrier_count_[1] = 0;
  ready_.clear();
  ready_head_ = 0;
  if (SIMT_TSAN || !tokens_) tokens_ = std::make_unique<char[]>(8 * kNumTokens);
  shared.reset(dynamic_shared_nbytes, config().poison);
  for (int w = 0; w < num_warps; ++w) {
    const int num_lanes = std::min(kWarpSize, num_threads_ - w * kWarpSize);
    warps_[w]->live = num_lanes == kWarpSize ? kAllLanes : (1u << num_lanes) - 1;
    if (warps_[w]->meetings.size() > kMasksKept) warps_[w]->meetings.clear();
    for (Rendezvous& meeting : warps_[w]->meetings) meeting.arrived = meeting.meeting = 0;
  }
  for (int i = 0; i < num_threads_; ++i) {
    Fiber& fiber = *fibers_[i];
    fiber.block = this;
    fiber.index = i;
    fiber.lane = i % kWarpSize;
    fiber.warp = i / kWarpSize;
    fiber.thread_idx = unflatten(uint64_t(i), shape);
    fiber.waits_at = {};
    fiber.copies.clear();
    fiber.fenced = false;
    fiber.context.restart(&Block::thread_main);
    make_ready(fiber);
  }
  scheduler_.adopt_thread();
  current_fiber = next();
  Context::switch_stack(scheduler_, current_fiber->context);
  current_fiber = nullptr;
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  if (num_done_ < num_threads_) report_deadlock();
}

// ---- the grid ----------------------------------------------------------------------------------

namespace {

// Blocks with their stacks are kept from launch to launch.
class BlockPool {
 public:
  std::unique_ptr<Block> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Block>();
    std::unique_ptr<Block> block = std::move(free_.back());
    free_.pop_back();
    return block;
  }
  void give_back(std::unique_ptr<Block> block) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
};

BlockPool& block_pool() {
  static BlockPool* pool = new BlockPool;  // never destroyed: other threads may outlive static objects
  return *pool;
}

void check_launch(dim3 grid, dim3 block, size_t dynamic_shared_nbytes) {
  const uint64_t num_threads = uint64_t(block.x) * block.y * block.z;
  if (num_threads < 1 || num_threads > kMaxThreadsPerBlock || block.x > 1024 || block.y > 1024 ||
      block.z > 64)
    fail<Fault>("simt: launch: a block of ", block.x, " x ", block.y, " x ", block.z, " threads; at most ",
                kMaxThreadsPerBlock, " threads, 64 in z, and at least one");
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    fail<Fault>("simt: launch: a grid of ", grid.x, " x ", grid.y, " x ", grid.z,
                " blocks; at most 2147483647 x 65535 x 65535, and at least one");
  if (dynamic_shared_nbytes > kMaxSharedNbytes)
    fail<Fault>("simt: launch: ", dynamic_shared_nbytes, " bytes of dynamic shared memory; at most ",
                kMaxSharedNbytes);
}

}  // namespace

void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_nbytes, const std::function<void()>& thread_body) {
  check_launch(grid, block, dynamic_shared_nbytes);
  if (current_fiber) fault("a kernel launches a kernel", {"launch", {}});
  const uint64_t num_blocks = uint64_t(grid.x) * grid.y * grid.z;
  const Config& how = config();

  std::vector<uint32_t> shuffled;
  if (how.order == FiberOrder::random) {
    shuffled.resize(num_blocks);
    std::iota(shuffled.begin(), shuffled.end(), 0u);
    for (uint64_t i = num_blocks; i > 1; --i)
      std::swap(shuffled[i - 1], shuffled[mix(how.seed ^ mix(i)) % i]);
  }

  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  auto work = [&] {
    publish(launch_start);
    std::unique_ptr<Block> runner = block_pool().take();
    try {
      for (uint64_t i; !failed.load() && (i = next.fetch_add(1)) < num_blocks;) {
        const uint64_t j = how.order == FiberOrder::forward   ? i
                           : how.order == FiberOrder::reverse ? num_blocks - 1 - i
                                                              : shuffled[i];
        runner->run(thread_body, grid, block, unflatten(j, grid), j, dynamic_shared_nbytes);
      }
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
    block_pool().give_back(std::move(runner));
    observe(launch_end);
  };

  const int num_workers = int(std::min<uint64_t>(std::max(1, how.workers), num_blocks));
  if (num_workers == 1) {
    work();
  } else {
    std::vector<std::thread> workers;
    for (int i = 0; i < num_workers; ++i) workers.emplace_back(work);
    for (std::thread& worker : workers) worker.join();
  }
  Context::forget_retired();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace paged_ops::simt
