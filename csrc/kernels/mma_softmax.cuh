// What the matrix-instruction arithmetic of attention_mma.cuh and share_mma.cuh has in common: logits become
// probabilities, and these weigh a tile's values.
#pragma once
#include "kernels/mma_state.cuh"
#include "kernels/sight.cuh"

namespace paged_ops::kernels {

// State: an MmaState of kSteps times 16 dims and kColumnTiles tiles of columns.
template <class T, class State, int kColumnTiles, int kSteps>
class MmaSoftmax {
 protected:
  __device__ __forceinline__ explicit MmaSoftmax(int lane) : g_(lane >> 2), t_(lane & 3) {}

  // What element e of a product for column tile n is of: tokens g (first two) and g + 8, columns 2t, 2t + 1.
  __device__ __forceinline__ Cell cell(int n, int e) const {
    return {g_ + (e >> 1) * 8, n * 8 + t_ * 2 + (e & 1)};
  }

  // Logits x to probabilities relative to the running maximum; O and l are brought to a new one. `maximum`:
  // the lane's own, of its two columns. scale(x): what else probabilities are multiplied by, but not l.
  template <class F>
  __device__ __forceinline__ void weigh(int n, float (&x)[4], float (&maximum)[2], F scale) {
    float rescale[2];
#pragma unroll
    for (int o = 4; o < kWarpSize; o <<= 1) {
      maximum[0] = fmaxf(maximum[0], __shfl_xor_sync(kAllLanes, maximum[0], o));
      maximum[1] = fmaxf(maximum[1], __shfl_xor_sync(kAllLanes, maximum[1], o));
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float new_maximum = fmaxf(state_.m[n][j], maximum[j]);
      const float base = exponent_base(new_maximum);
      rescale[j] = ptx::ex2(state_.m[n][j] - base);
      state_.m[n][j] = new_maximum;
      x[j] = ptx::ex2(x[j] - base);
      x[j + 2] = ptx::ex2(x[j + 2] - base);
      state_.l[n][j] = fmaf(state_.l[n][j], rescale[j], x[j] + x[j + 2]);
    }
    scale(x);
    probability_[n][0] = ptx::movmatrix_trans(ptx::pack2<T>(x[0], x[1]));
    probability_[n][1] = ptx::movmatrix_trans(ptx::pack2<T>(x[2], x[3]));
    // Once the maximum has settled nothing is rescaled (times 1 is exact: the same bits either way).
    if (__any_sync(kAllLanes, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int d = 0; d < kSteps; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) state_.out[n][d][e] *= rescale[e & 1];
    }
  }

  // O^T += V^T P^T. load(d, dims): the A operand for the d-th 16 dims of V.
  template <class F>
  __device__ __forceinline__ void add_values(F load) {
#pragma unroll
    for (int d = 0; d < kSteps; d++) {
      uint32_t dims[4];
      load(d, dims);
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++) ptx::mma_m16n8k16<T>(state_.out[n][d], dims, probability_[n]);
    }
  }

  // The same for a tile with tokens that some columns see and others do not, where a value is infinite or
  // NaN: 0 times it would be NaN. Neighbouring columns that see the same are done together, with the rows
  // that they do not see as zeros, and the other columns' results are dropped.
  template <class Sight, class F>
  __device__ __forceinline__ void add_seen_values(const Sight& sight, int first_token, F load) {
#pragma unroll 1  // seldom run: registers count, time does not
    for (int first = 0, end = 0; first < 8 * kColumnTiles; first = end) {
      const int seen = sight.seen(first, first_token);
      while (end < 8 * kColumnTiles && sight.seen(end, first_token) == seen) end++;
      const auto keep = [&](int row) {
        return (sight.sees(seen, row) ? 0x0000ffffu : 0u) | (sight.sees(seen, row + 1) ? 0xffff0000u : 0u);
      };
      const uint32_t keep_low = keep(2 * t_), keep_high = keep(8 + 2 * t_);
#pragma unroll
      for (int d = 0; d < kSteps; d++) {
        uint32_t dims[4];
        load(d, dims);
        dims[0] &= keep_low;
        dims[1] &= keep_low;
        dims[2] &= keep_high;
        dims[3] &= keep_high;
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
          float sum[4] = {state_.out[n][d][0], state_.out[n][d][1], state_.out[n][d][2], state_.out[n][d][3]};
          ptx::mma_m16n8k16<T>(sum, dims, probability_[n]);
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (unsigned(n * 8 + t_ * 2 + (e & 1) - first) < unsigned(end - first))
              state_.out[n][d][e] = sum[e];
        }
      }
    }
  }

  int g_, t_;  // row (or column) and pair that this lane has of a matrix
  State state_;
  uint32_t probability_[kColumnTiles][2];
};

}  // namespace paged_ops::kernels
