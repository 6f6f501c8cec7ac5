// Tiles of quantised caches as f32: numbers times their scales.
// Included inside the namespace of one instruction set, after its vector vocabulary and page_walk.inl.

// Elements of T's pair order from numbers in the tensor's order.
template <class T>
inline Pair reorder(Pair x) {
  return x;
}
template <>
inline Pair reorder<bf16>(Pair x) {
  return reorder_bf16(x);
}

// A tile as f32 in T's pair order, rows padded(dim) apart.
template <class T, class Q>
void unpack_quantised(const Tile<Q>& tile, int num_tokens, const float* scales, float* out,
                      Prefetcher& prefetcher) {
  for (int t = 0; t < num_tokens; t++) {
    const Vec scale = broadcast(scales[t]);
    const auto put = [&](Pair x) {
      const Pair y = reorder<T>({mul(x.a, scale), mul(x.b, scale)});
      store(out, y.a);
      store(out + kLanes, y.b);
      out += 2 * kLanes;
      prefetcher.step<int(2 * kLanes * sizeof(Q))>();
    };
    const Q* x = tile.row(t);
    for (int pair = 0; pair < tile.num_pairs; pair++) put(load_pair(x + pair * 2 * kLanes));
    if (tile.tail) put(load_pair(x + tile.num_pairs * 2 * kLanes, tile.tail));
  }
}

// Calls f(number of the type that dtype stands for).
template <class F>
inline void with_quantised(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f8e4m3: return f(f8e4m3{});
    case DType::f8e5m2: return f(f8e5m2{});
    default: return f(i8{});
  }
}
