// What the drivers share: arrays that live on the device, and exceptions as text for the caller.
#pragma once
#include <cstddef>
#include <exception>
#include <string>

#include "simt/ptx.h"
#include "simt/simt.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace driver {

using paged_ops::bf16;
using paged_ops::f16;
namespace ptx = paged_ops::ptx;
namespace simt = paged_ops::simt;

// `n` elements on the device, filled from the host's array; copy_back() brings them home.
template <class T>
class Array {
 public:
  Array(const T* host, size_t n) : host_(const_cast<T*>(host)), nbytes_(n * sizeof(T)) {
    SIMT_CHECK(cudaMalloc(&device_, nbytes_));
    SIMT_CHECK(cudaMemcpy(device_, host_, nbytes_, cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(device_); }
  Array(const Array&) = delete;
  operator T*() const { return device_; }
  void copy_back() const { SIMT_CHECK(cudaMemcpy(host_, device_, nbytes_, cudaMemcpyDeviceToHost)); }

 private:
  T* host_;
  T* device_ = nullptr;
  size_t nbytes_;
};

// Runs `f`; null when all went well, else what the exception says.
template <class F>
const char* attempt(F f) {
  static std::string message;
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace driver
