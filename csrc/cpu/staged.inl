// Tiles of caches whose rows are not plain, as plain copies: products and conversions see no other rows.
// Included inside the namespace of one instruction set, after products.inl and packs.inl.

// Squares of elements of one size turn over in registers: the first half of a and of b, element by element in
// turn, and the second.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
inline Bytes zip_low(Bytes a, Bytes b) {
  return Bytes{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3],
               a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]};
}
inline Bytes zip_high(Bytes a, Bytes b) {
  return Bytes{a[8],  b[8],  a[9],  b[9],  a[10], b[10], a[11], b[11],
               a[12], b[12], a[13], b[13], a[14], b[14], a[15], b[15]};
}
inline Halves zip_low(Halves a, Halves b) { return Halves{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]}; }
inline Halves zip_high(Halves a, Halves b) { return Halves{a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]}; }
inline Words zip_low(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
inline Words zip_high(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }

// to[j][i] = from[i][j] for as many elements as a vector has, rows `stride_...` bytes apart.
template <class V>
inline void transpose_square(char* to, int64_t stride_to, const char* from, int64_t stride_from) {
  constexpr int kSide = int(sizeof(V) / sizeof(V{}[0]));
  V rows[kSide], zipped[kSide];
  for (int i = 0; i < kSide; i++) memcpy(&rows[i], from + i * stride_from, sizeof(V));
#pragma GCC unroll 4
  for (int step = 1; step < kSide; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kSide / 2; i++) {
      zipped[2 * i] = zip_low(rows[i], rows[i + kSide / 2]);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + kSide / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSide; i++) rows[i] = zipped[i];
  }
  for (int i = 0; i < kSide; i++) memcpy(to + i * stride_to, &rows[i], sizeof(V));
}

template <int kItemsize>
struct VectorOf;
template <>
struct VectorOf<1> {
  using type = Bytes;
};
template <>
struct VectorOf<2> {
  using type = Halves;
};
template <>
struct VectorOf<4> {
  using type = Words;
};

// The tiles of one of K and V for a head: rows of the cache, or copies of those that are not plain.
class TileSource {
 public:
  TileSource(const CacheView& cache, int head_dim, DType dtype, Carver& carver)
      : cache_(cache), head_dim_(head_dim), row_nbytes_(row_nbytes(dtype, padded(head_dim))) {
    const int64_t staged_tokens = is_plain(cache, head_dim) ? 0 : kTileTokens;
    staged_ = carver.take<char>(staged_tokens * row_nbytes_);
    staged_rows_ = carver.take<const char*>(staged_tokens);
  }

  // The tile whose tokens' rows are `rows`, those of KV head 0. Copies last until the next call.
  template <class E>
  Tile<E> tile(const char* const* rows, int64_t kv_head, int num_tokens) const {
    const int64_t offset = kv_head * cache_.stride_head;
    if (is_plain(cache_, head_dim_)) return Tile<E>(rows, offset, head_dim_);
    stage<E>(rows, offset, num_tokens);
    for (int t = 0; t < kTileTokens; t++) staged_rows_[t] = staged_ + t * row_nbytes_;
    return Tile<E>(staged_rows_, 0, head_dim_);
  }

 private:
  template <class E>
  void stage(const char* const* rows, int64_t offset, int num_tokens) const {
    using V = typename VectorOf<sizeof(E)>::type;
    constexpr int kItemsize = sizeof(E), kSide = int(sizeof(V)) / kItemsize;
    const Packs packs(cache_, head_dim_, dtype_of<E>::value);
    const int64_t num_elements = packs.nbytes * packs.count / kItemsize;
    for (int t = 0; t < num_tokens;) {
      char* to = staged_ + t * row_nbytes_;
      int beside = 1;  // tokens that lie element beside element
      while (beside < kSide && t + beside < num_tokens && rows[t + beside] == rows[t] + beside * kItemsize)
        beside++;
      if (packs.nbytes != kItemsize || beside < kSide) {
        packs.gather(to, rows[t] + offset);
        t++;
        continue;
      }
      int64_t i = 0;
      for (; i + kSide <= num_elements; i += kSide)
        transpose_square<V>(to + i * kItemsize, row_nbytes_, rows[t] + offset + i * packs.stride,
                            packs.stride);
      for (; i < num_elements; i++)
        for (int j = 0; j < kSide; j++)
          memcpy(to + j * row_nbytes_ + i * kItemsize, rows[t + j] + offset + i * packs.stride, kItemsize);
      t += kSide;
    }
  }

  const CacheView& cache_;
  const int head_dim_;
  const int64_t row_nbytes_;  // of a copy
  char* staged_;              // [kTileTokens, row_nbytes]
  const char** staged_rows_;  // [kTileTokens] of staged_
};
