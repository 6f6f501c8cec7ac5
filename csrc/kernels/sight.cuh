// Which keys the columns of a CTA see, and what becomes of their scores: params/attention.h says what the
// rules mean.
//
// A walk is compiled for one of two sights. PlainSight is for calls without window, soft cap, ALiBi and tree:
// a column sees all keys up to some end. RuledSight has all four, each at run time. What a column sees of a
// tile is one int either way, `seen`: how many rows, or a bit for each.
#pragma once
#include <type_traits>

#include "kernels/column_map.cuh"

namespace paged_ops::kernels {

enum class Rules { none, some };

// The rows of a tile that a column sees which has these bits of the tree that begins `before` rows after the
// tile's first: those, and the ones before the tree.
PAGED_OPS_HOST_DEVICE inline uint32_t tree_rows(uint64_t bits, int before) {
  const uint32_t own = before >= kTileTokens || before <= -kMaxTreeTokens ? 0u
                       : before >= 0                                      ? uint32_t(bits << before)
                                                                          : uint32_t(bits >> -before);
  return own | lowest_bits(before);
}

// Where the query tokens of a tile's sequence stand. Of a tree's tokens from kMaxTreeTokens on, which it must
// not have, nobody sees any: they have no bits.
struct Places {
  const AttentionArgs& a;
  const ColumnTile& tile;

  __device__ __forceinline__ bool tree() const { return a.op.rules.tree_mask != nullptr; }
  __device__ __forceinline__ int token(int column) const { return (tile.first_column + column) / a.group; }
  // Position of the sequence's first query token; may be negative.
  __device__ __forceinline__ int begin() const { return tile.length - tile.num_tokens; }
  // The bits of those tokens before token t that it sees.
  __device__ __forceinline__ uint64_t earlier(int t) const {
    const uint64_t before = t < kMaxTreeTokens ? (uint64_t(1) << t) - 1 : ~uint64_t(0);
    return uint64_t(__ldg(a.op.rules.tree_mask + tile.first_row + t)) & before;
  }
  __device__ __forceinline__ int place(int t) const {
    if (!tree()) return begin() + t;
    const uint64_t bits = earlier(t);
    return begin() + __popc(uint32_t(bits)) + __popc(uint32_t(bits >> 32));
  }

  // The first key that some column sees.
  __device__ __forceinline__ int first_seen() const {
    if (a.op.rules.window == 0) return 0;
    int least = place(token(0));
    if (tree())  // where later tokens may stand before earlier ones
      for (int t = token(0) + 1; t <= token(tile.num_columns - 1); t++) least = min(least, place(t));
    return first_visible_key(a.op.rules.window, least);
  }
  // A key from which on the window hides nothing from any column.
  __device__ __forceinline__ int first_seen_by_all() const {
    return first_visible_key(a.op.rules.window, begin() + token(tile.num_columns - 1));
  }
};

// One score of a tile.
struct Cell {
  int row, column;
};

// kColumns: of the CTA. kWarpColumns: of each of its warps, all of them or its own 1st, 2nd, ... so many.
template <int kColumns, int kWarpColumns>
class PlainSight {
 public:
  static constexpr bool kRuled = false;
  static constexpr int kNbytes = kColumns * int(sizeof(int));

  // `memory`: what fill() has written.
  __device__ __forceinline__ PlainSight(const AttentionArgs& a, const unsigned char* memory, int warp,
                                        int /*lane*/)
      : a_(a),
        visible_(reinterpret_cast<const int*>(memory) + (kWarpColumns < kColumns ? warp * kWarpColumns : 0)) {
  }

  // By all threads of the CTA, before a barrier.
  static __device__ __forceinline__ void fill(const AttentionArgs& a, const ColumnTile& tile, int /*kv_head*/,
                                              unsigned char* memory) {
    if (threadIdx.x < kColumns)
      reinterpret_cast<int*>(memory)[threadIdx.x] =
          tile.visible(a, min(int(threadIdx.x), tile.num_columns - 1));
  }

