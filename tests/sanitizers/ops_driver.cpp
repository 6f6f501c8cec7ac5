// Every op of the CUDA backend on small problems, for sanitizers that cannot live inside Python.
//
//   ops_driver OP ORDER LANDING WORKERS
//
// Problems are small because ThreadSanitizer keeps at most some 8,000 threads, and each thread of a launch is
// one. Prints a checksum of all outputs, which must not depend on the order in which anything ran.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"
#include "launch/attention_launch.h"
#include "params/backend.h"
#include "simt/emulator/config.h"
#include "simt/emulator/runtime.h"

using namespace paged_ops;

namespace {

constexpr Context kContext{.device = 0, .stream = nullptr, .check = true};
constexpr Context kUnchecked{.device = 0, .stream = nullptr, .check = false};
constexpr int32_t kUnusedBlock = 1 << 30;  // reading through it would end the run

struct Random {
  uint32_t state = 1;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return float(state >> 8) / (1 << 23) - 1.0f;
  }
};

// A tensor of `n` elements in memory of exactly that size.
struct Tensor {
  Tensor(DType dtype, size_t n, Random* random = nullptr) : bytes(n * itemsize(dtype), 0xff) {
    if (!random) return;
    for (size_t i = 0; i < n; ++i) {
      const float x = 2 * (*random)();
      const f16 h = portable::from_float<f16>(x);
      const bf16 b = portable::from_float<bf16>(x);
      const f8e4m3 e = portable::from_float<f8e4m3>(x);
      const i8 n = portable::from_float<i8>(50 * x);  // two of int4 too
      const void* source = dtype == DType::f32      ? static_cast<const void*>(&x)
                           : dtype == DType::f16    ? static_cast<const void*>(&h)
                           : dtype == DType::bf16   ? static_cast<const void*>(&b)
                           : dtype == DType::f8e4m3 ? static_cast<const void*>(&e)
                                                    : static_cast<const void*>(&n);
      std::memcpy(bytes.data() + i * itemsize(dtype), source, itemsize(dtype));
    }
  }
  void* data() { return bytes.data(); }
  std::vector<unsigned char> bytes;
};

