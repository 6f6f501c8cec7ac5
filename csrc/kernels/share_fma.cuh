// The arithmetic of attention on a warp's share of the dims of a tile of 16 tokens, by plain multiply-adds,
// for f32: the same interface and shares as share_mma.cuh.
//
// Lane 4 c + q has column c: for S the tokens 4 q .. 4 q + 3, for O the q-th 4 of the warp's every 16 dims.
#pragma once
#include "kernels/column_map.cuh"
#include "kernels/online_softmax.cuh"
#include "kernels/share_mma.cuh"
#include "kernels/sight.cuh"
#include "kernels/tile_loader.cuh"

namespace paged_ops::kernels {

// T: of query and output.
template <class T, int kDim>
class FmaShare {
  static constexpr int kSteps = kDim / kShareDims;

 public:
  using Element = T;
  using InShared = float;
  static constexpr int kHeadDim = kDim, kColumns = 8;
  static constexpr int kSlots = 2;
  using Slot = SwizzledSlot<kDim* int(sizeof(float))>;
  static constexpr int kPartNbytes = kWarpSize * int(sizeof(float4));  // of a warp
  static constexpr int kQueryNbytes = kColumns * kDim * int(sizeof(float));
  static constexpr int kScratchNbytes = kQueryNbytes + kShares * kPartNbytes;

  class State {
   public:
    float m, l;
    float4 out[kSteps];

    __device__ __forceinline__ void reset() {
      m = -INFINITY, l = 0.f;
#pragma unroll
      for (int d = 0; d < kSteps; d++) out[d] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    // While keys are walked, l is of the lane's own tokens.
    __device__ __forceinline__ void sum_lanes() {
      l += __shfl_xor_sync(kAllLanes, l, 1);
      l += __shfl_xor_sync(kAllLanes, l, 2);
    }
    __device__ __forceinline__ void fold_in(const State& added) {
      const float maximum = fmaxf(m, added.m);
      const FoldFactors by = fold_factors(m, added.m, maximum);
      m = maximum;
      l = fold(l, added.l, by);
#pragma unroll
      for (int d = 0; d < kSteps; d++) out[d] = fold(out[d], added.out[d], by);
    }
    template <class F>
    __device__ __forceinline__ void write(int share, int lane, int head_dim, F row_of) const {
      float* const row = row_of(lane >> 2);
      if (row == nullptr) return;
#pragma unroll
      for (int d = 0; d < kSteps; d++)
        if (const int dim = d * kShareDims + share * 16 + (lane & 3) * 4; dim < head_dim)
          *reinterpret_cast<float4*>(row + dim) = out[d];
    }
    template <class F>
    __device__ __forceinline__ void for_each_weight(int lane, F f) const {
      if ((lane & 3) == 0) f(lane >> 2, make_float2(m, l));
    }
  };

  __device__ __forceinline__ FmaShare(int warp, int lane, unsigned char* scratch)
      : lane_(lane),
        column_(lane >> 2),
        quarter_(lane & 3),
        warp_(warp),
        query_(reinterpret_cast<const float4*>(scratch) + column_ * (kDim / 4) + warp * 4),
        parts_(reinterpret_cast<float4*>(scratch + kQueryNbytes) + lane) {}

  // Q to shared memory, for the whole CTA. Absent columns and dims are zeros.
  static __device__ __forceinline__ void load_query(const AttentionArgs& a, const ColumnTile& tile,
                                                    int kv_head, unsigned char* scratch) {
    for (int c = 0; c < kColumns; c++) {
      const bool valid = c < tile.num_columns;
      const Row row = row_of(a, tile, kv_head, valid ? c : 0);
      const T* q =
          reinterpret_cast<const T*>(static_cast<const char*>(a.op.query) +
                                     row.token * a.op.query_stride_token + row.head * a.op.query_stride_head);
      for (int dim = threadIdx.x; dim < kDim; dim += kShares * kWarpSize)
        reinterpret_cast<float*>(scratch)[c * kDim + dim] =
            valid && dim < a.op.kv.key_head_dim ? ptx::to_float(q[dim]) : 0.f;
    }
  }

  __device__ __forceinline__ void reset() { state_.reset(); }

