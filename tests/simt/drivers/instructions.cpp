// Kernels that show what each function of ptx.h does, for nvcc and for g++ alike.
#include "driver.h"
#include "kernels/widen.cuh"

using namespace driver;
using paged_ops::f8e4m3, paged_ops::f8e5m2, paged_ops::i8;
namespace kernels = paged_ops::kernels;

enum Load { kX2, kX2Trans, kX4, kX4Trans };

// rows: [32][8]; lane l gives the address of row order[l]. out: [32][4].
__global__ void ldmatrix_kernel(const uint16_t* rows, const int* order, uint32_t* out, int kind) {
  SIMT_SHARED(uint4[32], tile);
  const int lane = threadIdx.x;
  tile[lane] = ptx::load16(rows + 8 * lane);
  __syncwarp();
  const ptx::smem_t row = ptx::smem_addr(tile) + 16 * order[lane];
  uint32_t two[2] = {0, 0}, four[4] = {0, 0, 0, 0};
  if (kind == kX2) ptx::ldmatrix_x2(two, row);
  if (kind == kX2Trans) ptx::ldmatrix_x2_trans(two, row);
  if (kind == kX4) ptx::ldmatrix_x4(four, row);
  if (kind == kX4Trans) ptx::ldmatrix_x4_trans(four, row);
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = four[i] | (i < 2 ? two[i] : 0);
}
EXPORT const char* ldmatrix(const uint16_t* rows, const int* order, uint32_t* out, int kind) {
  return attempt([&] {
    Array<uint16_t> device_rows(rows, 32 * 8);
    Array<int> device_order(order, 32);
    Array<uint32_t> device_out(out, 32 * 4);
    simt::launch(ldmatrix_kernel, dim3(1), dim3(32), 0, nullptr, device_rows, device_order, device_out, kind);
    device_out.copy_back();
  });
}

