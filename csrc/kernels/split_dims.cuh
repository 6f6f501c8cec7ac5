// The walk of a CTA whose warps share the keys and the columns and split the head dims: for heads so wide
// that one warp's registers do not hold an output, nor one ring per warp fits in shared memory.
//
// Tile after tile comes to one ring (ring_loader.cuh). Each warp multiplies its share of the dims, all add up
// each other's parts of the scores, and each sums its own dims of the values (share_mma.cuh, share_fma.cuh).
// Where V is the first dims of K, K in the ring is what both products read.
#pragma once
#include <type_traits>

#include "kernels/attention_rows.cuh"
#include "kernels/attention_work.cuh"
#include "kernels/ring_loader.cuh"
#include "kernels/sight.cuh"

namespace paged_ops::kernels {

// Share: the arithmetic.
template <class Share, RowCopy kCopy, Rules kRules>
class SplitDims {
 public:
  using Element = typename Share::Element;
  static constexpr int kHeadDim = Share::kHeadDim, kColumns = Share::kColumns, kWarps = 4, kMinCtas = 2;

 private:
  using Loader = RingLoader<typename Share::InShared, kHeadDim, Share::kSlots, kWarps, kCopy>;
  using State = typename Share::State;
  static constexpr int kScratch = Loader::kRingNbytes;

 public:
  using Sight = SightFor<kRules, kColumns, kWarps, kColumns>;
  // The running states are in registers; rows on their way out lie in place of the ring.
  struct Shared : AttentionShared<kColumns, kHeadDim, kScratch + Share::kScratchNbytes, Sight> {
    static constexpr int kNbytes = Shared::kRunning;
  };
  static_assert(Shared::kNbytes <= 99 << 10 && Shared::kStatesNbytes <= Loader::kRingNbytes);
  // Bytes on their way: all but one piece while the warps wait, and while they compute.
  static constexpr int kRingsNbytes = Loader::kRingNbytes, kInUseNbytes = Loader::Slot::kNbytes;

  // The chunks [first_chunk, end_chunk) of the rows of `columns`, which see keys of [first, end). From the
  // barrier in here on, shared.work() says all that too, and shared.sight() what each column sees.
  static __device__ __forceinline__ void run(const AttentionArgs& a, const Shared& shared,
                                             const ColumnTile& columns, int kv_head, int first_chunk,
                                             int end_chunk, int first, int end, int warp, int lane) {
    const Work& work = shared.work();
    Loader loader(a, columns.sequence, kv_head, warp, lane, shared.base);
    const int origin = chunks_origin(first);
    int token = max(origin + first_chunk * kChunkTokens, first & -kTileTokens);
    loader.start(token, first, min(origin + end_chunk * kChunkTokens, end));
    Share share(warp, lane, shared.base + kScratch);
    Share::load_query(a, columns, kv_head, shared.base + kScratch);
    __syncthreads();

    const Sight sight(a, shared.sight(), warp, lane);
    const auto step = [&](auto edge) {
      loader.next();
      share.score(loader.piece());
      if constexpr (edge.value) sight.look(token);
      if (loader.apart())
        loader.next();
      else
        __syncthreads();
      share.add_scores();
      share.template update_softmax<edge.value>(sight, token);
      if constexpr (edge.value)
        share.accumulate_edge(loader.piece(), sight, token);
      else
        share.accumulate(loader.piece());
    };
    State sum;
    sum.reset();
    for (int chunk = first_chunk; chunk < work.end_chunk; chunk++) {
      share.reset();
      const int chunk_end = chunks_origin(work.first_seen_by_any) + (chunk + 1) * kChunkTokens;
      // Most tiles are seen by all columns to the last row. The mask costs them nothing, not even its code.
      const int end = min(work.seen_by_any, chunk_end), full = min(work.seen_by_all, end) - kTileTokens;
      while (token < end) {
        if (token >= work.first_seen_by_all)
          for (; token <= full; token += kTileTokens) step(std::false_type());
        if (token < end) {
          step(std::true_type());
          token += kTileTokens;
        }
      }
      if (work.shared())
        write_partial(a, work, share.state(), chunk);
      else
        sum.fold_in(share.state());
    }
    loader.drain();
    if (!work.shared()) write_result(a, shared, sum);
  }

 private:
  // The states of the CTA's columns after one of the chunks that CTAs share, from where they are.
  static __device__ __forceinline__ void write_partial(const AttentionArgs& a, const Work& work,
                                                       const State& state, int chunk) {
    const int warp = warp_index(), lane = lane_index();
    const auto part_of = [&](int column) {
      return row_of(a, work.columns, work.kv_head, column).index(a) * a.max_chunks + chunk;
    };
    const int head_dim = a.op.kv.value_head_dim, num_columns = work.columns.num_columns;
    state.write(warp, lane, head_dim, [&](int column) {
      return column < num_columns ? a.partial_out + part_of(column) * head_dim : nullptr;
    });
    if (warp == 0)
      state.for_each_weight(lane, [&](int column, float2 weights) {
        if (column < num_columns) a.partial_state[part_of(column)] = weights;
      });
  }

  // Rows are one warp's business from here on: they change hands in place of the ring.
  static __device__ __forceinline__ void write_result(const AttentionArgs& a, const Shared& shared,
                                                      const State& state) {
    const Work& work = shared.work();
    const int warp = warp_index(), lane = lane_index();
    __syncthreads();  // all have read the last tile, and nothing is on its way
    state.write(warp, lane, kHeadDim, [&](int column) { return shared.out(0, column); });
    if (warp == 0)
      state.for_each_weight(lane, [&](int column, float2 weights) { *shared.state(0, column) = weights; });
    __syncthreads();
    for (int c = warp; c < work.columns.num_columns; c += kWarps) {
      RowState<kHeadDim> result;
      result.read(shared.out(0, c), *shared.state(0, c), lane, kHeadDim);
      store_result<Element>(a, work.columns, row_of(a, work.columns, work.kv_head, c), result, lane);
    }
  }
};

}  // namespace paged_ops::kernels
