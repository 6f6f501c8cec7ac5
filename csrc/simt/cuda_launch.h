// What simt.h adds to CUDA under nvcc: launches, status checks and batches of copies as calls.
#pragma once
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"

#define SIMT_SHARED(type, name) __shared__ typename ::paged_ops::simt::Identity<type>::Type name
// Every kernel of a program must declare dynamic shared memory alike, hence one spelling for all.
#define SIMT_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SIMT_CHECK(call) ::paged_ops::simt::check((call), #call)

namespace paged_ops::simt {

template <class T>
struct Identity {
  using Type = T;
};

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) fail<DeviceError>(call, ": ", cudaGetErrorString(status));
}

// Dynamic shared memory beyond 48 KB must be asked for, per kernel and device. The limit is only ever
// raised, so that launches from several host threads cannot take it from one another.
inline void allow_shared_memory(const void* kernel, size_t nbytes) {
  constexpr size_t kAlwaysAllowed = 48 * 1024;
  if (nbytes <= kAlwaysAllowed) return;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  int device = 0;
  SIMT_CHECK(cudaGetDevice(&device));
  std::lock_guard<std::mutex> lock(mutex);
  size_t& limit = allowed[{kernel, device}];
  if (nbytes <= limit) return;
  SIMT_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(nbytes)));
  limit = nbytes;
}

struct Residency {
  int multiprocessors, ctas_per_multiprocessor;
};

// How many CTAs of a kernel the current device holds at once. Asked once per kernel and device.
inline Residency residency(const void* kernel, unsigned threads, size_t shared_nbytes) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, size_t>, Residency> known;
  int device = 0;
  SIMT_CHECK(cudaGetDevice(&device));
  allow_shared_memory(kernel, shared_nbytes);
  std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = known.try_emplace({kernel, device, shared_nbytes});
  Residency& found = entry->second;
  if (is_new || found.multiprocessors == 0) {
    SIMT_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.ctas_per_multiprocessor, kernel,
                                                             int(threads), shared_nbytes));
    SIMT_CHECK(cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  }
  return found;
}

template <class... Parameters>
Residency residency(void (*kernel)(Parameters...), unsigned threads, size_t shared_nbytes) {
  return residency(reinterpret_cast<const void*>(kernel), threads, shared_nbytes);
}

// Launches kernel<<<grid, block, shared_nbytes, stream>>>(arguments...). Throws DeviceError when CUDA
// refuses.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_nbytes, cudaStream_t stream,
            Arguments&&... arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_nbytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = stream;
  SIMT_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// Copies `count` pieces between host and device memory in any mix (unified addressing tells which), in
// stream order as a whole, but in no order among themselves. One call to the driver where CUDA has it.
inline void memcpy_batch_async(void* const* destinations, const void* const* sources, const size_t* nbytes,
                               size_t count, cudaStream_t stream) {
  if (count == 0) return;
#if CUDART_VERSION >= 13000
  // The batched call takes neither the legacy default stream nor a stream under capture.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const bool legacy = stream == nullptr || stream == cudaStreamLegacy;
  if (!legacy) SIMT_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (!legacy && capture == cudaStreamCaptureStatusNone) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    SIMT_CHECK(cudaMemcpyBatchAsync(destinations, sources, nbytes, count, attributes, stream));
    return;
  }
#endif
  for (size_t i = 0; i < count; ++i)
    SIMT_CHECK(cudaMemcpyAsync(destinations[i], sources[i], nbytes[i], cudaMemcpyDefault, stream));
}

}  // namespace paged_ops::simt
