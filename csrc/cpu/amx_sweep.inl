// Attention on AMX tiles for up to kBlockRows rows of a KV head, for bf16 queries: decode. All heads of a
// chunk go together, step by step of keys and then of values, so that each block of the cache is one
// contiguous sweep. Included inside the namespace of one instruction set, after amx_operands.inl.

class SweepProducts {
 public:
  using Element = bf16;

  SweepProducts(const AttentionParams& p, const AttentionTask& task, const Rows& rows, Carver& carver)
      : p_(p),
        task_(task),
        rows_(rows),
        rule_(p),
        scales_(p.kv, carver),
        num_heads_(task.head_end - task.head_begin),
        columns_(columns_for(rows.count)),
        // Blocks of 8 seldom follow one another at their tokens' stride.
        key_rows_(p.kv.block_size % 16 == 8 ? 8 : 16),
        key_steps_(steps_of(p.kv.key_head_dim, kStepDims)),
        last_dims_(p.kv.key_head_dim % kStepDims),
        value_pairs_(steps_of(p.kv.value_head_dim, kStepDims)),
        record_(state_floats(p.kv.value_head_dim)) {
    tiles_ = carver.take<TileRows>(kChunkSteps + 1);
    query_ = carver.take<bf16>(int64_t(num_heads_) * query_elements());
    for (bf16*& keys : keys_) keys = carver.take<bf16>(int64_t(kStepTokens) * key_steps_ * kStepDims);
    const auto paired = [&] {
      return PairedValues{carver.take<bf16>(int64_t(kStepTokens) * value_pairs_ * kStepDims), 0,
                          2 * kTileElements, p.kv.value_head_dim};
    };
    values_[0] = paired();
    values_[1] = paired();
    kept_ = paired();
    scores_ = carver.take<float>(int64_t(num_heads_) * kChunkTokens * columns_);
    weights_ = carver.take<bf16>(int64_t(num_heads_) * kChunkTokens * columns_);
  }

  ~SweepProducts() {
    if (configured_ != 0) release_tiles();
  }
  SweepProducts(const SweepProducts&) = delete;
  SweepProducts& operator=(const SweepProducts&) = delete;

  void start(const PageWalk&, int, int) {
    for (int head = 0; head < num_heads_; head++)
      pack_queries(p_, task_, head, 0, rows_.count, columns_, query_ + head * query_elements());
  }

  void attend_chunk(const PageWalk& walk, int begin, int end, int, float* states) {
    configure(kForKeys);
    const int num_steps = steps_of(end - begin, kStepTokens);
    for (int at = begin, step = 0; step <= num_steps; at = tile_end(at, end), step++)
      walk.rows(at, tile_end(at, end), tiles_[step]);
    for (int step = 0; step < num_steps; step++) {
      key_stride_ = key_stride(p_.kv, tiles_[step], key_rows_);
      for (int head = 0; head < num_heads_; head++) score(head, step);
      pending_keys_.finish();
    }
    const Sight sight(rows_, 0, rows_.count, begin, end - begin);
    prefetch_values(0, tiles_[0]);
    for (int head = 0; head < num_heads_; head++) {
      float* const state = states + head * rows_.count * record_;
      clear_states(state);
      scales_.take(walk, task_.head_begin + head, begin, end);
      weigh_head(head, begin, sight, num_steps, state);
    }
    for (int step = 0; step < num_steps; step++) {
      const Sight here(rows_, 0, rows_.count, begin + step * kStepTokens, tiles_[step].num_tokens);
      for (int head = 0; head < num_heads_; head++)
        add_values(head, step, here, states + head * rows_.count * record_);
    }
    pending_.finish();
  }

 private:
  // What the tile registers hold. Each line has one shape.
  // clang-format off
  enum TileUse {
    kScoresA, kScoresB,
    kQuery,
    kKeysA, kKeysB,
    kValues,
    kWeights, kSums,
    // Until the values' turn: what is past whole kStepDims.
    kLastQuery = kValues,
    kLastKeysA = kWeights, kLastKeysB = kSums,
  };
  // clang-format on

