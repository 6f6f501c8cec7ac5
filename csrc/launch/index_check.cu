// Runs the index checks, waits for their verdicts and words them.
#include "kernels/index_check.cuh"

#include <algorithm>

#include "launch/cuda_status.h"
#include "launch/index_check.h"
#include "params/attention.h"

namespace paged_ops::launch {

namespace {

using kernels::FirstBad;
constexpr int kThreads = 256;

// Device memory for the verdicts of some checks, which is gone with the scope.
class Verdicts {
 public:
  Verdicts(int count, cudaStream_t stream) : count_(count), stream_(stream) {
    PAGED_OPS_CUDA_CHECK(cudaMalloc(&first_, count * sizeof(FirstBad)));
    PAGED_OPS_CUDA_CHECK(cudaMemsetAsync(first_, 0xff, count * sizeof(FirstBad), stream));
  }
  ~Verdicts() { (void)cudaFree(first_); }
  Verdicts(const Verdicts&) = delete;
  Verdicts& operator=(const Verdicts&) = delete;

  FirstBad* operator[](int i) const { return first_ + i; }

  // Waits for the checks. The position of the first offender, or -1.
  int64_t position(int i) const {
    const FirstBad found = read(first_ + i);
    return found == kernels::kNoneBad ? -1 : int64_t(found);
  }
  template <class T>
  T read(const T* on_device) const {
    T value;
    PAGED_OPS_CUDA_CHECK(cudaMemcpyAsync(&value, on_device, sizeof(T), cudaMemcpyDeviceToHost, stream_));
    PAGED_OPS_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return value;
  }

