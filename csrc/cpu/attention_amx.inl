// The products of attention on AMX tiles, for bf16: keys are the left operand of query . key just as they
// lie in the cache, values the right operand of weights . values after their tokens have been paired.
// Included inside the namespace of one instruction set, after attention_walk.inl and amx_tiles.inl.
//
// Weights are rounded to bf16 before they meet the values. The sum of the rounded ones is what the result is
// divided by, so that it is a true mean of values; the sum before rounding makes the LSE. Rows go in blocks
// of up to 16, each a column of the scores and a row of the weights. While a chunk is walked, the header of a
// state holds the first sum in kLanes parts, and `exact_` the second.

constexpr int kBlockRows = 16;
constexpr int kStepDims = 32;    // head dims of a query . key step: one row of a tile register
constexpr int kStepTokens = 32;  // tokens of a weights . values step
constexpr int kTokenSteps = kTileTokens / kStepTokens;
constexpr int kTileElements = 512;  // bf16 elements of a whole tile register

// A weight may grow to 2^kHeadroom before sums are put on the scale of a new maximum: most tiles then leave
// them alone. It is the row's own scores that decide.
constexpr float kHeadroom = 8.0f;

// What the tile registers hold. Each line has one shape.
// clang-format off
enum TileUse {
  kScoresA, kScoresB, kQuery,
  kLeft, kRight,
  kWeightsA, kWeightsB, kSums,
};
// clang-format on

alignas(64) constexpr bf16 kZeroRow[256] = {};

// So many columns hold a block of rows: what divides kLanes.
constexpr int columns_for(int num_rows) {
  return num_rows <= 1 ? 1 : num_rows <= 2 ? 2 : num_rows <= 4 ? 4 : num_rows <= 8 ? 8 : 16;
}

// At so many places in turning kStepTokens scores of each row into weights something can be prefetched.
constexpr int weight_steps(int columns) { return columns == 1 ? 2 : 4; }

constexpr float kWeight[5] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f, 0.00958285294f};

// 2^x for a logit less its reference: a polynomial of degree 4 with p(0) = 1 on [-1/2, 1/2], relative error
// 3e-6 before rounding (fitted as exp2_constants.inl says). Weights are rounded to bf16, to 2e-3.
inline Vec weight_of(Vec x) {
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = sub(x, whole);
  Vec y = broadcast(kWeight[4]);
#pragma GCC unroll 4
  for (int i = 3; i >= 0; i--) y = fma(y, f, broadcast(kWeight[i]));
  return _mm512_scalef_ps(y, whole);
}

// The greatest of the lanes whose index is the same modulo kColumns, in each of them.
template <int kColumns>
inline Vec max_of_column(Vec x) {
  if constexpr (kColumns <= 8) x = max(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns <= 4) x = max(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  if constexpr (kColumns <= 2) x = max(x, _mm512_permute_ps(x, 0x4e));
  if constexpr (kColumns <= 1) x = max(x, _mm512_permute_ps(x, 0xb1));
  return x;
}

// Rows and columns of a matrix of 32-bit words change places.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // x[i + j]: word j of each quarter, of rows i .. i + 3
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {  // quarters
    const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88),
                  b = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd),
                  d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    y[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    y[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    y[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = y[i];
}

// Calls f(column, vectors) for each column of a matrix [kCount * kLanes / kColumns, kColumns] that lies in
// kCount vectors, by taking the even and the odd columns apart until one is left.
template <int kColumns, int kColumn, int kStride, int kCount, class F>
__attribute__((always_inline)) inline void for_each_column(const Vec (&x)[kCount], F&& f) {
  if constexpr (kColumns == 1) {
    f(Constant<kColumn>{}, x);
  } else {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    Vec half[kCount / 2];
#pragma GCC unroll 16
    for (int i = 0; i < kCount / 2; i++) half[i] = _mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]);
    for_each_column<kColumns / 2, kColumn, 2 * kStride>(half, f);
#pragma GCC unroll 16
    for (int i = 0; i < kCount / 2; i++) half[i] = _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]);
    for_each_column<kColumns / 2, kColumn + kStride, 2 * kStride>(half, f);
  }
}

