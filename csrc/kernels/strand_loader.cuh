// Brings the tiles of K and V that all warps of a CTA share to one ring in shared memory.
//
// Strand w of a chunk is every kStrands-th of its tiles from the w-th on. The tiles come strand by strand and
// chunk by chunk without a pause. Each warp copies some rows of K and V of each tile, each lane pieces of one
// row. The ring has kStages slots for K and as many for V: while one tile is read, the next kStages - 1 are
// on their way.
#pragma once
#include "kernels/attention_args.h"
#include "kernels/page_table.cuh"
#include "kernels/swizzle.cuh"
#include "kernels/tile_loader.cuh"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// The tile that follows the one that begins at token `tile`; past `end` if none does.
template <int kStrands>
PAGED_OPS_HOST_DEVICE inline int next_tile(int tile, int end) {
  constexpr int kStride = kTileTokens * kStrands;
  static_assert(kChunkTokens % kStride == 0);
  const int chunk = tile & -kChunkTokens, strand = tile & (kStride - 1);
  const int next_strand = strand + kTileTokens < kStride ? chunk + strand + kTileTokens : end;
  const int next = tile + kStride < min(chunk + kChunkTokens, end) ? tile + kStride : next_strand;
  return next < end ? next : chunk + kChunkTokens;
}

// The same, past tiles that have no keys from `first` on.
template <int kStrands>
PAGED_OPS_HOST_DEVICE inline int next_tile(int tile, int first, int end) {
  do tile = next_tile<kStrands>(tile, end);
  while (tile <= first - kTileTokens && tile < end);
  return tile;
}

// kFrom: whether there may be tokens at the begin that nobody sees.
template <class Element, int kHeadDim, int kStages, int kWarps, int kStrands, bool kFrom>
class StrandLoader {
 public:
  static constexpr int kRowNbytes = kHeadDim * int(sizeof(Element));
  using Slot = SwizzledSlot<kRowNbytes>;
  static constexpr int kSlotsNbytes = 2 * kStages * Slot::kNbytes;
  static constexpr int kRingNbytes = kSlotsNbytes + kStages * kScalesNbytes<Element>;

  __device__ __forceinline__ StrandLoader(const AttentionArgs& a, int sequence, int kv_head, int warp,
                                          int lane, unsigned char* ring)
      : kv_(a.op.kv), table_(a, sequence), ring_{ptx::opaque(ptx::smem_addr(ring)), ring} {
    const int piece = lane % kLanesPerRow;
    token_ = warp * kRowsOfWarp + lane / kLanesPerRow % kRowsOfWarp;
    copy_at_ = Slot::at(token_, piece);
    element_ = piece * kElementsPerPiece;
    if constexpr (!kBoth) half_ = lane / (kWarpSize / 2);
    keys_ = static_cast<const char*>(kv_.key.data) + kv_head * kv_.key.stride_head + piece * 16;
    values_ = static_cast<const char*>(kv_.value.data) + kv_head * kv_.value.stride_head + piece * 16;
  }

  // Begins the tokens [begin, end), where `begin` is that of a chunk. Once. Nobody sees those before `first`:
  // they are not read, here and in next(). `kv_head`: again, for it is not kept.
  __device__ __forceinline__ void start(int begin, int first, int end, int kv_head) {
    const bool later = kFrom && begin <= first - kTileTokens;
    token_ += later ? next_tile<kStrands>(begin, first, end) : begin;
    end_ = end;
    ahead_ = look_up(first);
    if constexpr (kScales)
      if (const RowScale scale = scale_of(kv_head); brings_scales() && scale.is_uniform())  // else copied
        for (int s = 0; s < kStages; s++) scales_of(s)[scale_index(token_)] = scale.uniform();
#pragma unroll
    for (int s = 0; s < kStages - 1; s++) refill(s, first, kv_head);
    stage_ = 0;
  }

  // Moves on to the next tile: waits until it is there for all warps, which then have all read the one
  // before, and has that one's slot filled anew.
  __device__ __forceinline__ void next(int first, int kv_head) {
    ptx::cp_wait<kStages - 2>();
    __syncthreads();
    refill(stage_ == 0 ? kStages - 1 : stage_ - 1, first, kv_head);
  }
  __device__ __forceinline__ SharedSlot keys() const { return slot(stage_); }
  __device__ __forceinline__ SharedSlot values() const { return slot(kStages + stage_); }
  __device__ __forceinline__ const float* scales() const { return kScales ? scales_of(stage_) : nullptr; }
  // The tile has been read.
  __device__ __forceinline__ void done() { stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1; }

