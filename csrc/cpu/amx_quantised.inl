// Quantised caches for the AMX kernels: numbers of 8 bits become bf16, which holds each of them exactly, on
// their way to a tile register; scales go on to scores and weights.
// Included inside the namespace of one instruction set, after scales.inl and amx_weights.inl.

// The bf16 that is worth m * 2^exponent.
constexpr uint16_t bf16_bits(int m, int exponent) {
  int top = 0;
  while (m >> (top + 1) != 0) top++;
  return m == 0 ? 0 : uint16_t((exponent + top + 127) << 7 | (m - (1 << top)) << (7 - top));
}

// For _mm512_gf2p8affine_epi64_epi8: bits [first, last] of the result are those `from` places above.
constexpr uint64_t bits_moved(int first, int last, int from) {
  uint64_t matrix = 0;
  for (int bit = first; bit <= last; bit++) matrix |= uint64_t(1) << (bit + from + 8 * (7 - bit));
  return matrix;
}

// How the codes of a type become bf16 numbers that are worth 2^-kExponent of theirs. Both bytes follow from
// the bits of a code, or of its index, by moving them; but where the index has none of the bits kMoved, its
// lowest 6 say where they stand in a table. The sign is added at the end.
template <class Q>
struct Codes;

// 8-bit floats: their exponents are the last ones before that of 2. The index, beside the sign, puts the
// codes that are not finite before the subnormal ones; what is normal and left in the table has the same
// exponent.
template <int kFraction, int kNotFinite, int kTableEntries>
struct FloatCodes {
  static constexpr int kExponents = 1 << (7 - kFraction), kFirst = 128 - kExponents;
  static constexpr int kBias = kExponents / 2 - 1, kExponent = 127 - kBias - kFirst;
  static constexpr int kIndexOfZero = kNotFinite, kMoved = 0x80 - kTableEntries;
  static_assert(kTableEntries >= kNotFinite + (1 << kFraction));
  static constexpr bool kMovesIndex = false;
  static constexpr uint64_t kUpper = bits_moved(0, 5 - kFraction, kFraction + 1),
                            kLower = bits_moved(7 - kFraction, 7, kFraction - 7);
  static constexpr int kUpperBits = kFirst / 2;

  static constexpr uint16_t looked_up(int index) {
    const int m = index - kNotFinite;
    if (m >= 0) return bf16_bits(m, 1 - kBias - kFraction - kExponent);
    return kNotFinite > 1 && m == -kNotFinite ? 0x7f80 : 0x7fc0;
  }
};
template <>
struct Codes<f8e4m3> : FloatCodes<3, 1, 16> {};
template <>
struct Codes<f8e5m2> : FloatCodes<2, 4, 8> {};

// The index is the size. From 64 to 127 all have one exponent; 128 happens to come out right too.
template <>
struct Codes<i8> {
  static constexpr int kExponent = 0, kIndexOfZero = 0, kMoved = 0xc0, kUpperBits = 0x42;
  static constexpr bool kMovesIndex = true;
  static constexpr uint64_t kUpper = bits_moved(0, 0, 7), kLower = bits_moved(1, 7, -1);

  static constexpr uint16_t looked_up(int index) { return bf16_bits(index, 0); }
};

template <>
struct Codes<bf16> {
  static constexpr int kExponent = 0;
};

template <class Q>
struct CodeTable {
  alignas(64) uint8_t lower[64] = {}, upper[64] = {};

  constexpr CodeTable() {
    for (int i = 0; i < 64 && (i & Codes<Q>::kMoved) == 0; i++) {
      lower[i] = uint8_t(Codes<Q>::looked_up(i));
      upper[i] = uint8_t(Codes<Q>::looked_up(i) >> 8);
    }
  }
};
template <class Q>
constexpr CodeTable<Q> kCodeTable;

// A constant that the compiler does not make anew for each use: that would take a shuffle.
inline __m512i constant(__m512i x) {
  asm("" : "+v"(x));
  return x;
}

