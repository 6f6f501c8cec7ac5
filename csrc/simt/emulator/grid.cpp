// Handing out the blocks of a grid to OS threads.
#include "simt/emulator/grid.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "simt/emulator/block.h"

namespace paged_ops::simt {
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
