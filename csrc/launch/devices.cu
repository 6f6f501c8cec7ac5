// Which GPUs this process can use.
#include "launch/devices.h"

#include "simt/simt.h"

namespace paged_ops::launch {

std::vector<std::string> devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // the runtime keeps it, and a later check would report it as its own
    return {};
  }
  std::vector<std::string> lines;
  for (int device = 0; device < count; device++) {
    int major = 0, minor = 0, multiprocessors = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    lines.push_back(concat("cuda:", device, " sm_", major, minor, ", ", multiprocessors, " multiprocessors"));
  }
  return lines;
}

}  // namespace paged_ops::launch
