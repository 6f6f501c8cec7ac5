// Attention over a paged cache: decode, verification of several tokens and prefill are one walk over chunks.
// Included inside the namespace of one instruction set, after softmax.inl and page_walk.inl.
//
// What happens to a row in a chunk, which is taken in tiles of kTileTokens keys, and the order of chunks is
// the same whatever else a task computes; so a row's bits do not depend on the batch, the threads, the block
// size or how a prompt was cut. The arithmetic on a chunk is a parameter, `Products`:
//
//   Products(params, task, rows, carver)   takes its working memory from the carver
//   void start(walk, first_key, end_key)   once per task, before its first chunk
//   void attend_chunk(walk, begin, end, end_key, states)
//                                          writes the states of keys [begin, end) of a chunk; the task goes
//                                          on to end_key, so that what comes next can be prefetched
//
// where `states` are [heads, rows] from the task's first KV head on, laid out as softmax.inl says.

// A number as a type, for generic lambdas.
template <int N>
struct Constant {
  static constexpr int value = N;
};

// Where the tile that begins at `begin` ends, of keys that end at `end`.
inline int tile_end(int begin, int end) { return end - begin > kTileTokens ? begin + kTileTokens : end; }

inline int lesser(int a, int b) { return a < b ? a : b; }
inline int greater(int a, int b) { return a > b ? a : b; }

inline int chunks_of(int num_keys) { return num_keys / kChunkTokens + (num_keys % kChunkTokens != 0); }

// Cuts one piece of memory into arrays at cache lines; with none it only counts.
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    T* const array = reinterpret_cast<T*>(memory_ + nbytes_);
    nbytes_ += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return array;
  }

  size_t nbytes() const { return nbytes_; }

 private:
  char* const memory_;
  size_t nbytes_ = 0;
};

// What every task needs, whatever its products.
struct TaskMemory {
  RowMemory rows;
  float* states;        // [heads, rows, state_floats] of the first chunk, and what it is folded with,
  float* later_states;  // and of one later chunk; of tasks that write no states to the workspace

  TaskMemory(const AttentionParams& p, const AttentionTask& task, int num_rows, Carver& carver)
      : rows(p, num_rows, carver) {
    const int64_t own_states =
        task.states ? 0
                    : int64_t(task.head_end - task.head_begin) * num_rows * state_floats(p.kv.value_head_dim);
    states = carver.take<float>(own_states);
    later_states = carver.take<float>(own_states);
  }
};

inline int num_rows_of(const AttentionParams& p, const AttentionTask& task) {
  return (task.query_end - task.query_begin) * (p.num_q_heads / p.kv.num_kv_heads);
}

template <class Products>
size_t attend_scratch_nbytes(const AttentionParams& p, const AttentionTask& task) {
  Carver carver(nullptr);
  const TaskMemory memory(p, task, num_rows_of(p, task), carver);
  Rows rows{};
  rows.count = num_rows_of(p, task);
  const Products products(p, task, rows, carver);
  return carver.nbytes();
}

template <class T>
T* out_row(const AttentionParams& p, int32_t token, int q_head) {
  return reinterpret_cast<T*>(static_cast<char*>(p.out) + token * p.out_stride_token +
                              q_head * p.out_stride_head);
}

template <class T>
void finish_rows(const AttentionParams& p, int32_t token, int q_head, float* state) {
  if (p.rules.sinks) fold_sink(state, p.rules.sinks[q_head], state_floats(p.kv.value_head_dim));
  finish_row<T>(state, p.kv.value_head_dim, out_row<T>(p, token, q_head),
                p.lse ? p.lse + int64_t(token) * p.num_q_heads + q_head : nullptr);
}

template <class Products>
void attend(const AttentionParams& p, const AttentionTask& task, void* scratch) {
  using T = typename Products::Element;
  Carver carver(scratch);
  const int num_rows = num_rows_of(p, task);
  const TaskMemory memory(p, task, num_rows, carver);
  const Rows rows = memory.rows.rows_of(p, task);
  Products products(p, task, rows, carver);

  const int group = p.num_q_heads / p.kv.num_kv_heads;
  const int num_heads = task.head_end - task.head_begin;
  const int64_t record = state_floats(p.kv.value_head_dim);
  const int64_t head_floats = num_rows * record;
  // What any row sees lies in [first_key, end_key). Tiles before it are left out, but not moved.
  const int num_keys = rows.greatest_visible(), first_tile = rows.least_first() / kTileTokens * kTileTokens;
  const int chunk_begin = task.states ? task.chunk_begin : first_tile / kChunkTokens;
  const int chunk_end = task.states ? task.chunk_end : greater(chunks_of(num_keys), chunk_begin + 1);
  const int first_key = greater(first_tile, chunk_begin * kChunkTokens);
  const int end_key = chunk_end < chunks_of(num_keys) ? chunk_end * kChunkTokens : num_keys;
  const auto states_of = [&](int chunk) {
    if (!task.states) return chunk == chunk_begin ? memory.states : memory.later_states;
    return task.states + (chunk - task.first_chunk) * task.chunk_floats + task.head_begin * head_floats;
  };

  const PageWalk walk(p.kv, p.tables.block_ids + task.seq * p.tables.stride, task.head_begin, task.head_end);
  products.start(walk, first_key, end_key);
  for (int chunk = chunk_begin; chunk < chunk_end; chunk++) {
    const int first = chunk * kChunkTokens, begin = greater(first_key, first);
    const int end = first + lesser(end_key - first, kChunkTokens);
    float* const states = states_of(chunk);
    if (begin < end) products.attend_chunk(walk, begin, end, end_key, states);
    for (int64_t i = 0; i < num_heads * num_rows; i++)
      // Rows that see nothing of the chunk may have a header only.
      if (const bool sees = rows.sees_any(int(i % num_rows), begin, end); states != memory.later_states) {
        if (!sees) clear_state(states + i * record, record);
      } else if (sees) {
        fold_state(memory.states + i * record, states + i * record, record);
      }
  }

  if (task.states) return;
  for (int head = 0; head < num_heads; head++) {
    float* state = memory.states + head * head_floats;
    for (int token = task.query_begin; token < task.query_end; token++)
      for (int g = 0; g < group; g++, state += record) {
        const int q_head = (task.head_begin + head) * group + g;
        finish_rows<T>(p, token, q_head, state);
      }
  }
}

// A task that folds has all query tokens of its sequence.
template <class T>
void fold(const AttentionParams& p, const AttentionTask& task) {
  const int group = p.num_q_heads / p.kv.num_kv_heads, num_rows = num_rows_of(p, task);
  const int64_t record = state_floats(p.kv.value_head_dim);
  const int32_t seq_len = p.tables.seq_lens[task.seq];
  for (int row = 0; row < num_rows; row++) {
    // Chunks from a row's last key on have states too, but of no keys.
    const int32_t position = task.position + row / group;
    const int visible = end_visible_key(p.causal, seq_len, position);
    const int num_chunks = chunks_of(visible) - task.first_chunk;
    for (int head = task.head_begin; head < task.head_end; head++) {
      float* state = task.states + (int64_t(head) * num_rows + row) * record;
      for (int chunk = 1; chunk < num_chunks; chunk++)
        fold_state(state, state + chunk * task.chunk_floats, record);
      finish_rows<T>(p, task.query_begin + row / group, head * group + row % group, state);
    }
  }
}
