// The products of attention on AMX tiles, for bf16: keys are the left operand of query . key just as they
// lie in the cache, values the right operand of weights . values after their tokens have been paired.
// Included inside the namespace of one instruction set, after attention_walk.inl and amx_tiles.inl.
//
// Weights are rounded to bf16 before they meet the values. The sum of the rounded ones is what the result is
// divided by, so that it is a true mean of values; the sum before rounding makes the LSE. Rows go in blocks
// of up to 16, each a column of the scores and a row of the weights. While a chunk is walked, the header of a
// state holds the first sum in kLanes parts.

constexpr int kStepDims = 32;  // head dims of a query . key step: one row of a tile register
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
static_assert(kMaxHeadDim <= 256);

// So many columns hold a block of rows: what divides kLanes.
constexpr int columns_for(int num_rows) {
  return num_rows <= 1 ? 1 : num_rows <= 2 ? 2 : num_rows <= 4 ? 4 : num_rows <= 8 ? 8 : 16;
}

// At so many places in turning kStepTokens scores of each row into weights something can be prefetched.
constexpr int weight_steps(int columns) { return columns == 1 ? 2 : 4; }

class AmxProducts {
 public:
  using Element = bf16;

  AmxProducts(const AttentionParams& p, const AttentionTask& task, const Rows& rows, Carver& carver)
      : p_(p),
        task_(task),
        rows_(rows),
        num_heads_(task.head_end - task.head_begin),
        num_blocks_((rows.count + kBlockRows - 1) / kBlockRows),
        key_steps_((p.kv.key_head_dim + kStepDims - 1) / kStepDims),
        value_tiles_((p.kv.value_head_dim + kStepDims - 1) / kStepDims * 2),
        record_(state_floats(p.kv.value_head_dim)),
        // Keys are loaded from where they are if 16 of them lie at one stride and are asked for once.
        copies_keys_(num_blocks_ > 1 || p.kv.block_size % kBlockRows != 0 ||
                     p.kv.key_head_dim % kStepDims != 0),
        defers_(num_blocks_ > 1 && num_heads_ == 1) {
    const int64_t blocks = int64_t(num_heads_) * num_blocks_;
    query_ = carver.take<bf16>(blocks * key_steps_ * kTileElements);
    maxima_ = carver.take<float>(blocks * kLanes);
    exact_ = carver.take<float>(blocks * kLanes);
    const int64_t num_tiles = defers_ ? kChunkTokens / kTileTokens : 1;
    keys_ = carver.take<bf16>(copies_keys_ ? num_tiles * key_tile_elements() : 0);
    values_ = carver.take<bf16>((num_tiles + 1) * value_tile_elements());
    scores_ = carver.take<float>(2 * kTileTokens * kBlockRows);
    weights_ = carver.take<bf16>(2 * kBlockRows * kTileTokens);
  }

  ~AmxProducts() {
    if (configured_rows_ != 0) release_tiles();
  }
  AmxProducts(const AmxProducts&) = delete;
  AmxProducts& operator=(const AmxProducts&) = delete;

  // Right operands: a row of a tile register has two dims of each of the block's query rows.
  void pack_query() {
    const int group = p_.num_q_heads / p_.kv.num_kv_heads;
    for (int head = 0; head < num_heads_; head++) {
      // The walk over rows runs one block ahead of the packing, and asks for what it passes.
      int token = task_.query_begin, g = 0;
      const bf16* rows[2][kBlockRows];
      const auto pass = [&](int block) {
        for (int r = 0; r < (block < num_blocks_ ? block_rows(block) : 0); r++) {
          const char* x = static_cast<const char*>(p_.query) + token * p_.query_stride_token +
                          (int64_t(task_.head_begin + head) * group + g) * p_.query_stride_head;
          for (int i = 0; i < key_steps_; i++) __builtin_prefetch(x + i * 64);
          rows[block % 2][r] = reinterpret_cast<const bf16*>(x);
          if (++g == group) g = 0, token++;
        }
      };
      pass(0);
      for (int block = 0; block < num_blocks_; block++) {
        pass(block + 1);
        pack_block(rows[block % 2], block_rows(block), reinterpret_cast<uint32_t*>(query_of(head, block)));
      }
    }
  }