  // The first key that some column sees, that all do, and where those end that all do.
  static __device__ __forceinline__ int first_seen(const AttentionArgs&, const ColumnTile&) { return 0; }
  static __device__ __forceinline__ int first_seen_by_all(const AttentionArgs&, const ColumnTile&) {
    return 0;
  }
  static __device__ __forceinline__ int seen_by_all(const AttentionArgs& a, const ColumnTile& tile) {
    return tile.visible(a, 0);
  }

  // By a warp, before it asks what is seen of the tile at `first_token`, with a __syncwarp() between.
  __device__ __forceinline__ void look(int /*first_token*/) const {}
  __device__ __forceinline__ int seen(int column, int first_token) const {
    return visible_[column] - first_token;
  }
  // Of a column whose number is even, and the next one.
  __device__ __forceinline__ int2 two_seen(int column, int first_token) const {
    const int2 visible = *reinterpret_cast<const int2*>(visible_ + column);
    return int2{visible.x - first_token, visible.y - first_token};
  }
  static __device__ __forceinline__ bool sees(int seen, int row) { return row < seen; }

  // Scores to logits, to base 2. x[e] is that of the key and column at(e) of the tile at `first_token`. The
  // roundings are spelled out here and wherever else a row may go through several compilations of the same
  // code: its bits must agree.
  template <int kCount, class At>
  __device__ __forceinline__ void logits(float (&x)[kCount], int /*first_token*/, At /*at*/) const {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = __fmul_rn(x[e], a_.scale_log2);
  }

 private:
  const AttentionArgs& a_;
  const int* visible_;
};

// tanh to some 3 units in the last place. Near 0 it is x + x^3 P(x^2), as in cpu/logits.inl.
__device__ __forceinline__ float tanh_of(float x) {
  constexpr float kNear = 0.6f, kTwoLog2e = 2.88539008f;
  const float size = fabsf(x), square = __fmul_rn(x, x);
  float p = fmaf(-0.00590581587f, square, 0.0208053365f);
  p = fmaf(p, square, -0.0537866689f);
  p = fmaf(p, square, 0.133319587f);
  p = fmaf(p, square, -0.333332986f);
  const float e = ptx::ex2(__fmul_rn(size, -kTwoLog2e));
  const float far = __fdividef(__fadd_rn(1.f, -e), __fadd_rn(1.f, e));
  return size < kNear ? fmaf(__fmul_rn(p, square), x, x) : copysignf(far, x);
}

template <int kColumns, int kWarps, int kWarpColumns>
class RuledSight {
  struct Column {
    uint64_t tree;  // of the keys from tree_begin on, those that it sees
    int first, visible, place;
    float slope_log2;
  };
  struct Memory {
    Column columns[kColumns];
    int seen[kWarps][kWarpColumns];  // of the tile that a warp is at
    int tree_place[kMaxTreeTokens];  // of the keys from tree_begin on
    int tree_begin;                  // INT32_MAX: there is no tree
  };

 public:
  static constexpr bool kRuled = true;
  static constexpr int kNbytes = int(sizeof(Memory));

  __device__ __forceinline__ RuledSight(const AttentionArgs& a, unsigned char* memory, int warp, int lane)
      : a_(a),
        memory_(*reinterpret_cast<const Memory*>(memory)),
        columns_(memory_.columns + (kWarpColumns < kColumns ? warp * kWarpColumns : 0)),
        seen_(reinterpret_cast<Memory*>(memory)->seen[warp]),
        lane_(lane) {}

