// Scheduling the fibers of a block, and the rules that their meetings keep.
#include "simt/emulator/block.h"

#include <algorithm>
#include <atomic>
#include <sstream>
#include <utility>

namespace paged_ops::simt {

thread_local constinit Fiber* current_fiber [[gnu::tls_model("initial-exec")]] = nullptr;

namespace {

constexpr size_t kMasksKept = 8;  // from block to block, so that common masks allocate nothing

std::string hex(uint32_t mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

// Tokens of a block: its barrier's and its warps' barriers', of even and of odd meetings.
constexpr int kNumTokens = 2 + 2 * kMaxThreadsPerBlock / kWarpSize;
int barrier_token(uint32_t meeting) { return int(meeting & 1); }
int warp_token(int warp, uint32_t meeting) { return 2 + warp * 2 + int(meeting & 1); }

}  // namespace

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

// ---- the scheduler -----------------------------------------------------------------------------

uint64_t Block::random() {
  random_state_ = mix(random_state_);
  return random_state_ >> 20;
}

bool Block::copy_lands_at_once() {
  Quiet quiet;
  const CopyLanding landing = config().landing;
  return landing == CopyLanding::at_once || (landing == CopyLanding::random && random() & 1);
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

}  // namespace paged_ops::simt
