// Which cache lines the prefetcher asks for, by a program that takes the requests in the machine's place.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "cpu/kernels.h"

namespace {
std::vector<const char*> asked;
}
#define __builtin_prefetch(address, ...) asked.push_back(address)

namespace paged_ops::cpu::scalar {
// clang-format off: each needs those before it
#include "cpu/exp2_constants.inl"
#include "cpu/vec_scalar.inl"
#include "cpu/packs.inl"
#include "cpu/page_walk.inl"
// clang-format on
}  // namespace paged_ops::cpu::scalar

namespace {

using paged_ops::cpu::scalar::Prefetcher;

struct Run {
  const char* begin;
  int64_t nbytes;
};

#define REQUIRE(condition)                                               \
  if (!(condition)) {                                                    \
    std::printf("line %d, round %d: " #condition "\n", __LINE__, round); \
    std::exit(1);                                                        \
  }

void check(int round) {
  std::mt19937 random(round);
  const auto below = [&](int n) { return int64_t(random() % unsigned(n)); };
  static std::vector<char> memory(1 << 20);
  Prefetcher prefetcher;
  prefetcher.clear();
  asked.clear();
  std::vector<Run> rows;
  const char* base = memory.data();
  for (int64_t pieces = below(5); pieces > 0; pieces--) {
    // Rows one after another, or apart; heads within tokens, or tokens within heads.
    const int64_t nbytes = 8 * (1 + below(80)), num_tokens = 1 + below(20), num_heads = 1 + below(9);
    const int64_t inner = nbytes + below(2) * 64 * below(4), many = num_tokens * num_heads;
    const bool heads_inside = below(2) == 1;
    const int64_t outer = inner * (heads_inside ? num_heads : num_tokens) + below(2) * 64 * below(9);
    const int64_t stride_token = heads_inside ? outer : inner, stride_head = heads_inside ? inner : outer;
    prefetcher.add(base, num_tokens, stride_token, num_heads, stride_head, nbytes);
    for (int64_t i = 0; i < many; i++)
      rows.push_back({base + i / num_heads * stride_token + i % num_heads * stride_head, nbytes});
    base += outer * (heads_inside ? num_tokens : num_heads) + 4096;
    REQUIRE(base < memory.data() + memory.size());
  }
  prefetcher.pace(1 + below(50));
  for (size_t before = ~size_t(0); before != asked.size();) {  // until there is no more
    before = asked.size();
    int64_t wanted = 0;  // lines; the pace is the prefetcher's own affair
    switch (below(6)) {
      case 0: prefetcher.step<32>(), wanted = 1; break;
      case 1: prefetcher.step<64>(), wanted = 1; break;
      case 2: prefetcher.step<256>(), wanted = 4; break;
      case 3: prefetcher.step<1024>(), wanted = 16; break;
      case 4: prefetcher.step(192), wanted = 3; break;
      default: prefetcher.step(); break;
    }
    if (wanted == 0) continue;
    const auto got = int64_t(asked.size() - before);
    REQUIRE(got <= wanted);
    if (got == wanted) continue;
    prefetcher.drain();
    REQUIRE(int64_t(asked.size() - before) == got);  // less only at the end
  }
  // Every byte of every row lies in a line that was asked for; no line twice, none of what is no row's.
  std::vector<char> covered(memory.size() + 64), row_byte(memory.size() + 64);
  for (const char* line : asked) {
    const auto at = line - memory.data();
    REQUIRE(covered[at] == 0);
    for (int i = 0; i < 64; i++) covered[at + i] = 1;
  }
  for (const Run& row : rows)
    for (int64_t i = 0; i < row.nbytes; i++) {
      const auto at = row.begin - memory.data() + i;
      REQUIRE(covered[at] == 1);
      row_byte[at] = 1;
    }
  for (const char* line : asked) REQUIRE(row_byte[line - memory.data()] == 1);
}

}  // namespace

int main() {
  for (int round = 0; round < 400; round++) check(round);
  std::printf("all lines once\n");
}
