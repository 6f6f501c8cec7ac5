// Kernels for AMX-BF16 beside AVX-512 and its bf16 instructions: attention of bf16. What tiles do not serve
// is the table of AVX-512. Flags: those of isa_avx512.cpp, -mavx512bf16, -mavx512vbmi and -mgfni. Nothing
// here may call an inline function or template of a shared header: see kernels.h.
#include "cpu/kernels.h"

#if defined(PAGED_OPS_X86_KERNELS)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 about its own _mm512_undefined_*
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#include <string.h>

#include "core/dtype.h"

namespace paged_ops::cpu::amx {
// clang-format off: each needs those before it
#include "cpu/exp2_constants.inl"
#include "cpu/vec_avx512.inl"
#include "cpu/page_walk.inl"
#include "cpu/scales.inl"
#include "cpu/logits.inl"
#include "cpu/softmax.inl"
#include "cpu/rows.inl"
#include "cpu/attention_walk.inl"
#include "cpu/amx_tiles.inl"
#include "cpu/amx_matrices.inl"
#include "cpu/amx_weights.inl"
#include "cpu/amx_quantised.inl"
#include "cpu/amx_operands.inl"
#include "cpu/amx_sweep.inl"
#include "cpu/amx_blocks.inl"
// clang-format on

namespace {

bool fits_a_block(const AttentionParams& p, const AttentionTask& task) {
  return num_rows_of(p, task) <= kBlockRows;
}

// What tiles do not take, rows in packs among it, goes the way of AVX-512.
bool takes(const PagedKV& kv) { return has_element(kv.dtype) && is_plain(kv); }
void (*attend_other)(const AttentionParams&, const AttentionTask&, void*);
size_t (*attend_other_scratch_nbytes)(const AttentionParams&, const AttentionTask&);

void attend_bf16(const AttentionParams& p, const AttentionTask& task, void* scratch) {
  if (!takes(p.kv)) return attend_other(p, task, scratch);
  return fits_a_block(p, task) ? attend<SweepProducts>(p, task, scratch)
                               : attend<BlockProducts>(p, task, scratch);
}

size_t attend_bf16_scratch_nbytes(const AttentionParams& p, const AttentionTask& task) {
  if (!takes(p.kv)) return attend_other_scratch_nbytes(p, task);
  return fits_a_block(p, task) ? attend_scratch_nbytes<SweepProducts>(p, task)
                               : attend_scratch_nbytes<BlockProducts>(p, task);
}

}  // namespace

void add_to(Kernels& kernels) {
  constexpr int kBf16 = int(DType::bf16);
  attend_other = kernels.attend[kBf16];
  attend_other_scratch_nbytes = kernels.attend_scratch_nbytes[kBf16];
  kernels.attend[kBf16] = attend_bf16;
  kernels.attend_scratch_nbytes[kBf16] = attend_bf16_scratch_nbytes;
  kernels.fold[kBf16] = fold<bf16>;
}
}  // namespace paged_ops::cpu::amx
#endif
