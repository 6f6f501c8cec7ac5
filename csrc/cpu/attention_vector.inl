// The products of attention by vector instructions, in f32, for every type.
// Included inside the namespace of one instruction set, after products.inl and attention_walk.inl.

constexpr int kUnpackRows = 32;  // from here on a tile is turned into f32 once instead of at each use

// Calls f(begin, Constant<number of rows>) for blocks of at most kMaxRows rows, as equal as may be.
template <class F>
inline void for_each_row_block(int num_rows, F&& f) {
  static_assert(kMaxRows == 4);
  const int num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int i = 0; i < num_blocks; i++) {
    const int begin = int(int64_t(num_rows) * i / num_blocks),
              end = int(int64_t(num_rows) * (i + 1) / num_blocks);
    switch (end - begin) {
      case 1: f(begin, Constant<1>{}); break;
      case 2: f(begin, Constant<2>{}); break;
      case 3: f(begin, Constant<3>{}); break;
      default: f(begin, Constant<4>{}); break;
    }
  }
}

// Values into the states of kRows rows, of which row r sees the tokens of the tile whose bits are set in
// seen[r]. A token that only some rows see is added to those alone: a weight of 0 would not do, for 0 * NaN
// is NaN. The tokens of a row come in their order, however many see them.
template <class E, int kRows>
void weigh_visible(const Tile<E>& value, const uint32_t* seen, const float* weights, const float* decay,
                   float* const* out, Prefetcher* prefetcher) {
  float factor[kRows];
  uint64_t edges = 0;  // where some row begins or ceases to see
  for (int r = 0; r < kRows; r++) {
    factor[r] = decay[r];
    edges |= uint64_t(seen[r]) ^ uint64_t(seen[r]) << 1;
  }
  while (edges != 0) {
    const int begin = __builtin_ctzll(edges);
    edges &= edges - 1;
    if (edges == 0) break;  // from here on no row sees any
    const int end = __builtin_ctzll(edges);
    bool all = true;
    for (int r = 0; r < kRows; r++) all &= seen[r] >> begin & 1;
    if (all) {
      weigh<E, kRows>(value, begin, end, weights, factor, out, prefetcher);
      for (float& f : factor) f = 1.0f;
      continue;
    }
    for (int r = 0; r < kRows; r++)
      if (seen[r] >> begin & 1) {
        weigh<E, 1>(value, begin, end, weights + r * kTileTokens, factor + r, out + r, nullptr);
        factor[r] = 1.0f;
      }
  }
}

template <class T>
class VectorProducts {
 public:
  using Element = T;

  VectorProducts(const AttentionParams& p, const AttentionTask& task, const Rows& rows, Carver& carver)
      : p_(p),
        task_(task),
        rows_(rows),
        rule_(p),
        key_dim_(padded(p.kv.key_head_dim)),
        value_dim_(padded(p.kv.value_head_dim)),
        quantised_(p.kv.dtype != p.dtype),
        unpacks_(quantised_ || rows.count >= kUnpackRows),
        keys_(p.kv.key, p.kv.key_head_dim, p.kv.dtype, carver),
        values_(p.kv.value, p.kv.value_head_dim, p.kv.dtype, carver) {
    const int64_t unpacked_tokens = unpacks_ ? kTileTokens : 0;
    query_ = carver.take<float>(int64_t(task.head_end - task.head_begin) * rows.count * key_dim_);
    scores_ = carver.take<float>(int64_t(rows.count) * kTileTokens);
    decay_ = carver.take<float>(rows.count);
    seen_ = carver.take<uint32_t>(rows.count);
    unpacked_ = carver.take<float>(unpacked_tokens * greater(key_dim_, value_dim_));
    unpacked_rows_ = carver.take<const char*>(unpacked_tokens);
  }

  void start(const PageWalk& walk, int first_key, int end_key) {
    prefetcher_.clear();
    walk.prefetch(first_key, tile_end(first_key, end_key), prefetcher_);
    pack_query();
  }

  void attend_chunk(const PageWalk& walk, int begin, int end, int end_key, float* states) {
    const int num_heads = task_.head_end - task_.head_begin;
    const int64_t record = state_floats(p_.kv.value_head_dim), head_floats = rows_.count * record;
    for (int64_t i = 0; i < num_heads * rows_.count; i++) clear_state(states + i * record, record);
    TileRows tile;
    for (int at = begin, next; at < end; at = next) {
      next = tile_end(at, end);
      prefetcher_.drain();
      walk.rows(at, next, tile);
      prefetcher_.clear();
      walk.prefetch(next, tile_end(next, end_key), prefetcher_);
      for (int head = 0; head < num_heads; head++)
        attend_tile(walk, head, tile, next - at, at, states + head * head_floats);
    }
  }

 private:
  void pack_query() {
    const int dim = p_.kv.key_head_dim, group = p_.num_q_heads / p_.kv.num_kv_heads;
    float* packed = query_;
    for (int head = task_.head_begin; head < task_.head_end; head++)
      for (int row = 0; row < rows_.count; row++) {
        const T* x =
            reinterpret_cast<const T*>(static_cast<const char*>(p_.query) +
                                       int64_t(task_.query_begin + row / group) * p_.query_stride_token +
                                       (int64_t(head) * group + row % group) * p_.query_stride_head);
        for (int i = 0; i < dim; i += 2 * kLanes, packed += 2 * kLanes) {
          const Pair y = dim - i < 2 * kLanes ? load_pair(x + i, dim - i) : load_pair(x + i);
          store(packed, y.a);
          store(packed + kLanes, y.b);
        }
      }
  }

