// The arithmetic of attention on a tile of 16 tokens by matrix instructions, for f16 and bf16 queries.
//
// Swapped operands: a group has few query heads but many tokens, so tokens take the 16-row side of
// mma.m16n8k16 and columns (query token, head) the 8-wide side:
//     S   (16 tokens x 8 columns) = K   (16 x D)      Q^T (D x 8)      K: ldmatrix,       Q: registers
//     O^T (D dims    x 8 columns) = V^T (D x 16)      P^T (16 x 8)     V: ldmatrix.trans, P: movmatrix
// In both results lane l holds columns 2 (l mod 4) and the next one: the running maximum, the sum and the
// rescaling of O all concern the lane's own two columns, with no data movement.
//
// A quantised cache's rows are bytes in shared memory, and widened in registers (widen.cuh), which the same
// loads suit: where they give a lane a pair of 16-bit elements, it now has two pairs of bytes.
//     K: dims 4t .. 4t+3 of each 16, where the product is over 2t, 2t+1, 2t+8 and 2t+9. It is a sum over all:
//        the columns of Q are permuted likewise.
//     V: tokens 2t and 2t+1 of the dims 2g and 2g+1: of the two, one is row g of the product and one row g+8.
// A key's scale multiplies its scores. A value's scale s belongs to its weight: the sum l is of 2^(x - m),
// and that times s is what multiplies the value. For the latter to be in the range of T, m is the maximum of
// x + log2(s), and not of x. It is no more than a reference, so that all else is as ever.
#pragma once
#include "kernels/column_map.cuh"
#include "kernels/mma_softmax.cuh"
#include "kernels/tile_loader.cuh"
#include "kernels/widen.cuh"

namespace paged_ops::kernels {

// Ring depth (of 2-byte elements) and residency, chosen for about 150-190 KB in flight per multiprocessor of
// an H200.
template <int kHeadDim, int kColumnTiles>
struct MmaShape;
template <int kColumnTiles>
struct MmaShape<64, kColumnTiles> {
  static constexpr int kStages = 3, kMinCtas = 4;
};
template <int kColumnTiles>
struct MmaShape<128, kColumnTiles> {
  static constexpr int kStages = 2, kMinCtas = 3;
};
template <int kColumnTiles>
struct MmaShape<256, kColumnTiles> {
  static constexpr int kStages = 1, kMinCtas = kColumnTiles == 1 ? 3 : 2;
};

template <class Stored, int kDim, int kColumnTiles>
using MmaTileState =
    MmaState<kDim, kColumnTiles, is_quantised(dtype_of<Stored>::value) ? DimOrder::pairs : DimOrder::halves>;

// T: f16 or bf16. Stored: as rows come to shared memory, T or numbers of 8 bits. kColumnTiles: tiles of 8
// columns that share one pass over K and V.
template <class T, class Stored, int kDim, int kColumnTiles>
class MmaTile : MmaSoftmax<T, MmaTileState<Stored, kDim, kColumnTiles>, kColumnTiles, kDim / 16> {
  using Softmax = MmaSoftmax<T, MmaTileState<Stored, kDim, kColumnTiles>, kColumnTiles, kDim / 16>;
  using Softmax::cell, Softmax::g_, Softmax::t_, Softmax::state_;

 public:
  using Element = T;
  using InShared = Stored;
  using Shape = MmaShape<kDim, kColumnTiles>;
  static constexpr bool kQuantised = is_quantised(dtype_of<Stored>::value);
  using State = MmaTileState<Stored, kDim, kColumnTiles>;
  static constexpr int kHeadDim = kDim, kColumns = 8 * kColumnTiles, kWarps = 4;
  static constexpr int kStages = Shape::kStages * int(sizeof(T) / sizeof(Stored));
  // Of widened rows two tiles of columns need more registers than a third CTA leaves.
  static constexpr int kMinCtas = kQuantised && kDim == 128 && kColumnTiles == 2 ? 2 : Shape::kMinCtas;
  static constexpr int kRowNbytes = kDim * int(sizeof(Stored));
  using Slot = SwizzledSlot<kRowNbytes>;
  // Q stays in registers where they suffice, else in shared memory, laid out like 16 rows of K in one slot
  // or, where an element of Q is wider, several.
  static constexpr bool kQueryInRegisters = kDim * kColumnTiles < 512;
  static constexpr int kScratchNbytes =
      kQueryInRegisters ? 0 : Slot::kNbytes * int(sizeof(T) / sizeof(Stored));

