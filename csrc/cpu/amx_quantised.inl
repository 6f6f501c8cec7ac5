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
// the bits of a code, or of its index, by moving them; but where the index is below kLookedUp, they stand in
// a table. The sign is added at the end.
template <class Q>
struct Codes;

// 8-bit floats: their exponents are the last ones before that of 2. The index puts the codes that are not
// finite before the subnormal ones.
template <int kFraction, int kNotFinite>
struct FloatCodes {
  static constexpr int kExponents = 1 << (7 - kFraction), kFirst = 128 - kExponents;
  static constexpr int kBias = kExponents / 2 - 1, kExponent = 127 - kBias - kFirst;
  static constexpr int kLookedUp = 2 * (kNotFinite + (1 << kFraction));
  static constexpr bool kMovesIndex = false;
  static constexpr uint64_t kUpper = bits_moved(0, 5 - kFraction, kFraction + 1),
                            kLower = bits_moved(7 - kFraction, 7, kFraction - 7);
  static constexpr int kUpperBits = kFirst / 2;

  static __m512i index(__m512i code) {
    return _mm512_add_epi8(_mm512_add_epi8(code, code), _mm512_set1_epi8(2 * kNotFinite));
  }
  static constexpr uint16_t looked_up(int index) {
    const int m = index / 2 - kNotFinite;
    if (m >= 0) return bf16_bits(m, 1 - kBias - kFraction - kExponent);
    return kNotFinite > 1 && m == -kNotFinite ? 0x7f80 : 0x7fc0;
  }
};
template <>
struct Codes<f8e4m3> : FloatCodes<3, 1> {};
template <>
struct Codes<f8e5m2> : FloatCodes<2, 4> {};

// The index is the size. From 64 to 127 all have one exponent; 128 happens to come out right too.
template <>
struct Codes<i8> {
  static constexpr int kExponent = 0, kLookedUp = 64, kUpperBits = 0x42;
  static constexpr bool kMovesIndex = true;
  static constexpr uint64_t kUpper = bits_moved(0, 0, 7), kLower = bits_moved(1, 7, -1);

  static __m512i index(__m512i code) { return _mm512_abs_epi8(code); }
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
    for (int i = 0; i < Codes<Q>::kLookedUp; i++) {
      lower[i] = uint8_t(Codes<Q>::looked_up(i));
      upper[i] = uint8_t(Codes<Q>::looked_up(i) >> 8);
    }
  }
};
template <class Q>
constexpr CodeTable<Q> kCodeTable;

// 64 codes as bf16: `low` has those of the lower halves of the four quarters, `high` of the upper ones.
struct TwoVectors {
  __m512i low, high;
};
template <class Q>
__attribute__((always_inline)) inline TwoVectors numbers_of(__m512i codes) {
  using C = Codes<Q>;
  const __m512i index = C::index(codes), moved = C::kMovesIndex ? index : codes;
  const __mmask64 looked_up = _mm512_cmplt_epu8_mask(index, _mm512_set1_epi8(C::kLookedUp));
  const auto byte = [&](uint64_t matrix, auto bits, const uint8_t* table) __attribute__((always_inline)) {
    const __m512i y =
        _mm512_gf2p8affine_epi64_epi8(moved, _mm512_set1_epi64(int64_t(matrix)), decltype(bits)::value);
    return _mm512_mask_permutexvar_epi8(y, looked_up, index, _mm512_load_si512(table));
  };
  const __m512i lower = byte(C::kLower, Constant<0>{}, kCodeTable<Q>.lower);
  const __m512i size = byte(C::kUpper, Constant<C::kUpperBits>{}, kCodeTable<Q>.upper);
  constexpr int kFirstOrBothOthers = 0xf8;
  const __m512i upper =
      _mm512_ternarylogic_epi64(size, codes, _mm512_set1_epi8(int8_t(0x80)), kFirstOrBothOthers);
  return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
}

// 64 elements of a row, or as many as there are left, as bf16 in their order.
template <class Q>
__attribute__((always_inline)) inline TwoVectors in_order(__m512i codes) {
  return numbers_of<Q>(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes));
}
template <class Q>
__attribute__((always_inline)) inline TwoVectors load_numbers(const char* row) {
  return in_order<Q>(load32(row));
}
template <class Q>
__attribute__((always_inline)) inline TwoVectors load_numbers(const char* row, int left) {
  return in_order<Q>(_mm512_maskz_loadu_epi8((__mmask64(1) << left) - 1, row));
}

// 32 elements of two rows as bf16, paired as unpacking would pair them.
template <class Q>
__attribute__((always_inline)) inline TwoVectors pair_numbers(__m256i a, __m256i b) {
  alignas(64) static constexpr uint8_t kOrder[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  return numbers_of<Q>(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder), codes));
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

// The scales of a chunk's tokens for a KV head, with what the numbers above are short of.
class ChunkScales {
 public:
  template <class Carver>
  ChunkScales(const PagedKV& kv, Carver& carver)
      : kv_(kv),
        used_(kv.dtype != DType::bf16),
        key_(carver.template take<float>(used_ ? kChunkTokens + kLanes : 0)),
        value_(carver.template take<float>(used_ ? kChunkTokens + kLanes : 0)),
        inverse_(carver.template take<float>(used_ ? kChunkTokens + kLanes : 0)) {}

  bool used() const { return used_; }

  // Of the tokens [begin, end) of a chunk.
  void take(const PageWalk& walk, int64_t head, int begin, int end) {
    float power = 1.0f;
    with_element(kv_.dtype, [&](auto number) { power = float(1 << Codes<decltype(number)>::kExponent); });
    const int num_tokens = end - begin, padded = steps_of(num_tokens, kStepTokens) * kStepTokens;
    for_each_scale(walk, kv_.key_scale, head, begin, end, [&](int t, const float* x) { key_[t] = *x; });
    for_each_scale(walk, kv_.value_scale, head, begin, end, [&](int t, const float* x) { value_[t] = *x; });
    for (int t = num_tokens; t < padded; t++) key_[t] = value_[t] = 1.0f;
    const Vec power_of_2 = broadcast(power), least = broadcast(0x1p-100f);
    const __m512i even = _mm512_slli_epi32(lane_numbers(), 1),
                  odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int t = 0; t < padded; t += kStepTokens) {
      Vec inverse[2];
      for (int i = 0; i < 2; i++) {
        const int at = t + i * kLanes;
        store(key_ + at, mul(load(key_ + at), power_of_2));
        // A NaN of any bits would not survive round_words(), and 0 has no inverse.
        const Vec x = mul(max(least, load(value_ + at)), power_of_2);
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        store(value_ + at, _mm512_mask_mov_ps(x, nan, broadcast(__builtin_nanf(""))));
        inverse[i] = _mm512_maskz_div_ps(__mmask16(~nan), broadcast(1.0f), x);
      }
      store(inverse_ + t, _mm512_permutex2var_ps(inverse[0], even, inverse[1]));
      store(inverse_ + t + kLanes, _mm512_permutex2var_ps(inverse[0], odd, inverse[1]));
    }
  }

  // Scores [token][kColumns] of the steps [first_step, end_step).
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

 private:
  const PagedKV& kv_;
  const bool used_;
  float *key_, *value_, *inverse_;  // as in ValueScales
};