  // Four chains per token: shorter ones lose less to rounding, and hide the latency.
  __device__ __forceinline__ void score(SharedSlot keys) {
    float4 sum[4] = {};
#pragma unroll 1
    for (int d = 0; d < kSteps; d++)
#pragma unroll
      for (int piece = 0; piece < 4; piece++) {
        const float4 q = query_[d * (kShareDims / 4) + piece];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4 k = *reinterpret_cast<const float4*>(
              keys.bytes + Slot::at(quarter_ * 4 + j, warp_ * 4 + piece) + d * kStepNbytes);
          sum[j] = make_float4(fmaf(k.x, q.x, sum[j].x), fmaf(k.y, q.y, sum[j].y), fmaf(k.z, q.z, sum[j].z),
                               fmaf(k.w, q.w, sum[j].w));
        }
      }
    const auto total = [](float4 x) { return (x.x + x.y) + (x.z + x.w); };
    parts_[warp_ * kWarpSize] = make_float4(total(sum[0]), total(sum[1]), total(sum[2]), total(sum[3]));
  }
  __device__ __forceinline__ void add_scores() {
    float4 sum = parts_[0];
#pragma unroll
    for (int w = 1; w < kShares; w++) {
      const float4 part = parts_[w * kWarpSize];
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    weight_[0] = sum.x, weight_[1] = sum.y, weight_[2] = sum.z, weight_[3] = sum.w;
  }

  template <bool kEdge, class Sight>
  __device__ __forceinline__ void update_softmax(const Sight& sight, int first_token) {
    sight.logits(weight_, first_token, [&](int j) { return Cell{quarter_ * 4 + j, column_}; });
    if constexpr (kEdge) {
      const int seen = sight.seen(column_, first_token);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (!sight.sees(seen, quarter_ * 4 + j)) weight_[j] = -INFINITY;
    }
    float maximum = fmaxf(fmaxf(weight_[0], weight_[1]), fmaxf(weight_[2], weight_[3]));
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 2));
    const float new_maximum = fmaxf(state_.m, maximum);
    const float base = exponent_base(new_maximum), rescale = ptx::ex2(state_.m - base);
    state_.m = new_maximum;
#pragma unroll
    for (int j = 0; j < 4; j++) weight_[j] = ptx::ex2(weight_[j] - base);
    state_.l = fmaf(state_.l, rescale, (weight_[0] + weight_[1]) + (weight_[2] + weight_[3]));
    if (__any_sync(kAllLanes, rescale != 1.f)) {
#pragma unroll
      for (int d = 0; d < kSteps; d++) {
        float4& o = state_.out[d];
        o = make_float4(o.x * rescale, o.y * rescale, o.z * rescale, o.w * rescale);
      }
    }
  }

  __device__ __forceinline__ void accumulate(SharedSlot values) {
    add(values, [](int) { return true; });
  }

  // What a column does not see is left out, not multiplied by 0: it may be an infinity or NaN.
  template <class Sight>
  __device__ __forceinline__ void accumulate_edge(SharedSlot values, const Sight& sight, int first_token) {
    const int seen = sight.seen(column_, first_token);
    add(values, [&](int row) { return sight.sees(seen, row); });
  }

  __device__ __forceinline__ const State& state() {
    state_.sum_lanes();
    return state_;
  }

 private:
  static constexpr int kStepNbytes = kShareDims * int(sizeof(float));

  template <class Sees>
  __device__ __forceinline__ void add(SharedSlot values, Sees sees) {
#pragma unroll 4
    for (int row = 0; row < kTileTokens; row++) {
      const float p = __shfl_sync(kAllLanes, weight_[row % 4], (lane_ & ~3) + row / 4);
      if (!sees(row)) continue;
      const unsigned char* at = values.bytes + Slot::at(row, warp_ * 4 + quarter_);
#pragma unroll
      for (int d = 0; d < kSteps; d++) {
        const float4 v = *reinterpret_cast<const float4*>(at + d * kStepNbytes);
        float4& o = state_.out[d];
        o = make_float4(fmaf(p, v.x, o.x), fmaf(p, v.y, o.y), fmaf(p, v.z, o.z), fmaf(p, v.w, o.w));
      }
    }
  }

  int lane_, column_, quarter_, warp_;
  const float4* query_;  // the lane's column, from the warp's first dims on
  float4* parts_;        // [kShares, kWarpSize], the lane's own
  State state_;
  float weight_[4];  // scores of the lane's tokens, then probabilities
};

}  // namespace paged_ops::kernels
