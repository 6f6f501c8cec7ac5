// The two products of attention on a tile: query . key, and weights times values.
// Included inside the namespace of one instruction set, after its vector vocabulary.
//
// A row is one query token with one query head. Up to kMaxRows rows share each load of a key or a value;
// what is computed for a row, and in which order, does not depend on how many share.

constexpr int kMaxRows = 4;

constexpr int padded(int dim) { return (dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Where the rows of a tile are and how their elements are read.
template <class E>
struct Tile {
  const char* const* rows;  // [kTileTokens], a multiple of kLanes of them valid
  int64_t offset;           // bytes from each to the wanted head
  int num_pairs;            // whole pairs of vectors in a row
  int tail;                 // elements after them

  Tile(const char* const* rows, int64_t offset, int dim)
      : rows(rows), offset(offset), num_pairs(dim / (2 * kLanes)), tail(dim % (2 * kLanes)) {}

  const E* row(int token) const { return reinterpret_cast<const E*>(rows[token] + offset); }
};

// So many tokens at a time give kLanes sums, or three quarters of them for three rows.
constexpr int groups_of(int num_rows) { return num_rows == 3 ? 4 : num_rows; }

// query[r] . key[t + j] in lane r * kTokens + j, for kTokens = kLanes / groups_of(kRows) tokens.
template <class E, int kRows>
__attribute__((always_inline)) inline Vec score_group(const Tile<E>& key, int t, const float* query,
                                                      int64_t query_stride, Prefetcher* prefetcher) {
  constexpr int kTokens = kLanes / groups_of(kRows);
  constexpr int kPair = 2 * kLanes;
  const E* k[kTokens];
  for (int j = 0; j < kTokens; j++) k[j] = key.row(t + j);
  Vec sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) sums[i] = zero();
  const auto accumulate = [&](int pair, auto load_key) __attribute__((always_inline)) {
    const auto query_at = [&](int r) __attribute__((always_inline)) {
      const float* x = query + r * query_stride + pair * kPair;
      return Pair{load_once(x), load_once(x + kLanes)};
    };
    const auto key_at = [&](int j) __attribute__((always_inline)) { return load_key(k[j] + pair * kPair); };
    const auto add_product = [&](int r, int j, Pair q, Pair x) __attribute__((always_inline)) {
      Vec& sum = sums[r * kTokens + j];
      sum = fma(q.b, x.b, fma(q.a, x.a, sum));
    };
    // Each is read once: the fewer stay in registers while the others pass.
    if constexpr (kRows <= kTokens) {
      Pair q[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) q[r] = query_at(r);
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; j++) {
        const Pair x = key_at(j);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) add_product(r, j, q[r], x);
      }
    } else {
      Pair x[kTokens];
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; j++) x[j] = key_at(j);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Pair q = query_at(r);
#pragma GCC unroll 16
        for (int j = 0; j < kTokens; j++) add_product(r, j, q, x[j]);
      }
    }
  };
  for (int pair = 0; pair < key.num_pairs; pair++) {
    accumulate(pair, [](const E* x) __attribute__((always_inline)) { return load_pair(x); });
    if (prefetcher) prefetcher->step<kTokens * kPair * sizeof(E)>();
  }
  if (key.tail)
    accumulate(key.num_pairs,
               [&](const E* x) __attribute__((always_inline)) { return load_pair(x, key.tail); });
  return reduce(sums);
}

