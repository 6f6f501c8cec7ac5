// Attention on AMX tiles for many rows of a KV head, for bf16 queries: prefill. A chunk's keys and values are
// copied once, as tile registers want them; then two blocks of rows at a time meet the whole chunk, so that
// each tile that is loaded makes two products and sums stay in tile registers. Included inside the namespace
// of one instruction set, after amx_operands.inl.

class BlockProducts {
 public:
  using Element = bf16;

  BlockProducts(const AttentionParams& p, const AttentionTask& task, const Rows& rows, Carver& carver)
      : p_(p),
        task_(task),
        rows_(rows),
        rule_(p),
        scales_(p.kv, carver),
        num_heads_(task.head_end - task.head_begin),
        num_blocks_(steps_of(rows.count, kBlockRows)),
        key_steps_(steps_of(p.kv.key_head_dim, kStepDims)),
        value_pairs_(steps_of(p.kv.value_head_dim, kStepDims)),
        record_(state_floats(p.kv.value_head_dim)) {
    query_ = carver.take<bf16>(int64_t(num_heads_) * num_blocks_ * key_steps_ * kTileElements);
    keys_ = carver.take<bf16>(int64_t(kChunkTokens) * key_steps_ * kStepDims);
    constexpr int64_t kStep = 2 * kTileElements;
    const auto paired = [&] {
      return PairedValues{carver.take<bf16>(kStep * kChunkSteps * value_pairs_), kStep, kStep * kChunkSteps,
                          p.kv.value_head_dim};
    };
    values_ = paired();
    kept_ = paired();
    scores_ = carver.take<float>(4 * kChunkTokens * kBlockRows);
    weights_ = carver.take<bf16>(4 * kChunkTokens * kBlockRows);
  }

  ~BlockProducts() {
    if (configured_) release_tiles();
  }
  BlockProducts(const BlockProducts&) = delete;
  BlockProducts& operator=(const BlockProducts&) = delete;

  void start(const PageWalk&, int first_key, int) { first_key_ = first_key; }

  void attend_chunk(const PageWalk& walk, int begin, int end, int end_key, float* states) {
    configure();
    first_ = begin == first_key_;
    last_ = end == end_key;
    for (int head = 0; head < num_heads_; head++) {
      copy_chunk(walk, head, begin, end);
      attend_head(head, begin, end - begin, states + head * rows_.count * record_);
    }
  }

 private:
  // What the tile registers hold: products of the left ones with the right ones.
  enum TileUse { kSum00, kSum01, kSum10, kSum11, kLeft0, kLeft1, kRight0, kRight1 };

  void configure() {
    if (configured_) return;
    TileConfig config;
    for (int tile = kSum00; tile <= kRight1; tile++) config.set(tile, 16, 64);
    load_tile_config(config);
    configured_ = true;
  }

  // A step of the four sums of products, in kWeighParts parts.
  struct Operands {
    const bf16 *left0, *left1, *right0, *right1;

    template <int kPart>
    __attribute__((always_inline)) void multiply() const {
      if constexpr (kPart == 0) {
        load_tile<kLeft0>(left0, 64);
        load_tile<kRight0>(right0, 64);
        multiply_bf16<kSum00, kLeft0, kRight0>();
      } else if constexpr (kPart == 1) {
        load_tile<kRight1>(right1, 64);
        multiply_bf16<kSum01, kLeft0, kRight1>();
      } else if constexpr (kPart == 2) {
        load_tile<kLeft1>(left1, 64);
        multiply_bf16<kSum10, kLeft1, kRight0>();
      } else {
        multiply_bf16<kSum11, kLeft1, kRight1>();
      }
    }
  };
  static void clear_sums() {
    clear_tile<kSum00>();
    clear_tile<kSum01>();
    clear_tile<kSum10>();
    clear_tile<kSum11>();
  }
  static void store_sums(float* sum00, float* sum01, float* sum10, float* sum11) {
    store_tile<kSum00>(sum00, 64);
    store_tile<kSum01>(sum01, 64);
    store_tile<kSum10>(sum10, 64);
    store_tile<kSum11>(sum11, 64);
  }

