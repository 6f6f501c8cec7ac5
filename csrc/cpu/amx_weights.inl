// The softmax of the AMX kernels: a block of query rows has the scores of a whole chunk of keys [token][row]
// and wants weights as left operands [row][token]. Included inside the namespace of one instruction set,
// after amx_matrices.inl.
//
// Weights are rounded to bf16 before they meet the values. The sum of the rounded ones is what the result is
// divided by, so that it is a true mean of values; the sum before rounding makes the LSE. All are measured
// from the row's greatest logit in the chunk. A row's bits do not depend on the other rows, nor on how many
// columns the scores have.

constexpr int kChunkSteps = kChunkTokens / kStepTokens;

// How many tokens of a chunk the rows of a block see: row i is column i.
struct Sight {
  alignas(64) int32_t seen[kBlockRows];  // not descending; columns after the last row see nothing
  int num_rows;

  // Rows [first, first + num_rows) of a head, on `num_tokens` tokens from `position` on.
  Sight(const int* visible, int first, int num_rows, int position, int num_tokens) : num_rows(num_rows) {
    const __mmask16 rows = __mmask16((1u << num_rows) - 1);
    const __m512i keys = _mm512_maskz_loadu_epi32(rows, visible + first);
    const __m512i left = _mm512_sub_epi32(keys, _mm512_set1_epi32(position));
    _mm512_store_si512(seen, _mm512_min_epi32(_mm512_max_epi32(left, _mm512_setzero_si512()),
                                              _mm512_set1_epi32(num_tokens)));
  }

  int least() const { return seen[0]; }
  int most() const { return seen[num_rows - 1]; }

  // Of lane i, when kColumns columns of each token lie in a vector: what its row sees from its token on.
  template <int kColumns>
  __m512i from_lanes() const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i columns = _mm512_and_si512(lanes, _mm512_set1_epi32(kColumns - 1));
    const __m512i tokens = _mm512_srli_epi32(lanes, __builtin_ctz(kColumns));
    return _mm512_sub_epi32(_mm512_permutexvar_epi32(columns, _mm512_load_si512(seen)), tokens);
  }

  // Calls f(begin, end) for each group of rows that see the same, those that see most first.
  template <class F>
  void for_each_group(F&& f) const {
    for (int end = num_rows, begin; end > 0; end = begin) {
      for (begin = end - 1; begin > 0 && seen[begin - 1] == seen[end - 1];) begin--;
      f(begin, end);
    }
  }
};

// Of each row: the header of its state.
struct alignas(64) RowSums {
  float reference[kBlockRows], rounded[kBlockRows], exact[kBlockRows];
};

constexpr float kWeight[6] = {1.0f, 0.6931513f, 0.24016444f, 0.055799913f, 0.0090170298f, 0.0018671301f};

// 2^x for a logit less its reference: 2^floor(x) times a polynomial of degree 5 with p(0) = 1 on [0, 1],
// relative error 1e-7 before rounding (fitted as exp2_constants.inl says). Lanes that are not kept become 0.
inline Vec weight_of(Vec x, __mmask16 kept) {
  const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec y = broadcast(kWeight[5]);
#pragma GCC unroll 5
  for (int i = 4; i >= 0; i--) y = fma(y, f, broadcast(kWeight[i]));
  return _mm512_maskz_scalef_ps(kept, y, x);
}

// kStepTokens tokens of a block's scores. Lane i of vector n is column i % kColumns of token
// n * kTokens + i / kColumns.
template <int kColumns, bool kMasked>
class ScoreStep {
 public:
  static constexpr int kTokens = kLanes / kColumns;  // of a vector
  static constexpr int kVectors = kStepTokens / kTokens;

  // left: of each lane's row, how many tokens it sees from the lane's first one on.
  ScoreStep(const float* scores, __m512i left, Vec scale) : scores_(scores), left_(left), scale_(scale) {}

