// The arithmetic of attention on a tile of 16 tokens by plain multiply-adds, of f32 rows: for f32, and for
// quantised caches that are converted to it.
//
// The same interface and the same walk as attention_mma.cuh. For S, lane l has token l mod 16 and half of
// the 8 columns; for O it has head_dim / 32 dims of every column. Probabilities change hands in shared
// memory.
#pragma once
#include "kernels/column_map.cuh"
#include "kernels/online_softmax.cuh"
#include "kernels/sight.cuh"
#include "kernels/tile_loader.cuh"

namespace paged_ops::kernels {

// Four warps where the ring allows it: a CTA must fit in the 99 KB of the smaller chips.
template <int kHeadDim>
struct FmaShape;
template <>
struct FmaShape<64> {
  static constexpr int kStages = 2, kWarps = 4, kMinCtas = 3;
};
template <>
struct FmaShape<128> {
  static constexpr int kStages = 1, kWarps = 4, kMinCtas = 3;
};
template <>
struct FmaShape<256> {
  static constexpr int kStages = 1, kWarps = 2, kMinCtas = 3;
};

// T: of query and output.
template <class T, int kDim>
class FmaTile {
 public:
  using Element = T;
  using InShared = float;
  using Shape = FmaShape<kDim>;
  static constexpr int kHeadDim = kDim, kColumns = 8, kWarps = Shape::kWarps;
  static constexpr int kStages = Shape::kStages, kMinCtas = Shape::kMinCtas;
  static constexpr int kRowNbytes = kDim * int(sizeof(float));
  using Slot = SwizzledSlot<kRowNbytes>;

 private:
  static constexpr int kMine = kColumns / 2;          // columns of a lane's scores
  static constexpr int kVector = kDim == 64 ? 2 : 4;  // dims of O that lie together
  static constexpr int kParts = kDim / (kWarpSize * kVector);
  static constexpr int kQueryNbytes = kColumns * kDim * int(sizeof(float));
  static constexpr int kProbabilityNbytes = kTileTokens * kColumns * int(sizeof(float));

 public:
  static constexpr int kScratchNbytes = kQueryNbytes + kWarps * kProbabilityNbytes;

  __device__ __forceinline__ FmaTile(int warp, int lane, unsigned char* scratch)
      : lane_(lane),
        token_(lane % kTileTokens),
        first_column_(lane / kTileTokens * kMine),
        query_(reinterpret_cast<float*>(scratch)),
        probability_(reinterpret_cast<float*>(scratch + kQueryNbytes + warp * kProbabilityNbytes)) {}

