// Quantisation of rows and the reverse, by loops that the compiler makes vectors of, once per instruction
// set.
#include "cpu/quantise.h"

#include <algorithm>
#include <cstring>

#include "core/dispatch.h"

namespace paged_ops::cpu {

namespace {

#include "cpu/packs.inl"

#if defined(__x86_64__) && !defined(PAGED_OPS_SCALAR_ONLY) && !defined(__clang__)
#define PAGED_OPS_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define PAGED_OPS_CLONES
#endif

template <class T, class Q>
inline void quantise(const T* row, int dim, float scale, Q* out) {
  for (int i = 0; i < dim; i++) out[i] = portable::from_float<Q>(portable::to_float(row[i]) / scale);
}

template <class T>
inline void quantise(const T* row, int dim, float scale, i4x2* out) {
  for (int i = 0; i < dim / 2; i++)
    out[i] = portable::i4_from_floats(portable::to_float(row[2 * i]) / scale,
                                      portable::to_float(row[2 * i + 1]) / scale);
}

template <class T, class Q>
inline void dequantise(const Q* numbers, int dim, float scale, T* row) {
  for (int i = 0; i < dim; i++) row[i] = portable::from_float<T>(portable::to_float(numbers[i]) * scale);
}

template <class T>
inline void dequantise(const i4x2* numbers, int dim, float scale, T* row) {
  for (int i = 0; i < dim / 2; i++) {
    row[2 * i] = portable::from_float<T>(portable::first_of(numbers[i]) * scale);
    row[2 * i + 1] = portable::from_float<T>(portable::second_of(numbers[i]) * scale);
  }
}

template <class T>
inline int32_t greatest_bits(const T* row, int dim) {
  int32_t greatest = 0;
  for (int i = 0; i < dim; i++) {
    const int32_t size = portable::bit_cast<int32_t>(portable::to_float(row[i])) & 0x7fffffff;
    const int32_t finite = size & -int32_t(size < 0x7f800000);
    greatest = std::max(greatest, finite);
  }
  return greatest;
}

// Clones are of plain functions.
#define PAGED_OPS_QUANTISE(T, Q)                                                                            \
  PAGED_OPS_CLONES void run(const T* row, int dim, float scale, Q* out) { quantise(row, dim, scale, out); } \
  PAGED_OPS_CLONES void run(const Q* numbers, int dim, float scale, T* row) {                               \
    dequantise(numbers, dim, scale, row);                                                                   \
  }
PAGED_OPS_QUANTISE(float, f8e4m3)
PAGED_OPS_QUANTISE(float, f8e5m2)
PAGED_OPS_QUANTISE(float, i8)
PAGED_OPS_QUANTISE(float, i4x2)
PAGED_OPS_QUANTISE(f16, f8e4m3)
PAGED_OPS_QUANTISE(f16, f8e5m2)
PAGED_OPS_QUANTISE(f16, i8)
PAGED_OPS_QUANTISE(f16, i4x2)
PAGED_OPS_QUANTISE(bf16, f8e4m3)
PAGED_OPS_QUANTISE(bf16, f8e5m2)
PAGED_OPS_QUANTISE(bf16, i8)
PAGED_OPS_QUANTISE(bf16, i4x2)
#undef PAGED_OPS_QUANTISE
PAGED_OPS_CLONES int32_t greatest(const float* row, int dim) { return greatest_bits(row, dim); }
PAGED_OPS_CLONES int32_t greatest(const f16* row, int dim) { return greatest_bits(row, dim); }
PAGED_OPS_CLONES int32_t greatest(const bf16* row, int dim) { return greatest_bits(row, dim); }

template <class T>
float scale_of(const T* row, int dim, DType to) {
  const float scale = portable::bit_cast<float>(greatest(row, dim)) / largest(to);
  return scale > 0.0f ? scale : 1.0f;  // of the smallest numbers there is no quotient any more
}

// A row of a cache or of scales.
template <class View>
char* row_of(const View& view, int64_t block, int64_t in_block, int64_t head) {
  return reinterpret_cast<char*>(view.data) + block * view.stride_block + in_block * view.stride_token +
         head * view.stride_head;
}

// Calls f(scale or null, first element, elements, numbers) for each group of a row that has a scale of its
// own. `scale` is the first one's, `numbers` are those of the row.
template <class F>
void for_each_group(const QuantisedRows& rows, char* scale, char* numbers, F&& f) {
  const int group = rows.scale.group ? rows.scale.group : rows.dim;
  for (int begin = 0; begin < rows.dim; begin += group) {
    f(reinterpret_cast<float*>(scale), begin, group, numbers);
    numbers += row_nbytes(rows.dtype, group);
    if (scale) scale += rows.scale.stride_group;
  }
}

}  // namespace

void QuantisedRows::read(void* row, DType to, int64_t block, int64_t in_block, int64_t head) const {
  const Packs packs(cache, dim, dtype);
  char gathered[kMaxHeadDim];  // the row out of its packs
  char* from = row_of(cache, block, in_block, head);
  if (!packs.plain()) {
    packs.gather(gathered, from);
    from = gathered;
  }
  char* const scales = scale.data ? row_of(scale, block, in_block, head) : nullptr;
  dispatch<float, f16, bf16>("out", to, [&](auto t) {
    auto* elements = static_cast<typename decltype(t)::type*>(row);
    dispatch<f8e4m3, f8e5m2, i8, i4x2>("key_cache", dtype, [&](auto q) {
      using Q = typename decltype(q)::type;
      for_each_group(*this, scales, from, [&](float* own, int begin, int size, char* numbers) {
        run(reinterpret_cast<const Q*>(numbers), size, own ? *own : scale.uniform, elements + begin);
      });
    });
  });
}

void QuantisedRows::write(const void* row, DType from, int64_t block, int64_t in_block, int64_t head) const {
  const Packs packs(cache, dim, dtype);
  char gathered[kMaxHeadDim];  // the row on its way to packs
  char* const place = row_of(cache, block, in_block, head);
  char* const to = packs.plain() ? place : gathered;
  char* const scales = scale.data ? row_of(scale, block, in_block, head) : nullptr;
  dispatch<float, f16, bf16>("key", from, [&](auto t) {
    const auto* elements = static_cast<const typename decltype(t)::type*>(row);
    dispatch<f8e4m3, f8e5m2, i8, i4x2>("key_cache", dtype, [&](auto q) {
      using Q = typename decltype(q)::type;
      for_each_group(*this, scales, to, [&](float* own, int begin, int size, char* numbers) {
        if (scale.per_token) *own = scale_of(elements + begin, size, dtype);
        run(elements + begin, size, own ? *own : scale.uniform, reinterpret_cast<Q*>(numbers));
      });
    });
  });
  if (!packs.plain()) packs.scatter(place, gathered);
}

}  // namespace paged_ops::cpu
