// Attention over a paged cache: decode, verification of several tokens and prefill are one walk over tiles.
// Included inside the namespace of one instruction set, after products.inl, softmax.inl and page_walk.inl.
//
// What happens to a row in a tile of kTileTokens keys, and the order of tiles and chunks, is the same
// whatever else a task computes; so a row's bits do not depend on the batch, the threads, the block size
// or how a prompt was cut.

constexpr int kUnpackRows = 32;  // from here on a tile is turned into f32 once instead of at each use

// How many keys the query token at `position` sees: those at positions 0 .. visible_keys - 1.
inline int visible_keys(const AttentionParams& p, int32_t seq, int32_t position) {
  const int32_t seq_len = p.tables.seq_lens[seq];
  if (!p.causal) return seq_len;
  return position < 0 ? 0 : position + 1;
}

inline int chunks_of(int num_keys) { return (num_keys + kChunkTokens - 1) / kChunkTokens; }

// The rows of one KV head, token-major (row = token * group + query head of the group): the same for
// every head of a task.
struct Rows {
  int count;
  const int* visible;     // [count] keys that each sees, not descending
  const int64_t* offset;  // [count] floats from the states of a head to the row's
};

// Working memory of a task, carved out of one piece.
struct Scratch {
  float* query;   // [heads, rows, padded(key_head_dim)] in pair order
  float* states;  // [tokens, heads * group, state_floats], of the first chunk and what it is folded with
  float* later_states;      // the same, of one later chunk
  float* scores;            // [rows, kTileTokens]
  float* decay;             // [rows]
  float* key_tile;          // [kTileTokens, padded(key_head_dim)], unpacked
  float* value_tile;        // [kTileTokens, padded(value_head_dim)], unpacked
  const char** key_rows;    // [kTileTokens] of key_tile
  const char** value_rows;  // [kTileTokens] of value_tile
  int* visible;             // [rows]
  int64_t* offset;          // [rows]
  size_t nbytes;
};

inline Scratch carve(const AttentionParams& p, const AttentionTask& task, void* memory) {
  const int64_t rows = int64_t(task.query_end - task.query_begin) * (p.num_q_heads / p.kv.num_kv_heads);
  const int64_t all_rows = rows * (task.head_end - task.head_begin);
  const int64_t own_states = task.states ? 0 : all_rows * state_floats(p.kv.value_head_dim);
  const int64_t unpacked_tokens = rows >= kUnpackRows ? kTileTokens : 0;
  Scratch s;
  s.nbytes = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<decltype(pointer + 0)>(static_cast<char*>(memory) + s.nbytes);
    s.nbytes += (count * sizeof(*pointer) + 63) / 64 * 64;
  };
  take(s.query, all_rows * padded(p.kv.key_head_dim));
  take(s.states, own_states);
  take(s.later_states, own_states);
  take(s.scores, rows * kTileTokens);
  take(s.decay, rows);
  take(s.key_tile, unpacked_tokens * padded(p.kv.key_head_dim));
  take(s.value_tile, unpacked_tokens * padded(p.kv.value_head_dim));
  take(s.key_rows, unpacked_tokens);
  take(s.value_rows, unpacked_tokens);
  take(s.visible, rows);
  take(s.offset, rows);
  return s;
}

size_t attend_scratch_nbytes(const AttentionParams& p, const AttentionTask& task) {
  return carve(p, task, nullptr).nbytes;
}

