// Paged attention: cuts a call into tasks, runs them on the pool, folds what was cut along the keys.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "cpu/index_check.h"
#include "cpu/isa.h"
#include "cpu/ops.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

namespace {

// Up to this many query tokens of a sequence are taken together with all KV heads, chunk by chunk, so
// that each block is read once in one contiguous sweep (decode, verification). More make a prefill.
constexpr int kSweepTokens = 8;
// A prefill task takes at most so many rows (query tokens x group) of one KV head through all chunks, so that
// their states stay in a core's own cache; and not fewer than so many if it can be helped, for each task
// copies the keys.
constexpr int64_t kMaxPrefillRows = 1024;
constexpr int64_t kMinPrefillRows = 128;
// A sweep's tile and the next one stay in a core's own cache.
constexpr int64_t kSweepTileBytes = 512 << 10;
// A sweep's task takes chunks of about so many bytes of keys and values, beside which what it does once does
// not count.
constexpr int64_t kTaskBytes = 1 << 20;
// Enough tasks for each thread that the last ones to finish do not keep the others waiting for long, and that
// one which comes late leaves most of its share to the others.
constexpr int kTasksPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Sequence {
  int32_t index, query_begin, query_end, seq_len, first_key;

  Sequence(const AttentionParams& p, int32_t seq)
      : index(seq),
        query_begin(p.cu_seqlens_q ? p.cu_seqlens_q[seq] : seq),
        query_end(p.cu_seqlens_q ? p.cu_seqlens_q[seq + 1] : seq + 1),
        seq_len(p.tables.seq_lens[seq]),
        first_key(first_visible_key(p.rules.window, position(query_begin))) {}

  int32_t num_tokens() const { return query_end - query_begin; }
  int32_t position(int32_t query_row) const { return seq_len - query_end + query_row; }
  // The first token sees the first keys of all, the last one sees the last.
  int32_t first_chunk() const { return first_key / kChunkTokens; }
  int32_t num_keys() const { return seq_len - first_key; }
  int64_t num_chunks() const { return ceil_div(seq_len, kChunkTokens) - first_chunk(); }
  bool sweeps() const { return num_tokens() <= kSweepTokens; }
  bool folds() const { return sweeps() && num_chunks() > 1; }
};

// The tasks of one call. What there is depends on shapes and lengths; how it is cut into tasks also on
// the number of threads, which no row's arithmetic notices.
class Plan {
 public:
  Plan(const AttentionParams& p, int num_threads) : p_(p), group_(p.num_q_heads / p.kv.num_kv_heads) {
    const int64_t token_nbytes =
        p.kv.num_kv_heads * row_nbytes(p.kv.dtype, p.kv.key_head_dim + p.kv.value_head_dim);
    int64_t num_sweeps = 0, swept_keys = 0, longest_sweep = 0, prefill_rows = 0;
    for (int32_t seq = 0; seq < p.tables.num_seqs; seq++) {
      const Sequence s(p, seq);
      if (s.num_tokens() == 0) continue;
      if (s.sweeps()) {
        num_sweeps += std::max<int64_t>(s.num_chunks(), 1);
        swept_keys += s.num_keys();
        longest_sweep = std::max<int64_t>(longest_sweep, std::min(s.num_keys(), kChunkTokens));
      } else {
        prefill_rows += int64_t(s.num_tokens()) * p.num_q_heads;
      }
      if (s.folds()) states_floats_ += s.num_chunks() * chunk_floats(s);
      // Four rows or so share a load; past them it is arithmetic that takes the time.
      nbytes_ += s.num_keys() * token_nbytes * (1 + s.num_tokens() * group_ / 4);
    }
    const int64_t for_cache = ceil_div(token_nbytes * kTileTokens, kSweepTileBytes);
    task_rows_ = std::clamp(prefill_rows / (kTasksPerThread * num_threads), kMinPrefillRows, kMaxPrefillRows);
    num_parts_ = parts_for(num_threads, num_sweeps, swept_keys, longest_sweep, for_cache);
    task_chunks_ = int32_t(std::clamp<int64_t>(num_sweeps / (kTasksPerThread * num_threads), 1,
                                               ceil_div(kTaskBytes, token_nbytes * kChunkTokens)));
  }

