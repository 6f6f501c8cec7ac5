// Brings the tiles of K and V that all warps of a CTA share, one after the other, to a ring in shared memory.
//
// What comes are pieces: K and V of a tile in turn; or K alone, where its rows begin with those of V (latent
// attention, where no byte comes twice). The ring has kSlots slots. While one piece is read, kSlots - 1 are
// on their way: what frees a slot is the barrier with which all warps go on to the next piece. Each warp
// copies some rows of each piece, each lane parts of one row.
#pragma once
#include "kernels/attention_args.h"
#include "kernels/element_copy.cuh"
#include "kernels/page_table.cuh"
#include "kernels/row_scale.cuh"
#include "kernels/swizzle.cuh"
#include "kernels/tile_loader.cuh"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// Whether the rows of V are the first dims of those of K, in the same memory.
PAGED_OPS_HOST_DEVICE inline bool values_in_keys(const PagedKV& kv) {
  const CacheView &k = kv.key, &v = kv.value;
  return k.data == v.data && k.stride_block == v.stride_block && k.stride_token == v.stride_token &&
         k.pack == v.pack && k.stride_pack == v.stride_pack &&
         (k.stride_head == v.stride_head || kv.num_kv_heads == 1) && kv.value_head_dim <= kv.key_head_dim;
}

template <class Element, int kHeadDim, int kSlots, int kWarps, RowCopy kCopy>
class RingLoader {
 public:
  using Slot = SwizzledSlot<kHeadDim* int(sizeof(Element))>;
  static constexpr int kRingNbytes = kSlots * Slot::kNbytes;

  __device__ __forceinline__ RingLoader(const AttentionArgs& a, int sequence, int kv_head, int warp, int lane,
                                        unsigned char* ring)
      : kv_(a.op.kv),
        table_(a, sequence),
        ring_{ptx::opaque(ptx::smem_addr(ring)), ring},
        apart_(kConverts || !values_in_keys(a.op.kv)),  // each with its own scales
        kv_head_(kv_head) {
    const int piece = lane % kLanesPerRow;
    row_ = warp * kRowsOfWarp + lane / kLanesPerRow;
    copy_at_ = Slot::at(row_, piece);
    element_ = piece * kElementsPerPiece;
    const int first = kCopy == RowCopy::asynchronous ? piece * 16 : 0;
    keys_ = static_cast<const char*>(kv_.key.data) + kv_head * kv_.key.stride_head + first;
    values_ = static_cast<const char*>(kv_.value.data) + kv_head * kv_.value.stride_head + first;
  }

  // Begins with the tile at token `begin`, of keys that end at `end`. Nobody sees those before `first`: they
  // are not read. Nothing may be on its way.
  __device__ __forceinline__ void start(int begin, int first, int end) {
    token_ = begin + row_;
    end_ = end;
    ahead_ = table_.find(max(token_, first), end_);  // in place of what nobody sees, the first
    values_next_ = false;
#pragma unroll 1
    for (int s = 0; s < kSlots - 1; s++) refill(s);
    slot_ = kSlots - 1;
  }

  // Moves on to the next piece: waits until it is there for all warps, which then have all read the one
  // before, and has that one's slot filled anew.
  __device__ __forceinline__ void next() {
    ptx::cp_wait<kSlots - 2>();
    __syncthreads();
    refill(slot_);
    slot_ = slot_ + 1 == kSlots ? 0 : slot_ + 1;
  }
  __device__ __forceinline__ SharedSlot piece() const { return slot(slot_); }
  // Whether V comes after K. Otherwise K is V, too.
  __device__ __forceinline__ bool apart() const { return apart_; }

  __device__ __forceinline__ void drain() const { ptx::cp_wait<0>(); }

 private:
  // A copy covers whole 128-byte lines.
  static constexpr int kLanesPerRow = 8, kRowsOfWarp = kTileTokens / kWarps;
  static constexpr int kElementsPerPiece = 16 / int(sizeof(Element));
  static constexpr int kUnroll = kCopy == RowCopy::asynchronous ? Slot::kPieces : 1;
  static_assert(kSlots >= 2 && Slot::proven() && Slot::kPieces % kLanesPerRow == 0);
  static_assert(kRowsOfWarp * kLanesPerRow == kWarpSize);
  static constexpr bool kConverts = kCopy == RowCopy::converted;

  __device__ __forceinline__ void refill(int slot_index) {
    const bool values = values_next_;
    if (!values) {  // on to the next tile, whose block ids were read one tile ago
      place_ = ahead_;
      valid_ = token_ < end_;
      token_ += kTileTokens;
      ahead_ = table_.find(token_, end_);
    }
    values_next_ = apart_ && !values;
    const CacheView& view = values ? kv_.value : kv_.key;
    copy_row(slot(slot_index), values ? values_ : keys_, view, values ? kv_.value_head_dim : kv_.key_head_dim,
             values);
    ptx::cp_commit();
  }

  // Rows past the end and dims past the head are zeros, and not read.
  __device__ __forceinline__ void copy_row(SharedSlot slot, const char* base, const CacheView& view,
                                           int head_dim, bool values) const {
    const char* source =
        base + unsigned(place_.block) * view.stride_block + unsigned(place_.slot) * view.stride_token;
#pragma unroll(kUnroll)
    for (int c = 0; c < Slot::kPieces; c += kLanesPerRow) {
      const bool valid = valid_ && element_ < head_dim - c * kElementsPerPiece;
      const int first = element_ + c * kElementsPerPiece, count = valid ? head_dim - first : 0;
      if constexpr (kCopy == RowCopy::asynchronous)
        ptx::cp_async16(slot.at + copy_at_ + c * 16, source + c * 16, valid);
      else if constexpr (kCopy == RowCopy::by_element)
        copy_elements<Element>(slot.bytes + copy_at_ + c * 16, source, view, first, count);
      else
        convert_elements(slot.bytes + copy_at_ + c * 16, source, view, kv_.dtype, first, count, [&] {
          const RowScale scale(kv_, values, kv_head_);
          return scale.of_group(values, scale.at(place_), first);
        });
    }
  }

  __device__ __forceinline__ SharedSlot slot(int i) const {
    return {ring_.at + i * Slot::kNbytes, ring_.bytes + i * Slot::kNbytes};
  }

  const PagedKV& kv_;
  PageTable table_;
  SharedSlot ring_;
  bool apart_, values_next_ = false;
  int kv_head_;  // whose scales are asked for
  int row_;      // of each tile, which the lane copies parts of
  int element_;  // the first of the lane's first part
  unsigned copy_at_;
  const char* keys_;
  const char* values_;
  PageTable::Place place_{}, ahead_{};  // of the lane's row: of the tile being copied, of the next one
  bool valid_ = false;                  // whether the first of them is before the end
  int token_ = 0;                       // of the other
  int end_ = 0, slot_ = 0;
};

}  // namespace paged_ops::kernels
