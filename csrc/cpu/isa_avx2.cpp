// Kernels for AVX2. Flags: -O3 -ffp-contract=off -mavx2 -mfma -mf16c.
// Nothing here may call an inline function or template of a shared header: see kernels.h.
#include "cpu/kernels.h"

#if defined(PAGED_OPS_X86_KERNELS)
#include <immintrin.h>
#include <string.h>

#include "core/dtype.h"
#include "cpu/quantise.h"

namespace paged_ops::cpu::avx2 {
// clang-format off: each needs those before it
#include "cpu/exp2_constants.inl"
#include "cpu/vec_avx2.inl"
#include "cpu/kernels.inl"
// clang-format on
}  // namespace paged_ops::cpu::avx2
#endif
