// The states of a warp's columns (online_softmax.cuh) as the matrix instructions leave them in registers.
#pragma once
#include "kernels/online_softmax.cuh"

namespace paged_ops::kernels {

// Lane 4 g + t has the columns 8 n + 2 t + j for j = 0, 1, and of each of them two of the dims 16 d .. 16 d +
// 15: g and g + 8 or, where the rows of the product are values' bytes by pairs, 2 g and 2 g + 1.
enum class DimOrder { halves, pairs };

template <int kHeadDim, int kColumnTiles, DimOrder kOrder = DimOrder::halves>
struct MmaState {
  float m[kColumnTiles][2], l[kColumnTiles][2], out[kColumnTiles][kHeadDim / 16][4];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      m[n][0] = m[n][1] = -INFINITY;
      l[n][0] = l[n][1] = 0.f;
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[n][d][e] = 0.f;
    }
  }

  // While keys are walked, l is of the lane's own tokens. This makes it the sum over all lanes.
  __device__ __forceinline__ void sum_lanes() {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int o = 4; o < kWarpSize; o <<= 1) l[n][j] += __shfl_xor_sync(kAllLanes, l[n][j], o);
  }

  // Both with sums over all lanes.
  __device__ __forceinline__ void fold_in(const MmaState& added) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float maximum = fmaxf(m[n][j], added.m[n][j]);
        const FoldFactors by = fold_factors(m[n][j], added.m[n][j], maximum);
        m[n][j] = maximum;
        l[n][j] = fold(l[n][j], added.l[n][j], by);
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++)
#pragma unroll
          for (int e = j; e < 4; e += 2) out[n][d][e] = fold(out[n][d][e], added.out[n][d][e], by);
      }
  }

  // As rows in shared memory: outputs `row_stride` apart, and a pair (m, l) per column.
  __device__ __forceinline__ void read(const float* rows, int row_stride, const float2* states, int lane) {
    read_weights(states, lane);
    for_each_column(lane, [&](int column, int n, int j) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; d++)
#pragma unroll
        for (int e = j; e < 4; e += 2) out[n][d][e] = rows[column * row_stride + dim(d, e >> 1, lane)];
    });
  }
  __device__ __forceinline__ void write(float* rows, int row_stride, float2* states, int lane) const {
    write_weights(states, lane);
    for_each_column(lane, [&](int column, int n, int j) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; d++)
#pragma unroll
        for (int e = j; e < 4; e += 2) rows[column * row_stride + dim(d, e >> 1, lane)] = out[n][d][e];
    });
  }
  // The pairs alone.
  __device__ __forceinline__ void read_weights(const float2* states, int lane) {
    for_each_column(lane, [&](int column, int n, int j) {
      m[n][j] = states[column].x;
      l[n][j] = states[column].y;
    });
  }
  __device__ __forceinline__ void write_weights(float2* states, int lane) const {
    for_each_column(lane, [&](int column, int n, int j) {
      if (lane >> 2 == 0) states[column] = make_float2(m[n][j], l[n][j]);
    });
  }

 private:
  static __device__ __forceinline__ int dim(int d, int i, int lane) {
    return d * 16 + (kOrder == DimOrder::halves ? i * 8 + (lane >> 2) : (lane >> 2) * 2 + i);
  }
  template <class F>
  static __device__ __forceinline__ void for_each_column(int lane, F f) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) f(n * 8 + (lane & 3) * 2 + j, n, j);
  }
};

}  // namespace paged_ops::kernels
