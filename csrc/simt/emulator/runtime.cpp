// The CUDA runtime's stand-in: what is checked, and when work runs.
#include "simt/emulator/runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "simt/emulator/block.h"
#include "simt/emulator/config.h"

using Work = std::vector<std::function<void()>>;

struct CUstream_st {
  bool capturing = false;
  bool invalidated = false;  // something was done during the capture that a graph cannot hold
  Work captured;
};
struct CUevent_st {
  bool recorded = false;
  std::chrono::steady_clock::time_point time;
};
struct CUgraph_st {
  Work work;
};
struct CUgraphExec_st {
  Work work;
};

namespace {

// The objects that CUDA has handed out, to tell handles from other numbers.
struct Registry {
  std::mutex mutex;
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> executables;
  std::map<uintptr_t, size_t> allocations;  // address -> bytes
  CUstream_st default_stream, per_thread_stream;
  int num_capturing = 0;
};

Registry& registry() {
  static Registry* registry = new Registry;  // used by destructors of static objects
  return *registry;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t report(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

// The stream behind a handle; null when it is none.
CUstream_st* find_stream(cudaStream_t stream) {
  Registry& all = registry();
  if (stream == nullptr || stream == cudaStreamLegacy) return &all.default_stream;
  if (stream == cudaStreamPerThread) return &all.per_thread_stream;
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.streams.count(stream) ? stream : nullptr;
}

template <class Handle>
bool known(std::set<Handle>& handles, Handle handle) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return handles.count(handle) != 0;
}

template <class Handle>
bool forget(std::set<Handle>& handles, Handle handle) {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (handles.erase(handle) == 0) return false;
  }
  delete handle;
  return true;
}

// Waiting and plain allocation break a capture, as with cudaStreamCaptureModeGlobal.
cudaError_t break_captures() {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.num_capturing == 0) return cudaSuccess;
  for (cudaStream_t stream : all.streams)
    if (stream->capturing) stream->invalidated = true;
  if (all.per_thread_stream.capturing) all.per_thread_stream.invalidated = true;
  return cudaErrorStreamCaptureUnsupported;
}

// Whether all of [pointer, pointer + nbytes) is memory: within one allocation if it begins in one, and
// mapped.
bool accessible(const void* pointer, size_t nbytes) {
  if (nbytes == 0) return true;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer);
  if (begin == 0 || begin + nbytes < begin) return false;
  Registry& all = registry();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    auto after = all.allocations.upper_bound(begin);
    if (after != all.allocations.begin()) {
      const auto& [base, size] = *std::prev(after);
      if (begin < base + size) return begin + nbytes <= base + size;
    }
  }
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), first = begin / page * page;
  return msync(reinterpret_cast<void*>(first), begin + nbytes - first, MS_ASYNC) == 0;
}

cudaError_t allocate(void** pointer, size_t nbytes) {
  if (!pointer) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (nbytes == 0) return cudaSuccess;
  // Exactly as large as asked for, so that AddressSanitizer sees the first byte past the end.
  if (posix_memalign(pointer, 256, nbytes) != 0) return cudaErrorMemoryAllocation;
  if (paged_ops::simt::config().poison) std::memset(*pointer, 0xff, nbytes);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().allocations[reinterpret_cast<uintptr_t>(*pointer)] = nbytes;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().allocations.erase(reinterpret_cast<uintptr_t>(pointer)) == 0) return cudaErrorInvalidValue;
  }
  std::free(pointer);
  return cudaSuccess;
}

bool valid_kind(cudaMemcpyKind kind) { return kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault; }

}  // namespace

// ---- errors and devices ----------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

#define SIMT_ERRORS(X)                                                                     \
  X(cudaSuccess, "no error")                                                               \
  X(cudaErrorInvalidValue, "invalid argument")                                             \
  X(cudaErrorMemoryAllocation, "out of memory")                                            \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument")                       \
  X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                  \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                      \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                             \
  X(cudaErrorIllegalState, "the operation cannot be performed in the present state")       \
  X(cudaErrorNotReady, "device not ready")                                                 \
  X(cudaErrorLaunchFailure, "unspecified launch failure")                                  \
  X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing") \
  X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")

const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
#define X(code, text) \
  case code: return text;
    SIMT_ERRORS(X)
#undef X
  }
  return "unrecognized error code";
}

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
#define X(code, text) \
  case code: return #code;
    SIMT_ERRORS(X)
#undef X
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return report(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  using namespace paged_ops::simt;
  if (device != 0) return report(cudaErrorInvalidDevice);
  switch (attribute) {  // of an H200, but for the number of multiprocessors
    case cudaDevAttrMaxThreadsPerBlock: *value = kMaxThreadsPerBlock; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(kMaxStaticSharedNbytes); return cudaSuccess;
    case cudaDevAttrWarpSize: *value = kWarpSize; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = config().multiprocessors; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(kMaxSharedNbytes); return cudaSuccess;
  }
  return report(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceSynchronize() { return report(break_captures()); }

// ---- memory ----------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  const cudaError_t status = break_captures();
  return report(status != cudaSuccess ? status : allocate(pointer, nbytes));
}
cudaError_t cudaMallocHost(void** pointer, size_t nbytes) { return cudaMalloc(pointer, nbytes); }

cudaError_t cudaFree(void* pointer) {
  const cudaError_t status = break_captures();
  return report(status != cudaSuccess ? status : release(pointer));
}
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }

