// Moving rows of heads as they are, in packets as wide as every address and stride involved allows.
#pragma once
#include <cstdint>

#include "simt/simt.h"

namespace paged_ops::kernels {

// One token's rows in some tensor: [num_heads, row_nbytes], heads `stride_head` bytes apart.
struct HeadRows {
  unsigned char* at;
  int64_t stride_head;
};

// The thread's share of the heads of a token. Threads x take packets of a row, threads y rows.
template <class Packet, class Load>
__device__ __forceinline__ void write_heads(HeadRows to, int num_heads, int row_nbytes, Load load) {
  const int num_packets = row_nbytes / int(sizeof(Packet));
  for (int head = threadIdx.y; head < num_heads; head += blockDim.y) {
    Packet* row = reinterpret_cast<Packet*>(to.at + head * to.stride_head);
    for (int i = threadIdx.x; i < num_packets; i += blockDim.x) row[i] = load(head, i);
  }
}

template <class Packet>
__device__ __forceinline__ void copy_heads(HeadRows to, HeadRows from, int num_heads, int row_nbytes) {
  write_heads<Packet>(to, num_heads, row_nbytes, [&](int head, int i) {
    return reinterpret_cast<const Packet*>(from.at + head * from.stride_head)[i];
  });
}

template <class Packet>
__device__ __forceinline__ void zero_heads(HeadRows to, int num_heads, int row_nbytes) {
  write_heads<Packet>(to, num_heads, row_nbytes, [](int, int) { return Packet{}; });
}

}  // namespace paged_ops::kernels
