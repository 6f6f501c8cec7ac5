// Brings a warp's tiles of K and V from their blocks into the warp's own ring in shared memory.
//
// The ring has kStages slots for K and as many for V. A slot is refilled as soon as all lanes have read it,
// before waiting for anything, so that while a warp waits all its slots are in flight, and while it computes
// all but one. Commit groups in order: K0 V0 K1 V1 ...; each wait leaves the 2 * kStages - 1 youngest alone.
#pragma once
#include <type_traits>

#include "kernels/attention_args.h"
#include "kernels/element_copy.cuh"
#include "kernels/page_table.cuh"
#include "kernels/row_scale.cuh"
#include "kernels/swizzle.cuh"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// A slot as the matrix and copy instructions address it, and as a pointer.
struct SharedSlot {
  ptx::smem_t at;
  unsigned char* bytes;
};

// Scales of a stage, where its elements are numbers of a quantised cache: of K's 16 rows, then of V's.
template <class Element>
constexpr int kScalesNbytes =
    is_quantised(dtype_of<Element>::value) ? 2 * kTileTokens * int(sizeof(float)) : 0;

// Element: as they lie in the ring, and in the cache unless they are converted.
template <class Element, int kHeadDim, int kStages, int kWarps, RowCopy kCopy>
class TileLoader {
  static constexpr bool kConverts = kCopy == RowCopy::converted;
  static constexpr bool kScales = kScalesNbytes<Element> > 0;  // come along, with K

 public:
  static constexpr int kRowNbytes = kHeadDim * int(sizeof(Element));
  using Slot = SwizzledSlot<kRowNbytes>;
  static constexpr int kSlotsNbytes = 2 * kStages * Slot::kNbytes;
  static constexpr int kRingNbytes = kSlotsNbytes + kStages * kScalesNbytes<Element>;  // of one warp
  static constexpr int kStride = kTileTokens * kWarps;  // from one tile of a warp to its next

  // `rings` has kWarps rings.
  __device__ __forceinline__ TileLoader(const AttentionArgs& a, int sequence, int kv_head, int warp, int lane,
                                        unsigned char* rings)
      : kv_(a.op.kv),
        table_(a, sequence),
        ring_{ptx::opaque(ptx::smem_addr(rings + warp * kRingNbytes)), rings + warp * kRingNbytes},
        lane_(lane),
        copy_at_(Slot::at(lane / kLanesPerRow, lane % kLanesPerRow)),
        key_head_dim_(a.op.kv.key_head_dim),
        value_head_dim_(a.op.kv.value_head_dim),
        scale_(a.op.kv, lane >= kTileTokens, kv_head) {
    const PagedKV& kv = a.op.kv;
    const int first_piece = kCopy == RowCopy::asynchronous ? lane % kLanesPerRow * 16 : 0;
    keys_ = static_cast<const char*>(kv.key.data) + kv_head * kv.key.stride_head + first_piece;
    values_ = static_cast<const char*>(kv.value.data) + kv_head * kv.value.stride_head + first_piece;
    const CacheView& mine = lane < kTileTokens ? kv.key : kv.value;
    stride_block_ = mine.stride_block;
    stride_token_ = mine.stride_token;
  }

  // Begins with the tile at token `first`, of a chunk that ends at `end`. Nobody sees the tokens before
  // `seen`: in place of those of the first tile comes that one.
  __device__ __forceinline__ void start(int first, int seen, int end) {
    end_ = end;
    PageTable::Place places[kStages];  // all look-ups before all copies: one latency, not kStages
    places[0] = table_.find(max(first + lane_ % kTileTokens, seen), end_);
#pragma unroll
    for (int s = 1; s < kStages; s++) places[s] = look_up(first + s * kStride);
    ahead_ = look_up(first + kStages * kStride);
    if constexpr (kScales)
      if (scale_.is_uniform()) {  // else they are copied
#pragma unroll
        for (int s = 0; s < kStages; s++) scales_of(s)[lane_] = scale_.uniform();
      }
#pragma unroll
    for (int s = 0; s < kStages; s++) {
      find(places[s]);
      copy_keys(first + s * kStride, s);
      copy_values(first + s * kStride, s);
    }
  }

  __device__ __forceinline__ int end() const { return end_; }
  __device__ __forceinline__ SharedSlot key_slot(int stage) const { return slot(stage); }
  __device__ __forceinline__ SharedSlot value_slot(int stage) const { return slot(kStages + stage); }
  // They come with the keys.
  __device__ __forceinline__ const float* scales(int stage) const {
    return kScales ? scales_of(stage) : nullptr;
  }

  // Waits until the oldest slot not waited for has landed, for all lanes.
  __device__ __forceinline__ void wait() const {
    ptx::cp_wait<2 * kStages - 1>();
    __syncwarp();
  }
  __device__ __forceinline__ void drain() const { ptx::cp_wait<0>(); }

