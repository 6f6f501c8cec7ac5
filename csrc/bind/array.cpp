// Reading tensors of every framework without linking any of them.
#include "bind/array.h"

#include <array>

namespace paged_ops::bind {

namespace {

// What is known of a Python type that offers the DLPack C exchange API. Types are few (torch.Tensor,
// torch.nn.Parameter, ...), are never freed once seen here, and are looked up by address.
struct KnownType {
  PyTypeObject* type = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
  bool has_autograd = false;
};

const dlpack::ExchangeApi* exchange_api_of(PyTypeObject* type) {
  py::object capsule =
      py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) return nullptr;
  auto* header =
      static_cast<dlpack::ExchangeApiHeader*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!header) throw py::error_already_set();
  while (header && header->version.major != 1) header = header->previous;
  return reinterpret_cast<const dlpack::ExchangeApi*>(header);
}

struct KnownTypes {
  std::array<KnownType, 16> list;
  size_t count = 0;

  const KnownType* find(PyTypeObject* type) const {
    for (size_t i = 0; i < count; i++)
      if (list[i].type == type) return &list[i];
    return nullptr;
  }
} known_types;

// Null for a type without the exchange API: it takes the capsule path, where one more attribute look-up
// does not show.
const KnownType* known_type(PyTypeObject* type) {
  if (const KnownType* found = known_types.find(type)) return found;
  KnownType entry{type, exchange_api_of(type)};
  if (!entry.api) return nullptr;
  entry.has_autograd = py::hasattr(reinterpret_cast<PyObject*>(type), "requires_grad");
  auto& [list, count] = known_types;
  if (count == list.size()) return nullptr;  // somebody makes types as they go: by their capsules, then
  Py_INCREF(type);
  list[count] = entry;
  return &list[count++];
}

dlpack::DataType numpy_type(py::handle object) {
  const py::dtype dtype = py::reinterpret_borrow<py::array>(object).dtype();
  const auto bits = uint8_t(dtype.itemsize() * 8);
  if (bits / 8 == dtype.itemsize() && dtype.attr("isnative").cast<bool>()) {
    switch (dtype.kind()) {
      case 'i': return {dlpack::kInt, bits, 1};
      case 'u': return {dlpack::kUInt, bits, 1};
      case 'b': return {dlpack::kBool, bits, 1};
      case 'f':
        if (bits > 8) return {dlpack::kFloat, bits, 1};
        break;
      default: break;
    }
    const auto name = dtype.attr("name").cast<std::string>();  // those of ml_dtypes
    if (name == "bfloat16") return {dlpack::kBfloat, 16, 1};
    if (name == "float8_e4m3fn") return {dlpack::kFloat8E4M3, 8, 1};
    if (name == "float8_e5m2") return {dlpack::kFloat8E5M2, 8, 1};
  }
  fail<TypeError>("dtype is ", py::str(dtype).cast<std::string>());
}

// A subclass of NumPy's arrays whose elements are not all meant.
bool is_masked(py::handle object) {
  if (Py_TYPE(object.ptr()) == py::detail::npy_api::get().PyArray_Type_) return false;
  static PyObject* type = py::object(py::module_::import("numpy.ma").attr("MaskedArray")).release().ptr();
  return py::isinstance(object, type);
}

// The dtype objects that calls bring are few; their translation is remembered by address.
dlpack::DataType numpy_type_cached(py::handle object) {
  struct Entry {
    PyObject* descriptor;
    dlpack::DataType type;
  };
  static std::array<Entry, 16> cache{};
  PyObject* descriptor = py::detail::array_proxy(object.ptr())->descr;
  const size_t slot = (reinterpret_cast<uintptr_t>(descriptor) >> 4) % cache.size();
  if (cache[slot].descriptor == descriptor) return cache[slot].type;
  const dlpack::DataType type = numpy_type(object);
  Py_INCREF(descriptor);
  Py_XDECREF(cache[slot].descriptor);
  cache[slot] = {descriptor, type};
  return type;
}

// The framework refused (a meta tensor, a sparse one): its reason, less the traceback below it.
[[noreturn]] void fail_to_read(const char* name, const py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw error;  // Ctrl-C, not a reason
  const std::string reason = error.what();
  fail(name, ": its memory cannot be had: ", reason.substr(0, reason.find('\n')));
}

