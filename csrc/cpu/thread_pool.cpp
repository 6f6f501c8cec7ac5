// The thread pool: workers spin a moment for the next job, then sleep on a futex.
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "core/check.h"

namespace paged_ops::cpu {

namespace {

// Long enough to meet the next op of a layer, short enough not to take the CPU from whoever runs between.
constexpr auto kSpin = std::chrono::microseconds(15);
// So long a thread without a task looks on while others finish theirs.
constexpr auto kLongestTask = std::chrono::microseconds(500);
// Waking a sleeping worker takes as long as moving about half of this; below it a job is done sooner alone.
constexpr int64_t kMinBytesPerThread = 1 << 20;

thread_local bool inside_task = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether `done()` has come true before `longest` had passed.
template <class F>
bool spin_until(F&& done, std::chrono::steady_clock::duration longest) {
  const auto deadline = std::chrono::steady_clock::now() + longest;
  do {
    for (int i = 0; i < 16; i++) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// Asks Linux to give the calling thread its CPU time in short slices, so that when it wakes it takes its CPU
// at once from a thread with longer ones, such as a worker of OpenMP that spins for milliseconds after the
// last parallel region. Its share of the CPU stays what it was. From Linux 6.12 on; before it, this does
// nothing.
void prefer_short_slices() {
#if defined(__linux__) && defined(SYS_sched_setattr)
  struct {  // sched_attr of linux/sched/types.h, which not every system has
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  constexpr uint64_t kShortestSlice = 100'000;  // ns
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.size = sizeof(attributes);
  attributes.runtime = kShortestSlice;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// The CPU that the calling thread runs on; negative where that is not known.
int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Waits until `word` is no longer `old`: spinning first, then asleep. `resting_on` is told the CPU on which
// the thread has fallen asleep, and -1 when it has woken.
void wait_while_equal(const std::atomic<uint32_t>& word, uint32_t old,
                      std::atomic<int>* resting_on = nullptr) {
  if (spin_until([&] { return word.load(std::memory_order_acquire) != old; }, kSpin)) return;
  if (resting_on) resting_on->store(current_cpu(), std::memory_order_relaxed);
  word.wait(old, std::memory_order_acquire);
  if (resting_on) resting_on->store(-1, std::memory_order_relaxed);
}

// Has the calling thread run on another CPU than `cpu`, and says whether it does. Linux wakes a worker beside
// the thread that wakes it when no other CPU looks idle, and to a virtual machine's kernel a CPU looks busy
// that sleeps so deeply that its host has stopped it. There the two would take turns, though CPUs are free.
bool leave_cpu(int cpu) {
  if (cpu < 0 || current_cpu() != cpu) return true;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return false;
  // It stays where it is now. A mask of all CPUs comes first: asked for by itself, what is allowed today
  // would hold when the process is given more.
  cpu_set_t all, found;
  std::memset(&all, 0xff, sizeof(all));
  if (sched_setaffinity(0, sizeof(all), &all) != 0 || sched_getaffinity(0, sizeof(found), &found) != 0 ||
      !CPU_EQUAL(&found, &allowed))
    sched_setaffinity(0, sizeof(allowed), &allowed);
#endif
  return true;
}

// The tasks of a job in as many shares as threads. Each thread has a share of its own, the same one in every
// job, so that it finds in its core's cache what it touched in the last job like this one; when that is done
// it takes from the others'.
class Job {
 public:
  Job(int64_t num_tasks, int num_threads, void (*task)(void*, int64_t), void* context)
      : seats(num_threads - 1),
        task_(task),
        context_(context),
        num_shares_(std::min(num_threads, kMaxShares)) {
    for (int i = 0; i < num_shares_; i++)
      new (&share(i)) Share{num_tasks * i / num_shares_, num_tasks * (i + 1) / num_shares_};
  }

  void work(int thread) {
    inside_task = true;
    for (int i = 0; i < num_shares_; i++) {
      Share& tasks = share((thread + i) % num_shares_);
      int64_t index;
      while (!failed_.load(std::memory_order_relaxed) &&
             (index = tasks.next.fetch_add(1, std::memory_order_relaxed)) < tasks.end) {
        try {
          task_(context_, index);
        } catch (...) {
          if (!failed_.exchange(true)) error = std::current_exception();
        }
      }
    }
    inside_task = false;
  }

  std::atomic<int> seats;  // for workers; what exceeds the wanted threads finds none
  std::exception_ptr error{};

 private:
  static constexpr int kMaxShares = 64;
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

  Share& share(int i) { return reinterpret_cast<Share*>(shares_)[i]; }

  void (*const task_)(void*, int64_t);
  void* const context_;
  const int num_shares_;
  std::atomic<bool> failed_{false};
  alignas(Share) std::byte shares_[kMaxShares * sizeof(Share)];  // the first num_shares_ are made
};

class Pool {
 public:
  explicit Pool(int num_workers) : resting_on_(num_workers) {
    for (std::atomic<int>& cpu : resting_on_) cpu.store(-1, std::memory_order_relaxed);
    for (int i = 0; i < num_workers; i++) {
      try {
        workers_.emplace_back([this, i] { serve(i + 1); });
      } catch (const std::system_error&) {
        break;  // no more threads to be had: the ones there are do the work
      }
    }
  }

  ~Pool() {
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // One caller at a time.
  void run(Job& job) {
    const int num_seats = job.seats.load(std::memory_order_relaxed);
    job_ = &job;
    const int cpu = current_cpu();
    caller_cpu_.store(cpu, std::memory_order_relaxed);
    gate_.store(kOpen, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    if (num_seats < int(workers_.size())) {
      for (int i = 0; i < num_seats; i++) epoch_.notify_one();
    } else {
      epoch_.notify_all();
    }
    if (cpu >= 0 && std::any_of(resting_on_.begin(), resting_on_.end(), [&](const std::atomic<int>& other) {
          return other.load(std::memory_order_relaxed) == cpu;
        }))
      std::this_thread::yield();  // to a worker that wakes here, until it has left
    job.work(0);
    // Whoever has not come in by now need not: only those inside are waited for.
    uint32_t inside = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    while (inside != 0) {
      wait_while_equal(gate_, inside);
      inside = gate_.load(std::memory_order_acquire);
    }
  }

 private:
  void serve(int thread) {
    prefer_short_slices();
    uint32_t seen = 0;
    for (;;) {
      wait_while_equal(epoch_, seen, &resting_on_[thread - 1]);
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      const bool apart = leave_cpu(caller_cpu_.load(std::memory_order_relaxed));
      uint32_t gate = gate_.load(std::memory_order_relaxed);
      while ((gate & kOpen) && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
      }
      if (!(gate & kOpen)) continue;
      if (job_->seats.fetch_sub(1, std::memory_order_relaxed) > 0) job_->work(thread);
      gate_.fetch_sub(1, std::memory_order_acq_rel);
      gate_.notify_one();
      // Others may be at their last tasks still. The wait for the next job begins with the end of this one:
      // else a thread that ran out of tasks early would fall asleep meanwhile, come late again, and so on for
      // ever. Not on the caller's own CPU, for it could not end the job meanwhile.
      if (apart)
        spin_until([&] { return (gate_.load(std::memory_order_acquire) & kOpen) == 0; }, kLongestTask);
    }
  }

  static constexpr uint32_t kOpen = 1u << 31;

  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts jobs; what idle workers wait on
  alignas(64) std::atomic<uint32_t> gate_{0};   // kOpen while a job may be joined, plus the workers inside
  Job* job_ = nullptr;                          // valid while the gate is open or somebody is inside
  std::vector<std::atomic<int>> resting_on_;    // the CPU on which each worker has fallen asleep, or -1
  std::atomic<int> caller_cpu_{-1};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

int default_num_threads() {
  if (const char* text = std::getenv("PAGED_OPS_NUM_THREADS"); text && *text) {
    char* end = nullptr;
    errno = 0;
    const long value = std::strtol(text, &end, 10);
    PAGED_OPS_REQUIRE(*end == '\0' && errno == 0 && value >= 1 && value <= 4096,
                      "PAGED_OPS_NUM_THREADS: is \"", text, "\", wanted a number from 1 to 4096");
    return int(value);
  }
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count ? int(count) : 1;
}

// All that fork() must not carry over: the child gets a new one (and leaks the old, whose threads it has
// not).
struct State {
  std::mutex mutex;  // held by whoever runs a job or changes the pool
  std::unique_ptr<Pool> pool;
  int pool_threads = 0;
};

std::atomic<int> configured_threads{0};  // 0 = not asked yet
std::atomic<State*> current_state{nullptr};

// Never destroyed: at exit the workers must not find their pool gone.
State& state() {
  State* found = current_state.load(std::memory_order_acquire);
  if (found) return *found;
  static std::once_flag fork_handler;
  std::call_once(fork_handler, [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] {
      inside_task = false;
      current_state.store(new State, std::memory_order_release);
    });
#endif
  });
  auto* fresh = new State;
  if (current_state.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *found;
}

void run_alone(int64_t num_tasks, void (*task)(void*, int64_t), void* context) {
  for (int64_t i = 0; i < num_tasks; i++) task(context, i);
}

}  // namespace

int num_threads() {
  int count = configured_threads.load(std::memory_order_relaxed);
  if (count == 0) {
    const int wanted = default_num_threads();
    if (configured_threads.compare_exchange_strong(count, wanted)) count = wanted;
  }
  return count;
}

void set_num_threads(int num_threads) {
  PAGED_OPS_REQUIRE(num_threads >= 1 && num_threads <= 4096, "num_threads: is ", num_threads,
                    ", wanted a number from 1 to 4096");
  PAGED_OPS_REQUIRE(!inside_task, "num_threads: cannot be changed from inside a parallel task");
  State& s = state();
  const std::lock_guard lock(s.mutex);
  configured_threads.store(num_threads, std::memory_order_relaxed);
  if (s.pool_threads != num_threads) s.pool.reset();  // started again by the next job
}

int threads_for(int64_t nbytes) {
  const int64_t worth = nbytes / kMinBytesPerThread + 1;
  const int available = num_threads();
  return worth < available ? int(worth) : available;
}

void run_tasks(int64_t num_tasks, int max_threads, void (*task)(void*, int64_t), void* context) {
  int threads = max_threads < num_tasks ? max_threads : int(num_tasks);
  if (threads <= 1 || inside_task) return run_alone(num_tasks, task, context);
  State& s = state();
  std::unique_lock lock(s.mutex, std::try_to_lock);
  if (!lock) return run_alone(num_tasks, task, context);
  const int pool_threads = num_threads();
  if (pool_threads <= 1) {
    lock.unlock();
    return run_alone(num_tasks, task, context);
  }
  if (!s.pool) {
    s.pool = std::make_unique<Pool>(pool_threads - 1);
    s.pool_threads = pool_threads;
  }
  if (threads > pool_threads) threads = pool_threads;
  Job job(num_tasks, threads, task, context);
  s.pool->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace paged_ops::cpu