class AmxProducts {
 public:
  using Element = bf16;

  AmxProducts(const AttentionParams& p, const AttentionTask& task, const Rows& rows, Carver& carver)
      : p_(p),
        task_(task),
        rows_(rows),
        num_blocks_((rows.count + kBlockRows - 1) / kBlockRows),
        key_steps_((p.kv.key_head_dim + kStepDims - 1) / kStepDims),
        value_tiles_((p.kv.value_head_dim + kStepDims - 1) / kStepDims * 2),
        record_(state_floats(p.kv.value_head_dim)),
        // Keys are loaded from where they are if 16 of them lie at one stride and are asked for once.
        copies_keys_(num_blocks_ > 1 || p.kv.block_size % kBlockRows != 0 ||
                     p.kv.key_head_dim % kStepDims != 0) {
    const int64_t blocks = int64_t(task.head_end - task.head_begin) * num_blocks_;
    query_ = carver.take<bf16>(blocks * key_steps_ * kTileElements);
    maxima_ = carver.take<float>(blocks * kLanes);
    exact_ = carver.take<float>(int64_t(task.head_end - task.head_begin) * rows.count * kLanes);
    key_tile_ = carver.take<bf16>(copies_keys_ ? kTileTokens * key_steps_ * kStepDims : 0);
    value_tile_ = carver.take<bf16>(kTokenSteps * value_tiles_ * kTileElements);
    scores_ = carver.take<float>(kTileTokens * kBlockRows);
    weights_ = carver.take<bf16>(kBlockRows * kTileTokens);
  }

  ~AmxProducts() {
    if (configured_rows_ != 0) release_tiles();
  }
  AmxProducts(const AmxProducts&) = delete;
  AmxProducts& operator=(const AmxProducts&) = delete;

  // Right operands: a row of a tile register has two dims of each of the block's query rows.
  void pack_query() {
    for (int head = 0; head < task_.head_end - task_.head_begin; head++)
      for (int block = 0; block < num_blocks_; block++) {
        auto* packed = reinterpret_cast<uint32_t*>(query_of(head, block));
        if (columns_for(block_rows(block)) == kBlockRows) {
          pack_block(head, block, packed);
        } else {
          pack_few(head, block, packed);
        }
      }
  }

  // Each product of tiles, each pair of tokens, each column of values, and some in between.
  int num_steps() const {
    const int key_products = copies_keys_ ? kTileTokens / 4 : key_steps_ * (kTileTokens / 16);
    const int columns = columns_for(block_rows(0));
    return key_products + kTokenSteps * weight_steps(columns) + kTileTokens / 2 + value_tiles_;
  }

  void open(int head, float* states) {
    for (int block = 0; block < num_blocks_; block++) store(maxima_of(head, block), broadcast(-kInfinity));
    for (int row = 0; row < rows_.count; row++) {
      store(states + row * record_, zero());
      store(exact_of(head, row), zero());
    }
  }

  void close(int head, float* states) {
    for (int row = 0; row < rows_.count; row++) {
      float* state = states + row * record_;
      const float total = sum(load(state));
      state[0] = maxima_of(head, row / kBlockRows)[row % kBlockRows];
      state[1] = total;
      state[2] = sum(load(exact_of(head, row)));
    }
  }

  void attend_tile(int head, const TileRows& tile, int num_tokens, int position, float* states,
                   Prefetcher& prefetcher) {
    if (copies_keys_) copy_keys(head, tile, num_tokens, prefetcher);
    bool values_ready = false;
    for (int block = 0; block < num_blocks_; block++) {
      Block b(*this, block, num_tokens, position);
      if (b.most <= 0) continue;
      configure(b.columns, b.num_rows);
      score(head, block, tile, b, copies_keys_ ? nullptr : &prefetcher);
      Prefetcher* const next_tile = values_ready ? nullptr : &prefetcher;
      if (!values_ready) pair_values(head, tile, num_tokens, prefetcher);
      if (b.blind > 0 || b.least < kTileTokens) {
        weigh_block<true>(head, b, states, next_tile);
      } else {
        weigh_block<false>(head, b, states, next_tile);
      }
      values_ready = add_values(head, tile, num_tokens, b, states, next_tile);
    }
  }

