// Where the scales of a quantised cache lie, as a lane asks for those of its rows.
#pragma once
#include "kernels/page_table.cuh"

namespace paged_ops::kernels {

// Of K or of V, for one KV head. What the kernel's arguments say is not kept in registers.
class RowScale {
 public:
  __device__ __forceinline__ RowScale(const PagedKV& kv, bool of_value, int kv_head)
      : kv_(kv), of_value_(of_value), kv_head_(kv_head) {}

  // Of the row at `place`, or of its first group; null: it is `uniform`.
  __device__ __forceinline__ const float* at(PageTable::Place place) const {
    const ScaleView& scales = view(of_value_);
    if (is_uniform()) return nullptr;
    return reinterpret_cast<const float*>(
        reinterpret_cast<const char*>(scales.data) + unsigned(place.block) * scales.stride_block +
        unsigned(place.slot) * scales.stride_token + unsigned(kv_head_) * scales.stride_head);
  }
  __device__ __forceinline__ bool is_uniform() const { return view(of_value_).data == nullptr; }
  __device__ __forceinline__ float uniform() const { return view(of_value_).uniform; }
  // Of the group that has element `i` of a row of V, or of K, whose scales are at `scales`, as at() says.
  __device__ __forceinline__ float of_group(bool of_value, const float* scales, int i) const {
    if (scales == nullptr) return view(of_value).uniform;
    const int group = view(of_value).group;
    const int64_t offset = group == 0 ? 0 : i / group * view(of_value).stride_group;
    return __ldg(reinterpret_cast<const float*>(reinterpret_cast<const char*>(scales) + offset));
  }

 private:
  __device__ __forceinline__ const ScaleView& view(bool of_value) const {
    return of_value ? kv_.value_scale : kv_.key_scale;
  }

  const PagedKV& kv_;
  bool of_value_;
  int kv_head_;
};

// Where there are no scales.
struct NoScale {
  __device__ __forceinline__ NoScale(const PagedKV&, bool, int) {}
};

}  // namespace paged_ops::kernels
