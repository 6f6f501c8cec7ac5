// Kernels that show what each word of simt.h does, for nvcc and for g++ alike.
#include "driver.h"

using namespace driver;

__global__ void indices_kernel(unsigned* out) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned* row = out + 12 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
  const unsigned values[12] = {threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z,
                               blockDim.x,  blockDim.y,  blockDim.z,  gridDim.x,  gridDim.y,  gridDim.z};
  for (int i = 0; i < 12; ++i) row[i] = values[i];
}
EXPORT const char* indices(unsigned* out, const unsigned* grid, const unsigned* block) {
  return attempt([&] {
    const dim3 g(grid[0], grid[1], grid[2]), b(block[0], block[1], block[2]);
    Array<unsigned> device(out, size_t(12) * g.x * g.y * g.z * b.x * b.y * b.z);
    simt::launch(indices_kernel, g, b, 0, nullptr, device);
    device.copy_back();
  });
}

enum Shuffle { kIndex, kUp, kDown, kXor };

template <class T>
__global__ void shuffle_kernel(const T* in, T* out, int kind, int argument, int width) {
  const T value = in[threadIdx.x];
  T result = value;
  if (kind == kIndex) result = __shfl_sync(0xffffffffu, value, argument, width);
  if (kind == kUp) result = __shfl_up_sync(0xffffffffu, value, unsigned(argument), width);
  if (kind == kDown) result = __shfl_down_sync(0xffffffffu, value, unsigned(argument), width);
  if (kind == kXor) result = __shfl_xor_sync(0xffffffffu, value, argument, width);
  out[threadIdx.x] = result;
}
template <class T>
const char* shuffle(const T* in, T* out, int kind, int argument, int width) {
  return attempt([&] {
    Array<T> device_in(in, 64), device_out(out, 64);
    simt::launch(shuffle_kernel<T>, dim3(1), dim3(64), 0, nullptr, device_in, device_out, kind, argument,
                 width);
    device_out.copy_back();
  });
}
EXPORT const char* shuffle_int32(const int* in, int* out, int kind, int argument, int width) {
  return shuffle(in, out, kind, argument, width);
}
EXPORT const char* shuffle_float32(const float* in, float* out, int kind, int argument, int width) {
  return shuffle(in, out, kind, argument, width);
}
EXPORT const char* shuffle_int64(const long long* in, long long* out, int kind, int argument, int width) {
  return shuffle(in, out, kind, argument, width);
}

