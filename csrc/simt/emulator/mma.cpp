// One lane multiplies for its whole warp: assembling the matrices once is most of the work saved.
#include "simt/emulator/mma.h"

namespace paged_ops::simt {
namespace {

SIMT_UNSEEN void multiply_for_all(MmaOperands* lanes) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, t2 = lane % 4 * 2;
    const MmaOperands& x = lanes[lane];
    for (int i = 0; i < 4; ++i) {
      float* pair = &a[g + i % 2 * 8][t2 + i / 2 * 8];
      pair[0] = x.a[i].x, pair[1] = x.a[i].y;
    }
    for (int i = 0; i < 2; ++i) b[t2 + i * 8][g] = x.b[i].x, b[t2 + i * 8 + 1][g] = x.b[i].y;
    for (int i = 0; i < 4; ++i) c[g + i / 2 * 8][t2 + i % 2] = x.c[i];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) c[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, t2 = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) lanes[lane].c[i] = c[g + i / 2 * 8][t2 + i % 2];
  }
}

}  // namespace

SIMT_UNSEEN void multiply_accumulate(MmaOperands& mine, const Site& site) {
  Quiet quiet;
  Fiber& self = *current_fiber;
  const Block::Meeting meeting = self.block->meet(kAllLanes, &mine, sizeof(mine), /*ordered=*/false, site);
  MmaOperands* lanes = reinterpret_cast<MmaOperands*>(meeting.slots);
  if (!*meeting.combined) {
    multiply_for_all(lanes);
    *meeting.combined = true;
  }
  for (int i = 0; i < 4; ++i) mine.c[i] = lanes[self.lane].c[i];
}

}  // namespace paged_ops::simt
