// Merging of two attention results over disjoint sets of keys.
// Included inside the namespace of one instruction set, after its vector vocabulary.

template <class T>
void merge_states(const MergeStatesParams& p, int32_t token_begin, int32_t token_end) {
  const auto row = [](auto* base, int64_t offset) {
    using Byte = decltype(base);
    return static_cast<Byte>(base) + offset;
  };
  for (int64_t token = token_begin; token < token_end; token++)
    for (int head = 0; head < p.num_heads; head++) {
      const T* a = reinterpret_cast<const T*>(
          row(static_cast<const char*>(p.out_a), token * p.a_stride_token + head * p.a_stride_head));
      const T* b = reinterpret_cast<const T*>(
          row(static_cast<const char*>(p.out_b), token * p.b_stride_token + head * p.b_stride_head));
      T* out = reinterpret_cast<T*>(
          row(static_cast<char*>(p.out), token * p.out_stride_token + head * p.out_stride_head));
      const int64_t at = token * p.num_heads + head;
      const float lse_a = p.lse_a[at], lse_b = p.lse_b[at];
      const bool only_a = lse_b == -kInfinity, only_b = lse_a == -kInfinity;
      const double top = lse_a > lse_b || lse_a != lse_a ? lse_a : lse_b;  // NaN, where there is one
      const double weight_a = only_b ? 0 : only_a ? 1 : __builtin_exp(double(lse_a) - top);
      const double weight_b = only_a ? 0 : only_b ? 1 : __builtin_exp(double(lse_b) - top);
      const double total = weight_a + weight_b;  // 0 when both are empty
      const Vec factor_a = broadcast(float(weight_a / total)), factor_b = broadcast(float(weight_b / total));
      const auto merged = [&](Pair x, Pair y) {
        // The identity's values are not looked at: they may be anything.
        if (total == 0) return Pair{zero(), zero()};
        if (only_a) return x;
        if (only_b) return y;
        return Pair{fma(x.a, factor_a, mul(y.a, factor_b)), fma(x.b, factor_a, mul(y.b, factor_b))};
      };
      for (int i = 0; i < p.head_dim; i += 2 * kLanes) {
        const int left = p.head_dim - i;
        if (left < 2 * kLanes) {
          store_pair(out + i, merged(load_pair(a + i, left), load_pair(b + i, left)), left);
        } else {
          store_pair(out + i, merged(load_pair(a + i), load_pair(b + i)));
        }
      }
      p.lse[at] = total == 0 ? -kInfinity : float(top + __builtin_log(total));
    }
}
