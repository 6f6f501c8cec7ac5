// Kernels that break CUDA's rules, one each, and controls of the emulator that should see it.
#include <cstring>
#include <map>
#include <vector>

#include "driver.h"

using namespace driver;

namespace {

struct Plant {
  void (*kernel)(float* global);
  dim3 grid{1}, block{64};
  size_t shared_nbytes = 0;
};

void divergent_barrier(float*) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
void barrier_of_another_kind(float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads_count(1);
  }
}
void mismatched_collective(float*) {
  if (threadIdx.x % 2)
    __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  else
    __ballot_sync(0xffffffffu, 1);
}
void divergent_shuffle(float*) {
  if (threadIdx.x % 2)
    __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  else
    __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
void overlapping_masks(float*) {
  if (threadIdx.x < 16)
    __syncwarp(0x0000ffffu);
  else
    __syncwarp(0xffffff00u);
}
void crossed_masks(float*) {
  if (threadIdx.x < 16)
    __syncwarp(0x00ffffffu);
  else
    __syncwarp(0xffffff00u);
}
void lane_outside_its_mask(float*) { __shfl_xor_sync(0x0000ffffu, 1.0f, 1); }
void lane_exited_before(float*) {
  if (threadIdx.x == 3) return;
  __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
void lane_absent(float*) { __syncwarp(); }
void lane_exits_while_others_wait(float*) {
  if (threadIdx.x == 31) return;
  __syncwarp();
}
void reads_lane_outside_mask(float*) {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1.0f, 20);
}
void odd_width(float*) { __shfl_sync(0xffffffffu, 1.0f, 0, 12); }
void misaligned_copy_destination(float* global) {
  SIMT_DYNAMIC_SHARED(raw);
  ptx::cp_async16(ptx::smem_addr(raw) + 8, global);
  ptx::cp_wait_all();
}
void misaligned_copy_source(float* global) {
  SIMT_DYNAMIC_SHARED(raw);
  ptx::cp_async16(ptx::smem_addr(raw) + 16 * threadIdx.x, global + 1);
  ptx::cp_wait_all();
}
void misaligned_ldmatrix(float*) {
  SIMT_DYNAMIC_SHARED(raw);
  uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::smem_addr(raw) + 16 * (threadIdx.x % 32) + 2);
}
void misaligned_load(float* global) { global[8] = float(ptx::load16(global + 1).x); }
void misaligned_atomic(float* global) {
  atomicAdd(reinterpret_cast<int*>(reinterpret_cast<char*>(global) + 2), 1);
}
void exit_with_copy_in_flight(float* global) {
  SIMT_DYNAMIC_SHARED(raw);
  ptx::cp_async16(ptx::smem_addr(raw) + 16 * threadIdx.x, global);
  ptx::cp_commit();
}
void exit_with_copy_uncommitted(float* global) {
  SIMT_DYNAMIC_SHARED(raw);
  ptx::cp_async16(ptx::smem_addr(raw) + 16 * threadIdx.x, global);
  ptx::cp_wait<0>();  // of the committed groups, of which there are none
}
void deadlock(float*) {
  if (threadIdx.x == 40)
    __syncthreads();
  else
    __syncwarp();
}
void too_much_static_shared(float*) {
  SIMT_SHARED(char[48 * 1024], a);
  SIMT_SHARED(char, b);
  a[0] = b = 0;
}
void nothing(float*) {}
void second_block_fails(float*) {
  if (blockIdx.x == 1) __shfl_xor_sync(0x0000ffffu, 1.0f, 1);
}