  // Into kMaxima vectors, whose greatest lanes are what counts.
  static constexpr int kMaxima = kVectors < 4 ? kVectors : 4;
  void take_greatest(Vec (&greatest)[kMaxima]) const {
#pragma GCC unroll 32
    for (int n = 0; n < kVectors; n++) {
      const Vec logits = mul(load(scores_ + n * kLanes), scale_);
      Vec& g = greatest[n % kMaxima];
      g = kMasked ? _mm512_mask_max_ps(g, kept(n), logits, g) : max(logits, g);
    }
  }

  // Rounds the product as the greatest was: the distance of a logit to itself is 0, whatever its size.
  Vec weights(int n, Vec shift) const {
    return weight_of(add(mul(load(scores_ + n * kLanes), scale_), shift), kept(n));
  }

 private:
  __mmask16 kept(int n) const {
    return kMasked ? _mm512_cmpgt_epi32_mask(left_, _mm512_set1_epi32(n * kTokens)) : __mmask16(0xffff);
  }

  const float* const scores_;
  const __m512i left_;
  const Vec scale_;
};

// To the nearest bf16, a tie to the greater one, in the upper half of each word. Weights are never negative,
// and a NaN among them stays one: it comes from bf16, with a lower half of zeros, or is the default one.
inline __m512i round_words(Vec x) {
  return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
}

// What the sums of a block's weights are made of: rounded, of each row in kLanes parts by token pair, and
// exact, by column.
struct alignas(64) WeightSums {
  float rounded[kBlockRows][kLanes];  // [row][pair]; of 16 columns [pair][row]
  Vec exact;
};

inline void add_rounded(float* sums, __m512i pairs) {
  const __m512bh ones = __m512bh(_mm512_set1_epi16(0x3f80));
  store(sums, _mm512_dpbf16_ps(load(sums), __m512bh(pairs), ones));
}

// Adds a[0], a[1] of the leaf functions 0 .. 15 by halves: 0 with 8, 4 with 12, and so on.
template <int kLeaf, int kStride, class F>
__attribute__((always_inline)) inline Pair sum_leaves(F&& leaf) {
  if constexpr (kStride == kLanes) {
    return leaf(Constant<kLeaf>{});
  } else {
    const Pair a = sum_leaves<kLeaf, 2 * kStride>(leaf), b = sum_leaves<kLeaf + kStride, 2 * kStride>(leaf);
    return {add(a.a, b.a), add(a.b, b.b)};
  }
}

// While weights are made something else can go on that keeps other parts of the core busy: meanwhile(part) is
// called at equal distances, weigh_slots() times per step for each of kWeighParts parts; with few columns for
// the first part only.
constexpr int kWeighParts = 4;
constexpr int weigh_slots(int columns) { return columns == kBlockRows ? 4 : 1; }

// A step's weights, to [kColumns][kStepTokens] in bf16.
template <int kColumns, bool kMasked, class F>
__attribute__((always_inline)) inline void weigh_step(const ScoreStep<kColumns, kMasked>& step, Vec shift,
                                                      bf16* weights, WeightSums& sums, F&& meanwhile) {
  if constexpr (kColumns == kBlockRows) {
    // By way of memory, for there are not enough registers; what has been stored is loaded long after.
    alignas(64) uint32_t words[kLanes][kLanes];  // of two tokens each
    const Pair total = sum_leaves<0, 1>([&](auto leaf) __attribute__((always_inline)) {
      constexpr int k = decltype(leaf)::value;
      constexpr int turn = (k & 8) >> 3 | (k & 4) >> 1 | (k & 2) << 1 | (k & 1) << 3;  // of this leaf
      meanwhile(Constant<turn % kWeighParts>{});
      const Vec a = step.weights(2 * k, shift), b = step.weights(2 * k + 1, shift);
      const __m512i word =
          _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(round_words(a), 16), round_words(b));
      _mm512_store_si512(words[k], word);
      add_rounded(sums.rounded[k], word);
      return Pair{a, b};
    });
    sums.exact = add(sums.exact, add(total.a, total.b));
    __m512i rows[kLanes];
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; k++) rows[k] = _mm512_load_si512(words[k]);
    transpose(rows);