uint64_t checksum = 14695981039346656037u;  // FNV-1a
void add_to_checksum(const void* data, size_t nbytes) {
  for (size_t i = 0; i < nbytes; ++i)
    checksum = (checksum ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
}
void add_to_checksum(const Tensor& t) { add_to_checksum(t.bytes.data(), t.bytes.size()); }

// A cache of `lengths.size()` sequences whose blocks are scattered over the pool, and its tables.
struct Cache {
  Cache(DType dtype, std::vector<int32_t> lengths, int num_kv_heads, int head_dim, int block_size,
        Random& random)
      : seq_lens(lengths), num_seqs(int(lengths.size())) {
    int num_used = 0;
    for (int length : lengths) {
      max_blocks = std::max(max_blocks, (length + block_size - 1) / block_size);
      num_used += (length + block_size - 1) / block_size;
    }
    max_blocks += 2;
    num_blocks = num_used + 3;
    const int64_t row = row_nbytes(dtype, head_dim);
    const size_t n = size_t(num_blocks) * block_size * num_kv_heads * (row / itemsize(dtype));
    key = std::make_unique<Tensor>(dtype, n, &random);
    value = std::make_unique<Tensor>(dtype, n, &random);
    block_ids.assign(size_t(num_seqs) * max_blocks, kUnusedBlock);
    int next = num_used;
    for (int s = 0; s < num_seqs; ++s)
      for (int i = 0; i < (lengths[s] + block_size - 1) / block_size; ++i)
        block_ids[s * max_blocks + i] = --next;
    const auto view = [&](Tensor& t) {
      return CacheView{t.data(), row * num_kv_heads * block_size, row * num_kv_heads, row};
    };
    kv = {view(*key), view(*value), num_blocks, block_size, num_kv_heads, head_dim, head_dim, dtype};
    tables = {block_ids.data(), seq_lens.data(), max_blocks, num_seqs, max_blocks};
    if (!is_quantised(dtype)) return;
    // Per token, head and, of int4, 8 elements; of keys of 8 bits one for all.
    const int groups = dtype == DType::i4 ? head_dim / 8 : 1;
    for (std::vector<float>* scales : {&key_scales, &value_scales}) {
      scales->resize(size_t(num_blocks) * block_size * num_kv_heads * groups);
      for (float& scale : *scales) scale = 1.1f + random();
    }
    const int64_t stride = groups * int64_t(sizeof(float));
    ScaleView scale{};
    scale.per_token = true;
    scale.stride_block = stride * num_kv_heads * block_size;
    scale.stride_token = stride * num_kv_heads;
    scale.stride_head = stride;
    scale.group = dtype == DType::i4 ? 8 : 0;
    scale.stride_group = sizeof(float);
    kv.key_scale = kv.value_scale = scale;
    kv.key_scale.data = key_scales.data();
    kv.value_scale.data = value_scales.data();
    if (dtype != DType::i4) kv.key_scale = {nullptr, 0.5f};
  }

  std::vector<int32_t> seq_lens, block_ids;
  int num_seqs, max_blocks = 0, num_blocks = 0;
  std::unique_ptr<Tensor> key, value;
  std::vector<float> key_scales, value_scales;
  PagedKV kv;
  BlockTables tables;
};

// As the backend does it, but with the warps splitting the columns, which it does for larger problems only.
void split_columns(const AttentionParams& p) {
  launch::AttentionPlan plan = launch::plan_attention(p);
  plan.column_tiles = launch::kSplitColumnTiles;
  plan.num_slots = kernels::num_slots(p, 8 * plan.column_tiles);
  plan.num_places = plan.num_slots * p.kv.num_kv_heads;
  launch::run_attention(plan, p, nullptr);
}

// Which rules a problem has.
struct Rules {
  int window = 0;
  bool tree = false;  // else a soft cap; ALiBi and sinks either way
};

// `query_lens` empty: decode.
void attention(DType dtype, std::vector<int32_t> lengths, std::vector<int32_t> query_lens, int num_kv_heads,
               int group, int head_dim, int block_size, bool serial = false, bool split = false,
               const Rules* rules = nullptr, bool latent = false, DType cache_dtype = DType::i32) {
  Random random;
  Cache cache(cache_dtype == DType::i32 ? dtype : cache_dtype, lengths, num_kv_heads, head_dim, block_size,
              random);
  if (latent) cache.kv.value = cache.kv.key;
  std::vector<int32_t> cu_seqlens{0};
  for (int n : query_lens) cu_seqlens.push_back(cu_seqlens.back() + n);
  const int num_tokens = query_lens.empty() ? int(lengths.size()) : cu_seqlens.back();
  const int num_heads = num_kv_heads * group;
  const size_t n = size_t(num_tokens) * num_heads * head_dim;
  Tensor query(dtype, n, &random), out(dtype, n);
  std::vector<float> lse(size_t(num_tokens) * num_heads, -1);
  AttentionParams p{};
  p.query = query.data();
  p.out = out.data();
  p.lse = lse.data();
  p.cu_seqlens_q = query_lens.empty() ? nullptr : cu_seqlens.data();
  p.query_stride_head = p.out_stride_head = int64_t(head_dim) * itemsize(dtype);
  p.query_stride_token = p.out_stride_token = p.query_stride_head * num_heads;
  p.num_tokens = num_tokens;
  p.num_q_heads = num_heads;
  p.dtype = dtype;
  p.kv = cache.kv;
  p.tables = cache.tables;
  // Rows of the table that claim room for millions of tokens want more workspace than partial states may
  // have.
  if (serial) p.tables.max_blocks_per_seq = 1 << 22;
  p.scale = 0.125f;
  p.causal = true;
  std::vector<float> slopes(num_heads, 0.01f), sinks(num_heads, 0.5f);
  std::vector<int64_t> tree_mask(num_tokens, 0x5b6d5b6d5b6d5b6d);
  if (rules) {
    p.rules.window = rules->window;
    p.rules.alibi_slopes = slopes.data();
    p.rules.sinks = sinks.data();
    if (rules->tree)
      p.rules.tree_mask = tree_mask.data();
    else
      p.rules.soft_cap = 2.f;
    // What lies before the window is not read.
    for (int s = 0; s < cache.num_seqs && rules->window; ++s) {
      const int first = lengths[s] - (query_lens.empty() ? 1 : query_lens[s]) - rules->window;
      for (int i = 0; (i + 1) * block_size <= first; ++i)
        cache.block_ids[s * cache.max_blocks + i] = kUnusedBlock;
    }
  }
  p.workspace_nbytes = launch::backend().attention_workspace_nbytes(p);
  std::vector<unsigned char> workspace(p.workspace_nbytes + 256, 0xff);
  p.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) & ~uintptr_t(255));
  const auto run = [&] {
    if (split)
      split_columns(p);
    else
      launch::backend().attention(p, rules && rules->window ? kUnchecked : kContext);
  };
  run();
  add_to_checksum(out);
  add_to_checksum(lse.data(), lse.size() * sizeof(float));
  if (simt::config().workers == 1) return;
  // Once more, on a workspace as the first run has left it.
  const std::vector<unsigned char> first = out.bytes;
  const std::vector<float> first_lse = lse;
  std::fill(out.bytes.begin(), out.bytes.end(), 0xff);
  run();
  if (out.bytes != first || lse != first_lse) fail("attention: the second run differs from the first");
}