  static __device__ __forceinline__ void fill(const AttentionArgs& a, const ColumnTile& tile, int kv_head,
                                              unsigned char* memory) {
    constexpr float kLog2e = 1.44269504088896f;
    Memory& all = *reinterpret_cast<Memory*>(memory);
    const AttentionRules& rules = a.op.rules;
    const Places places{a, tile};
    if (threadIdx.x == 0) all.tree_begin = places.tree() ? places.begin() : INT32_MAX;
    if (places.tree())
      for (int t = threadIdx.x; t < min(tile.num_tokens, kMaxTreeTokens); t += kWarps * kWarpSize)
        all.tree_place[t] = places.place(t);
    if (threadIdx.x >= kColumns) return;

    const int c = min(int(threadIdx.x), tile.num_columns - 1), t = places.token(c);
    Column column;
    column.place = places.place(t);
    column.first = first_visible_key(rules.window, column.place);
    column.visible = tile.visible(a, c);
    column.slope_log2 = rules.alibi_slopes == nullptr
                            ? 0.f
                            : __fmul_rn(__ldg(rules.alibi_slopes + row_of(a, tile, kv_head, c).head), kLog2e);
    column.tree = 0;
    if (places.tree()) {
      column.tree = places.earlier(t) | (t < kMaxTreeTokens ? uint64_t(1) << t : 0);
      if (rules.window > 0)
        for (int i = 0; i < min(t, kMaxTreeTokens); i++)
          if (column.place - places.place(i) >= rules.window) column.tree &= ~(uint64_t(1) << i);
    }
    all.columns[threadIdx.x] = column;
  }

  static __device__ __forceinline__ int first_seen(const AttentionArgs& a, const ColumnTile& tile) {
    return Places{a, tile}.first_seen();
  }
  static __device__ __forceinline__ int first_seen_by_all(const AttentionArgs& a, const ColumnTile& tile) {
    return Places{a, tile}.first_seen_by_all();
  }
  static __device__ __forceinline__ int seen_by_all(const AttentionArgs& a, const ColumnTile& tile) {
    const Places places{a, tile};
    const int visible = tile.visible(a, 0);
    return places.tree() ? min(visible, places.begin()) : visible;
  }

  __device__ __forceinline__ void look(int first_token) const {
    if (lane_ >= kWarpColumns) return;
    const Column& column = columns_[lane_];
    seen_[lane_] = int(lowest_bits(min(column.visible - first_token, kTileTokens)) &
                       ~lowest_bits(column.first - first_token) &
                       tree_rows(column.tree, memory_.tree_begin - first_token));
  }
  __device__ __forceinline__ int seen(int column, int /*first_token*/) const { return seen_[column]; }
  __device__ __forceinline__ int2 two_seen(int column, int /*first_token*/) const {
    return *reinterpret_cast<const int2*>(seen_ + column);
  }
  static __device__ __forceinline__ bool sees(int seen, int row) { return seen >> row & 1; }

  // With a factor only, the logits are those of a plain sight, bit for bit.
  template <int kCount, class At>
  __device__ __forceinline__ void logits(float (&x)[kCount], int first_token, At at) const {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = __fmul_rn(x[e], a_.ruled_scale);
    if (a_.op.rules.soft_cap != 0.f) {
#pragma unroll
      for (int e = 0; e < kCount; e++)
        x[e] = __fmul_rn(tanh_of(__fmul_rn(x[e], a_.inverse_cap)), a_.cap_log2);
    }
    if (a_.op.rules.alibi_slopes != nullptr) {
#pragma unroll
      for (int e = 0; e < kCount; e++) {
        const Cell cell = at(e);
        const Column& column = columns_[cell.column];
        const int distance = key_place(first_token + cell.row) - column.place;
        x[e] = __fadd_rn(x[e], __fmul_rn(column.slope_log2, float(distance)));
      }
    }
  }

 private:
  __device__ __forceinline__ int key_place(int position) const {
    const int t = position - memory_.tree_begin;
    return t >= 0 && t < kMaxTreeTokens ? memory_.tree_place[t] : position;
  }

  const AttentionArgs& a_;
  const Memory& memory_;
  const Column* columns_;  // of the warp
  int* seen_;
  int lane_;
};

template <Rules kRules, int kColumns, int kWarps, int kWarpColumns>
using SightFor = std::conditional_t<kRules == Rules::none, PlainSight<kColumns, kWarpColumns>,
                                    RuledSight<kColumns, kWarps, kWarpColumns>>;

// Where the first tile of a strand begins that has keys from `first` on: in the chunk at `begin`, of strands
// whose tiles lie `stride` apart.
PAGED_OPS_HOST_DEVICE inline int first_tile(int begin, int strand, int stride, int first) {
  const int token = begin + strand * kTileTokens, before = first - token + stride - kTileTokens;
  return before > 0 ? token + before / stride * stride : token;
}

}  // namespace paged_ops::kernels
