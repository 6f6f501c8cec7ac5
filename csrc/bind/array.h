// A caller's tensor, of any framework, as a strided view that stays valid during one call.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "bind/dlpack.h"
#include "core/check.h"
#include "core/dtype.h"

namespace paged_ops::bind {

namespace py = pybind11;

constexpr int kMaxDims = 8;

class Array {
 public:
  // How the op uses the tensor: what is checked on entry depends on it.
  enum class Use { input, output };

  // Reads `object` through the DLPack C exchange API of its type (torch >= 2.10), as a NumPy array,
  // or through a `__dlpack__` capsule (cupy, JAX, older torch), in this order. Raises TypeError when it
  // is none of these, complex (a conjugate may not have been carried out) or a masked array, ValueError when
  // an output is read-only or overlaps itself, when a stride is negative, or for a view that torch negates
  // when it reads it.
  Array(py::handle object, const char* name, Use use = Use::input);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  const char* name() const { return name_; }
  py::handle object() const { return object_; }
  bool has_autograd() const { return has_autograd_; }
  void* data() const { return data_; }
  int ndim() const { return ndim_; }
  int64_t shape(int dim) const { return shape_[dim]; }
  int64_t stride(int dim) const { return stride_[dim]; }  // in elements
  int64_t stride_nbytes(int dim) const { return stride_[dim] * itemsize(); }
  int itemsize() const { return type_.bits * type_.lanes / 8; }
  int64_t size() const { return size_; }
  dlpack::Device device() const { return device_; }

  std::string dtype_name() const;
  std::string device_name() const;
  std::string shape_text() const;

  bool is(DType dtype) const;
  bool has_dtype_of(const Array& other) const;
  // The element type, or a TypeError when it is none that any op takes.
  DType dtype() const;

  // What the shape and dtype have to be. `what` describes the wanted shape: "[num_tokens, ...]".
  void require_ndim(int ndim, const char* what) const;
  void require_shape(int dim, int64_t extent, const char* what) const;
  void require_dtype(DType dtype) const;
  void require_last_contiguous() const;
  void require_contiguous() const;
  void require_same_device(const Array& other) const;

  // First and one-past-last byte that the view can touch.
  const char* begin() const { return static_cast<const char*>(data_); }
  const char* end() const { return end_; }
  void require_no_overlap(const Array& other) const;

 private:
  void load(py::handle object);
  void view(const dlpack::Tensor& tensor);
  void view_numpy(py::handle object);
  void view_capsule(py::handle object);
  void measure();
  bool may_be_negated() const;
  void require_valid(Use use) const;
  void release();

  const char* name_;
  py::handle object_;
  void* data_ = nullptr;
  int ndim_ = 0;
  int64_t size_ = 1;
  const char* end_ = nullptr;
  dlpack::DataType type_{};
  dlpack::Device device_{};
  bool readonly_ = false;
  bool has_autograd_ = false;
  int64_t shape_[kMaxDims];
  int64_t stride_[kMaxDims];
  dlpack::ManagedTensor* managed_ = nullptr;
  dlpack::ManagedTensorVersioned* managed_versioned_ = nullptr;
};

// The ops have no backward: a result computed from a tensor that requires a gradient would silently drop
// out of the graph, and is refused while gradients are recorded. Returns whether they are.
bool require_no_gradient(std::initializer_list<const Array*> arrays);

// What is written shares no memory with anything else: ids that change after their check, or inputs that
// change while they are read, would do anything. Null entries count for nothing.
void require_apart(std::initializer_list<const Array*> outputs, std::initializer_list<const Array*> inputs);

// Tells autograd, while it records, that these were written in place, as torch's own ops do: a backward that
// needs what they held before then says so.
void count_writes(const Array* const* arrays, size_t count);
inline void count_writes(std::initializer_list<const Array*> arrays) {
  count_writes(arrays.begin(), arrays.size());
}

// The caller's current stream on the array's device; null on the CPU.
void* current_stream(const Array& array);

// A new uninitialised array of the same kind and on the same device as `like`.
py::object empty_like(const Array& like, std::initializer_list<int64_t> shape, const char* dtype_name);

}  // namespace paged_ops::bind
