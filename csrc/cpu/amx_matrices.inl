// Small matrices in vector registers for the AMX kernels: scores of [tokens][rows] on their way to weights.
// Included inside the namespace of one instruction set, after its vector vocabulary.

constexpr int kBlockRows = 16;   // query rows that a tile register holds
constexpr int kStepTokens = 32;  // tokens of a weights . values step

constexpr float kWeight[5] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f, 0.00958285294f};

// 2^x for a logit less its reference: a polynomial of degree 4 with p(0) = 1 on [-1/2, 1/2], relative error
// 3e-6 before rounding (fitted as exp2_constants.inl says). Weights are rounded to bf16, to 2e-3.
inline Vec weight_of(Vec x) {
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = sub(x, whole);
  Vec y = broadcast(kWeight[4]);
#pragma GCC unroll 4
  for (int i = 3; i >= 0; i--) y = fma(y, f, broadcast(kWeight[i]));
  return _mm512_scalef_ps(y, whole);
}

// The greatest of the lanes whose index is the same modulo kColumns, in each of them.
template <int kColumns>
inline Vec max_of_column(Vec x) {
  if constexpr (kColumns <= 8) x = max(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns <= 4) x = max(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  if constexpr (kColumns <= 2) x = max(x, _mm512_permute_ps(x, 0x4e));
  if constexpr (kColumns <= 1) x = max(x, _mm512_permute_ps(x, 0xb1));
  return x;
}

// Rows and columns of a matrix of 32-bit words change places.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // x[i + j]: word j of each quarter, of rows i .. i + 3
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {  // quarters
    const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88),
                  b = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd),
                  d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    y[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    y[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    y[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = y[i];
}

// The sum over tokens of weights [kStepTokens][kColumns], in each lane of its column: token t with t + 16,
// then t + 8, and so on by halves, so that how many columns there are does not show.
template <int kColumns>
__attribute__((always_inline)) inline Vec sum_of_column(const Vec (&x)[kStepTokens * kColumns / kLanes]) {
  constexpr int kCount = kStepTokens * kColumns / kLanes;
  Vec y[kCount / 2];
#pragma GCC unroll 16
  for (int i = 0; i < kCount / 2; i++) y[i] = add(x[i], x[kCount / 2 + i]);
#pragma GCC unroll 4
  for (int half = kCount / 4; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) y[i] = add(y[i], y[half + i]);
  Vec z = y[0];
  if constexpr (kColumns <= 8) z = add(z, _mm512_shuffle_f32x4(z, z, 0x4e));
  if constexpr (kColumns <= 4) z = add(z, _mm512_shuffle_f32x4(z, z, 0xb1));
  if constexpr (kColumns <= 2) z = add(z, _mm512_permute_ps(z, 0x4e));
  if constexpr (kColumns <= 1) z = add(z, _mm512_permute_ps(z, 0xb1));
  return z;
}

// Calls f(column, vectors) for each column of a matrix [kCount * kLanes / kColumns, kColumns] that lies in
// kCount vectors, by taking the even and the odd columns apart until one is left.
template <int kColumns, int kColumn, int kStride, int kCount, class F>
__attribute__((always_inline)) inline void for_each_column(const Vec (&x)[kCount], F&& f) {
  if constexpr (kColumns == 1) {
    f(Constant<kColumn>{}, x);
  } else {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    Vec half[kCount / 2];
#pragma GCC unroll 16
    for (int i = 0; i < kCount / 2; i++) half[i] = _mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]);
    for_each_column<kColumns / 2, kColumn, 2 * kStride>(half, f);
#pragma GCC unroll 16
    for (int i = 0; i < kCount / 2; i++) half[i] = _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]);
    for_each_column<kColumns / 2, kColumn + kStride, 2 * kStride>(half, f);
  }
}

// The same for 16 columns, where it pays to round first: rounded[row][32 tokens] from the weights [32
// tokens][row]. Tokens i, i + 8, i + 16, i + 24 make two vectors whose quarters are transposed as squares of
// 8 words.
__attribute__((always_inline)) inline void round_transposed(const Vec (&x)[kStepTokens],
                                                            __m512i (&rounded)[kBlockRows]) {
  __m512i half[2][8];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = __m512i(_mm512_cvtne2ps_pbh(x[16 * h + i + 8], x[16 * h + i]));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = _mm512_unpacklo_epi32(b[i + j], b[i + 2 + j]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi32(b[i + j], b[i + 2 + j]);
      }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      half[h][2 * j] = _mm512_unpacklo_epi64(a[j], a[4 + j]);
      half[h][2 * j + 1] = _mm512_unpackhi_epi64(a[j], a[4 + j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    rounded[i] = _mm512_shuffle_i64x2(half[0][i], half[1][i], 0x88);
    rounded[8 + i] = _mm512_shuffle_i64x2(half[0][i], half[1][i], 0xdd);
  }
}
