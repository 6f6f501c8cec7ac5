// Gathering sequences out of a paged cache into contiguous rows.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "cpu/index_check.h"
#include "cpu/ops.h"
#include "cpu/quantise.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

namespace {

#include "cpu/packs.inl"

// One of the two outputs and the cache that it comes from.
struct Side {
  QuantisedRows from;  // or others, if they come out as they are
  DType dtype;         // of the output
  char* out;
  int64_t out_stride_token, out_stride_head;
  int32_t num_heads;

  int64_t nbytes() const { return row_nbytes(dtype, from.dim); }

  void copy(int64_t row, int64_t block, int64_t in_block) const {
    char* to = out + row * out_stride_token;
    if (dtype != from.dtype) {
      for (int32_t head = 0; head < num_heads; head++)
        from.read(to + head * out_stride_head, dtype, block, in_block, head);
      return;
    }
    const CacheView& cache = from.cache;
    const char* at =
        static_cast<const char*>(cache.data) + block * cache.stride_block + in_block * cache.stride_token;
    const Packs packs(cache, from.dim, from.dtype);
    if (packs.plain() && out_stride_head == nbytes() && cache.stride_head == nbytes()) {
      std::memcpy(to, at, size_t(num_heads * nbytes()));
      return;
    }
    for (int32_t head = 0; head < num_heads; head++)
      packs.gather(to + head * out_stride_head, at + head * cache.stride_head);
  }

  void clear(int64_t row) const {
    for (int32_t head = 0; head < num_heads; head++)
      std::memset(out + row * out_stride_token + head * out_stride_head, 0, size_t(nbytes()));
  }
};

}  // namespace

void gather(const GatherParams& p, const Context&) {
  check_block_tables(p.tables, p.kv);
  int64_t total = 0;
  for (int32_t seq = 0; seq < p.tables.num_seqs; seq++) total += p.tables.seq_lens[seq];
  PAGED_OPS_REQUIRE(total <= p.num_rows, "seq_lens: their sum is ", total, ", wanted at most ", p.num_rows,
                    ", the rows of the output");
  PAGED_OPS_REQUIRE(total <= std::numeric_limits<int32_t>::max(), "seq_lens: their sum is ", total,
                    ", wanted less than 2^31 for an int32 cu_seqlens");
  p.cu_seqlens[0] = 0;
  for (int32_t seq = 0; seq < p.tables.num_seqs; seq++)
    p.cu_seqlens[seq + 1] = p.cu_seqlens[seq] + p.tables.seq_lens[seq];

  const Side sides[2] = {{{p.kv.key, p.kv.key_scale, p.kv.dtype, p.kv.key_head_dim},
                          p.dtype,
                          static_cast<char*>(p.key),
                          p.key_stride_token,
                          p.key_stride_head,
                          p.kv.num_kv_heads},
                         {{p.kv.value, p.kv.value_scale, p.kv.dtype, p.kv.value_head_dim},
                          p.dtype,
                          static_cast<char*>(p.value),
                          p.value_stride_token,
                          p.value_stride_head,
                          p.kv.num_kv_heads}};

  // Tasks are runs of output rows, whichever sequences they belong to.
  constexpr int64_t kRowsPerTask = 128;
  const int64_t num_tasks = (p.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t token_nbytes = p.kv.num_kv_heads * (sides[0].nbytes() + sides[1].nbytes());
  parallel_for(num_tasks, threads_for(2 * p.num_rows * token_nbytes), [&](int64_t task) {
    const int64_t end = std::min(p.num_rows, (task + 1) * kRowsPerTask);
    int64_t row = task * kRowsPerTask;
    const int32_t* bounds = p.cu_seqlens;
    int64_t seq =
        std::upper_bound(bounds, bounds + p.tables.num_seqs + 1, row) - bounds - 1;  // the last to begin here
    for (; row < end && seq < p.tables.num_seqs; seq++) {
      const int32_t* block_ids = p.tables.block_ids + seq * p.tables.stride;
      for (; row < std::min<int64_t>(end, bounds[seq + 1]); row++) {
        const int64_t position = row - bounds[seq];
        for (const Side& side : sides)
          side.copy(row, block_ids[position / p.kv.block_size], position % p.kv.block_size);
      }
    }
    for (; row < end; row++)
      for (const Side& side : sides) side.clear(row);
  });
}

}  // namespace paged_ops::cpu
