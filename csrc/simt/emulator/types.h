// CUDA's vector types and dim3, as CUDA spells and aligns them.
#pragma once
#include <cstdint>

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#define SIMT_VECTORS(scalar, name)                                     \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };         \
  struct alignas(4 * sizeof(scalar)) name##4 { scalar x, y, z, w; };   \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; } \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

SIMT_VECTORS(float, float)
SIMT_VECTORS(int, int)
SIMT_VECTORS(unsigned int, uint)
SIMT_VECTORS(short, short)
SIMT_VECTORS(unsigned short, ushort)
SIMT_VECTORS(unsigned char, uchar)
#undef SIMT_VECTORS

struct alignas(16) longlong2 {
  long long x, y;
};
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