  int64_t states_floats() const { return states_floats_; }

  // Keys and values that the tasks read, with an equivalent for their arithmetic.
  int64_t nbytes() const { return nbytes_; }

  // states: states_floats() of them.
  void cut(float* states) {
    for (int32_t seq = 0; seq < p_.tables.num_seqs; seq++) {
      const Sequence s(p_, seq);
      if (s.num_tokens() == 0) continue;
      if (!s.sweeps()) {
        add_prefill(s);
      } else if (!s.folds()) {
        add_sweep(s, 0, 0, nullptr, tasks);
      } else {
        const int32_t num_chunks = int32_t(s.num_chunks());
        for (int32_t chunk = 0; chunk < num_chunks; chunk += task_chunks_)
          add_sweep(s, chunk, std::min(num_chunks, chunk + task_chunks_), states, tasks);
        add_sweep(s, 0, num_chunks, states, folds);
        states += s.num_chunks() * chunk_floats(s);
      }
    }
  }

  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> folds;

 private:
  // Into how many parts to cut the heads of each sweep, from `least` on: the fewest with which all threads
  // end at about the same time.
  int32_t parts_for(int64_t num_threads, int64_t num_sweeps, int64_t num_keys, int64_t longest,
                    int64_t least) const {
    const int64_t num_heads = p_.kv.num_kv_heads;
    if (num_threads > 1 && num_sweeps > 0) {
      // Where a token's heads lie side by side, they are read the slower the fewer of them a task reads.
      const bool side_by_side = p_.kv.key.stride_head == row_nbytes(p_.kv.dtype, p_.kv.key_head_dim);
      const int64_t tasks = num_threads * (side_by_side ? kTasksPerThread / 2 : kTasksPerThread);
      least = std::max(least, ceil_div(tasks, num_sweeps));
    }
    const int32_t first = int32_t(std::min(num_heads, least));
    const double mean = double(num_keys) / double(std::max<int64_t>(num_sweeps, 1));
    const double evenly = double(num_keys) * double(num_heads) / double(num_threads);
    int32_t best = first;
    double soonest = HUGE_VAL;
    for (int32_t parts = first; parts <= num_heads && soonest > 1.125 * evenly; parts++) {
      // Keys times heads of the thread that ends last.
      const double tasks = double(ceil_div(num_sweeps * parts, num_threads));
      const double last = double(ceil_div(num_heads, parts)) * std::max(tasks * mean, double(longest));
      if (last < soonest) {
        soonest = last;
        best = parts;
      }
    }
    return best;
  }

  int64_t chunk_floats(const Sequence& s) const {
    return int64_t(s.num_tokens()) * p_.num_q_heads * state_floats(p_.kv.value_head_dim);
  }

  AttentionTask task_of(const Sequence& s) const {
    return {.seq = s.index,
            .query_begin = s.query_begin,
            .query_end = s.query_end,
            .position = s.position(s.query_begin),
            .head_begin = 0,
            .head_end = p_.kv.num_kv_heads,
            .states = nullptr,
            .chunk_floats = chunk_floats(s),
            .first_chunk = s.first_chunk(),
            .chunk_begin = s.first_chunk(),
            .chunk_end = s.first_chunk()};
  }

  // Chunks [begin, end) of the sequence's own.
  void add_sweep(const Sequence& s, int32_t begin, int32_t end, float* states,
                 std::vector<AttentionTask>& list) const {
    AttentionTask task = task_of(s);
    task.states = states;
    task.chunk_begin = s.first_chunk() + begin;
    task.chunk_end = s.first_chunk() + end;
    for (int64_t part = 0; part < num_parts_; part++) {
      task.head_begin = int32_t(p_.kv.num_kv_heads * part / num_parts_);
      task.head_end = int32_t(p_.kv.num_kv_heads * (part + 1) / num_parts_);
      list.push_back(task);
    }
  }

