// Asynchronous copies: issued now, landed when waited for or at any time before.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simt/emulator/fault.h"
#include "simt/emulator/sanitizers.h"

namespace paged_ops::simt {

// The asynchronous copies of one thread, oldest first.
class CopyQueue {
 public:
  // Copies `nbytes`, or writes as many zeros when `source` is null. `at_once`: now, else when waited for.
  void issue(void* destination, const void* source, size_t nbytes, bool at_once, const Site& site);
  void commit() {
    Quiet quiet;
    ++num_groups_;
  }
  // Lands all but the `num_left` youngest committed groups.
  void wait(uint64_t num_left);
  void wait_all();
  // Where the oldest copy was issued that nobody has waited for; null if there is none.
  const Site* in_flight() const { return first_ < copies_.size() ? &copies_[first_].site : nullptr; }
  void clear();

 private:
  struct Copy {
    void* destination;
    const void* source;
    size_t nbytes;
    uint64_t group;
    bool landed;
    Site site;
  };
  static void land(Copy& copy);
  void land_groups_below(uint64_t end);

  std::vector<Copy> copies_;
  size_t first_ = 0;         // of those not yet waited for
  uint64_t num_groups_ = 0;  // committed; the group that is open has this number
};

}  // namespace paged_ops::simt