// scores[r][t] = query[r] . key[t] for the tile's tokens; beyond them, up to a multiple of kLanes, waste.
// query: kRows rows of f32 in pair order, zeros up to padded(dim). scores: rows kTileTokens apart.
template <class E, int kRows>
void score(const Tile<E>& key, int num_tokens, const float* query, int64_t query_stride, float* scores,
           Prefetcher* prefetcher) {
  constexpr int kGroups = groups_of(kRows);
  constexpr int kTokens = kLanes / kGroups;
  for (int begin = 0; begin < num_tokens; begin += kLanes) {
    Vec groups[kGroups];
    for (int g = 0; g < kGroups; g++) {
      const int t = begin + g * kTokens;
      groups[g] = t < num_tokens ? score_group<E, kRows>(key, t, query, query_stride, prefetcher) : zero();
    }
    // Whole vectors of a row's scores, for whole vectors is how they are read again at once: loads do not
    // find the pieces of several stores that are still on their way to the cache.
    deal(groups);
    for (int r = 0; r < kRows; r++) store(scores + r * kTileTokens + begin, groups[r]);
  }
}

// Some pairs of columns of: out[r] = out[r] * decay[r] + sum over tokens of weights[r][t] value[t].
template <class E, int kRows, int kPairs, bool kTail>
inline void weigh_columns(const Tile<E>& value, int first_pair, int begin, int end, const float* weights,
                          const float* decay, float* const* out, Prefetcher* prefetcher) {
  constexpr int kPair = 2 * kLanes;
  Pair sums[kRows][kPairs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; c++) {
      const float* x = out[r] + (first_pair + c) * kPair;
      sums[r][c] = {mul(load(x), broadcast(decay[r])), mul(load(x + kLanes), broadcast(decay[r]))};
    }
  for (int t = begin; t < end; t++) {
    const E* v = value.row(t) + first_pair * kPair;
    Pair x[kPairs];
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; c++) {
      if constexpr (kTail) {
        x[c] = load_pair(v + c * kPair, value.tail);
      } else {
        x[c] = load_pair(v + c * kPair);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Vec weight = broadcast(weights[r * kTileTokens + t]);
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; c++)
        sums[r][c] = {fma(weight, x[c].a, sums[r][c].a), fma(weight, x[c].b, sums[r][c].b)};
    }
    // Whole lines: with less to a token's part, every other time.
    constexpr int kBytes = kPairs * kPair * sizeof(E);
    if (prefetcher && (kBytes >= 64 || t % 2 != 0)) prefetcher->step<kBytes>();
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; c++) {
      float* x = out[r] + (first_pair + c) * kPair;
      store(x, sums[r][c].a);
      store(x + kLanes, sums[r][c].b);
    }
}

// All columns. weights: rows kTileTokens apart; decay [kRows]; out [kRows] rows of f32 in pair order.
template <class E, int kRows>
void weigh(const Tile<E>& value, int begin, int end, const float* weights, const float* decay,
           float* const* out, Prefetcher* prefetcher) {
  constexpr int kFit = kAccumulators / (2 * kRows);
  constexpr int kAtOnce = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  int pair = 0;
  for (; pair + kAtOnce <= value.num_pairs; pair += kAtOnce)
    weigh_columns<E, kRows, kAtOnce, false>(value, pair, begin, end, weights, decay, out, prefetcher);
  for (; pair < value.num_pairs; pair++)
    weigh_columns<E, kRows, 1, false>(value, pair, begin, end, weights, decay, out, prefetcher);
  if (value.tail) weigh_columns<E, kRows, 1, true>(value, pair, begin, end, weights, decay, out, prefetcher);
}

// A tile as f32 in pair order, rows padded(dim) apart.
template <class T>
void unpack(const Tile<T>& tile, int num_tokens, float* out, Prefetcher& prefetcher) {
  const auto put = [&](Pair y) {
    store(out, y.a);
    store(out + kLanes, y.b);
    out += 2 * kLanes;
  };
  for (int t = 0; t < num_tokens; t++) {
    const T* x = tile.row(t);
    for (int pair = 0; pair < tile.num_pairs; pair++) put(load_pair(x + pair * 2 * kLanes));
    if (tile.tail) put(load_pair(x + tile.num_pairs * 2 * kLanes, tile.tail));
    prefetcher.step((tile.num_pairs * 2 * kLanes + tile.tail) * int64_t(sizeof(T)));
  }
}
