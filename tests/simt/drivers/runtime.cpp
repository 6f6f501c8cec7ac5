// The CUDA runtime's stand-in as launch code uses it, misuse included. Each check is a line of text when it
// fails.
#include <cstring>
#include <vector>

#include "driver.h"

using namespace driver;

namespace {

std::string report;

void expect(bool good, const char* what, int line) {
  if (!good) report += std::string(what) + " (line " + std::to_string(line) + ")\n";
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)
#define EXPECT_STATUS(call, status) expect((call) == (status), #call " gives " #status, __LINE__)

void add_kernel(float* out, const float* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] += in[i];
}

void memory() {
  float host[8] = {1, 2, 3, 4, 5, 6, 7, 8}, back[8] = {};
  float *a = nullptr, *b = nullptr;
  EXPECT_STATUS(cudaMalloc(&a, sizeof host), cudaSuccess);
  EXPECT(reinterpret_cast<uintptr_t>(a) % 256 == 0);
  EXPECT(a[0] != a[0]);  // starts as NaN
  EXPECT_STATUS(cudaMallocAsync(&b, sizeof host, nullptr), cudaSuccess);
  EXPECT_STATUS(cudaMemcpyAsync(a, host, sizeof host, cudaMemcpyHostToDevice, nullptr), cudaSuccess);
  EXPECT_STATUS(cudaMemcpyAsync(b, a, sizeof host, cudaMemcpyDeviceToDevice, nullptr), cudaSuccess);
  EXPECT_STATUS(cudaMemcpy(back, b, sizeof host, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT(std::memcmp(host, back, sizeof host) == 0);
  EXPECT_STATUS(cudaMemcpy2DAsync(b, 16, a, 8, 4, 2, cudaMemcpyDefault, nullptr), cudaSuccess);
  EXPECT(b[0] == 1 && b[4] == 3 && b[1] == 2);
  EXPECT_STATUS(cudaMemsetAsync(b, 0, sizeof host, nullptr), cudaSuccess);
  EXPECT(b[0] == 0 && b[7] == 0);

  EXPECT_STATUS(cudaMemcpyAsync(a + 4, host, sizeof host, cudaMemcpyHostToDevice, nullptr),
                cudaErrorInvalidValue);
  EXPECT(std::strcmp(cudaGetErrorString(cudaPeekAtLastError()), "invalid argument") == 0);
  EXPECT_STATUS(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_STATUS(cudaGetLastError(), cudaSuccess);
  EXPECT_STATUS(cudaMemcpyAsync(nullptr, host, 4, cudaMemcpyHostToDevice, nullptr), cudaErrorInvalidValue);
  EXPECT_STATUS(
      cudaMemcpyAsync(a, reinterpret_cast<void*>(uintptr_t(1) << 46), 4, cudaMemcpyHostToDevice, nullptr),
      cudaErrorInvalidValue);
  EXPECT_STATUS(cudaMemcpyAsync(a, host, 4, cudaMemcpyKind(9), nullptr), cudaErrorInvalidMemcpyDirection);
  EXPECT_STATUS(cudaMemsetAsync(a, 0, sizeof host + 1, nullptr), cudaErrorInvalidValue);
  EXPECT_STATUS(cudaMemcpy2DAsync(b, 4, a, 8, 8, 2, cudaMemcpyDefault, nullptr), cudaErrorInvalidValue);
  EXPECT_STATUS(cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyDefault, nullptr), cudaSuccess);
  EXPECT_STATUS(cudaFree(a + 1), cudaErrorInvalidValue);
  EXPECT_STATUS(cudaFree(a), cudaSuccess);
  EXPECT_STATUS(cudaFree(a), cudaErrorInvalidValue);
  EXPECT_STATUS(cudaFreeAsync(b, nullptr), cudaSuccess);
  EXPECT_STATUS(cudaFree(nullptr), cudaSuccess);

  const void* sources[2] = {host, host + 4};
  void* destinations[2] = {back + 4, back};
  const size_t nbytes[2] = {16, 16};
  simt::memcpy_batch_async(destinations, sources, nbytes, 2, nullptr);
  EXPECT(back[0] == 5 && back[4] == 1);
  destinations[1] = nullptr;
  const char* error = attempt([&] { simt::memcpy_batch_async(destinations, sources, nbytes, 2, nullptr); });
  EXPECT(error && std::strstr(error, "invalid argument"));
  cudaGetLastError();
}

void devices() {
  int value = -1;
  EXPECT_STATUS(cudaGetDeviceCount(&value), cudaSuccess);
  EXPECT(value == 1);
  EXPECT_STATUS(cudaGetDevice(&value), cudaSuccess);
  EXPECT(value == 0);
  EXPECT_STATUS(cudaSetDevice(0), cudaSuccess);
  EXPECT_STATUS(cudaSetDevice(1), cudaErrorInvalidDevice);
  EXPECT_STATUS(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT(value == simt::config().multiprocessors);
  EXPECT_STATUS(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
  EXPECT(value == 227 * 1024);
  EXPECT_STATUS(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 3), cudaErrorInvalidDevice);
  EXPECT_STATUS(cudaDeviceGetAttribute(&value, cudaDeviceAttr(12345), 0), cudaErrorInvalidValue);
  EXPECT_STATUS(cudaDeviceSynchronize(), cudaSuccess);
  cudaGetLastError();
  const simt::Residency by_shared = simt::residency(add_kernel, 128, 64 * 1024);
  EXPECT(by_shared.multiprocessors == simt::config().multiprocessors);
  EXPECT(by_shared.ctas_per_multiprocessor == 3);
  EXPECT(simt::residency(add_kernel, 512, 0).ctas_per_multiprocessor == 4);
}

void streams() {
  cudaStream_t stream = nullptr, bogus = reinterpret_cast<cudaStream_t>(&stream);
  EXPECT_STATUS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_STATUS(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_STATUS(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
  EXPECT_STATUS(cudaStreamSynchronize(bogus), cudaErrorInvalidResourceHandle);
  int x = 0;
  EXPECT_STATUS(cudaMemsetAsync(&x, 0xff, sizeof x, stream), cudaSuccess);
  EXPECT(x == -1);
  EXPECT_STATUS(cudaMemsetAsync(&x, 0, sizeof x, bogus), cudaErrorInvalidResourceHandle);
  EXPECT(x == -1);
  const char* error = attempt([&] {
    simt::launch(add_kernel, dim3(1), dim3(1), 0, bogus, static_cast<float*>(nullptr), nullptr, 0);
  });
  EXPECT(error && std::strstr(error, "invalid resource handle"));

  cudaEvent_t start, end;
  EXPECT_STATUS(cudaEventCreate(&start), cudaSuccess);
  EXPECT_STATUS(cudaEventCreateWithFlags(&end, cudaEventDefault), cudaSuccess);
  EXPECT_STATUS(cudaEventRecord(start, stream), cudaSuccess);
  float milliseconds = -1;
  EXPECT_STATUS(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
  EXPECT_STATUS(cudaEventRecord(end, stream), cudaSuccess);
  EXPECT_STATUS(cudaEventSynchronize(end), cudaSuccess);
  EXPECT_STATUS(cudaStreamWaitEvent(nullptr, end, 0), cudaSuccess);
  EXPECT_STATUS(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
  EXPECT(milliseconds >= 0);
  EXPECT_STATUS(cudaEventDestroy(start), cudaSuccess);
  EXPECT_STATUS(cudaEventDestroy(end), cudaSuccess);
  EXPECT_STATUS(cudaEventRecord(end, stream), cudaErrorInvalidResourceHandle);
  EXPECT_STATUS(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_STATUS(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_STATUS(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

// A graph repeats the work, not the values that lay in memory when it was captured.
void graphs() {
  std::vector<float> in(100, 1.0f), out(100, 0.0f);
  cudaStream_t stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaStreamCaptureStatus status;
  EXPECT_STATUS(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_STATUS(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
                cudaErrorStreamCaptureUnsupported);
  EXPECT_STATUS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_STATUS(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT(status == cudaStreamCaptureStatusActive);
  simt::launch(add_kernel, dim3(2), dim3(64), 0, stream, out.data(), in.data(), 100);
  EXPECT_STATUS(cudaMemsetAsync(in.data(), 0, 4, stream), cudaSuccess);
  EXPECT(out[0] == 0 && in[0] == 1);
  EXPECT_STATUS(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_STATUS(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_STATUS(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT(out[0] == 1 && out[99] == 1 && in[0] == 0);
  in.assign(100, 5.0f);
  EXPECT_STATUS(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT(out[0] == 6 && out[99] == 6);
  EXPECT_STATUS(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_STATUS(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_STATUS(cudaGraphLaunch(executable, stream), cudaErrorInvalidValue);

  // Waiting, or asking for memory, is not for a capture.
  void* memory = nullptr;
  EXPECT_STATUS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_STATUS(cudaMallocAsync(&memory, 16, stream), cudaErrorStreamCaptureUnsupported);
  EXPECT_STATUS(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  EXPECT_STATUS(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT(status == cudaStreamCaptureStatusInvalidated);
  EXPECT_STATUS(cudaMemsetAsync(in.data(), 0, 4, stream), cudaErrorStreamCaptureInvalidated);
  EXPECT_STATUS(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_STATUS(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT(status == cudaStreamCaptureStatusNone);
  EXPECT_STATUS(cudaStreamDestroy(stream), cudaSuccess);
  cudaGetLastError();
}

}  // namespace

EXPORT const char* check_runtime(const char* part) {
  report.clear();
  const std::string name = part;
  if (name == "memory") memory();
  if (name == "devices") devices();
  if (name == "streams") streams();
  if (name == "graphs") graphs();
  return report.c_str();
}
