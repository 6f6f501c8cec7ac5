// Runs the CPU backend without Python, for sanitizers: `cpu_driver pool|fork|kernels`. Exits with 0 when all
// held.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "params/backend.h"

using namespace paged_ops;

#define CHECK(condition, ...)                                                                               \
  do {                                                                                                      \
    if (!(condition)) {                                                                                     \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, concat(__VA_ARGS__).c_str()); \
      std::exit(1);                                                                                         \
    }                                                                                                       \
  } while (false)

namespace {

// --- the thread pool ----------------------------------------------------------------------------------

// Every index exactly once, with plain writes: a race or a lost task shows.
void run_a_job(int64_t num_tasks) {
  std::vector<int> seen(num_tasks);
  cpu::parallel_for(num_tasks, 64, [&](int64_t i) { seen[i]++; });
  for (int64_t i = 0; i < num_tasks; i++)
    CHECK(seen[i] == 1, "task ", i, " of ", num_tasks, " ran ", seen[i], " times");
}

void test_pool() {
  for (const int threads : {1, 2, 5}) {
    cpu::set_num_threads(threads);
    CHECK(cpu::num_threads() == threads, cpu::num_threads());
    for (const int64_t num_tasks : {0, 1, 2, 3, 64, 1000}) run_a_job(num_tasks);
    for (int i = 0; i < 300; i++) run_a_job(3);
    // Some jobs after the workers have gone to sleep.
    for (int i = 0; i < 5; i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      run_a_job(8);
    }
  }

  // No more threads than asked for.
  std::atomic<int> inside{0}, most{0};
  cpu::parallel_for(200, 2, [&](int64_t) {
    const int now = ++inside;
    int before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
    std::this_thread::yield();
    --inside;
  });
  CHECK(most.load() <= 2, most.load());

  // More threads than a job has shares for.
  cpu::set_num_threads(70);
  std::vector<int> seen(500);
  cpu::parallel_for(500, 70, [&](int64_t i) { seen[i]++; });
  for (int i = 0; i < 500; i++) CHECK(seen[i] == 1, "task ", i, " of 500 ran ", seen[i], " times");
  cpu::set_num_threads(5);

  // An exception reaches the caller, and the pool goes on.
  for (int i = 0; i < 50; i++) {
    bool caught = false;
    try {
      cpu::parallel_for(100, 64, [&](int64_t task) {
        if (task == i) throw ValueError(concat("task ", task));
      });
    } catch (const ValueError& error) {
      caught = error.what() == concat("task ", i);
    }
    CHECK(caught, i);
    run_a_job(17);
  }

  // Nested jobs and jobs of several callers at once.
  std::atomic<int64_t> total{0};
  cpu::parallel_for(20, 64, [&](int64_t) { cpu::parallel_for(10, 64, [&](int64_t i) { total += i; }); });
  CHECK(total.load() == 20 * 45, total.load());
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; i++)
    callers.emplace_back([] {
      for (int j = 0; j < 200; j++) run_a_job(1 + j % 30);
    });
  callers.emplace_back([] {
    for (int j = 0; j < 20; j++) cpu::set_num_threads(1 + j % 4);
  });
  for (std::thread& caller : callers) caller.join();

  for (const int bad : {0, -3}) {
    bool caught = false;
    try {
      cpu::set_num_threads(bad);
    } catch (const ValueError&) {
      caught = true;
    }
    CHECK(caught, bad);
  }
}

// A child has a working pool of its own, even when it is forked while a job runs.
void test_fork() {
  cpu::set_num_threads(3);
  run_a_job(100);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) run_a_job(50);
  });
  for (int i = 0; i < 20; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that hangs is killed, which the parent sees
      run_a_job(100);
      run_a_job(100);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child ended with status ", status);
    run_a_job(30);
  }
  stop = true;
  busy.join();
}

// --- kernels ------------------------------------------------------------------------------------------

std::mt19937 rng(7);

template <class T>
void fill(std::vector<T>& x) {
  std::normal_distribution<float> normal;
  for (T& y : x) y = portable::from_float<T>(normal(rng));
}

