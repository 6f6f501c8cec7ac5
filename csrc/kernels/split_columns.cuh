// The walk of a CTA whose warps share the keys and split the columns: for many columns, where L2 would be the
// limit if each 16 of them brought the keys anew.
//
// Each warp has 16 columns and meets all tiles, which the warps bring together (strand_loader.cuh). It walks
// a chunk strand by strand, i.e. as each warp of split_keys.cuh would, and folds the strands' states in that
// order: a row has the same bits either way.
#pragma once
#include <type_traits>

#include "kernels/attention_mma.cuh"
#include "kernels/attention_rows.cuh"
#include "kernels/attention_work.cuh"
#include "kernels/strand_loader.cuh"

namespace paged_ops::kernels {

// Two states per column must fit in the registers, and a third in shared memory: no head dim of 256.
template <int kHeadDim>
struct SplitColumnsShape;
template <>
struct SplitColumnsShape<64> {
  static constexpr int kStages = 6, kMinCtas = 3;
};
template <>
struct SplitColumnsShape<128> {
  static constexpr int kStages = 5, kMinCtas = 2;
};

// Tile: MmaTile with 16 columns.
template <class Tile, Rules kRules>
class SplitColumns {
 public:
  using Element = typename Tile::Element;
  using Shape = SplitColumnsShape<Tile::kHeadDim>;
  static constexpr int kHeadDim = Tile::kHeadDim, kWarps = 4, kColumns = kWarps * Tile::kColumns;
  static constexpr int kMinCtas = Shape::kMinCtas;

 private:
  static constexpr int kStrands = Tile::kWarps;  // into which split_keys.cuh cuts a chunk
  using Loader = StrandLoader<typename Tile::InShared, kHeadDim, Shape::kStages, kWarps, kStrands,
                              kRules == Rules::some>;
  static_assert(Tile::kQueryInRegisters);
  // Of the sum of a chunk's strands, m and l lie behind the ring: registers less across the main loop.
  static constexpr int kWeights = Loader::kRingNbytes, kWeightsNbytes = kColumns * int(sizeof(float2));

 public:
  using Sight = SightFor<kRules, kColumns, kWarps, Tile::kColumns>;
  using Shared = AttentionShared<kColumns, kHeadDim, kWeights + kWeightsNbytes, Sight>;
  // Bytes on their way: all while the warps wait, less what they use while they compute.
  static constexpr int kRingsNbytes = Loader::kRingNbytes, kInUseNbytes = 2 * Loader::Slot::kNbytes;

  // The chunks [first_chunk, end_chunk) of the rows of `columns`, which see keys of [first, end). From the
  // barrier in here on, shared.work() says all that too, and shared.sight() what each column sees.
  static __device__ __forceinline__ void run(const AttentionArgs& a, const Shared& shared,
                                             const ColumnTile& columns, int kv_head, int first_chunk,
                                             int end_chunk, int first, int end, int warp, int lane) {
    const Work& work = shared.work();
    const int first_column = warp * Tile::kColumns;
    const bool idle = first_column >= columns.num_columns;  // it copies for the others
    Loader loader(a, columns.sequence, kv_head, warp, lane, shared.base);
    const int origin = chunks_origin(first);
    loader.start(origin + first_chunk * kChunkTokens, first, min(origin + end_chunk * kChunkTokens, end),
                 kv_head);
    Tile tile(warp, lane, nullptr);
    tile.load_query(a, columns.part(first_column, Tile::kColumns), kv_head, nullptr);
    __syncthreads();

    float2* weights = reinterpret_cast<float2*>(shared.base + kWeights) + first_column;
    for (int chunk = first_chunk; chunk < work.end_chunk; chunk++) {
      typename Tile::State sum;
      sum.reset();
      sum.write_weights(weights, lane);
      for (int strand = 0; strand < kStrands; strand++) {
        tile.reset();
        const Sight sight(a, shared.sight(), warp, lane);
        const auto seen_from = [&] { return Sight::kRuled ? work.first_seen_by_any : 0; };
        const auto step = [&](int first_token, auto edge) {
          loader.next(seen_from(), work.kv_head);
          if (!idle) {
            tile.score(loader.keys(), loader.scales());
            if constexpr (edge.value && Sight::kRuled) {
              sight.look(first_token);
              __syncwarp();  // all lanes can see what is seen
            }
            tile.template update_softmax<edge.value>(sight, first_token);
            if constexpr (edge.value)
              tile.accumulate_edge(loader.values(), sight, first_token);
            else
              tile.accumulate(loader.values());
          }
          loader.done();
        };
        // Most tiles are seen by all columns to the last row. The mask costs them nothing, not even its code.
        constexpr int kStride = kStrands * kTileTokens;
        const int begin = chunks_origin(seen_from()) + chunk * kChunkTokens, chunk_end = begin + kChunkTokens;
        int token =
            Sight::kRuled ? first_tile(begin, strand, kStride, seen_from()) : begin + strand * kTileTokens;
        if constexpr (Sight::kRuled)
          for (const int full = min(work.first_seen_by_all, min(work.seen_by_any, chunk_end)); token < full;
               token += kStride)
            step(token, std::true_type());
        for (const int full = min(work.seen_by_all, chunk_end) - kTileTokens; token <= full; token += kStride)
          step(token, std::false_type());
        for (const int end = min(work.seen_by_any, chunk_end); token < end; token += kStride)
          step(token, std::true_type());
        __syncwarp();  // what lanes have written is there for all
        sum.read_weights(weights, lane);
        sum.fold_in(tile.state());
        __syncwarp();  // all lanes have read
        sum.write_weights(weights, lane);
      }
      finish_chunk(a, shared, sum, chunk);
    }
    loader.drain();
  }

 private:
  // The states of the warp's columns after chunk `chunk`: to the workspace where CTAs share the chunks, else
  // folded into what earlier chunks gave, which lies in shared memory.
  static __device__ __forceinline__ void finish_chunk(const AttentionArgs& a, const Shared& shared,
                                                      const typename Tile::State& state, int chunk) {
    const Work& work = shared.work();
    // Asked anew: registers less across the main loop.
    const int lane = lane_index(), first_column = warp_index() * Tile::kColumns;
    float* rows = shared.out(Shared::kRunning, first_column);
    float2* states = shared.state(Shared::kRunning, first_column);
    if (work.shared()) {
      state.write(rows, Shared::kRow, states, lane);
    } else {
      typename Tile::State sum;
      if (chunk > 0)
        sum.read(rows, Shared::kRow, states, lane);
      else
        sum.reset();
      sum.fold_in(state);
      __syncwarp();  // all lanes have read (m, l)
      sum.write(rows, Shared::kRow, states, lane);
      if (chunk + 1 < work.num_chunks) return;
    }
    __syncwarp();  // the rows are whole
    const int end = min(work.columns.num_columns - first_column, Tile::kColumns);
    for (int c = 0; c < end; c++) {
      RowState<kHeadDim> result;
      result.read(rows + c * Shared::kRow, states[c], lane, kHeadDim);
      const Row row = row_of(a, work.columns, work.kv_head, first_column + c);
      if (work.shared())
        store_partial(a, row, chunk, result, lane);
      else
        store_result<Element>(a, work.columns, row, result, lane);
    }
  }
};

}  // namespace paged_ops::kernels
