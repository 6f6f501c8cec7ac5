// Kernels for any machine. Flags: -O3 -ffp-contract=off.
#include <cstring>

#include "core/dtype.h"
#include "cpu/kernels.h"

namespace paged_ops::cpu::scalar {
#include "cpu/exp2_constants.inl"
#include "cpu/kernels.inl"
#include "cpu/vec_scalar.inl"
}  // namespace paged_ops::cpu::scalar
