// Broken rules, and the places in a kernel's source that messages name.
#pragma once
#include <cstring>
#include <source_location>
#include <string>

#include "simt/emulator/config.h"

namespace paged_ops::simt {

// A call of a synchronising function: which one, and where in the kernel's source.
struct Site {
  Site() = default;
  Site(const char* op, const std::source_location& where) : op(op), where(where) {}

  const char* op = "";
  std::source_location where;

  bool operator==(const Site& other) const {
    // The compiler keeps one record per place, mostly: comparing texts is for when it did not.
    return (op == other.op && std::memcmp(&where, &other.where, sizeof where) == 0) || same_text(other);
  }

 private:
  bool same_text(const Site& other) const;
};

// "op at file:line".
std::string describe(const Site& site);

// Ends the launch with a Fault that says `what`, and which thread of which block did it where.
[[noreturn]] void fault(const std::string& what, const Site& site);

}  // namespace paged_ops::simt
