// The matrix instruction of a warp, m16n8k16, in f32.
#pragma once
#include "simt/emulator/block.h"

namespace paged_ops::simt {

// A lane's fragments, converted. For their places in the matrices see simt/ptx.h.
struct MmaOperands {
  float2 a[4];
  float2 b[2];
  float c[4];
};

// C += A B over the fragments of all 32 lanes; each gets its part of C back. Order of the sums: k ascending,
// each product rounded, added to C and rounded.
void multiply_accumulate(MmaOperands& mine, const Site& site);

}  // namespace paged_ops::simt
