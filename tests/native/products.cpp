// The products of attention alone, to see what they are compiled into.
#include <immintrin.h>
#include <string.h>

#include "core/dtype.h"
#include "cpu/kernels.h"

namespace paged_ops::cpu::avx2 {
// clang-format off: each needs those before it
#include "cpu/exp2_constants.inl"
#include "cpu/vec_avx2.inl"
#include "cpu/packs.inl"
#include "cpu/page_walk.inl"
#include "cpu/products.inl"
// clang-format on
#define PRODUCTS(E, kRows)                                                                           \
  template void score<E, kRows>(const Tile<E>&, int, const float*, int64_t, float*, Prefetcher*);    \
  template void weigh<E, kRows>(const Tile<E>&, int, int, const float*, const float*, float* const*, \
                                Prefetcher*);
PRODUCTS(float, 1)
PRODUCTS(float, 4)
PRODUCTS(f16, 1)
PRODUCTS(f16, 4)
PRODUCTS(bf16, 1)
PRODUCTS(bf16, 2)
PRODUCTS(bf16, 3)
PRODUCTS(bf16, 4)
}  // namespace paged_ops::cpu::avx2
