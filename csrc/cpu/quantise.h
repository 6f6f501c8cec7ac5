// Rows of keys and values to and from the numbers of a quantised cache.
#pragma once
#include "core/paged_kv.h"

namespace paged_ops::cpu {

// The keys or the values of a quantised cache, by rows: those of a token and a head.
struct QuantisedRows {
  CacheView cache;
  ScaleView scale;
  DType dtype;
  int32_t dim;

  // Stores x / scale of each element x of a row of `from`, to the nearest with saturation (core/dtype.h).
  // Scales per token are found first, and stored too: with one, the greatest finite size in its group becomes
  // the greatest number of the dtype; 1 for zeros.
  void write(const void* row, DType from, int64_t block, int64_t in_block, int64_t head) const;

  // A row of `to`: numbers times scales in f32, rounded once.
  void read(void* row, DType to, int64_t block, int64_t in_block, int64_t head) const;
};

}  // namespace paged_ops::cpu