  // Calls f(tile, prefetcher) for keys or values of a head, as they lie or turned into f32. What is turned is
  // asked for meanwhile, and lasts until the next call: a core's own cache holds no two of them.
  template <class F>
  void with_tile(const PageWalk& walk, const TileSource& source, const ScaleView& scale,
                 const char* const* rows, int64_t kv_head, int num_tokens, int position, int dim, F&& f) {
    if (!unpacks_) return f(source.tile<T>(rows, kv_head, num_tokens), &prefetcher_);
    if (!quantised_) {
      unpack(source.tile<T>(rows, kv_head, num_tokens), num_tokens, unpacked_, prefetcher_);
    } else {
      with_quantised(p_.kv.dtype, [&](auto number) {
        using Q = decltype(number);
        unpack_quantised<T>(walk, scale, kv_head, position,
                            source.template tile<Q>(rows, kv_head, num_tokens), num_tokens, unpacked_,
                            prefetcher_);
      });
    }
    for (int t = 0; t < kTileTokens; t++)
      unpacked_rows_[t] = reinterpret_cast<const char*>(unpacked_ + t * dim);
    f(Tile<float>(unpacked_rows_, 0, dim), static_cast<Prefetcher*>(nullptr));
  }

  // All rows of one KV head over a tile whose first key is at `position`.
  void attend_tile(const PageWalk& walk, int head, const TileRows& tile, int num_tokens, int position,
                   float* states) {
    const int64_t kv_head = task_.head_begin + head;
    with_tile(walk, keys_, p_.kv.key_scale, tile.key, kv_head, num_tokens, position, key_dim_,
              [&](const auto& key, Prefetcher* prefetcher) {
                score_rows(head, key, num_tokens, position, states, prefetcher);
              });
    with_tile(walk, values_, p_.kv.value_scale, tile.value, kv_head, num_tokens, position, value_dim_,
              [&](const auto& value, Prefetcher* prefetcher) { weigh_rows(value, states, prefetcher); });
  }

  int q_head_of(int head, int row) const {
    const int group = p_.num_q_heads / p_.kv.num_kv_heads;
    return (task_.head_begin + head) * group + row % group;
  }

  // A row's scores on a tile become logits.
  void apply_rule(float* scores, int num_tokens, int q_head, const int32_t* places, int32_t place) const {
    alignas(64) float distance[kTileTokens];
    for (int t = 0; t < kTileTokens; t++) distance[t] = t < num_tokens ? float(places[t] - place) : 0.0f;
    const Vec slope = broadcast(rule_.slope(q_head));
    for (int t = 0; t < num_tokens; t += kLanes)
      store(scores + t, rule_.apply(load(scores + t), slope, load(distance + t)));
  }

  // Weights of all rows. The first block of rows brings the tile into the cache, so it is the one that
  // prefetches; so it is of values.
  template <class E>
  void score_rows(int head, const Tile<E>& key, int num_tokens, int position, float* states,
                  Prefetcher* prefetcher) {
    const int64_t record = state_floats(p_.kv.value_head_dim);
    const float* const query = query_ + int64_t(head) * rows_.count * key_dim_;
    const bool plain = rule_.plain();
    int32_t places[kTileTokens];
    if (!plain) rows_.places(position, num_tokens, places);
    for_each_row_block(rows_.count, [&](int begin, auto count) {
      constexpr int kRows = decltype(count)::value;
      const int left = rows_.visible[begin + kRows - 1] - position;
      const int most = left < num_tokens ? left : num_tokens;
      if (most <= 0) {
        for (int row = begin; row < begin + kRows; row++) seen_[row] = 0;
        return;
      }
      score<E, kRows>(key, most, query + int64_t(begin) * key_dim_, key_dim_, scores_ + begin * kTileTokens,
                      prefetcher);
      prefetcher = nullptr;
      for (int row = begin; row < begin + kRows; row++) {
        const uint32_t seen = seen_[row] = rows_.word(row, position, num_tokens);
        if (seen == 0) continue;
        float* const scores = scores_ + row * kTileTokens;
        if (!plain) apply_rule(scores, most, q_head_of(head, row), places, rows_.place[row]);
        decay_[row] = take_scores(scores, seen, rule_.factor(), states + row * record);
      }
    });
  }

  template <class E>
  void weigh_rows(const Tile<E>& value, float* states, Prefetcher* prefetcher) {
    const int64_t record = state_floats(p_.kv.value_head_dim);
    for_each_row_block(rows_.count, [&](int begin, auto count) {
      constexpr int kRows = decltype(count)::value;
      float* out[kRows];
      uint32_t seen[kRows], any = 0;
      for (int r = 0; r < kRows; r++) {
        out[r] = states + (begin + r) * record + kStateHeader;
        any |= seen[r] = seen_[begin + r];
      }
      if (any == 0) return;
      weigh_visible<E, kRows>(value, seen, scores_ + begin * kTileTokens, decay_ + begin, out, prefetcher);
      prefetcher = nullptr;
    });
  }

  const AttentionParams& p_;
  const AttentionTask& task_;
  const Rows rows_;
  const LogitRule rule_;
  const int key_dim_, value_dim_;
  const bool quantised_, unpacks_;
  const TileSource keys_, values_;
  Prefetcher prefetcher_;       // of the tile after the one at hand
  float* query_;                // [heads, rows, key_dim] in pair order
  float* scores_;               // [rows, kTileTokens]
  float* decay_;                // [rows]
  uint32_t* seen_;              // [rows] of the tile's tokens
  float* unpacked_;             // [kTileTokens, key_dim or value_dim]
  const char** unpacked_rows_;  // [kTileTokens] of it
};
