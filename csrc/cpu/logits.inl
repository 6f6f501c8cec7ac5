// From scores, query . key, to logits to base 2, where there is more to it than a factor: soft cap and ALiBi.
// Included inside the namespace of one instruction set, after its vector vocabulary.

constexpr float kLog2E = 1.44269504f;

// tanh(x) = x + x^3 P(x^2) near 0: relative error 3e-9 before rounding (fitted as exp2_constants.inl says).
constexpr float kTanh[5] = {-0.333332986f, 0.133319587f, -0.0537866689f, 0.0208053365f, -0.00590581587f};
constexpr float kTanhNear = 0.6f;

inline Vec tanh(Vec x) {
  const Vec size = abs(x), square = mul(x, x), one = broadcast(1.0f);
  Vec y = broadcast(kTanh[4]);
#pragma GCC unroll 4
  for (int i = 3; i >= 0; i--) y = fma(y, square, broadcast(kTanh[i]));
  const Vec near = fma(mul(y, square), x, x);
  const Vec e = exp2(mul(size, broadcast(-2.0f * kLog2E)));
  const Vec far = copy_sign(div(sub(one, e), add(one, e)), x);
  return where_less(size, broadcast(kTanhNear), near, far);
}

// What is the same for all scores of a call.
class LogitRule {
 public:
  explicit LogitRule(const AttentionParams& p)
      : scale_(p.scale), soft_cap_(p.rules.soft_cap), slopes_(p.rules.alibi_slopes) {}

  // The same for scores that lack a factor.
  LogitRule of_scores_short_of(float factor) const {
    LogitRule rule = *this;
    rule.scale_ *= factor;
    return rule;
  }

  bool plain() const { return soft_cap_ == 0.0f && !slopes_; }

  // What a plain score, or a logit that apply() gave, is multiplied by.
  float factor() const { return plain() ? scale_ * kLog2E : 1.0f; }

  float slope(int q_head) const { return slopes_ ? slopes_[q_head] : 0.0f; }

  // slope: of each lane's query head; distance: place of key less place of query, as numbers.
  Vec apply(Vec scores, Vec slope, Vec distance) const {
    Vec x = mul(scores, broadcast(scale_));
    if (soft_cap_ != 0.0f) x = mul(tanh(mul(x, broadcast(1.0f / soft_cap_))), broadcast(soft_cap_));
    if (slopes_) x = add(x, mul(slope, distance));
    return mul(x, broadcast(kLog2E));
  }

 private:
  float scale_, soft_cap_;
  const float* slopes_;
};
