// Landing asynchronous copies in the order of their groups.
#include "simt/emulator/copy_queue.h"

#include <cstring>

namespace paged_ops::simt {

void CopyQueue::land(Copy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  if (copy.source)
    std::memcpy(copy.destination, copy.source, copy.nbytes);
  else
    std::memset(copy.destination, 0, copy.nbytes);
}

void CopyQueue::issue(void* destination, const void* source, size_t nbytes, bool at_once, const Site& site) {
  mark_write(destination, nbytes);  // the bytes may arrive at any time from now on
  Copy copy{destination, source, nbytes, num_groups_, false, site};
  if (at_once)
    land(copy);
  else if (config().poison)
    std::memset(destination, kPoison, nbytes);
  Quiet quiet;
  copies_.push_back(copy);
}

void CopyQueue::land_groups_below(uint64_t end) {
  while (true) {
    Copy copy;
    {
      Quiet quiet;
      if (first_ == copies_.size() || copies_[first_].group >= end) break;
      copy = copies_[first_++];
    }
    land(copy);
  }
  Quiet quiet;
  if (first_ == copies_.size()) {
    copies_.clear();
    first_ = 0;
  }
}

void CopyQueue::wait(uint64_t num_left) {
  land_groups_below(num_groups_ > num_left ? num_groups_ - num_left : 0);
}

void CopyQueue::wait_all() {
  commit();
  wait(0);
}

void CopyQueue::clear() {
  copies_.clear();
  first_ = 0;
  num_groups_ = 0;
}

}  // namespace paged_ops::simt
