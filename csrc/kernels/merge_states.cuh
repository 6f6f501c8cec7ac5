// Merging two partial attention results: one CTA per token, one warp per head.
#pragma once
#include "kernels/warp.cuh"
#include "params/merge_states.h"

namespace paged_ops::kernels {

constexpr int kMergeWarps = 4;

// T: the element type. kWidth: elements that a lane moves at a time, 4 where addresses and strides allow it.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize) merge_states_kernel(const MergeStatesParams p) {
  struct alignas(kWidth * sizeof(T)) Packet {
    T element[kWidth];
  };
  const int64_t token = blockIdx.x;
  const int lane = int(threadIdx.x) % kWarpSize;
  for (int head = warp_index(); head < p.num_heads; head += kMergeWarps) {
    const float lse_a = p.lse_a[token * p.num_heads + head], lse_b = p.lse_b[token * p.num_heads + head];
    // Natural logarithms. While both are -inf the exponents are taken relative to 0: 0, and not NaN.
    const float maximum = fmaxf(lse_a, lse_b);
    const float base = maximum == -INFINITY ? 0.f : maximum;
    const float exp_a = expf(lse_a - base), exp_b = expf(lse_b - base), sum = exp_a + exp_b;
    const float weight_a = sum == 0.f ? 0.f : exp_a / sum, weight_b = sum == 0.f ? 0.f : exp_b / sum;

    const auto row = [&](const void* tensor, int64_t stride_token, int64_t stride_head) {
      return static_cast<const char*>(tensor) + token * stride_token + head * stride_head;
    };
    const auto* a = reinterpret_cast<const Packet*>(row(p.out_a, p.a_stride_token, p.a_stride_head));
    const auto* b = reinterpret_cast<const Packet*>(row(p.out_b, p.b_stride_token, p.b_stride_head));
    auto* out =
        reinterpret_cast<Packet*>(const_cast<char*>(row(p.out, p.out_stride_token, p.out_stride_head)));
    for (int i = lane; i < p.head_dim / kWidth; i += kWarpSize) {
      const Packet from_a = a[i], from_b = b[i];
      Packet merged;
#pragma unroll
      for (int e = 0; e < kWidth; e++) {
        // An empty state is the identity whatever its output holds: left out, not multiplied by 0.
        const float x = lse_a == -INFINITY ? 0.f : ptx::to_float(from_a.element[e]) * weight_a;
        const float y = lse_b == -INFINITY ? 0.f : ptx::to_float(from_b.element[e]) * weight_b;
        merged.element[e] = ptx::from_float<T>(x + y);
      }
      out[i] = merged;
    }
    __syncwarp();  // all lanes have read the LSEs, which p.lse may overwrite
    if (lane == 0) p.lse[token * p.num_heads + head] = sum == 0.f ? -INFINITY : maximum + logf(sum);
  }
}

}  // namespace paged_ops::kernels