  void copy_chunk(const PageWalk& walk, int head, int begin, int end) {
    const PageWalk one = walk.of_head(head);
    const int64_t key_offset = int64_t(one.head_begin) * p_.kv.key.stride_head;
    const int64_t value_offset = int64_t(one.head_begin) * p_.kv.value.stride_head;
    TileRows tile;
    Prefetcher prefetcher;
    const auto ask = [&](int at) {
      prefetcher.clear();
      one.prefetch(at, tile_end(at, end), prefetcher);
      prefetcher.pace(kStepTokens / 2);
    };
    ask(begin);
    for (int at = begin, next; at < end; at = next) {
      next = tile_end(at, end);
      prefetcher.drain();
      one.rows(at, next, tile);
      ask(next);
      with_element(p_.kv.dtype, [&](auto element) {
        using E = decltype(element);
        copy_keys<E>(tile.key, key_offset, next - at, p_.kv.key_head_dim, 16,
                     keys_ + int64_t(at - begin) * key_steps_ * kStepDims, [](int) {});
        values_.fill<E>((at - begin) / kStepTokens, tile.value, value_offset, next - at,
                        [&](int) { prefetcher.step(); });
      });
    }
    scales_.take(walk, task_.head_begin + head, begin, end);
  }

  // Two blocks of rows, or the last one twice, and how much of the chunk they see.
  struct RowPair {
    int block, num_blocks;  // the first one, and how many are distinct
    Sight sights[2];
    int first_step, end_step;

    RowPair(const Rows& rows, int block, int position, int num_tokens)
        : block(block),
          num_blocks((block + 1) * kBlockRows < rows.count ? 2 : 1),
          sights{sight_of(rows, block, position, num_tokens),
                 sight_of(rows, block + num_blocks - 1, position, num_tokens)},
          first_step(sights[0].first_step()),
          end_step(sights[0].end_step()) {
      const Sight& other = sights[1];
      if (other.end_any == 0) return;
      first_step = end_step == 0 || other.first_step() < first_step ? other.first_step() : first_step;
      end_step = other.end_step() > end_step ? other.end_step() : end_step;
    }

    int num_steps() const { return end_step - first_step; }

    static Sight sight_of(const Rows& rows, int block, int position, int num_tokens) {
      return Sight(rows, block * kBlockRows, rows_in_block(rows.count, block), position, num_tokens);
    }
  };

  // scores[token][row] = query . key for a pair, little by little.
  struct ScoreWork {
    const bf16 *keys, *query0, *query1;
    float *scores0, *scores1;
    int64_t group_elements;  // of 16 keys, and of a block's queries
    int steps_left;
    int64_t at = 0;

    bool done() const { return steps_left == 0; }
    template <int kPart>
    __attribute__((always_inline)) void part() {
      if (steps_left == 0) return;
      if (kPart == 0 && at == 0) clear_sums();
      Operands{keys + at, keys + group_elements + at, query0 + at, query1 + at}.multiply<kPart>();
      if (kPart < 3 || (at += kTileElements) < group_elements) return;
      store_sums(scores0, scores1, scores0 + 16 * kBlockRows, scores1 + 16 * kBlockRows);
      scores0 += kStepTokens * kBlockRows;
      scores1 += kStepTokens * kBlockRows;
      keys += 2 * group_elements;
      at = 0;
      steps_left--;
    }
  };

  // weights . values of a pair, to the first rows of its states, little by little.
  struct ValueWork {
    PairedValues values;
    const bf16 *weights0, *weights1;
    float* states[2];
    int begins[2], ends[2];  // rows
    int64_t record;
    int dims_left, first_step, end_step;
    int dims = 0, step = first_step;

    bool done() const { return dims_left == 0; }
    template <int kPart>
    __attribute__((always_inline)) void part() {
      constexpr int64_t kWeightsStep = kBlockRows * kStepTokens;
      if (dims_left == 0) return;
      if (kPart == 0 && step == first_step) clear_sums();
      const bf16* const right = values.tiles(step, dims);
      Operands{weights0 + step * kWeightsStep, weights1 + step * kWeightsStep, right, right + kTileElements}
          .multiply<kPart>();
      if (kPart < 3 || ++step < end_step) return;
      store_block<kSum00, kSum01>(states[0], begins[0], ends[0]);
      store_block<kSum10, kSum11>(states[1], begins[1], ends[1]);
      step = first_step;
      dims++;
      dims_left--;
    }

