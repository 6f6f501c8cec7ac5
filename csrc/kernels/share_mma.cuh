// The arithmetic of attention on a warp's share of the dims of a tile of 16 tokens, by matrix instructions,
// for f16 and bf16: as attention_mma.cuh, whose heads are not wider than one warp's registers.
//
// Of every 64 dims, of K and of V, warp w of four has the w-th 16. Its scores are parts of sums: all warps
// show theirs to each other in shared memory and add them in the same order, so that each finds the same
// probabilities for its own dims of O.
#pragma once
#include "kernels/column_map.cuh"
#include "kernels/mma_softmax.cuh"
#include "kernels/tile_loader.cuh"
#include "kernels/widen.cuh"

namespace paged_ops::kernels {

constexpr int kShares = 4, kShareDims = 64;

// What a warp knows of its columns: of its own dims, the sums of values.
template <int kDim, int kColumnTiles>
class MmaShareState : public MmaState<kDim / kShares, kColumnTiles> {
 public:
  // Calls f(column) for each column of the lane and, where that gives a row, writes the dims below
  // `head_dim` to it. share: of the dims.
  template <class F>
  __device__ __forceinline__ void write(int share, int lane, int head_dim, F row_of) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float* const row = row_of(n * 8 + (lane & 3) * 2 + j);
        if (row == nullptr) continue;
#pragma unroll
        for (int d = 0; d < kDim / kShareDims; d++)
#pragma unroll
          for (int e = j; e < 4; e += 2) {
            const int dim = d * kShareDims + share * 16 + (e >> 1) * 8 + (lane >> 2);
            if (dim < head_dim) row[dim] = this->out[n][d][e];
          }
      }
  }
  // Calls f(column, (m, l)) once for each column of the warp.
  template <class F>
  __device__ __forceinline__ void for_each_weight(int lane, F f) const {
    if (lane >> 2 != 0) return;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) f(n * 8 + (lane & 3) * 2 + j, make_float2(this->m[n][j], this->l[n][j]));
  }
};

// T: f16 or bf16. kColumnTiles: tiles of 8 columns, 1 or 2, that share one pass over K and V.
template <class T, int kDim, int kColumnTiles>
class MmaShare : MmaSoftmax<T, MmaShareState<kDim, kColumnTiles>, kColumnTiles, kDim / kShareDims> {
  using Softmax = MmaSoftmax<T, MmaShareState<kDim, kColumnTiles>, kColumnTiles, kDim / kShareDims>;
  using Softmax::cell, Softmax::state_;

 public:
  using State = MmaShareState<kDim, kColumnTiles>;
  using Element = T;
  using InShared = T;
  static constexpr int kHeadDim = kDim, kColumns = 8 * kColumnTiles;
  static constexpr int kSlots = 4;  // of a ring that leaves a CTA within 99 KB
  using Slot = SwizzledSlot<kDim* int(sizeof(T))>;
  static constexpr int kPartNbytes = kColumnTiles * kWarpSize * int(sizeof(float4));  // of a warp
  static constexpr int kQueryNbytes = kColumns * kDim * int(sizeof(T));
  static constexpr int kScratchNbytes = kQueryNbytes + kShares * kPartNbytes;

  __device__ __forceinline__ MmaShare(int warp, int lane, unsigned char* scratch)
      : Softmax(lane),
        key_at_(Slot::at(lane & 15, 2 * warp + (lane >> 4))),
        value_at_(Slot::at((lane & 7) + (lane >> 4) * 8, 2 * warp + (lane >> 3 & 1))),
        query_at_(ptx::smem_addr(scratch) +
                  (kColumnTiles == 1 ? Slot::at(lane & 7, 2 * warp + (lane >> 3 & 1)) : key_at_)),
        parts_(reinterpret_cast<float4*>(scratch + kQueryNbytes) + lane),
        warp_(warp) {}

  // Q to shared memory, for the whole CTA, laid out like rows of K. Columns and dims that are absent are
  // zeros.
  static __device__ __forceinline__ void load_query(const AttentionArgs& a, const ColumnTile& tile,
                                                    int kv_head, unsigned char* scratch) {
    for (int column = 0; column < kColumns; column++) {
      const Row row = row_of(a, tile, kv_head, min(column, tile.num_columns - 1));
      const T* q =
          reinterpret_cast<const T*>(static_cast<const char*>(a.op.query) +
                                     row.token * a.op.query_stride_token + row.head * a.op.query_stride_head);
      for (int dim = threadIdx.x; dim < kDim; dim += kShares * kWarpSize)
        *reinterpret_cast<T*>(scratch + Slot::at(column, dim / 8) + dim % 8 * sizeof(T)) =
            column < tile.num_columns && dim < a.op.kv.key_head_dim ? q[dim] : T{};
    }
  }

