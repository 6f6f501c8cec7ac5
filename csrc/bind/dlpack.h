// The DLPack ABI, version 1: our own minimal declarations of the structs that cross the boundary.
// Source: the DLPack specification (dmlc/dlpack, dlpack.h), including the C exchange API of 1.3.
#pragma once
#include <cstdint>

namespace paged_ops::dlpack {

enum DeviceType : int32_t { kCPU = 1, kCUDA = 2, kCUDAHost = 3, kCUDAManaged = 13 };
enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 12
};
constexpr uint64_t kFlagReadOnly = 1;

struct Device {
  int32_t device_type, device_id;
};

// Memory that kernels of a GPU work on, on the caller's stream.
inline bool on_cuda(Device device) {
  return device.device_type == kCUDA || device.device_type == kCUDAManaged;
}

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim] in elements, or null for contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major, minor;
};

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* previous;
};

// Found as the capsule `type.__dlpack_c_exchange_api__`. Functions return 0, or -1 with a Python
// exception set.
struct ExchangeApi {
  ExchangeApiHeader header;
  int (*managed_tensor_allocator)(Tensor*, ManagedTensorVersioned**, void*,
                                  void (*)(void*, const char*, const char*));
  int (*managed_tensor_from_py_object_no_sync)(void*, ManagedTensorVersioned**);
  int (*managed_tensor_to_py_object_no_sync)(ManagedTensorVersioned*, void**);
  int (*tensor_from_py_object_no_sync)(void*, Tensor*);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace paged_ops::dlpack
