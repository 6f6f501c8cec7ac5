// What this machine can do at most: reading, gathering and copying memory, and multiply-adds. Built by
// limits.py.
//
// Each function starts threads of its own, lets them meet at a barrier and takes the time in there, so that
// starting them is not counted, and returns seconds per repetition. Vectors are GCC's: the compiler spells
// them in the instruction set of the machine.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Line = int64_t __attribute__((vector_size(64), aligned(8), may_alias));
// As wide as a register: sums in wider ones would live in memory, where these have no room.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
using Floats = float __attribute__((vector_size(kVectorBytes)));

constexpr size_t kLine = 64;
constexpr size_t kStep = 4 * kLine;  // read per turn of a loop, into as many accumulators

std::atomic<int64_t> sink;  // results go here, so that nothing is optimised away

// Nanoseconds that threads started here were ready to run and had no CPU: what others on the machine took.
std::atomic<int64_t> waited_ns;

void count_waiting() {
  std::FILE* file = std::fopen("/proc/thread-self/schedstat", "r");
  if (file == nullptr) return;
  long long ran = 0, waited = 0;
  if (std::fscanf(file, "%lld %lld", &ran, &waited) == 2) waited_ns.fetch_add(waited);
  std::fclose(file);
}

// Runs work(0) .. work(num_threads - 1) side by side; from the first one's start to the last one's end.
double seconds_side_by_side(int num_threads, const std::function<void(int)>& work) {
  std::atomic<int> waiting{num_threads};
  std::vector<Clock::time_point> begin(num_threads), end(num_threads);
  const auto run = [&](int thread) {
    waiting.fetch_sub(1);
    // A spin, so that all start at once; yielding in case there are fewer CPUs than threads.
    for (int spins = 0; waiting.load(std::memory_order_acquire) > 0; spins++) {
      if (spins > 4096) std::this_thread::yield();
    }
    begin[thread] = Clock::now();
    work(thread);
    end[thread] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < num_threads; thread++) {
    others.emplace_back([&run, thread] {
      run(thread);
      count_waiting();
    });
  }
  run(0);
  for (std::thread& other : others) other.join();
  const auto first = *std::min_element(begin.begin(), begin.end());
  const auto last = *std::max_element(end.begin(), end.end());
  return std::chrono::duration<double>(last - first).count();
}

void drain(Line a, Line b, Line c, Line d) {
  const Line all = a ^ b ^ c ^ d;
  int64_t sum = 0;
  for (int i = 0; i < 8; i++) sum ^= all[i];
  sink.store(sum, std::memory_order_relaxed);
}

inline Line load(const char* from) { return *reinterpret_cast<const Line*>(from); }

// Reads `nbytes` as kStreams streams side by side, each prefetched `ahead` bytes before its loads.
template <int kStreams>
void read_streams(const char* from, size_t nbytes, size_t ahead) {
  const size_t stream = nbytes / kStreams / kStep * kStep;
  Line a{}, b{}, c{}, d{};
  for (size_t offset = 0; offset < stream; offset += kStep) {
    for (int s = 0; s < kStreams; s++) {
      const char* at = from + s * stream + offset;
      if (ahead != 0) {
        for (size_t line = 0; line < kStep; line += kLine) __builtin_prefetch(at + ahead + line);
      }
      a ^= load(at);
      b ^= load(at + kLine);
      c ^= load(at + 2 * kLine);
      d ^= load(at + 3 * kLine);
    }
  }
  drain(a, b, c, d);
}

// Where prefetches of a gather stand: in one piece after the other, without a gap at their borders.
struct Cursor {
  const char* const* piece;
  const char* const* last;
  size_t offset, nbytes;

  void prefetch_and_advance(size_t step) {
    const char* at = *piece + offset;
    for (size_t line = 0; line < step; line += kLine) __builtin_prefetch(at + line);
    offset += step;
    if (offset >= nbytes && piece != last) {
      offset = 0;
      piece++;
    }
  }
};