// The task's query in f32 and pair order, head by head.
template <class T>
void pack_query(const AttentionParams& p, const AttentionTask& task, float* packed) {
  const int dim = p.kv.key_head_dim, group = p.num_q_heads / p.kv.num_kv_heads;
  for (int head = task.head_begin; head < task.head_end; head++)
    for (int token = task.query_begin; token < task.query_end; token++)
      for (int g = 0; g < group; g++) {
        const T* x =
            reinterpret_cast<const T*>(static_cast<const char*>(p.query) + token * p.query_stride_token +
                                       (int64_t(head) * group + g) * p.query_stride_head);
        for (int i = 0; i < dim; i += 2 * kLanes, packed += 2 * kLanes) {
          const Pair y = dim - i < 2 * kLanes ? load_pair(x + i, dim - i) : load_pair(x + i);
          store(packed, y.a);
          store(packed + kLanes, y.b);
        }
      }
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

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

// Values into the states of kRows rows of which the first sees `seen[0]` tokens of the tile, and so on.
template <class E, int kRows>
void weigh_visible(const Tile<E>& value, const int* seen, const float* weights, const float* decay,
                   float* const* out, Prefetcher* prefetcher) {
  const int all = seen[0] > 0 ? seen[0] : 0;  // what every row sees, for later rows see no less
  if (all > 0) weigh<E, kRows>(value, 0, all, weights, decay, out, prefetcher);
  // The diagonal. A token that only some rows see is added to those alone: a weight of 0 would not do,
  // for 0 * NaN is NaN.
  for (int r = 0; r < kRows; r++)
    if (seen[r] > all) {
      const float factor = all > 0 ? 1.0f : decay[r];
      weigh<E, 1>(value, all, seen[r], weights + r * kTileTokens, &factor, out + r, nullptr);
    }
}

// All rows of one KV head over a tile whose first key is at `position`. The first block of rows brings
// the tile into the cache, so it is the one that prefetches.
template <class E>
void attend_tile(const AttentionParams& p, const Tile<E>& key, const Tile<E>& value, int num_tokens,
                 int position, const Rows& rows, const float* query, const Scratch& s, float* states,
                 Prefetcher* prefetcher) {
  const int key_dim = padded(p.kv.key_head_dim);
  const float scale = p.scale * kLog2E;
  const auto seen_by = [&](int row) {
    const int seen = rows.visible[row] - position;
    return seen < num_tokens ? seen : num_tokens;
  };
  Prefetcher* first_only = prefetcher;
  for_each_row_block(rows.count, [&](int begin, auto count) {
    constexpr int kRows = decltype(count)::value;
    const int most = seen_by(begin + kRows - 1);
    if (most <= 0) return;
    score<E, kRows>(key, most, query + int64_t(begin) * key_dim, key_dim, s.scores + begin * kTileTokens,
                    first_only);
    first_only = nullptr;
    for (int row = begin; row < begin + kRows; row++)
      if (const int seen = seen_by(row); seen > 0)
        s.decay[row] = take_scores(s.scores + row * kTileTokens, seen, scale, states + rows.offset[row]);
  });
  first_only = prefetcher;
  for_each_row_block(rows.count, [&](int begin, auto count) {
    constexpr int kRows = decltype(count)::value;
    float* out[kRows];
    int seen[kRows];
    for (int r = 0; r < kRows; r++) {
      out[r] = states + rows.offset[begin + r] + kStateHeader;
      seen[r] = seen_by(begin + r);
    }
    if (seen[kRows - 1] <= 0) return;
    weigh_visible<E, kRows>(value, seen, s.scores + begin * kTileTokens, s.decay + begin, out, first_only);
    first_only = nullptr;
  });
}

template <class T>
void finish_rows(const AttentionParams& p, int32_t token, int q_head, const float* state) {
  T* out = reinterpret_cast<T*>(static_cast<char*>(p.out) + token * p.out_stride_token +
                                q_head * p.out_stride_head);
  finish_row<T>(state, p.kv.value_head_dim, out,
                p.lse ? p.lse + int64_t(token) * p.num_q_heads + q_head : nullptr);
}

template <class T>
void attend(const AttentionParams& p, const AttentionTask& task, void* memory) {
  const Scratch s = carve(p, task, memory);
  const int group = p.num_q_heads / p.kv.num_kv_heads;
  const int num_heads = task.head_end - task.head_begin;
  const int key_dim = padded(p.kv.key_head_dim), value_dim = padded(p.kv.value_head_dim);
  const int64_t record = state_floats(p.kv.value_head_dim);
  const Rows rows{(task.query_end - task.query_begin) * group, s.visible, s.offset};
  const int heads_per_token = task.states ? p.num_q_heads : num_heads * group;  // in the states
  for (int row = 0; row < rows.count; row++) {
    s.visible[row] = visible_keys(p, task.seq, task.position + row / group);
    s.offset[row] = (int64_t(row / group) * heads_per_token + row % group) * record;
  }
  pack_query<T>(p, task, s.query);
  const bool unpacked = rows.count >= kUnpackRows;
  if (unpacked)
    for (int t = 0; t < kTileTokens; t++) {
      s.key_rows[t] = reinterpret_cast<const char*>(s.key_tile + t * key_dim);
      s.value_rows[t] = reinterpret_cast<const char*>(s.value_tile + t * value_dim);
    }

  const bool all_chunks = task.chunk == kAllChunks;
  const int num_keys = rows.visible[rows.count - 1];  // that any row sees
  const int first_key = all_chunks ? 0 : task.chunk * kChunkTokens;
  const int end_key = all_chunks || num_keys < first_key + kChunkTokens ? num_keys : first_key + kChunkTokens;
  float* const first_states = task.states
                                  ? task.states + task.chunk * task.chunk_floats +
                                        (int64_t(task.query_begin - task.seq_query_begin) * p.num_q_heads +
                                         int64_t(task.head_begin) * group) *
                                            record
                                  : s.states;
  float* states = first_states;
  const auto for_each_state = [&](auto f) {
    for (int head = 0; head < num_heads; head++)
      for (int row = 0; row < rows.count; row++)
        f(int64_t(head) * group * record + rows.offset[row], head, row);
  };
  const auto clear = [&] { for_each_state([&](int64_t at, int, int) { clear_state(states + at, record); }); };
  clear();

  const PageWalk walk{p.kv, p.tables.block_ids + task.seq * p.tables.stride, task.head_begin, task.head_end};
  const auto tile_end = [&](int begin) {
    return begin + kTileTokens < end_key ? begin + kTileTokens : end_key;
  };
  TileRows tile;
  Prefetcher prefetcher;
  walk.prefetch(first_key, tile_end(first_key), sizeof(T), prefetcher);
  for (int begin = first_key; begin < end_key; begin += kTileTokens) {
    if (begin % kChunkTokens == 0 && begin > first_key) {
      states = s.later_states;
      clear();
    }
    const int end = tile_end(begin), num_tokens = end - begin;
    prefetcher.drain();
    walk.rows(begin, end, tile);
    walk.prefetch(end, tile_end(end), sizeof(T), prefetcher);
    for (int head = 0; head < num_heads; head++) {
      const Tile<T> key(tile.key, (task.head_begin + head) * p.kv.key.stride_head, p.kv.key_head_dim);
      const Tile<T> value(tile.value, (task.head_begin + head) * p.kv.value.stride_head, p.kv.value_head_dim);
      const float* query = s.query + int64_t(head) * rows.count * key_dim;
      float* head_states = states + int64_t(head) * group * record;
      if (unpacked) {
        unpack(key, num_tokens, s.key_tile, prefetcher);
        unpack(value, num_tokens, s.value_tile, prefetcher);
        attend_tile(p, Tile<float>(s.key_rows, 0, key_dim), Tile<float>(s.value_rows, 0, value_dim),
                    num_tokens, begin, rows, query, s, head_states, nullptr);
      } else {
        attend_tile(p, key, value, num_tokens, begin, rows, query, s, head_states, &prefetcher);
      }
    }
    if (states == s.later_states && (end % kChunkTokens == 0 || end == end_key)) {
      const int chunk_begin = begin / kChunkTokens * kChunkTokens;
      for_each_state([&](int64_t at, int, int row) {
        // Only rows that see something of the chunk: the fold would be the identity but for the sign of 0.
        if (rows.visible[row] > chunk_begin) fold_state(first_states + at, states + at, record);
      });
    }
  }

  if (!task.states)
    for_each_state([&](int64_t at, int head, int row) {
      finish_rows<T>(p, task.query_begin + row / group, (task.head_begin + head) * group + row % group,
                     first_states + at);
    });
}

template <class T>
void fold(const AttentionParams& p, const AttentionTask& task) {
  const int group = p.num_q_heads / p.kv.num_kv_heads;
  const int64_t record = state_floats(p.kv.value_head_dim);
  for (int token = task.query_begin; token < task.query_end; token++) {
    const int num_chunks = chunks_of(visible_keys(p, task.seq, task.position + token - task.query_begin));
    for (int q_head = task.head_begin * group; q_head < task.head_end * group; q_head++) {
      float* state = task.states + (int64_t(token - task.seq_query_begin) * p.num_q_heads + q_head) * record;
      for (int chunk = 1; chunk < num_chunks; chunk++)
        fold_state(state, state + chunk * task.chunk_floats, record);
      finish_rows<T>(p, token, q_head, state);
    }
  }
}
