// A small thread pool of our own: no OpenMP, so that it never meets the one that torch brings along.
#pragma once
#include <cstdint>

namespace paged_ops::cpu {

// Threads that a call may use, the caller among them: PAGED_OPS_NUM_THREADS, else the CPUs that this
// process may run on. set_num_threads() overrides both; it waits for a running job to end.
int num_threads();
void set_num_threads(int num_threads);

// Calls task(context, i) once for each i in [0, num_tasks) on at most `max_threads` threads, each of which
// begins with the same share of them every time; returns when all are done. The caller works too. The first
// exception of a task is thrown here, after which no further task starts. Called from inside a task, or while
// another thread's job runs, everything is done by the caller alone. After fork() the child has a pool of its
// own.
void run_tasks(int64_t num_tasks, int max_threads, void (*task)(void* context, int64_t index), void* context);

// run_tasks for any callable.
template <class F>
void parallel_for(int64_t num_tasks, int max_threads, F&& f) {
  run_tasks(
      num_tasks, max_threads, [](void* context, int64_t index) { (*static_cast<F*>(context))(index); }, &f);
}

// How many threads are worth waking for a job that moves `nbytes` bytes.
int threads_for(int64_t nbytes);

}  // namespace paged_ops::cpu