  // Moves on to the rows of the tile at `token`. Its block ids were read one tile ago, and those of the next
  // one are now.
  __device__ __forceinline__ void advance(int token) {
    find(ahead_);
    ahead_ = look_up(token + kStride);
  }
  __device__ __forceinline__ void copy_keys(int token, int stage) {
    if constexpr (kScales) copy_scales(token, stage);
    copy(token, key_slot(stage), keys_, kv_.key, 0, key_head_dim_);
  }
  __device__ __forceinline__ void copy_values(int token, int stage) {
    copy(token, value_slot(stage), values_, kv_.value, kTileTokens, value_head_dim_);
  }

 private:
  static constexpr int kLanesPerRow =
      Slot::kPieces < 8 ? Slot::kPieces : 8;  // a copy covers whole 128-byte lines
  static constexpr int kRowsPerCopy = kWarpSize / kLanesPerRow;
  static constexpr int kElementsPerPiece = 16 / int(sizeof(Element));
  static constexpr int kUnroll = kCopy == RowCopy::asynchronous ? kTileTokens : 1;

  __device__ __forceinline__ SharedSlot slot(int i) const {
    return {ring_.at + i * Slot::kNbytes, ring_.bytes + i * Slot::kNbytes};
  }

  // Where the lane's row of the tile at `token` is.
  __device__ __forceinline__ PageTable::Place look_up(int token) const {
    return table_.find(token + lane_ % kTileTokens, end_);
  }

  __device__ __forceinline__ int64_t locate(PageTable::Place place) const {
    return unsigned(place.block) * stride_block_ + unsigned(place.slot) * stride_token_;
  }

  __device__ __forceinline__ void find(PageTable::Place place) {
    row_offset_ = locate(place);
    if constexpr (kScales || kConverts) scale_at_ = scale_.at(place);
  }

  __device__ __forceinline__ float* scales_of(int stage) const {
    return reinterpret_cast<float*>(ring_.bytes + kSlotsNbytes + stage * kScalesNbytes<Element>);
  }
  __device__ __forceinline__ void copy_scales(int token, int stage) const {
    if (scale_at_ == nullptr || token >= end_) return;
    const bool valid = token + lane_ % kTileTokens < end_;
    if constexpr (kCopy == RowCopy::asynchronous)
      ptx::cp_async4(ring_.at + kSlotsNbytes + stage * kScalesNbytes<Element> + lane_ * 4, scale_at_, valid);
    else
      scales_of(stage)[lane_] = valid ? __ldg(scale_at_) : 0.f;
  }

  // Lane `owner` + r knows where row r is. Rows past the end and dims past the head are zeros, and not read.
  __device__ __forceinline__ void copy(int token, SharedSlot slot, const char* base, const CacheView& view,
                                       int owner, int head_dim) {
    if (token < end_) {
      const int copy_row = lane_ / kLanesPerRow, copy_piece = lane_ % kLanesPerRow;
      const int rows = end_ - token - copy_row;
#pragma unroll(kUnroll)
      for (int r = 0; r < kTileTokens; r += kRowsPerCopy) {
        const char* source = base + __shfl_sync(kAllLanes, row_offset_, owner + copy_row + r);
        const float* scales = nullptr;
        if constexpr (kConverts)
          scales = reinterpret_cast<const float*>(
              __shfl_sync(kAllLanes, reinterpret_cast<intptr_t>(scale_at_), owner + copy_row + r));
#pragma unroll(kUnroll)
        for (int c = 0; c < Slot::kPieces; c += kLanesPerRow) {
          const bool valid = r < rows && (c + copy_piece) * kElementsPerPiece < head_dim;
          const unsigned to = Slot::down(copy_at_, r) + c * 16;
          const int first = (c + copy_piece) * kElementsPerPiece, count = valid ? head_dim - first : 0;
          if constexpr (kCopy == RowCopy::asynchronous)
            ptx::cp_async16(slot.at + to, source + c * 16, valid);
          else if constexpr (kCopy == RowCopy::by_element)
            copy_elements<Element>(slot.bytes + to, source, view, first, count);
          else
            convert_elements(slot.bytes + to, source, view, kv_.dtype, first, count,
                             [&] { return scale_.of_group(owner != 0, scales, first); });
        }
      }
    }
    ptx::cp_commit();  // an empty group too: it keeps the count
  }

  const PagedKV& kv_;
  PageTable table_;
  PageTable::Place ahead_{};
  SharedSlot ring_;
  int lane_;
  unsigned copy_at_;
  int key_head_dim_, value_head_dim_;
  // Of the lane's row, as the strides are.
  std::conditional_t<kScales || kConverts, RowScale, NoScale> scale_;
  const float* scale_at_ = nullptr;
  const char* keys_;
  const char* values_;
  int64_t stride_block_, stride_token_;  // of K for the first 16 lanes, of V for the others
  int64_t row_offset_ = 0;               // bytes to the lane's row of the tile being copied
  int end_ = 0;
};

}  // namespace paged_ops::kernels