#pragma GCC unroll 16
    for (int row = 0; row < kBlockRows; row++) _mm512_store_si512(weights + row * kStepTokens, rows[row]);
  } else {
    meanwhile(Constant<0>{});
    constexpr int kVectors = ScoreStep<kColumns, kMasked>::kVectors;
    Vec x[kVectors];
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; n++) x[n] = step.weights(n, shift);
    sums.exact =
        add(sums.exact, fold_column<kColumns>(sum_by_halves(x), [](Vec a, Vec b) { return add(a, b); }));
    const __m512i upper_halves = _mm512_set_epi32(  // of the words of two vectors
        0x003f003d, 0x003b0039, 0x00370035, 0x00330031, 0x002f002d, 0x002b0029, 0x00270025, 0x00230021,
        0x001f001d, 0x001b0019, 0x00170015, 0x00130011, 0x000f000d, 0x000b0009, 0x00070005, 0x00030001);
    for_each_column<kColumns, 0, 1>(x, [&](auto column, const Vec(&y)[2]) __attribute__((always_inline)) {
      constexpr int row = decltype(column)::value;
      const __m512i words = _mm512_permutex2var_epi16(round_words(y[0]), upper_halves, round_words(y[1]));
      _mm512_store_si512(weights + row * kStepTokens, words);
      add_rounded(sums.rounded[row], words);
    });
  }
}

// The rows' sums over their kLanes parts.
template <int kColumns>
inline void finish_rounded(const WeightSums& sums, float* out) {
  if constexpr (kColumns == kBlockRows) {
    Vec parts[kLanes];
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; k++) parts[k] = load(sums.rounded[k]);
    store(out, sum_by_halves(parts));
  } else {
    for (int row = 0; row < kColumns; row++) out[row] = sum(load(sums.rounded[row]));
  }
}

// Scores [token][kColumns] of the first num_steps steps of a chunk into weights
// [step][kColumns][kStepTokens].
template <int kColumns, class F>
__attribute__((noinline)) void weigh(const float* scores, const Sight& sight, int num_steps, float scale_,
                                     bf16* weights, RowSums& out, F&& meanwhile) {
  constexpr int kStepFloats = kStepTokens * kColumns;
  const int num_whole = sight.least() / kStepTokens;  // steps of which every row sees all
  const Vec scale = broadcast(scale_ * kLog2E);
  const __m512i left = sight.from_lanes<kColumns>();
  // Calls f(step, its scores).
  const auto for_each_step = [&](auto&& f) __attribute__((always_inline)) {
    int i = 0;
    for (; i < num_whole && i < num_steps; i++)
      f(i, ScoreStep<kColumns, false>(scores + i * kStepFloats, left, scale));
    for (; i < num_steps; i++)
      f(i, ScoreStep<kColumns, true>(scores + i * kStepFloats,
                                     _mm512_sub_epi32(left, _mm512_set1_epi32(i * kStepTokens)), scale));
  };

  constexpr int kMaxima = ScoreStep<kColumns, false>::kMaxima;
  Vec greatest[kMaxima];
  for (Vec& g : greatest) g = broadcast(-kInfinity);
  for_each_step([&](int, const auto& step) __attribute__((always_inline)) { step.take_greatest(greatest); });
  for (int i = 1; i < kMaxima; i++) greatest[0] = max(greatest[0], greatest[i]);
  const Vec reference = fold_column<kColumns>(greatest[0], [](Vec a, Vec b) { return max(a, b); });
  const Vec shift = _mm512_mask_sub_ps(
      zero(), _mm512_cmp_ps_mask(reference, broadcast(-kInfinity), _CMP_NEQ_UQ), zero(), reference);

  WeightSums sums;
  sums.exact = zero();
  for (auto& row : sums.rounded) store(row, zero());
  for_each_step([&](int i, const auto& step) __attribute__((always_inline)) {
    weigh_step(step, shift, weights + i * kStepFloats, sums, meanwhile);
  });
  store(out.reference, reference);
  store(out.exact, sums.exact);
  finish_rounded<kColumns>(sums, out.rounded);
}