  // Each product of tiles, each pair of tokens, each column of values, and some in between.
  int num_steps() const {
    if (defers_) return kTileTokens / 4 + kTileTokens / 2;
    const int key_products = copies_keys_ ? kTileTokens / 4 : key_steps_ * (kTileTokens / 16);
    const int columns = columns_for(block_rows(0));
    return key_products + kTokenSteps * weight_steps(columns) + kTileTokens / 2 + value_tiles_;
  }

  void open(int head, float* states) {
    for (int block = 0; block < num_blocks_; block++) {
      store(maxima_of(head, block), broadcast(-kInfinity));
      store(exact_of(head, block), zero());
    }
    for (int row = 0; row < rows_.count; row++) store(states + row * record_, zero());
  }

  void close(int head, float* states) {
    if (defers_)
      for (int block = 0; block < num_blocks_; block += 2) attend_chunk(head, block, states);
    deferred_tokens_ = 0;
    for (int row = 0; row < rows_.count; row++) {
      float* state = states + row * record_;
      const float total = sum(load(state));
      state[0] = maxima_of(head, row / kBlockRows)[row % kBlockRows];
      state[1] = total;
      state[2] = exact_of(head, row / kBlockRows)[row % kBlockRows];
    }
  }

  void attend_tile(int head, const TileRows& tile, int num_tokens, int position, float* states,
                   Prefetcher& prefetcher) {
    const int slot = defers_ ? deferred_tokens_ / kTileTokens : 0;
    bf16* const values = values_ + slot * value_tile_elements();
    if (copies_keys_) copy_keys(head, tile, num_tokens, keys_ + slot * key_tile_elements(), prefetcher);
    if (defers_) {
      pair_values(head, tile, num_tokens, values, prefetcher);
      if (deferred_tokens_ == 0) deferred_position_ = position;
      deferred_tokens_ += num_tokens;
      return;
    }
    for (int block = 0; block < num_blocks_; block++) {
      const Block b(*this, block, num_tokens, position);
      if (block == 0) {
        // What does not wait for scores comes between them and the weights.
        if (b.most > 0)
          score(head, b, copies_keys_ ? copied_keys(0) : keys_in_place(head, tile), &prefetcher);
        pair_values(head, tile, num_tokens, values, prefetcher);
        if (b.most <= 0) continue;
        weigh(head, b, states, &prefetcher);
        add_values(b, values, states, &prefetcher);
      } else if (b.most > 0) {
        attend_block(head, b, copied_keys(0), values, states, nullptr);
      }
    }
  }

 private:
  // A block of rows on a tile: how many tokens of it each row sees.
  struct Block {
    int index, first, num_rows, columns;
    int num_tokens;   // of the tile
    int blind;        // so many of the first rows see nothing
    int least, most;  // tokens that the first row after those sees, and the last
    int seen[kBlockRows];

    Block(const AmxProducts& products, int block, int num_tokens, int position)
        : index(block),
          first(block * kBlockRows),
          num_rows(products.block_rows(block)),
          columns(columns_for(num_rows)),
          num_tokens(num_tokens),
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

  float* exact_of(int head, int block) const {
    return exact_ + (int64_t(head) * num_blocks_ + block) * kLanes;
  }

  void pack_block(const bf16* const* rows, int num_rows, uint32_t* packed) const {
    const int dim = p_.kv.key_head_dim, columns = columns_for(num_rows);
    const __mmask16 kept = __mmask16((1u << columns) - 1);
    for (int i = 0; i < dim; i += kStepDims) {
      __m512i x[kBlockRows];
      for (int r = 0; r < kBlockRows; r++)
        x[r] = r >= num_rows         ? _mm512_setzero_si512()
               : dim - i < kStepDims ? load32(rows[r] + i, dim - i)
                                     : load32(rows[r] + i);
      if (columns > 1) transpose(x);  // one row is a column already
      const int num_stores = columns > 1 ? kBlockRows : 1, width = columns > 1 ? columns : kBlockRows;
      for (int k = 0; k < num_stores; k++, packed += width)
        _mm512_mask_storeu_epi32(packed, columns > 1 ? kept : 0xffff, x[k]);
    }
  }

  float* scores_of(const Block& b) const { return scores_ + b.index % 2 * kTileTokens * kBlockRows; }
  bf16* weights_of(const Block& b) const { return weights_ + b.index % 2 * kTileTokens * kBlockRows; }

  int64_t key_tile_elements() const { return kTileTokens * key_steps_ * kStepDims; }
  int64_t value_tile_elements() const { return kTokenSteps * value_tiles_ * kTileElements; }

