// The shared memory of a block, with red zones between its variables.
#pragma once
#include <cstddef>
#include <vector>

#include "simt/emulator/fault.h"

namespace paged_ops::simt {

constexpr size_t kMaxStaticSharedNbytes = 48 * 1024;
constexpr size_t kMaxSharedNbytes = 227 * 1024;  // static and dynamic of one block, sm_90 and sm_100

// Dynamic memory first, then each SIMT_SHARED variable as it is reached.
class SharedMemory {
 public:
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void reset(size_t dynamic_nbytes, bool poison);
  unsigned char* dynamic() const { return base_; }
  // The variable known by `key`, the same for all threads of the block.
  void* variable(const void* key, size_t nbytes, size_t alignment, const Site& site);

 private:
  struct Variable {
    const void* key;
    void* address;
  };
  unsigned char* base_;
  size_t dynamic_nbytes_ = 0;
  size_t static_nbytes_ = 0;
  size_t end_ = 0;    // of what is in use
  size_t dirty_ = 0;  // the most that was ever in use
  std::vector<Variable> variables_;
};

}  // namespace paged_ops::simt
