// Copying whole blocks: inside caches (copy-on-write) and between two pools in host memory (swap).
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "core/check.h"
#include "cpu/index_check.h"
#include "cpu/ops.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

namespace {

int64_t block_nbytes(const BlockShape& block) {
  return block.run_nbytes * block.num_runs[0] * block.num_runs[1];
}

// A large block, such as one of all layers, is shared out in pieces.
constexpr int64_t kPieceBytes = 128 << 10;
// A call that copies so much writes past the caches: what it writes would not stay there, and a line that is
// written whole need not be read first.
constexpr int64_t kStreamedCallBytes = 1 << 20;
constexpr int64_t kStreamedRunBytes = 4 << 10;

// memcpy past the caches. Four streams side by side keep the memory busy.
void stream(char* to, const char* from, int64_t nbytes) {
#if defined(__x86_64__)
  constexpr int64_t kLine = 64, kStep = 4 * kLine, kStreams = 4, kAhead = 512;
  const int64_t head = -reinterpret_cast<uintptr_t>(to) & (kLine - 1);
  std::memcpy(to, from, size_t(head));
  to += head, from += head, nbytes -= head;
  const int64_t share = nbytes / kStreams / kStep * kStep;
  for (int64_t offset = 0; offset < share; offset += kStep) {
    for (int64_t begin = offset; begin < kStreams * share; begin += share) {
      const char* source = from + begin;
      auto* target = reinterpret_cast<__m128i*>(to + begin);
      for (int64_t line = 0; line < kStep; line += kLine) __builtin_prefetch(source + kAhead + line);
      for (int64_t i = 0; i < kStep / 16; i++)
        _mm_stream_si128(target + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i));
    }
  }
  to += kStreams * share, from += kStreams * share, nbytes -= kStreams * share;
  std::memcpy(to, from, size_t(nbytes));
  _mm_sfence();  // whoever learns that this is done has to see it
#else
  std::memcpy(to, from, size_t(nbytes));
#endif
}

// Bytes [begin, end) of a block, counted through its runs.
void copy_piece(char* to, const BlockShape& to_shape, const char* from, const BlockShape& from_shape,
                int64_t begin, int64_t end, bool streamed) {
  const int64_t run_nbytes = from_shape.run_nbytes;
  while (begin < end) {
    const int64_t run = begin / run_nbytes, in_run = begin % run_nbytes;
    const int64_t i = run / from_shape.num_runs[1], j = run % from_shape.num_runs[1];
    const int64_t nbytes = std::min(run_nbytes - in_run, end - begin);
    char* target = to + i * to_shape.run_stride[0] + j * to_shape.run_stride[1] + in_run;
    const char* source = from + i * from_shape.run_stride[0] + j * from_shape.run_stride[1] + in_run;
    if (streamed && nbytes >= kStreamedRunBytes) {
      stream(target, source, nbytes);
    } else {
      std::memcpy(target, source, size_t(nbytes));
    }
    begin += nbytes;
  }
}

// Calls copy(block, begin, end, streamed) for all pieces of `num_blocks` blocks of `nbytes` bytes.
template <class F>
void for_each_piece(int64_t num_blocks, int64_t nbytes, F&& copy) {
  const int64_t pieces = (nbytes + kPieceBytes - 1) / kPieceBytes;
  const bool streamed = num_blocks * nbytes >= kStreamedCallBytes;
  parallel_for(num_blocks * pieces, threads_for(2 * num_blocks * nbytes), [&](int64_t task) {
    const int64_t begin = task % pieces * kPieceBytes;
    copy(task / pieces, begin, std::min(begin + kPieceBytes, nbytes), streamed);
  });
}

}  // namespace

void block_copy(const BlockCopyParams& p, const Context&) {
  check_block_pairs(p.block_pairs, p.num_pairs, p.num_blocks, p.num_blocks, true);
  for_each_piece(p.num_caches * p.num_pairs, block_nbytes(p.block),
                 [&](int64_t block, int64_t begin, int64_t end, bool streamed) {
                   char* cache = static_cast<char*>(p.caches[block / p.num_pairs]);
                   const int64_t* pair = p.block_pairs + 2 * (block % p.num_pairs);
                   if (pair[0] == pair[1]) return;
                   copy_piece(cache + pair[1] * p.block_stride, p.block, cache + pair[0] * p.block_stride,
                              p.block, begin, end, streamed);
                 });
}

void block_swap(const BlockSwapParams& p, const Context&) {
  PAGED_OPS_REQUIRE(!p.source_on_device && !p.destination_on_device,
                    p.source_on_device ? "source" : "destination",
                    ": is on a device; the cpu backend copies between pools in host memory");
  check_block_pairs(p.block_pairs, p.num_pairs, p.source_num_blocks, p.destination_num_blocks, false);
  for_each_piece(
      p.num_pairs, block_nbytes(p.source_block), [&](int64_t i, int64_t begin, int64_t end, bool streamed) {
        const int64_t* pair = p.block_pairs + 2 * i;
        copy_piece(static_cast<char*>(p.destination) + pair[1] * p.destination_block_stride,
                   p.destination_block, static_cast<const char*>(p.source) + pair[0] * p.source_block_stride,
                   p.source_block, begin, end, streamed);
      });
}

}  // namespace paged_ops::cpu
