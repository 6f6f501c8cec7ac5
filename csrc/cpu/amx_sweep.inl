// Attention on AMX tiles for up to kBlockRows rows of a KV head, for bf16: decode. All heads of a chunk go
// together, tile by tile of keys and then of values, so that each block of the cache is one contiguous sweep.
// Included inside the namespace of one instruction set, after amx_operands.inl.

class SweepProducts {
 public:
  using Element = bf16;

  SweepProducts(const AttentionParams& p, const AttentionTask& task, const Rows& rows, Carver& carver)
      : p_(p),
        task_(task),
        rows_(rows),
        num_heads_(task.head_end - task.head_begin),
        columns_(columns_for(rows.count)),
        key_steps_(steps_of(p.kv.key_head_dim, kStepDims)),
        value_pairs_(steps_of(p.kv.value_head_dim, kStepDims)),
        record_(state_floats(p.kv.value_head_dim)),
        // Keys are loaded from where they are if 16 of them lie at one stride.
        copies_keys_(p.kv.block_size % 16 != 0 || p.kv.key_head_dim % kStepDims != 0) {
    query_ = carver.take<bf16>(int64_t(num_heads_) * query_elements());
    keys_ = carver.take<bf16>(copies_keys_ ? kTileTokens * key_steps_ * kStepDims : 0);
    bf16* const values = carver.take<bf16>(int64_t(kTileTokens) * value_pairs_ * kStepDims);
    values_ = {values, int64_t(value_pairs_) * 2 * kTileElements, 2 * kTileElements, p.kv.value_head_dim};
    scores_ = carver.take<float>(int64_t(num_heads_) * kChunkTokens * columns_);
    weights_ = carver.take<bf16>(int64_t(num_heads_) * kChunkTokens * columns_);
  }

  ~SweepProducts() {
    if (configured_rows_ != 0) release_tiles();
  }
  SweepProducts(const SweepProducts&) = delete;
  SweepProducts& operator=(const SweepProducts&) = delete;

  void start(const PageWalk& walk, int first_key, int end_key) {
    prefetcher_.clear();
    walk.prefetch_keys(first_key, tile_end(first_key, end_key), prefetcher_);
    for (int head = 0; head < num_heads_; head++)
      pack_queries(p_, task_, head, 0, rows_.count, columns_, query_ + head * query_elements());
  }

  void attend_chunk(const PageWalk& walk, int begin, int end, int end_key, float* states) {
    TileRows tile;
    // Goes on to the tile [at, next): what `ask` puts on the prefetcher's list is spread over num_steps for
    // each head meanwhile.
    const auto enter = [&](int at, int next, int num_steps, auto&& ask) {
      prefetcher_.drain();
      walk.rows(at, next, tile);
      prefetcher_.clear();
      ask();
      prefetcher_.pace(num_heads_ * num_steps);
    };
    const auto ask_for_keys = [&](int from, int end) {
      walk.prefetch_keys(from, tile_end(from, end), prefetcher_);
    };
    const auto ask_for_values = [&](int from) {
      walk.prefetch_values(from, tile_end(from, end), prefetcher_);
    };

    for (int at = begin, next; at < end; at = next) {
      next = tile_end(at, end);
      enter(at, next, key_steps_ * steps_of(next - at, 16),
            [&] { next < end ? ask_for_keys(next, end) : ask_for_values(begin); });
      for (int head = 0; head < num_heads_; head++) score(head, tile, at - begin);
    }
    const Sight sight(rows_.visible, 0, rows_.count, begin, end - begin);
    for (int at = begin, next; at < end; at = next) {
      next = tile_end(at, end);
      const int weigh_steps = at == begin ? steps_of(end - begin, kStepTokens) : 0;
      const int pair_steps = steps_of(next - at, kStepTokens) * kStepTokens / 2;
      enter(at, next, weigh_steps * weigh_slots(columns_) + pair_steps,
            [&] { next < end ? ask_for_values(next) : ask_for_keys(end, end_key); });
      const Sight here(rows_.visible, 0, rows_.count, at, next - at);
      for (int head = 0; head < num_heads_; head++) {
        float* const state = states + head * rows_.count * record_;
        if (at == begin) {
          clear_states(state);
          weigh_head(head, sight, weigh_steps, state);
        }
        add_values(head, tile, here, at - begin, next - at, state);
      }
    }
  }

 private:
  // What the tile registers hold. Each line has one shape.
  // clang-format off
  enum TileUse {
    kScoresA, kScoresB, kQuery,
    kLeft, kRight,
    kWeightsA, kWeightsB, kSums,
  };
  // clang-format on

  // Gives the tile registers their shapes, for products of `num_rows` rows with values.
  void configure(int num_rows) {
    if (num_rows == configured_rows_) return;
    TileConfig config;
    for (int tile = kScoresA; tile <= kQuery; tile++) config.set(tile, 16, columns_ * 4);
    for (int tile = kLeft; tile <= kRight; tile++) config.set(tile, 16, 64);
    for (int tile = kWeightsA; tile <= kSums; tile++) config.set(tile, num_rows, 64);
    load_tile_config(config);
    configured_rows_ = num_rows;
  }

  int64_t query_elements() const { return int64_t(key_steps_) * 2 * kBlockRows * columns_; }
  float* scores_of(int head) const { return scores_ + int64_t(head) * kChunkTokens * columns_; }
  bf16* weights_of(int head) const { return weights_ + int64_t(head) * kChunkTokens * columns_; }