void quantised(DType dtype, DType cache_dtype, std::vector<int32_t> lengths, std::vector<int32_t> query_lens,
               int num_kv_heads, int group, int head_dim, bool split = false) {
  attention(dtype, lengths, query_lens, num_kv_heads, group, head_dim, 7, false, split, nullptr, false,
            cache_dtype);
}

void cache_write() {
  Random random;
  Cache cache(DType::f16, {5, 9, 16}, 2, 40, 4, random);
  Tensor key(DType::f16, 6 * 2 * 40, &random), value(DType::f16, 6 * 2 * 40, &random);
  const std::vector<int64_t> slots{3, -1, 17, 8, 0, 30};
  CacheWriteParams p{};
  p.key = key.data();
  p.value = value.data();
  p.slot_mapping = slots.data();
  p.key_stride_head = p.value_stride_head = 80;
  p.key_stride_token = p.value_stride_token = 160;
  p.num_tokens = int(slots.size());
  p.dtype = DType::f16;
  p.kv = cache.kv;
  launch::backend().cache_write(p, kContext);
  add_to_checksum(*cache.key);
  add_to_checksum(*cache.value);
}

void cache_quantise() {
  for (DType dtype : {DType::f8e4m3, DType::i4}) {
    Random random;
    Cache cache(dtype, {5, 9, 16}, 2, 40, 4, random);
    Tensor key(DType::f16, 6 * 2 * 40, &random), value(DType::f16, 6 * 2 * 40, &random);
    const std::vector<int64_t> slots{3, -1, 17, 8, 0, 30};
    CacheWriteParams p{key.data(), value.data(), slots.data(),      160,        80,
                       160,        80,           int(slots.size()), DType::f16, cache.kv};
    launch::backend().cache_write(p, kContext);
    add_to_checksum(*cache.key);
    add_to_checksum(*cache.value);
    add_to_checksum(cache.value_scales.data(), cache.value_scales.size() * sizeof(float));
  }
}

// Queries in place, fewer slots than tokens.
void rope_write() {
  Random random;
  constexpr int kTokens = 6, kHeads = 5, kKvHeads = 2, kDim = 40, kRotaryDim = 24;
  Cache cache(DType::bf16, {5, 9, 16}, kKvHeads, kDim, 4, random);
  Tensor query(DType::bf16, kTokens * kHeads * kDim, &random);
  Tensor key(DType::bf16, kTokens * kKvHeads * kDim, &random);
  Tensor value(DType::bf16, kTokens * kKvHeads * kDim, &random);
  Tensor cos_sin(DType::f32, 9 * kRotaryDim, &random);
  const std::vector<int64_t> slots{3, -1, 17, 8, 30};
  const std::vector<int32_t> positions{3, 0, 8, 1, 5, 2};
  constexpr int64_t kRow = kDim * 2;
  RopeWriteParams p{};
  p.write = {key.data(),      value.data(), slots.data(),      kRow * kKvHeads, kRow,
             kRow * kKvHeads, kRow,         int(slots.size()), DType::bf16,     cache.kv};
  p.query = p.query_out = query.data();
  p.query_stride_head = p.out_stride_head = kRow;
  p.query_stride_token = p.out_stride_token = kRow * kHeads;
  p.num_tokens = kTokens;
  p.num_q_heads = kHeads;
  p.positions = positions.data();
  p.cos_sin = static_cast<const float*>(cos_sin.data());
  p.cos_sin_stride = p.rotary_dim = kRotaryDim;
  p.max_position = 9;
  for (const bool interleaved : {false, true}) {
    p.interleaved = interleaved;
    launch::backend().rope_write(p, kContext);
  }
  add_to_checksum(query);
  add_to_checksum(*cache.key);
  add_to_checksum(*cache.value);
}