  void add_prefill(const Sequence& s) {
    AttentionTask task = task_of(s);
    const int32_t at_once = int32_t(std::max<int64_t>(1, task_rows_ / group_));
    // The tasks of a head follow one another, for they copy the same keys. Later tokens see more of them:
    // with the long tasks first, the last to finish are short.
    for (int32_t head = 0; head < p_.kv.num_kv_heads; head++) {
      task.head_begin = head;
      task.head_end = head + 1;
      for (int32_t end = s.query_end; end > s.query_begin; end -= at_once) {
        task.query_end = end;
        task.query_begin = std::max(s.query_begin, end - at_once);
        task.position = s.position(task.query_begin);
        tasks.push_back(task);
      }
    }
  }

  const AttentionParams& p_;
  const int64_t group_;
  int64_t states_floats_ = 0;
  int64_t nbytes_ = 0;
  int64_t task_rows_ = kMaxPrefillRows;
  int32_t num_parts_ = 1;
  int32_t task_chunks_ = 1;
};

// Rows of `query` that belong to no sequence see nothing.
void clear_padding(const AttentionParams& p, int32_t first_token) {
  for (int64_t token = first_token; token < p.num_tokens; token++)
    for (int32_t head = 0; head < p.num_q_heads; head++) {
      std::memset(static_cast<char*>(p.out) + token * p.out_stride_token + head * p.out_stride_head, 0,
                  size_t(p.kv.value_head_dim) * itemsize(p.dtype));
      if (p.lse) p.lse[token * p.num_q_heads + head] = -__builtin_inff();
    }
}

}  // namespace

// The most that any lengths can need: every token's sequence as long as the tables allow, and swept.
size_t attention_workspace_nbytes(const AttentionParams& p) {
  const int64_t max_chunks = ceil_div(int64_t(p.tables.max_blocks_per_seq) * p.kv.block_size, kChunkTokens);
  if (max_chunks <= 1) return 0;
  const int64_t swept = std::min<int64_t>(p.num_tokens, int64_t(p.tables.num_seqs) * kSweepTokens);
  const int64_t row_nbytes = state_floats(p.kv.value_head_dim) * int64_t(sizeof(float));
  int64_t nbytes;
  PAGED_OPS_REQUIRE(!__builtin_mul_overflow(swept * p.num_q_heads, max_chunks, &nbytes) &&
                        !__builtin_mul_overflow(nbytes, row_nbytes, &nbytes),
                    "max_blocks_per_seq: is ", p.tables.max_blocks_per_seq, ", with which a workspace for ",
                    swept, " tokens of ", p.num_q_heads, " heads would pass 2^63 bytes");
  return size_t(nbytes);
}

void attention(const AttentionParams& p, const Context&) {
  check_block_tables(p.tables, p.kv);
  if (p.cu_seqlens_q) check_cu_seqlens_q(p.cu_seqlens_q, p.tables.num_seqs, p.num_tokens);
  if (p.rules.tree_mask) check_tree_widths(p.cu_seqlens_q, p.tables.num_seqs);

  const Kernels& kernels = cpu::kernels();
  Plan plan(p, num_threads());
  const size_t states_nbytes = size_t(plan.states_floats()) * sizeof(float);
  const bool given = p.workspace && p.workspace_nbytes >= states_nbytes;
  plan.cut(static_cast<float*>(given ? p.workspace : thread_scratch(ScratchUse::call, states_nbytes)));

  clear_padding(p, p.cu_seqlens_q ? p.cu_seqlens_q[p.tables.num_seqs] : p.tables.num_seqs);
  const int dtype = int(p.dtype);
  const int used_threads = threads_for(plan.nbytes());
  parallel_for(int64_t(plan.tasks.size()), used_threads, [&](int64_t i) {
    const AttentionTask& task = plan.tasks[i];
    kernels.attend[dtype](p, task,
                          thread_scratch(ScratchUse::task, kernels.attend_scratch_nbytes[dtype](p, task)));
  });
  parallel_for(int64_t(plan.folds.size()), used_threads,
               [&](int64_t i) { kernels.fold[dtype](p, plan.folds[i]); });
}

}  // namespace paged_ops::cpu
