// Which instruction set the CPU kernels use: what is built in, what this machine has, what is chosen.
#pragma once
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace paged_ops::cpu {

std::vector<std::string> compiled_isas();   // best first; "scalar" is always the last
std::vector<std::string> supported_isas();  // those that this CPU and operating system can run

// The best supported one, unless PAGED_OPS_CPU_ISA or select_isa() names another. A name that is not
// among supported_isas() is a ValueError, from the environment too.
std::string selected_isa();
void select_isa(const std::string& name);

// The kernels of the selected one.
const Kernels& kernels();

}  // namespace paged_ops::cpu
