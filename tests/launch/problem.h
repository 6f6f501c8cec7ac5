// Attention problems for the checks of the launch code, and what those are made of.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "launch/attention_launch.h"
#include "params/backend.h"
#include "simt/emulator/config.h"

using namespace paged_ops;
using launch::AttentionPlan;

namespace {

#define CHECK(condition, ...)                                                        \
  do {                                                                               \
    if (!(condition)) fail("line ", __LINE__, ": ", #condition, " ", ##__VA_ARGS__); \
  } while (false)

std::mt19937 rng(1);
int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

const int32_t kNotRead = 0;  // its address says "varlen"
const float kOne = 1.f;

AttentionParams shapes(int num_seqs, int num_tokens, int num_kv_heads, int group, int max_blocks, bool decode,
                       DType dtype = DType::bf16, int head_dim = 128) {
  AttentionParams p{};
  p.dtype = p.kv.dtype = dtype;
  p.num_tokens = num_tokens;
  p.num_q_heads = num_kv_heads * group;
  p.kv.num_kv_heads = num_kv_heads;
  p.kv.key_head_dim = p.kv.value_head_dim = head_dim;
  p.kv.block_size = 16;
  p.tables.num_seqs = num_seqs;
  p.tables.max_blocks_per_seq = max_blocks;
  p.cu_seqlens_q = decode ? nullptr : &kNotRead;
  return p;
}

std::vector<unsigned char> random_tensor(DType dtype, size_t count, float deviation = 1.5f) {
  std::vector<unsigned char> bytes(count * itemsize(dtype));
  std::normal_distribution<float> normal(0, deviation);
  for (size_t i = 0; i < count; i++) {
    const float x = normal(rng);
    const f16 h = portable::from_float<f16>(x);
    const bf16 b = portable::from_float<bf16>(x);
    const f8e4m3 e4m3 = portable::from_float<f8e4m3>(x);
    const f8e5m2 e5m2 = portable::from_float<f8e5m2>(x);
    const i8 n = portable::from_float<i8>(40 * x);  // two of int4 too
    const void* from = dtype == DType::f32      ? static_cast<const void*>(&x)
                       : dtype == DType::f16    ? static_cast<const void*>(&h)
                       : dtype == DType::bf16   ? static_cast<const void*>(&b)
                       : dtype == DType::f8e4m3 ? static_cast<const void*>(&e4m3)
                       : dtype == DType::f8e5m2 ? static_cast<const void*>(&e5m2)
                                                : static_cast<const void*>(&n);
    std::memcpy(&bytes[i * itemsize(dtype)], from, itemsize(dtype));
  }
  return bytes;
}

struct DTypes {
  DType query, cache;
};

// An attention problem in memory of its own. Unused blocks are NaN, unused table entries would end the run.
struct Problem {
  static constexpr int kBlockSize = 24;
  std::vector<int32_t> seq_lens, cu_seqlens_q, table;
  std::vector<unsigned char> query, key, value, out, workspace;
  std::vector<float> lse, slopes, sinks, key_scale, value_scale;
  std::vector<int64_t> tree_mask;
  AttentionParams p;

  // An empty `first_rows` is decode, else there are two more rows than it says.
  Problem(DTypes dtypes, int head_dim, int value_head_dim, int group, int num_kv_heads,
          std::vector<int32_t> lengths, std::vector<int32_t> first_rows)
      : seq_lens(std::move(lengths)), cu_seqlens_q(std::move(first_rows)) {
    const DType dtype = dtypes.query;
    const bool decode = cu_seqlens_q.empty();
    const int num_seqs = int(seq_lens.size()), num_tokens = decode ? num_seqs : cu_seqlens_q.back() + 2;
    const int num_q_heads = num_kv_heads * group, size = itemsize(dtype);
    const int longest = *std::max_element(seq_lens.begin(), seq_lens.end());
    const int max_blocks = (longest + kBlockSize - 1) / kBlockSize + 3;
    int num_blocks = 0;
    for (const int length : seq_lens)
      for (int i = 0; i < max_blocks; i++) table.push_back(i * kBlockSize < length ? num_blocks++ : 1 << 30);
    query = random_tensor(dtype, size_t(num_tokens) * num_q_heads * head_dim);
    const size_t num_rows = size_t(num_blocks) * kBlockSize * num_kv_heads;
    const auto random_rows = [&](int dim) {
      return random_tensor(dtypes.cache, num_rows * (row_nbytes(dtypes.cache, dim) / itemsize(dtypes.cache)));
    };
    key = random_rows(head_dim);
    value = random_rows(value_head_dim);
    out.resize(size_t(num_tokens) * num_q_heads * value_head_dim * size);
    lse.resize(size_t(num_tokens) * num_q_heads);

    p = shapes(num_seqs, num_tokens, num_kv_heads, group, max_blocks, decode, dtype);
    p.query = query.data();
    p.query_stride_head = head_dim * size;
    p.query_stride_token = p.query_stride_head * num_q_heads;
    p.out = out.data();
    p.out_stride_head = value_head_dim * size;
    p.out_stride_token = p.out_stride_head * num_q_heads;
    p.lse = lse.data();
    p.cu_seqlens_q = decode ? nullptr : cu_seqlens_q.data();
    const auto dense = [&](std::vector<unsigned char>& data, int dim) {
      const int64_t row = row_nbytes(dtypes.cache, dim);
      return CacheView{data.data(), row * num_kv_heads * kBlockSize, row * num_kv_heads, row};
    };
    p.kv = {dense(key, head_dim), dense(value, value_head_dim),
            num_blocks,           kBlockSize,
            num_kv_heads,         head_dim,
            value_head_dim,       dtypes.cache};
    if (is_quantised(dtypes.cache)) {
      p.kv.key_scale = random_scales(key_scale, num_rows, head_dim, 1.f);
      p.kv.value_scale = random_scales(value_scale, num_rows, value_head_dim, 4.f);
    }
    p.tables = {table.data(), seq_lens.data(), max_blocks, num_seqs, max_blocks};
    p.scale = 0.11f;
    p.causal = true;
  }

  // Per token and head and, of int4, 8 elements: 2^-spread to 2^spread, for numbers of 40 and so on 1/40 of
  // it.
  ScaleView random_scales(std::vector<float>& scales, size_t num_rows, int dim, float spread) const {
    const int groups = p.kv.dtype == DType::i4 ? dim / 8 : 1;
    std::uniform_real_distribution<float> exponent(-spread, spread);
    for (size_t i = 0; i < num_rows * groups; i++)
      scales.push_back(std::exp2(exponent(rng)) * (p.kv.dtype >= DType::i8 ? 0.025f : 1.f));
    const int64_t head = groups * int64_t(sizeof(float)), token = head * p.kv.num_kv_heads;
    ScaleView view;
    view.data = scales.data();
    view.per_token = true;
    view.stride_block = token * kBlockSize;
    view.stride_token = token;
    view.stride_head = head;
    view.group = p.kv.dtype == DType::i4 ? 8 : 0;
    view.stride_group = sizeof(float);
    return view;
  }

  // `what`: "plain", "window", "tree" (with a window that cuts branches), or "all" but a tree.
  void set_rules(const std::string& what) {
    std::uniform_real_distribution<float> real(0.f, 1.f);
    for (int head = 0; head < p.num_q_heads; head++) {
      slopes.push_back(0.1f * real(rng));
      sinks.push_back(4.f * real(rng));
    }
    for (int token = 0; token < p.num_tokens; token++) tree_mask.push_back(int64_t(rng()) << 32 | rng());
    if (what == "plain") return;
    p.rules.window = what == "tree" ? 6 : 100;
    if (what == "tree") p.rules.tree_mask = tree_mask.data();
    if (what == "window") return;
    p.rules.alibi_slopes = slopes.data();
    p.rules.sinks = sinks.data();
    if (what == "all") p.rules.soft_cap = 1.5f;
  }

  // Whether query token t of sequence s sees the key at `position`, when causal: the definition.
  bool sees(int s, int t, int position) const {
    const int first_row = cu_seqlens_q[s], begin = seq_lens[s] - (cu_seqlens_q[s + 1] - first_row);
    const auto bit = [&](int i, int j) {
      return j == i || (j < i && (!p.rules.tree_mask || tree_mask[first_row + i] >> j & 1));
    };
    const auto place = [&](int i) {
      int at = begin - 1;
      for (int j = 0; j <= i; j++) at += bit(i, j);
      return at;
    };
    const int key = position - begin;  // among the query tokens
    if (key >= 0 && !bit(t, key)) return false;
    return !p.rules.window || (key >= 0 ? place(key) : position) > place(t) - p.rules.window;
  }

  // What lies at token `position` of a sequence.
  unsigned char* value_row(int seq, int position, int kv_head) {
    const int block = table[seq * p.tables.max_blocks_per_seq + position / kBlockSize];
    return value.data() + block * p.kv.value.stride_block + position % kBlockSize * p.kv.value.stride_token +
           kv_head * p.kv.value.stride_head;
  }

  // Runs with outputs and workspace full of NaN, by the work list on a chip of so many multiprocessors, or
  // where that is 0 with a CTA for all chunks of the same rows. ruled: by the kernels for rules, rules or
  // not.
  void run(bool aligned, int column_tiles, int multiprocessors, bool ruled = false) {
    AttentionPlan plan = launch::plan_attention(p);
    plan.aligned = aligned;
    plan.ruled = plan.ruled || ruled;
    plan.column_tiles = column_tiles;
    plan.num_slots = kernels::num_slots(p, 8 * column_tiles);
    plan.num_places = plan.num_slots * p.kv.num_kv_heads;
    plan.parallel = multiprocessors > 0;
    simt::config().multiprocessors = std::max(multiprocessors, 1);
    const size_t states = lse.size() * plan.max_chunks;
    const auto padded = [](size_t nbytes) { return (nbytes + 255) / 256 * 256; };
    plan.finished_offset = padded((plan.num_slots + 2) * sizeof(int64_t));
    plan.state_offset = plan.finished_offset + padded(plan.num_places * sizeof(int));
    plan.out_offset = plan.state_offset + padded(states * sizeof(float2));
    workspace.assign(plan.out_offset + states * p.kv.value_head_dim * sizeof(float), 0xff);
    p.workspace = workspace.data();
    std::fill(out.begin(), out.end(), 0xff);
    std::fill(lse.begin(), lse.end(), NAN);
    launch::run_attention(plan, p, nullptr);
    simt::config().multiprocessors = 132;
  }
};

}  // namespace
