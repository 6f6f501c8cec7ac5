// Rows of new keys and values to the numbers of a quantised cache.
#pragma once
#include "core/dtype.h"

namespace paged_ops::cpu {

// out[i] = row[i] / scale, to the nearest with saturation (core/dtype.h); `dim` elements of `from` to `to`.
void quantise_row(const void* row, DType from, int dim, float scale, void* out, DType to);

// The scale with which a row's greatest finite size becomes the greatest number of `to`; 1 for zeros.
float scale_of_row(const void* row, DType from, int dim, DType to);

}  // namespace paged_ops::cpu
