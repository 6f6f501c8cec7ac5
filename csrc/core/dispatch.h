// From a run-time dtype to a compile-time type: one variadic template for every op.
#pragma once
#include "core/check.h"
#include "core/dtype.h"

namespace paged_ops {

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with the T among Types whose dtype is `dtype`:
//   dispatch<float, f16, bf16>("query", params.dtype, [&](auto t) { run<typename decltype(t)::type>(params);
//   });
template <class... Types, class F>
void dispatch(const char* argument, DType dtype, F&& f) {
  const bool found = ((dtype == dtype_of<Types>::value ? (f(Type<Types>{}), true) : false) || ...);
  if (!found) {
    std::string wanted;
    ((wanted += (wanted.empty() ? "" : ", "), wanted += name(dtype_of<Types>::value)), ...);
    fail<TypeError>(argument, ": dtype is ", name(dtype), ", wanted one of ", wanted);
  }
}

}  // namespace paged_ops
