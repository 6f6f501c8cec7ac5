// Laying out a block's shared memory in an arena, anew for each block.
#include "simt/emulator/shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "simt/emulator/sanitizers.h"

namespace paged_ops::simt {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 128;
constexpr size_t kRedZone = 128;

// Anonymous memory, new or anew: under ThreadSanitizer nothing is known about who used it.
char* map_pages(void* where, size_t nbytes) {
  void* p = mmap(where, nbytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (where ? MAP_FIXED : 0), -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr size_t kArenaNbytes = round_up(kMaxSharedNbytes + 64 * 1024, kPage);  // and the red zones

}  // namespace

SharedMemory::SharedMemory() : base_(reinterpret_cast<unsigned char*>(map_pages(nullptr, kArenaNbytes))) {}

SharedMemory::~SharedMemory() {
  allow(base_, kArenaNbytes);
  munmap(base_, kArenaNbytes);
}

void SharedMemory::reset(size_t dynamic_nbytes, bool poison) {
  allow(base_, kArenaNbytes);
  dirty_ = std::max({dirty_, end_, dynamic_nbytes});
  if (SIMT_TSAN && dirty_) map_pages(base_, round_up(dirty_, kPage));
  if (poison) std::memset(base_, kPoison, dirty_);
  forbid(base_ + dynamic_nbytes, kArenaNbytes - dynamic_nbytes);
  dynamic_nbytes_ = dynamic_nbytes;
  static_nbytes_ = 0;
  end_ = round_up(dynamic_nbytes, kAlignment) + kRedZone;
  variables_.clear();
}

void* SharedMemory::variable(const void* key, size_t nbytes, size_t alignment, const Site& site) {
  Quiet quiet;
  for (const Variable& variable : variables_)
    if (variable.key == key) return variable.address;
  static_nbytes_ = round_up(static_nbytes_, alignment) + nbytes;
  if (static_nbytes_ > kMaxStaticSharedNbytes)
    fault(concat(static_nbytes_, " bytes of static shared memory, at most ", kMaxStaticSharedNbytes), site);
  if (static_nbytes_ + dynamic_nbytes_ > kMaxSharedNbytes)
    fault(concat(static_nbytes_, " + ", dynamic_nbytes_,
                 " bytes of static and dynamic shared memory, at most ", kMaxSharedNbytes),
          site);
  unsigned char* address = base_ + round_up(end_, std::max(alignment, kAlignment));
  const size_t end = size_t(address - base_) + round_up(nbytes, kAlignment) + kRedZone;
  if (end > kArenaNbytes) fault("too many SIMT_SHARED variables", site);
  end_ = end;
  allow(address, nbytes);
  if (config().poison) std::memset(address, kPoison, nbytes);
  variables_.push_back({key, address});
  return address;
}

}  // namespace paged_ops::simt
