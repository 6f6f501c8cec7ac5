// Division by a number that the host knows: a multiplication and a shift on the device.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace paged_ops::kernels {

// With 2^(shift-1) < d <= 2^shift, the multiplier is 2^(31+shift) / d, made an integer that is greater by at
// most 1: over 31 bits of dividend that adds less than 1 / d to the quotient (Granlund & Montgomery 1994).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int d) {  // 1 <= d <= 2^30
    while ((1 << shift_) < d) shift_++;
    multiplier_ = uint32_t((uint64_t(1) << (31 + shift_)) / unsigned(d) + 1);
  }

  // n / d, for n >= 0.
  PAGED_OPS_HOST_DEVICE int quotient(int n) const {
    return int(uint32_t(uint64_t(2 * uint32_t(n)) * multiplier_ >> 32) >> shift_);
  }

 private:
  uint32_t multiplier_ = 0;
  int shift_ = 0;
};

}  // namespace paged_ops::kernels
