// From one dim of a row to the next, where head dims lie in packs (core/paged_kv.h).
#pragma once
#include "core/paged_kv.h"
#include "simt/simt.h"

namespace paged_ops::kernels {

template <class Element>
class DimWalk {
 public:
  // Begins at dim `dim` of the row whose first dim is at `row`.
  __device__ __forceinline__ DimWalk(const char* row, const CacheView& view, int dim)
      : view_(view), at_(row + dim_offset(view, dim, kItemsize)), left_(view.pack - dim % view.pack) {}

  __device__ __forceinline__ Element operator*() const { return *reinterpret_cast<const Element*>(at_); }

  __device__ __forceinline__ void next() {
    at_ += kItemsize;
    if (--left_ > 0) return;
    left_ = view_.pack;
    at_ += view_.stride_pack - int64_t(view_.pack) * kItemsize;
  }

 private:
  static constexpr int kItemsize = int(sizeof(Element));

  const CacheView& view_;
  const char* at_;
  int left_;  // of the pack, this one counted
};

}  // namespace paged_ops::kernels
