// Quantisation of rows, by loops that the compiler makes vectors of, once per instruction set.
#include "cpu/quantise.h"

#include "core/dispatch.h"

namespace paged_ops::cpu {

namespace {

#if defined(__x86_64__) && !defined(PAGED_OPS_SCALAR_ONLY) && !defined(__clang__)
#define PAGED_OPS_CLONES \
  __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default"), flatten))
#else
#define PAGED_OPS_CLONES
#endif

template <class T, class Q>
inline void quantise(const T* row, int dim, float scale, Q* out) {
  for (int i = 0; i < dim; i++) out[i] = portable::from_float<Q>(portable::to_float(row[i]) / scale);
}

template <class T>
inline uint32_t greatest_bits(const T* row, int dim) {
  uint32_t greatest = 0;
  for (int i = 0; i < dim; i++) {
    const uint32_t size = portable::bit_cast<uint32_t>(portable::to_float(row[i])) & 0x7fffffffu;
    const uint32_t finite = size < 0x7f800000u ? size : 0u;
    greatest = finite > greatest ? finite : greatest;
  }
  return greatest;
}

// Clones are of plain functions.
#define PAGED_OPS_QUANTISE(T, Q) \
  PAGED_OPS_CLONES void run(const T* row, int dim, float scale, Q* out) { quantise(row, dim, scale, out); }
PAGED_OPS_QUANTISE(float, f8e4m3)
PAGED_OPS_QUANTISE(float, f8e5m2)
PAGED_OPS_QUANTISE(float, i8)
PAGED_OPS_QUANTISE(f16, f8e4m3)
PAGED_OPS_QUANTISE(f16, f8e5m2)
PAGED_OPS_QUANTISE(f16, i8)
PAGED_OPS_QUANTISE(bf16, f8e4m3)
PAGED_OPS_QUANTISE(bf16, f8e5m2)
PAGED_OPS_QUANTISE(bf16, i8)
#undef PAGED_OPS_QUANTISE
PAGED_OPS_CLONES uint32_t greatest(const float* row, int dim) { return greatest_bits(row, dim); }
PAGED_OPS_CLONES uint32_t greatest(const f16* row, int dim) { return greatest_bits(row, dim); }
PAGED_OPS_CLONES uint32_t greatest(const bf16* row, int dim) { return greatest_bits(row, dim); }

}  // namespace

void quantise_row(const void* row, DType from, int dim, float scale, void* out, DType to) {
  dispatch<float, f16, bf16>("key", from, [&](auto t) {
    dispatch<f8e4m3, f8e5m2, i8>("key_cache", to, [&](auto q) {
      run(static_cast<const typename decltype(t)::type*>(row), dim, scale,
          static_cast<typename decltype(q)::type*>(out));
    });
  });
}

float scale_of_row(const void* row, DType from, int dim, DType to) {
  uint32_t bits = 0;
  dispatch<float, f16, bf16>("key", from, [&](auto t) {
    bits = greatest(static_cast<const typename decltype(t)::type*>(row), dim);
  });
  const float scale = portable::bit_cast<float>(bits) / largest(to);
  // Of the smallest numbers there is no quotient any more.
  return scale > 0.0f ? scale : 1.0f;
}

}  // namespace paged_ops::cpu