cudaError_t cudaMallocAsync(void** pointer, size_t nbytes, cudaStream_t stream) {
  const CUstream_st* where = find_stream(stream);
  if (!where) return report(cudaErrorInvalidResourceHandle);
  return report(where->capturing ? cudaErrorStreamCaptureUnsupported : allocate(pointer, nbytes));
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  const CUstream_st* where = find_stream(stream);
  if (!where) return report(cudaErrorInvalidResourceHandle);
  return report(where->capturing ? cudaErrorStreamCaptureUnsupported : release(pointer));
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (!valid_kind(kind)) return report(cudaErrorInvalidMemcpyDirection);
  if (!accessible(destination, nbytes) || !accessible(source, nbytes)) return report(cudaErrorInvalidValue);
  return paged_ops::simt::enqueue(stream, [=] { std::memmove(destination, source, nbytes); });
}

cudaError_t cudaMemcpy(void* destination, const void* source, size_t nbytes, cudaMemcpyKind kind) {
  const cudaError_t status = break_captures();
  return status != cudaSuccess ? report(status) : cudaMemcpyAsync(destination, source, nbytes, kind, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source,
                              size_t source_pitch, size_t width_nbytes, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  if (!valid_kind(kind)) return report(cudaErrorInvalidMemcpyDirection);
  if (width_nbytes > destination_pitch || width_nbytes > source_pitch) return report(cudaErrorInvalidValue);
  if (width_nbytes == 0 || height == 0) return cudaSuccess;
  if (!accessible(destination, destination_pitch * (height - 1) + width_nbytes) ||
      !accessible(source, source_pitch * (height - 1) + width_nbytes))
    return report(cudaErrorInvalidValue);
  return paged_ops::simt::enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memmove(static_cast<char*>(destination) + row * destination_pitch,
                   static_cast<const char*>(source) + row * source_pitch, width_nbytes);
  });
}

cudaError_t cudaMemsetAsync(void* destination, int byte, size_t nbytes, cudaStream_t stream) {
  if (!accessible(destination, nbytes)) return report(cudaErrorInvalidValue);
  return paged_ops::simt::enqueue(stream, [=] {
    if (nbytes) std::memset(destination, byte, nbytes);
  });
}

cudaError_t cudaMemset(void* destination, int byte, size_t nbytes) {
  const cudaError_t status = break_captures();
  return status != cudaSuccess ? report(status) : cudaMemsetAsync(destination, byte, nbytes, nullptr);
}

// ---- streams and events ------------------------------------------------------------------------------

cudaError_t paged_ops::simt::enqueue(cudaStream_t stream, std::function<void()> work) {
  CUstream_st* where = find_stream(stream);
  if (!where) return report(cudaErrorInvalidResourceHandle);
  if (where->invalidated) return report(cudaErrorStreamCaptureInvalidated);
  if (where->capturing)
    where->captured.push_back(std::move(work));
  else
    work();
  return cudaSuccess;
}

void paged_ops::simt::memcpy_batch_async(void* const* destinations, const void* const* sources,
                                         const size_t* nbytes, size_t count, cudaStream_t stream) {
  for (size_t i = 0; i < count; ++i)
    SIMT_CHECK(cudaMemcpyAsync(destinations[i], sources[i], nbytes[i], cudaMemcpyDefault, stream));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  if (!stream || flags > cudaStreamNonBlocking) return report(cudaErrorInvalidValue);
  *stream = new CUstream_st;
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return report(forget(registry().streams, stream) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return report(find_stream(stream) ? break_captures() : cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const bool good = find_stream(stream) && known(registry().events, event);
  return report(good ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  if (!event) return report(cudaErrorInvalidValue);
  *event = new CUevent_st;
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().events.insert(*event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return report(forget(registry().events, event) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!known(registry().events, event)) return report(cudaErrorInvalidResourceHandle);
  return paged_ops::simt::enqueue(stream, [=] {
    event->recorded = true;
    event->time = std::chrono::steady_clock::now();
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return report(known(registry().events, event) ? break_captures() : cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!known(registry().events, start) || !known(registry().events, end) || !start->recorded ||
      !end->recorded)
    return report(cudaErrorInvalidResourceHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}

// ---- graphs ------------------------------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const CUstream_st* where = find_stream(stream);
  if (!where) return report(cudaErrorInvalidResourceHandle);
  *status = where->invalidated ? cudaStreamCaptureStatusInvalidated
            : where->capturing ? cudaStreamCaptureStatusActive
                               : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  CUstream_st* where = find_stream(stream);
  if (!where) return report(cudaErrorInvalidResourceHandle);
  if (where == &registry().default_stream) return report(cudaErrorStreamCaptureUnsupported);
  if (where->capturing) return report(cudaErrorIllegalState);
  where->capturing = true;
  std::lock_guard<std::mutex> lock(registry().mutex);
  ++registry().num_capturing;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CUstream_st* where = find_stream(stream);
  if (!where) return report(cudaErrorInvalidResourceHandle);
  if (!where->capturing) return report(cudaErrorIllegalState);
  where->capturing = false;
  Work work = std::exchange(where->captured, {});
  const bool invalidated = std::exchange(where->invalidated, false);
  *graph = invalidated ? nullptr : new CUgraph_st{std::move(work)};
  std::lock_guard<std::mutex> lock(registry().mutex);
  --registry().num_capturing;
  if (invalidated) return report(cudaErrorStreamCaptureInvalidated);
  registry().graphs.insert(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  if (!known(registry().graphs, graph)) return report(cudaErrorInvalidValue);
  *executable = new CUgraphExec_st{graph->work};
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().executables.insert(*executable);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  if (!known(registry().executables, executable)) return report(cudaErrorInvalidValue);
  return paged_ops::simt::enqueue(stream, [work = executable->work] {
    for (const auto& step : work) step();
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return report(forget(registry().executables, executable) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return report(forget(registry().graphs, graph) ? cudaSuccess : cudaErrorInvalidValue);
}