// The two halves of a warp part: one meets twice, the other once, each in a mask of its own.
__global__ void votes_kernel(const int* in, unsigned* out) {
  const int lane = threadIdx.x % 32;
  const int vote = in[threadIdx.x];
  unsigned* row = out + 6 * threadIdx.x;
  row[0] = __ballot_sync(0xffffffffu, vote);
  row[1] = __any_sync(0xffffffffu, vote);
  row[2] = __all_sync(0xffffffffu, vote);
  row[3] = row[4] = 0;
  if (lane < 16) {
    row[3] = __ballot_sync(0x0000ffffu, vote);
    __syncwarp(0x0000ffffu);
    row[4] = __shfl_xor_sync(0x0000ffffu, unsigned(lane), 5);
  } else {
    row[3] = __ballot_sync(0xffff0000u, vote);
  }
  __syncwarp();
  row[5] = __shfl_sync(0xffffffffu, row[3], 31 - lane);
}
EXPORT const char* votes(const int* in, unsigned* out) {
  return attempt([&] {
    Array<int> device_in(in, 64);
    Array<unsigned> device_out(out, 6 * 64);
    simt::launch(votes_kernel, dim3(1), dim3(64), 0, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

// Threads that leave early do not count in the barriers of those that stay.
__global__ void block_votes_kernel(const int* in, int* out, int num_staying) {
  if (int(threadIdx.x) >= num_staying) return;
  const int vote = in[threadIdx.x];
  int* row = out + 3 * threadIdx.x;
  row[0] = __syncthreads_count(vote);
  row[1] = __syncthreads_or(vote) != 0;
  row[2] = __syncthreads_and(vote) != 0;
}
EXPORT const char* block_votes(const int* in, int* out, int num_threads, int num_staying) {
  return attempt([&] {
    Array<int> device_in(in, num_threads), device_out(out, size_t(3) * num_threads);
    simt::launch(block_votes_kernel, dim3(1), dim3(num_threads), 0, nullptr, device_in, device_out,
                 num_staying);
    device_out.copy_back();
  });
}

struct Totals {
  int sum, maximum, minimum, claimed;
  unsigned unsigned_sum, exchanged;
  unsigned long long long_sum;
  float float_sum, unused;
};

__global__ void atomics_kernel(const int* in, Totals* totals) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, value = in[i];
  atomicAdd(&totals->sum, value);
  atomicAdd(&totals->unsigned_sum, unsigned(value));
  atomicAdd(&totals->long_sum, (unsigned long long)value << 32);
  atomicAdd(&totals->float_sum, float(value % 4));  // exact in any order
  atomicMax(&totals->maximum, value);
  atomicMin(&totals->minimum, value);
  if (atomicExch(&totals->exchanged, 1u) == 0) atomicAdd(&totals->exchanged, 1000u);
  if (atomicCAS(&totals->claimed, -1, i) == -1) atomicAdd(&totals->exchanged, 0u);
}
EXPORT const char* atomics(const int* in, Totals* totals, int num_blocks, int num_threads) {
  return attempt([&] {
    Array<int> device_in(in, size_t(num_blocks) * num_threads);
    Array<Totals> device_totals(totals, 1);
    simt::launch(atomics_kernel, dim3(num_blocks), dim3(num_threads), 0, nullptr, device_in, device_totals);
    device_totals.copy_back();
  });
}

// A transpose through static shared memory, a reversal through dynamic; each launch needs more than 48 KB.
__global__ void shared_kernel(const float* in, float* transposed, float* reversed) {
  SIMT_SHARED(float[16][17], tile);
  SIMT_SHARED(int, first);
  SIMT_DYNAMIC_SHARED(raw);
  float* line = reinterpret_cast<float*>(raw) + 15 * 1024;
  const int i = threadIdx.x, row = i / 16, column = i % 16;
  const float* block_in = in + 256 * blockIdx.x;
  if (i == 0) first = 256 * blockIdx.x;
  tile[row][column] = block_in[i];
  line[i] = block_in[i];
  __syncthreads();
  transposed[first + i] = tile[column][row];
  reversed[first + i] = line[255 - i];
}
EXPORT const char* shared(const float* in, float* transposed, float* reversed, int num_blocks) {
  return attempt([&] {
    const size_t n = size_t(256) * num_blocks;
    Array<float> a(in, n), b(transposed, n), c(reversed, n);
    simt::launch(shared_kernel, dim3(num_blocks), dim3(256), 64 * 1024, nullptr, a, b, c);
    b.copy_back();
    c.copy_back();
  });
}

// The last block to finish adds up what all have left, in block order.
__global__ void last_block_kernel(const float* in, float* partial, float* total, unsigned* counter) {
  SIMT_SHARED(float[4], warp_sum);
  SIMT_SHARED(bool, last);
  float sum = in[blockIdx.x * blockDim.x + threadIdx.x];
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % warpSize == 0) warp_sum[threadIdx.x / warpSize] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = warp_sum[0] + warp_sum[1] + warp_sum[2] + warp_sum[3];
    __threadfence();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  float all = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) all += ptx::load_l2(partial + b);
  *total = all;
  *counter = 0;
}
EXPORT const char* last_block(const float* in, float* total, unsigned* counter, int num_blocks) {
  return attempt([&] {
    Array<float> device_in(in, size_t(128) * num_blocks), device_total(total, 1);
    Array<float> partial(in, num_blocks);
    Array<unsigned> device_counter(counter, 1);
    for (int replay = 0; replay < 2; ++replay)
      simt::launch(last_block_kernel, dim3(num_blocks), dim3(128), 0, nullptr, device_in, partial,
                   device_total, device_counter);
    device_total.copy_back();
    device_counter.copy_back();
  });
}

__global__ void scalars_kernel(const int* in, int* out) {
  const int i = threadIdx.x, x = __ldg(in + i), y = in[(i + 1) % 32];
  int* row = out + 12 * i;
  row[0] = __popc(x);
  row[1] = __clz(x);
  row[2] = __ffs(x);
  row[3] = __float_as_int(__int_as_float(x));
  row[4] = int(__float_as_uint(__uint_as_float(unsigned(x))));
  row[5] = min(x, y);
  row[6] = max(x, y);
  row[7] = int(min(unsigned(x), unsigned(y)));
  const float a = float(x % 1000), b = float(y % 1000);
  row[8] = __float_as_int(__fadd_rn(__fmul_rn(a, 0.1f), b));
  row[9] = __float_as_int(__fmaf_rn(a, 0.1f, b));
  row[10] = __float_as_int(fmaxf(a, b));
  row[11] = __float_as_int(min(a, b));
}
EXPORT const char* scalars(const int* in, int* out) {
  return attempt([&] {
    Array<int> device_in(in, 32), device_out(out, 12 * 32);
    simt::launch(scalars_kernel, dim3(1), dim3(32), 0, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

__global__ void functions_kernel(const float* in, float* out) {
  const float x = in[threadIdx.x];
  float* row = out + 5 * threadIdx.x;
  row[0] = __expf(-x);
  row[1] = __logf(x);
  row[2] = rsqrtf(x);
  row[3] = __fdividef(1.0f, x);
  row[4] = ptx::ex2(-x);
  __threadfence_block();
}
EXPORT const char* functions(const float* in, float* out) {
  return attempt([&] {
    Array<float> device_in(in, 32), device_out(out, 5 * 32);
    simt::launch(functions_kernel, dim3(1), dim3(32), 0, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}

__global__ void vectors_kernel(float* out) {
  const float2 a = make_float2(1, 2);
  const float4 b = make_float4(3, 4, 5, 6);
  const int2 c = make_int2(7, 8);
  const int4 d = make_int4(9, 10, 11, 12);
  const uint2 e = make_uint2(13, 14);
  const uint4 f = make_uint4(15, 16, 17, 18);
  const float values[] = {a.x,
                          a.y,
                          b.x,
                          b.y,
                          b.z,
                          b.w,
                          float(c.x),
                          float(c.y),
                          float(d.x),
                          float(d.y),
                          float(d.z),
                          float(d.w),
                          float(e.x),
                          float(e.y),
                          float(f.x),
                          float(f.y),
                          float(f.z),
                          float(f.w),
                          float(sizeof(float2) + alignof(float2)),
                          float(sizeof(uint4) + alignof(uint4)),
                          float(sizeof(int2) + alignof(int2)),
                          float(sizeof(float4) + alignof(float4))};
  for (int i = 0; i < 22; ++i) out[i] = values[i];
}
EXPORT const char* vectors(float* out) {
  return attempt([&] {
    Array<float> device(out, 22);
    simt::launch(vectors_kernel, dim3(1), dim3(1), 0, nullptr, device);
    device.copy_back();
  });
}