  // K's matrices are (rows 0-7 | 8-15) x (dims 0-7 | 8-15); V's the other way round, as its fragments are
  // transposed. (Of bytes: dims 0-15 | 16-31.)
  __device__ __forceinline__ MmaTile(int /*warp*/, int lane, unsigned char* scratch)
      : Softmax(lane),
        key_at_(Slot::at(lane & 15, lane >> 4)),
        value_at_(Slot::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1)),
        query_at_(ptx::smem_addr(scratch)) {}

  // Columns and dims that are absent are zeros. Rows may be no better aligned than their elements.
  __device__ __forceinline__ void load_query(const AttentionArgs& a, const ColumnTile& tile, int kv_head,
                                             unsigned char* scratch) {
    const auto row_at = [&](int column) {
      const Row row = row_of(a, tile, kv_head, min(column, tile.num_columns - 1));
      return reinterpret_cast<const T*>(static_cast<const char*>(a.op.query) +
                                        row.token * a.op.query_stride_token +
                                        row.head * a.op.query_stride_head);
    };
    const auto element = [&](const T* q, int column, int dim) {
      return column < tile.num_columns && dim < a.op.kv.key_head_dim ? q[dim] : T{};
    };
    if constexpr (kQueryInRegisters) {
      // As the B operand: for column g, the pairs 2t and 8+2t of each 16.
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++) {
        const int column = n * 8 + g_;
        const T* q = row_at(column);
#pragma unroll
        for (int k = 0; k < kDim / 16; k++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int at = h * 8 + t_ * 2, dim = k * 16 + dim_at(at), next = k * 16 + dim_at(at + 1);
            query_[k][n][h] = element(q, column, dim).bits | uint32_t(element(q, column, next).bits) << 16;
          }
      }
    } else {
      // Opaque: where a dim goes is found here, and not kept from one tile of rows to the next.
      const int thread = kQuantised ? ptx::opaque(int(threadIdx.x)) : int(threadIdx.x);
      for (int column = 0; column < kColumns; column++) {
        const T* q = row_at(column);
        for (int dim = thread; dim < kDim; dim += kWarps * kWarpSize)
          *reinterpret_cast<T*>(scratch + dim / kDimsOfSlot * Slot::kNbytes +
                                Slot::at(column, dim % kDimsOfSlot / 8) + dim % 8 * sizeof(T)) =
              element(q, column, dim / 16 * 16 + dim_at(dim % 16));
      }
    }
  }

  __device__ __forceinline__ void reset() { state_.reset(); }

  // S = K Q^T, in two chains to halve the latency of the matrix instruction. `scales`: of the tile's keys and
  // values, where they have some.
  __device__ __forceinline__ void score(SharedSlot keys, const float* scales) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) score_[n][0][e] = score_[n][1][e] = 0.f;
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
      uint32_t rows[4];
      load_keys(keys, k, rows);
      if constexpr (kQueryInRegisters) {
        score_columns(k, rows, query_[k]);
      } else {
        uint32_t q[4];  // columns (0-7 | 8-15) x dims (0-7 | 8-15)
        ptx::ldmatrix_x4(q, query_at_ + k * 16 / kDimsOfSlot * Slot::kNbytes +
                                Slot::right(key_at_, k * 16 % kDimsOfSlot / 8));
        const uint32_t operand[2][2] = {{q[0], q[2]}, {q[1], q[3]}};
        score_columns(k, rows, operand);
      }
    }
    if constexpr (kQuantised) take_scales(scales);  // not before: registers less in the loop
  }

  // Scores to probabilities relative to the running maximum; O and l are brought to a new one.
  // kEdge: there may be rows of the tile that some columns do not see.
  template <bool kEdge, class Sight>
  __device__ __forceinline__ void update_softmax(const Sight& sight, int first_token) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      // Roundings are spelled out: a row's tile may be on the edge for one CTA and not for another, and the
      // bits must agree.
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] = score_[n][0][e] + score_[n][1][e];
      if constexpr (kQuantised) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = __fmul_rn(x[e], key_scale_[e >> 1]);
      }
      sight.logits(x, first_token, [&](int e) { return cell(n, e); });
      float weight_scale[4];  // of what is not seen, it may be anything
      if constexpr (kQuantised) {
#pragma unroll
        for (int e = 0; e < 4; e++) weight_scale[e] = value_scale_[e >> 1];
      }
      if constexpr (kEdge) {
        const int2 seen = sight.two_seen(cell(n, 0).column, first_token);
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (!sight.sees(e & 1 ? seen.y : seen.x, cell(n, e).row)) x[e] = -INFINITY, weight_scale[e] = 0.f;
      }
      float maximum[2];
      if constexpr (kQuantised) {
#pragma unroll
        for (int j = 0; j < 2; j++)
          maximum[j] =
              fmaxf(__fadd_rn(x[j], value_scale_log2_[0]), __fadd_rn(x[j + 2], value_scale_log2_[1]));
      } else {
        maximum[0] = fmaxf(x[0], x[2]);
        maximum[1] = fmaxf(x[1], x[3]);
      }
      this->weigh(n, x, maximum, [&](float (&x)[4]) {
        if constexpr (kQuantised) {
#pragma unroll
          for (int e = 0; e < 4; e++) x[e] = __fmul_rn(x[e], weight_scale[e]);
        }
      });
    }
  }

  // O^T += V^T P^T; in the latter form for a tile with tokens that some columns see and others do not. A
  // probability of 0 hides what is finite.
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
  // The same to shared memory: out [kColumns, row_stride], states [kColumns].
  __device__ __forceinline__ void write_state(float* out, int row_stride, float2* states) {
    state().write(out, row_stride, states, g_ * 4 + t_);
  }

 private:
  static constexpr int kDimsOfSlot = Slot::kPieces * 16 / int(sizeof(T));  // of Q

  // Which dim of 16 is the `at`-th in the product of K and Q: those that a lane has of an ldmatrix.
  static __device__ __forceinline__ int dim_at(int at) {
    return kQuantised ? at % 8 / 2 * 4 + at % 2 * 2 + at / 8 : at;
  }

  // The A operands for dims 16 k on, of K and of V. Of bytes, a load brings those of two.
  __device__ __forceinline__ void load_keys(SharedSlot keys, int k, uint32_t (&rows)[4]) {
    if constexpr (kQuantised) {
      if (k % 2 == 0) ptx::ldmatrix_x4(bytes_, keys.at + Slot::right(key_at_, k));
      const Widened low = widen<T, Stored>(bytes_[k % 2 * 2]), high = widen<T, Stored>(bytes_[k % 2 * 2 + 1]);
      rows[0] = low.even, rows[1] = high.even, rows[2] = low.odd, rows[3] = high.odd;
    } else {
      ptx::ldmatrix_x4(rows, keys.at + Slot::right(key_at_, 2 * k));
    }
  }
  __device__ __forceinline__ void load_values(SharedSlot values, int d, uint32_t (&dims)[4]) {
    if constexpr (kQuantised) {
      if (d % 2 == 0) ptx::ldmatrix_x4_trans(bytes_, values.at + Slot::right(value_at_, d));
      const Widened low = widen<T, Stored>(bytes_[d % 2]), high = widen<T, Stored>(bytes_[d % 2 + 2]);
      dims[0] = low.even, dims[1] = low.odd, dims[2] = high.even, dims[3] = high.odd;
    } else {
      ptx::ldmatrix_x4_trans(dims, values.at + Slot::right(value_at_, 2 * d));
    }
  }

  // Of tokens g and g + 8. The logarithm is kept where neither l nor a weight can overflow by it.
  __device__ __forceinline__ void take_scales(const float* scales) {
    constexpr float kFarthest = 64.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      key_scale_[i] = scales[g_ + i * 8];
      value_scale_[i] = scales[kTileTokens + g_ + i * 8];
      value_scale_log2_[i] = fminf(fmaxf(ptx::lg2(fabsf(value_scale_[i])), -kFarthest), kFarthest);
    }
  }

  __device__ __forceinline__ void score_columns(int k, const uint32_t (&rows)[4],
                                                const uint32_t (&query)[kColumnTiles][2]) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) ptx::mma_m16n8k16<T>(score_[n][k & 1], rows, query[n]);
  }

  __device__ __forceinline__ bool all_finite(SharedSlot values) const {
    bool finite = true;
#pragma unroll 1  // seldom run: registers count, time does not
    for (int i = g_ * 4 + t_; i < Slot::kNbytes / 16; i += kWarpSize) {
      const uint4 piece = ptx::load16(values.bytes + i * 16);
      for (const uint32_t bits : {piece.x, piece.y, piece.z, piece.w})
        finite &= kernels::all_finite<Stored>(bits);
    }
    return __all_sync(kAllLanes, finite);
  }

  unsigned key_at_, value_at_;
  ptx::smem_t query_at_;
  uint32_t bytes_[4];
  float key_scale_[2], value_scale_[2], value_scale_log2_[2];
  uint32_t query_[kQueryInRegisters ? kDim / 16 : 1][kColumnTiles][2];
  float score_[kColumnTiles][2][4];
};

}  // namespace paged_ops::kernels
