// Writing new keys and values into their slots.
#include <cstring>

#include "cpu/index_check.h"
#include "cpu/ops.h"
#include "cpu/quantise.h"
#include "cpu/thread_pool.h"

namespace paged_ops::cpu {

namespace {

#include "cpu/packs.inl"

// A token's rows for all heads, from `stride_head` bytes apart to those of the cache.
struct TokenCopy {
  const char* source;
  int64_t source_stride_token, source_stride_head;
  CacheView cache;
  int32_t num_heads;
  Packs row;

  TokenCopy(const void* source, int64_t stride_token, int64_t stride_head, const CacheView& cache,
            int32_t num_heads, Packs row)
      : source(static_cast<const char*>(source)),
        source_stride_token(stride_token),
        source_stride_head(stride_head),
        cache(cache),
        num_heads(num_heads),
        row(row) {
    if (row.plain() && stride_head == row.nbytes && cache.stride_head == row.nbytes) {
      this->row.nbytes *= num_heads;  // one run on both sides
      this->num_heads = 1;
    }
  }

  char* destination(int64_t block, int64_t in_block) const {
    return static_cast<char*>(cache.data) + block * cache.stride_block + in_block * cache.stride_token;
  }

  void prefetch(int64_t block, int64_t in_block) const {
    const char* to = destination(block, in_block);
    for (int32_t head = 0; head < num_heads; head++)
      for (int64_t pack = 0; pack < row.count; pack++)
        for (int64_t i = 0; i < row.nbytes; i += 64)
          __builtin_prefetch(to + head * cache.stride_head + pack * row.stride + i, 1);
  }

  void operator()(int64_t token, int64_t block, int64_t in_block) const {
    const char* from = source + token * source_stride_token;
    char* to = destination(block, in_block);
    for (int32_t head = 0; head < num_heads; head++)
      row.scatter(to + head * cache.stride_head, from + head * source_stride_head);
  }
};

// The same with quantisation on the way.
struct TokenQuantise {
  const char* source;
  int64_t source_stride_token, source_stride_head;
  DType from;
  int32_t num_heads;
  QuantisedRows rows;

  void prefetch(int64_t, int64_t) const {}

  void operator()(int64_t token, int64_t block, int64_t in_block) const {
    const char* from_row = source + token * source_stride_token;
    for (int32_t head = 0; head < num_heads; head++)
      rows.write(from_row + head * source_stride_head, from, block, in_block, head);
  }
};

// Calls both for each token.
template <class Rows>
void write_rows(const CacheWriteParams& p, const Rows& key, const Rows& value) {
  constexpr int64_t kTokensPerTask = 32;
  const int64_t num_tasks = (p.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const int64_t token_nbytes = row_nbytes(p.dtype, p.kv.key_head_dim + p.kv.value_head_dim);
  // Quantisation costs several times what a copy does.
  const int64_t cost = is_quantised(p.kv.dtype) ? 4 : 1;
  const int threads = threads_for(p.num_tokens * p.kv.num_kv_heads * token_nbytes * cost);
  parallel_for(num_tasks, threads, [&](int64_t task) {
    const int64_t begin = task * kTokensPerTask;
    const int64_t end = begin + kTokensPerTask < p.num_tokens ? begin + kTokensPerTask : p.num_tokens;
    // Slots lie anywhere: the lines of the tokens to come are fetched while this one's are written.
    constexpr int64_t kAhead = 2;
    for (int64_t token = begin; token < end; token++) {
      const int64_t next = token + kAhead < end ? p.slot_mapping[token + kAhead] : -1;
      if (next >= 0) {
        key.prefetch(next / p.kv.block_size, next % p.kv.block_size);
        value.prefetch(next / p.kv.block_size, next % p.kv.block_size);
      }
      const int64_t slot = p.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / p.kv.block_size, in_block = slot % p.kv.block_size;
      key(token, block, in_block);
      value(token, block, in_block);
    }
  });
}

}  // namespace

void cache_write(const CacheWriteParams& p, const Context&) {
  check_slot_mapping(p.slot_mapping, p.num_tokens, p.kv);
  if (is_quantised(p.kv.dtype)) {
    const auto quantise = [&](const void* source, int64_t stride_token, int64_t stride_head,
                              const QuantisedRows& rows) {
      return TokenQuantise{
          static_cast<const char*>(source), stride_token, stride_head, p.dtype, p.kv.num_kv_heads, rows};
    };
    return write_rows(p,
                      quantise(p.key, p.key_stride_token, p.key_stride_head,
                               {p.kv.key, p.kv.key_scale, p.kv.dtype, p.kv.key_head_dim}),
                      quantise(p.value, p.value_stride_token, p.value_stride_head,
                               {p.kv.value, p.kv.value_scale, p.kv.dtype, p.kv.value_head_dim}));
  }
  const TokenCopy key(p.key, p.key_stride_token, p.key_stride_head, p.kv.key, p.kv.num_kv_heads,
                      Packs(p.kv.key, p.kv.key_head_dim, p.kv.dtype));
  const TokenCopy value(p.value, p.value_stride_token, p.value_stride_head, p.kv.value, p.kv.num_kv_heads,
                        Packs(p.kv.value, p.kv.value_head_dim, p.kv.dtype));
  write_rows(p, key, value);
}

}  // namespace paged_ops::cpu
