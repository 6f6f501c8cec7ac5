// The vector vocabulary in AVX2, FMA and F16C. vec_scalar.inl says what each word means.

constexpr int kLanes = 8;
constexpr int kAccumulators = 8;

using Vec = __m256;

struct Pair {
  Vec a, b;
};

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* x) { return _mm256_loadu_ps(x); }
inline Vec load_once(const float* x) { return *reinterpret_cast<const volatile Vec*>(x); }
inline void store(float* x, Vec y) { _mm256_storeu_ps(x, y); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec abs(Vec x) { return _mm256_andnot_ps(broadcast(-0.0f), x); }
inline Vec copy_sign(Vec size, Vec sign) { return _mm256_or_ps(size, _mm256_and_ps(broadcast(-0.0f), sign)); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline float first(Vec x) { return _mm256_cvtss_f32(x); }
inline float sum(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float max(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

inline Vec keep_bits(Vec x, uint32_t bits, float other) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane);
  return _mm256_blendv_ps(broadcast(other), x, _mm256_castsi256_ps(kept));
}

inline Vec exp2(Vec x) {
  const Vec shifted = add(x, broadcast(kExp2Shift));
  const Vec f = sub(x, sub(shifted, broadcast(kExp2Shift)));
  Vec y = broadcast(kExp2[6]);
#pragma GCC unroll 6
  for (int i = 5; i >= 0; i--) y = fma(y, f, broadcast(kExp2[i]));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q));
  const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_and_si256(exponent, number));
  return _mm256_and_ps(_mm256_cmp_ps(x, broadcast(-126.0f), _CMP_NLT_UQ), _mm256_castsi256_ps(scaled));
}

// Transposes and adds by halves. Each step joins p and q: a blend takes half the lanes of each, a shuffle
// the other halves crosswise, and their sum holds the folded p beside the folded q. (Horizontal additions
// would do too, but shuffles have one port only.)
inline Vec reduce(const Vec (&x)[kLanes]) {
  Vec t[4], u[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    t[i] = add(_mm256_blend_ps(x[i], x[i + 4], 0xf0), _mm256_permute2f128_ps(x[i], x[i + 4], 0x21));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    u[i] = add(_mm256_blend_ps(t[i], t[i + 2], 0xcc), _mm256_shuffle_ps(t[i], t[i + 2], 0x4e));
  return add(_mm256_blend_ps(u[0], u[1], 0xaa), _mm256_permute_ps(_mm256_blend_ps(u[0], u[1], 0x55), 0xb1));
}

inline void deal(Vec (&)[1]) {}
inline void deal(Vec (&x)[2]) {
  const Vec y = _mm256_permute2f128_ps(x[0], x[1], 0x20);
  x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
  x[0] = y;
}
inline void deal(Vec (&x)[4]) {
  const auto interleave = [](Vec p, Vec q, bool high) {
    const __m256d a = _mm256_castps_pd(p), b = _mm256_castps_pd(q);
    return _mm256_castpd_ps(high ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
  };
  const Vec even[2] = {interleave(x[0], x[1], false), interleave(x[2], x[3], false)};
  const Vec odd[2] = {interleave(x[0], x[1], true), interleave(x[2], x[3], true)};
  x[0] = _mm256_permute2f128_ps(even[0], even[1], 0x20);
  x[1] = _mm256_permute2f128_ps(odd[0], odd[1], 0x20);
  x[2] = _mm256_permute2f128_ps(even[0], even[1], 0x31);
  x[3] = _mm256_permute2f128_ps(odd[0], odd[1], 0x31);
}

// f32 and f16 pairs keep the elements' order.
inline Pair load_pair(const float* x) { return {load(x), load(x + 8)}; }
inline Pair load_pair(const float* x, int) { return {load(x), zero()}; }
inline void store_pair(float* x, Pair y) {
  store(x, y.a);
  store(x + 8, y.b);
}
inline void store_pair(float* x, Pair y, int) { store(x, y.a); }

inline __m128i load8(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
inline void store8(void* x, __m128i y) { _mm_storeu_si128(static_cast<__m128i*>(x), y); }

inline Pair load_pair(const f16* x) { return {_mm256_cvtph_ps(load8(x)), _mm256_cvtph_ps(load8(x + 8))}; }
inline Pair load_pair(const f16* x, int) { return {_mm256_cvtph_ps(load8(x)), zero()}; }
inline void store_pair(f16* x, Pair y, int) { store8(x, _mm256_cvtps_ph(y.a, _MM_FROUND_TO_NEAREST_INT)); }
inline void store_pair(f16* x, Pair y) {
  store_pair(x, y, 8);
  store8(x + 8, _mm256_cvtps_ph(y.b, _MM_FROUND_TO_NEAREST_INT));
}

// A bf16 pair holds the even elements in `a` and the odd ones in `b`: each is one instruction away from
// 32-bit words of two elements.
inline Pair split_bf16(__m256i x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))))};
}
// To the nearest bf16 (ties to even, NaN quiet), in the upper half of each 32-bit word; the lower is waste.
inline __m256i round_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline __m256i join_bf16(Pair x) {
  return _mm256_blend_epi16(_mm256_srli_epi32(round_bf16(x.a), 16), round_bf16(x.b), 0xaa);
}
inline Pair load_pair(const bf16* x) {
  return split_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
inline Pair load_pair(const bf16* x, int) { return split_bf16(_mm256_zextsi128_si256(load8(x))); }
inline void store_pair(bf16* x, Pair y) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), join_bf16(y)); }
inline void store_pair(bf16* x, Pair y, int) { store8(x, _mm256_castsi256_si128(join_bf16(y))); }

