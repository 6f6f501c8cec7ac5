// Tiles of quantised caches as f32: numbers times their scales.
// Included inside the namespace of one instruction set, after its vector vocabulary, page_walk.inl and
// scales.inl.

// Numbers, or what belongs to them in the tensor's order, in T's pair order.
template <class T, class Q, class... N>
inline Pair load_as(const Q* x, N... n) {
  if constexpr (dtype_of<T>::value == DType::bf16) {
    return load_as_bf16(x, n...);
  } else {
    return load_pair(x, n...);
  }
}
template <class T>
inline Pair reorder(Pair x) {
  return dtype_of<T>::value == DType::bf16 ? reorder_bf16(x) : x;
}

// The scales of a token's elements in T's pair order, a pair of vectors at a time: one for all,
template <class T, class Q>
struct RowScales {
  const Vec scale;

  RowScales(const ScaleView&, const float* at, int) : scale(broadcast(*at)) {}
  Pair operator()(int) const { return {scale, scale}; }
};
// or of groups, whose sizes are multiples of 8.
template <class T>
struct RowScales<T, i4x2> {
  static constexpr int kPerPair = 2 * kLanes / 8;
  float eighths[kMaxHeadDim / 8 + kLanes];

  RowScales(const ScaleView& view, const float* at, int dim) {
    // In whole vectors: what is too much the next group writes over. Beyond the row pairs hold zeros.
    for (int begin = 0; begin < dim; begin += view.group) {
      const Vec scale = broadcast(*at);
      for (int i = begin; i < begin + view.group; i += 8 * kLanes) store(eighths + i / 8, scale);
      at = reinterpret_cast<const float*>(reinterpret_cast<const char*>(at) + view.stride_group);
    }
  }
  Pair operator()(int pair) const { return reorder<T>(broadcast_to_eights(eighths + pair * kPerPair)); }
};

// A tile as f32 in T's pair order, rows padded(dim) apart. Its first token is at `position`.
template <class T, class Q>
void unpack_quantised(const PageWalk& walk, const ScaleView& view, int64_t head, int position,
                      const Tile<Q>& tile, int num_tokens, float* out, Prefetcher& prefetcher) {
  constexpr int kStep = 2 * kLanes / numbers_per_element(dtype_of<Q>::value);
  const int dim = tile.num_pairs * 2 * kLanes + tile.tail;
  for_each_scale(walk, view, head, position, position + num_tokens, [&](int t, const float* scale) {
    const RowScales<T, Q> scales(view, scale, dim);
    const auto put = [&](int pair, Pair x) {
      const Pair by = scales(pair);
      store(out, mul(x.a, by.a));
      store(out + kLanes, mul(x.b, by.b));
      out += 2 * kLanes;
    };
    const Q* x = tile.row(t);
    for (int pair = 0; pair < tile.num_pairs; pair++) put(pair, load_as<T>(x + pair * kStep));
    if (tile.tail) put(tile.num_pairs, load_as<T>(x + tile.num_pairs * kStep, tile.tail));
    prefetcher.step(row_nbytes(dtype_of<Q>::value, dim));
  });
}

// Calls f(number of the type that dtype stands for).
template <class F>
inline void with_quantised(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f8e4m3: return f(f8e4m3{});
    case DType::f8e5m2: return f(f8e5m2{});
    case DType::i8: return f(i8{});
    default: return f(i4x2{});
  }
}