const std::map<std::string, Plant> kPlants{
    {"divergent_barrier", {divergent_barrier}},
    {"barrier_of_another_kind", {barrier_of_another_kind}},
    {"mismatched_collective", {mismatched_collective}},
    {"divergent_shuffle", {divergent_shuffle}},
    {"overlapping_masks", {overlapping_masks, 1, 32}},
    {"crossed_masks", {crossed_masks, 1, 32}},
    {"lane_outside_its_mask", {lane_outside_its_mask}},
    {"lane_exited_before", {lane_exited_before}},
    {"lane_absent", {lane_absent, 1, 40}},
    {"lane_exits_while_others_wait", {lane_exits_while_others_wait}},
    {"reads_lane_outside_mask", {reads_lane_outside_mask, 1, 32}},
    {"odd_width", {odd_width}},
    {"misaligned_copy_destination", {misaligned_copy_destination, 1, 1, 64}},
    {"misaligned_copy_source", {misaligned_copy_source, 1, 64, 1024}},
    {"misaligned_ldmatrix", {misaligned_ldmatrix, 1, 32, 1024}},
    {"misaligned_load", {misaligned_load}},
    {"misaligned_atomic", {misaligned_atomic}},
    {"exit_with_copy_in_flight", {exit_with_copy_in_flight, 1, 64, 1024}},
    {"exit_with_copy_uncommitted", {exit_with_copy_uncommitted, 1, 64, 1024}},
    {"deadlock", {deadlock}},
    {"too_much_static_shared", {too_much_static_shared}},
    {"too_much_shared_in_all", {too_much_static_shared, 1, 64, 200 * 1024}},
    {"too_much_dynamic_shared", {nothing, 1, 64, 227 * 1024 + 1}},
    {"too_many_threads", {nothing, 1, dim3(512, 3)}},
    {"too_deep_a_block", {nothing, 1, dim3(1, 1, 65)}},
    {"empty_grid", {nothing, dim3(0)}},
    {"too_high_a_grid", {nothing, dim3(1, 65536)}},
    {"second_block_fails", {second_block_fails, 4, 32}},
    {"nothing_wrong", {nothing, 4, 64}},
};

}  // namespace

EXPORT const char* configure(int order, int landing, unsigned long seed, int workers, int poison) {
  simt::Config& config = simt::config();
  config = {};
  config.order = simt::FiberOrder(order);
  config.landing = simt::CopyLanding(landing);
  config.seed = seed;
  config.workers = workers;
  config.poison = poison != 0;
  return nullptr;
}

EXPORT const char* plant(const char* name) {
  return attempt([&] {
    std::vector<float> host(64);
    Array<float> global(host.data(), host.size());
    const Plant& p = kPlants.at(name);
    simt::launch(p.kernel, p.grid, p.block, p.shared_nbytes, nullptr, global);
  });
}
// Whether a Fault is what it should be: an error of the device to the bindings.
EXPORT int fault_is_a_device_error() {
  try {
    simt::launch(nothing, dim3(0), dim3(1), 0, nullptr, static_cast<float*>(nullptr));
  } catch (const paged_ops::DeviceError&) {
    return 1;
  }
  return 0;
}

// ---- what depends on order and timing ---------------------------------------------------------------

// The turn of each thread between barriers, over all blocks.
__global__ void turns_kernel(int* turns, int* counter) {
  for (int round = 0; round < 2; ++round) {
    turns[round * gridDim.x * blockDim.x + blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1);
    __syncthreads();
  }
}
EXPORT const char* turns(int* out, int num_blocks, int num_threads) {
  return attempt([&] {
    int zero = 0;
    Array<int> device_out(out, size_t(2) * num_blocks * num_threads), counter(&zero, 1);
    simt::launch(turns_kernel, dim3(num_blocks), dim3(num_threads), 0, nullptr, device_out, counter);
    device_out.copy_back();
  });
}

// Each thread reads its neighbour's value; a barrier is missing in between.
__global__ void race_kernel(int* out) {
  SIMT_SHARED(int[64], tile);
  tile[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = tile[(threadIdx.x + 1) % 64];
}
EXPORT const char* race(int* out) {
  return attempt([&] {
    Array<int> device_out(out, 64);
    simt::launch(race_kernel, dim3(1), dim3(64), 0, nullptr, device_out);
    device_out.copy_back();
  });
}

// Shared memory as first seen: static, dynamic; then under a copy before it is waited for, and after.
__global__ void first_sight_kernel(const uint32_t* in, uint32_t* out) {
  SIMT_SHARED(uint32_t[4], tile);
  SIMT_DYNAMIC_SHARED(raw);
  const uint32_t* dynamic = reinterpret_cast<const uint32_t*>(raw);
  out[0] = tile[3];
  out[1] = dynamic[7];
  for (int i = 0; i < 8; ++i) reinterpret_cast<uint32_t*>(raw)[i] = 5;
  ptx::cp_async16(ptx::smem_addr(raw), in);
  out[2] = dynamic[0];
  ptx::cp_commit();
  ptx::cp_async16(ptx::smem_addr(raw) + 16, in + 4);
  ptx::cp_commit();
  ptx::cp_wait<1>();
  out[3] = dynamic[0];
  out[4] = dynamic[4];
  ptx::cp_wait<0>();
  out[5] = dynamic[4];
}
EXPORT const char* first_sight(const uint32_t* in, uint32_t* out) {
  return attempt([&] {
    Array<uint32_t> device_in(in, 8), device_out(out, 6);
    simt::launch(first_sight_kernel, dim3(1), dim3(1), 32, nullptr, device_in, device_out);
    device_out.copy_back();
  });
}