  __device__ __forceinline__ void drain() const { ptx::cp_wait<0>(); }

 private:
  // A copy covers whole 128-byte lines. One instruction of a warp brings that much of all of its rows; where
  // rows have but half, it brings K's by half of the lanes and V's by the other.
  static constexpr bool kBoth = Slot::kPieces >= 8;  // are every lane's business
  static constexpr bool kScales = kScalesNbytes<Element> > 0;
  static constexpr int kLanesPerRow = kBoth ? 8 : 4, kRowsOfWarp = kTileTokens / kWarps;
  static constexpr int kElementsPerPiece = 16 / int(sizeof(Element));
  static_assert(Slot::proven() && Slot::kPieces % kLanesPerRow == 0);
  static_assert(kRowsOfWarp * kLanesPerRow == (kBoth ? kWarpSize : kWarpSize / 2));

  // One lane brings the scale of its row of K and one that of V.
  __device__ __forceinline__ int side() const { return kBoth ? element_ / kElementsPerPiece : half_; }
  __device__ __forceinline__ bool brings_scales() const { return kBoth ? side() < 2 : element_ == 0; }
  __device__ __forceinline__ RowScale scale_of(int kv_head) const {
    return RowScale(kv_, side() != 0, kv_head);
  }
  __device__ __forceinline__ int scale_index(int token) const {
    return side() * kTileTokens + token % kTileTokens;
  }

  // The lane's row of a tile.
  struct Row {
    PageTable::Place place;
    int token;
  };

  __device__ __forceinline__ Row look_up(int first) {
    const int token = token_, row = token & (kTileTokens - 1);
    if constexpr (kFrom) {
      token_ = next_tile<kStrands>(token - row, first, end_) + row;
      return {table_.find(max(token, first), end_), token};  // in place of what nobody sees, the first
    }
    token_ = next_tile<kStrands>(token - row, end_) + row;
    return {table_.find(token, end_), token};
  }

  // Asks for the next tile, whose block ids were read one tile ago, and those of the one after it are now.
  __device__ __forceinline__ void refill(int stage, int first, int kv_head) {
    copy(ahead_, stage, kv_head);
    ahead_ = look_up(first);
  }

  // Rows past the end and dims past the head are zeros, and not read.
  __device__ __forceinline__ void copy(const Row& row, int stage, int kv_head) {
    if constexpr (kBoth) {
      copy_row(slot(stage), keys_, kv_.key, row, kv_.key_head_dim);
      copy_row(slot(kStages + stage), values_, kv_.value, row, kv_.value_head_dim);
    } else {
      copy_row(slot(half_ * kStages + stage), half_ == 0 ? keys_ : values_, half_ == 0 ? kv_.key : kv_.value,
               row, half_ == 0 ? kv_.key_head_dim : kv_.value_head_dim);
    }
    if constexpr (kScales)
      if (const RowScale scale = scale_of(kv_head); brings_scales() && !scale.is_uniform())
        ptx::cp_async4(ring_.at + kSlotsNbytes + stage * kScalesNbytes<Element> + scale_index(row.token) * 4,
                       scale.at(row.place), row.token < end_);
    ptx::cp_commit();
  }
  __device__ __forceinline__ void copy_row(SharedSlot slot, const char* base, const CacheView& view,
                                           const Row& row, int head_dim) const {
    const char* source =
        base + unsigned(row.place.block) * view.stride_block + unsigned(row.place.slot) * view.stride_token;
#pragma unroll
    for (int c = 0; c < Slot::kPieces; c += kLanesPerRow)
      ptx::cp_async16(slot.at + copy_at_ + c * 16, source + c * 16,
                      row.token < end_ && element_ < head_dim - c * kElementsPerPiece);
  }

  __device__ __forceinline__ float* scales_of(int stage) const {
    return reinterpret_cast<float*>(ring_.bytes + kSlotsNbytes + stage * kScalesNbytes<Element>);
  }
  __device__ __forceinline__ SharedSlot slot(int i) const {
    return {ring_.at + i * Slot::kNbytes, ring_.bytes + i * Slot::kNbytes};
  }

  const PagedKV& kv_;
  PageTable table_;
  SharedSlot ring_;
  int half_ = 0;  // where half of the lanes copy K: 0 for those
  int element_;   // the first of the lane's first piece
  unsigned copy_at_;
  const char* keys_;
  const char* values_;
  Row ahead_{};
  int token_;  // of the lane's row of the tile to be looked up next
  int end_ = 0, stage_ = 0;
};

}  // namespace paged_ops::kernels
