// The softmax of the AMX kernels: a block of query rows has the scores of a whole chunk of keys [token][row]
// and wants weights as left operands [row][token]. Included inside the namespace of one instruction set,
// after amx_matrices.inl.
//
// Weights are rounded to bf16 before they meet the values. The sum of the rounded ones is what the result is
// divided by, so that it is a true mean of values; the sum before rounding makes the LSE. All are measured
// from the row's greatest logit in the chunk. A row's bits do not depend on the other rows, nor on how many
// columns the scores have.

constexpr int kChunkSteps = kChunkTokens / kStepTokens;

inline __m512i lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Which tokens of a chunk, or of a part of one, the rows of a block see: row i is column i. They are taken in
// steps of kStepTokens.
struct Sight {
  alignas(64) int32_t first[kBlockRows], end[kBlockRows];  // row i: [first, end), less what its tree hides
  const uint64_t* tree;                                    // [num_rows] as in Rows
  int tree_begin, num_rows, num_tokens;
  int first_any, end_any;  // what some row sees lies in between
  int first_all, end_all;  // what lies in between is seen by all, but for the tree

  // Rows [row, row + num_rows) of a head, on `num_tokens` tokens from `position` on.
  Sight(const Rows& rows, int row, int num_rows, int position, int num_tokens)
      : tree(rows.tree ? rows.tree + row : nullptr),
        tree_begin(rows.tree ? rows.tree_begin - position : num_tokens),
        num_rows(num_rows),
        num_tokens(num_tokens) {
    const __mmask16 mask = __mmask16((1u << num_rows) - 1);
    const auto clamped = [&](const int32_t* positions) {
      const __m512i x = _mm512_maskz_loadu_epi32(mask, positions + row);
      const __m512i tokens =
          _mm512_max_epi32(_mm512_sub_epi32(x, _mm512_set1_epi32(position)), _mm512_setzero_si512());
      return _mm512_maskz_min_epi32(mask, tokens, _mm512_set1_epi32(num_tokens));
    };
    const __m512i begins = clamped(rows.first), ends = clamped(rows.visible);
    _mm512_store_si512(first, begins);
    _mm512_store_si512(end, ends);
    first_all = _mm512_mask_reduce_max_epi32(mask, begins);
    end_all = end[0];
    const __mmask16 seeing = _mm512_mask_cmplt_epi32_mask(mask, begins, ends);
    first_any = seeing ? _mm512_mask_reduce_min_epi32(seeing, begins) : 0;
    end_any = seeing ? end[num_rows - 1] : 0;
  }

  int first_step() const { return first_any / kStepTokens; }
  int end_step() const { return (end_any + kStepTokens - 1) / kStepTokens; }

  // Whether every row sees all of a step.
  bool whole(int step) const {
    const int begin = step * kStepTokens, end = begin + kStepTokens;
    return first_all <= begin && end <= end_all && end <= tree_begin;
  }

  // Bit t of word r: whether row r sees token t of the step.
  __m512i words(int step) const {
    const auto from = [&](const int32_t* tokens) {
      const __m512i begin =
          _mm512_sub_epi32(_mm512_load_si512(tokens), _mm512_set1_epi32(step * kStepTokens));
      return _mm512_sllv_epi32(_mm512_set1_epi32(-1), _mm512_max_epi32(begin, _mm512_setzero_si512()));
    };
    const __m512i seen = _mm512_andnot_si512(from(end), from(first));
    const int from_tree = tree_begin - step * kStepTokens;
    return tree && from_tree < kStepTokens ? _mm512_and_si512(seen, tree_words(from_tree)) : seen;
  }
  __attribute__((noinline)) __m512i tree_words(int from_tree) const {
    alignas(64) uint32_t own[kBlockRows] = {};
    for (int row = 0; row < num_rows; row++) own[row] = Rows::tree_word(tree[row], from_tree);
    return _mm512_load_si512(own);
  }

  // Tokens of a step that not every row sees, those that no row sees included.
  uint32_t hidden(int step) const {
    if (whole(step)) return 0;
    const __mmask16 mask = __mmask16((1u << num_rows) - 1);
    return ~uint32_t(_mm512_mask_reduce_and_epi32(mask, words(step))) &
           lowest_bits(num_tokens - step * kStepTokens);
  }

  bool sees_as(int a, int b) const {
    return first[a] == first[b] && end[a] == end[b] && (!tree || tree[a] == tree[b]);
  }

