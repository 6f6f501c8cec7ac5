// Controls of the SIMT emulator, in the emulated module only.
#pragma once
#include <pybind11/pybind11.h>

namespace paged_ops::bind {

void define_emulator_controls(pybind11::module_& m);

}  // namespace paged_ops::bind
