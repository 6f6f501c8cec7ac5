// Kernels for AVX2. Flags: -O3 -ffp-contract=off -mavx2 -mfma -mf16c.
// Nothing here may call an inline function or template of a shared header: see kernels.h.
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "core/dtype.h"
#include "cpu/kernels.h"

namespace paged_ops::cpu::avx2 {
#include "cpu/exp2_constants.inl"
#include "cpu/kernels.inl"
#include "cpu/vec_avx2.inl"
}  // namespace paged_ops::cpu::avx2
#endif