// Quantised numbers, 16 bytes to a pair.
inline __m128i load_bytes(const void* x) { return load8(x); }
inline __m128i load_bytes(const void* x, int) { return _mm_loadl_epi64(static_cast<const __m128i*>(x)); }
// Two int4 in a byte, each moved to a byte of its own.
inline __m128i bytes_of_i4(__m128i x) {
  const __m128i words = _mm_cvtepu8_epi16(x), sign = _mm_set1_epi8(8);
  const __m128i bytes = _mm_or_si128(_mm_and_si128(words, _mm_set1_epi16(0x000f)),
                                     _mm_and_si128(_mm_slli_epi16(words, 4), _mm_set1_epi16(0x0f00)));
  return _mm_sub_epi8(_mm_xor_si128(bytes, sign), sign);
}
inline __m128i load_bytes(const i4x2* x) {
  return bytes_of_i4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}
inline __m128i load_bytes(const i4x2* x, int) {
  int32_t bytes;
  memcpy(&bytes, x, sizeof(bytes));
  return bytes_of_i4(_mm_cvtsi32_si128(bytes));
}

// In the tensor's order,
inline Pair in_order(i8, __m128i x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
// and in that of bf16 pairs.
inline Pair evens_and_odds(i8, __m128i x) {
  const __m256i words = _mm256_cvtepi8_epi16(x);
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16))};
}

// fp8 goes by way of f16, from the upper bytes of words: e5m2 is that; e4m3 moved to its places is worth 2^-8
// of what it stands for.
inline Pair widen_words(f8e5m2, __m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
inline Pair widen_words(f8e4m3, __m256i x) {
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16(int16_t(0xbf80)));
  const __m256i greatest = _mm256_set1_epi16(0x3f80);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, greatest), greatest);
  const Pair y = widen_words(f8e5m2{}, _mm256_or_si256(half, nan));
  return {mul(y.a, broadcast(256.0f)), mul(y.b, broadcast(256.0f))};
}
template <class Q>
inline Pair in_order(Q q, __m128i x) {
  const __m256i places = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                                          -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
  return widen_words(q, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x), places));
}
template <class Q>
inline Pair evens_and_odds(Q q, __m128i x) {
  const __m256i places = _mm256_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14,  //
                                          -1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15);
  return widen_words(q, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x), places));
}

// What a byte is, after load_bytes().
f8e4m3 number_of(const f8e4m3*);
f8e5m2 number_of(const f8e5m2*);
i8 number_of(const i8*);
i8 number_of(const i4x2*);
template <class Q, class... N>
inline auto load_pair(const Q* x, N... n) -> decltype(in_order(number_of(x), load_bytes(x, n...))) {
  return in_order(decltype(number_of(x)){}, load_bytes(x, n...));
}
template <class Q, class... N>
inline Pair load_as_bf16(const Q* x, N... n) {
  return evens_and_odds(decltype(number_of(x)){}, load_bytes(x, n...));
}

// Each of two numbers in eight elements of a pair, in the tensor's order.
inline Pair broadcast_to_eights(const float* x) { return {broadcast(x[0]), broadcast(x[1])}; }

// From the tensor's order to that of bf16 pairs: even elements, odd ones.
inline Pair reorder_bf16(Pair x) {
  const __m256i even_odd = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const Vec a = _mm256_permutevar8x32_ps(x.a, even_odd), b = _mm256_permutevar8x32_ps(x.b, even_odd);
  return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
}