    template <int kLow, int kHigh>
    void store_block(float* state, int begin, int end) const {
      float* const out = state + kStateHeader + dims * kStepDims;
      if (end - begin == kBlockRows) {
        store_tile<kLow>(out, record * sizeof(float));
        store_tile<kHigh>(out + kLanes, record * sizeof(float));
      } else if (begin < end) {
        alignas(64) float rows[kBlockRows][kStepDims];
        store_tile<kLow>(rows[0], sizeof(rows[0]));
        store_tile<kHigh>(rows[0] + kLanes, sizeof(rows[0]));
        for (int row = begin; row < end; row++) {
          store(out + row * record, load(rows[row]));
          store(out + row * record + kLanes, load(rows[row] + kLanes));
        }
      }
    }
  };

  template <class Work>
  static void finish(Work& work) {
    while (!work.done()) {
      work.template part<0>();
      work.template part<1>();
      work.template part<2>();
      work.template part<3>();
    }
  }

  // All rows of a head on the chunk that was copied. The products of one pair go on while the weights of
  // another are made, for they keep different parts of a core busy: with the first block the values of the
  // pair before, with the second the scores of the next.
  void attend_head(int head, int position, int num_tokens, float* states) {
    int turn = 0;  // which of two sets of scores and weights a pair has
    ValueWork values{};
    const auto pair_at = [&](int block) { return RowPair(rows_, block, position, num_tokens); };
    RowPair pair = pair_at((num_blocks_ - 1) / 2 * 2);
    ScoreWork scores = score_work(head, pair, turn);
    finish(scores);
    for (;; turn ^= 1) {
      float* const rows = states + pair.block * kBlockRows * record_;
      const bool last = pair.block == 0;
      prefetch(head, pair);
      weigh_block(head, position, pair, 0, turn, rows, values);
      finish(values);
      const RowPair next = last ? pair : pair_at(pair.block - 2);
      scores = last ? ScoreWork{} : score_work(head, next, turn ^ 1);
      if (pair.num_blocks == 2)
        weigh_block(head, position, pair, 1, turn, rows + kBlockRows * record_, scores);
      finish(scores);
      values = value_work(pair, turn, rows);
      if (last) break;
      pair = next;
    }
    finish(values);
  }

  // While a pair is weighed: the queries of the one after it, and its own rows of `out`.
  void prefetch(int head, const RowPair& pair) {
    const int group = p_.num_q_heads / p_.kv.num_kv_heads;
    const auto add = [&](const void* base, int64_t stride_token, int64_t stride_head, int dim, int block) {
      const int first = block * kBlockRows, last = first + 2 * kBlockRows;
      const int begin = first / group, end = steps_of(last < rows_.count ? last : rows_.count, group);
      prefetcher_.add(static_cast<const char*>(base) + (task_.query_begin + begin) * stride_token +
                          int64_t(task_.head_begin + head) * group * stride_head,
                      end - begin, stride_token, group, stride_head, dim * sizeof(bf16));
    };
    prefetcher_.clear();
    if (first_ && pair.block > 0)
      add(p_.query, p_.query_stride_token, p_.query_stride_head, p_.kv.key_head_dim, pair.block - 2);
    if (last_) add(p_.out, p_.out_stride_token, p_.out_stride_head, p_.kv.value_head_dim, pair.block);
    prefetcher_.pace(2 * pair.num_steps() * weigh_slots(kBlockRows));
  }

  ScoreWork score_work(int head, const RowPair& pair, int turn) {
    const auto query_of = [&](int block) {
      bf16* const query = query_ + (int64_t(head) * num_blocks_ + block) * key_steps_ * kTileElements;
      if (first_)
        pack_queries(p_, task_, head, block * kBlockRows, rows_in_block(rows_.count, block), kBlockRows,
                     query);
      return query;
    };
    const int64_t group_elements = int64_t(key_steps_) * kTileElements;
    const int64_t first_score = int64_t(pair.first_step) * kStepTokens * kBlockRows;
    return {keys_ + pair.first_step * 2 * group_elements,
            query_of(pair.block),
            query_of(pair.block + pair.num_blocks - 1),
            scores_of(turn, 0) + first_score,
            scores_of(turn, 1) + first_score,
            group_elements,
            pair.num_steps()};
  }