  // scores[token][column] = query row . key, for whole 16s of the tile's tokens.
  void score(int head, const TileRows& tile, int token) {
    configure(rows_.count);
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.key.stride_head;
    if (copies_keys_) copy_keys(tile.key, offset, tile.num_tokens, p_.kv.key_head_dim, keys_);
    const int64_t key_stride = copies_keys_ ? 64 : p_.kv.key.stride_token;
    const int64_t step_nbytes = copies_keys_ ? kTileElements * sizeof(bf16) : 64;
    const auto keys_at = [&](int t) {
      return copies_keys_
                 ? reinterpret_cast<const char*>(keys_ + int64_t(t / 16) * key_steps_ * kTileElements)
                 : tile.key[t] + offset;
    };
    const bf16* const query = query_ + head * query_elements();
    const int64_t query_stride = columns_ * 4;
    float* const scores = scores_of(head) + token * columns_;
    for (int t = 0; t < tile.num_tokens; t += 32) {
      const bool two = t + 16 < tile.num_tokens;
      const char* const first = keys_at(t);
      const char* const second = two ? keys_at(t + 16) : first;
      clear_tile<kScoresA>();
      clear_tile<kScoresB>();
      for (int step = 0; step < key_steps_; step++) {
        load_tile<kQuery>(query + step * 2 * kBlockRows * columns_, query_stride);
        load_tile<kLeft>(first + step * step_nbytes, key_stride);
        multiply_bf16<kScoresA, kLeft, kQuery>();
        prefetcher_.step();
        if (two) {
          load_tile<kRight>(second + step * step_nbytes, key_stride);
          multiply_bf16<kScoresB, kRight, kQuery>();
          prefetcher_.step();
        }
      }
      store_tile<kScoresA>(scores + t * columns_, query_stride);
      if (two) store_tile<kScoresB>(scores + (t + 16) * columns_, query_stride);
    }
  }

  void weigh_head(int head, const Sight& sight, int num_steps, float* states) {
    RowSums sums;
    const auto call = [&](auto columns) {
      weigh<decltype(columns)::value>(scores_of(head), sight, num_steps, p_.scale, weights_of(head), sums,
                                      [&](auto part) {
                                        if (decltype(part)::value % kWeighParts == 0) prefetcher_.step();
                                      });
    };
    switch (columns_) {
      case 1: call(Constant<1>{}); break;
      case 2: call(Constant<2>{}); break;
      case 4: call(Constant<4>{}); break;
      case 8: call(Constant<8>{}); break;
      default: call(Constant<16>{}); break;
    }
    store_headers(sums, rows_.count, states, record_);
  }

  // Adds weights . values of a tile to the rows' sums.
  void add_values(int head, const TileRows& tile, const Sight& sight, int token, int num_tokens,
                  float* states) {
    const int64_t offset = int64_t(task_.head_begin + head) * p_.kv.value.stride_head;
    const int num_steps = steps_of(num_tokens, kStepTokens);
    for (int step = 0; step < num_steps; step++)
      values_.fill(step, tile.value + step * kStepTokens, offset, num_tokens - step * kStepTokens,
                   [&] { prefetcher_.step(); });
    const bf16* const weights = weights_of(head) + token * columns_;
    if (!must_cut(sight, values_, num_tokens)) return multiply(weights, num_steps, 0, rows_.count, states);
    sight.for_each_run([&](int begin, int end) {
      const int seen = sight.seen[begin];
      if (seen == 0) return;
      values_.clear(seen, num_tokens);
      multiply(weights, num_steps, begin, end, states);
    });
  }

  // Rows [begin, end).
  void multiply(const bf16* weights, int num_steps, int begin, int end, float* states) {
    configure(end - begin);
    weights += begin * kStepTokens;
    load_tile<kWeightsA>(weights, 64);
    if (num_steps == 2) load_tile<kWeightsB>(weights + columns_ * kStepTokens, 64);
    const int64_t stride = record_ * sizeof(float);
    float* sums = states + begin * record_ + kStateHeader;
    for (int i = 0; i < 2 * value_pairs_; i++, sums += 16) {
      const bf16* const values = values_.tiles(0, 0) + i * kTileElements;
      load_tile<kSums>(sums, stride);
      load_tile<kLeft>(values, 64);
      multiply_bf16<kSums, kWeightsA, kLeft>();
      if (num_steps == 2) {
        load_tile<kRight>(values + values_.step_stride, 64);
        multiply_bf16<kSums, kWeightsB, kRight>();
      }
      store_tile<kSums>(sums, stride);
    }
  }

  void clear_states(float* states) const {
    for (int row = 0; row < rows_.count; row++) clear_state(states + row * record_, record_);
  }

  const AttentionParams& p_;
  const AttentionTask& task_;
  const Rows rows_;
  const int num_heads_, columns_, key_steps_, value_pairs_;
  const int64_t record_;
  const bool copies_keys_;
  int configured_rows_ = 0;
  Prefetcher prefetcher_;
  bf16* query_;          // [heads, key_steps, 16, columns, 2]
  bf16* keys_;           // of a tile, copied
  PairedValues values_;  // of a tile
  float* scores_;        // [heads, kChunkTokens, columns]
  bf16* weights_;        // [heads, kChunkSteps, columns, kStepTokens]
};
static_assert(kTileTokens == 2 * kStepTokens);
