// Attention over a paged KV cache: the walk of a CTA over the keys of its rows.
//
// Every byte of K and V is used once per group of query heads, so the kernel is a copy engine with
// arithmetic attached: what counts is how many bytes are in flight, and that the arithmetic never holds the
// copies up. A CTA serves a tile of columns (column_map.cuh) of one KV head. Its warps are independent: each
// owns every kWarps-th tile of 16 tokens, copies it to its own ring (tile_loader.cuh) and keeps its own
// state; the main loop has no CTA barrier. At the end of a chunk the warps' states are folded in warp order,
// and chunks in chunk order (online_softmax.cuh): by the CTA itself where it has all chunks of its rows, else
// by the last of those that share them (work_line.cuh).
//
// What differs between element types is the arithmetic on a tile: attention_mma.cuh, attention_fma.cuh.
#pragma once
#include <type_traits>

#include "kernels/column_map.cuh"
#include "kernels/online_softmax.cuh"
#include "kernels/tile_loader.cuh"
#include "kernels/work_line.cuh"

namespace paged_ops::kernels {

// What a CTA is doing. It stays in shared memory while the main loop needs the registers.
struct Work {
  ColumnTile columns;
  int seen_by_all, seen_by_any;  // keys that all columns see, and that some does
  int slot, kv_head;
  int num_chunks, first_chunk, end_chunk;  // of these rows; of them this CTA's
  bool last;                               // of the CTAs that share these rows
  int64_t next_place, end;                 // on the line of work

  __device__ __forceinline__ int mine() const { return end_chunk - first_chunk; }
  __device__ __forceinline__ bool shared() const { return mine() < num_chunks; }
};

// Where things lie in a CTA's shared memory.
template <class Tile, RowCopy kCopy>
struct AttentionShared {
  using Loader = TileLoader<typename Tile::Element, Tile::kHeadDim, Tile::kStages, Tile::kWarps, kCopy>;
  static constexpr int kColumns = Tile::kColumns;
  static constexpr int kRow =
      Tile::kHeadDim + 4;  // floats; the 4 keep a warp's writes off each other's banks
  static constexpr int kStatesNbytes = kColumns * (kRow * int(sizeof(float)) + int(sizeof(float2)));
  static constexpr int kRings = Tile::kWarps * Loader::kRingNbytes;
  static constexpr int kWarpStates = Tile::kWarps * kStatesNbytes;  // in place of the rings, between chunks
  static constexpr int kScratch = kRings > kWarpStates ? kRings : kWarpStates;
  static constexpr int kVisible = kScratch + Tile::kScratchNbytes;
  static constexpr int kWork = kVisible + kColumns * int(sizeof(int));
  static constexpr int kRunning = (kWork + int(sizeof(Work)) + 15) / 16 * 16;  // what chunks are folded into
  static constexpr int kNbytes = kRunning + kStatesNbytes;

  unsigned char* base;

