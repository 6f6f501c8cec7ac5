// What becomes of a row's state: its bits in the output, or a partial state in the workspace that the last of
// the CTAs that share the row folds with the others'.
#pragma once
#include "kernels/column_map.cuh"
#include "kernels/online_softmax.cuh"

namespace paged_ops::kernels {

// Four elements to an address that may be no better aligned than one.
template <class T>
__device__ __forceinline__ void store4(T* to, float4 x) {
  const uint32_t low = ptx::pack2<T>(x.x, x.y), high = ptx::pack2<T>(x.z, x.w);
  if (reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  } else {
    to[0].bits = uint16_t(low);
    to[1].bits = uint16_t(low >> 16);
    to[2].bits = uint16_t(high);
    to[3].bits = uint16_t(high >> 16);
  }
}
__device__ __forceinline__ void store4(float* to, float4 x) {
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<float4*>(to) = x;
  } else {
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
  }
}

template <class T, int kHeadDim>
__device__ __forceinline__ void store_result(const AttentionArgs& a, const ColumnTile& tile, Row row,
                                             RowState<kHeadDim> result, int lane) {
  // Rows behind the last sequence have no sink.
  if (a.op.rules.sinks != nullptr && tile.sequence < a.op.tables.num_seqs)
    result.fold_in_logit(__ldg(a.op.rules.sinks + row.head));
  T* out = reinterpret_cast<T*>(static_cast<char*>(a.op.out) + row.token * a.op.out_stride_token +
                                row.head * a.op.out_stride_head);
  const float scale = result.normaliser();
  result.for_each_part(lane, a.op.kv.value_head_dim, [&](int i, int dim) {
    // Adding 0 turns -0 into 0: which zero a masked key leaves behind must not show.
    const float4 o = result.o[i];
    store4(out + dim,
           make_float4(o.x * scale + 0.f, o.y * scale + 0.f, o.z * scale + 0.f, o.w * scale + 0.f));
  });
  if (a.op.lse != nullptr && lane == 0) a.op.lse[row.index(a)] = result.natural_lse();
}

// The state of a row after one of the chunks that CTAs share.
template <int kHeadDim>
__device__ __forceinline__ void store_partial(const AttentionArgs& a, Row row, int chunk,
                                              const RowState<kHeadDim>& state, int lane) {
  const int64_t part = row.index(a) * a.max_chunks + chunk;
  const int head_dim = a.op.kv.value_head_dim;
  state.write(a.partial_out + part * head_dim, a.partial_state + part, lane, head_dim);
}

// A row's partial states, folded in chunk order. The factors of 32 chunks are found side by side, from the
// running maximum before each of them; the chain that is left per chunk is one multiply-add.
template <int kHeadDim>
__device__ __forceinline__ RowState<kHeadDim> fold_chunks(const AttentionArgs& a, int64_t row, int num_chunks,
                                                          int lane) {
  RowState<kHeadDim> sum;
  const float2* states = a.partial_state + row * a.max_chunks;
  const float* outs = a.partial_out + row * a.max_chunks * a.op.kv.value_head_dim;
  for (int first = 0; first < num_chunks; first += kWarpSize) {
    float2 state = make_float2(-INFINITY, 0.f);
    if (first + lane < num_chunks) state = ptx::load_l2(states + first + lane);
    float maximum = state.x;  // of chunks 0 .. first + lane
#pragma unroll
    for (int o = 1; o < kWarpSize; o <<= 1) {
      const float lower = __shfl_up_sync(kAllLanes, maximum, o);
      if (lane >= o) maximum = fmaxf(maximum, lower);
    }
    maximum = fmaxf(maximum, sum.m);
    float before = __shfl_up_sync(kAllLanes, maximum, 1);
    if (lane == 0) before = sum.m;
    const FoldFactors mine = fold_factors(before, state.x, maximum);
    const int count = min(kWarpSize, num_chunks - first);
// Loads in flight: what is folded has come from other multiprocessors, through L2.
#pragma unroll(RowState<kHeadDim>::kFoldedAtOnce)
    for (int c = 0; c < count; c++) {
      const FoldFactors by{__shfl_sync(kAllLanes, mine.kept, c), __shfl_sync(kAllLanes, mine.added, c)};
      sum.l = fold(sum.l, __shfl_sync(kAllLanes, state.y, c), by);
      const float* out = outs + int64_t(first + c) * a.op.kv.value_head_dim;
      sum.for_each_part(lane, a.op.kv.value_head_dim, [&](int i, int dim) {
        sum.o[i] = fold(sum.o[i], ptx::load_l2(reinterpret_cast<const float4*>(out + dim)), by);
      });
    }
    sum.m = __shfl_sync(kAllLanes, maximum, kWarpSize - 1);
  }
  return sum;
}

}  // namespace paged_ops::kernels