 private:
  // A block of rows on a tile: how many tokens of it each row sees.
  struct Block {
    int first, num_rows, columns;
    int blind;        // so many of the first rows see nothing
    int least, most;  // tokens that the first row after those sees, and the last
    int seen[kBlockRows];

    Block(const AmxProducts& products, int block, int num_tokens, int position)
        : first(block * kBlockRows),
          num_rows(products.block_rows(block)),
          columns(columns_for(num_rows)),
          blind(0) {
      for (int r = 0; r < num_rows; r++) {
        const int visible = products.rows_.visible[first + r] - position;
        seen[r] = visible < num_tokens ? visible : num_tokens;
        blind += visible <= 0;
      }
      most = seen[num_rows - 1];
      least = most > 0 ? seen[blind] : 0;
    }
  };

  int block_rows(int block) const {
    const int left = rows_.count - block * kBlockRows;
    return left < kBlockRows ? left : kBlockRows;
  }
  bf16* query_of(int head, int block) const {
    return query_ + (int64_t(head) * num_blocks_ + block) * key_steps_ * kTileElements;
  }
  float* maxima_of(int head, int block) const {
    return maxima_ + (int64_t(head) * num_blocks_ + block) * kLanes;
  }

  float* exact_of(int head, int row) const { return exact_ + (int64_t(head) * rows_.count + row) * kLanes; }

  const bf16* query_row(int head, int row) const {
    const int group = p_.num_q_heads / p_.kv.num_kv_heads;
    return reinterpret_cast<const bf16*>(static_cast<const char*>(p_.query) +
                                         int64_t(task_.query_begin + row / group) * p_.query_stride_token +
                                         (int64_t(task_.head_begin + head) * group + row % group) *
                                             p_.query_stride_head);
  }

  void pack_block(int head, int block, uint32_t* packed) const {
    const int first = block * kBlockRows, num_rows = block_rows(block), dim = p_.kv.key_head_dim;
    for (int i = 0; i < dim; i += kStepDims, packed += kTileElements / 2) {
      __m512i rows[kBlockRows];
      for (int r = 0; r < kBlockRows; r++) {
        if (r >= num_rows) {
          rows[r] = _mm512_setzero_si512();
          continue;
        }
        const bf16* x = query_row(head, first + r) + i;
        rows[r] = dim - i < kStepDims ? load32(x, dim - i) : load32(x);
        if (first + kBlockRows + r < rows_.count)
          __builtin_prefetch(query_row(head, first + kBlockRows + r) + i);
      }
      transpose(rows);
      for (int k = 0; k < kBlockRows; k++) _mm512_store_si512(packed + k * kBlockRows, rows[k]);
    }
  }

  void pack_few(int head, int block, uint32_t* packed) const {
    const int columns = columns_for(block_rows(block));
    memset(packed, 0, size_t(key_steps_) * 16 * columns * sizeof(uint32_t));
    for (int column = 0; column < block_rows(block); column++) {
      const bf16* x = query_row(head, block * kBlockRows + column);
      for (int k = 0; k < p_.kv.key_head_dim / 2; k++) memcpy(packed + k * columns + column, x + 2 * k, 4);
    }
  }

  // Gives the tile registers their shapes, for a block of `columns` columns and products of `num_rows` rows.
  void configure(int columns, int num_rows) {
    if (columns == configured_columns_ && num_rows == configured_rows_) return;
    TileConfig config;
    for (int tile = kScoresA; tile <= kQuery; tile++) config.set(tile, 16, columns * 4);
    for (int tile = kLeft; tile <= kRight; tile++) config.set(tile, 16, 64);
    for (int tile = kWeightsA; tile <= kSums; tile++) config.set(tile, num_rows, 64);
    load_tile_config(config);
    configured_columns_ = columns;
    configured_rows_ = num_rows;
  }

