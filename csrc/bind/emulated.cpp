// Controls of the SIMT emulator: in which order threads run and when asynchronous copies land.
#include "bind/emulated.h"

#include <string>

#include "core/check.h"
#include "simt/emulator/config.h"

namespace paged_ops::bind {

namespace {

template <class Enum>
Enum choice(const char* argument, const std::string& value,
            std::initializer_list<std::pair<const char*, Enum>> choices) {
  std::string wanted;
  for (const auto& [text, result] : choices) {
    if (value == text) return result;
    wanted += concat(wanted.empty() ? "" : ", ", text);
  }
  fail(argument, ": is '", value, "', wanted one of ", wanted);
}

void configure(const std::string& order, const std::string& landing, uint64_t seed, int workers, bool poison,
               int multiprocessors) {
  PAGED_OPS_REQUIRE(workers >= 1, "workers: is ", workers, ", wanted at least 1");
  PAGED_OPS_REQUIRE(multiprocessors >= 1, "multiprocessors: is ", multiprocessors, ", wanted at least 1");
  using simt::CopyLanding;
  using simt::FiberOrder;
  simt::Config config;
  config.order = choice<FiberOrder>(
      "order", order,
      {{"forward", FiberOrder::forward}, {"reverse", FiberOrder::reverse}, {"random", FiberOrder::random}});
  config.landing = choice<CopyLanding>("landing", landing,
                                       {{"at_wait", CopyLanding::at_wait},
                                        {"at_once", CopyLanding::at_once},
                                        {"random", CopyLanding::random}});
  config.seed = seed;
  config.workers = workers;
  config.poison = poison;
  config.multiprocessors = multiprocessors;
  simt::config() = config;
}

}  // namespace

void define_emulator_controls(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("configure", &configure, py::kw_only(), py::arg("order") = "forward", py::arg("landing") = "at_wait",
        py::arg("seed") = 1, py::arg("workers") = 1, py::arg("poison") = true,
        py::arg("multiprocessors") = 132,
        "Set how the emulator runs kernels; what is not named goes back to its default.");
}

}  // namespace paged_ops::bind
