// What kernels know about a warp: its size, its index, and a search that all its lanes do together.
#pragma once
#include <cstdint>

#include "simt/ptx.h"
#include "simt/simt.h"

namespace paged_ops::kernels {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// The index of this thread's warp. Taken through a shuffle, so that the compiler knows it to be uniform:
// otherwise it guards every later shuffle against divergence. It knows so only where it knows that the warp
// is together: at the top of a kernel, not in a loop with exits.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kAllLanes, int(threadIdx.x) / kWarpSize, 0);
}

// The index of this thread in its warp. Opaque, so that what derives from it is found where it is asked for,
// and not kept in registers across everything in between.
__device__ __forceinline__ int lane_index() { return ptx::opaque(int(threadIdx.x) % kWarpSize); }

// The largest i in [0, n) with key(i) <= x, for a key that never decreases and key(0) <= x. By all lanes of a
// warp together, with the same arguments: 32 probes at a time, two rounds for a thousand sequences.
struct WarpSearch {
  int lane;

  template <class Key>
  __device__ __forceinline__ int operator()(int n, int64_t x, Key key) const {
    int low = 0;
    while (n > 1) {
      const int step = (n + kWarpSize - 1) / kWarpSize;
      const int ahead = lane * step;
      const int at_most = __popc(__ballot_sync(kAllLanes, ahead < n && key(low + ahead) <= x));
      const int skipped = (at_most > 0 ? at_most - 1 : 0) * step;
      low += skipped;
      n = min(step, n - skipped);
    }
    return low;
  }
};

// The same by each thread for itself.
struct ThreadSearch {
  template <class Key>
  __device__ __forceinline__ int operator()(int n, int64_t x, Key key) const {
    int low = 0, high = n;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (key(middle) <= x ? low : high) = middle;
    }
    return low;
  }
};

}  // namespace paged_ops::kernels