// A problem whose tensors all end where their allocations do.
template <class T>
struct Problem {
  int num_kv_heads, group, key_dim, value_dim, block_size;
  std::vector<int32_t> seq_lens, cu_seqlens_q;
  int max_blocks, num_blocks;
  std::vector<T> query, key, value, out;
  std::vector<float> lse;
  std::vector<int32_t> block_ids;
  AttentionParams params{};

  Problem(int num_kv_heads, int group, int key_dim, int value_dim, int block_size, std::vector<int32_t> lens,
          std::vector<int32_t> cu)
      : num_kv_heads(num_kv_heads),
        group(group),
        key_dim(key_dim),
        value_dim(value_dim),
        block_size(block_size),
        seq_lens(std::move(lens)),
        cu_seqlens_q(std::move(cu)) {
    max_blocks = 1;
    for (const int len : seq_lens) max_blocks = std::max(max_blocks, (len + block_size - 1) / block_size);
    num_blocks = max_blocks * int(seq_lens.size());
    const int num_tokens = cu_seqlens_q.back();
    query.resize(size_t(num_tokens) * num_kv_heads * group * key_dim);
    key.resize(size_t(num_blocks) * block_size * num_kv_heads * key_dim);
    value.resize(size_t(num_blocks) * block_size * num_kv_heads * value_dim);
    out.resize(size_t(num_tokens) * num_kv_heads * group * value_dim);
    lse.resize(size_t(num_tokens) * num_kv_heads * group);
    fill(query), fill(key), fill(value);
    block_ids.resize(num_blocks);
    std::iota(block_ids.begin(), block_ids.end(), 0);
    std::shuffle(block_ids.begin(), block_ids.end(), rng);

    const int64_t item = sizeof(T);
    params.query = query.data();
    params.out = out.data();
    params.lse = lse.data();
    params.cu_seqlens_q = cu_seqlens_q.data();
    params.query_stride_head = key_dim * item;
    params.query_stride_token = num_kv_heads * group * params.query_stride_head;
    params.out_stride_head = value_dim * item;
    params.out_stride_token = num_kv_heads * group * params.out_stride_head;
    params.num_tokens = num_tokens;
    params.num_q_heads = num_kv_heads * group;
    params.dtype = dtype_of<T>::value;
    params.kv = kv();
    params.tables = {block_ids.data(), seq_lens.data(), max_blocks, int32_t(seq_lens.size()), max_blocks};
    params.scale = 1.0f / std::sqrt(float(key_dim));
    params.causal = true;
  }

  PagedKV kv() {
    const auto view = [&](std::vector<T>& x, int dim) {
      const int64_t row = dim * int64_t(sizeof(T));
      return CacheView{x.data(), block_size * num_kv_heads * row, num_kv_heads * row, row};
    };
    return {view(key, key_dim), view(value, value_dim), num_blocks, block_size, num_kv_heads, key_dim,
            value_dim,          dtype_of<T>::value};
  }

  const T* row(const std::vector<T>& cache, int dim, int seq, int position, int head) const {
    const int64_t block = block_ids[seq * max_blocks + position / block_size];
    return &cache[((block * block_size + position % block_size) * num_kv_heads + head) * dim];
  }

  // The definition, in double.
  void check(double tolerance) const {
    for (size_t seq = 0; seq < seq_lens.size(); seq++)
      for (int token = cu_seqlens_q[seq]; token < cu_seqlens_q[seq + 1]; token++)
        for (int q_head = 0; q_head < num_kv_heads * group; q_head++) {
          const int head = q_head / group,
                    seen = std::max(0, seq_lens[seq] - cu_seqlens_q[seq + 1] + token + 1);
          const T* q = &query[(size_t(token) * num_kv_heads * group + q_head) * key_dim];
          std::vector<double> weights(seen);
          double total = 0;
          for (int i = 0; i < seen; i++) {
            const T* k = row(key, key_dim, int(seq), i, head);
            double dot = 0;
            for (int d = 0; d < key_dim; d++)
              dot += double(portable::to_float(q[d])) * portable::to_float(k[d]);
            total += weights[i] = std::exp(dot * params.scale);
          }
          const float got_lse = lse[size_t(token) * num_kv_heads * group + q_head];
          if (seen == 0)
            CHECK(got_lse == -INFINITY, got_lse);
          else
            CHECK(std::abs(got_lse - std::log(total)) < 1e-4, got_lse, " for ", std::log(total));
          for (int d = 0; d < value_dim; d++) {
            double wanted = 0;
            for (int i = 0; i < seen; i++)
              wanted += weights[i] / total * portable::to_float(row(value, value_dim, int(seq), i, head)[d]);
            const float got =
                portable::to_float(out[(size_t(token) * num_kv_heads * group + q_head) * value_dim + d]);
            CHECK(std::abs(got - wanted) < tolerance, "token ", token, " head ", q_head, " column ", d, ": ",
                  got, " for ", wanted);
          }
        }
  }

