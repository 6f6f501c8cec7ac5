// The rows of a task: which keys each of them sees, and where tokens stand for the window and for ALiBi.
// Included inside the namespace of one instruction set.
//
// Rows of a KV head are token-major (row = token * group + query head of the group) and the same for every
// head of a task. params/attention.h says what the rules mean.

// A row sees the keys [first, visible), but of those from tree_begin on only the ones that have their bits.
struct Rows {
  int count;
  const int32_t* first;       // [count]
  const int32_t* visible;     // [count] not descending
  const int32_t* place;       // [count] of the row's query token
  const uint64_t* tree;       // [count] bits of the keys from tree_begin on; null = all
  const int32_t* tree_place;  // [kMaxTreeTokens] of those keys; null = their positions
  int tree_begin;             // position of the sequence's first query token

  int greatest_visible() const { return visible[count - 1]; }
  int least_first() const {
    int least = first[0];
    for (int row = 1; row < count; row++) least = first[row] < least ? first[row] : least;
    return least;
  }
  bool sees_any(int row, int begin, int end) const {
    return (first[row] > begin ? first[row] : begin) < (visible[row] < end ? visible[row] : end);
  }

  // Bit i: whether the row sees key position + i, of num_tokens <= 32.
  uint32_t word(int row, int position, int num_tokens) const {
    const int left = visible[row] - position;
    uint32_t seen = lowest_bits(left < num_tokens ? left : num_tokens) & ~lowest_bits(first[row] - position);
    if (tree) seen &= tree_word(tree[row], tree_begin - position);
    return seen;
  }

  // The same by the tree alone: `from` is where it begins, counted from the first bit.
  static uint32_t tree_word(uint64_t bits, int from) {
    const uint32_t own = from >= 32 || from <= -kMaxTreeTokens ? 0u
                         : from >= 0                           ? uint32_t(bits << from)
                                                               : uint32_t(bits >> -from);
    return own | lowest_bits(from);
  }

  // places[i] of keys position + i, of num_tokens.
  void places(int position, int num_tokens, int32_t* places) const {
    for (int i = 0; i < num_tokens; i++) places[i] = position + i;
    if (!tree_place) return;
    for (int i = tree_begin > position ? tree_begin - position : 0; i < num_tokens; i++)
      if (const int token = position + i - tree_begin; token < kMaxTreeTokens) places[i] = tree_place[token];
  }
};

// The memory of a task's rows.
struct RowMemory {
  int32_t *first, *visible, *place;  // [rows]
  uint64_t* tree;                    // [rows]
  int32_t* tree_place;               // [kMaxTreeTokens]

  template <class Carver>
  RowMemory(const AttentionParams& p, int num_rows, Carver& carver)
      : first(carver.template take<int32_t>(num_rows)),
        visible(carver.template take<int32_t>(num_rows)),
        place(carver.template take<int32_t>(num_rows)),
        tree(carver.template take<uint64_t>(p.rules.tree_mask ? num_rows : 0)),
        tree_place(carver.template take<int32_t>(p.rules.tree_mask ? kMaxTreeTokens : 0)) {}

  // Fills it for a task.
  Rows rows_of(const AttentionParams& p, const AttentionTask& task) const {
    const int group = p.num_q_heads / p.kv.num_kv_heads, seq_len = p.tables.seq_lens[task.seq];
    const int num_tokens = task.query_end - task.query_begin;
    int32_t tree_begin = 0;
    int first_token = 0, num_tree_tokens = 0;  // of the task in the sequence, of the sequence
    if (p.rules.tree_mask) {
      const int32_t first_row = p.cu_seqlens_q[task.seq];
      num_tree_tokens = p.cu_seqlens_q[task.seq + 1] - first_row;
      first_token = task.query_begin - first_row;
      tree_begin = seq_len - num_tree_tokens;
      for (int t = 0; t < num_tree_tokens; t++)
        tree_place[t] = tree_begin + __builtin_popcountll(ancestors(p.rules.tree_mask[first_row + t], t)) - 1;
      for (int t = num_tree_tokens; t < kMaxTreeTokens; t++) tree_place[t] = tree_begin + t;
    }
    for (int t = 0, row = 0; t < num_tokens; t++) {
      const int32_t position = task.position + t;
      const int32_t at = p.rules.tree_mask ? tree_place[first_token + t] : position;
      const int32_t from = first_visible_key(p.rules.window, at);
      const int32_t end = end_visible_key(p.causal, seq_len, position);
      uint64_t bits = 0;
      if (p.rules.tree_mask)
        for (uint64_t left = ancestors(p.rules.tree_mask[task.query_begin + t], first_token + t); left != 0;
             left &= left - 1) {
          const int i = __builtin_ctzll(left);
          if (p.rules.window == 0 || at - tree_place[i] < p.rules.window) bits |= uint64_t(1) << i;
        }
      for (int g = 0; g < group; g++, row++) {
        first[row] = from;
        visible[row] = end;
        place[row] = at;
        if (p.rules.tree_mask) tree[row] = bits;
      }
    }
    const bool has_tree = p.rules.tree_mask != nullptr;
    return {
        num_tokens * group, first, visible, place, has_tree ? tree : nullptr, has_tree ? tree_place : nullptr,
        tree_begin};
  }

 private:
  // Of query token t: itself and what its mask says of those before it.
  static uint64_t ancestors(int64_t mask, int t) {
    const uint64_t self = uint64_t(1) << t;
    return (uint64_t(mask) & (self - 1)) | self;
  }
};
