// Operands of the AMX kernels in memory, as tile registers want them: queries, keys, values, and what is the
// same for few and for many rows. Included inside the namespace of one instruction set, after
// attention_walk.inl, amx_tiles.inl and amx_quantised.inl.
//
// Keys are the left operand of query . key, 16 tokens by kStepDims dims; values the right one of
// weights . values, kStepTokens tokens by 16 dims, after their tokens have been paired.

constexpr int kStepDims = 32;  // head dims of a query . key step: one row of a tile register
constexpr int kTileRow = 32;   // bf16 elements of a row of a tile register
constexpr int kTileElements = 16 * kTileRow;

alignas(64) constexpr bf16 kZeroRow[kMaxHeadDim] = {};
static_assert(kTileTokens == kStepTokens);  // a tile of the walk is a step of the products with values

// How many of a head's rows are in a block.
inline int rows_in_block(int num_rows, int block) {
  const int left = num_rows - block * kBlockRows;
  return left < kBlockRows ? left : kBlockRows;
}

// So many columns hold a block of rows: what divides kLanes.
constexpr int columns_for(int num_rows) {
  return num_rows <= 1 ? 1 : num_rows <= 2 ? 2 : num_rows <= 4 ? 4 : num_rows <= 8 ? 8 : 16;
}

// kStepDims elements of a row from i on; past `dim` there are zeros.
inline __m512i load_dims(const char* row, int i, int dim) {
  const bf16* x = reinterpret_cast<const bf16*>(row) + i;
  return dim - i < kStepDims ? load32(x, dim - i) : load32(x);
}

// Up to kBlockRows rows of a head from `first` on, as right operands: a row of a tile register has two dims
// of each of them, in the order of the cache's keys. packed: [key_steps, 16, columns, 2]; columns without a
// row are zeros.
inline void pack_queries(const AttentionParams& p, const AttentionTask& task, int head, int first,
                         int num_rows, int columns, bf16* packed) {
  const int group = p.num_q_heads / p.kv.num_kv_heads, dim = p.kv.key_head_dim;
  const char* rows[kBlockRows];
  int token = task.query_begin + first / group, g = first % group;
  for (int r = 0; r < num_rows; r++) {
    rows[r] = static_cast<const char*>(p.query) + token * p.query_stride_token +
              (int64_t(task.head_begin + head) * group + g) * p.query_stride_head;
    if (++g == group) g = 0, token++;
  }
  const bool mixed = p.kv.dtype != DType::bf16;
  const auto dims = [&](const char* row, int i) {
    if (const int even = i & ~(kMixedDims - 1); mixed && dim - even >= kMixedDims) {
      const TwoVectors x = mixed_dims({load_dims(row, even, dim), load_dims(row, even + kStepDims, dim)});
      return i == even ? x.low : x.high;
    }
    return load_dims(row, i, dim);
  };
  const __mmask16 kept = __mmask16((1u << columns) - 1);
  for (int i = 0; i < dim; i += kStepDims, packed += 2 * kBlockRows * columns) {
    __m512i x[kBlockRows];
    for (int r = 0; r < kBlockRows; r++) x[r] = r < num_rows ? dims(rows[r], i) : _mm512_setzero_si512();
    if (columns == 1) {  // a row is a column already
      _mm512_store_si512(packed, x[0]);
      continue;
    }
    transpose(x);
    for (int k = 0; k < kBlockRows; k++) _mm512_mask_storeu_epi32(packed + 2 * k * columns, kept, x[k]);
  }
}

// The one stride at which the keys of each `num_rows` tokens of a tile lie, so that a tile register can be
// loaded from where they are; 0 if there is none.
inline int64_t key_stride(const PagedKV& kv, const TileRows& tile, int num_rows) {
  if (kv.dtype != DType::bf16) return 0;
  // They are in one block, or in several of which the addresses must be compared. Not always: instructions
  // between the loads of keys take room in the window in which a core sees the loads to come.
  if (kv.block_size % num_rows == 0) return kv.key.stride_token;
  if (tile.num_tokens % num_rows != 0) return 0;
  const int64_t stride = tile.key[1] - tile.key[0];
  for (int first = 0; first < tile.num_tokens; first += num_rows)
    for (int t = first + 1; t < first + num_rows; t++)
      if (tile.key[t] - tile.key[t - 1] != stride) return 0;
  return stride;
}

// Copies of keys of element type E, tile register after tile register:
// [tokens / num_rows, key_steps, num_rows, kStepDims]. Calls meanwhile(t) after each token t.
template <class E, class F>
inline void copy_keys(const char* const* rows, int64_t offset, int num_tokens, int dim, int num_rows,
                      bf16* out, F&& meanwhile) {
  const int64_t step = int64_t(num_rows) * kStepDims, group = steps_of(dim, kStepDims) * step;
  [[maybe_unused]] const Widener<E> widen{};
  bf16* first = out;  // of the token's row
  for (int t = 0, in_group = 0; t < num_tokens; t++, first += kStepDims) {
    if (in_group++ == num_rows) {
      in_group = 1;
      first += group - step;
    }
    const char* const row = rows[t] + offset;
    bf16* x = first;
    if constexpr (sizeof(E) == sizeof(bf16)) {
      for (int i = 0; i < dim; i += kStepDims, x += step) _mm512_store_si512(x, load_dims(row, i, dim));
    } else {
      int left = dim;
      const auto put = [&](TwoVectors y, bool two) __attribute__((always_inline)) {
        _mm512_store_si512(x, y.low);
        if (two) _mm512_store_si512(x + step, y.high);
        x += 2 * step;
      };
#pragma GCC unroll 2
      for (; left >= kMixedDims; left -= kMixedDims) put(mixed_dims(widen, row + dim - left), true);
      if (left > 0) put(last_dims(widen, row + dim - left, left), left > kStepDims);
    }
    meanwhile(t);
  }
}