bool is_negated(py::handle object) {
  static PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* answer = PyObject_CallMethodNoArgs(object.ptr(), is_neg);
  if (!answer) throw py::error_already_set();
  Py_DECREF(answer);
  return answer == Py_True;
}

py::module_ arrays_module() { return py::module_::import("paged_ops._arrays"); }

}  // namespace

Array::Array(py::handle object, const char* name, Use use) : name_(name), object_(object) {
  try {
    load(object);
    measure();
    require_valid(use);
  } catch (...) {  // no destructor runs for what was not constructed
    release();
    throw;
  }
}

Array::~Array() { release(); }

void Array::release() {
  if (managed_versioned_ && managed_versioned_->deleter) managed_versioned_->deleter(managed_versioned_);
  if (managed_ && managed_->deleter) managed_->deleter(managed_);
}

void Array::load(py::handle object) {
  PyTypeObject* type = Py_TYPE(object.ptr());
  const KnownType* known = known_types.find(type);
  if (!known && py::isinstance<py::array>(object)) return view_numpy(object);
  if (known || (known = known_type(type))) {
    dlpack::Tensor tensor;
    if (known->api->tensor_from_py_object_no_sync(object.ptr(), &tensor))
      fail_to_read(name_, py::error_already_set());
    has_autograd_ = known->has_autograd;
    view(tensor);
    PAGED_OPS_REQUIRE(
        !may_be_negated() || !is_negated(object), name_,
        ": is a lazily negated view, whose memory holds other numbers; call .resolve_neg() first");
    return;
  }
  view_capsule(object);
}

void Array::view(const dlpack::Tensor& tensor) {
  PAGED_OPS_REQUIRE(tensor.ndim <= kMaxDims, name_, ": has ", tensor.ndim, " dimensions, at most ", kMaxDims,
                    " are supported");
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
  ndim_ = tensor.ndim;
  type_ = tensor.dtype;
  device_ = tensor.device;
  if (type_.bits % 8 != 0 || type_.code == dlpack::kComplex)
    fail<TypeError>(name_, ": dtype is ", dtype_name(), ", which no op takes");
  int64_t dense = 1;
  for (int i = ndim_ - 1; i >= 0; i--) {
    shape_[i] = tensor.shape[i];
    stride_[i] = tensor.strides ? tensor.strides[i] : dense;
    dense *= shape_[i];
  }
}

// A torch view that is negated when it is read, the imaginary part of a conjugate, steps over the real parts.
// Its tensor is asked whether it is one only where its strides allow it: the answer takes as long as all that
// is read here.
bool Array::may_be_negated() const {
  if (!has_autograd_ || (type_.code != dlpack::kFloat && type_.code != dlpack::kBfloat)) return false;
  for (int i = ndim_ - 1; i >= 0; i--)
    if (stride_[i] % 2 != 0 && shape_[i] > 1) return false;
  return true;
}

void Array::view_numpy(py::handle object) {
  const auto* array = py::detail::array_proxy(object.ptr());
  if (is_masked(object))
    fail<TypeError>(name_, ": is a masked array, whose mask no op heeds; wanted its .data, or .filled(...)");
  PAGED_OPS_REQUIRE(array->nd <= kMaxDims, name_, ": has ", array->nd, " dimensions, at most ", kMaxDims,
                    " are supported");
  try {
    type_ = numpy_type_cached(object);
  } catch (const TypeError& error) {
    fail<TypeError>(name_, ": ", error.what(), ", which no op takes");
  }
  data_ = array->data;
  ndim_ = array->nd;
  device_ = {dlpack::kCPU, 0};
  readonly_ = !(array->flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_);
  for (int i = 0; i < ndim_; i++) {
    shape_[i] = array->dimensions[i];
    PAGED_OPS_REQUIRE(array->strides[i] % itemsize() == 0 || shape_[i] <= 1, name_, ": stride of dimension ",
                      i, " is ", array->strides[i], " bytes, wanted a multiple of the item size ",
                      itemsize());
    stride_[i] = array->strides[i] / itemsize();
  }
}