  // Gives the tile registers their shapes, for products with keys, or of `num_rows` rows with values.
  static constexpr int kForKeys = -1;
  void configure(int num_rows) {
    if (num_rows == configured_) return;
    TileConfig config;
    for (int tile = kScoresA; tile <= kScoresB; tile++) config.set(tile, key_rows_, columns_ * 4);
    config.set(kQuery, 16, columns_ * 4);
    for (int tile = kKeysA; tile <= kKeysB; tile++) config.set(tile, key_rows_, 64);
    if (num_rows != kForKeys) {
      config.set(kValues, 16, 64);
      for (int tile = kWeights; tile <= kSums; tile++) config.set(tile, num_rows, 64);
    } else if (last_dims_ != 0) {
      config.set(kLastQuery, last_dims_ / 2, columns_ * 4);
      for (int tile = kLastKeysA; tile <= kLastKeysB; tile++) config.set(tile, key_rows_, last_dims_ * 2);
    }
    load_tile_config(config);
    configured_ = num_rows;
  }

  int64_t key_offset(int head) const { return (task_.head_begin + head) * p_.kv.key.stride_head; }
  int64_t value_offset(int head) const { return (task_.head_begin + head) * p_.kv.value.stride_head; }
  void prefetch_keys(int head, const TileRows& tile) {
    prefetcher_.enter(tile.key, tile.num_tokens, key_offset(head),
                      row_nbytes(p_.kv.dtype, p_.kv.key_head_dim));
  }
  void prefetch_values(int head, const TileRows& tile) {
    prefetcher_.enter(tile.value, tile.num_tokens, value_offset(head),
                      row_nbytes(p_.kv.dtype, p_.kv.value_head_dim));
  }
  int64_t query_elements() const { return int64_t(key_steps_) * 2 * kBlockRows * columns_; }
  float* scores_of(int head) const { return scores_ + int64_t(head) * kChunkTokens * columns_; }
  bf16* weights_of(int head) const { return weights_ + int64_t(head) * kChunkTokens * columns_; }

  // Some dims of query row . key for one group of keys or two.
  template <int kRight, int kLeftA, int kLeftB>
  __attribute__((always_inline)) static void multiply_keys(const bf16* query, int64_t query_stride,
                                                           const char* a, const char* b, int64_t stride,
                                                           bool two) {
    load_tile<kRight>(query, query_stride);
    load_tile<kLeftA>(a, stride);
    multiply_bf16<kScoresA, kLeftA, kRight>();
    if (!two) return;
    load_tile<kLeftB>(b, stride);
    multiply_bf16<kScoresB, kLeftB, kRight>();
  }

  // scores[token][column] = query row . key, for whole groups of kRows of a step's tokens: two groups at a
  // time, kStepDims dims each.
  struct KeyWork {
    const char* keys;                           // of the first group
    int64_t stride, step_nbytes, group_nbytes;  // to the next key, dims, group
    const bf16* query;
    int query_elements, columns;  // of a step
    float* scores;
    int64_t group_scores;
    int groups_left, num_steps, step = 0;

    void next() {
      if (groups_left <= 0) return;
      const bool two = groups_left > 1;
      if (step == 0) {
        clear_tile<kScoresA>();
        clear_tile<kScoresB>();
      }
      const int64_t query_stride = columns * 4;
      const char* const from = keys + step * step_nbytes;
      multiply_keys<kQuery, kKeysA, kKeysB>(query + step * query_elements, query_stride, from,
                                            from + group_nbytes, stride, two);
      if (++step < num_steps) return;
      store_tile<kScoresA>(scores, query_stride);
      if (two) store_tile<kScoresB>(scores + group_scores, query_stride);
      step = 0;
      groups_left -= 2;
      keys += 2 * group_nbytes;
      scores += 2 * group_scores;
    }
    void finish() {
      while (groups_left > 0) next();
    }
  };