// Values as right operands: a row of a tile register has two tokens of 16 dims. A 32-bit word of two tokens
// falls out of unpacking, which gives a pair of tile registers for kStepDims dims and leaves those in pair
// order.
struct PairedValues {
  bf16* base;
  int64_t step_stride, dims_stride;  // elements to the next kStepTokens tokens, to the next kStepDims dims
  int dim;

  bf16* tiles(int step, int dims) const { return base + step * step_stride + dims * dims_stride; }

  // A step's tokens, of element type E; those from num_tokens on are zeros. Calls meanwhile(t) after each
  // pair of tokens from t on.
  template <class E, class F>
  void fill(int step, const char* const* rows, int64_t offset, int num_tokens, F&& meanwhile) const {
    const auto row = [&](int token) {
      return token < num_tokens ? rows[token] + offset : reinterpret_cast<const char*>(kZeroRow);
    };
    [[maybe_unused]] const Widener<E> widen{};
    for (int t = 0; t < kStepTokens; t += 2) {
      const char *x = row(t), *y = row(t + 1);
      bf16* out = tiles(step, 0) + t / 2 * kTileRow;
      const auto put = [&](TwoVectors words) {
        _mm512_store_si512(out, words.low);
        _mm512_store_si512(out + kTileElements, words.high);
        out += dims_stride;
      };
      const auto pair = [](__m512i a, __m512i b) {
        return TwoVectors{_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
      };
      int left = dim;
      if constexpr (sizeof(E) == sizeof(bf16)) {
#pragma GCC unroll 4
        for (; left >= kStepDims; left -= kStepDims, x += 64, y += 64) put(pair(load32(x), load32(y)));
        if (left > 0) put(pair(load32(x, left), load32(y, left)));
      } else {
#pragma GCC unroll 4
        for (; left >= kStepDims; left -= kStepDims, x += kStepDims, y += kStepDims)
          put(widen.pair(load_bytes(x), load_bytes(y)));
        if (left > 0) put(widen.pair(load_bytes(x, left), load_bytes(y, left)));
      }
      meanwhile(t);
    }
  }

  // Whether no value of a step's tokens that have their bits in `tokens` is infinite or NaN.
  bool finite(int step, uint32_t tokens) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for_each_vector(step, tokens, [&](const bf16* x, int t) {
      const __m512i bits = _mm512_and_si512(_mm512_load_si512(x), exponent);
      found |= _mm512_mask_cmpeq_epi16_mask(pair_words(tokens >> t), bits, exponent);
    });
    return found == 0;
  }

  // Of a step of `from`, which has the same strides, the tokens that have their bits; zeros in place of
  // others.
  void copy_kept(const PairedValues& from, int step, uint32_t tokens) const {
    const int64_t offset = base - from.base;
    from.for_each_vector(step, ~0u, [&](const bf16* x, int t) {
      _mm512_store_si512(const_cast<bf16*>(x) + offset,
                         _mm512_maskz_mov_epi16(pair_words(tokens >> t), _mm512_load_si512(x)));
    });
  }

 private:
  // The 16-bit words of a pair of tokens that have their bits.
  static __mmask32 pair_words(uint32_t pair) {
    return (pair & 1 ? 0x55555555u : 0u) | (pair & 2 ? 0xaaaaaaaau : 0u);
  }

  // Calls f(vector, its first token) for all of a step that have one of `tokens`.
  template <class F>
  void for_each_vector(int step, uint32_t tokens, F&& f) const {
    for (int t = 0; t < kStepTokens; t += 2)
      for (int i = 0; (tokens >> t & 3) != 0 && i < dim; i += kStepDims) {
        const bf16* x = tiles(step, i / kStepDims) + t / 2 * kTileRow;
        f(x, t);
        f(x + kTileElements, t);
      }
  }
};

// Gives a block's rows their headers. value_inverse: one over what all values lack.
inline void store_headers(const RowSums& sums, int num_rows, float value_inverse, float* states,
                          int64_t record) {
  for (int row = 0; row < num_rows; row++, states += record) {
    states[0] = sums.reference[row];
    states[1] = sums.rounded[row] * value_inverse;
    states[2] = sums.exact[row];
  }
}

// Whether weights of 0 would count, for lack of finite values among the tokens hidden(step) of some step.
template <class F>
inline bool must_cut(const PairedValues& values, int first_step, int end_step, F&& hidden) {
  for (int step = first_step; step < end_step; step++)
    if (const uint32_t tokens = hidden(step); tokens != 0 && !values.finite(step, tokens)) return true;
  return false;
}

// The row's own bits of a step's tokens.
inline uint32_t word_of(const Sight& sight, int step, int row) {
  alignas(64) uint32_t words[kBlockRows];
  _mm512_store_si512(words, sight.words(step));
  return words[row];
}