__global__ void movmatrix_kernel(const uint32_t* in, uint32_t* out) {
  out[threadIdx.x] = ptx::opaque(ptx::movmatrix_trans(in[threadIdx.x]));
}
EXPORT const char* movmatrix(const uint32_t* in, uint32_t* out) {
  return attempt([&] {
    Array<uint32_t> device_in(in, 32), device_out(out, 32);
    simt::launch(movmatrix_kernel, dim3(1), dim3(32), 0, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

// c [16][8] += a [16][16] b [16][8], fragments taken element by element as ptx.h describes them.
template <class T>
__global__ void mma_kernel(const uint16_t* a, const uint16_t* b, float* c) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t af[4], bf[2];
  float cf[4];
  for (int i = 0; i < 4; ++i) {
    const uint16_t* pair = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
    af[i] = pair[0] | uint32_t(pair[1]) << 16;
    cf[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  }
  for (int i = 0; i < 2; ++i) {
    const uint16_t* pair = b + (2 * t + i * 8) * 8 + g;
    bf[i] = pair[0] | uint32_t(pair[8]) << 16;
  }
  ptx::mma_m16n8k16<T>(cf, af, bf);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = cf[i];
}
// The same with k = 16 num_tiles, the way kernels do it: copied behind the back, loaded as matrices.
template <class T>
__global__ void tiled_mma_kernel(const uint16_t* a, const uint16_t* b, float* c, int num_tiles) {
  SIMT_DYNAMIC_SHARED(raw);  // [2] of a tile of a [16][16] and one of b [16][8]
  constexpr int kTile = 16 * 16 * 2, kStage = kTile + 16 * 8 * 2;
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const ptx::smem_t shared = ptx::smem_addr(raw);
  auto copy = [&](int tile) {
    if (tile < num_tiles) {
      const ptx::smem_t stage = shared + tile % 2 * kStage;
      ptx::cp_async16(stage + lane * 16, a + (lane / 2) * 16 * num_tiles + tile * 16 + lane % 2 * 8);
      if (lane < 16) ptx::cp_async16(stage + kTile + lane * 16, b + (tile * 16 + lane) * 8);
    }
    ptx::cp_commit();
  };
  float cf[4] = {0, 0, 0, 0};
  copy(0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    copy(tile + 1);
    ptx::cp_wait<1>();
    __syncwarp();
    const ptx::smem_t stage = shared + tile % 2 * kStage;
    uint32_t af[4], bf[2];
    ptx::ldmatrix_x4(af, stage + (lane % 16) * 32 + lane / 16 * 16);
    ptx::ldmatrix_x2_trans(bf, stage + kTile + lane % 16 * 16);
    ptx::mma_m16n8k16<T>(cf, af, bf);
    __syncwarp();
  }
  ptx::cp_wait_all();
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = cf[i];
}
template <class T>
const char* mma(const uint16_t* a, const uint16_t* b, float* c, int num_tiles) {
  return attempt([&] {
    Array<uint16_t> device_a(a, size_t(256) * (num_tiles ? num_tiles : 1));
    Array<uint16_t> device_b(b, size_t(128) * (num_tiles ? num_tiles : 1));
    Array<float> device_c(c, 128);
    if (num_tiles == 0)
      simt::launch(mma_kernel<T>, dim3(1), dim3(32), 0, nullptr, device_a, device_b, device_c);
    else
      simt::launch(tiled_mma_kernel<T>, dim3(1), dim3(32), 1536, nullptr, device_a, device_b, device_c,
                   num_tiles);
    device_c.copy_back();
  });
}
// num_tiles 0: one instruction added to what c holds.
EXPORT const char* mma_f16(const uint16_t* a, const uint16_t* b, float* c, int num_tiles) {
  return mma<f16>(a, b, c, num_tiles);
}
EXPORT const char* mma_bf16(const uint16_t* a, const uint16_t* b, float* c, int num_tiles) {
  return mma<bf16>(a, b, c, num_tiles);
}

template <class T>
__global__ void widen_kernel(const T* in, float* out, float* unpacked, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = ptx::to_float(ptx::to_float(in[i]));
  const uint32_t pair = in[i].bits | uint32_t(in[n - 1 - i].bits) << 16;
  const float2 both = ptx::unpack2<T>(pair);
  unpacked[2 * i] = both.x;
  unpacked[2 * i + 1] = both.y;
}
template <class T>
__global__ void narrow_kernel(const float* in, T* out, uint32_t* packed, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = ptx::from_float<T>(ptx::from_float<float>(in[i]));
  packed[i] = ptx::pack2<T>(in[i], in[n - 1 - i]);
}
template <class T>
const char* convert(const uint16_t* wide_in, float* wide_out, float* unpacked, const float* narrow_in,
                    uint16_t* narrow_out, uint32_t* packed, int n) {
  return attempt([&] {
    Array<T> a(reinterpret_cast<const T*>(wide_in), n), e(reinterpret_cast<const T*>(narrow_out), n);
    Array<float> b(wide_out, n), c(unpacked, size_t(2) * n), d(narrow_in, n);
    Array<uint32_t> f(packed, n);
    simt::launch(widen_kernel<T>, dim3((n + 255) / 256), dim3(256), 0, nullptr, a, b, c, n);
    simt::launch(narrow_kernel<T>, dim3((n + 255) / 256), dim3(256), 0, nullptr, d, e, f, n);
    b.copy_back(), c.copy_back(), e.copy_back(), f.copy_back();
  });
}
EXPORT const char* convert_f16(const uint16_t* a, float* b, float* c, const float* d, uint16_t* e,
                               uint32_t* f, int n) {
  return convert<f16>(a, b, c, d, e, f, n);
}
EXPORT const char* convert_bf16(const uint16_t* a, float* b, float* c, const float* d, uint16_t* e,
                                uint32_t* f, int n) {
  return convert<bf16>(a, b, c, d, e, f, n);
}

// Copies every second piece and zeros the others, then passes them on through each way to 16 bytes.
__global__ void pieces_kernel(const unsigned char* in, unsigned char* out) {
  SIMT_DYNAMIC_SHARED(raw);
  const int i = threadIdx.x;
  ptx::cp_async16(ptx::smem_addr(raw) + 16 * i, in + 16 * i, i % 2 == 0);
  ptx::cp_commit();
  ptx::cp_wait<0>();
  __syncthreads();
  const int j = blockDim.x - 1 - i;
  ptx::store16(out + 16 * i, ptx::load16(raw + 16 * j));
  ptx::store16_once(out + 16 * (blockDim.x + i), ptx::load16_once(in + 16 * i));
}
EXPORT const char* pieces(const unsigned char* in, unsigned char* out, int n) {
  return attempt([&] {
    Array<unsigned char> device_in(in, size_t(16) * n), device_out(out, size_t(32) * n);
    simt::launch(pieces_kernel, dim3(1), dim3(n), size_t(16) * n, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

__global__ void byte_perm_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t* row = in + 3 * threadIdx.x;
  out[threadIdx.x] = ptx::byte_perm(row[0], row[1], row[2]);
}
EXPORT const char* byte_perm(const uint32_t* in, uint32_t* out) {
  return attempt([&] {
    Array<uint32_t> device_in(in, 3 * 64), device_out(out, 64);
    simt::launch(byte_perm_kernel, dim3(1), dim3(64), 0, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

// Words of four 8-bit numbers, widened: [n] pairs of the first and third, then [n] of the second and fourth.
template <class T, class Q>
__global__ void widen_bytes_kernel(const uint32_t* in, uint32_t* out) {
  const int i = threadIdx.x, n = blockDim.x;
  const kernels::Widened x = kernels::widen<T, Q>(in[i]);
  out[i] = x.even;
  out[n + i] = x.odd;
}
// By the machine's own instruction where it has one: pairs of the first two, then of the other two.
__global__ void widen_e4m3_kernel(const uint32_t* in, uint32_t* out) {
  const int i = threadIdx.x, n = blockDim.x;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  ptx::widen_e4m3(in[i], out[i], out[n + i]);
#else
  const kernels::Widened x = kernels::widen<f16, f8e4m3>(ptx::byte_perm(in[i], 0, 0x3120));
  out[i] = x.even;
  out[n + i] = x.odd;
#endif
}
// kind: 0 to 2 e4m3, e5m2, int8 to f16; 3 to 5 to bf16; 6 the instruction.
EXPORT const char* widen_bytes(const uint32_t* in, uint32_t* out, int n, int kind) {
  return attempt([&] {
    Array<uint32_t> device_in(in, n), device_out(out, size_t(2) * n);
    const auto run = [&](void (*kernel)(const uint32_t*, uint32_t*)) {
      simt::launch(kernel, dim3(1), dim3(n), 0, nullptr, device_in, device_out);
    };
    switch (kind) {
      case 0: run(widen_bytes_kernel<f16, f8e4m3>); break;
      case 1: run(widen_bytes_kernel<f16, f8e5m2>); break;
      case 2: run(widen_bytes_kernel<f16, i8>); break;
      case 3: run(widen_bytes_kernel<bf16, f8e4m3>); break;
      case 4: run(widen_bytes_kernel<bf16, f8e5m2>); break;
      case 5: run(widen_bytes_kernel<bf16, i8>); break;
      default: run(widen_e4m3_kernel);
    }
    device_out.copy_back();
  });
}

template <class T>
__global__ void fma2_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t* row = in + 3 * threadIdx.x;
  out[threadIdx.x] = ptx::fma2<T>(row[0], row[1], row[2]);
}
EXPORT const char* fma2(const uint32_t* in, uint32_t* out, int n, int is_bf16) {
  return attempt([&] {
    Array<uint32_t> device_in(in, size_t(3) * n), device_out(out, n);
    simt::launch(is_bf16 ? &fma2_kernel<bf16> : &fma2_kernel<f16>, dim3(1), dim3(n), 0, nullptr, device_in,
                 device_out);
    device_out.copy_back();
  });
}

// Copies every second word of [n] and zeros the others.
__global__ void words_kernel(const uint32_t* in, uint32_t* out) {
  SIMT_DYNAMIC_SHARED(raw);
  const int i = threadIdx.x;
  ptx::cp_async4(ptx::smem_addr(raw) + 4 * i, in + i, i % 2 == 0);
  ptx::cp_commit();
  ptx::cp_wait<0>();
  __syncthreads();
  out[i] = reinterpret_cast<const uint32_t*>(raw)[blockDim.x - 1 - i];
}
EXPORT const char* words(const uint32_t* in, uint32_t* out, int n) {
  return attempt([&] {
    Array<uint32_t> device_in(in, n), device_out(out, n);
    simt::launch(words_kernel, dim3(1), dim3(n), size_t(4) * n, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

__global__ void lg2_kernel(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = ptx::lg2(in[i]);
}
EXPORT const char* lg2(const float* in, float* out, int n) {
  return attempt([&] {
    Array<float> device_in(in, n), device_out(out, n);
    simt::launch(lg2_kernel, dim3((n + 127) / 128), dim3(128), 0, nullptr, device_in, device_out, n);
    device_out.copy_back();
  });
}

__global__ void ex2_kernel(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = ptx::ex2(in[i]);
}
EXPORT const char* ex2(const float* in, float* out, int n) {
  return attempt([&] {
    Array<float> device_in(in, n), device_out(out, n);
    simt::launch(ex2_kernel, dim3((n + 127) / 128), dim3(128), 0, nullptr, device_in, device_out, n);
    device_out.copy_back();
  });
}
