// Errors that cross the binding: what was wrong is said once, in words a caller can act on.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace paged_ops {

// A value, shape or option is not acceptable. Becomes Python's ValueError.
struct ValueError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An argument has the wrong type or dtype. Becomes Python's TypeError.
struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The machine said no (a CUDA status, no memory). Becomes Python's RuntimeError.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class Error = ValueError, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(concat(parts...));
}

// The message is built only when the condition fails.
#define PAGED_OPS_REQUIRE(condition, ...) \
  do {                                    \
    if (!(condition)) [[unlikely]]        \
      ::paged_ops::fail(__VA_ARGS__);     \
  } while (false)

}  // namespace paged_ops
