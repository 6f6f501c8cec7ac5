// The vector vocabulary in AVX-512 (F, BW, DQ, VL). vec_scalar.inl says what each word means.

constexpr int kLanes = 16;
constexpr int kAccumulators = 16;

using Vec = __m512;

struct Pair {
  Vec a, b;
};

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
inline Vec load_once(const float* x) { return load(x); }
inline void store(float* x, Vec y) { _mm512_storeu_ps(x, y); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec abs(Vec x) { return _mm512_abs_ps(x); }
inline Vec copy_sign(Vec size, Vec sign) { return _mm512_or_ps(size, _mm512_and_ps(broadcast(-0.0f), sign)); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
inline float first(Vec x) { return _mm512_cvtss_f32(x); }
inline float sum(Vec x) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
inline float max(Vec x) {
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

inline __mmask32 first_lanes(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }

inline Vec keep_bits(Vec x, uint32_t bits, float other) {
  return _mm512_mask_mov_ps(broadcast(other), __mmask16(bits), x);
}

inline Vec exp2(Vec x) {
  const Vec shifted = add(x, broadcast(kExp2Shift));
  const Vec f = sub(x, sub(shifted, broadcast(kExp2Shift)));
  Vec y = broadcast(kExp2[6]);
#pragma GCC unroll 6
  for (int i = 5; i >= 0; i--) y = fma(y, f, broadcast(kExp2[i]));
  const __mmask16 normal = _mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ);
  const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(
      normal, _mm512_castps_si512(y), _mm512_maskz_slli_epi32(number, _mm512_castps_si512(shifted), 23)));
}

// Transposes and adds by halves. Each step joins p and q: a blend takes half the lanes of each, a shuffle
// the other halves crosswise, and their sum holds the folded p beside the folded q. (Two shuffles would do
// too, but shuffles have one port only.)
inline Vec reduce(const Vec (&x)[kLanes]) {
  const __m512i swap_quarters = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  const __m512i swap_lanes = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  Vec t[8], u[4], v[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    t[i] = add(_mm512_mask_mov_ps(x[i], 0xff00, x[i + 8]), _mm512_shuffle_f32x4(x[i], x[i + 8], 0x4e));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    u[i] = add(_mm512_mask_mov_ps(t[i], 0xf0f0, t[i + 4]),
               _mm512_permutex2var_ps(t[i], swap_quarters, t[i + 4]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    v[i] = add(_mm512_mask_mov_ps(u[i], 0xcccc, u[i + 2]), _mm512_shuffle_ps(u[i], u[i + 2], 0x4e));
  return add(_mm512_mask_mov_ps(v[0], 0xaaaa, v[1]), _mm512_permutex2var_ps(v[0], swap_lanes, v[1]));
}

inline void deal(Vec (&)[1]) {}
inline void deal(Vec (&x)[2]) {
  const Vec y = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
  x[1] = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  x[0] = y;
}
inline void deal(Vec (&x)[4]) {
  const Vec low[2] = {_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0x44)};
  const Vec high[2] = {_mm512_shuffle_f32x4(x[0], x[1], 0xee), _mm512_shuffle_f32x4(x[2], x[3], 0xee)};
  x[0] = _mm512_shuffle_f32x4(low[0], low[1], 0x88);
  x[1] = _mm512_shuffle_f32x4(low[0], low[1], 0xdd);
  x[2] = _mm512_shuffle_f32x4(high[0], high[1], 0x88);
  x[3] = _mm512_shuffle_f32x4(high[0], high[1], 0xdd);
}

// f32 and f16 pairs keep the elements' order.
inline Pair load_pair(const float* x) { return {load(x), load(x + 16)}; }
inline Pair load_pair(const float* x, int n) {
  const __mmask32 m = first_lanes(n);
  return {_mm512_maskz_loadu_ps(__mmask16(m), x), _mm512_maskz_loadu_ps(__mmask16(m >> 16), x + 16)};
}
inline void store_pair(float* x, Pair y) {
  store(x, y.a);
  store(x + 16, y.b);
}
inline void store_pair(float* x, Pair y, int n) {
  const __mmask32 m = first_lanes(n);
  _mm512_mask_storeu_ps(x, __mmask16(m), y.a);
  _mm512_mask_storeu_ps(x + 16, __mmask16(m >> 16), y.b);
}

inline __m512i load32(const void* x) { return _mm512_loadu_si512(x); }
inline __m512i load32(const void* x, int n) { return _mm512_maskz_loadu_epi16(first_lanes(n), x); }

inline Pair widen_f16(__m512i x) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(x)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1))};
}
inline __m512i narrow_f16(Pair x) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)),
                            _mm512_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT), 1);
}
inline Pair load_pair(const f16* x) {
  const auto* halves = reinterpret_cast<const __m256i*>(x);
  return {_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
}
inline Pair load_pair(const f16* x, int n) { return widen_f16(load32(x, n)); }
inline void store_pair(f16* x, Pair y) { _mm512_storeu_si512(x, narrow_f16(y)); }
inline void store_pair(f16* x, Pair y, int n) { _mm512_mask_storeu_epi16(x, first_lanes(n), narrow_f16(y)); }

// A bf16 pair holds the lower halves of the four quarters in `a` and the upper ones in `b`: what unpacking
// gives, and what packing takes.
inline Pair split_bf16(__m512i x) {
  return {_mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), x)),
          _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), x))};
}
// To the nearest bf16 (ties to even, NaN quiet), in the upper half of each 32-bit word; the lower is waste.
inline __m512i round_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                              _mm512_set1_epi32(0x400000));
}
inline __m512i join_bf16(Pair x) {
  return _mm512_packus_epi32(_mm512_srli_epi32(round_bf16(x.a), 16), _mm512_srli_epi32(round_bf16(x.b), 16));
}
inline Pair load_pair(const bf16* x) { return split_bf16(load32(x)); }
inline Pair load_pair(const bf16* x, int n) { return split_bf16(load32(x, n)); }
inline void store_pair(bf16* x, Pair y) { _mm512_storeu_si512(x, join_bf16(y)); }
inline void store_pair(bf16* x, Pair y, int n) { _mm512_mask_storeu_epi16(x, first_lanes(n), join_bf16(y)); }