  // Where the keys of a tile are, 16 at one stride.
  struct KeyRows {
    const char* const* rows;  // of each token, at `offset`; null = dense from `base` on
    int64_t offset;
    const char* base;
    int64_t stride;

    const char* operator[](int token) const { return rows ? rows[token] + offset : base + token * stride; }
  };
  KeyRows keys_in_place(int head, const TileRows& tile) const {
    return {tile.key, int64_t(task_.head_begin + head) * p_.kv.key.stride_head, nullptr,
            p_.kv.key.stride_token};
  }
  KeyRows copied_keys(int tile) const {
    return {nullptr, 0, reinterpret_cast<const char*>(keys_ + tile * key_tile_elements()), key_steps_ * 64};
  }

  // Two blocks of rows on all tiles of a deferred chunk. Each step is done for both before the next, so that
  // the second finds the tile's keys or values in the nearest cache.
  void attend_chunk(int head, int first_block, float* states) {
    const int num_blocks = first_block + 1 < num_blocks_ ? 2 : 1;
    for (int begin = 0; begin < deferred_tokens_; begin += kTileTokens) {
      const int left = deferred_tokens_ - begin, tile = begin / kTileTokens;
      const int num_tokens = left < kTileTokens ? left : kTileTokens;
      const Block blocks[2] = {
          Block(*this, first_block, num_tokens, deferred_position_ + begin),
          Block(*this, first_block + num_blocks - 1, num_tokens, deferred_position_ + begin)};
      const KeyRows keys = copied_keys(tile);
      const bf16* values = values_ + tile * value_tile_elements();
      for (int i = 0; i < num_blocks; i++)
        if (blocks[i].most > 0) score(head, blocks[i], keys, nullptr);
      for (int i = 0; i < num_blocks; i++)
        if (blocks[i].most > 0) weigh(head, blocks[i], states, nullptr);
      for (int i = 0; i < num_blocks; i++)
        if (blocks[i].most > 0) add_values(blocks[i], values, states, nullptr);
    }
  }

  // A block of rows on a tile.
  void attend_block(int head, const Block& b, const KeyRows& keys, const bf16* values, float* states,
                    Prefetcher* prefetcher) {
    score(head, b, keys, prefetcher);
    weigh(head, b, states, prefetcher);
    add_values(b, values, states, prefetcher);
  }

