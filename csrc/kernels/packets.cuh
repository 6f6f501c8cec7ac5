// Moving rows of heads as they are, in packets as wide as every address and stride involved allows.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/paged_kv.h"
#include "simt/simt.h"

namespace paged_ops::kernels {

// One token's rows in some tensor: [num_heads, row_nbytes], heads `stride_head` bytes apart.
struct HeadRows {
  unsigned char* at;
  int64_t stride_head;

  // A head's row: plus an index, the address of that element.
  template <class Element>
  __device__ __forceinline__ Element* row(int head) const {
    return reinterpret_cast<Element*>(at + head * stride_head);
  }
  __device__ __forceinline__ HeadRows behind(int nbytes) const { return {at + nbytes, stride_head}; }
};

// The same where `pack_nbytes` bytes of a row lie together, and packs `stride_pack` bytes apart. Elements do
// not straddle them.
struct PackedRows {
  unsigned char* at;
  int64_t stride_head, stride_pack;
  int pack_nbytes, first;  // `first` bytes of a row are left out

  template <class Element>
  struct Row {
    const PackedRows& rows;
    unsigned char* at;

    __device__ __forceinline__ Element* operator+(int i) const {
      const int byte = rows.first + i * int(sizeof(Element)), pack = byte / rows.pack_nbytes;
      return reinterpret_cast<Element*>(at + pack * rows.stride_pack + (byte - pack * rows.pack_nbytes));
    }
  };

  template <class Element>
  __device__ __forceinline__ Row<Element> row(int head) const {
    return {*this, at + head * stride_head};
  }
  __device__ __forceinline__ PackedRows behind(int nbytes) const {
    return {at, stride_head, stride_pack, pack_nbytes, first + nbytes};
  }
};

// Those of a token in a cache, which is plain if they are HeadRows.
template <class Rows>
__device__ __forceinline__ Rows cache_rows(const CacheView& cache, int64_t block, int64_t offset,
                                           DType dtype) {
  auto* at =
      static_cast<unsigned char*>(cache.data) + block * cache.stride_block + offset * cache.stride_token;
  if constexpr (std::is_same_v<Rows, PackedRows>)
    return {at, cache.stride_head, cache.stride_pack, int(row_nbytes(dtype, cache.pack)), 0};
  else
    return {at, cache.stride_head};
}

// The thread's share of the heads of a token. Threads x take packets of a row, threads y rows.
template <class Packet, class Rows, class Load>
__device__ __forceinline__ void write_heads(Rows to, int num_heads, int row_nbytes, Load load) {
  const int num_packets = row_nbytes / int(sizeof(Packet));
  for (int head = threadIdx.y; head < num_heads; head += blockDim.y) {
    const auto row = to.template row<Packet>(head);
    for (int i = threadIdx.x; i < num_packets; i += blockDim.x) *(row + i) = load(head, i);
  }
}

template <class Packet, class To, class From>
__device__ __forceinline__ void copy_heads(To to, From from, int num_heads, int row_nbytes) {
  write_heads<Packet>(to, num_heads, row_nbytes,
                      [&](int head, int i) { return *(from.template row<const Packet>(head) + i); });
}

template <class Packet, class Rows>
__device__ __forceinline__ void zero_heads(Rows to, int num_heads, int row_nbytes) {
  write_heads<Packet>(to, num_heads, row_nbytes, [](int, int) { return Packet{}; });
}

}  // namespace paged_ops::kernels