  // What is left to do for a pair's values.
  ValueWork value_work(const RowPair& pair, int turn, float* states) {
    const int first = pair.first_step, end = pair.end_step;
    if (first == end) return ValueWork{};  // an empty state has a header only
    ValueWork work{values_,
                   weights_of(turn, 0),
                   weights_of(turn, 1),
                   {states, states + kBlockRows * record_},
                   {0, 0},
                   {pair.sights[0].num_rows, pair.num_blocks == 2 ? pair.sights[1].num_rows : 0},
                   record_,
                   value_pairs_,
                   first,
                   end};
    if (!must_cut(values_, first, end,
                  [&](int step) { return pair.sights[0].hidden(step) | pair.sights[1].hidden(step); }))
      return work;
    work.values = kept_;
    for (int i = 0; i < pair.num_blocks; i++)
      pair.sights[i].for_each_group([&](int group_begin, int group_end) {
        for (int step = first; step < end; step++)
          kept_.copy_kept(values_, step, word_of(pair.sights[i], step, group_begin));
        ValueWork run = work;
        run.begins[i] = group_begin;
        run.ends[i] = group_end;
        run.ends[1 - i] = 0;
        finish(run);
      });
    return ValueWork{};
  }

  template <class Work>
  void weigh_block(int head, int position, const RowPair& pair, int i, int turn, float* states,
                   Work& meanwhile) {
    RowSums sums;
    const Sight& sight = pair.sights[i];
    const int group = p_.num_q_heads / p_.kv.num_kv_heads, kv_head = task_.head_begin + head;
    const LogitRule rule = rule_.of_scores_short_of(scales_.key_factor(kv_head));
    if (scales_.key_varies())
      scales_.scale_scores<kBlockRows>(pair.first_step, pair.end_step, scores_of(turn, i));
    if (!rule.plain())
      apply_rule<kBlockRows>(rule, rows_, (pair.block + i) * kBlockRows, sight.num_rows, kv_head * group,
                             group, position, pair.first_step, pair.end_step, scores_of(turn, i));
    with_bool(scales_.value_varies(), [&](auto scaled) {
      weigh<kBlockRows, decltype(scaled)::value>(scores_of(turn, i), sight, pair.first_step, pair.end_step,
                                                 rule.factor(), scales_.of_values(), weights_of(turn, i),
                                                 sums, [&](auto part) __attribute__((always_inline)) {
                                                   meanwhile.template part<decltype(part)::value>();
                                                   if constexpr (decltype(part)::value == 0)
                                                     prefetcher_.step();
                                                 });
    });
    store_headers(sums, sight.num_rows, scales_.value_inverse(kv_head), states, record_);
  }

  float* scores_of(int turn, int i) const { return scores_ + (2 * turn + i) * kChunkTokens * kBlockRows; }
  bf16* weights_of(int turn, int i) const { return weights_ + (2 * turn + i) * kChunkTokens * kBlockRows; }

  const AttentionParams& p_;
  const AttentionTask& task_;
  const Rows rows_;
  const LogitRule rule_;
  ChunkScales scales_;
  const int num_heads_, num_blocks_, key_steps_, value_pairs_;
  const int64_t record_;
  bool configured_ = false;
  int first_key_ = 0;
  bool first_ = false, last_ = false;  // chunk of the task
  Prefetcher prefetcher_;
  bf16* query_;          // [heads, blocks, key_steps, 16, 16, 2]
  bf16* keys_;           // of a chunk, copied
  PairedValues values_;  // of a chunk
  PairedValues kept_;    // those that some rows see
  float* scores_;        // [2, 2, kChunkTokens, kBlockRows]: two pairs of blocks
  bf16* weights_;        // [2, 2, kChunkSteps, kBlockRows, kStepTokens]
};
