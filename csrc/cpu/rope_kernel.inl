// Rotary position embedding of the rows of queries and keys, on the way to where they belong.
// Included inside the namespace of one instruction set, after its vector vocabulary.

// Which element of a row lies in which lane of a pair: found by looking where each one arrives.
template <class T>
struct PairOrder {
  int element[2 * kLanes];

  PairOrder() {
    for (int i = 0; i < 2 * kLanes; i++) {
      T row[2 * kLanes];
      memset(row, 0, sizeof(row));
      memset(row + i, 0x3c, sizeof(T));  // a number other than 0 in every type
      const Pair pair = load_pair(row);
      float lanes[2 * kLanes];
      store(lanes, pair.a);
      store(lanes + kLanes, pair.b);
      for (int lane = 0; lane < 2 * kLanes; lane++)
        if (lanes[lane] != 0) element[lane] = i;
    }
  }
};

// The rotation at one position: out[j] = x[j] cos[j] + partner of x[j] times sin[j], which has the sign.
// Factors lie as the elements do in pairs.
template <class T>
struct Rotation {
  float cosines[kMaxHeadDim], sines[kMaxHeadDim];
  T row[kMaxHeadDim], partners[kMaxHeadDim];
  int rotary_dim, head_dim;
  bool interleaved;

  Rotation(int rotary_dim, int head_dim, bool interleaved)
      : rotary_dim(rotary_dim), head_dim(head_dim), interleaved(interleaved) {
    memset(partners, 0, sizeof(partners));
  }

  // cos_sin: [rotary_dim], cosines first.
  void turn_to(const float* cos_sin) {
    static const PairOrder<T> order;
    const int half = rotary_dim / 2;
    for (int begin = 0; begin < rotary_dim; begin += 2 * kLanes)
      for (int lane = 0; lane < 2 * kLanes; lane++) {
        const int j = begin + order.element[lane];
        const bool second = interleaved ? j % 2 : j >= half;
        const int pair = interleaved ? j / 2 : second ? j - half : j;
        cosines[begin + lane] = j < rotary_dim ? cos_sin[pair] : 0;
        const float sine = j < rotary_dim ? cos_sin[half + pair] : 0;
        sines[begin + lane] = second ? sine : -sine;
      }
  }

  // `to` may be `from`.
  void operator()(T* to, const T* from) {
    memcpy(row, from, size_t(head_dim) * sizeof(T));
    const int half = rotary_dim / 2;
    if (interleaved) {
      for (int i = 0; i < rotary_dim; i += 2) {
        partners[i] = row[i + 1];
        partners[i + 1] = row[i];
      }
    } else {
      memcpy(partners, row + half, size_t(half) * sizeof(T));
      memcpy(partners + half, row, size_t(half) * sizeof(T));
    }
    // A pair's rest is a multiple of 8 and may pass the end of what is rotated, not that of the row.
    const int end = (rotary_dim + 7) / 8 * 8;
    const auto turned = [&](int i, Pair x, Pair y) {
      return Pair{fma(x.a, load(cosines + i), mul(y.a, load(sines + i))),
                  fma(x.b, load(cosines + i + kLanes), mul(y.b, load(sines + i + kLanes)))};
    };
    for (int i = 0; i < end; i += 2 * kLanes) {
      const int left = end - i;
      if (left < 2 * kLanes) {
        store_pair(to + i, turned(i, load_pair(row + i, left), load_pair(partners + i, left)), left);
      } else {
        store_pair(to + i, turned(i, load_pair(row + i), load_pair(partners + i)));
      }
    }
    memcpy(to + rotary_dim, row + rotary_dim, size_t(head_dim - rotary_dim) * sizeof(T));
  }
};

// Tokens [token_begin, token_end): queries to query_out, keys and values to their slots.
template <class T>
void rope_write(const RopeWriteParams& p, int32_t token_begin, int32_t token_end) {
  const CacheWriteParams& w = p.write;
  const auto row = [](const void* base, int64_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(const_cast<void*>(base)) + offset);
  };
  const QuantisedRows keys{w.kv.key, w.kv.key_scale, w.kv.dtype, w.kv.key_head_dim};
  const QuantisedRows values{w.kv.value, w.kv.value_scale, w.kv.dtype, w.kv.value_head_dim};
  Rotation<T> rotation(p.rotary_dim, w.kv.key_head_dim, p.interleaved);
  const Packs key_packs(w.kv.key, w.kv.key_head_dim, w.kv.dtype);
  const Packs value_packs(w.kv.value, w.kv.value_head_dim, w.kv.dtype);
  T turned[kMaxHeadDim];  // a key on its way to packs or numbers
  for (int64_t token = token_begin; token < token_end; token++) {
    const int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[token]
                                              : static_cast<const int32_t*>(p.positions)[token];
    rotation.turn_to(p.cos_sin + position * p.cos_sin_stride);
    for (int64_t head = 0; head < p.num_q_heads; head++)
      rotation(row(p.query_out, token * p.out_stride_token + head * p.out_stride_head),
               row(p.query, token * p.query_stride_token + head * p.query_stride_head));
    const int64_t slot = token < w.num_tokens ? w.slot_mapping[token] : -1;
    if (slot < 0) continue;
    const int64_t block = slot / w.kv.block_size, in_block = slot % w.kv.block_size;
    const auto place = [&](const CacheView& cache, int64_t head) {
      return row(cache.data,
                 block * cache.stride_block + in_block * cache.stride_token + head * cache.stride_head);
    };
    for (int64_t head = 0; head < w.kv.num_kv_heads; head++) {
      const T* const key = row(w.key, token * w.key_stride_token + head * w.key_stride_head);
      const T* const value = row(w.value, token * w.value_stride_token + head * w.value_stride_head);
      if (is_quantised(w.kv.dtype)) {
        rotation(turned, key);
        keys.write(turned, w.dtype, block, in_block, head);
        values.write(value, w.dtype, block, in_block, head);
        continue;
      }
      T* const to = place(w.kv.key, head);
      rotation(key_packs.plain() ? to : turned, key);
      if (!key_packs.plain())
        key_packs.scatter(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(turned));
      value_packs.scatter(reinterpret_cast<char*>(place(w.kv.value, head)),
                          reinterpret_cast<const char*>(value));
    }
  }
}