  // The scores of a step's tokens. Keys are copied while those of the head before are multiplied: what has
  // just been stored cannot be loaded into a tile register at once.
  void score(int head, int step) {
    const TileRows &tile = tiles_[step], &next = tiles_[step + 1];
    const int64_t offset = key_offset(head);
    const bf16* const query = query_ + head * query_elements();
    float* const scores = scores_of(head) + step * kStepTokens * columns_;
    // Keys that are not copied come early enough by themselves: loads of tile registers run far ahead.
    if (key_stride_ != 0) return score_in_place(tile, offset, query, scores);
    turn_ ^= 1;
    head + 1 < num_heads_ ? prefetch_keys(head + 1, tile) : prefetch_keys(0, next);
    with_element(p_.kv.dtype, [&](auto element) {
      copy_keys<decltype(element)>(tile.key, offset, tile.num_tokens, p_.kv.key_head_dim, key_rows_,
                                   keys_[turn_], [&](int t) {
                                     prefetcher_.step();
                                     if (t % 4 == 0) pending_keys_.next();
                                   });
    });
    pending_keys_.finish();
    const int64_t step_nbytes = key_rows_ * 64;
    pending_keys_ = {.keys = reinterpret_cast<const char*>(keys_[turn_]),
                     .stride = 64,
                     .step_nbytes = step_nbytes,
                     .group_nbytes = key_steps_ * step_nbytes,
                     .query = query,
                     .query_elements = 2 * kBlockRows * columns_,
                     .columns = columns_,
                     .scores = scores,
                     .group_scores = int64_t(key_rows_) * columns_,
                     .groups_left = steps_of(tile.num_tokens, key_rows_),
                     .num_steps = key_steps_};
  }

  void score_in_place(const TileRows& tile, int64_t offset, const bf16* query, float* scores) {
    const int64_t query_stride = columns_ * 4;
    for (int t = 0; t < tile.num_tokens; t += 2 * key_rows_) {
      const bool two = tile.num_tokens - t > key_rows_;
      const char *const a = tile.key[t] + offset, *const b = two ? tile.key[t + key_rows_] + offset : a;
      clear_tile<kScoresA>();
      clear_tile<kScoresB>();
      int step = 0;
      for (; step < p_.kv.key_head_dim / kStepDims; step++)
        multiply_keys<kQuery, kKeysA, kKeysB>(query + step * 2 * kBlockRows * columns_, query_stride,
                                              a + step * 64, b + step * 64, key_stride_, two);
      if (last_dims_ != 0)
        multiply_keys<kLastQuery, kLastKeysA, kLastKeysB>(query + step * 2 * kBlockRows * columns_,
                                                          query_stride, a + step * 64, b + step * 64,
                                                          key_stride_, two);
      store_tile<kScoresA>(scores + t * columns_, query_stride);
      if (two) store_tile<kScoresB>(scores + (t + key_rows_) * columns_, query_stride);
    }
  }

  void weigh_head(int head, int position, const Sight& sight, int num_steps, float* states) {
    RowSums sums;
    const int group = p_.num_q_heads / p_.kv.num_kv_heads, kv_head = task_.head_begin + head;
    const LogitRule rule = rule_.of_scores_short_of(scales_.key_factor(kv_head));
    const auto call = [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      if (scales_.key_varies()) scales_.template scale_scores<kColumns>(0, num_steps, scores_of(head));
      if (!rule.plain())
        apply_rule<kColumns>(rule, rows_, 0, rows_.count, kv_head * group, group, position, 0, num_steps,
                             scores_of(head));
      with_bool(scales_.value_varies(), [&](auto scaled) {
        weigh<kColumns, decltype(scaled)::value>(scores_of(head), sight, 0, num_steps, rule.factor(),
                                                 scales_.of_values(), weights_of(head), sums, [&](auto part) {
                                                   if (decltype(part)::value == 0) prefetcher_.step();
                                                 });
      });
    };
    switch (columns_) {
      case 1: call(Constant<1>{}); break;
      case 2: call(Constant<2>{}); break;
      case 4: call(Constant<4>{}); break;
      case 8: call(Constant<8>{}); break;
      default: call(Constant<16>{}); break;
    }
    store_headers(sums, rows_.count, scales_.value_inverse(kv_head), states, record_);
  }

