// What a translation unit of one instruction set offers to the code that is compiled without any.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params/attention.h"
#include "params/merge_states.h"
#include "params/rope_write.h"

// Whether there is more than the scalar kernels. PAGED_OPS_SCALAR_ONLY makes any machine a plain one.
#if defined(__x86_64__) && !defined(PAGED_OPS_SCALAR_ONLY)
#define PAGED_OPS_X86_KERNELS
#endif

// Types and constants only: a function that two translation units with different instruction sets both
// instantiated would be linked once, from either, and might then run where it cannot.
namespace paged_ops::cpu {

// Keys are cut by position: chunks are what tasks may share out, tiles what a kernel takes at a time.
// A row's arithmetic depends on this grid and on its own length only.
constexpr int kChunkTokens = 512;
constexpr int kTileTokens = 32;

// A chunk's state for one row: [reference, sum, exact sum, unused ..., value_head_dim sums in the kernel's
// own order], as softmax.inl says.
constexpr int kStateHeader = 16;
constexpr int kStateGrain = 32;  // the sums are padded to a multiple of the widest pair of vectors
static constexpr int64_t state_floats(int value_head_dim) {
  return kStateHeader + int64_t(value_head_dim + kStateGrain - 1) / kStateGrain * kStateGrain;
}

// Where the keys end that a query token at `position` sees.
static constexpr int32_t end_visible_key(bool causal, int32_t seq_len, int32_t position) {
  return !causal ? seq_len : position < 0 ? 0 : position + 1;
}

// Query tokens [query_begin, query_end) of a sequence with KV heads [head_begin, head_end).
struct AttentionTask {
  int32_t seq;
  int32_t query_begin, query_end;  // rows of `query`
  int32_t position;                // of query_begin in its sequence; may be negative
  int32_t head_begin, head_end;
  float* states;         // of the sequence's chunks from first_chunk on [num_chunks, num_kv_heads, rows,
                         // state_floats], a row being a query token with one query head of the group;
                         // null = all chunks, straight to out
  int64_t chunk_floats;  // from a chunk's states to the next chunk's
  int32_t first_chunk;
  int32_t chunk_begin, chunk_end;  // those whose states to make
};

struct Kernels {
  // Per DType f32, f16, bf16. `scratch` has attend_scratch_nbytes(...) bytes at a 64-byte boundary.
  void (*attend[3])(const AttentionParams&, const AttentionTask&, void* scratch);
  size_t (*attend_scratch_nbytes[3])(const AttentionParams&, const AttentionTask&);
  // Folds the states of the task's rows in chunk order and writes out and lse. Overwrites the states.
  void (*fold[3])(const AttentionParams&, const AttentionTask&);
  // Tokens [token_begin, token_end).
  void (*merge_states[3])(const MergeStatesParams&, int32_t token_begin, int32_t token_end);
  void (*rope_write[3])(const RopeWriteParams&, int32_t token_begin, int32_t token_end);
};

}  // namespace paged_ops::cpu
