// A small kernel with the shape of the real ones, and with one bug of choice: what the sanitizers must see.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "simt/ptx.h"
#include "simt/simt.h"

namespace ptx = paged_ops::ptx;
namespace simt = paged_ops::simt;

enum Bug {
  kNone,
  // Races: ThreadSanitizer.
  kNoSyncwarpBeforeRead,
  kNoSyncwarpBeforeRefill,
  kNoBarrierBeforeMerge,
  kNoFenceBeforeCounter,
  kNoFenceAfterCounter,
  kBlocksShareAWord,
  // Bounds: AddressSanitizer.
  kTableReadPastEnd,
  kGlobalWritePastEnd,
  kDynamicSharedPastEnd,
  kStaticSharedPastEnd,
  // Undefined behaviour: UndefinedBehaviorSanitizer.
  kMisalignedVector,
  kShiftTooFar,
};
const char* const kNames[] = {"none",
                              "no_syncwarp_before_read",
                              "no_syncwarp_before_refill",
                              "no_barrier_before_merge",
                              "no_fence_before_counter",
                              "no_fence_after_counter",
                              "blocks_share_a_word",
                              "table_read_past_end",
                              "global_write_past_end",
                              "dynamic_shared_past_end",
                              "static_shared_past_end",
                              "misaligned_vector",
                              "shift_too_far"};

constexpr int kWarps = 2, kStages = 2, kRow = 32 * 16;  // bytes: each lane copies 16
constexpr size_t kSharedNbytes = kWarps * kStages * kRow;

struct Params {
  const unsigned char* rows;  // [num_rows][kRow]
  const int* table;           // [gridDim.x][rows_per_block]
  float* partial;             // [gridDim.x]
  float* total;               // [1]
  unsigned* counter;          // [1], zero
  int rows_per_block;
  int num_rows;
};

// Sums all bytes of the rows in the table. A warp takes every second row, through a ring of its own.
template <int kBug>
__global__ void sum_kernel(const Params p) {
  SIMT_DYNAMIC_SHARED(raw);
  SIMT_SHARED(float[kWarps], warp_sum);
  SIMT_SHARED(bool, last);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned char* ring = raw + warp * kStages * kRow;
  const int* table = p.table + blockIdx.x * p.rows_per_block;

  auto copy = [&](int i) {
    if (i < p.rows_per_block || (kBug == kTableReadPastEnd && i < p.rows_per_block + 1)) {
      const int row = table[i] % p.num_rows;
      ptx::cp_async16(ptx::smem_addr(ring + i / kWarps % kStages * kRow) + 16 * lane,
                      p.rows + size_t(row < 0 ? 0 : row) * kRow + 16 * lane);
    }
    ptx::cp_commit();
  };
  for (int s = 0; s < kStages; ++s) copy(warp + s * kWarps);
  float sum = 0;
  for (int i = warp; i < p.rows_per_block; i += kWarps) {
    ptx::cp_wait<kStages - 1>();
    if constexpr (kBug != kNoSyncwarpBeforeRead) __syncwarp();
    const unsigned char* row = ring + i / kWarps % kStages * kRow;
    for (int j = 0; j < 16; ++j) sum += row[32 * j + lane];  // bytes that other lanes have copied
    if constexpr (kBug != kNoSyncwarpBeforeRefill) __syncwarp();
    copy(i + kStages * kWarps);
  }
  ptx::cp_wait_all();
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if constexpr (kBug == kDynamicSharedPastEnd) sum += raw[kSharedNbytes + lane];
  if constexpr (kBug == kMisalignedVector) sum += reinterpret_cast<const float2*>(raw + 4)->x * 0.0f;
  if constexpr (kBug == kShiftTooFar) sum += float(1 << (p.rows_per_block + 32)) * 0.0f;

  float* sums = &warp_sum[0];
  if (lane == 0) sums[kBug == kStaticSharedPastEnd ? warp + 1 : warp] = sum;
  if constexpr (kBug != kNoBarrierBeforeMerge) __syncthreads();
  if (threadIdx.x == 0) {
    p.partial[kBug == kGlobalWritePastEnd ? blockIdx.x + 1 : blockIdx.x] = warp_sum[0] + warp_sum[1];
    if constexpr (kBug == kBlocksShareAWord) *p.total = 0;
    if constexpr (kBug != kNoFenceBeforeCounter) __threadfence();
    last = atomicAdd(p.counter, 1u) == gridDim.x - 1;
    if constexpr (kBug != kNoFenceAfterCounter) __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  float total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) total += ptx::load_l2(p.partial + b);
  *p.total = total;
}

template <int kBug>
void launch_with(int bug, int num_blocks, const Params& p) {
  if (bug == kBug)
    simt::launch(sum_kernel<kBug>, dim3(num_blocks), dim3(32 * kWarps), kSharedNbytes, nullptr, p);
  else if constexpr (kBug > 0)
    launch_with<kBug - 1>(bug, num_blocks, p);
}

// planted BUG ORDER LANDING WORKERS
int main(int argc, char** argv) {
  if (argc != 5) return 2;
  int bug = -1;
  for (int i = 0; i <= kShiftTooFar; ++i)
    if (std::strcmp(argv[1], kNames[i]) == 0) bug = i;
  if (bug < 0) return 2;
  simt::config().order = simt::FiberOrder(std::atoi(argv[2]));
  simt::config().landing = simt::CopyLanding(std::atoi(argv[3]));
  simt::config().workers = std::atoi(argv[4]);

  constexpr int kBlocks = 6, kRowsPerBlock = 9, kRows = 20;
  std::vector<unsigned char> rows(size_t(kRows) * kRow);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = (unsigned char)(i * 7 + i / kRow);
  std::vector<int> table(size_t(kBlocks) * kRowsPerBlock);
  for (size_t i = 0; i < table.size(); ++i) table[i] = int(i * 11 % kRows);
  double want = 0;
  for (int row : table)
    for (int j = 0; j < kRow; ++j) want += rows[size_t(row) * kRow + j];
  // Memory of the exact size, so that its ends are known.
  std::vector<float> partial(kBlocks, -1.0f);
  float total = -1;
  unsigned counter = 0;
  launch_with<kShiftTooFar>(
      bug, kBlocks, {rows.data(), table.data(), partial.data(), &total, &counter, kRowsPerBlock, kRows});
  std::printf("%s\n", double(total) == want ? "right" : "wrong");
  return 0;
}