  // Outputs [kColumns, kRow] and then (m, l) [kColumns] of the states at `offset`.
  __device__ __forceinline__ float* out(int offset, int column = 0) const {
    return reinterpret_cast<float*>(base + offset) + column * kRow;
  }
  __device__ __forceinline__ float2* state(int offset, int column = 0) const {
    return reinterpret_cast<float2*>(out(offset, kColumns)) + column;
  }
  __device__ __forceinline__ int* visible() const { return reinterpret_cast<int*>(base + kVisible); }
  __device__ __forceinline__ Work& work() const { return *reinterpret_cast<Work*>(base + kWork); }
};

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
__device__ __forceinline__ void store_result(const AttentionArgs& a, Row row,
                                             const RowState<kHeadDim>& result, int lane) {
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

// The state of a column after a chunk: its warps' states, folded in warp order.
template <class Tile, class Shared>
__device__ __forceinline__ RowState<Tile::kHeadDim> fold_warps(const Shared& shared, int column, int lane) {
  RowState<Tile::kHeadDim> sum, state;
#pragma unroll
  for (int w = 0; w < Tile::kWarps; w++) {
    const int at = w * Shared::kStatesNbytes;
    state.read(shared.out(at, column), *shared.state(at, column), lane, Tile::kHeadDim);
    sum.fold_in(state);
  }
  return sum;
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
#pragma unroll 16  // loads in flight: what is folded has come from other multiprocessors, through L2
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

// The rows' states after chunk `chunk`, which lie in shared memory warp by warp: to the workspace where CTAs
// share the chunks, else folded into what earlier chunks gave. A row is one warp's business throughout.
template <class Tile, class Shared>
__device__ __forceinline__ void finish_chunk(const AttentionArgs& a, const Shared& shared, int chunk,
                                             int warp, int lane) {
  const Work& work = shared.work();
  for (int c = warp; c < work.columns.num_columns; c += Tile::kWarps) {
    const RowState<Tile::kHeadDim> state = fold_warps<Tile>(shared, c, lane);
    const Row row = row_of(a, work.columns, work.kv_head, c);
    if (work.shared()) {
      const int64_t part = row.index(a) * a.max_chunks + chunk;
      const int head_dim = a.op.kv.value_head_dim;
      state.write(a.partial_out + part * head_dim, a.partial_state + part, lane, head_dim);
      continue;
    }
    RowState<Tile::kHeadDim> sum;
    float* out = shared.out(Shared::kRunning, c);
    float2* running = shared.state(Shared::kRunning, c);
    if (chunk > 0) {
      sum.read(out, *running, lane, Tile::kHeadDim);
      __syncwarp();  // all lanes have read (m, l), which lane 0 may overwrite
    }
    sum.fold_in(state);
    if (chunk + 1 < work.num_chunks)
      sum.write(out, running, lane, Tile::kHeadDim);
    else
      store_result<typename Tile::Element>(a, row, sum, lane);
  }
}

// CTAs per multiprocessor that registers must allow. Copies by elements need more, and are slow anyway.
template <class Tile, RowCopy kCopy>
constexpr int kMinCtas = kCopy == RowCopy::asynchronous ? Tile::kMinCtas : Tile::kMinCtas - 1;

// Grid: parallel, multiprocessors x CTAs that each holds; else KV heads x slots of column tiles.
template <class Tile, RowCopy kCopy>
__global__ void __launch_bounds__(Tile::kWarps* kWarpSize, kMinCtas<Tile, kCopy>)
    attention_kernel(const AttentionArgs a) {
  using Shared = AttentionShared<Tile, kCopy>;
  using Loader = typename Shared::Loader;
  constexpr int kColumns = Tile::kColumns;
  static_assert(Loader::Slot::proven() && kChunkTokens % (kTileTokens * Tile::kWarps) == 0);
  SIMT_DYNAMIC_SHARED(raw);
  const Shared shared{raw};
  const int lane = ptx::opaque(int(threadIdx.x) % kWarpSize), warp = warp_index();
  const int num_kv_heads = a.op.kv.num_kv_heads;
  Work& work = shared.work();

  int slot, kv_head;
  int64_t place = 0, begin = 0, end = INT64_MAX;  // on the line of work
  if (a.parallel) {
    // Neighbours on the line go to one multiprocessor: where there is less work than CTAs, to different ones.
    const int part = blockIdx.x * gridDim.y + blockIdx.y;
    const int64_t part_length = a.line[a.num_slots + 1];
    begin = part * part_length;
    end = begin + part_length;
    if (begin >= a.line[a.num_slots]) return;
    slot = WarpSearch{lane}(a.num_slots, begin, [&](int s) { return a.line[s]; });
    kv_head = 0;
    place = a.line[slot];
  } else {
    // The KV heads of one tile are neighbours in the grid, as they are in most caches. The last tokens, which
    // see the most, go first.
    const int from_end = int(gridDim.x - 1 - blockIdx.x);
    kv_head = from_end % num_kv_heads;
    slot = from_end / num_kv_heads;
  }

  for (;;) {
    // ---- which rows, and which of their keys ----
    const ColumnTile columns = column_tile(a, slot, kColumns, WarpSearch{lane});
    if (columns.num_columns == 0) return;
    const int seen_by_all = columns.visible(a, 0), seen_by_any = columns.visible(a, columns.num_columns - 1);
    const int all_chunks = num_chunks(seen_by_any);
    const int cost = place_cost(seen_by_any);
    for (; begin - place >= cost; kv_head++)
      place += cost;  // where this CTA's part begins: once, no division
    const int first_chunk = chunks_before(place, all_chunks, begin),
              end_chunk = chunks_before(place, all_chunks, end);
    if (threadIdx.x == 0)
      work = Work{columns,     seen_by_all, seen_by_any, slot,         kv_head, all_chunks,
                  first_chunk, end_chunk,   false,       place + cost, end};
    if (threadIdx.x < kColumns)
      shared.visible()[threadIdx.x] = columns.visible(a, min(int(threadIdx.x), columns.num_columns - 1));
    if (first_chunk < end_chunk) {
      Loader loader(a, a.op.tables.block_ids + columns.sequence * a.op.tables.stride, kv_head, warp, lane,
                    raw);
      loader.start(first_chunk * kChunkTokens, min((first_chunk + 1) * kChunkTokens, seen_by_any));
      Tile tile(warp, lane, raw + Shared::kScratch);
      tile.load_query(a, columns, kv_head, raw + Shared::kScratch);
      __syncthreads();

      for (int chunk = first_chunk;;) {
        // ---- this warp's tiles of the chunk ----
        tile.reset();
        loader.wait();  // K_0
        int stage = 0;
        const auto step = [&](int i, auto edge) {
          const int first_token = loader.first_token(i);
          tile.score(loader.key_slot(stage));
          __syncwarp();  // every lane has read K_i: its slot is free
          loader.advance();
          loader.copy_keys(i + Tile::kStages, stage);
          tile.template update_softmax<edge.value>(a.scale_log2, first_token, shared.visible());
          loader.wait();  // V_i
          if (edge.value && work.seen_by_all < loader.end())
            tile.accumulate_edge(loader.value_slot(stage), first_token, shared.visible());
          else
            tile.accumulate(loader.value_slot(stage));  // rows that nobody sees are zeros
          __syncwarp();                                 // every lane has read V_i
          loader.copy_values(i + Tile::kStages, stage);
          loader.wait();  // K_{i+1}
          stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
        };
        // Most tiles are seen by all columns to the last row. The mask costs them nothing, not even its code.
        int i = 0;
        for (const int num_full = loader.tiles_within(work.seen_by_all); i < num_full; i++)
          step(i, std::false_type());
        for (; i < loader.num_tiles(); i++) step(i, std::true_type());
        loader.drain();

        // ---- the rows' states ----
        __syncthreads();  // the rings are free
        tile.write_state(shared.out(warp * Shared::kStatesNbytes), Shared::kRow,
                         shared.state(warp * Shared::kStatesNbytes));
        __syncthreads();
        finish_chunk<Tile>(a, shared, chunk, warp, lane);
        if (++chunk == work.end_chunk) break;
        __syncthreads();  // the states have been read: the rings may be filled again
        loader.start(chunk * kChunkTokens, min((chunk + 1) * kChunkTokens, work.seen_by_any));
      }

      // ---- the last CTA of these rows folds the chunks ----
      if (!a.parallel) return;
      if (work.shared()) {
        __threadfence();  // partial states before the count
        __syncthreads();
        if (threadIdx.x == 0) {
          int* finished = a.finished + int64_t(work.slot) * num_kv_heads + work.kv_head;
          work.last = atomicAdd(finished, work.mine()) + work.mine() == work.num_chunks;
        }
        __syncthreads();
        if (work.last) {
          __threadfence();  // the count before the others' partial states
          // Asked anew: a register less across the main loop.
          for (int c = warp_index(); c < work.columns.num_columns; c += Tile::kWarps) {
            const Row row = row_of(a, work.columns, work.kv_head, c);
            store_result<typename Tile::Element>(
                a, row, fold_chunks<Tile::kHeadDim>(a, row.index(a), work.num_chunks, lane), lane);
          }
        }
      }
    }

    // ---- on to the next rows of this CTA's part ----
    __syncthreads();  // the rings are free
    place = begin = work.next_place;
    end = work.end;
    if (place >= min(end, a.line[a.num_slots])) return;
    slot = work.slot;
    kv_head = work.kv_head + 1;
    if (kv_head == num_kv_heads) {
      kv_head = 0;
      do slot++;  // past those without rows
      while (a.line[slot + 1] == place);
    }
    __syncthreads();  // all have read what the next rows overwrite
  }
}

}  // namespace paged_ops::kernels