  void copy_keys(int head, const TileRows& tile, int num_tokens, Prefetcher& prefetcher) {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.key.stride_head;
    const int dim = p_.kv.key_head_dim;
    bf16* out = key_tile_;
    for (int t = 0; t < num_tokens; t++) {
      const bf16* x = reinterpret_cast<const bf16*>(tile.key[t] + offset);
      for (int i = 0; i < dim; i += kStepDims, out += kStepDims) {
        _mm512_store_si512(out, dim - i < kStepDims ? load32(x + i, dim - i) : load32(x + i));
      }
      if (t % 4 == 0) prefetcher.step();
    }
  }

  // scores[token][column] = query row . key, for whole 16s of tokens up to what the block sees at most.
  void score(int head, int block, const TileRows& tile, const Block& b, Prefetcher* prefetcher) {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.key.stride_head;
    const char* query = reinterpret_cast<const char*>(query_of(head, block));
    const int64_t query_stride = b.columns * 4, step_nbytes = 16 * query_stride;
    const int64_t key_stride = copies_keys_ ? key_steps_ * 64 : p_.kv.key.stride_token;
    const auto keys = [&](int token) {
      return copies_keys_ ? reinterpret_cast<const char*>(key_tile_) + token * key_stride
                          : tile.key[token] + offset;
    };
    for (int token = 0; token < b.most; token += 32) {
      const bool two = token + 16 < b.most;
      const char* const first = keys(token);
      const char* const second = two ? keys(token + 16) : first;
      clear_tile<kScoresA>();
      clear_tile<kScoresB>();
      for (int step = 0; step < key_steps_; step++) {
        load_tile<kQuery>(query + step * step_nbytes, query_stride);
        load_tile<kLeft>(first + step * 64, key_stride);
        multiply_bf16<kScoresA, kLeft, kQuery>();
        if (prefetcher) prefetcher->step();
        if (two) {
          load_tile<kRight>(second + step * 64, key_stride);
          multiply_bf16<kScoresB, kRight, kQuery>();
          if (prefetcher) prefetcher->step();
        }
      }
      store_tile<kScoresA>(scores_ + token * b.columns, query_stride);
      if (two) store_tile<kScoresB>(scores_ + (token + 16) * b.columns, query_stride);
    }
  }

  template <bool kMasked>
  void weigh_block(int head, const Block& b, float* states, Prefetcher* prefetcher) {
    switch (b.columns) {
      case 1: return weigh_scores<1, kMasked>(head, b, states, prefetcher);
      case 2: return weigh_scores<2, kMasked>(head, b, states, prefetcher);
      case 4: return weigh_scores<4, kMasked>(head, b, states, prefetcher);
      case 8: return weigh_scores<8, kMasked>(head, b, states, prefetcher);
      default: return weigh_scores<16, kMasked>(head, b, states, prefetcher);
    }
  }