  void run() { cpu::backend().attention(params, Context{}); }
};

template <class T>
void test_attention(double tolerance) {
  const std::vector<int32_t> lens{0, 1, 63, 65, 1100, 90}, cu{0, 1, 2, 3, 5, 8, 98};
  for (const auto& [heads, group, key_dim, value_dim, block_size] :
       {std::array<int, 5>{2, 1, 64, 64, 16}, {1, 3, 8, 24, 3}, {2, 8, 40, 8, 1}, {1, 5, 136, 72, 7}}) {
    Problem<T> problem(heads, group, key_dim, value_dim, block_size, lens, cu);
    std::vector<T> first;
    for (const int threads : {1, 2, 3}) {
      cpu::set_num_threads(threads);
      std::memset(problem.out.data(), 0xff, problem.out.size() * sizeof(T));
      problem.run();
      problem.check(tolerance);
      if (first.empty()) first = problem.out;
      CHECK(std::memcmp(first.data(), problem.out.data(), first.size() * sizeof(T)) == 0, threads,
            " threads");
    }
    // Scratch of exactly the size that is asked for.
    const size_t nbytes = cpu::backend().attention_workspace_nbytes(problem.params);
    std::vector<float> workspace(nbytes / sizeof(float), NAN);
    problem.params.workspace = workspace.data();
    problem.params.workspace_nbytes = nbytes;
    problem.run();
    CHECK(std::memcmp(first.data(), problem.out.data(), first.size() * sizeof(T)) == 0, "with a workspace");
  }
}

template <class T>
void test_merge() {
  for (const int dim : {8, 40, 128}) {
    constexpr int kTokens = 37, kHeads = 3;
    std::vector<T> a(kTokens * kHeads * dim), b(a.size()), out(a.size());
    std::vector<float> lse_a(kTokens * kHeads), lse_b(lse_a.size()), lse(lse_a.size());
    fill(a), fill(b), fill(lse_a), fill(lse_b);
    lse_a[0] = lse_b[1] = lse_a[2] = lse_b[2] = -INFINITY;
    const int64_t head = dim * int64_t(sizeof(T)), token = kHeads * head;
    MergeStatesParams p{
        a.data(), b.data(), lse_a.data(), lse_b.data(), out.data(), lse.data(), token, head,
        token,    head,     token,        head,         kTokens,    kHeads,     dim,   dtype_of<T>::value};
    cpu::backend().merge_states(p, Context{});
    CHECK(std::memcmp(out.data(), b.data(), head) == 0 && lse[0] == lse_b[0], "b alone");
    CHECK(std::memcmp(&out[dim], &a[dim], head) == 0 && lse[1] == lse_a[1], "a alone");
    CHECK(lse[2] == -INFINITY && portable::to_float(out[2 * dim]) == 0, "neither");
    for (size_t i = 3; i < lse.size(); i++) {
      const double wanted = std::log(std::exp(double(lse_a[i])) + std::exp(double(lse_b[i])));
      CHECK(std::abs(lse[i] - wanted) < 1e-5, lse[i], " for ", wanted);
    }
  }
}

