// 2^f on [-1/2, 1/2] as a polynomial with p(0) = 1 exactly: relative error 1.6e-8 before rounding
// (weighted least squares at Chebyshev nodes, reweighted towards the minimax fit).

constexpr float kExp2[7] = {1.0f,         0.6931472f,    0.24022648f,   0.055503324f,
                            0.009618437f, 0.0013398875f, 0.00015353362f};
constexpr float kExp2Shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