struct TwoVectors {
  __m512i low, high;
};

// What makes numbers of codes of type Q, with its constants in registers.
template <class Q>
class Widener {
 public:
  // 64 codes as bf16: `low` has those of the lower halves of the four quarters, `high` of the upper ones.
  __attribute__((always_inline)) TwoVectors operator()(__m512i codes) const {
    const __m512i index = C::kMovesIndex ? _mm512_abs_epi8(codes) : _mm512_add_epi8(codes, index_of_zero_);
    const __m512i moved = C::kMovesIndex ? index : codes;
    const __mmask64 looked_up = _mm512_testn_epi8_mask(index, moved_);
    const __m512i lower = _mm512_mask_permutexvar_epi8(_mm512_gf2p8affine_epi64_epi8(moved, to_lower_, 0),
                                                       looked_up, index, lower_);
    const __m512i size = _mm512_mask_permutexvar_epi8(
        _mm512_gf2p8affine_epi64_epi8(moved, to_upper_, C::kUpperBits), looked_up, index, upper_);
    constexpr int kFirstOrBothOthers = 0xf8;
    const __m512i upper = _mm512_ternarylogic_epi64(size, codes, sign_, kFirstOrBothOthers);
    return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  }

  // 32 codes of each of two rows as bf16, paired as unpacking would pair them.
  __attribute__((always_inline)) TwoVectors pair(__m256i a, __m256i b) const {
    const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    return (*this)(_mm512_permutexvar_epi8(pair_order_, codes));
  }

 private:
  using C = Codes<Q>;
  alignas(64) static constexpr uint8_t kPairOrder[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  static __m512i bytes(int x) { return constant(_mm512_set1_epi8(int8_t(x))); }

  const __m512i index_of_zero_ = bytes(C::kIndexOfZero), moved_ = bytes(C::kMoved), sign_ = bytes(0x80);
  const __m512i to_lower_ = constant(_mm512_set1_epi64(int64_t(C::kLower)));
  const __m512i to_upper_ = constant(_mm512_set1_epi64(int64_t(C::kUpper)));
  const __m512i lower_ = _mm512_load_si512(kCodeTable<Q>.lower);
  const __m512i upper_ = _mm512_load_si512(kCodeTable<Q>.upper);
  const __m512i pair_order_ = _mm512_load_si512(kPairOrder);
};

template <>
class Widener<bf16> {};

// 64 dims of a key as bf16, and what a query's are to meet them: in the order that a Widener leaves. Fewer
// dims, the last ones of a row, come in their own order.
constexpr int kMixedDims = 64;
template <class Q>
__attribute__((always_inline)) inline TwoVectors mixed_dims(const Widener<Q>& widen, const char* row) {
  return widen(load32(row));
}
inline TwoVectors mixed_dims(TwoVectors x) {
  return {_mm512_permutex2var_epi64(x.low, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), x.high),
          _mm512_permutex2var_epi64(x.low, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), x.high)};
}
template <class Q>
__attribute__((always_inline)) inline TwoVectors last_dims(const Widener<Q>& widen, const char* row,
                                                           int left) {
  const __m512i codes = _mm512_maskz_loadu_epi8((__mmask64(1) << left) - 1, row);
  return widen(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes));
}

// Calls f(number of the type that a cache of `dtype` holds, of those that tiles take).
template <class F>
inline void with_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f8e4m3: return f(f8e4m3{});
    case DType::f8e5m2: return f(f8e5m2{});
    case DType::i8: return f(i8{});
    default: return f(bf16{});
  }
}
template <class F>
inline void with_bool(bool condition, F&& f) {
  condition ? f(Constant<1>{}) : f(Constant<0>{});
}
inline bool has_element(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f8e4m3 || dtype == DType::f8e5m2 || dtype == DType::i8;
}