  void weigh(int head, const Block& b, float* states, Prefetcher* prefetcher) {
    if (b.blind > 0 || b.least < kTileTokens) {
      weigh_block<true>(head, b, states, prefetcher);
    } else {
      weigh_block<false>(head, b, states, prefetcher);
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

  void copy_keys(int head, const TileRows& tile, int num_tokens, bf16* out, Prefetcher& prefetcher) {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.key.stride_head;
    const int dim = p_.kv.key_head_dim;
    for (int t = 0; t < num_tokens; t++) {
      const bf16* x = reinterpret_cast<const bf16*>(tile.key[t] + offset);
      for (int i = 0; i < dim; i += kStepDims, out += kStepDims) {
        _mm512_store_si512(out, dim - i < kStepDims ? load32(x + i, dim - i) : load32(x + i));
      }
      if (t % 4 == 0) prefetcher.step();
    }
  }

  // scores[token][column] = query row . key, for whole 16s of tokens up to what the block sees at most.
  void score(int head, const Block& b, const KeyRows& keys, Prefetcher* prefetcher) {
    configure(b.columns, b.num_rows);
    const char* query = reinterpret_cast<const char*>(query_of(head, b.index));
    const int64_t query_stride = b.columns * 4, step_nbytes = 16 * query_stride;
    for (int token = 0; token < b.most; token += 32) {
      const bool two = token + 16 < b.most;
      const char* const first = keys[token];
      const char* const second = two ? keys[token + 16] : first;
      clear_tile<kScoresA>();
      clear_tile<kScoresB>();
      for (int step = 0; step < key_steps_; step++) {
        load_tile<kQuery>(query + step * step_nbytes, query_stride);
        load_tile<kLeft>(first + step * 64, keys.stride);
        multiply_bf16<kScoresA, kLeft, kQuery>();
        if (prefetcher) prefetcher->step();
        if (two) {
          load_tile<kRight>(second + step * 64, keys.stride);
          multiply_bf16<kScoresB, kRight, kQuery>();
          if (prefetcher) prefetcher->step();
        }
      }
      store_tile<kScoresA>(scores_of(b) + token * b.columns, query_stride);
      if (two) store_tile<kScoresB>(scores_of(b) + (token + 16) * b.columns, query_stride);
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
    const float* const scores = scores_of(b);
    bf16* const weights_out = weights_of(b);
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
      return masked(vector, mul(load(scores + vector * kLanes), scale));
    };

    Vec greatest = logits(0), other = logits(1);
#pragma GCC unroll 8
    for (int i = 2; i < kTokenSteps * kStepVectors; i += 2) {
      greatest = max(greatest, logits(i));
      other = max(other, logits(i + 1));
    }
    greatest = max_of_column<kColumns>(max(greatest, other));
    Vec maximum = load(maxima_of(head, b.index));
    const __mmask16 grows = _mm512_cmp_ps_mask(greatest, add(maximum, broadcast(kHeadroom)), _CMP_GT_OQ);
    if (grows) maximum = grow(head, maximum, greatest, grows, b, states);
    const Vec shift = _mm512_mask_sub_ps(
        zero(), _mm512_cmp_ps_mask(maximum, broadcast(-kInfinity), _CMP_NEQ_UQ), zero(), maximum);

    Vec exact = load(exact_of(head, b.index));
    const __m512bh ones = __m512bh(_mm512_set1_epi16(0x3f80));
    for (int step = 0; step < kTokenSteps; step++) {
      Vec weights[kStepVectors];
#pragma GCC unroll 32
      for (int i = 0; i < kStepVectors; i++) {
        const int vector = step * kStepVectors + i;
        weights[i] = weight_of(masked(vector, add(mul(load(scores + vector * kLanes), scale), shift)));
        if (i % (kStepVectors / weight_steps(kColumns)) == 0) {
          if (prefetcher) {
            prefetcher->step();
          } else {
            prefetch_state(states, b,
                           step * weight_steps(kColumns) + i / (kStepVectors / weight_steps(kColumns)));
          }
        }
      }
      exact = add(exact, sum_of_column<kColumns>(weights));
      const auto take = [&](int row, __m512i rounded) __attribute__((always_inline)) {
        _mm512_store_si512(weights_out + row * kTileTokens + step * kStepTokens, rounded);
        if (row >= b.num_rows) return;
        float* const total = states + (b.first + row) * record_;
        store(total, _mm512_dpbf16_ps(load(total), __m512bh(rounded), ones));
      };
      if constexpr (kColumns == kBlockRows) {
        __m512i rounded[kBlockRows];
        round_transposed(weights, rounded);
#pragma GCC unroll 16
        for (int row = 0; row < kBlockRows; row++) take(row, rounded[row]);
      } else {
        for_each_column<kColumns, 0, 1>(
            weights, [&](auto column, const Vec(&x)[2]) __attribute__((always_inline)) {
              take(decltype(column)::value, __m512i(_mm512_cvtne2ps_pbh(x[1], x[0])));
            });
      }
    }
    store(exact_of(head, b.index), exact);
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
    store(maxima_of(head, b.index), now);
    alignas(64) float decay[kLanes];
    const Vec factors = _mm512_mask_mov_ps(broadcast(1.0f), grows, exp2(sub(maximum, now)));
    store(decay, factors);
    store(exact_of(head, b.index), mul(load(exact_of(head, b.index)), factors));
    for (int r = 0; r < b.num_rows; r++) {
      if ((grows >> r & 1) == 0) continue;
      float* state = states + (b.first + r) * record_;
      const Vec factor = broadcast(decay[r]);
      for (int64_t i = 0; i < record_; i += kLanes) store(state + i, mul(load(state + i), factor));
    }
    return now;
  }

  // Right operands: a row of a tile register has two tokens of 16 dims. A 32-bit word of two tokens falls out
  // of unpacking, which leaves the dims in pair order. Tokens from num_tokens on are zeros.
  void pair_values(int head, const TileRows& tile, int num_tokens, bf16* paired, Prefetcher& prefetcher) {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.value.stride_head;
    const int dim = p_.kv.value_head_dim;
    const auto row = [&](int token) {
      return token < num_tokens ? reinterpret_cast<const bf16*>(tile.value[token] + offset) : kZeroRow;
    };
    // Zeros that are there already, from a head before, need not be written again.
    const int end = defers_ || filled_ > num_tokens ? kTileTokens : num_tokens;
    filled_ = num_tokens;
    for (int t = 0; t < end; t += 2) {
      const bf16 *x = row(t), *y = row(t + 1);
      bf16* out = paired + t / kStepTokens * value_tiles_ * kTileElements + t % kStepTokens * 16;
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

  // 16-bit words of a row of a value tile, a pair of tokens from 2 * pair on, that belong to tokens >= begin.
  static __mmask32 words_from(int begin, int pair) {
    return begin <= 2 * pair ? ~0u : begin == 2 * pair + 1 ? 0xaaaaaaaau : 0u;
  }

  // Whether no value of the tokens from `begin` on is infinite or NaN.
  bool values_finite(const bf16* values, int begin) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for (int pair = begin / 2; pair < kTileTokens / 2; pair++) {
      const bf16* row = values + pair / 16 * value_tiles_ * kTileElements + pair % 16 * 32;
      for (int i = 0; i < value_tiles_; i++, row += kTileElements)
        found |= _mm512_mask_cmpeq_epi16_mask(words_from(begin, pair),
                                              _mm512_and_si512(_mm512_load_si512(row), exponent), exponent);
    }
    return found == 0;
  }

  // The values of a tile with zeros for the tokens from `begin` on.
  const bf16* cut_values(const bf16* values, int begin) {
    bf16* const cut = values_ + (defers_ ? kChunkTokens / kTileTokens : 1) * value_tile_elements();
    for (int pair = 0; pair < kTileTokens / 2; pair++) {
      const int64_t at = int64_t(pair / 16) * value_tiles_ * kTileElements + pair % 16 * 32;
      for (int64_t i = at; i < at + value_tiles_ * kTileElements; i += kTileElements)
        _mm512_store_si512(cut + i,
                           _mm512_maskz_mov_epi16(~words_from(begin, pair), _mm512_load_si512(values + i)));
    }
    return cut;
  }

  // Adds weights . values of the tile to the block's sums.
  void add_values(const Block& b, const bf16* values, float* states, Prefetcher* prefetcher) {
    if (b.least == b.num_tokens || values_finite(values, b.least))
      return multiply_values(b, b.blind, b.num_rows, values, states, prefetcher);
    // The diagonal, with something there that would make even a weight of 0 count: each token's rows by
    // themselves, with zeros in place of what they do not see.
    for (int begin = b.blind, end; begin < b.num_rows; begin = end) {
      for (end = begin + 1; end < b.num_rows && b.seen[end] == b.seen[begin];) end++;
      multiply_values(b, begin, end, cut_values(values, b.seen[begin]), states, nullptr);
    }
  }

  // Rows [begin, end) of a block. All steps, even those in which nothing is seen: else signs of zeros would
  // depend on the block.
  void multiply_values(const Block& b, int begin, int end, const bf16* values, float* states,
                       Prefetcher* prefetcher) {
    configure(b.columns, end - begin);
    load_tile<kWeightsA>(weights_of(b) + begin * kTileTokens, kTileTokens * sizeof(bf16));
    load_tile<kWeightsB>(weights_of(b) + begin * kTileTokens + kStepTokens, kTileTokens * sizeof(bf16));
    float* sums = states + (b.first + begin) * record_ + kStateHeader;
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
  const int num_heads_, num_blocks_, key_steps_, value_tiles_;
  const int64_t record_;
  const bool copies_keys_;
  const bool defers_;  // to the end of a chunk, all of which is copied first: then a block stays in the cache
  int configured_columns_ = 0, configured_rows_ = 0;
  int filled_ = kTileTokens;  // tokens of the first value tile that are not known to be zero
  int deferred_tokens_ = 0, deferred_position_ = 0;  // of the chunk
  bf16* query_;                                      // [heads, blocks, key_steps, 16, columns, 2]
  float* maxima_;  // [heads, blocks, kLanes]: of row i % columns of the block
  float* exact_;   // [heads, blocks, kLanes]: sums of weights before rounding, of the same rows
  bf16* keys_;     // [tiles, kTileTokens, key_steps * kStepDims]
  bf16* values_;   // [tiles + 1, kTokenSteps, value_tiles, 16, 16, 2]: the last one is cut_values()'s
  float* scores_;  // [2, kTileTokens, columns], of even and odd blocks
  bf16* weights_;  // [2, kBlockRows, kTileTokens]
};
static_assert(kTokenSteps == 2);
