// The online softmax: the one rule by which partial attention states are put together.
//
// A state of a row is (m, l, o): the maximum of its scores in log2 units, the sum of 2^(score - m) and the
// sum of 2^(score - m) * v. Folding a second state into the first (Milakov & Gimelshein 2018):
//     m' = max(m, m2);  l' = l 2^(m - m') + l2 2^(m2 - m');  o' likewise.
// The empty state (-inf, 0, 0) is the identity, exactly. Maxima ignore NaN, sums do not: a NaN score makes
// its row NaN.
#pragma once
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// What exponents are taken relative to. While every score is -inf, that is 0: 2^-inf, and not NaN.
__device__ __forceinline__ float exponent_base(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

struct FoldFactors {
  float kept, added;
};

__device__ __forceinline__ FoldFactors fold_factors(float maximum, float added_maximum, float new_maximum) {
  const float base = exponent_base(new_maximum);
  return {ptx::ex2(maximum - base), ptx::ex2(added_maximum - base)};
}

// The roundings are spelled out, because the same fold is compiled in several places and its bits must agree.
__device__ __forceinline__ float fold(float kept, float added, FoldFactors by) {
  return fmaf(kept, by.kept, added * by.added);
}

__device__ __forceinline__ float4 fold(float4 kept, float4 added, FoldFactors by) {
  return make_float4(fold(kept.x, added.x, by), fold(kept.y, added.y, by), fold(kept.z, added.z, by),
                     fold(kept.w, added.w, by));
}

// The state of one row, held by a warp: lane i has dims 4 i .. 4 i + 3, and 128 more on for wide heads.
// In memory it is a row of un-normalised output and a pair (m, l).
template <int kHeadDim>
struct RowState {
  static constexpr int kParts = (kHeadDim + 127) / 128;
  static constexpr int kFoldedAtOnce = kParts <= 2 ? 16 : 4;  // chunks whose loads registers have room for
  float m = -INFINITY, l = 0.f;
  float4 o[kParts] = {};

  // Calls f(part, dim) for the lane's first dim of each part that lies within `head_dim`.
  template <class F>
  static __device__ __forceinline__ void for_each_part(int lane, int head_dim, F f) {
#pragma unroll
    for (int i = 0; i < kParts; i++)
      if (i * 128 + lane * 4 < head_dim) f(i, i * 128 + lane * 4);
  }

  __device__ __forceinline__ void read(const float* out, float2 state, int lane, int head_dim) {
    m = state.x;
    l = state.y;
    for_each_part(lane, head_dim,
                  [&](int i, int dim) { o[i] = *reinterpret_cast<const float4*>(out + dim); });
  }
  __device__ __forceinline__ void write(float* out, float2* state, int lane, int head_dim) const {
    for_each_part(lane, head_dim, [&](int i, int dim) { *reinterpret_cast<float4*>(out + dim) = o[i]; });
    if (lane == 0) *state = make_float2(m, l);
  }

  __device__ __forceinline__ void fold_in(const RowState& added) {
    const float maximum = fmaxf(m, added.m);
    const FoldFactors by = fold_factors(m, added.m, maximum);
    m = maximum;
    l = fold(l, added.l, by);
#pragma unroll
    for (int i = 0; i < kParts; i++) o[i] = fold(o[i], added.o[i], by);
  }

  // One more key, with a value of 0.
  __device__ __forceinline__ void fold_in_logit(float logit) {
    constexpr float kLog2e = 1.44269504088896f;
    RowState added;
    added.m = __fmul_rn(logit, kLog2e);
    added.l = added.m == -INFINITY ? 0.f : 1.f;
    fold_in(added);
  }

  // A sum of 0 means that no key had a score above -inf: output 0, LSE -inf. (A NaN is not 0 and goes
  // through.)
  __device__ __forceinline__ float normaliser() const { return l == 0.f ? 0.f : 1.f / l; }
  __device__ __forceinline__ float natural_lse() const {
    constexpr float kLn2 = 0.693147180559945f;
    return l == 0.f ? -INFINITY : (m + log2f(l)) * kLn2;
  }
};

}  // namespace paged_ops::kernels