 private:
  int count_;
  cudaStream_t stream_;
  FirstBad* first_ = nullptr;
};

// A few CTAs stride over what there is: checks are for finding faults, not for speed.
unsigned ctas(int64_t num_threads) {
  constexpr int64_t kMaxCtas = 8;
  return unsigned(std::clamp<int64_t>((num_threads + kThreads - 1) / kThreads, 1, kMaxCtas));
}

}  // namespace

void check_block_tables(const BlockTables& tables, const PagedKV& kv, cudaStream_t stream) {
  if (tables.num_seqs == 0) return;
  const Verdicts verdicts(2, stream);
  const int64_t capacity = int64_t(tables.max_blocks_per_seq) * kv.block_size;
  simt::launch(kernels::check_range_kernel<int32_t>, ctas(tables.num_seqs), kThreads, 0, stream,
               tables.seq_lens, int64_t(tables.num_seqs), int64_t(0), capacity + 1, verdicts[0]);
  simt::launch(kernels::check_block_ids_kernel, ctas(int64_t(tables.num_seqs) * kernels::kWarpSize), kThreads,
               0, stream, tables, kv.block_size, kv.num_blocks, verdicts[1]);
  if (const int64_t seq = verdicts.position(0); seq >= 0)
    fail("seq_lens[", seq, "] = ", verdicts.read(tables.seq_lens + seq), ": wanted 0 <= length <= ", capacity,
         " (", tables.max_blocks_per_seq, " blocks per sequence of ", kv.block_size, " tokens)");
  if (const int64_t at = verdicts.position(1); at >= 0) {
    const int64_t seq = at / tables.max_blocks_per_seq, i = at % tables.max_blocks_per_seq;
    fail("block_tables[", seq, ", ", i, "] = ", verdicts.read(tables.block_ids + seq * tables.stride + i),
         ": wanted 0 <= block < ", kv.num_blocks);
  }
}

void check_cu_seqlens_q(const int32_t* cu_seqlens_q, int num_seqs, int num_tokens, cudaStream_t stream) {
  const Verdicts verdicts(1, stream);
  simt::launch(kernels::check_cu_seqlens_q_kernel, ctas(num_seqs + 1), kThreads, 0, stream, cu_seqlens_q,
               num_seqs, num_tokens, verdicts[0]);
  const int64_t i = verdicts.position(0);
  if (i < 0) return;
  const int value = verdicts.read(cu_seqlens_q + i);
  if (i == 0) fail("cu_seqlens_q[0] = ", value, ": wanted 0");
  if (value > num_tokens)
    fail("cu_seqlens_q[", i, "] = ", value, ": wanted at most ", num_tokens, ", the tokens of query");
  fail("cu_seqlens_q[", i, "] = ", value, ": wanted at least cu_seqlens_q[", i - 1,
       "] = ", verdicts.read(cu_seqlens_q + i - 1));
}

void check_tree_widths(const int32_t* cu_seqlens_q, int num_seqs, cudaStream_t stream) {
  const Verdicts verdicts(1, stream);
  simt::launch(kernels::check_widths_kernel, ctas(num_seqs), kThreads, 0, stream, cu_seqlens_q, num_seqs,
               kMaxTreeTokens, verdicts[0]);
  if (const int64_t seq = verdicts.position(0); seq >= 0)
    fail("tree_mask: sequence ", seq, " has ",
         verdicts.read(cu_seqlens_q + seq + 1) - verdicts.read(cu_seqlens_q + seq),
         " query tokens, wanted at most ", kMaxTreeTokens, ", the bits of a mask");
}

void check_slot_mapping(const CacheWriteParams& p, cudaStream_t stream) {
  const Verdicts verdicts(1, stream);
  const int64_t num_slots = p.kv.num_blocks * p.kv.block_size;
  simt::launch(kernels::check_range_kernel<int64_t>, ctas(p.num_tokens), kThreads, 0, stream, p.slot_mapping,
               int64_t(p.num_tokens), INT64_MIN, num_slots, verdicts[0]);
  if (const int64_t i = verdicts.position(0); i >= 0)
    fail("slot_mapping[", i, "] = ", verdicts.read(p.slot_mapping + i), ": wanted slot < ", num_slots, " (",
         p.kv.num_blocks, " blocks of ", p.kv.block_size, " tokens), or negative to skip");
}

void check_block_pairs(const BlockCopyParams& p, cudaStream_t stream) {
  const Verdicts verdicts(3, stream);
  simt::launch(kernels::check_range_kernel<int64_t>, ctas(2 * p.num_pairs), kThreads, 0, stream,
               p.block_pairs, 2 * p.num_pairs, int64_t(0), p.num_blocks, verdicts[0]);
  simt::launch(kernels::check_distinct_kernel, unsigned((p.num_pairs + kThreads - 1) / kThreads), kThreads, 0,
               stream, p.block_pairs, p.num_pairs, verdicts[1], verdicts[2]);
  const auto block = [&](int64_t i) { return verdicts.read(p.block_pairs + i); };
  if (const int64_t i = verdicts.position(0); i >= 0)
    fail("block_pairs[", i / 2, ", ", i % 2, "] = ", block(i),
         ": wanted 0 <= ", i % 2 ? "destination" : "source", " block < ", p.num_blocks);
  if (const int64_t i = verdicts.position(1); i >= 0)
    fail("block_pairs[", i, ", 1] = ", block(2 * i + 1),
         ": is the destination of an earlier pair too; wanted each destination once");
  if (const int64_t i = verdicts.position(2); i >= 0)
    fail("block_pairs[", i, ", 0] = ", block(2 * i),
         ": is the destination of another pair; wanted no block both as source and as destination in one "
         "call");
}

void check_positions(const RopeWriteParams& p, cudaStream_t stream) {
  const Verdicts verdicts(1, stream);
  const auto check = [&](const auto* positions) {
    using Int = std::remove_cvref_t<decltype(*positions)>;
    simt::launch(kernels::check_range_kernel<Int>, ctas(p.num_tokens), kThreads, 0, stream, positions,
                 int64_t(p.num_tokens), int64_t(0), p.max_position, verdicts[0]);
    if (const int64_t i = verdicts.position(0); i >= 0)
      fail("positions[", i, "] = ", verdicts.read(positions + i), ": wanted 0 <= position < ", p.max_position,
           ", the rows of cos_sin_cache");
  };
  if (p.wide_positions) {
    check(static_cast<const int64_t*>(p.positions));
  } else {
    check(static_cast<const int32_t*>(p.positions));
  }
}

}  // namespace paged_ops::launch
