// What a CTA of attention is doing, and where things lie in its shared memory.
#pragma once
#include "kernels/column_map.cuh"

namespace paged_ops::kernels {

// What a CTA is doing. It stays in shared memory while the main loop needs the registers.
struct Work {
  ColumnTile columns;
  int seen_by_all, seen_by_any;              // where the keys end that all columns see, that some does
  int first_seen_by_all, first_seen_by_any;  // and where they begin
  int slot, kv_head;
  int num_chunks, first_chunk, end_chunk;  // of these rows, from chunks_origin() on; of them this CTA's
  bool last;                               // of the CTAs that share these rows
  int64_t next_place, end;                 // on the line of work

  __device__ __forceinline__ int mine() const { return end_chunk - first_chunk; }
  __device__ __forceinline__ bool shared() const { return mine() < num_chunks; }
};

// The token at which chunk 0 of some rows begins: the chunks before a window are not theirs.
PAGED_OPS_HOST_DEVICE inline int chunks_origin(int first_seen_by_any) {
  return first_seen_by_any & -kChunkTokens;
}

// First what the walk makes of `kOwnNbytes`, then what all walks have. kColumns: of the CTA.
// Sight: of the CTA's columns (sight.cuh).
template <int kColumns, int kHeadDim, int kOwnNbytes, class Sight>
struct AttentionShared {
  static constexpr int kRow = kHeadDim + 4;  // floats; the 4 keep a warp's writes off each other's banks
  static constexpr int kStatesNbytes = kColumns * (kRow * int(sizeof(float)) + int(sizeof(float2)));
  static constexpr int kSight = kOwnNbytes;
  static constexpr int kWork = (kSight + Sight::kNbytes + 7) / 8 * 8;
  static constexpr int kRunning = (kWork + int(sizeof(Work)) + 15) / 16 * 16;  // what chunks are folded into
  static constexpr int kNbytes = kRunning + kStatesNbytes;

  unsigned char* base;

  // Outputs [kColumns, kRow] and then (m, l) [kColumns] of the states at `offset`.
  __device__ __forceinline__ float* out(int offset, int column = 0) const {
    return reinterpret_cast<float*>(base + offset) + column * kRow;
  }
  __device__ __forceinline__ float2* state(int offset, int column = 0) const {
    return reinterpret_cast<float2*>(out(offset, kColumns)) + column;
  }
  __device__ __forceinline__ unsigned char* sight() const { return base + kSight; }
  __device__ __forceinline__ Work& work() const { return *reinterpret_cast<Work*>(base + kWork); }
};

}  // namespace paged_ops::kernels
