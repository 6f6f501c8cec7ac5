// From token positions to addresses: the one place that reads a block table for attention, and the
// prefetcher that runs ahead of the arithmetic. Included inside the namespace of one instruction set.

// Addresses of a tile's tokens in the key and the value cache, those of KV head 0.
struct TileRows {
  const char* key[kTileTokens];
  const char* value[kTileTokens];
  int num_tokens;
};

// Asks for cache lines in the order in which they were listed, a few at a time, so that their way from memory
// is hidden behind the arithmetic on what came before. What has not been asked for when the list is cleared
// is dropped.
class Prefetcher {
 public:
  void clear() {
    num_pieces_ = piece_ = 0;
    num_lines_ = 0;
    at_ = end_ = nullptr;
  }

  // `num_tokens` consecutive tokens of a block: rows of `row_nbytes` bytes for `num_heads` heads. Rows
  // that touch are joined.
  void add(const char* base, int64_t num_tokens, int64_t stride_token, int64_t num_heads, int64_t stride_head,
           int64_t row_nbytes) {
    Piece piece{base, num_tokens, stride_token, num_heads, stride_head, row_nbytes};
    const auto join = [&piece](int64_t& count, int64_t stride) {
      if (stride != piece.nbytes) return;
      piece.nbytes *= count;
      count = 1;
    };
    join(piece.num_inner, piece.stride_inner);
    join(piece.num_outer, piece.stride_outer);
    join(piece.num_inner, piece.stride_inner);  // tokens that touch, and then heads
    num_lines_ += piece.num_outer * piece.num_inner * ((piece.nbytes + 63) / 64);
    pieces_[num_pieces_++] = piece;
    if (num_pieces_ == 1) enter();
  }

  // The next `nbytes` bytes.
  void step(int64_t nbytes) { lines((nbytes + 63) / 64); }

  // The same between products: in the middle of a run little more than the instructions that ask for lines.
  // What follows a run is found by a call, which costs the caller the vectors that it has in registers.
  template <int kNumBytes>
  __attribute__((always_inline)) void step() {
    constexpr int kNumLines = (kNumBytes + 63) / 64;
    const char* const at = at_;
    if (end_ - at > kNumLines * 64) [[likely]] {
      for (int i = 0; i < kNumLines; i++) __builtin_prefetch(at + i * 64, 0, kIntoL2);
      at_ = at + kNumLines * 64;
    } else {
      lines(kNumLines);
    }
  }

  // As many lines per step as make an end of all in `num_steps` steps.
  void pace(int64_t num_steps) {
    if (num_steps > 0) lines_per_step_ = int((num_lines_ + num_steps - 1) / num_steps);
  }
  void step() { lines(lines_per_step_); }

  void drain() {
    while (at_ != end_) lines(4);
  }

 private:
  struct Piece {
    const char* base;
    int64_t num_outer, stride_outer;
    int64_t num_inner, stride_inner;
    int64_t nbytes;
  };

  // Said where it is wanted: GCC drops the calls of a function that does nothing but prefetch.
  static constexpr int kIntoL2 = 2;

  __attribute__((always_inline)) void lines(int64_t count) {
    for (; count > 0 && at_ != end_; count--) {
      __builtin_prefetch(at_, 0, kIntoL2);
      at_ += 64;
      if (at_ >= end_) next();
    }
  }

  void enter() {
    outer_ = inner_ = 0;
    at_ = pieces_[piece_].base;
    end_ = at_ + pieces_[piece_].nbytes;
  }

  __attribute__((noinline)) void next() {
    const Piece& piece = pieces_[piece_];
    if (++inner_ == piece.num_inner) {
      inner_ = 0;
      if (++outer_ == piece.num_outer) {
        if (++piece_ == num_pieces_) {
          at_ = end_;
          return;
        }
        return enter();
      }
    }
    at_ = piece.base + outer_ * piece.stride_outer + inner_ * piece.stride_inner;
    end_ = at_ + piece.nbytes;
  }

  const char* at_;
  const char* end_;
  int64_t outer_, inner_;
  int piece_, num_pieces_;
  int64_t num_lines_;  // of all pieces
  int lines_per_step_ = 4;
  Piece pieces_[2 * kTileTokens];  // keys and values of a tile, each in a block of its own
};

