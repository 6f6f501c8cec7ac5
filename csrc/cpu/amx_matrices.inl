// Small matrices in vector registers for the AMX kernels: scores of [tokens][rows] on their way to weights.
// Included inside the namespace of one instruction set, after its vector vocabulary.

constexpr int kBlockRows = 16;   // query rows that a tile register holds
constexpr int kStepTokens = 32;  // tokens of a weights . values step

constexpr int steps_of(int count, int step) { return (count + step - 1) / step; }

// Joins the lanes whose index is the same modulo kColumns, into each of them: by halves, then quarters, ...
template <int kColumns, class Join>
inline Vec fold_column(Vec x, Join join) {
  if constexpr (kColumns <= 8) x = join(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns <= 4) x = join(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  if constexpr (kColumns <= 2) x = join(x, _mm512_permute_ps(x, 0x4e));
  if constexpr (kColumns <= 1) x = join(x, _mm512_permute_ps(x, 0xb1));
  return x;
}

// Rows and columns of a matrix of 32-bit words change places.
__attribute__((always_inline)) inline void transpose(__m512i (&x)[16]) {
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

// x[0] + x[kCount / 2] and so on, by halves.
template <int kCount>
__attribute__((always_inline)) inline Vec sum_by_halves(const Vec (&x)[kCount]) {
  Vec y[kCount / 2];
#pragma GCC unroll 16
  for (int i = 0; i < kCount / 2; i++) y[i] = add(x[i], x[kCount / 2 + i]);
  if constexpr (kCount == 2) {
    return y[0];
  } else {
    return sum_by_halves(y);
  }
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
