// The Python module: functions, errors, and what this build holds. The one file of the bindings that is
// compiled for each module.
#include <pybind11/stl.h>

#include "bind/call.h"
#include "bind/function.h"
#include "bind/ops.h"
#include "core/check.h"
#include "core/support.h"
#if defined(PAGED_OPS_EMULATED)
#include "bind/emulated.h"
#else
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#if defined(PAGED_OPS_HAS_CUDA)
#include "launch/devices.h"
#endif
#endif

namespace paged_ops::bind {

DType dtype_from_name(const std::string& text) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64, DType::f8e4m3,
                            DType::f8e5m2, DType::i8, DType::i4})
    if (text == name(dtype)) return dtype;
  fail<TypeError>("dtype: is ", text, ", wanted one of float32, float16, bfloat16");
}

std::string refusal_text(const std::string& dtype, const std::string& cache_dtype, int64_t num_q_heads,
                         int64_t num_kv_heads, int64_t head_dim, int64_t value_head_dim, int64_t block_size) {
  return refusal({dtype_from_name(dtype), dtype_from_name(cache_dtype), num_q_heads, num_kv_heads, head_dim,
                  value_head_dim, block_size})
      .why;
}

const Backend& backend_for(const Array& array) {
  const auto type = array.device().device_type;
#if defined(PAGED_OPS_EMULATED)
  if (type == dlpack::kCPU) return launch::backend();
  fail(array.name(), ": is on ", array.device_name(), "; the emulated backend takes tensors on the cpu");
#else
  if (type == dlpack::kCPU || type == dlpack::kCUDAHost) return cpu::backend();
#if defined(PAGED_OPS_HAS_CUDA)
  if (dlpack::on_cuda(array.device())) return launch::backend();
  fail(array.name(), ": is on ", array.device_name(), "; wanted cpu or cuda");
#else
  fail(array.name(), ": is on ", array.device_name(),
       "; this build of paged_ops has the cpu backend only (build with "
       "PAGED_OPS_CUDA=on for CUDA)");
#endif
#endif
}

const Backend& backend_named(const std::string& device) {
#if defined(PAGED_OPS_EMULATED)
  if (device == "cpu") return launch::backend();
#else
  if (device == "cpu") return cpu::backend();
#if defined(PAGED_OPS_HAS_CUDA)
  if (device == "cuda") return launch::backend();
#endif
#endif
  fail("device: is ", device, ", which this build has no backend for");
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception of an unknown type");
  }
}

PYBIND11_MODULE(PAGED_OPS_MODULE, m) {
  m.doc() = "Native paged-attention ops. Call them through paged_ops, which documents them.";

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const ValueError&) {
      set_python_error();
    } catch (const TypeError&) {
      set_python_error();
    }
  });

  static PyMethodDef ops[] = {
      method<&attention>("attention"),
      method<&write_kv_cache>("write_kv_cache"),
      method<&gather_kv_cache>("gather_kv_cache"),
      method<&copy_blocks>("copy_blocks"),
      method<&swap_blocks>("swap_blocks"),
      method<&merge_attention_states>("merge_attention_states"),
      method<&rope_and_write_kv_cache>("rope_and_write_kv_cache"),
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(m.ptr(), ops) != 0) throw py::error_already_set();
  m.def("attention_workspace_nbytes", &attention_workspace_nbytes);
  m.def("refusal", &refusal_text);

#if defined(PAGED_OPS_EMULATED)
  define_emulator_controls(m);
#else
  m.def("cpu_isas", &cpu::supported_isas,
        "Instruction sets that are built in and that this CPU has, best first.");
  m.def("compiled_cpu_isas", &cpu::compiled_isas, "Instruction sets that are built in, best first.");
  m.def("cpu_isa", &cpu::selected_isa, "The instruction set in use.");
  m.def("set_cpu_isa", &cpu::select_isa, py::arg("name"));
  m.def("num_threads", &cpu::num_threads);
  m.def("set_num_threads", &cpu::set_num_threads, py::arg("num_threads"));
#if defined(PAGED_OPS_HAS_CUDA)
  m.attr("cuda_archs") = PAGED_OPS_CUDA_ARCHS;
  m.def("cuda_devices", &launch::devices, "One line per GPU that this process can use.");
#else
  m.attr("cuda_archs") = "";
  m.def("cuda_devices", [] { return std::vector<std::string>{}; });
#endif
#endif
}

}  // namespace paged_ops::bind
