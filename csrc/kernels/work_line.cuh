// How the chunks of a batch are dealt to a fixed number of CTAs, with lengths that only the device knows.
//
// Lay all work on a line: the slots of column tiles in order, the KV heads of each, their chunks, each as
// long as it costs. CTA i of n does the chunks that begin in the i-th of n equal parts of the line. So no CTA
// is without work while others have much, a long sequence spreads over many and short ones share one, and the
// host needs no length. A row's bits do not change: which CTA does a chunk has no say in them.
#pragma once
#include "kernels/attention_args.h"

namespace paged_ops::kernels {

constexpr int kTilesPerChunk = kChunkTokens / kTileTokens;
// Costs are in tiles. Filling the ring and folding the warps' states take a chunk about as long as so many.
constexpr int kChunkOverhead = 4;
constexpr int kChunkCost = kTilesPerChunk + kChunkOverhead;

// Rows that see nothing have one chunk too, an empty one: it writes them.
PAGED_OPS_HOST_DEVICE inline int num_chunks(int keys) {
  return keys > kChunkTokens ? (keys + kChunkTokens - 1) / kChunkTokens : 1;
}

// Of the chunks of one place, i.e. of one tile of columns and one KV head.
PAGED_OPS_HOST_DEVICE inline int place_cost(int keys) {
  return (keys + kTileTokens - 1) / kTileTokens + num_chunks(keys) * kChunkOverhead;
}

// Of each of n parts: the i-th begins at i times that. A rounded quotient may leave the last ones empty.
PAGED_OPS_HOST_DEVICE inline int64_t part_length(int64_t length, int n) { return (length + n - 1) / n; }

// How many chunks of a place begin before `end`, when the place begins at `begin`. All but the last are
// whole, so that chunk c begins at c times the same cost.
PAGED_OPS_HOST_DEVICE inline int chunks_before(int64_t begin, int num_chunks, int64_t end) {
  if (end <= begin) return 0;
  if (end - begin > int64_t(num_chunks - 1) * kChunkCost) return num_chunks;
  return (int(end - begin) + kChunkCost - 1) / kChunkCost;
}

}  // namespace paged_ops::kernels
