// Kernels for AVX-512. Flags: -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma
// -mf16c. Nothing here may call an inline function or template of a shared header: see kernels.h.
#include "cpu/kernels.h"

#if defined(PAGED_OPS_X86_KERNELS)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 about its own _mm512_undefined_*
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#include <string.h>

#include "core/dtype.h"
#include "cpu/quantise.h"

namespace paged_ops::cpu::avx512 {
// clang-format off: each needs those before it
#include "cpu/exp2_constants.inl"
#include "cpu/vec_avx512.inl"
#include "cpu/kernels.inl"
// clang-format on
}  // namespace paged_ops::cpu::avx512
#endif
