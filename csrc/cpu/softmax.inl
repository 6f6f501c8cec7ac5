// Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) and the fold of chunks' states.
// Included inside the namespace of one instruction set, after its vector vocabulary.
//
// A row's state, laid out as kernels.h says: the base-2 logit that weights are measured from (-inf of none),
// the sum of weights 2^(logit - reference) as they met the values, the same sum before they were rounded for
// that (where they were not, the two are equal), and the sums of weighted values in pair order, not
// normalised.

constexpr float kInfinity = __builtin_inff();
constexpr double kLn2 = 0.69314718055994531;

// What logits are measured from. With nothing but -inf seen, anything finite gives weights of 0.
inline float reference_of(float greatest) { return greatest == -kInfinity ? 0.0f : greatest; }

inline float exp2_of(float x) { return first(exp2(broadcast(x))); }

inline void clear_state(float* state, int64_t num_floats) {
  for (int64_t i = 0; i < num_floats; i += kLanes) store(state + i, zero());
  state[0] = -kInfinity;
}

// Turns a row's scores on a tile, of whose tokens it sees those with their bits in `seen`, into weights and
// takes them into the state's maximum and sum. Returns the factor that puts the weighted values so far on the
// new maximum's scale.
inline float take_scores(float* scores, uint32_t seen, float scale, float* state) {
  const int num_tokens = 32 - __builtin_clz(seen);
  Vec greatest = broadcast(-kInfinity);
  for (int t = 0; t < num_tokens; t += kLanes) {
    const Vec logits = keep_bits(mul(load(scores + t), broadcast(scale)), seen >> t, -kInfinity);
    store(scores + t, logits);
    greatest = max(greatest, logits);
  }
  const float here = max(greatest), before = state[0];
  const float now = here > before ? here : before;
  const float reference = reference_of(now);
  Vec total = zero();
  for (int t = 0; t < num_tokens; t += kLanes) {
    const Vec weights = exp2(sub(load(scores + t), broadcast(reference)));
    store(scores + t, weights);
    total = add(total, weights);
  }
  const float decay = exp2_of(before - reference);
  state[0] = now;
  state[1] = state[2] = state[1] * decay + sum(total);
  return decay;
}

// Folds one more logit into a state, whose value is 0.
inline void fold_sink(float* state, float sink, int64_t num_floats) {
  const float logit = sink * kLog2E, before = state[0];
  const float reference = reference_of(logit > before ? logit : before);
  const float kept = exp2_of(before - reference), added = exp2_of(logit - reference);
  state[0] = reference;
  state[1] = state[1] * kept + added;
  state[2] = state[2] * kept + added;
  if (kept == 1.0f) return;
  for (int64_t i = kStateHeader; i < num_floats; i += kLanes)
    store(state + i, mul(load(state + i), broadcast(kept)));
}

// Folds the state of a later chunk into that of the chunks before it.
inline void fold_state(float* state, const float* later, int64_t num_floats) {
  const float now = later[0] > state[0] ? later[0] : state[0];
  const float reference = reference_of(now);
  const float a = exp2_of(state[0] - reference), b = exp2_of(later[0] - reference);
  state[0] = now;
  state[1] = state[1] * a + later[1] * b;
  state[2] = state[2] * a + later[2] * b;
  for (int64_t i = kStateHeader; i < num_floats; i += kLanes)
    store(state + i, fma(load(state + i), broadcast(a), mul(load(later + i), broadcast(b))));
}

// Normalises a state into a row of the result. Zeros come out positive: the sign of one may depend on whether
// products that vanish were added, and so on what else was computed.
template <class T>
void finish_row(const float* state, int dim, T* out, float* lse) {
  const float total = state[1];
  const bool empty = total == 0.0f;
  const Vec factor = broadcast(1.0f / total);
  for (int i = 0; i < dim; i += 2 * kLanes) {
    const float* x = state + kStateHeader + i;
    const Pair y = empty ? Pair{zero(), zero()}
                         : Pair{fma(load(x), factor, zero()), fma(load(x + kLanes), factor, zero())};
    if (dim - i < 2 * kLanes) {
      store_pair(out + i, y, dim - i);
    } else {
      store_pair(out + i, y);
    }
  }
  if (lse) *lse = empty ? -kInfinity : float(double(state[0]) * kLn2 + __builtin_log(double(state[2])));
}
