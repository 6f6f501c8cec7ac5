// Host-side manners of every CUDA entry point: checked calls and the caller's device.
#pragma once
#include "core/check.h"
#include "simt/simt.h"

#define PAGED_OPS_CUDA_CHECK(call) SIMT_CHECK(call)

namespace paged_ops::launch {

// Makes `device` current for a scope, and the caller's device again after it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    PAGED_OPS_CUDA_CHECK(cudaGetDevice(&previous_));
    if (device == previous_) return;
    PAGED_OPS_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);  // a destructor must not throw
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace paged_ops::launch