  // weights . values of a step, to be added to the sums of some rows, 16 dims at a time.
  struct ValueWork {
    const bf16 *weights, *values;
    float* sums;
    int64_t record;
    int tiles_left, num_tiles;  // of 16 dims

    void next() {
      if (tiles_left == 0) return;
      if (tiles_left == num_tiles) load_tile<kWeights>(weights, 64);
      load_tile<kSums>(sums, record * sizeof(float));
      load_tile<kValues>(values, 64);
      multiply_bf16<kSums, kWeights, kValues>();
      store_tile<kSums>(sums, record * sizeof(float));
      sums += 16;
      values += kTileElements;
      tiles_left--;
    }

    void finish() {
      while (tiles_left > 0) next();
    }
  };

  // Of rows [begin, end).
  ValueWork value_work(const PairedValues& values, const bf16* weights, int begin, int end, float* states) {
    configure(end - begin);
    return {weights + begin * kStepTokens,
            values.base,
            states + begin * record_ + kStateHeader,
            record_,
            2 * value_pairs_,
            2 * value_pairs_};
  }

  // Pairs a head's values of a step while those of the head before are multiplied: what has just been stored
  // cannot be loaded into a tile register at once.
  void add_values(int head, int step, const Sight& sight, float* states) {
    const TileRows &tile = tiles_[step], &next = tiles_[step + 1];
    turn_ ^= 1;
    head + 1 < num_heads_ ? prefetch_values(head + 1, tile) : prefetch_values(0, next);
    const PairedValues& values = values_[turn_];
    with_element(p_.kv.dtype, [&](auto element) {
      values.fill<decltype(element)>(0, tile.value, value_offset(head), tile.num_tokens, [&](int t) {
        prefetcher_.step();
        prefetcher_.step();
        if (t % 4 == 0) pending_.next();
      });
    });
    pending_.finish();
    const bf16* const weights = weights_of(head) + step * kStepTokens * columns_;
    if (!must_cut(values, 0, 1, [&](int part) { return sight.hidden(part); })) {
      pending_ = value_work(values, weights, 0, rows_.count, states);
      return;
    }
    sight.for_each_group([&](int begin, int end) {
      kept_.copy_kept(values, 0, word_of(sight, 0, begin));
      value_work(kept_, weights, begin, end, states).finish();
    });
  }

  void clear_states(float* states) const {
    for (int row = 0; row < rows_.count; row++) clear_state(states + row * record_, record_);
  }

  const AttentionParams& p_;
  const AttentionTask& task_;
  const Rows rows_;
  const LogitRule rule_;
  ChunkScales scales_;
  const int num_heads_, columns_;
  const int key_rows_;  // tokens of a left operand of query . key
  const int key_steps_, last_dims_, value_pairs_;
  const int64_t record_;
  int configured_ = 0;  // for what; 0: not at all
  RowPrefetcher prefetcher_;
  TileRows* tiles_;         // of the chunk, and one without tokens after them
  bf16* query_;             // [heads, key_steps, 16, columns, 2]
  int64_t key_stride_ = 0;  // of the step at hand; 0: its keys are copied
  bf16* keys_[2];           // of a step, copied, by turns
  KeyWork pending_keys_{};
  PairedValues values_[2];  // of a step, by turns
  PairedValues kept_;       // those that some rows see
  int turn_ = 0;
  ValueWork pending_{};
  float* scores_;  // [heads, kChunkTokens, columns]
  bf16* weights_;  // [heads, kChunkSteps, columns, kStepTokens]
};
