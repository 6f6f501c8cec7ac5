// Asks the launch code itself how it launches each kernel: threads and shared memory, for the audit.
//
// Built against the emulator, whose observer sees every launch; no kernel runs. Prints a line of JSON per
// kernel and shape of launch. Kernels are named as the linker names them, which is how nvcc does.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/attention.cuh"
#include "kernels/attention_fma.cuh"
#include "kernels/attention_mma.cuh"
#include "kernels/share_fma.cuh"
#include "kernels/share_mma.cuh"
#include "kernels/split_columns.cuh"
#include "kernels/split_dims.cuh"
#include "kernels/split_keys.cuh"
#include "launch/attention_config.h"
#include "params/backend.h"
#include "simt/emulator/config.h"

using namespace paged_ops;

namespace {

std::set<std::tuple<const void*, unsigned, size_t>> seen;

// Where a kernel lies in this program, for its symbol table to tell which it is.
size_t offset(const void* kernel) {
  Dl_info info{};
  dladdr(kernel, &info);
  return size_t(static_cast<const char*>(kernel) - static_cast<const char*>(info.dli_fbase));
}

bool observe(const simt::Launch& launch) {
  if (seen.insert({launch.kernel, launch.num_threads, launch.dynamic_shared_nbytes}).second)
    std::printf("{\"kernel\": %zu, \"threads\": %u, \"dynamic_shared\": %zu}\n", offset(launch.kernel),
                launch.num_threads, launch.dynamic_shared_nbytes);
  return false;
}

constexpr Context kContext{.device = 0, .stream = nullptr, .check = false};
constexpr uintptr_t kAligned = 1 << 20;  // stands for a tensor: nobody reads it
constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr DType kQuantised[] = {DType::f8e4m3, DType::f8e5m2, DType::i8, DType::i4};

void* tensor(uintptr_t offset = 0) { return reinterpret_cast<void*>(kAligned + offset); }

PagedKV cache(DType dtype, int head_dim, uintptr_t offset, int num_kv_heads = 8, int block_size = 16) {
  const int64_t row = row_nbytes(dtype, head_dim);
  const CacheView view{tensor(offset), row * num_kv_heads * block_size, row * num_kv_heads, row};
  return {view, view, 1000, block_size, num_kv_heads, head_dim, head_dim, dtype};
}

// The same caches with head dims in packs of 8.
PagedKV in_packs(PagedKV kv) {
  for (CacheView* view : {&kv.key, &kv.value}) {
    view->pack = 8;
    view->stride_pack = int64_t(8) * kv.block_size * itemsize(kv.dtype);
  }
  return kv;
}

void survey_attention(DType dtype, DType cache_dtype) {
  std::vector<int32_t> cu_seqlens(2, 0);
  for (int head_dim : {64, 128, 256, kMaxHeadDim})
    for (uintptr_t offset : {0, 4})        // 16-byte aligned or not
      for (int group : {4, 16})            // one tile of columns or two
        for (int tokens : {0, 100, 4096})  // decode, a short prefill, a long one
          for (int window : {0, 64}) {     // no rules, and one
            const bool prefill = tokens > 0;
            AttentionParams p{};
            p.query = tensor();
            p.out = tensor();
            p.lse = static_cast<float*>(tensor());
            p.cu_seqlens_q = prefill ? cu_seqlens.data() : nullptr;
            p.query_stride_head = p.out_stride_head = head_dim * itemsize(dtype);
            p.query_stride_token = p.out_stride_token = p.query_stride_head * group * 8;
            p.num_tokens = prefill ? tokens : 8;
            p.num_q_heads = 8 * group;
            p.dtype = dtype;
            p.kv = cache(cache_dtype, head_dim, offset);
            p.tables = {static_cast<const int32_t*>(tensor()), static_cast<const int32_t*>(tensor()), 512,
                        prefill ? 1 : 8, 512};
            p.scale = 1;
            p.causal = true;
            p.rules.window = window;
            p.workspace_nbytes = launch::backend().attention_workspace_nbytes(p);
            const auto workspace = std::make_unique<uint64_t[]>(p.workspace_nbytes / 8 + 1);
            p.workspace = workspace.get();
            launch::backend().attention(p, kContext);
          }
}

// Offsets that leave 16, 4, 2 and 1 bytes to move at a time.
constexpr uintptr_t kOffsets[] = {0, 4, 2, 1};

void survey_moves() {
  for (uintptr_t offset : kOffsets) {
    CacheWriteParams w{};
    w.key = w.value = tensor(offset);
    w.slot_mapping = static_cast<const int64_t*>(tensor());
    w.key_stride_head = w.value_stride_head = 256;
    w.key_stride_token = w.value_stride_token = 2048;
    w.num_tokens = 64;
    w.dtype = DType::bf16;
    w.kv = cache(DType::bf16, 128, offset);
    launch::backend().cache_write(w, kContext);
    w.kv = in_packs(w.kv);
    launch::backend().cache_write(w, kContext);

    GatherParams g{};
    g.key = g.value = tensor(offset);
    g.cu_seqlens = static_cast<int32_t*>(tensor());
    g.key_stride_head = g.value_stride_head = 256;
    g.key_stride_token = g.value_stride_token = 2048;
    g.num_rows = 64;
    g.kv = cache(DType::bf16, 128, offset);
    g.tables = {static_cast<const int32_t*>(tensor()), static_cast<const int32_t*>(tensor()), 8, 4, 8};
    g.dtype = g.kv.dtype;
    launch::backend().gather(g, kContext);
    g.kv = w.kv;
    launch::backend().gather(g, kContext);
    for (const DType quantised : {DType::f8e4m3, DType::f8e5m2, DType::i8, DType::i4})
      for (const DType dtype : kDTypes) {
        g.kv.dtype = quantised;
        g.dtype = dtype;
        launch::backend().gather(g, kContext);
      }

    void* caches[] = {tensor(offset)};
    const BlockShape block{32768, {1, 1}, {0, 0}};
    launch::backend().block_copy({caches, 1, block, 32768, 100, static_cast<const int64_t*>(tensor()), 4},
                                 kContext);
  }
  for (DType dtype : kDTypes)
    for (DType cache_dtype : kQuantised)
      for (uintptr_t offset : {0, 2}) {
        CacheWriteParams w{};
        w.key = w.value = tensor();
        w.slot_mapping = static_cast<const int64_t*>(tensor());
        w.key_stride_head = w.value_stride_head = 128 * itemsize(dtype);
        w.key_stride_token = w.value_stride_token = 8 * w.key_stride_head;
        w.num_tokens = 64;
        w.dtype = dtype;
        w.kv = cache(cache_dtype, 128, offset);
        launch::backend().cache_write(w, kContext);
      }
  for (DType dtype : kDTypes)
    for (int head_dim : {128, 126}) {
      const int64_t row = int64_t(head_dim) * itemsize(dtype);
      float* lse = static_cast<float*>(tensor());
      launch::backend().merge_states({tensor(), tensor(), lse, lse, tensor(), lse, 8 * row, row, 8 * row, row,
                                      8 * row, row, 64, 8, head_dim, dtype},
                                     kContext);
    }
}

void survey_rotations(DType dtype, DType cache_dtype) {
  for (int rotary_dim : {128, 126})  // four pairs at a time, and one
    for (bool interleaved : {false, true}) {
      const int64_t row = 128 * itemsize(dtype);
      RopeWriteParams p{};
      p.write.key = p.write.value = tensor();
      p.write.slot_mapping = static_cast<const int64_t*>(tensor());
      p.write.key_stride_head = p.write.value_stride_head = row;
      p.write.key_stride_token = p.write.value_stride_token = 8 * row;
      p.write.num_tokens = p.num_tokens = 64;
      p.write.dtype = dtype;
      p.write.kv = cache(cache_dtype, 128, 0);
      p.query = p.query_out = tensor();
      p.query_stride_head = p.out_stride_head = row;
      p.query_stride_token = p.out_stride_token = 32 * row;
      p.num_q_heads = 32;
      p.positions = tensor();
      p.cos_sin = static_cast<const float*>(tensor());
      p.cos_sin_stride = p.rotary_dim = rotary_dim;
      p.max_position = 4096;
      p.interleaved = interleaved;
      launch::backend().rope_write(p, kContext);
      if (is_quantised(cache_dtype)) continue;
      p.write.kv = in_packs(p.write.kv);
      launch::backend().rope_write(p, kContext);
    }
}

// The checks read device memory on the host, so they get real arrays; no kernel has written a verdict, so all
// pass.
void survey_checks() {
  const Context checked{.device = 0, .stream = nullptr, .check = true};
  std::vector<int32_t> ids(64, 0);
  std::vector<int64_t> wide(64, 0);
  CacheWriteParams w{};
  w.slot_mapping = wide.data();
  w.num_tokens = 8;
  w.dtype = DType::bf16;
  w.kv = cache(DType::bf16, 128, 0);
  launch::backend().cache_write(w, checked);
  void* caches[] = {tensor()};
  launch::backend().block_copy({caches, 1, {32, {1, 1}, {0, 0}}, 32, 100, wide.data(), 4}, checked);
  AttentionParams p{};
  p.cu_seqlens_q = ids.data();
  p.num_tokens = 1;
  p.num_q_heads = 8;
  p.dtype = DType::f16;
  p.kv = cache(DType::f16, 64, 0);
  p.tables = {ids.data(), ids.data(), 1, 1, 1};
  p.causal = true;
  p.rules.tree_mask = wide.data();
  launch::backend().attention(p, checked);
}

// What an attention kernel keeps in flight: all its rings while it waits, less what is being read while it
// computes.
template <class Walk>
void survey_ring() {
  std::printf("{\"kernel\": %zu, \"ring\": %d, \"in_use\": %d}\n",
              offset(reinterpret_cast<const void*>(kernels::attention_kernel<Walk>)), Walk::kRingsNbytes,
              Walk::kInUseNbytes);
}
template <kernels::Rules kRules, class... Tiles>
void survey_key_rings() {
  (survey_ring<kernels::SplitKeys<Tiles, kernels::RowCopy::asynchronous, kRules>>(), ...);
}
template <class T, class Stored, kernels::Rules kRules, int kHeadDim>
void survey_mma_rings_of() {
  using Wide = kernels::MmaTile<T, Stored, kHeadDim, 2>;
  constexpr int kMost = launch::most_column_tiles(dtype_of<Stored>::value, kHeadDim);
  survey_key_rings<kRules, kernels::MmaTile<T, Stored, kHeadDim, 1>>();
  if constexpr (kMost >= 2) survey_key_rings<kRules, Wide>();
  if constexpr (kMost == launch::kSplitColumnTiles) survey_ring<kernels::SplitColumns<Wide, kRules>>();
}
template <class T, class Stored, kernels::Rules kRules>
void survey_mma_rings() {
  survey_mma_rings_of<T, Stored, kRules, 64>();
  survey_mma_rings_of<T, Stored, kRules, 128>();
  survey_mma_rings_of<T, Stored, kRules, 256>();
}
template <class... Shares>
void survey_dim_rings() {
  using kernels::RowCopy, kernels::Rules;
  (survey_ring<kernels::SplitDims<Shares, RowCopy::asynchronous, Rules::some>>(), ...);
}
template <class T>
void survey_rings_for() {
  using kernels::Rules;
  survey_mma_rings<T, T, Rules::none>();
  survey_mma_rings<T, T, Rules::some>();
  survey_mma_rings<T, f8e4m3, Rules::some>();
  survey_mma_rings<T, f8e5m2, Rules::some>();
  survey_mma_rings<T, i8, Rules::some>();
  survey_dim_rings<kernels::MmaShare<T, kMaxHeadDim, 1>, kernels::MmaShare<T, kMaxHeadDim, 2>>();
}
template <kernels::Rules kRules>
void survey_fma_rings() {
  survey_key_rings<kRules, kernels::FmaTile<float, 64>, kernels::FmaTile<float, 128>,
                   kernels::FmaTile<float, 256>>();
}

}  // namespace

int main() {
  simt::config().observer = observe;
  for (DType dtype : kDTypes) {
    survey_attention(dtype, dtype);
    survey_rotations(dtype, dtype);
    for (DType cache_dtype : kQuantised) {
      survey_attention(dtype, cache_dtype);
      survey_rotations(dtype, cache_dtype);
    }
  }
  survey_moves();
  survey_checks();
  survey_rings_for<f16>();
  survey_rings_for<bf16>();
  survey_fma_rings<kernels::Rules::none>();
  survey_fma_rings<kernels::Rules::some>();
  survey_dim_rings<kernels::FmaShare<float, kMaxHeadDim>>();
  return 0;
}
