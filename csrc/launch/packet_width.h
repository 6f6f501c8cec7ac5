// How wide rows may be moved: a pure function of the addresses, strides and sizes involved.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "core/paged_kv.h"
#include "simt/simt.h"

namespace paged_ops::launch {

// Collects what must be divisible by the width.
class PacketWidth {
 public:
  PacketWidth& address(const void* p) { return nbytes(int64_t(reinterpret_cast<uintptr_t>(p))); }
  PacketWidth& nbytes(int64_t n) {
    bits_ |= uint64_t(n);
    return *this;
  }
  PacketWidth& cache(const CacheView& view, DType dtype) {
    return address(view.data)
        .nbytes(view.stride_block)
        .nbytes(view.stride_token)
        .nbytes(view.stride_head)
        .nbytes(view.stride_pack)
        .nbytes(row_nbytes(dtype, view.pack));
  }
  bool divisible_by(int width) const { return bits_ % unsigned(width) == 0; }
  // 16, 4, 2 or 1 bytes.
  int get() const {
    for (const int width : {16, 4, 2})
      if (divisible_by(width)) return width;
    return 1;
  }

 private:
  uint64_t bits_ = 0;
};

template <class T>
struct PacketType {
  using type = T;
};

// Calls f(PacketType<P>()) with the packet of that many bytes.
template <class F>
void dispatch_packet(int width, F&& f) {
  switch (width) {
    case 16: return f(PacketType<uint4>());
    case 4: return f(PacketType<uint32_t>());
    case 2: return f(PacketType<uint16_t>());
    default: return f(PacketType<uint8_t>());
  }
}

// Threads for the heads of one token, K and V side by side: x packets of a row, y heads, z = 2. Powers of
// two, whole warps, at most 256 threads.
inline dim3 head_threads(int packets_per_row, int num_heads) {
  unsigned x = 1, y = 1;
  while (x < unsigned(packets_per_row) && x < 32) x *= 2;
  while (y < unsigned(num_heads) && x * y < 128) y *= 2;
  while (x * y < 16) y *= 2;
  return dim3(x, y, 2);
}

}  // namespace paged_ops::launch