void Array::view_capsule(py::handle object) {
  if (!py::hasattr(object, "__dlpack__"))
    fail<TypeError>(name_, ": is ", Py_TYPE(object.ptr())->tp_name,
                    ", wanted a tensor (torch, numpy, cupy, or anything with __dlpack__)");
  py::object capsule;
  try {
    capsule = arrays_module().attr("dlpack_capsule")(object);
  } catch (const py::error_already_set& error) {
    fail_to_read(name_, error);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    managed_versioned_ = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");  // from here on it is ours to delete
    PAGED_OPS_REQUIRE(managed_versioned_->version.major == 1, name_, ": its __dlpack__ speaks version ",
                      managed_versioned_->version.major, " of DLPack, wanted 1");
    readonly_ = managed_versioned_->flags & dlpack::kFlagReadOnly;
    view(managed_versioned_->tensor);
  } else {
    PAGED_OPS_REQUIRE(PyCapsule_IsValid(capsule.ptr(), "dltensor"), name_, ": its __dlpack__ gave ",
                      py::repr(capsule).cast<std::string>(), ", wanted a new DLPack capsule");
    managed_ = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    view(managed_->tensor);
  }
}

void Array::require_valid(Use use) const {
  PAGED_OPS_REQUIRE(data_ || size() == 0, name_, ": has elements but no memory (a fake or meta tensor?)");
  for (int i = 0; i < ndim_; i++)
    PAGED_OPS_REQUIRE(stride_[i] >= 0 || shape_[i] <= 1, name_, ": stride of dimension ", i, " is ",
                      stride_[i], ", wanted a non-negative one");
  if (use == Use::input) return;
  PAGED_OPS_REQUIRE(!readonly_, name_, ": is read-only");
  if (managed_ || managed_versioned_)  // JAX does not set DLPack's flag
    PAGED_OPS_REQUIRE(!arrays_module().attr("is_immutable")(object_).cast<bool>(), name_, ": is a ",
                      Py_TYPE(object_.ptr())->tp_name, ", which is immutable; wanted an array to write to");
  if (size() == 0) return;
  // Sorted by stride (by insertion: dimensions are few), each must step over all that the smaller ones span.
  std::array<int, kMaxDims> order;
  int dims = 0;
  for (int i = 0; i < ndim_; i++) {
    if (shape_[i] <= 1) continue;
    int at = dims++;
    for (; at > 0 && stride_[order[at - 1]] > stride_[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t span = 1;
  for (int i = 0; i < dims; i++) {
    const int dim = order[i];
    PAGED_OPS_REQUIRE(stride_[dim] >= span, name_, ": overlaps itself (stride ", stride_[dim],
                      " of dimension ", dim, " is less than the ", span, " elements it should step over)");
    span = stride_[dim] * (shape_[dim] - 1) + span;
  }
}

void Array::measure() {
  int64_t last = 0;
  for (int i = 0; i < ndim_; i++) {
    size_ *= shape_[i];
    last += (shape_[i] - 1) * stride_[i];
  }
  end_ = size_ == 0 || !data_ ? begin() : begin() + (last + 1) * itemsize();
}

std::string Array::dtype_name() const {
  if (type_.lanes != 1) return concat("a vector of ", type_.lanes, " lanes");
  switch (type_.code) {
    case dlpack::kInt: return concat("int", int(type_.bits));
    case dlpack::kUInt: return concat("uint", int(type_.bits));
    case dlpack::kFloat: return concat("float", int(type_.bits));
    case dlpack::kBfloat: return concat("bfloat", int(type_.bits));
    case dlpack::kFloat8E4M3: return "float8_e4m3fn";
    case dlpack::kFloat8E5M2: return "float8_e5m2";
    case dlpack::kComplex: return concat("complex", int(type_.bits));
    case dlpack::kBool: return "bool";
    default: return concat("DLPack type code ", int(type_.code), " of ", int(type_.bits), " bits");
  }
}

std::string Array::device_name() const {
  switch (device_.device_type) {
    case dlpack::kCPU: return "cpu";
    case dlpack::kCUDA: return concat("cuda:", device_.device_id);
    case dlpack::kCUDAHost: return "cpu (pinned)";
    case dlpack::kCUDAManaged: return concat("cuda:", device_.device_id, " (managed)");
    default: return concat("DLPack device type ", device_.device_type);
  }
}

std::string Array::shape_text() const {
  std::string text = "(";
  for (int i = 0; i < ndim_; i++) text += concat(i ? ", " : "", shape_[i]);
  return text + (ndim_ == 1 ? ",)" : ")");
}

bool Array::is(DType wanted) const {
  if (type_.lanes != 1 || type_.bits != paged_ops::itemsize(wanted) * 8) return false;
  switch (wanted) {
    case DType::f32:
    case DType::f16: return type_.code == dlpack::kFloat;
    case DType::bf16: return type_.code == dlpack::kBfloat;
    case DType::i32:
    case DType::i64:
    case DType::i8: return type_.code == dlpack::kInt;
    case DType::i4: return type_.code == dlpack::kUInt;
    case DType::f8e4m3: return type_.code == dlpack::kFloat8E4M3;
    case DType::f8e5m2: return type_.code == dlpack::kFloat8E5M2;
  }
  return false;
}

bool Array::has_dtype_of(const Array& other) const {
  return type_.code == other.type_.code && type_.bits == other.type_.bits && type_.lanes == other.type_.lanes;
}

DType Array::dtype() const {
  for (const DType dtype :
       {DType::bf16, DType::f16, DType::f32, DType::i32, DType::i64, DType::f8e4m3, DType::f8e5m2, DType::i8})
    if (is(dtype)) return dtype;
  fail<TypeError>(name_, ": dtype is ", dtype_name(), ", which no op takes here");
}

void Array::require_ndim(int ndim, const char* what) const {
  PAGED_OPS_REQUIRE(ndim_ == ndim, name_, ": shape is ", shape_text(), ", wanted ", what);
}

void Array::require_shape(int dim, int64_t extent, const char* what) const {
  PAGED_OPS_REQUIRE(shape_[dim] == extent, name_, ": shape is ", shape_text(), ", wanted ", extent, " (",
                    what, ") in dimension ", dim);
}

void Array::require_dtype(DType wanted) const {
  if (!is(wanted)) fail<TypeError>(name_, ": dtype is ", dtype_name(), ", wanted ", element_name(wanted));
}

void Array::require_last_contiguous() const {
  const int last = ndim_ - 1;
  PAGED_OPS_REQUIRE(stride_[last] == 1 || shape_[last] <= 1 || size() == 0, name_,
                    ": stride of the last dimension is ", stride_[last], ", wanted 1");
}

void Array::require_contiguous() const {
  if (size() == 0) return;  // frameworks disagree on the strides of nothing
  int64_t dense = 1;
  for (int i = ndim_ - 1; i >= 0; i--) {
    PAGED_OPS_REQUIRE(stride_[i] == dense || shape_[i] <= 1, name_, ": stride of dimension ", i, " is ",
                      stride_[i], ", wanted ", dense, " (contiguous)");
    dense *= shape_[i];
  }
}

void Array::require_same_device(const Array& other) const {
  const auto a = device_, b = other.device_;
  PAGED_OPS_REQUIRE(a.device_type == b.device_type && a.device_id == b.device_id, name_, ": is on ",
                    device_name(), ", wanted ", other.device_name(), " as ", other.name_);
}

namespace {

// A dimension, in bytes.
struct Dim {
  int64_t stride, extent;
};

// Those of an array, the largest stride first; the last ones are the bytes of an element.
struct Dims {
  std::array<Dim, kMaxDims + 1> list;
  int count = 0;

  explicit Dims(const Array& array) {
    for (int i = 0; i < array.ndim(); i++)
      if (array.shape(i) > 1) add({array.stride_nbytes(i), array.shape(i)});
    add({1, array.itemsize()});
  }

 private:
  void add(Dim dim) {
    int at = count++;
    for (; at > 0 && list[at - 1].stride < dim.stride; at--) list[at] = list[at - 1];
    list[at] = dim;
  }
};

// Bytes from the first to one past the last that the dimensions from `level` on touch.
int64_t span_of(const Dims& dims, int level) {
  int64_t span = 1;
  for (int i = level; i < dims.count; i++) span += dims.list[i].stride * (dims.list[i].extent - 1);
  return span;
}

// Whether two views that begin `delta` bytes apart touch no byte in common, as far as can be told: by their
// ranges, or because both step at one stride and their steps lie side by side (heads of one tensor, K and V
// of one pool). Dimensions are sorted, the largest stride first.
bool lie_apart(const Dims& a, const Dims& b, int level, int64_t delta) {
  if (delta >= span_of(a, level) || -delta >= span_of(b, level)) return true;
  if (level >= a.count || level >= b.count || a.list[level].stride != b.list[level].stride) return false;
  const int64_t stride = a.list[level].stride;
  if (stride == 0 || span_of(a, level + 1) > stride || span_of(b, level + 1) > stride) return false;
  const int64_t after = (delta % stride + stride) % stride;
  return lie_apart(a, b, level + 1, after) && lie_apart(a, b, level + 1, after - stride);
}

}  // namespace

void Array::require_no_overlap(const Array& other) const {
  if (end() <= other.begin() || other.end() <= begin()) return;
  if (size() == 0 || other.size() == 0) return;
  PAGED_OPS_REQUIRE(lie_apart(Dims(*this), Dims(other), 0, other.begin() - begin()), name_,
                    ": shares memory with ", other.name_, ", wanted memory of its own");
}

void require_apart(std::initializer_list<const Array*> outputs, std::initializer_list<const Array*> inputs) {
  for (const Array* const* i = outputs.begin(); i != outputs.end(); i++) {
    if (!*i) continue;
    for (const Array* const* j = outputs.begin(); j != i; j++)
      if (*j) (*i)->require_no_overlap(**j);
    for (const Array* input : inputs)
      if (input) (*i)->require_no_overlap(*input);
  }
}

bool require_no_gradient(std::initializer_list<const Array*> arrays) {
  static PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* is_grad_enabled = nullptr;
  const auto is_true = [](PyObject* value) {
    if (!value) throw py::error_already_set();
    Py_DECREF(value);
    return value == Py_True;
  };
  bool enabled = false;
  for (const Array* array : arrays) {
    if (!array->has_autograd()) continue;
    if (!enabled) {
      if (!is_grad_enabled)
        is_grad_enabled = py::object(py::module_::import("torch").attr("is_grad_enabled")).release().ptr();
      if (!is_true(PyObject_CallNoArgs(is_grad_enabled))) return false;
      enabled = true;
    }
    PAGED_OPS_REQUIRE(
        !is_true(PyObject_GetAttr(array->object().ptr(), requires_grad)), array->name(),
        ": requires a gradient, and the ops have no backward; detach it or call under torch.no_grad()");
  }
  return enabled;
}

void count_writes(const Array* const* arrays, size_t count) {
  static PyObject* function = py::object(arrays_module().attr("count_writes")).release().ptr();
  std::vector<PyObject*> written;
  written.reserve(count);
  for (size_t i = 0; i < count; i++)
    if (arrays[i] && arrays[i]->has_autograd()) written.push_back(arrays[i]->object().ptr());
  if (written.empty()) return;
  PyObject* done = PyObject_Vectorcall(function, written.data(), written.size(), nullptr);
  if (!done) throw py::error_already_set();
  Py_DECREF(done);
}

void* current_stream(const Array& array) {
  const dlpack::Device device = array.device();
  if (!dlpack::on_cuda(device)) return nullptr;
  void* stream = nullptr;
  if (const KnownType* known = known_type(Py_TYPE(array.object().ptr()));
      known && known->api->current_work_stream) {
    if (known->api->current_work_stream(device.device_type, device.device_id, &stream))
      throw py::error_already_set();
    return stream;
  }
  const auto number =
      arrays_module().attr("current_stream")(array.object(), device.device_id).cast<uintptr_t>();
  return reinterpret_cast<void*>(number);
}

py::object empty_like(const Array& like, std::initializer_list<int64_t> shape, const char* dtype_name) {
  static PyObject* empty = py::object(arrays_module().attr("empty")).release().ptr();
  py::tuple extents(shape.size());
  for (size_t i = 0; i < shape.size(); i++) extents[i] = py::int_(shape.begin()[i]);
  const py::str dtype(dtype_name);
  PyObject* arguments[] = {like.object().ptr(), extents.ptr(), dtype.ptr()};
  PyObject* made = PyObject_Vectorcall(empty, arguments, 3, nullptr);
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace paged_ops::bind