// The scales of a chunk's tokens for a KV head, with what the numbers above are short of: token by token, or
// one factor of all scores, and one of all values.
class ChunkScales {
 public:
  template <class Carver>
  ChunkScales(const PagedKV& kv, Carver& carver)
      : kv_(kv),
        key_(carver.template take<float>(key_varies() ? kChunkTokens + kLanes : 0)),
        value_(carver.template take<float>(value_varies() ? kChunkTokens + kLanes : 0)),
        inverse_(carver.template take<float>(value_varies() ? kChunkTokens + kLanes : 0)) {
    with_element(kv.dtype, [&](auto number) { power_ = float(1 << Codes<decltype(number)>::kExponent); });
  }

  bool key_varies() const { return kv_.key_scale.per_token; }
  bool value_varies() const { return kv_.value_scale.per_token; }

  // Of the tokens [begin, end) of a chunk.
  void take(const PageWalk& walk, int64_t head, int begin, int end) {
    if (key_varies()) {
      const int num_tokens = read(walk, kv_.key_scale, head, begin, end, key_);
      for (int t = 0; t < num_tokens; t += kLanes) store(key_ + t, with_default_nan(load(key_ + t)));
    }
    if (!value_varies()) return;
    const int num_tokens = read(walk, kv_.value_scale, head, begin, end, value_);
    const __m512i even = _mm512_slli_epi32(lane_numbers(), 1),
                  odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int t = 0; t < num_tokens; t += kStepTokens) {
      Vec inverse[2];
      for (int i = 0; i < 2; i++) {
        const int at = t + i * kLanes;
        const Vec x = max(broadcast(kLeast), load(value_ + at));  // 0 has no inverse
        store(value_ + at, with_default_nan(x));
        inverse[i] = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), broadcast(1.0f), x);
      }
      store(inverse_ + t, _mm512_permutex2var_ps(inverse[0], even, inverse[1]));
      store(inverse_ + t + kLanes, _mm512_permutex2var_ps(inverse[0], odd, inverse[1]));
    }
  }

  // Scores [token][kColumns] of the steps [first_step, end_step) by the scales of their tokens.
  template <int kColumns>
  void scale_scores(int first_step, int end_step, float* scores) const {
    constexpr int kTokens = kLanes / kColumns;  // of a vector
    const __m512i tokens = _mm512_srli_epi32(lane_numbers(), __builtin_ctz(kColumns));
    for (int t = first_step * kStepTokens; t < end_step * kStepTokens; t += kTokens) {
      const Vec scale = _mm512_permutexvar_ps(tokens, _mm512_maskz_loadu_ps((1u << kTokens) - 1, key_ + t));
      store(scores + t * kColumns, mul(load(scores + t * kColumns), scale));
    }
  }
  ValueScales of_values() const { return {value_, inverse_}; }

  // What all scores of a head lack.
  float key_factor(int64_t head) const {
    return (key_varies() ? 1.0f : *scale_of(kv_.key_scale, head)) * power_;
  }
  // One over what all values of a head lack.
  float value_inverse(int64_t head) const {
    const float scale = value_varies() ? 1.0f : *scale_of(kv_.value_scale, head);
    return 1.0f / (scale < kLeast ? kLeast : scale) / power_;
  }

 private:
  static constexpr float kLeast = 0x1p-100f;

  // Reads the scales of whole steps; how many there are.
  static int read(const PageWalk& walk, const ScaleView& view, int64_t head, int begin, int end, float* out) {
    for_each_scale(walk, view, head, begin, end, [&](int t, const float* x) { out[t] = *x; });
    const int num_tokens = end - begin, padded = steps_of(num_tokens, kStepTokens) * kStepTokens;
    for (int t = num_tokens; t < padded; t++) out[t] = 1.0f;
    return padded;
  }

  const PagedKV& kv_;
  float power_ = 1.0f;
  float *key_, *value_, *inverse_;  // as in ValueScales
};