// Asks for rows of one KV head while those of the head before are worked on, one row at a time: no sooner,
// for a core waits for few lines at once, and what comes early takes the place of what is used.
class RowPrefetcher {
 public:
  // Goes on to `num_rows` rows of `nbytes` bytes, at `offset` from each of `rows`.
  void enter(const char* const* rows, int num_rows, int64_t offset, int64_t nbytes) {
    while (num_rows_ > 0) step();
    rows_ = rows;
    num_rows_ = num_rows;
    offset_ = offset;
    nbytes_ = nbytes;
  }
  void step() {
    if (num_rows_ == 0) return;
    const char* const row = *rows_++ + offset_;
    for (int64_t i = 0; i < nbytes_; i += 64) __builtin_prefetch(row + i, 0, 2);  // into L2
    num_rows_--;
  }

 private:
  const char* const* rows_ = nullptr;
  int num_rows_ = 0;
  int64_t offset_ = 0, nbytes_ = 0;
};

struct PageWalk {
  const PagedKV& kv;
  const int32_t* block_ids;  // of one sequence
  int32_t head_begin, head_end;

  PageWalk(const PagedKV& kv, const int32_t* block_ids, int32_t head_begin, int32_t head_end)
      : kv(kv), block_ids(block_ids), head_begin(head_begin), head_end(head_end) {}

  // The same for one of the heads.
  PageWalk of_head(int head) const {
    return PageWalk(kv, block_ids, head_begin + head, head_begin + head + 1);
  }

  // Calls f(block, place in it, run) for each run of consecutive tokens in one block.
  template <class F>
  void for_each_place(int begin, int end, F&& f) const {
    const int32_t* at = block_ids + begin / kv.block_size;
    int32_t in_block = begin % kv.block_size;
    for (; begin < end; at++, in_block = 0) {
      const int32_t left = kv.block_size - in_block;
      const int run = left < end - begin ? left : end - begin;
      f(int64_t(*at), in_block, run);
      begin += run;
    }
  }
  // The same as f(key address, value address, run).
  template <class F>
  void for_each_run(int begin, int end, F&& f) const {
    for_each_place(begin, end, [&](int64_t block, int32_t in_block, int run) {
      f(at(kv.key, block, in_block), at(kv.value, block, in_block), run);
    });
  }

  void rows(int begin, int end, TileRows& out) const {
    int n = 0;
    for_each_run(begin, end, [&](const char* key, const char* value, int run) {
      for (int i = 0; i < run; i++, n++) {
        out.key[n] = key + i * kv.key.stride_token;
        out.value[n] = value + i * kv.value.stride_token;
      }
    });
    out.num_tokens = n;
    // Products take kLanes tokens at a time: past the end they look at the last row again, and their
    // results are not used.
    for (; n % kLanes != 0; n++) {
      out.key[n] = out.key[out.num_tokens - 1];
      out.value[n] = out.value[out.num_tokens - 1];
    }
  }

  // Puts keys and values of tokens [begin, end) on the list, those of a block side by side.
  void prefetch(int begin, int end, Prefetcher& out) const {
    for_each_run(begin, end, [&](const char* key, const char* value, int run) {
      add(key, kv.key, run, kv.key_head_dim, out);
      add(value, kv.value, run, kv.value_head_dim, out);
    });
  }

  // A token's place in a cache or in scales, that of head 0.
  template <class View>
  static const char* at(const View& view, int64_t block, int32_t in_block) {
    return reinterpret_cast<const char*>(view.data) + block * view.stride_block +
           in_block * view.stride_token;
  }

 private:
  template <class Cache>
  void add(const char* row, const Cache& cache, int run, int dim, Prefetcher& out) const {
    const char* first = row + head_begin * cache.stride_head;
    if (is_plain(cache, dim))
      return out.add(first, run, cache.stride_token, head_end - head_begin, cache.stride_head,
                     row_nbytes(kv.dtype, dim));
    // Whichever of tokens and packs are closer together make a row. Lines that are far apart are not listed:
    // in such a cache nothing is found in order anyway.
    const int64_t pack_nbytes = row_nbytes(kv.dtype, cache.pack), num_packs = dim / cache.pack;
    const bool tokens_inside = cache.stride_token <= cache.stride_pack;
    const int64_t inner = tokens_inside ? run : num_packs, outer = tokens_inside ? num_packs : run;
    const int64_t stride_inner = tokens_inside ? cache.stride_token : cache.stride_pack;
    const int64_t stride_outer = tokens_inside ? cache.stride_pack : cache.stride_token;
    if (stride_inner >= pack_nbytes + 64) return;
    out.add(first, head_end - head_begin, cache.stride_head, outer, stride_outer,
            (inner - 1) * stride_inner + pack_nbytes);
  }
};
