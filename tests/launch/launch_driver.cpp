// Checks of the CUDA backend's host side: `launch_driver WHAT ...` prints what is wrong and ends with
// status 1.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/sight.cuh"
#include "kernels/strand_loader.cuh"
#include "kernels/work_line.cuh"
#include "launch/attention_launch.h"
#include "launch/block_swap_config.h"
#include "launch/packet_width.h"
#include "params/backend.h"
#include "problem.h"
#include "simt/emulator/config.h"

namespace {

// Every sequence has room for its tiles before the next one begins, and the last one within the batch's
// slots.
void slots() {
  for (int round = 0; round < 20000; round++) {
    const int num_seqs = uniform(1, 6), group = uniform(1, 70),
              columns = std::array{8, 16, 64}[uniform(0, 2)];
    std::vector<int> first_row{0};
    for (int s = 0; s < num_seqs; s++) first_row.push_back(first_row.back() + uniform(0, 1) * uniform(0, 40));
    const int num_tokens = first_row.back() + uniform(0, 1) * uniform(0, 9);
    first_row.push_back(num_tokens);  // the padding is one more sequence
    const AttentionParams p = shapes(num_seqs, num_tokens, 1, group, 1, false);
    for (int s = 0; s <= num_seqs; s++) {
      const int64_t begin = kernels::first_slot(first_row[s], s, group, columns);
      const int64_t tiles = (int64_t(first_row[s + 1] - first_row[s]) * group + columns - 1) / columns;
      const int64_t end = s < num_seqs ? kernels::first_slot(first_row[s + 1], s + 1, group, columns)
                                       : kernels::num_slots(p, columns);
      CHECK(begin + tiles <= end, "sequence ", s, " of ", num_seqs);
      CHECK(begin < end);
    }
  }
}

// A function of shapes: neither addresses nor strides have a say.
void workspace() {
  for (int round = 0; round < 2000; round++) {
    const bool decode = uniform(0, 1);
    const int num_seqs = uniform(0, 300), num_tokens = decode ? num_seqs : uniform(0, 2000);
    const DType dtype = uniform(0, 1) ? DType::f16 : DType::f32;
    AttentionParams p =
        shapes(num_seqs, num_tokens, uniform(1, 8), uniform(1, 20), uniform(0, 2000), decode, dtype);
    const AttentionPlan aligned = launch::plan_attention(p);
    p.kv.value.data = reinterpret_cast<void*>(uintptr_t(1002));
    p.kv.key.stride_head = 70;
    const AttentionPlan odd = launch::plan_attention(p);
    CHECK(aligned.aligned && !odd.aligned);
    CHECK(aligned.workspace_nbytes == odd.workspace_nbytes && aligned.parallel == odd.parallel);
    CHECK(odd.column_tiles == 1);
    for (const AttentionPlan& plan : {aligned, odd}) {
      CHECK(plan.finished_offset >= size_t(plan.num_slots + 2) * sizeof(int64_t));
      CHECK(plan.state_offset >= plan.finished_offset + size_t(plan.num_places) * sizeof(int));
    }
    CHECK(odd.finished_offset % 256 == 0 && odd.state_offset % 256 == 0 && odd.out_offset % 256 == 0);
    CHECK(odd.parallel || odd.workspace_nbytes == 0);
    // Callers ask for the workspace without saying what rules there will be.
    p.rules.window = 9;
    const AttentionPlan ruled = launch::plan_attention(p);
    CHECK(ruled.ruled && ruled.workspace_nbytes == odd.workspace_nbytes);
  }
}

void parallel() {
  const AttentionPlan one = launch::plan_attention(shapes(1, 1, 8, 4, 8192, true));
  CHECK(one.parallel && one.max_ctas() == 8 * 256,
        "a lone sequence of 131072 tokens spreads over its chunks");
  const AttentionPlan many = launch::plan_attention(shapes(512, 512, 8, 4, 512, true));
  CHECK(many.parallel, "a large batch may hold a long sequence: its CTAs share the work too");
  const AttentionPlan huge = launch::plan_attention(shapes(1024, 1024, 8, 16, 8192, true));
  CHECK(!huge.parallel && huge.workspace_nbytes == 0, "partial states of gigabytes are not worth it");
  const AttentionPlan brief = launch::plan_attention(shapes(64, 64, 8, 4, 32, true));
  CHECK(!brief.parallel && brief.workspace_nbytes == 0, "one chunk needs no workspace");
  const AttentionPlan prefill = launch::plan_attention(shapes(1, 4096, 8, 4, 8192, false));
  CHECK(!prefill.parallel && prefill.workspace_nbytes == 0);
  const AttentionPlan verify = launch::plan_attention(shapes(4, 20, 8, 4, 8192, false));
  CHECK(verify.parallel && verify.column_tiles == 2, "a few tokens of a long sequence share its chunks");
  CHECK(launch::plan_attention(shapes(1, 1, 1, 1, 1 << 30, true)).capacity > 0,
        "a table wider than 2^31 tokens");
}

// How many columns share a pass over the keys: by shapes alone.
void columns() {
  const auto tiles = [](const AttentionParams& p) { return launch::plan_attention(p).column_tiles; };
  CHECK(tiles(shapes(64, 64, 8, 8, 512, true)) == 1 && tiles(shapes(64, 64, 8, 9, 512, true)) == 2);
  CHECK(tiles(shapes(64, 64, 8, 128, 512, true)) == 2, "decode, however many heads a group has");
  CHECK(tiles(shapes(1, 4096, 8, 4, 8192, false)) == 8, "a long prefill");
  CHECK(tiles(shapes(1, 4096, 8, 4, 8192, false, DType::f16, 64)) == 8);
  CHECK(tiles(shapes(1, 4096, 8, 4, 8192, false, DType::bf16, 136)) == 2, "no registers for wider heads");
  CHECK(tiles(shapes(1, 4096, 8, 4, 8192, false, DType::f32)) == 1, "no matrix instructions");
  CHECK(tiles(shapes(1, 128, 8, 4, 8192, false)) == 2, "too coarse for so little work");
  CHECK(tiles(shapes(512, 4096, 8, 4, 512, false)) == 2, "8 tokens of each sequence: verification");
  CHECK(tiles(shapes(257, 4096, 8, 4, 512, false)) == 2 && tiles(shapes(256, 4096, 8, 4, 512, false)) == 8,
        "64 columns of each sequence, on average");
  CHECK(tiles(shapes(16, 144, 8, 8, 36, false)) == 8, "what tests/ops/test_bitwise.py runs");
  // 8 heads x (tokens * 4 / 64 + 2) tiles: once and twice 264 of them.
  CHECK(tiles(shapes(1, 495, 8, 4, 512, false)) == 2 && tiles(shapes(1, 496, 8, 4, 512, false)) == 8);
  CHECK(launch::plan_attention(shapes(1, 1023, 8, 4, 512, false)).parallel,
        "few, but their chunks are shared");
  CHECK(!launch::plan_attention(shapes(1, 1024, 8, 4, 512, false)).parallel, "enough");
  CHECK(tiles(shapes(1, 1023, 8, 4, 32, false)) == 2 && tiles(shapes(1, 1024, 8, 4, 32, false)) == 8,
        "one chunk is not shared");
  // Rules have kernels of their own, but no say in the shape. A sink needs none.
  AttentionParams ruled = shapes(1, 4096, 8, 4, 8192, false), sunk = ruled;
  ruled.rules.soft_cap = 30.f;
  sunk.rules.sinks = &kOne;
  CHECK(launch::plan_attention(ruled).ruled && tiles(ruled) == 8);
  CHECK(!launch::plan_attention(sunk).ruled && tiles(sunk) == 8);
}

// Tiles come strand by strand, chunk by chunk: in the order in which the warps that split the keys are
// folded.
void strands() {
  for (int round = 0; round < 500; round++) {
    const int end = uniform(0, 2500), first = uniform(0, 4) * kernels::kChunkTokens;
    std::vector<int> wanted, actual;
    for (int chunk = first; chunk < end; chunk += kernels::kChunkTokens)
      for (int strand = 0; strand < 4; strand++)
        for (int i = strand; i < kernels::kTilesPerChunk; i += 4)
          if (chunk + i * kernels::kTileTokens < end) wanted.push_back(chunk + i * kernels::kTileTokens);
    for (int tile = first; tile < end; tile = kernels::next_tile<4>(tile, end)) actual.push_back(tile);
    CHECK(actual == wanted, "from ", first, " to ", end);
    const int seen = first + uniform(0, kernels::kChunkTokens - 1);
    std::erase_if(wanted, [&](int tile) { return tile + kernels::kTileTokens <= seen; });
    actual.clear();
    for (int tile = first + kernels::kTileTokens <= seen ? kernels::next_tile<4>(first, seen, end) : first;
         tile < end; tile = kernels::next_tile<4>(tile, seen, end))
      actual.push_back(tile);
    CHECK(actual == wanted, "from ", first, " to ", end, ", seen from ", seen);
    for (int strand = 0; strand < 4; strand++) {
      const int tile = kernels::first_tile(first, strand, 4 * kernels::kTileTokens, seen);
      const auto mine = [&](int t) {
        return t < first + kernels::kChunkTokens && t / kernels::kTileTokens % 4 == strand;
      };
      const auto found = std::find_if(wanted.begin(), wanted.end(), mine);
      CHECK(found == wanted.end() ? tile >= std::min(end, first + kernels::kChunkTokens) : tile == *found);
    }
    for (int tile : {first, first + kernels::kChunkTokens - kernels::kTileTokens})
      CHECK(tile < end || kernels::next_tile<4>(tile, end) >= end, "past the end it stays there");
  }
}

// For all dividends there are, at the edges of all quotients near the ends.
void divisor() {
  for (const int d :
       {1, 2, 3, 5, 7, 16, 24, 641, 4096, 65535, 65537, (1 << 29) + 1, (1 << 30) - 1, 1 << 30}) {
    const kernels::Divisor divisor(d);
    const auto check = [&](int64_t n) {
      if (n >= 0 && n <= INT32_MAX) CHECK(divisor.quotient(int(n)) == n / d, n, " / ", d);
    };
    for (int64_t i = 0; i < 2000; i++)
      for (const int64_t quotient : {i, INT32_MAX / d - i, int64_t(uniform(0, INT32_MAX / d))})
        check(quotient * d - 1), check(quotient * d), check(quotient * d + d / 2);
    check(INT32_MAX);
  }
}

void parallel_grid() {
  const auto grid = [](int64_t max_ctas, int multiprocessors, int each) {
    const dim3 g = launch::parallel_grid(max_ctas, multiprocessors, each);
    return std::pair(g.x, g.y);
  };
  CHECK(grid(1 << 20, 132, 3) == std::pair(132u, 3u), "no more CTAs than the chip holds at once");
  CHECK(grid(200, 132, 3) == std::pair(132u, 2u), "nor more than could have work, or nearly");
  CHECK(grid(16, 132, 3) == std::pair(16u, 1u) && grid(0, 132, 3) == std::pair(1u, 1u));
  CHECK(grid(int64_t(1) << 40, 170, 0) == std::pair(170u, 1u));
}

// Every chunk of every place is in exactly one part of the line, in order, and no part has much more than
// its share.
void work_list() {
  for (int round = 0; round < 3000; round++) {
    std::vector<int> keys;
    for (int i = uniform(1, 40); i > 0; i--)
      keys.push_back(uniform(0, 9) ? uniform(0, 1) * uniform(0, 2000) : uniform(0, 100000));
    int64_t length = 0;
    for (const int n : keys) length += kernels::place_cost(n);
    const int num_parts = uniform(0, 1) ? uniform(1, 9) : uniform(1, 500);
    std::vector<int> next(keys.size(), 0);
    const int64_t part_length = kernels::part_length(length, num_parts);
    CHECK(part_length * num_parts >= length && part_length * num_parts < length + num_parts);
    for (int part = 0; part < num_parts; part++) {
      const int64_t begin = part * part_length, end = begin + part_length;
      int64_t place = 0, cost = 0;
      for (size_t i = 0; i < keys.size(); place += kernels::place_cost(keys[i++])) {
        const int n = kernels::num_chunks(keys[i]);
        const int from = kernels::chunks_before(place, n, begin), to = kernels::chunks_before(place, n, end);
        if (begin >= length) CHECK(from == to, "a part past the end has no work");
        if (from >= to) continue;
        CHECK(from == next[i], "chunk ", next[i], " of place ", i, " is left out or done twice");
        next[i] = to;
        cost += (to == n ? kernels::place_cost(keys[i]) : int64_t(to) * kernels::kChunkCost) -
                int64_t(from) * kernels::kChunkCost;
      }
      CHECK(cost <= (length + num_parts - 1) / num_parts + kernels::kChunkCost, "part ", part,
            " is too long");
    }
    for (size_t i = 0; i < keys.size(); i++) CHECK(next[i] == kernels::num_chunks(keys[i]), "place ", i);
  }
  CHECK(kernels::chunks_before(0, 7, INT64_MAX) == 7, "all chunks, where nothing is shared");
  CHECK(kernels::num_chunks(0) == 1 && kernels::num_chunks(512) == 1 && kernels::num_chunks(513) == 2);
}

void packet_width() {
  const auto width = [](int64_t bits) { return launch::PacketWidth().nbytes(bits).get(); };
  CHECK(width(0) == 16 && width(32) == 16 && width(48) == 16 && width(-16) == 16);
  CHECK(width(8) == 4 && width(4) == 4 && width(6) == 2 && width(7) == 1 && width(-2) == 2);
  CHECK(launch::PacketWidth().nbytes(256).address(reinterpret_cast<void*>(0x1004)).get() == 4);
}

void head_threads() {
  for (int packets = 1; packets <= 512; packets++)
    for (int heads = 1; heads <= 130; heads++) {
      const dim3 threads = launch::head_threads(packets, heads);
      CHECK(threads.x * threads.y * threads.z <= 256 && threads.x * threads.y * threads.z % 32 == 0);
    }
}

// The pieces, one by one, do what copying run by run does; dense pools move in few pieces.
void swap_pieces() {
  for (int round = 0; round < 4000; round++) {
    const int num_blocks = uniform(2, 9);
    BlockSwapParams p{};
    const int64_t run = uniform(1, 6);
    // Three dimensions outside a run in random order and with random gaps, on either side.
    const int64_t counts[3] = {num_blocks, uniform(1, 3), uniform(1, 3)};
    const auto strides = [&](int64_t (&stride)[3]) {
      int order[3] = {0, 1, 2};
      std::shuffle(order, order + 3, rng);
      int64_t extent = run;
      for (const int dim : order) {
        stride[dim] = extent + uniform(0, 1) * uniform(0, 3);
        extent = stride[dim] * counts[dim];
      }
      return extent;
    };
    int64_t from[3], to[3];
    const int64_t from_nbytes = strides(from), to_nbytes = strides(to);
    p.source_block = {run, {counts[1], counts[2]}, {from[1], from[2]}};
    p.destination_block = {run, {counts[1], counts[2]}, {to[1], to[2]}};
    p.source_block_stride = from[0];
    p.destination_block_stride = to[0];
    std::vector<int64_t> pairs;
    for (int i = uniform(0, num_blocks - 1); i < num_blocks; i++) {
      pairs.push_back(uniform(0, 2) ? i : uniform(0, num_blocks - 1));
      pairs.push_back(i);
    }
    p.block_pairs = pairs.data();
    p.num_pairs = int64_t(pairs.size() / 2);

    std::vector<uint8_t> source(from_nbytes), wanted(to_nbytes, 7), actual(to_nbytes, 7);
    for (auto& byte : source) byte = uint8_t(uniform(0, 255));
    for (int64_t pair = 0; pair < p.num_pairs; pair++)
      for (int64_t i = 0; i < counts[1]; i++)
        for (int64_t j = 0; j < counts[2]; j++)
          std::memcpy(&wanted[pairs[2 * pair + 1] * to[0] + i * to[1] + j * to[2]],
                      &source[pairs[2 * pair] * from[0] + i * from[1] + j * from[2]], run);
    for (const launch::CopyPiece& piece : launch::plan_block_swap(p)) {
      CHECK(piece.height == 1 ||
            (piece.source_pitch >= piece.width && piece.destination_pitch >= piece.width));
      for (int64_t row = 0; row < piece.height; row++)
        std::memcpy(&actual[piece.destination + row * piece.destination_pitch],
                    &source[piece.source + row * piece.source_pitch], piece.width);
    }
    CHECK(wanted == actual, "round ", round);
  }
  const int64_t pairs[] = {4, 1, 5, 2, 6, 3, 0, 7};
  BlockSwapParams dense{};
  dense.source_block = dense.destination_block = {1024, {1, 1}, {0, 0}};
  dense.source_block_stride = dense.destination_block_stride = 1024;
  dense.block_pairs = pairs;
  dense.num_pairs = 4;
  const auto pieces = launch::plan_block_swap(dense);
  CHECK(pieces.size() == 2 && pieces[0].width == 3 * 1024 && pieces[0].height == 1);
}

// How many kernels an op launches. No kernel runs.
int launches_of(const std::function<void(const Context&)>& op) {
  static int launches;
  launches = 0;
  simt::config().observer = [](const simt::Launch&) {
    launches++;
    return false;
  };
  op({.device = 0, .stream = nullptr, .check = false});
  simt::config().observer = nullptr;
  return launches;
}

void launches() {
  const Backend& backend = launch::backend();
  Problem decode({DType::bf16, DType::bf16}, 64, 64, 4, 2, {1100, 17}, {});
  std::vector<unsigned char> workspace(launch::plan_attention(decode.p).workspace_nbytes);
  decode.p.workspace = workspace.data();
  decode.p.workspace_nbytes = workspace.size();
  CHECK(launches_of([&](const Context& c) { backend.attention(decode.p, c); }) == 2, "work list, attention");
  decode.p.tables.max_blocks_per_seq = 1;
  CHECK(launches_of([&](const Context& c) { backend.attention(decode.p, c); }) == 1, "a chunk each: no list");

  CacheWriteParams write{};
  std::vector<int64_t> slots(64, 0);
  write.key = write.value = decode.query.data();
  write.slot_mapping = slots.data();
  write.num_tokens = 64;
  write.dtype = DType::bf16;
  write.kv = decode.p.kv;
  CHECK(launches_of([&](const Context& c) { backend.cache_write(write, c); }) == 1, "K and V together");

  std::vector<void*> caches(64, decode.key.data());
  const BlockCopyParams copy{caches.data(), 64, {1024, {1, 1}, {0, 0}}, 1024, 100, slots.data(), 32};
  CHECK(launches_of([&](const Context& c) { backend.block_copy(copy, c); }) == 1, "all layers, all pairs");
}

// `what`: "decode", "prefill", "many": prefill of more columns than a CTA has, or "long": decode of more
// chunks than a warp folds at once.
// `rules`: as Problem::set_rules() has them.
void plans(DTypes dtypes, int head_dim, int value_head_dim, int group, const std::string& what, bool causal,
           const std::string& rules) {
  Problem problem = what == "long" ? Problem(dtypes, head_dim, value_head_dim, group, 1,
                                             {33 * kernels::kChunkTokens + 100}, {})
                                   : Problem(dtypes, head_dim, value_head_dim, group, 2, {1100, 0, 17, 530},
                                             what == "decode" ? std::vector<int32_t>{}
                                             : what == "many" ? std::vector<int32_t>{0, 70, 72, 89, 129}
                                                              : std::vector<int32_t>{0, 7, 9, 12, 23});
  problem.p.causal = causal;
  problem.set_rules(rules);
  if (what == "long") {  // the maximum rises once more where the second round of 32 chunks begins
    const int size = itemsize(dtypes.cache);
    const int64_t quiet =
        32 * kernels::kChunkTokens / Problem::kBlockSize * problem.p.kv.key.stride_block / size;
    const auto loud = random_tensor(dtypes.cache, problem.key.size() / size - quiet, 6.f);
    std::copy(loud.begin(), loud.end(), problem.key.end() - loud.size());
  }
  std::vector<unsigned char> first_out;
  std::vector<float> first_lse;
  std::vector<int> all_tiles{1};
  const AttentionPlan plan = launch::plan_attention(problem.p);
  const int most = dtypes.query == DType::f32 || plan.converted
                       ? 1
                       : launch::most_column_tiles(dtypes.cache, plan.head_dim);
  for (const int tiles : {2, launch::kSplitColumnTiles})
    if (tiles <= most) all_tiles.push_back(tiles);
  const auto chips = what == "many" ? std::vector{0, 5} : std::vector{0, 1, 2, 5, 132};
  for (const bool aligned : {true, false})
    for (const int column_tiles : aligned ? all_tiles : std::vector<int>{1})
      for (const int multiprocessors : chips) {
        problem.run(aligned, column_tiles, multiprocessors, multiprocessors == 5);
        const std::vector<float>& lse = problem.lse;
        if (first_out.empty()) first_out = problem.out, first_lse = lse;
        const auto which = concat("aligned ", aligned, ", column tiles ", column_tiles, ", multiprocessors ",
                                  multiprocessors);
        CHECK(problem.out == first_out, which);
        CHECK(std::memcmp(lse.data(), first_lse.data(), lse.size() * sizeof(float)) == 0, which);
        for (const float x : lse) CHECK(!std::isnan(x), which);
      }
}

// One element of one value is an infinity or NaN. The rows that do not see it keep their bits, and those
// that do have lost that dim and nothing else.
void poison(DTypes dtypes, const std::string& rules) {
  const DType dtype = dtypes.cache;
  const int head_dim = is_quantised(dtype) ? 48 : 40, last = head_dim - 1;
  Problem problem(dtypes, head_dim, head_dim, 3, 2, {70, 21}, {0, 24, 33});
  problem.set_rules(rules);
  if (rules == "window") problem.p.rules.window = 7;
  const int size = itemsize(dtypes.query), group = 3;
  const std::vector<unsigned char> clean_value = problem.value;
  for (int round = 0; round < 48; round++) {
    const int column_tiles =
        dtypes.query == DType::f32 ? 1 : std::array{1, 2, launch::kSplitColumnTiles}[round % 3];
    problem.value = clean_value;
    problem.run(true, column_tiles, 0);
    const std::vector<unsigned char> clean_out = problem.out;
    const int seq = uniform(0, 1), kv_head = uniform(0, 1), dim = uniform(0, last);
    const int length = problem.seq_lens[seq], first_row = problem.cu_seqlens_q[seq];
    const int num_rows = problem.cu_seqlens_q[seq + 1] - first_row;
    const int position = uniform(length - num_rows - (rules == "plain" ? 0 : 8), length - 1);
    const float bad = uniform(0, 1) ? NAN : INFINITY;
    const f16 h = portable::from_float<f16>(bad);
    const bf16 b = portable::from_float<bf16>(bad);
    const f8e4m3 e4m3 = portable::from_float<f8e4m3>(NAN);  // it has no infinity
    const f8e5m2 e5m2{uint8_t(std::isnan(bad) ? 0x7e : 0x7c)};
    const void* from = dtype == DType::f32      ? static_cast<const void*>(&bad)
                       : dtype == DType::f16    ? static_cast<const void*>(&h)
                       : dtype == DType::bf16   ? static_cast<const void*>(&b)
                       : dtype == DType::f8e4m3 ? static_cast<const void*>(&e4m3)
                                                : static_cast<const void*>(&e5m2);
    const int item = itemsize(dtype);
    std::memcpy(problem.value_row(seq, position, kv_head) + dim * item, from, item);
    problem.run(true, column_tiles, 0);

    for (int row = 0; row < problem.p.num_tokens; row++)
      for (int head = 0; head < 2 * group; head++) {
        const bool sees = row >= first_row && row < first_row + num_rows && head / group == kv_head &&
                          problem.sees(seq, row - first_row, position);
        const size_t at = (size_t(row) * 2 * group + head) * head_dim * size;
        const bool same = std::memcmp(&problem.out[at], &clean_out[at], head_dim * size) == 0;
        CHECK(same == !sees, "row ", row, ", head ", head, ", position ", position, ", dim ", dim);
        const size_t behind = at + (dim + 1) * size, rest = (last - dim) * size;
        CHECK(std::memcmp(&problem.out[at], &clean_out[at], dim * size) == 0, "dims before ", dim);
        CHECK(std::memcmp(&problem.out[0] + behind, &clean_out[0] + behind, rest) == 0, "dims behind ", dim);
      }
  }
}

// A dtype, or two: "float16", "float16/int8".
DTypes dtypes_named(const std::string& text) {
  const auto named = [](const std::string& wanted) {
    for (const DType dtype : {DType::f32, DType::f16, DType::f8e4m3, DType::f8e5m2, DType::i8, DType::i4})
      if (wanted == name(dtype)) return dtype;
    return DType::bf16;
  };
  const size_t slash = text.find('/');
  const DType query = named(text.substr(0, slash));
  return {query, slash == std::string::npos ? query : named(text.substr(slash + 1))};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const std::map<std::string, void (*)()> functions{{"slots", slots},
                                                    {"workspace", workspace},
                                                    {"parallel", parallel},
                                                    {"columns", columns},
                                                    {"strands", strands},
                                                    {"divisor", divisor},
                                                    {"parallel_grid", parallel_grid},
                                                    {"work_list", work_list},
                                                    {"launches", launches},
                                                    {"packet_width", packet_width},
                                                    {"head_threads", head_threads},
                                                    {"swap_pieces", swap_pieces}};
  try {
    if (what == "plans" && argc == 9) {
      plans(dtypes_named(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]), argv[6],
            std::string(argv[7]) == "causal", argv[8]);
    } else if (what == "poison" && argc == 4) {
      poison(dtypes_named(argv[2]), argv[3]);
    } else {
      functions.at(what)();
    }
  } catch (const std::exception& error) {
    std::printf("%s: %s\n", what.c_str(), error.what());
    return 1;
  }
}
