// The vector vocabulary in plain C++ with the compiler's vector extension: any machine, any compiler flags.
// Included inside the namespace of one instruction set; vec_avx2.inl and vec_avx512.inl say the same words.

constexpr int kLanes = 4;
constexpr int kAccumulators = 8;  // vectors that products may keep in registers

using Vec = float __attribute__((vector_size(16)));
using IntVec = int32_t __attribute__((vector_size(16)));

// 2 * kLanes consecutive elements of a tensor as f32. Which element lies in which lane is this
// instruction set's and the type's own affair: load_pair and store_pair agree about it.
struct Pair {
  Vec a, b;
};

inline Vec zero() { return Vec{}; }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* x) {
  Vec y;
  memcpy(&y, x, sizeof(y));
  return y;
}
// The same where registers are few: into one, not read again at each use as compilers like to.
inline Vec load_once(const float* x) { return load(x); }
inline void store(float* x, Vec y) { memcpy(x, &y, sizeof(y)); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // rounded twice, everywhere alike
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }     // b where either is NaN
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec abs(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }
inline Vec copy_sign(Vec size, Vec sign) {
  return (Vec)((IntVec)size | ((IntVec)sign & INT32_MIN));
}  // size >= 0
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) { return a < b ? x : y; }  // y where either is NaN
inline float first(Vec x) { return x[0]; }
inline float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float max(Vec x) {
  const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}

// The lanes of x whose bits are set, `other` in the rest.
inline Vec keep_bits(Vec x, uint32_t bits, float other) {
  const int32_t b = int32_t(bits);
  return (IntVec{b, b, b, b} & IntVec{1, 2, 4, 8}) != 0 ? x : broadcast(other);
}

// 2^x for x <= 0, relative error below 2e-7; 0 below 2^-126, NaN for NaN.
inline Vec exp2(Vec x) {
  const Vec shifted = x + broadcast(kExp2Shift);
  const Vec f = x - (shifted - broadcast(kExp2Shift));
  Vec y = broadcast(kExp2[6]);
  for (int i = 5; i >= 0; i--) y = fma(y, f, broadcast(kExp2[i]));
  const IntVec scaled = (IntVec)y + (((IntVec)shifted << 23) & (x == x));  // no exponent for a NaN's bits
  return (Vec)(~(x < broadcast(-126.0f)) & scaled);
}

// Lane i of the result is the sum of x[i]'s lanes, added in one order for every i.
inline Vec reduce(const Vec (&x)[kLanes]) { return Vec{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])}; }

// x[g] holds kLanes / N lanes for each of N rows; afterwards x[r] holds row r's lanes of x[0], x[1], ...
template <int N>
inline void deal(Vec (&x)[N]) {
  constexpr int kWidth = kLanes / N;
  Vec y[N];
  memcpy(y, x, sizeof(y));
  for (int r = 0; r < N; r++)
    for (int i = 0; i < kLanes; i++) x[r][i] = y[i / kWidth][r * kWidth + i % kWidth];
}

inline float to_float(float x) { return x; }
inline float to_float(f16 x) { return portable::to_float(x); }
inline float to_float(bf16 x) { return portable::to_float(x); }
inline float to_float(f8e4m3 x) { return portable::to_float(x); }
inline float to_float(f8e5m2 x) { return portable::to_float(x); }
inline float to_float(i8 x) { return portable::to_float(x); }

// With `n`, a multiple of 8 below 2 * kLanes: the first n elements, zeros after them.
template <class T>
inline Pair load_pair(const T* x) {
  return {Vec{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])},
          Vec{to_float(x[4]), to_float(x[5]), to_float(x[6]), to_float(x[7])}};
}
template <class T>
inline Pair load_pair(const T* x, int) {
  return load_pair(x);  // a pair is 8 elements: there are no partial ones
}
inline Pair load_pair(const i4x2* x) {
  float numbers[8];
  for (int i = 0; i < 4; i++) {
    numbers[2 * i] = portable::first_of(x[i]);
    numbers[2 * i + 1] = portable::second_of(x[i]);
  }
  return {load(numbers), load(numbers + 4)};
}
inline Pair load_pair(const i4x2* x, int) { return load_pair(x); }
// Each of 2 * kLanes / 8 numbers in eight elements of a pair, in the tensor's order.
inline Pair broadcast_to_eights(const float* x) { return {broadcast(x[0]), broadcast(x[0])}; }
// From the tensor's order, in which quantised pairs are, to that of bf16 pairs.
inline Pair reorder_bf16(Pair x) { return x; }
template <class Q, class... N>
inline Pair load_as_bf16(const Q* x, N... n) {
  return load_pair(x, n...);
}

template <class T>
inline void store_pair(T* x, Pair y) {
  for (int i = 0; i < kLanes; i++) {
    x[i] = portable::from_float<T>(y.a[i]);
    x[kLanes + i] = portable::from_float<T>(y.b[i]);
  }
}
template <class T>
inline void store_pair(T* x, Pair y, int) {
  store_pair(x, y);
}
