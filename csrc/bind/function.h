// Functions of the module without pybind11's dispatcher, which takes a third of the time of a small call:
// positional arguments go straight from Python's array to the C++ function.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>

namespace paged_ops::bind {

namespace py = pybind11;

// Inside a catch block: the exception as Python's, by the types of core/check.h.
void set_python_error() noexcept;

template <class T>
struct FromPython;

template <>
struct FromPython<py::handle> {
  static py::handle take(PyObject* argument) { return argument; }
};

template <>
struct FromPython<py::object> {
  static py::object take(PyObject* argument) { return py::reinterpret_borrow<py::object>(argument); }
};

template <>
struct FromPython<bool> {
  static bool take(PyObject* argument) {
    const int truth = PyObject_IsTrue(argument);
    if (truth < 0) throw py::error_already_set();
    return truth;
  }
};

template <auto function>
struct Function;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Function<function> {
  static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != sizeof...(Arguments)) {
      PyErr_Format(PyExc_TypeError, "got %zd arguments, wanted %zu", count, sizeof...(Arguments));
      return nullptr;
    }
    try {
      return with(arguments, std::index_sequence_for<Arguments...>());
    } catch (...) {
      set_python_error();
      return nullptr;
    }
  }

 private:
  template <size_t... i>
  static PyObject* with(PyObject* const* arguments, std::index_sequence<i...>) {
    if constexpr (std::is_void_v<Result>) {
      function(FromPython<Arguments>::take(arguments[i])...);
      return py::none().release().ptr();
    } else {
      return function(FromPython<Arguments>::take(arguments[i])...).release().ptr();
    }
  }
};

// An entry of the table that PyModule_AddFunctions takes.
template <auto function>
PyMethodDef method(const char* name) {
  using Untyped = void (*)();
  const auto call = reinterpret_cast<Untyped>(&Function<function>::call);
  return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL, nullptr};
}

}  // namespace paged_ops::bind
