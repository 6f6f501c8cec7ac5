// What the attention kernels are launched with: the op's parameters and what the host derived from them.
#pragma once
#include <cstdint>

#include "kernels/divisor.h"
#include "params/attention.h"
#include "simt/simt.h"

namespace paged_ops::kernels {

// Keys are cut at multiples of kChunkTokens, whatever the batch. A chunk gives a partial state (maximum,
// sum, un-normalised output) of each row; a row's result is the left fold of its chunks' states. Inside a
// chunk the work is cut into tiles of kTileTokens (the M side of the matrix instruction), dealt to strands in
// turn, whose states are folded in order; a strand is a warp's share in split_keys.cuh. All of it hangs on
// positions alone: so do the bits of a row.
constexpr int kChunkTokens = 512;
constexpr int kTileTokens = 16;

struct AttentionArgs {
  AttentionParams op;
  int group;     // query heads per KV head
  int capacity;  // tokens that a row of the block table has room for; lengths are clamped to it
  Divisor block_size;
  float scale_log2;  // op.scale * log2(e): exponents are powers of two
  // With rules (sight.cuh): what scores are multiplied by first, 1 / soft cap, soft cap * log2(e).
  float ruled_scale, inverse_cap, cap_log2;

  // Parallel: CTAs share the chunks of a tile of rows as the work list says (work_line.cuh), and the last one
  // to finish folds the partial states. Otherwise each CTA walks all chunks of one tile. The bits are the
  // same.
  bool parallel;
  int columns;             // of a tile of rows
  int slots_per_sequence;  // of tiles of rows, in decode
  int num_slots;           // of tiles of rows; the extent of the arrays below
  int max_chunks;          // of any sequence
  float* partial_out;      // [num_tokens, num_q_heads, max_chunks, value_head_dim] un-normalised
  float2* partial_state;   // [num_tokens, num_q_heads, max_chunks] maximum (log2 units) and sum
  int num_parts;           // of the line of work: the grid's CTAs
  int64_t* line;           // [num_slots + 2] where each slot's work begins, where all ends, a part's length
  int* finished;           // [num_slots, num_kv_heads] chunks done
};

}  // namespace paged_ops::kernels