  // Calls f(begin, end) for each group of neighbouring rows that see the same.
  template <class F>
  void for_each_group(F&& f) const {
    for (int begin = 0, end; begin < num_rows; begin = end) {
      for (end = begin + 1; end < num_rows && sees_as(begin, end);) end++;
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

// What weights are multiplied by before they are rounded, for values that lack scales of their own. Then the
// sum of the rounded ones is made of what they are worth: rounded weights over scales.
struct ValueScales {
  const float* scale;    // [kChunkTokens]
  const float* inverse;  // [kChunkTokens] of a step the even tokens, then the odd ones; of a NaN 0

  ValueScales of_step(int step) const { return {scale + step * kStepTokens, inverse + step * kStepTokens}; }
};

// kStepTokens tokens of a block's scores. Lane i of vector n is column i % kColumns of token
// n * kTokens + i / kColumns.
template <int kColumns, bool kMasked>
class ScoreStep {
 public:
  static constexpr int kTokens = kLanes / kColumns;  // of a vector
  static constexpr int kVectors = kStepTokens / kTokens;

  // words: of each row, the bits of the tokens that it sees; not looked at unless kMasked.
  ScoreStep(const float* scores, __m512i words, Vec scale) : scores_(scores), scale_(scale) {
    const __m512i columns = _mm512_and_si512(lane_numbers(), _mm512_set1_epi32(kColumns - 1));
    // The bit of a lane's first token comes first.
    words_ = _mm512_srlv_epi32(_mm512_permutexvar_epi32(columns, words),
                               _mm512_srli_epi32(lane_numbers(), __builtin_ctz(kColumns)));
  }

  // Into kMaxima vectors, whose greatest lanes are what counts.
  static constexpr int kMaxima = kVectors < 4 ? kVectors : 4;
  __attribute__((always_inline)) void take_greatest(Vec (&greatest)[kMaxima]) const {
#pragma GCC unroll 32
    for (int n = 0; n < kVectors; n++) {
      const Vec logits = mul(load(scores_ + n * kLanes), scale_);
      Vec& g = greatest[n % kMaxima];
      g = kMasked ? _mm512_mask_max_ps(g, kept(n), logits, g) : max(logits, g);
    }
  }

  // Rounds the product as the greatest was: the distance of a logit to itself is 0, whatever its size.
  __attribute__((always_inline)) Vec weights(int n, Vec shift) const {
    return weight_of(add(mul(load(scores_ + n * kLanes), scale_), shift), kept(n));
  }
  // The scales of the step's tokens. What a row does not see may have any.
  __attribute__((always_inline)) Vec scaled(int n, Vec weights, const float* scales) const {
    Vec scale = kTokens == 1 ? broadcast(scales[n]) : load(scales + n * kTokens);
    if constexpr (kTokens > 1 && kColumns > 1)
      scale = _mm512_permutexvar_ps(_mm512_srli_epi32(lane_numbers(), __builtin_ctz(kColumns)), scale);
    return kMasked ? _mm512_maskz_mul_ps(kept(n), weights, scale) : mul(weights, scale);
  }

 private:
  __mmask16 kept(int n) const {
    return kMasked ? _mm512_test_epi32_mask(words_, _mm512_set1_epi32(int(1u << n * kTokens)))
                   : __mmask16(0xffff);
  }

  const float* const scores_;
  __m512i words_;
  const Vec scale_;
};

// To the nearest bf16, a tie to the greater one, in the upper half of each word. Weights are never negative,
// and a NaN among them stays one: it comes from bf16, with a lower half of zeros, or is the default one.
inline __m512i round_words(Vec x) {
  return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
}

// Slopes and scales may be NaN of any bits; what round_words() expects is the default one.
inline Vec with_default_nan(Vec x) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), broadcast(__builtin_nanf("")));
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
inline void add_rounded(float* sums, __m512i pairs, Vec even_inverse, Vec odd_inverse) {
  const Vec even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const Vec odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
  store(sums, fma(odd, odd_inverse, fma(even, even_inverse, load(sums))));
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

// A step's weights, to [kColumns][kStepTokens] in bf16. scales: those of the step.
template <bool kScaled, int kColumns, bool kMasked, class F>
__attribute__((always_inline)) inline void weigh_step(const ScoreStep<kColumns, kMasked>& step, Vec shift,
                                                      ValueScales scales, bf16* weights, WeightSums& sums,
                                                      F&& meanwhile) {
  if constexpr (kColumns == kBlockRows) {
    // By way of memory, for there are not enough registers; what has been stored is loaded long after.
    alignas(64) uint32_t words[kLanes][kLanes];  // of two tokens each
    const Pair total = sum_leaves<0, 1>([&](auto leaf) __attribute__((always_inline)) {
      constexpr int k = decltype(leaf)::value;
      constexpr int turn = (k & 8) >> 3 | (k & 4) >> 1 | (k & 2) << 1 | (k & 1) << 3;  // of this leaf
      meanwhile(Constant<turn % kWeighParts>{});
      const Vec a = step.weights(2 * k, shift), b = step.weights(2 * k + 1, shift);
      const auto rounded = [&](int n, Vec x) __attribute__((always_inline)) {
        if constexpr (kScaled) x = step.scaled(n, x, scales.scale);
        return round_words(x);
      };
      const __m512i word = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rounded(2 * k, a), 16),
                                                   rounded(2 * k + 1, b));
      _mm512_store_si512(words[k], word);
      if constexpr (kScaled)
        add_rounded(sums.rounded[k], word, broadcast(scales.inverse[k]),
                    broadcast(scales.inverse[kLanes + k]));
      else
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
    if constexpr (kScaled)
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) x[n] = step.scaled(n, x[n], scales.scale);
    const __m512i upper_halves = _mm512_set_epi32(  // of the words of two vectors
        0x003f003d, 0x003b0039, 0x00370035, 0x00330031, 0x002f002d, 0x002b0029, 0x00270025, 0x00230021,
        0x001f001d, 0x001b0019, 0x00170015, 0x00130011, 0x000f000d, 0x000b0009, 0x00070005, 0x00030001);
    for_each_column<kColumns, 0, 1>(x, [&](auto column, const Vec(&y)[2]) __attribute__((always_inline)) {
      constexpr int row = decltype(column)::value;
      const __m512i words = _mm512_permutex2var_epi16(round_words(y[0]), upper_halves, round_words(y[1]));
      _mm512_store_si512(weights + row * kStepTokens, words);
      if constexpr (kScaled)
        add_rounded(sums.rounded[row], words, load(scales.inverse), load(scales.inverse + kLanes));
      else
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

// Scores [token][kColumns] of a block on the steps [first_step, end_step) of a chunk become logits. Row 0 is
// row `row` of a task's rows; the chunk begins at `position`.
template <int kColumns>
__attribute__((noinline)) void apply_rule(const LogitRule& rule, const Rows& rows, int row, int num_rows,
                                          int first_head, int group, int position, int first_step,
                                          int end_step, float* scores) {
  alignas(64) float slopes[kLanes] = {};
  alignas(64) int32_t query_places[kLanes] = {};
  for (int column = 0; column < num_rows; column++) {
    slopes[column] = rule.slope(first_head + (row + column) % group);
    query_places[column] = rows.place[row + column];
  }
  const __m512i columns = _mm512_and_si512(lane_numbers(), _mm512_set1_epi32(kColumns - 1));
  const __m512i tokens = _mm512_srli_epi32(lane_numbers(), __builtin_ctz(kColumns));
  const Vec slope = _mm512_permutexvar_ps(columns, _mm512_load_ps(slopes));
  const __m512i query_place = _mm512_permutexvar_epi32(columns, _mm512_load_si512(query_places));
  constexpr int kTokens = kLanes / kColumns;
  for (int step = first_step; step < end_step; step++) {
    alignas(64) int32_t places[kStepTokens + kLanes] = {};
    rows.places(position + step * kStepTokens, kStepTokens, places);
    float* const x = scores + step * kStepTokens * kColumns;
    for (int t = 0; t < kStepTokens; t += kTokens) {
      const __m512i place = _mm512_permutexvar_epi32(tokens, _mm512_loadu_si512(places + t));
      const Vec distance = _mm512_cvtepi32_ps(_mm512_sub_epi32(place, query_place));
      const Vec logits = rule.apply(load(x + t * kColumns), slope, distance);
      store(x + t * kColumns, with_default_nan(logits));
    }
  }
}

// Scores [token][kColumns] of the steps [first_step, end_step) of a chunk into weights
// [step][kColumns][kStepTokens]; `factor` makes logits to base 2 of them.
template <int kColumns, bool kScaled, class F>
__attribute__((noinline)) void weigh(const float* scores, const Sight& sight, int first_step, int end_step,
                                     float factor, ValueScales scales, bf16* weights, RowSums& out,
                                     F&& meanwhile) {
  constexpr int kStepFloats = kStepTokens * kColumns;
  const Vec scale = broadcast(factor);
  // Calls f(step, its scores).
  const auto for_each_step = [&](auto&& f) __attribute__((always_inline)) {
    for (int i = first_step; i < end_step;) {
      for (; i < end_step && sight.whole(i); i++)
        f(i, ScoreStep<kColumns, false>(scores + i * kStepFloats, _mm512_setzero_si512(), scale));
      for (; i < end_step && !sight.whole(i); i++)
        f(i, ScoreStep<kColumns, true>(scores + i * kStepFloats, sight.words(i), scale));
    }
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
    weigh_step<kScaled>(step, shift, scales.of_step(i), weights + i * kStepFloats, sums, meanwhile);
  });
  store(out.reference, reference);
  store(out.exact, sums.exact);
  finish_rounded<kColumns>(sums, out.rounded);
}
