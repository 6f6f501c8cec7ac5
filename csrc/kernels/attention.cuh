// Attention over a paged KV cache: the work of a CTA, from rows to rows.
//
// Every byte of K and V is used once per group of query heads, so the kernel is a copy engine with
// arithmetic attached: what counts is how many bytes are in flight, and that the arithmetic never holds the
// copies up. A CTA serves a tile of columns (column_map.cuh) of one KV head, chunk by chunk of its keys. How
// its warps share a chunk is the walk's business: split_keys.cuh, split_columns.cuh. Chunks are folded in
// order (online_softmax.cuh): by the CTA itself where it has all chunks of its rows, else by the last of
// those that share them (work_line.cuh).
//
// What differs between element types is the arithmetic on a tile: attention_mma.cuh, attention_fma.cuh.
#pragma once
#include "kernels/attention_rows.cuh"
#include "kernels/attention_work.cuh"
#include "kernels/work_line.cuh"

namespace paged_ops::kernels {

// Grid: parallel, multiprocessors x CTAs that each holds; else KV heads x slots of column tiles.
template <class Walk>
__global__ void __launch_bounds__(Walk::kWarps* kWarpSize, Walk::kMinCtas)
    attention_kernel(const AttentionArgs a) {
  constexpr int kColumns = Walk::kColumns;
  using Sight = typename Walk::Sight;
  SIMT_DYNAMIC_SHARED(raw);
  const typename Walk::Shared shared{raw};
  const int warp = warp_index(), num_kv_heads = a.op.kv.num_kv_heads;
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
    slot = WarpSearch{lane_index()}(a.num_slots, begin, [&](int s) { return a.line[s]; });
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
    const int lane = lane_index();
    const ColumnTile columns = column_tile(a, slot, kColumns, WarpSearch{lane});
    if (columns.num_columns == 0) return;
    const int first_seen = Sight::first_seen(a, columns),
              seen_by_any = columns.visible(a, columns.num_columns - 1);
    const int keys = seen_by_any - chunks_origin(first_seen);
    const int all_chunks = num_chunks(keys);
    const int cost = place_cost(keys);
    for (; begin - place >= cost; kv_head++)
      place += cost;  // where this CTA's part begins: once, no division
    const int first_chunk = chunks_before(place, all_chunks, begin),
              end_chunk = chunks_before(place, all_chunks, end);
    if (threadIdx.x == 0)
      work = Work{columns,     Sight::seen_by_all(a, columns),
                  seen_by_any, Sight::first_seen_by_all(a, columns),
                  first_seen,  slot,
                  kv_head,     all_chunks,
                  first_chunk, end_chunk,
                  false,       place + cost,
                  end};
    if (first_chunk < end_chunk) {
      Sight::fill(a, columns, kv_head, shared.sight());
      Walk::run(a, shared, columns, kv_head, first_chunk, end_chunk, first_seen, seen_by_any, warp, lane);

      // ---- the last CTA of these rows folds the chunks ----
      if (work.end == INT64_MAX) return;  // not a.parallel, which would take a register across the main loop
      if (work.shared()) {
        __threadfence();  // partial states before the count
        __syncthreads();
        if (threadIdx.x == 0) {
          int* finished = a.finished + int64_t(work.slot) * num_kv_heads + work.kv_head;
          work.last = atomicAdd(finished, work.mine()) + work.mine() == work.num_chunks;
        }
        __syncthreads();
        if (work.last) {
          __threadfence();                // the count before the others' partial states
          const int lane = lane_index();  // asked anew: a register less across the main loop
          for (int c = warp_index(); c < work.columns.num_columns; c += Walk::kWarps) {
            const Row row = row_of(a, work.columns, work.kv_head, c);
            store_result<typename Walk::Element>(
                a, work.columns, row, fold_chunks<Walk::kHeadDim>(a, row.index(a), work.num_chunks, lane),
                lane);
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
