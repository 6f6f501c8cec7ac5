// The walk of a CTA whose warps share the columns and split the keys: for few columns, so that memory is
// the limit.
//
// The warps are independent: each owns every kWarps-th tile of 16 tokens, copies it to its own ring
// (tile_loader.cuh) and keeps its own state; the main loop has no CTA barrier. At the end of a chunk the
// warps' states are folded in warp order.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kernels/attention_rows.cuh"
#include "kernels/attention_work.cuh"
#include "kernels/sight.cuh"
#include "kernels/tile_loader.cuh"

namespace paged_ops::kernels {

// Tile: the arithmetic (attention_mma.cuh, attention_fma.cuh).
template <class Tile, RowCopy kCopy, Rules kRules>
class SplitKeys {
 public:
  using Element = typename Tile::Element;
  static constexpr int kHeadDim = Tile::kHeadDim, kColumns = Tile::kColumns, kWarps = Tile::kWarps;
  // CTAs per multiprocessor that registers must allow. Copies by elements need more, and are slow anyway.
  static constexpr int kMinCtas = kCopy == RowCopy::asynchronous ? Tile::kMinCtas : Tile::kMinCtas - 1;

 private:
  using Loader = TileLoader<typename Tile::InShared, kHeadDim, Tile::kStages, kWarps, kCopy>;
  static_assert(Loader::Slot::proven() && kChunkTokens % (kTileTokens * kWarps) == 0);
  // The warps' states lie in place of the rings, between chunks.
  static constexpr int kStatesNbytes =
      AttentionShared<kColumns, kHeadDim, 0, PlainSight<kColumns, kColumns>>::kStatesNbytes;
  static constexpr int kScratch = kWarps * std::max(Loader::kRingNbytes, kStatesNbytes);

 public:
  using Sight = SightFor<kRules, kColumns, kWarps, kColumns>;
  using Shared = AttentionShared<kColumns, kHeadDim, kScratch + Tile::kScratchNbytes, Sight>;
  // Bytes on their way: all while the warps wait, less what they use while they compute.
  static constexpr int kRingsNbytes = kWarps * Loader::kRingNbytes,
                       kInUseNbytes = kWarps * Loader::Slot::kNbytes;

  // The chunks [first_chunk, end_chunk) of the rows of `columns`, which see keys of [first, end). From the
  // barrier in here on, shared.work() says all that too, and shared.sight() what each column sees.
  static __device__ __forceinline__ void run(const AttentionArgs& a, const Shared& shared,
                                             const ColumnTile& columns, int kv_head, int first_chunk,
                                             int /*end_chunk*/, int first, int end, int warp, int lane) {
    Work& work = shared.work();
    Loader loader(a, columns.sequence, kv_head, warp, lane, shared.base);
    const auto start = [&](int chunk, int first, int end) {
      const int begin = chunks_origin(first) + chunk * kChunkTokens;
      loader.start(first_tile_of(begin, first, warp), first, min(begin + kChunkTokens, end));
    };
    start(first_chunk, first, end);
    Tile tile(warp, lane, shared.base + kScratch);
    tile.load_query(a, columns, kv_head, shared.base + kScratch);
    __syncthreads();

    const Sight sight(a, shared.sight(), warp, lane);
    for (int chunk = first_chunk;;) {
      // ---- this warp's tiles of the chunk ----
      tile.reset();
      loader.wait();  // K of the first tile
      int stage = 0;
      const auto step = [&](int token, auto edge) {
        const int refill = token + Tile::kStages * Loader::kStride;
        tile.score(loader.key_slot(stage), loader.scales(stage));
        if constexpr (edge.value) sight.look(token);
        __syncwarp();  // every lane has read K: its slot is free
        loader.advance(refill);
        loader.copy_keys(refill, stage);
        tile.template update_softmax<edge.value>(sight, token);
        loader.wait();  // V
        if (edge.value && (Sight::kRuled || work.seen_by_all < loader.end()))
          tile.accumulate_edge(loader.value_slot(stage), sight, token);
        else
          tile.accumulate(loader.value_slot(stage));  // rows that nobody sees are zeros
        __syncwarp();                                 // every lane has read V
        loader.copy_values(refill, stage);
        loader.wait();  // K of the next tile
        stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
      };
      // Most tiles are seen by all columns to the last row. The mask costs them nothing, not even its code.
      const int first = Sight::kRuled ? work.first_seen_by_any : 0;
      int token = first_tile_of(chunks_origin(first) + chunk * kChunkTokens, first, warp);
      if constexpr (Sight::kRuled)
        for (; token < min(work.first_seen_by_all, loader.end()); token += Loader::kStride)
          step(token, std::true_type());
      for (const int full = min(work.seen_by_all, loader.end()) - kTileTokens; token <= full;
           token += Loader::kStride)
        step(token, std::false_type());
      for (; token < loader.end(); token += Loader::kStride) step(token, std::true_type());
      loader.drain();

      // ---- the rows' states ----
      __syncthreads();  // the rings are free
      tile.write_state(shared.out(warp * kStatesNbytes), Shared::kRow, shared.state(warp * kStatesNbytes));
      __syncthreads();
      finish_chunk(a, shared, chunk, warp, lane);
      if (++chunk == work.end_chunk) break;
      __syncthreads();  // the states have been read: the rings may be filled again
      start(chunk, work.first_seen_by_any, work.seen_by_any);
    }
  }

 private:
  static __device__ __forceinline__ int first_tile_of(int begin, int first, int warp) {
    return Sight::kRuled ? first_tile(begin, warp, Loader::kStride, first) : begin + warp * kTileTokens;
  }

  // The state of a column after a chunk: its warps' states, folded in warp order.
  static __device__ __forceinline__ RowState<kHeadDim> fold_warps(const Shared& shared, int column,
                                                                  int lane) {
    RowState<kHeadDim> sum, state;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const int at = w * kStatesNbytes;
      state.read(shared.out(at, column), *shared.state(at, column), lane, kHeadDim);
      sum.fold_in(state);
    }
    return sum;
  }

  // The rows' states after chunk `chunk`, which lie in shared memory warp by warp: to the workspace where
  // CTAs share the chunks, else folded into what earlier chunks gave. A row is one warp's business
  // throughout.
  static __device__ __forceinline__ void finish_chunk(const AttentionArgs& a, const Shared& shared, int chunk,
                                                      int warp, int lane) {
    const Work& work = shared.work();
    for (int c = warp; c < work.columns.num_columns; c += kWarps) {
      const RowState<kHeadDim> state = fold_warps(shared, c, lane);
      const Row row = row_of(a, work.columns, work.kv_head, c);
      if (work.shared()) {
        store_partial(a, row, chunk, state, lane);
        continue;
      }
      RowState<kHeadDim> sum;
      float* out = shared.out(Shared::kRunning, c);
      float2* running = shared.state(Shared::kRunning, c);
      if (chunk > 0) {
        sum.read(out, *running, lane, kHeadDim);
        __syncwarp();  // all lanes have read (m, l), which lane 0 may overwrite
      }
      sum.fold_in(state);
      if (chunk + 1 < work.num_chunks)
        sum.write(out, running, lane, kHeadDim);
      else
        store_result<Element>(a, work.columns, row, sum, lane);
    }
  }
};

}  // namespace paged_ops::kernels