constexpr int64_t kBlockNbytes = 96;
const BlockShape kDense{kBlockNbytes, {1, 1}, {0, 0}};

void block_copy() {
  Random random;
  Tensor a(DType::f32, 24 * 10, &random), b(DType::f32, 24 * 10, &random);
  void* caches[2] = {a.data(), b.data()};
  const std::vector<int64_t> pairs{0, 7, 1, 8, 2, 9};
  launch::backend().block_copy({caches, 2, kDense, kBlockNbytes, 10, pairs.data(), 3}, kContext);
  add_to_checksum(a);
  add_to_checksum(b);
}

void block_swap() {
  Random random;
  Tensor a(DType::f32, 24 * 10, &random), b(DType::f32, 24 * 12, &random);
  const std::vector<int64_t> pairs{0, 11, 9, 0, 4, 5};
  const BlockShape halves{kBlockNbytes / 2, {2, 1}, {kBlockNbytes / 2, 0}};
  launch::backend().block_swap(
      {a.data(), b.data(), kDense, kDense, kBlockNbytes, kBlockNbytes, 10, 12, pairs.data(), 3, false, true},
      kContext);
  launch::backend().block_swap(
      {b.data(), a.data(), halves, halves, kBlockNbytes, kBlockNbytes, 12, 10, pairs.data(), 0, true, true},
      kContext);
  add_to_checksum(b);
}

void gather() {
  Random random;
  std::vector<int32_t> lengths(600, 0);  // more than a CTA scans at once, and too many to check a CTA each
  lengths[0] = 5;
  lengths[2] = 3;
  lengths[300] = 9;
  Cache cache(DType::bf16, lengths, 2, 40, 4, random);
  Tensor key(DType::bf16, 18 * 2 * 40), value(DType::bf16, 18 * 2 * 40);
  std::vector<int32_t> cu_seqlens(lengths.size() + 1, -1);
  launch::backend().gather({key.data(), value.data(), cu_seqlens.data(), 160, 80, 160, 80, 18, DType::bf16,
                            cache.kv, cache.tables},
                           kUnchecked);
  add_to_checksum(key);
  add_to_checksum(value);
  add_to_checksum(cu_seqlens.data(), cu_seqlens.size() * sizeof(int32_t));
}

void merge_states() {
  Random random;
  constexpr int kTokens = 5, kHeads = 3, kDim = 40;
  Tensor a(DType::f16, kTokens * kHeads * kDim, &random), b(DType::f16, kTokens * kHeads * kDim, &random);
  std::vector<float> lse_a(kTokens * kHeads), lse_b(kTokens * kHeads);
  for (float& x : lse_a) x = random();
  for (float& x : lse_b) x = random();
  lse_a[4] = lse_b[7] = -HUGE_VALF;
  // In place, as callers do.
  launch::backend().merge_states(
      {a.data(), b.data(), lse_a.data(), lse_b.data(), a.data(), lse_a.data(), kHeads * kDim * 2, kDim * 2,
       kHeads * kDim * 2, kDim * 2, kHeads * kDim * 2, kDim * 2, kTokens, kHeads, kDim, DType::f16},
      kContext);
  add_to_checksum(a);
  add_to_checksum(lse_a.data(), lse_a.size() * sizeof(float));
}