  // Q to shared memory, for the whole CTA. Absent columns and dims are zeros.
  __device__ __forceinline__ void load_query(const AttentionArgs& a, const ColumnTile& tile, int kv_head,
                                             unsigned char* /*scratch*/) {
    for (int c = 0; c < kColumns; c++) {
      const bool valid = c < tile.num_columns;
      const Row row = row_of(a, tile, kv_head, valid ? c : 0);
      const T* q =
          reinterpret_cast<const T*>(static_cast<const char*>(a.op.query) +
                                     row.token * a.op.query_stride_token + row.head * a.op.query_stride_head);
      for (int dim = threadIdx.x; dim < kDim; dim += kWarps * kWarpSize)
        query_[c * kDim + dim] = valid && dim < a.op.kv.key_head_dim ? ptx::to_float(q[dim]) : 0.f;
    }
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int c = 0; c < kMine; c++) m_[c] = -INFINITY, l_[c] = 0.f;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int d = 0; d < kParts * kVector; d++) out_[c][d] = 0.f;
  }

  // Four chains per column: shorter ones lose less to rounding, and hide the latency.
  __device__ __forceinline__ void score(SharedSlot keys, const float* /*scales*/) {
    float4 sum[kMine];
#pragma unroll
    for (int c = 0; c < kMine; c++) sum[c] = make_float4(0.f, 0.f, 0.f, 0.f);
    const unsigned key = Slot::at(token_, 0);
#pragma unroll 4
    for (int piece = 0; piece < Slot::kPieces; piece++) {
      const float4 k =
          *reinterpret_cast<const float4*>(keys.bytes + (key ^ (piece & 7) << 4) + (piece >> 3) * 128);
#pragma unroll
      for (int c = 0; c < kMine; c++) {
        const float4 q = *reinterpret_cast<const float4*>(query_ + (first_column_ + c) * kDim + piece * 4);
        sum[c] = make_float4(fmaf(k.x, q.x, sum[c].x), fmaf(k.y, q.y, sum[c].y), fmaf(k.z, q.z, sum[c].z),
                             fmaf(k.w, q.w, sum[c].w));
      }
    }
#pragma unroll
    for (int c = 0; c < kMine; c++) score_[c] = (sum[c].x + sum[c].y) + (sum[c].z + sum[c].w);
  }

  template <bool kEdge, class Sight>
  __device__ __forceinline__ void update_softmax(const Sight& sight, int first_token) {
    sight.logits(score_, first_token, [&](int c) { return Cell{token_, first_column_ + c}; });
    float rescale[kMine];
    bool settled = true;
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      float x = score_[c];
      if (kEdge && !sight.sees(sight.seen(first_column_ + c, first_token), token_)) x = -INFINITY;
      float maximum = x;
#pragma unroll
      for (int o = 1; o < kTileTokens; o <<= 1)
        maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, o));
      const float new_maximum = fmaxf(m_[c], maximum);
      const float base = exponent_base(new_maximum);
      rescale[c] = ptx::ex2(m_[c] - base);
      m_[c] = new_maximum;
      score_[c] = ptx::ex2(x - base);
      l_[c] = fmaf(l_[c], rescale[c], score_[c]);
      settled &= rescale[c] == 1.f;
    }
    *reinterpret_cast<float4*>(probability_ + token_ * kColumns + first_column_) =
        make_float4(score_[0], score_[1], score_[2], score_[3]);
    if (!__all_sync(kAllLanes, settled)) {
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const float by = __shfl_sync(kAllLanes, rescale[c % kMine], c / kMine * kTileTokens);
#pragma unroll
        for (int d = 0; d < kParts * kVector; d++) out_[c][d] *= by;
      }
    }
    // The loader's wait, which follows, shows the probabilities to all lanes.
  }

  __device__ __forceinline__ void accumulate(SharedSlot values) {
    add(values, [](int, int) { return true; });
  }

  // What a column does not see is left out, not multiplied by 0: it may be an infinity or NaN.
  template <class Sight>
  __device__ __forceinline__ void accumulate_edge(SharedSlot values, const Sight& sight, int first_token) {
    add(values, [&](int row, int column) { return sight.sees(sight.seen(column, first_token), row); });
  }

  __device__ __forceinline__ void write_state(float* out, int row_stride, float2* state) {
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      float sum = l_[c];  // so far of this lane's tokens
#pragma unroll
      for (int o = 1; o < kTileTokens; o <<= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
      if (token_ == 0) state[first_column_ + c] = make_float2(m_[c], sum);
    }
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int i = 0; i < kParts; i++)
#pragma unroll
        for (int d = 0; d < kVector; d++)
          out[c * row_stride + (i * kWarpSize + lane_) * kVector + d] = out_[c][i * kVector + d];
  }

 private:
  template <class Sees>
  __device__ __forceinline__ void add(SharedSlot values, Sees sees) {
#pragma unroll 4
    for (int row = 0; row < kTileTokens; row++) {
      float p[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) {
        const float4 four = *reinterpret_cast<const float4*>(probability_ + row * kColumns + c);
        p[c] = four.x, p[c + 1] = four.y, p[c + 2] = four.z, p[c + 3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < kParts; i++) {
        const int dim = (i * kWarpSize + lane_) * kVector;
        const unsigned char* at = values.bytes + Slot::at(row, dim / 4) + dim % 4 * int(sizeof(float));
        float v[kVector];
        if constexpr (kVector == 4) {
          const float4 four = *reinterpret_cast<const float4*>(at);
          v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        } else {
          const float2 two = *reinterpret_cast<const float2*>(at);
          v[0] = two.x, v[1] = two.y;
        }
#pragma unroll
        for (int c = 0; c < kColumns; c++)
          if (sees(row, c)) {
#pragma unroll
            for (int d = 0; d < kVector; d++)
              out_[c][i * kVector + d] = fmaf(p[c], v[d], out_[c][i * kVector + d]);
          }
      }
    }
  }

  int lane_, token_, first_column_;
  float* query_;        // [kColumns, kDim], of the CTA
  float* probability_;  // [kTileTokens, kColumns], of the warp
  float score_[kMine], m_[kMine], l_[kMine];
  float out_[kColumns][kParts * kVector];
};

}  // namespace paged_ops::kernels
