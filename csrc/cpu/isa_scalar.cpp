// Kernels for any machine. Flags: -O3 -ffp-contract=off.
#include <cstring>

#include "core/dtype.h"
#include "cpu/kernels.h"
#include "cpu/quantise.h"

namespace paged_ops::cpu::scalar {
// clang-format off: each needs those before it
#include "cpu/exp2_constants.inl"
#include "cpu/vec_scalar.inl"
#include "cpu/kernels.inl"
// clang-format on
}  // namespace paged_ops::cpu::scalar