void read_pieces(const char* const* pieces, int64_t num_pieces, size_t nbytes, size_t ahead) {
  if (num_pieces == 0) return;
  Line a{}, b{}, c{}, d{};
  Cursor next{pieces, pieces + num_pieces - 1, 0, nbytes};
  const size_t whole = nbytes / kStep * kStep, rest = nbytes - whole;
  for (size_t done = 0; done < ahead; done += kStep) next.prefetch_and_advance(std::min(kStep, nbytes));
  for (int64_t i = 0; i < num_pieces; i++) {
    const char* at = pieces[i];
    for (size_t offset = 0; offset < whole; offset += kStep) {
      if (ahead != 0) next.prefetch_and_advance(kStep);
      a ^= load(at + offset);
      b ^= load(at + offset + kLine);
      c ^= load(at + offset + 2 * kLine);
      d ^= load(at + offset + 3 * kLine);
    }
    if (rest != 0 && ahead != 0) next.prefetch_and_advance(rest);
    for (size_t offset = whole; offset + kLine <= nbytes; offset += kLine) a ^= load(at + offset);
  }
  drain(a, b, c, d);
}

#if defined(__AMX_BF16__)
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_nbytes[16] = {};
  uint8_t rows[16] = {};
};

bool permit_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Four accumulators, two left and two right operands: as a product of large matrices would keep the unit
// busy.
void multiply_tiles(int64_t rounds) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.row_nbytes[tile] = 64, config.rows[tile] = 16;
  asm volatile("ldtilecfg %0" ::"m"(config));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < rounds; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#endif

constexpr int kChains = 12;  // more than latency times units
void multiply_add(int64_t rounds) {
  Floats sums[kChains];
  for (int chain = 0; chain < kChains; chain++) sums[chain] = Floats{} + float(chain);
  Floats factor = Floats{} + 0.999f, addend = Floats{} + 0.001f;
  asm volatile("" : "+m"(factor), "+m"(addend));
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; chain++) sums[chain] = sums[chain] * factor + addend;
  }
  Floats all = sums[0];
  for (int chain = 1; chain < kChains; chain++) all += sums[chain];
  sink.store(int64_t(all[0]), std::memory_order_relaxed);
}

}  // namespace

extern "C" {

// Every thread reads its contiguous share. form: 0 one stream, 1 the same with prefetches, 2 four streams, 3
// the same with prefetches. Which one is best differs between machines; the caller tries them.
double read_in_sequence(const char* from, size_t nbytes, int num_threads, int form, int repeats) {
  const size_t share = nbytes / num_threads / kStep * kStep, ahead = form % 2 == 0 ? 0 : 1024;
  const double seconds = seconds_side_by_side(num_threads, [&](int thread) {
    for (int i = 0; i < repeats; i++) {
      if (form < 2) {
        read_streams<1>(from + thread * share, share, ahead);
      } else {
        read_streams<4>(from + thread * share, share, ahead);
      }
    }
  });
  return seconds / repeats;
}

// The pieces, each of `nbytes`, in their order; every thread takes a contiguous share of the list.
double gather(const char* const* pieces, int64_t num_pieces, size_t nbytes, int num_threads, size_t ahead,
              int repeats) {
  const double seconds = seconds_side_by_side(num_threads, [&](int thread) {
    const int64_t begin = num_pieces * thread / num_threads, end = num_pieces * (thread + 1) / num_threads;
    for (int i = 0; i < repeats; i++) read_pieces(pieces + begin, end - begin, nbytes, ahead);
  });
  return seconds / repeats;
}

double copy(char* const* to, const char* const* from, int64_t num_pieces, size_t nbytes, int num_threads,
            int repeats) {
  const double seconds = seconds_side_by_side(num_threads, [&](int thread) {
    const int64_t begin = num_pieces * thread / num_threads, end = num_pieces * (thread + 1) / num_threads;
    for (int i = 0; i < repeats; i++) {
      for (int64_t piece = begin; piece < end; piece++) std::memcpy(to[piece], from[piece], nbytes);
    }
  });
  return seconds / repeats;
}

// Since the library was loaded; the calling thread's own waiting is not in it.
double waited_seconds() { return 1e-9 * double(waited_ns.load()); }

// Operations per second of float32 multiply-adds in vectors (two operations each).
double multiply_add_rate(int num_threads, int64_t rounds) {
  const double seconds = seconds_side_by_side(num_threads, [&](int) { multiply_add(rounds); });
  return 2.0 * kChains * (kVectorBytes / sizeof(float)) * double(rounds) * num_threads / seconds;
}

// The same of bfloat16 tiles; 0 where the machine has none.
double tile_rate(int num_threads, int64_t rounds) {
#if defined(__AMX_BF16__)
  if (!permit_amx()) return 0;
  const double seconds = seconds_side_by_side(num_threads, [&](int) { multiply_tiles(rounds); });
  return 2.0 * 4 * 16 * 16 * 32 * double(rounds) * num_threads / seconds;
#else
  (void)num_threads, (void)rounds;
  return 0;
#endif
}

}  // extern "C"
