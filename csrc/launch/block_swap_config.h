// Which copies a swap of blocks comes down to: a pure function of its parameters.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "params/block_copy.h"

namespace paged_ops::launch {

// `height` rows of `width` bytes; offsets are in bytes from the pools' addresses.
struct CopyPiece {
  int64_t source, destination;
  int64_t width, height;
  int64_t source_pitch, destination_pitch;
};

// Neighbouring blocks that move to neighbouring places go together, and whatever lies together on both
// sides becomes one run: a dense pool moves in as few pieces as its ids allow.
inline std::vector<CopyPiece> plan_block_swap(const BlockSwapParams& p) {
  struct Dim {
    int64_t count, source_stride, destination_stride;
  };
  constexpr int64_t kMaxPitch = INT32_MAX;  // of CUDA's two-dimensional copies
  std::vector<CopyPiece> pieces;
  for (int64_t pair = 0; pair < p.num_pairs;) {
    const int64_t source = p.block_pairs[2 * pair], destination = p.block_pairs[2 * pair + 1];
    int64_t together = 1;
    while (pair + together < p.num_pairs && p.block_pairs[2 * (pair + together)] == source + together &&
           p.block_pairs[2 * (pair + together) + 1] == destination + together)
      together++;
    pair += together;

    int64_t width = p.source_block.run_nbytes;
    std::vector<Dim> dims;
    for (int i = 0; i < 2; i++)
      dims.push_back(
          {p.source_block.num_runs[i], p.source_block.run_stride[i], p.destination_block.run_stride[i]});
    dims.push_back({together, p.source_block_stride, p.destination_block_stride});
    std::erase_if(dims, [](const Dim& dim) { return dim.count == 1; });
    const auto grows_run = [&](const Dim& dim) {
      return dim.source_stride == width && dim.destination_stride == width;
    };
    for (auto dim = dims.begin(); (dim = std::find_if(dims.begin(), dims.end(), grows_run)) != dims.end();) {
      width *= dim->count;
      dims.erase(dim);
    }

    // One of the dimensions that are left may be the rows of two-dimensional copies; the others are loops.
    const auto can_be_rows = [&](const Dim& dim) {
      return std::min(dim.source_stride, dim.destination_stride) >= width &&
             std::max(dim.source_stride, dim.destination_stride) <= kMaxPitch;
    };
    Dim rows{1, width, width};
    const auto most_rows = std::max_element(dims.begin(), dims.end(), [&](const Dim& a, const Dim& b) {
      return can_be_rows(a) * a.count < can_be_rows(b) * b.count;
    });
    if (most_rows != dims.end() && can_be_rows(*most_rows)) {
      rows = *most_rows;
      dims.erase(most_rows);
    }
    dims.resize(3, Dim{1, 0, 0});
    for (int64_t i = 0; i < dims[0].count; i++)
      for (int64_t j = 0; j < dims[1].count; j++)
        for (int64_t k = 0; k < dims[2].count; k++)
          pieces.push_back({source * p.source_block_stride + i * dims[0].source_stride +
                                j * dims[1].source_stride + k * dims[2].source_stride,
                            destination * p.destination_block_stride + i * dims[0].destination_stride +
                                j * dims[1].destination_stride + k * dims[2].destination_stride,
                            width, rows.count, rows.source_stride, rows.destination_stride});
  }
  return pieces;
}

}  // namespace paged_ops::launch