  // Turns a block's scores into weights [row][token] and takes them into the maxima and the sums of weights.
  // What a row gets is the same whether other rows make the block `kMasked` or not.
  template <int kColumns, bool kMasked>
  void weigh_scores(int head, const Block& b, float* states, Prefetcher* prefetcher) {
    constexpr int kTokens = kLanes / kColumns;  // of a vector, token-major
    constexpr int kStepVectors = kStepTokens / kTokens;
    const Vec scale = broadcast(p_.scale * kLog2E);
    __m512i left =
        _mm512_setzero_si512();  // of a lane's row: tokens that it sees, less the lane's own offset
    if constexpr (kMasked) {
      alignas(64) int32_t lanes[kLanes];
      for (int i = 0; i < kLanes; i++)
        lanes[i] = (i % kColumns < b.num_rows ? b.seen[i % kColumns] : 0) - i / kColumns;
      left = _mm512_load_si512(lanes);
    }
    const auto masked = [&](int vector, Vec x) __attribute__((always_inline)) {
      if constexpr (!kMasked) return x;
      const __mmask16 seen = _mm512_cmpgt_epi32_mask(left, _mm512_set1_epi32(vector * kTokens));
      return _mm512_mask_mov_ps(broadcast(-kInfinity), seen, x);
    };
    const auto logits = [&](int vector) __attribute__((always_inline)) {
      return masked(vector, mul(load(scores_ + vector * kLanes), scale));
    };

    Vec greatest = logits(0), other = logits(1);
#pragma GCC unroll 8
    for (int i = 2; i < kTokenSteps * kStepVectors; i += 2) {
      greatest = max(greatest, logits(i));
      other = max(other, logits(i + 1));
    }
    greatest = max_of_column<kColumns>(max(greatest, other));
    Vec maximum = load(maxima_of(head, b.first / kBlockRows));
    const __mmask16 grows = _mm512_cmp_ps_mask(greatest, add(maximum, broadcast(kHeadroom)), _CMP_GT_OQ);
    if (grows) maximum = grow(head, maximum, greatest, grows, b, states);
    const Vec shift = _mm512_mask_sub_ps(
        zero(), _mm512_cmp_ps_mask(maximum, broadcast(-kInfinity), _CMP_NEQ_UQ), zero(), maximum);

    const __m512bh ones = __m512bh(_mm512_set1_epi16(0x3f80));
    for (int step = 0; step < kTokenSteps; step++) {
      Vec weights[kStepVectors];
#pragma GCC unroll 32
      for (int i = 0; i < kStepVectors; i++) {
        const int vector = step * kStepVectors + i;
        weights[i] = weight_of(masked(vector, fma(load(scores_ + vector * kLanes), scale, shift)));
        if (i % (kStepVectors / weight_steps(kColumns)) == 0) {
          if (prefetcher) {
            prefetcher->step();
          } else {
            prefetch_state(states, b,
                           step * weight_steps(kColumns) + i / (kStepVectors / weight_steps(kColumns)));
          }
        }
      }
      for_each_column<kColumns, 0, 1>(
          weights, [&](auto column, const Vec(&x)[2]) __attribute__((always_inline)) {
            constexpr int kRow = decltype(column)::value;
            const __m512bh rounded = _mm512_cvtne2ps_pbh(x[1], x[0]);
            _mm512_store_si512(weights_ + kRow * kTileTokens + step * kStepTokens, __m512i(rounded));
            if (kRow < b.num_rows) {
              float* const total = states + (b.first + kRow) * record_;
              float* const exact = exact_of(head, b.first + kRow);
              store(total, _mm512_dpbf16_ps(load(total), rounded, ones));
              store(exact, add(load(exact), add(x[0], x[1])));
            }
          });
    }
  }

  // The sums of a block will be asked for soon, and with many blocks they are not in the nearest cache.
  void prefetch_state(const float* states, const Block& b, int step) const {
    constexpr int kRows = kBlockRows / (kTokenSteps * weight_steps(kBlockRows));
    for (int r = step * kRows; r < (step + 1) * kRows && r < b.num_rows; r++) {
      const float* state = states + (b.first + r) * record_;
      for (int64_t i = 0; i < record_; i += kLanes) __builtin_prefetch(state + i, 1, 3);
    }
  }

  // Puts the rows whose maximum `grows` on the scale of the new one. Returns all maxima.
  __attribute__((noinline)) Vec grow(int head, Vec maximum, Vec greatest, __mmask16 grows, const Block& b,
                                     float* states) const {
    const Vec now = _mm512_mask_mov_ps(maximum, grows, greatest);
    store(maxima_of(head, b.first / kBlockRows), now);
    alignas(64) float decay[kLanes];
    store(decay, exp2(sub(maximum, now)));
    for (int r = 0; r < b.num_rows; r++) {
      if ((grows >> r & 1) == 0) continue;
      float* state = states + (b.first + r) * record_;
      const Vec factor = broadcast(decay[r]);
      for (int64_t i = 0; i < record_; i += kLanes) store(state + i, mul(load(state + i), factor));
      float* exact = exact_of(head, b.first + r);
      store(exact, mul(load(exact), factor));
    }
    return now;
  }