// A step of generation, captured once: new keys and values are written, then attention reads them. Replayed,
// it must find the lengths, slots and values that lie in memory then.
void graph() {
  Random random;
  constexpr int kSeqs = 2, kKvHeads = 1, kGroup = 4, kDim = 64, kBlock = 16;
  Cache cache(DType::f16, {70, 514}, kKvHeads, kDim, kBlock, random);
  const std::vector<int32_t> last_lens = cache.seq_lens;
  const size_t row = kKvHeads * kDim, n = size_t(kSeqs) * kKvHeads * kGroup * kDim;
  Tensor key(DType::f16, kSeqs * row), value(DType::f16, kSeqs * row), query(DType::f16, n),
      out(DType::f16, n), want(DType::f16, n);
  std::vector<int64_t> slots(kSeqs);

  CacheWriteParams w{};
  w.key = key.data();
  w.value = value.data();
  w.slot_mapping = slots.data();
  w.key_stride_head = w.value_stride_head = kDim * 2;
  w.key_stride_token = w.value_stride_token = int64_t(row) * 2;
  w.num_tokens = kSeqs;
  w.dtype = DType::f16;
  w.kv = cache.kv;
  AttentionParams p{};
  p.query = query.data();
  p.out = out.data();
  p.query_stride_head = p.out_stride_head = kDim * 2;
  p.query_stride_token = p.out_stride_token = kDim * 2 * kKvHeads * kGroup;
  p.num_tokens = kSeqs;
  p.num_q_heads = kKvHeads * kGroup;
  p.dtype = DType::f16;
  p.kv = cache.kv;
  p.tables = cache.tables;
  p.scale = 0.125f;
  p.causal = true;
  p.workspace_nbytes = launch::backend().attention_workspace_nbytes(p);
  std::vector<uint64_t> workspace(p.workspace_nbytes / 8 + 32, ~uint64_t(0));
  p.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) & ~uintptr_t(255));

  cudaStream_t stream;
  cudaGraph_t captured;
  cudaGraphExec_t executable;
  SIMT_CHECK(cudaStreamCreate(&stream));
  SIMT_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Context in_stream{.device = 0, .stream = stream, .check = false};
  launch::backend().cache_write(w, in_stream);
  launch::backend().attention(p, in_stream);
  SIMT_CHECK(cudaStreamEndCapture(stream, &captured));
  SIMT_CHECK(cudaGraphInstantiate(&executable, captured, 0));

  for (int step = 0; step < 3; ++step) {
    for (Tensor* t : {&key, &value, &query})  // in place: the graph knows their addresses
      std::memcpy(t->data(), Tensor(DType::f16, t->bytes.size() / 2, &random).data(), t->bytes.size());
    for (int s = 0; s < kSeqs; ++s) {
      cache.seq_lens[s] = last_lens[s] - 2 + step;
      const int at = cache.seq_lens[s] - 1;
      slots[s] = int64_t(cache.block_ids[s * cache.max_blocks + at / kBlock]) * kBlock + at % kBlock;
      for (Tensor* t : {cache.key.get(), cache.value.get()})
        std::memset(t->bytes.data() + slots[s] * row * 2, 0xff, row * 2);
    }
    SIMT_CHECK(cudaGraphLaunch(executable, stream));
    AttentionParams direct = p;
    direct.out = want.data();
    launch::backend().attention(direct, kUnchecked);
    if (out.bytes != want.bytes) fail("graph: step ", step, " differs from the same step launched directly");
    for (size_t i = 0; i < n; ++i) {
      const uint16_t bits = uint16_t(out.bytes[2 * i] | out.bytes[2 * i + 1] << 8);
      if ((bits & 0x7c00) == 0x7c00) fail("graph: step ", step, " read a slot that it should have written");
    }
    add_to_checksum(out);
  }
  SIMT_CHECK(cudaGraphExecDestroy(executable));
  SIMT_CHECK(cudaGraphDestroy(captured));
  SIMT_CHECK(cudaStreamDestroy(stream));
}