  __device__ __forceinline__ void reset() { state_.reset(); }

  // The warp's part of S = K Q^T, shown to the others. A barrier between this and add_scores().
  __device__ __forceinline__ void score(SharedSlot keys) {
    float part[kColumnTiles][2][4] = {};  // two chains, to halve the latency of the matrix instruction
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t rows[4];
      ptx::ldmatrix_x4(rows, keys.at + key_at_ + k * kStepNbytes);
      if constexpr (kColumnTiles == 1) {
        uint32_t q[2];
        ptx::ldmatrix_x2(q, query_at_ + k * kStepNbytes);
        ptx::mma_m16n8k16<T>(part[0][k & 1], rows, q);
      } else {
        uint32_t q[4];  // columns (0-7 | 8-15) x dims (0-7 | 8-15)
        ptx::ldmatrix_x4(q, query_at_ + k * kStepNbytes);
        const uint32_t operands[2][2] = {{q[0], q[2]}, {q[1], q[3]}};
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) ptx::mma_m16n8k16<T>(part[n][k & 1], rows, operands[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
      parts_[(warp_ * kColumnTiles + n) * kWarpSize] =
          make_float4(part[n][0][0] + part[n][1][0], part[n][0][1] + part[n][1][1],
                      part[n][0][2] + part[n][1][2], part[n][0][3] + part[n][1][3]);
  }
  __device__ __forceinline__ void add_scores() {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      float4 sum = parts_[n * kWarpSize];
#pragma unroll
      for (int w = 1; w < kShares; w++) {
        const float4 part = parts_[(w * kColumnTiles + n) * kWarpSize];
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
      score_[n][0] = sum.x, score_[n][1] = sum.y, score_[n][2] = sum.z, score_[n][3] = sum.w;
    }
  }

  // Scores to probabilities relative to the running maximum; O and l are brought to a new one.
  // kEdge: there may be rows of the tile that some columns do not see.
  template <bool kEdge, class Sight>
  __device__ __forceinline__ void update_softmax(const Sight& sight, int first_token) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      float (&x)[4] = score_[n];
      sight.logits(x, first_token, [&](int e) { return cell(n, e); });
      if constexpr (kEdge) {
        const int2 seen = sight.two_seen(cell(n, 0).column, first_token);
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (!sight.sees(e & 1 ? seen.y : seen.x, cell(n, e).row)) x[e] = -INFINITY;
      }
      float maximum[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
      this->weigh(n, x, maximum, [](float (&)[4]) {});
    }
  }

  // O^T += V^T P^T; in the latter form for a tile with tokens that some columns see and others do not.
  __device__ __forceinline__ void accumulate(SharedSlot values) {
    this->add_values([&](int d, uint32_t (&dims)[4]) { load_values(values, d, dims); });
  }
  template <class Sight>
  __device__ __forceinline__ void accumulate_edge(SharedSlot values, const Sight& sight, int first_token) {
    if (all_finite(values)) return accumulate(values);
    this->add_seen_values(sight, first_token,
                          [&](int d, uint32_t (&dims)[4]) { load_values(values, d, dims); });
  }

  // What the keys since reset() gave.
  __device__ __forceinline__ const State& state() {
    state_.sum_lanes();
    return state_;
  }

 private:
  static constexpr int kSteps = kDim / kShareDims;  // of 16 dims
  static constexpr int kStepNbytes = kShareDims * int(sizeof(T));
  static_assert(kDim % kShareDims == 0 && kStepNbytes % 128 == 0 && kColumnTiles <= 2);

  __device__ __forceinline__ void load_values(SharedSlot values, int d, uint32_t (&dims)[4]) const {
    ptx::ldmatrix_x4_trans(dims, values.at + value_at_ + d * kStepNbytes);
  }

  // Of the warp's own dims.
  __device__ __forceinline__ bool all_finite(SharedSlot values) const {
    bool finite = true;
#pragma unroll 1
    for (int d = 0; d < kSteps; d++) {
      const uint4 piece = ptx::load16(values.bytes + key_at_ + d * kStepNbytes);
      for (const uint32_t bits : {piece.x, piece.y, piece.z, piece.w}) finite &= kernels::all_finite<T>(bits);
    }
    return __all_sync(kAllLanes, finite);
  }

  unsigned key_at_, value_at_;
  ptx::smem_t query_at_;
  float4* parts_;  // [kShares, kColumnTiles, kWarpSize], the lane's own
  int warp_;
  float score_[kColumnTiles][4];
};

}  // namespace paged_ops::kernels