// Quantised numbers, in the tensor's order. fp8 goes by way of f16: e5m2 is the upper byte of one; e4m3 moved
// to its places is worth 2^-8 of what it stands for.
inline __m256i load_bytes(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
inline __m256i load_bytes(const void* x, int n) { return _mm256_maskz_loadu_epi8(first_lanes(n), x); }
inline Pair widen_i8(__m256i x) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x))),
          _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)))};
}
inline Pair widen_e5m2(__m256i x) { return widen_f16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(x), 8)); }
inline Pair widen_e4m3(__m256i x) {
  const __m512i words = _mm512_cvtepu8_epi16(x), low = _mm512_set1_epi16(0x7f);
  const __m512i size = _mm512_and_si512(words, low);
  const __m512i half =
      _mm512_or_si512(_mm512_slli_epi16(_mm512_andnot_si512(low, words), 8), _mm512_slli_epi16(size, 7));
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(size, low);
  const Pair y = widen_f16(_mm512_mask_blend_epi16(nan, half, _mm512_set1_epi16(0x7e00)));
  return {mul(y.a, broadcast(256.0f)), mul(y.b, broadcast(256.0f))};
}
inline Pair load_pair(const i8* x) { return widen_i8(load_bytes(x)); }
inline Pair load_pair(const i8* x, int n) { return widen_i8(load_bytes(x, n)); }
// Two int4 in a byte, looked up by the lowest four bits of an index, which is all that counts of it.
inline Pair widen_i4(__m128i x) {
  const __m128i upper = _mm_srli_epi16(x, 4);
  const Vec numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  const auto look_up = [&](__m128i bytes) {
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes), numbers);
  };
  return {look_up(_mm_unpacklo_epi8(x, upper)), look_up(_mm_unpackhi_epi8(x, upper))};
}
inline Pair load_pair(const i4x2* x) {
  return widen_i4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
inline Pair load_pair(const i4x2* x, int n) {
  return widen_i4(_mm_maskz_loadu_epi8(__mmask16(first_lanes(n / 2)), x));
}
// Each of four numbers in eight elements of a pair, in the tensor's order.
inline Pair broadcast_to_eights(const float* x) {
  const Vec four = _mm512_castps128_ps512(_mm_loadu_ps(x));
  const __m512i first = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
  return {_mm512_permutexvar_ps(first, four),
          _mm512_permutexvar_ps(_mm512_or_si512(first, _mm512_set1_epi32(2)), four)};
}
inline Pair load_pair(const f8e5m2* x) { return widen_e5m2(load_bytes(x)); }
inline Pair load_pair(const f8e5m2* x, int n) { return widen_e5m2(load_bytes(x, n)); }
inline Pair load_pair(const f8e4m3* x) { return widen_e4m3(load_bytes(x)); }
inline Pair load_pair(const f8e4m3* x, int n) { return widen_e4m3(load_bytes(x, n)); }

// From the tensor's order to that of bf16 pairs: the lower halves of the four quarters, the upper ones.
// Quarters of 8 elements: a holds quarters 0 and 1, b 2 and 3.
inline Pair reorder_bf16(Pair x) {
  return {_mm512_shuffle_f32x4(x.a, x.b, 0x88), _mm512_shuffle_f32x4(x.a, x.b, 0xdd)};
}
template <class Q, class... N>
inline Pair load_as_bf16(const Q* x, N... n) {
  return reorder_bf16(load_pair(x, n...));
}