// Writes rows through slots and gathers them back.
template <class T>
void test_write_and_gather() {
  Problem<T> problem(3, 1, 40, 24, 5, {7, 0, 200, 33}, {0, 1, 2, 3, 4});
  const int num_tokens = 7 + 200 + 33;
  std::vector<T> key(num_tokens * 3 * 40), value(num_tokens * 3 * 24), key_out(key.size()),
      value_out(value.size());
  fill(key), fill(value);
  std::vector<int64_t> slots;
  for (size_t seq = 0; seq < problem.seq_lens.size(); seq++)
    for (int i = 0; i < problem.seq_lens[seq]; i++)
      slots.push_back(int64_t(problem.block_ids[seq * problem.max_blocks + i / 5]) * 5 + i % 5);
  const int64_t item = sizeof(T);
  const CacheWriteParams write{key.data(),    value.data(), slots.data(), 3 * 40 * item,      40 * item,
                               3 * 24 * item, 24 * item,    num_tokens,   dtype_of<T>::value, problem.kv()};
  cpu::backend().cache_write(write, Context{});
  std::vector<int32_t> cu_seqlens(5);
  const GatherParams gather{
      key_out.data(),       value_out.data(), cu_seqlens.data(), 3 * 40 * item,      40 * item,
      3 * 24 * item,        24 * item,        num_tokens,        dtype_of<T>::value, problem.kv(),
      problem.params.tables};
  cpu::backend().gather(gather, Context{});
  CHECK(std::memcmp(key.data(), key_out.data(), key.size() * item) == 0, "keys");
  CHECK(std::memcmp(value.data(), value_out.data(), value.size() * item) == 0, "values");
  CHECK((cu_seqlens == std::vector<int32_t>{0, 7, 7, 207, 240}), "cu_seqlens");
}

void test_block_copies() {
  constexpr int64_t kBlock = 96, kBlocks = 12;
  std::vector<std::vector<uint8_t>> caches(3, std::vector<uint8_t>(kBlock * kBlocks));
  std::vector<void*> addresses;
  for (auto& cache : caches) {
    for (uint8_t& x : cache) x = uint8_t(rng());
    addresses.push_back(cache.data());
  }
  const std::vector<int64_t> pairs{0, 5, 0, 6, 11, 1};
  const BlockShape dense{kBlock, {1, 1}, {0, 0}};
  cpu::backend().block_copy({addresses.data(), 3, dense, kBlock, kBlocks, pairs.data(), 3}, Context{});
  std::vector<uint8_t> pool(kBlock * 4);
  const std::vector<int64_t> out{6, 3, 1, 0};
  const BlockShape runs{8, {4, 3}, {24, 8}};  // the same bytes as twelve runs
  cpu::backend().block_swap(
      {caches[2].data(), pool.data(), runs, runs, kBlock, kBlock, kBlocks, 4, out.data(), 2, false, false},
      Context{});
  for (const auto& cache : caches)
    for (const auto& [from, to] : {std::pair{0, 5}, {0, 6}, {11, 1}})
      CHECK(std::memcmp(&cache[from * kBlock], &cache[to * kBlock], kBlock) == 0, from, " to ", to);
  CHECK(std::memcmp(&pool[3 * kBlock], &caches[2][0], kBlock) == 0, "swap of 6");
  CHECK(std::memcmp(&pool[0], &caches[2][11 * kBlock], kBlock) == 0, "swap of 1");
}

void test_kernels() {
  test_block_copies();
  test_write_and_gather<float>();
  test_write_and_gather<bf16>();
  for (const std::string& isa : cpu::supported_isas()) {
    cpu::select_isa(isa);
    CHECK(cpu::selected_isa() == isa, isa);
    test_attention<float>(1e-5);
    test_attention<f16>(2e-3);
    test_attention<bf16>(2e-2);
    test_merge<float>();
    test_merge<f16>();
    test_merge<bf16>();
    std::printf("%s\n", isa.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "pool") {
    test_pool();
  } else if (what == "fork") {
    test_fork();
  } else if (what == "kernels") {
    test_kernels();
  } else if (what == "settings") {  // as the environment has them
    try {
      std::printf("%s %d\n", cpu::selected_isa().c_str(), cpu::num_threads());
    } catch (const ValueError& error) {
      std::printf("%s\n", error.what());
    }
  } else {
    std::fprintf(stderr, "usage: cpu_driver pool|fork|kernels|settings\n");
    return 2;
  }
}
