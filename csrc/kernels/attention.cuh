// Attention over a paged KV cache: the walk of a CTA over the keys of its rows.
//
// Every byte of K and V is used once per group of query heads, so the kernel is a copy engine with arithmetic
// attached: what counts is how many bytes are in flight, and that the arithmetic never holds the copies up. A
// CTA serves a tile of columns (column_map.cuh) of one KV head. Its warps are independent: each owns every
// kWarps-th tile of 16 tokens, copies it to its own ring (tile_loader.cuh) and keeps its own state; the main
// loop has no CTA barrier. At the end of a chunk the warps' states are folded in warp order, and chunks in
// chunk order (online_softmax.cuh), in one CTA or by the last of several.
//
// What differs between element types is the arithmetic on a tile: attention_mma.cuh, attention_fma.cuh.
#pragma once
#include "kernels/column_map.cuh"
#include "kernels/online_softmax.cuh"
#include "kernels/tile_loader.cuh"

namespace paged_ops::kernels {

// Where things lie in a CTA's shared memory.
template <class Tile, RowCopy kCopy>
struct AttentionShared {
  using Loader = TileLoader<typename Tile::Element, Tile::kHeadDim, Tile::kStages, Tile::kWarps, kCopy>;
  static constexpr int kRow =
      Tile::kHeadDim + 4;  // floats; 4 more make a warp's writes free of bank conflicts
  static constexpr int kStateNbytes = Tile::kColumns * (kRow * int(sizeof(float)) + int(sizeof(float2)));
  static constexpr int kRings = Tile::kWarps * Loader::kRingNbytes;
  static constexpr int kStates = Tile::kWarps * kStateNbytes;  // at the end of a chunk, in place of the rings
  static constexpr int kScratch = kRings > kStates ? kRings : kStates;
  static constexpr int kVisible = kScratch + Tile::kScratchNbytes;
  static constexpr int kLast = kVisible + Tile::kColumns * int(sizeof(int));
  static constexpr int kRunning =
      (kLast + int(sizeof(int)) + 15) / 16 * 16;  // the state that chunks are folded into
  static constexpr int nbytes(bool parallel) { return parallel ? kRunning : kRunning + kStateNbytes; }
};

// The states of one tile of columns in shared memory: out [kColumns, kRow], then (m, l) [kColumns].
template <class Shared, int kColumns>
struct StateView {
  float* out;
  float2* state;
  __device__ __forceinline__ explicit StateView(unsigned char* at)
      : out(reinterpret_cast<float*>(at)), state(reinterpret_cast<float2*>(out + kColumns * Shared::kRow)) {}
  __device__ __forceinline__ float4* dims(int column, int dim) const {
    return reinterpret_cast<float4*>(out + column * Shared::kRow + dim);
  }
};

template <class T>
__device__ __forceinline__ void store4(T* to, float4 x);
template <>
__device__ __forceinline__ void store4<float>(float* to, float4 x) {
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<float4*>(to) = x;
  } else {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
}
template <class T>
__device__ __forceinline__ void store4(T* to, float4 x) {
  const uint32_t low = ptx::pack2<T>(x.x, x.y), high = ptx::pack2<T>(x.z, x.w);
  if (reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  } else {
    to[0].bits = uint16_t(low), to[1].bits = uint16_t(low >> 16);
    to[2].bits = uint16_t(high), to[3].bits = uint16_t(high >> 16);
  }
}

template <class T, int kHeadDim>
__device__ __forceinline__ void store_result(const AttentionArgs& a, Row row,
                                             const RowState<kHeadDim>& result, int lane) {
  T* out = reinterpret_cast<T*>(static_cast<char*>(a.op.out) + row.token * a.op.out_stride_token +
                                row.head * a.op.out_stride_head);
  const float inverse = result.normaliser();
#pragma unroll
  for (int i = 0; i < RowState<kHeadDim>::kParts; i++) {
    const int dim = i * 128 + lane * 4;
    const float4 o = result.o[i];
    // Adding 0 turns -0 into 0: which zero a masked key leaves behind must not show.
    if (dim < a.op.kv.value_head_dim)
      store4(out + dim,
             make_float4(o.x * inverse + 0.f, o.y * inverse + 0.f, o.z * inverse + 0.f, o.w * inverse + 0.f));
  }
  if (a.op.lse != nullptr && lane == 0)
    a.op.lse[int64_t(row.token) * a.op.num_q_heads + row.head] = result.natural_lse();
}

// Folds a row's partial states in chunk order. The factors of 32 chunks are found side by side, from the
// running maximum before each of them; the chain that is left per chunk is one multiply-add.
template <int kHeadDim>
__device__ __forceinline__ RowState<kHeadDim> fold_chunks(const AttentionArgs& a, int64_t row, int num_chunks,
                                                          int lane) {
  RowState<kHeadDim> result;
  const float2* states = a.partial_state + row * a.max_chunks;
  const float* outs = a.partial_out + row * a.max_chunks * a.op.kv.value_head_dim;
  for (int first = 0; first < num_chunks; first += kWarpSize) {
    float2 state = make_float2(-INFINITY, 0.f);
    if (first + lane < num_chunks) state = ptx::load_l2(states + first + lane);
    float maximum = state.x;  // of chunks 0 .. first + lane
#pragma unroll
    for (int o = 1; o < kWarpSize; o <<= 1) {
      const float before = __shfl_up_sync(kAllLanes, maximum, o);
      if (lane >= o) maximum = fmaxf(maximum, before);
    }
    maximum = fmaxf(maximum, result.m);
    float before = __shfl_up_sync(kAllLanes, maximum, 1);
    if (lane == 0) before = result.m;
    const FoldFactors mine = fold_factors(before, state.x, maximum);
    const int count = min(kWarpSize, num_chunks - first);
#pragma unroll 8
    for (int c = 0; c < count; c++) {
      const FoldFactors by{__shfl_sync(kAllLanes, mine.kept, c), __shfl_sync(kAllLanes, mine.added, c)};
      result.l = fold(result.l, __shfl_sync(kAllLanes, state.y, c), by);
#pragma unroll
      for (int i = 0; i < RowState<kHeadDim>::kParts; i++) {
        const int dim = i * 128 + lane * 4;
        if (dim < a.op.kv.value_head_dim)
          result.o[i] = fold(result.o[i],
                             ptx::load_l2(reinterpret_cast<const float4*>(
                                 outs + int64_t(first + c) * a.op.kv.value_head_dim + dim)),
                             by);
      }
    }
    result.m = __shfl_sync(kAllLanes, maximum, kWarpSize - 1);
  }
  return result;
}

// CTAs per multiprocessor that registers must allow. Copies by elements need more of them, and are slow
// anyway.
template <class Tile, RowCopy kCopy>
constexpr int kMinCtas =
    kCopy == RowCopy::asynchronous || Tile::kMinCtas == 1 ? Tile::kMinCtas : Tile::kMinCtas - 1;

template <class Tile, RowCopy kCopy>
__global__ void __launch_bounds__(Tile::kWarps* kWarpSize, kMinCtas<Tile, kCopy>)
    attention_kernel(const AttentionArgs a) {
  using T = typename Tile::Element;
  using Shared = AttentionShared<Tile, kCopy>;
  using States = StateView<Shared, Tile::kColumns>;
  using State = RowState<Tile::kHeadDim>;
  constexpr int kWarps = Tile::kWarps, kColumns = Tile::kColumns;
  static_assert(Shared::Loader::Slot::proven() && kChunkTokens % (kTileTokens * kWarps) == 0);
  SIMT_DYNAMIC_SHARED(shared);

  const int lane = ptx::opaque(int(threadIdx.x) % kWarpSize), warp = warp_index();
  const AttentionParams& op = a.op;

  // ---- which rows, and which of their keys ----------------------------------------------------------------
  // KV heads of one place are neighbours in the grid, as they are in most caches. Where a CTA walks all of
  // its keys the last tokens, which see the most, go first.
  const int place = a.parallel ? int(blockIdx.x) : int(gridDim.x - 1 - blockIdx.x);
  const int kv_head = place % op.kv.num_kv_heads;
  const ColumnTile columns = column_tile<kColumns>(a, place / op.kv.num_kv_heads, lane);
  if (columns.num_columns == 0) return;
  const int seen_by_all = columns.visible(a, 0), seen_by_any = columns.visible(a, columns.num_columns - 1);
  const int num_chunks =
      max(1, (seen_by_any + kChunkTokens - 1) / kChunkTokens);  // one, if empty: it writes the rows
  if (int(blockIdx.y) >= num_chunks) return;

  int* visible = reinterpret_cast<int*>(shared + Shared::kVisible);  // [kColumns]
  if (threadIdx.x < kColumns)
    visible[threadIdx.x] = columns.visible(a, min(int(threadIdx.x), columns.num_columns - 1));

  typename Shared::Loader loader(a, op.tables.block_ids + columns.sequence * op.tables.stride, kv_head, warp,
                                 lane, shared);
  Tile tile(warp, lane, shared + Shared::kScratch);
  const auto start = [&](int chunk) {
    loader.start(chunk * kChunkTokens, min((chunk + 1) * kChunkTokens, seen_by_any));
  };
  start(blockIdx.y);
  tile.load_query(a, columns, kv_head);
  __syncthreads();  // `visible`, and what the tile keeps in its scratch

  int chunks_done = 0;
  for (int chunk = blockIdx.y;;) {
    // ---- this warp's tiles of the chunk
    // ---------------------------------------------------------------------
    const int end = min((chunk + 1) * kChunkTokens, seen_by_any);
    tile.reset();
    loader.wait();  // K_0
    int stage = 0;
    for (int i = 0; i < loader.num_tiles(); i++) {
      const int first_token = loader.first_token(i);
      const bool masked = first_token + kTileTokens > seen_by_all;
      tile.score(loader.key_slot(stage));
      __syncwarp();  // every lane has read K_i: its slot is free
      loader.advance();
      loader.copy_keys(i + Tile::kStages, stage);
      tile.update_softmax(a.scale_log2, masked, first_token, visible);
      loader.wait();  // V_i
      if (masked && seen_by_all < end)
        tile.accumulate_masked(loader.value_slot(stage), first_token, visible);
      else
        tile.accumulate(loader.value_slot(stage));  // rows that nobody sees are zeros
      __syncwarp();
      loader.copy_values(i + Tile::kStages, stage);
      loader.wait();  // K_{i+1}
      stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    }
    loader.drain();

    // ---- the chunk's state: the warps' states, folded in warp order ---------------------------------------
    __syncthreads();  // the rings are free
    {
      const States mine(shared + warp * Shared::kStateNbytes);
      tile.write_state(mine.out, Shared::kRow, mine.state);
    }
    __syncthreads();
    const bool to_workspace = a.parallel && num_chunks > 1;
    for (int c = warp; c < columns.num_columns; c += kWarps) {
      const auto add = [&](State& sum, unsigned char* at) {
        const States states(at);
        float4 o[State::kParts];
#pragma unroll
        for (int i = 0; i < State::kParts; i++) {
          const int dim = i * 128 + lane * 4;
          o[i] = dim < Tile::kHeadDim ? *states.dims(c, dim) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        sum.fold_in(states.state[c].x, states.state[c].y, o);
      };
      State state;
#pragma unroll
      for (int w = 0; w < kWarps; w++) add(state, shared + w * Shared::kStateNbytes);
      const Row row = row_of(a, columns, kv_head, c);
      if (to_workspace) {
        const int64_t part = (int64_t(row.token) * op.num_q_heads + row.head) * a.max_chunks + chunk;
#pragma unroll
        for (int i = 0; i < State::kParts; i++) {
          const int dim = i * 128 + lane * 4;
          if (dim < op.kv.value_head_dim)
            *reinterpret_cast<float4*>(a.partial_out + part * op.kv.value_head_dim + dim) = state.o[i];
        }
        if (lane == 0) a.partial_state[part] = make_float2(state.m, state.l);
        continue;
      }
      // Walking: the state so far is this warp's own business, row by row.
      State running;
      const States so_far(shared + Shared::kRunning);
      if (chunk > 0) {
        add(running, shared + Shared::kRunning);
        __syncwarp();
      }
      running.fold_in(state.m, state.l, state.o);
      if (chunk + 1 == num_chunks) {
        store_result<T>(a, row, running, lane);
      } else {
#pragma unroll
        for (int i = 0; i < State::kParts; i++) {
          const int dim = i * 128 + lane * 4;
          if (dim < Tile::kHeadDim) *so_far.dims(c, dim) = running.o[i];
        }
        if (lane == 0) so_far.state[c] = make_float2(running.m, running.l);
      }
    }
    chunks_done++;
    chunk += gridDim.y;
    if (chunk >= num_chunks) break;
    __syncthreads();  // the states have been read: the rings may be filled again
    start(chunk);
  }
  if (!a.parallel || num_chunks == 1) return;

  // ---- the last CTA of these rows folds the chunks
  // ------------------------------------------------------------
  int* last = reinterpret_cast<int*>(shared + Shared::kLast);
  __threadfence();  // partial states before the count
  __syncthreads();
  if (threadIdx.x == 0) *last = atomicAdd(a.finished + place, chunks_done) + chunks_done == num_chunks;
  __syncthreads();
  if (!*last) return;
  __threadfence();  // the count before the others' partial states
  for (int c = warp; c < columns.num_columns; c += kWarps) {
    const Row row = row_of(a, columns, kv_head, c);
    store_result<T>(
        a, row,
        fold_chunks<Tile::kHeadDim>(a, int64_t(row.token) * op.num_q_heads + row.head, num_chunks, lane),
        lane);
  }
}

}  // namespace paged_ops::kernels