const std::map<std::string, std::function<void()>> kOps{
    // Two chunks for the longest, none for the first; a group that leaves columns idle.
    {"decode_f16", [] { attention(DType::f16, {0, 17, 600}, {}, 2, 3, 64, 3); }},
    // More slots than the work list takes in a round, more rows than CTAs, and parts that begin anywhere.
    {"decode_f16_many",
     [] {
       std::vector<int32_t> lengths(600, 0);
       lengths[3] = 530;
       lengths[4] = lengths[590] = 20;
       attention(DType::f16, lengths, {}, 1, 1, 64, 16);
     }},
    {"decode_f16_wide", [] { attention(DType::f16, {1100, 33}, {}, 1, 12, 128, 16); }},
    // Warps that split the dims, of caches apart and of one.
    {"decode_f16_dims", [] { attention(DType::f16, {0, 17, 600}, {}, 1, 3, 320, 16); }},
    {"decode_f16_latent",
     [] { attention(DType::f16, {0, 17, 600}, {}, 1, 12, 576, 16, false, false, nullptr, true); }},
    {"prefill_f16_latent_window",
     [] {
       const Rules rules{.window = 300};
       attention(DType::f16, {1036, 40}, {9, 30}, 1, 2, 264, 7, true, false, &rules, true);
     }},
    {"decode_f32_dims", [] { attention(DType::f32, {0, 17, 600}, {}, 1, 2, 264, 16); }},
    {"decode_f32", [] { attention(DType::f32, {0, 17, 600}, {}, 2, 3, 64, 3); }},
    // Rows whose length is no multiple of 16 bytes times the strides: copied by element.
    {"decode_f16_odd", [] { attention(DType::f16, {70, 530}, {}, 3, 2, 40, 5); }},
    {"prefill_f16", [] { attention(DType::f16, {9, 530, 20}, {9, 6, 20}, 1, 4, 64, 16); }},
    // One CTA walks all chunks of its rows.
    {"prefill_f16_serial", [] { attention(DType::f16, {9, 1030}, {9, 6}, 1, 4, 64, 16, true); }},
    {"prefill_f16_split", [] { attention(DType::f16, {40, 1030}, {20, 33}, 1, 4, 64, 16, true, true); }},
    {"prefill_f16_split_shared", [] { attention(DType::f16, {9, 1030}, {9, 20}, 1, 4, 64, 7, false, true); }},
    // Windows over two chunks, which begin in the middle of a tile; a tree over two tiles.
    {"decode_f16_window",
     [] {
       const Rules rules{.window = 530};
       attention(DType::f16, {9, 1100}, {}, 1, 3, 64, 5, false, false, &rules);
     }},
    {"prefill_f16_window",
     [] {
       const Rules rules{.window = 21};
       attention(DType::f16, {1036, 40}, {9, 30}, 1, 2, 64, 7, true, false, &rules);
     }},
    {"prefill_f16_tree",
     [] {
       const Rules rules{.window = 524, .tree = true};
       attention(DType::f16, {1040, 20}, {20, 6}, 1, 2, 64, 7, false, false, &rules);
     }},
    {"prefill_f16_split_tree",
     [] {
       const Rules rules{.window = 524, .tree = true};
       attention(DType::f16, {1040, 40}, {20, 33}, 1, 4, 64, 7, false, true, &rules);
     }},
    {"prefill_f32_tree",
     [] {
       const Rules rules{.tree = true};
       attention(DType::f32, {530, 20}, {24, 6}, 1, 2, 64, 7, false, false, &rules);
     }},
    {"decode_f16_int8", [] { quantised(DType::f16, DType::i8, {70, 530}, {}, 1, 3, 128); }},
    {"decode_f16_int8_odd", [] { quantised(DType::f16, DType::i8, {70, 530}, {}, 3, 2, 40); }},
    {"decode_f16_int4", [] { quantised(DType::f16, DType::i4, {70, 530}, {}, 2, 2, 40); }},
    {"decode_f32_int8", [] { quantised(DType::f32, DType::i8, {70, 530}, {}, 2, 2, 40); }},
    {"prefill_f16_int8_split", [] { quantised(DType::f16, DType::i8, {40, 530}, {20, 33}, 1, 4, 64, true); }},
    {"prefill_f32", [] { attention(DType::f32, {9, 530, 20}, {9, 6, 20}, 1, 2, 64, 16); }},
    {"cache_write", cache_write},
    {"cache_quantise", cache_quantise},
    {"block_copy", block_copy},
    {"block_swap", block_swap},
    {"gather", gather},
    {"graph", graph},
    {"merge_states", merge_states},
    {"rope_write", rope_write},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 || !kOps.count(argv[1])) {
    for (const auto& [name, run] : kOps) std::printf("%s\n", name.c_str());
    return argc == 1 ? 0 : 2;
  }
  simt::Config& config = simt::config();
  config.order = simt::FiberOrder(std::atoi(argv[2]));
  config.landing = simt::CopyLanding(std::atoi(argv[3]));
  config.workers = std::atoi(argv[4]);
  config.multiprocessors = 8;  // what their CTAs have as threads must be few
  try {
    kOps.at(argv[1])();
  } catch (const std::exception& error) {  // a fault may follow a race: the race is to be told too
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("checksum %016llx\n", (unsigned long long)checksum);
  return 0;
}
