// What a backend offers to the bindings: one function per op, all of the same form.
#pragma once
#include <cstddef>

#include "params/attention.h"
#include "params/block_copy.h"
#include "params/cache_write.h"
#include "params/gather.h"
#include "params/merge_states.h"
#include "params/rope_write.h"

namespace paged_ops {

// Where and how a call runs.
struct Context {
  int device;    // ordinal; 0 on the CPU
  void* stream;  // the caller's current stream; null on the CPU and for CUDA's default stream
  bool check;    // check block ids and slots first (costs a synchronisation on a GPU)
};

struct Backend {
  const char* name;
  // Bytes of workspace that `attention` needs for these shapes. Reads no tensor's contents.
  size_t (*attention_workspace_nbytes)(const AttentionParams&);
  void (*attention)(const AttentionParams&, const Context&);
  void (*cache_write)(const CacheWriteParams&, const Context&);
  void (*block_copy)(const BlockCopyParams&, const Context&);
  void (*block_swap)(const BlockSwapParams&, const Context&);
  void (*gather)(const GatherParams&, const Context&);
  void (*merge_states)(const MergeStatesParams&, const Context&);
  // True when `attention` manages with scratch of its own if params.workspace is null.
  bool owns_scratch = false;
  void (*rope_write)(const RopeWriteParams&, const Context&);
};

namespace cpu {
const Backend& backend();
}
namespace launch {
const Backend& backend();  // CUDA, or its kernels in the emulator
}

}  // namespace paged_ops
