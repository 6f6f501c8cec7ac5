// Rows to shared memory element by element, 16 bytes there at a time: where they cannot be copied as they
// are.
#pragma once
#include "kernels/dim_walk.cuh"
#include "kernels/warp.cuh"

namespace paged_ops::kernels {

// How rows get to shared memory. Asynchronous copies want every row plain and 16-byte aligned; where a
// caller's base or strides are not, elements are loaded one by one, with the same results. Converted: numbers
// of a quantised cache become f32 on the way, times their scales. The latter two are right, not fast.
enum class RowCopy { asynchronous, by_element, converted };

// From dim `dim` of the row whose first dim is at `row`. Elements past the first `count` are zeros, and not
// read.
template <class Element>
__device__ __forceinline__ void copy_elements(unsigned char* to, const char* row, const CacheView& view,
                                              int dim, int count) {
  DimWalk<Element> from(row, view, dim);
#pragma unroll 2  // seldom run: registers count, time does not
  for (int i = 0; i < 16 / int(sizeof(Element)); i++, from.next())
    reinterpret_cast<Element*>(to)[i] = i < count ? *from : Element{};
}

// What is stored for dim `dim`.
__device__ __forceinline__ float number_at(const char* row, const CacheView& view, DType dtype, int dim) {
  const auto bits = uint8_t(row[dim / view.pack * view.stride_pack + row_nbytes(dtype, dim % view.pack)]);
  switch (dtype) {
    case DType::f8e4m3: return portable::to_float(f8e4m3{bits});
    case DType::f8e5m2: return portable::to_float(f8e5m2{bits});
    case DType::i8: return portable::to_float(i8{int8_t(bits)});
    default: return dim % 2 == 0 ? portable::first_of(i4x2{bits}) : portable::second_of(i4x2{bits});
  }
}

// The same of numbers with one scale, which scale() gives if any is read.
template <class Scale>
__device__ __forceinline__ void convert_elements(unsigned char* to, const char* row, const CacheView& view,
                                                 DType dtype, int dim, int count, Scale scale) {
  const float factor = count > 0 ? scale() : 0.f;
#pragma unroll 1
  for (int i = 0; i < 4; i++)
    reinterpret_cast<float*>(to)[i] =
        i < count ? __fmul_rn(number_at(row, view, dtype, dim + i), factor) : 0.f;
}

}  // namespace paged_ops::kernels