  // Right operands: a row of a tile register has two tokens of 16 dims. A 32-bit word of two tokens falls out
  // of unpacking, which leaves the dims in pair order. Tokens from num_tokens on are zeros.
  void pair_values(int head, const TileRows& tile, int num_tokens, Prefetcher& prefetcher) {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.value.stride_head;
    const int dim = p_.kv.value_head_dim;
    const auto row = [&](int token) {
      return token < num_tokens ? reinterpret_cast<const bf16*>(tile.value[token] + offset) : kZeroRow;
    };
    for (int t = 0; t < kTileTokens; t += 2) {
      const bf16 *x = row(t), *y = row(t + 1);
      bf16* out = value_tile_ + t / kStepTokens * value_tiles_ * kTileElements + t % kStepTokens * 16;
      for (int i = 0; i < dim; i += kStepDims, out += 2 * kTileElements) {
        const bool part = dim - i < kStepDims;
        const __m512i a = part ? load32(x + i, dim - i) : load32(x + i);
        const __m512i b = part ? load32(y + i, dim - i) : load32(y + i);
        _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(out + kTileElements, _mm512_unpackhi_epi16(a, b));
      }
      prefetcher.step();
    }
  }

  bool values_finite(int head, const TileRows& tile, int begin, int end) const {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.value.stride_head;
    const int dim = p_.kv.value_head_dim;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int t = begin; t < end; t++) {
      const bf16* x = reinterpret_cast<const bf16*>(tile.value[t] + offset);
      for (int i = 0; i < dim; i += kStepDims) {
        const __m512i y = dim - i < kStepDims ? load32(x + i, dim - i) : load32(x + i);
        if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(y, exponent), exponent)) return false;
      }
    }
    return true;
  }

  // Adds weights . values of the tile to the block's sums. Returns whether the paired values are still
  // those of the tile.
  bool add_values(int head, const TileRows& tile, int num_tokens, const Block& b, float* states,
                  Prefetcher* prefetcher) {
    if (b.least == num_tokens || values_finite(head, tile, b.least, num_tokens)) {
      multiply_values(b, b.blind, b.num_rows, states, prefetcher);
      return true;
    }
    // The diagonal, with something there that would make even a weight of 0 count: each token's rows by
    // themselves, with zeros in place of what they do not see.
    Prefetcher none;
    none.clear();
    for (int begin = b.blind, end; begin < b.num_rows; begin = end) {
      for (end = begin + 1; end < b.num_rows && b.seen[end] == b.seen[begin];) end++;
      pair_values(head, tile, b.seen[begin], none);
      multiply_values(b, begin, end, states, nullptr);
    }
    return false;
  }

  // Rows [begin, end) of a block. All steps, even those in which nothing is seen: else signs of zeros would
  // depend on the block.
  void multiply_values(const Block& b, int begin, int end, float* states, Prefetcher* prefetcher) {
    configure(b.columns, end - begin);
    load_tile<kWeightsA>(weights_ + begin * kTileTokens, kTileTokens * sizeof(bf16));
    load_tile<kWeightsB>(weights_ + begin * kTileTokens + kStepTokens, kTileTokens * sizeof(bf16));
    float* sums = states + (b.first + begin) * record_ + kStateHeader;
    const bf16* values = value_tile_;
    for (int i = 0; i < value_tiles_; i++, sums += 16, values += kTileElements) {
      load_tile<kSums>(sums, record_ * sizeof(float));
      load_tile<kLeft>(values, 64);
      multiply_bf16<kSums, kWeightsA, kLeft>();
      load_tile<kRight>(values + value_tiles_ * kTileElements, 64);
      multiply_bf16<kSums, kWeightsB, kRight>();
      store_tile<kSums>(sums, record_ * sizeof(float));
      if (prefetcher) prefetcher->step();
    }
  }

  const AttentionParams& p_;
  const AttentionTask& task_;
  const Rows rows_;
  const int num_blocks_, key_steps_, value_tiles_;
  const int64_t record_;
  const bool copies_keys_;
  int configured_columns_ = 0, configured_rows_ = 0;
  bf16* query_;       // [heads, blocks, key_steps, 16, columns, 2]
  float* maxima_;     // [heads, blocks, kLanes]: of row i % columns of the block
  float* exact_;      // [heads, rows, kLanes]: parts of the sums of weights before rounding
  bf16* key_tile_;    // [kTileTokens, key_steps * kStepDims]
  bf16* value_tile_;  // [kTokenSteps, value_tiles, 16, 16, 2]
  float* scores_;     // [kTileTokens, columns]
  bf16* weights_;     // [kBlockRows, kTileTokens]
};
static_assert(kTokenSteps == 2);
