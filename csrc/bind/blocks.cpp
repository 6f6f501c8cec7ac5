// Bindings of block copies: inside caches, and between pools.
#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "bind/call.h"
#include "bind/ops.h"

namespace paged_ops::bind {

namespace {

// A block of each array (all dimensions but the first, equal in extent) as contiguous runs that
// correspond one to one. Dimensions are taken by the first array's strides, and neighbours are joined
// where every array allows it, so that any permutation of a dense block is one run.
template <size_t N>
std::array<BlockShape, N> block_shapes(const std::array<const Array*, N>& arrays) {
  const Array& first = *arrays[0];
  std::vector<int> dims;
  for (int i = 1; i < first.ndim(); i++)
    if (first.shape(i) > 1) dims.push_back(i);
  std::sort(dims.begin(), dims.end(), [&](int a, int b) { return first.stride(a) < first.stride(b); });

  std::array<BlockShape, N> blocks;
  for (BlockShape& block : blocks) block = {first.itemsize(), {1, 1}, {0, 0}};
  int levels = 0;  // of runs, beyond the contiguous one
  for (const int dim : dims) {
    const int64_t extent = first.shape(dim);
    bool joins = true;
    for (size_t i = 0; i < N; i++) {
      const BlockShape& block = blocks[i];
      const int64_t next =
          levels == 0 ? block.run_nbytes : block.run_stride[levels - 1] * block.num_runs[levels - 1];
      joins = joins && arrays[i]->stride_nbytes(dim) == next;
    }
    PAGED_OPS_REQUIRE(
        joins || levels < 2, first.name(),
        ": its blocks are scattered over more than two levels of strides; copy them through a tensor "
        "whose blocks are dense");
    for (size_t i = 0; i < N; i++) {
      BlockShape& block = blocks[i];
      if (!joins) {
        block.num_runs[levels] = extent;
        block.run_stride[levels] = arrays[i]->stride_nbytes(dim);
      } else if (levels == 0) {
        block.run_nbytes *= extent;
      } else {
        block.num_runs[levels - 1] *= extent;
      }
    }
    levels += !joins;
  }
  return blocks;
}

const int64_t* pairs_of(const Array& block_pairs) {
  block_pairs.require_ndim(2, "[num_pairs, 2]");
  block_pairs.require_shape(1, 2, "source and destination block");
  block_pairs.require_dtype(DType::i64);
  block_pairs.require_contiguous();
  return static_cast<const int64_t*>(block_pairs.data());
}

bool on_device(const Array& array) { return dlpack::on_cuda(array.device()); }

// No block of one cache lies in another. They have one shape and one set of strides, so that neighbours in
// memory are the first to meet; the same cache twice does the same twice.
void require_distinct(const std::vector<std::unique_ptr<Array>>& caches) {
  std::vector<const Array*> sorted;
  for (const auto& cache : caches) sorted.push_back(cache.get());
  std::sort(sorted.begin(), sorted.end(),
            [](const Array* a, const Array* b) { return a->begin() < b->begin(); });
  for (size_t i = 1; i < sorted.size(); i++)
    if (sorted[i]->data() != sorted[i - 1]->data()) sorted[i]->require_no_overlap(*sorted[i - 1]);
}

}  // namespace

void copy_blocks(py::handle sequence, py::handle block_pairs_in, bool check) {
  if (!PySequence_Check(sequence.ptr()))
    fail<TypeError>("caches: is a ", Py_TYPE(sequence.ptr())->tp_name, ", wanted a list of tensors");
  const auto caches_in = py::reinterpret_borrow<py::sequence>(sequence);
  PAGED_OPS_REQUIRE(caches_in.size() > 0, "caches: is empty, wanted at least one tensor");
  std::deque<std::string> names;
  std::vector<std::unique_ptr<Array>> caches;
  std::vector<void*> addresses;
  for (const py::handle cache : caches_in) {
    names.push_back(caches_in.size() == 1 ? "caches" : "caches[" + std::to_string(names.size()) + "]");
    caches.push_back(std::make_unique<Array>(cache, names.back().c_str(), Array::Use::output));
    addresses.push_back(caches.back()->data());
  }
  const Array& first = *caches.front();
  PAGED_OPS_REQUIRE(first.ndim() >= 2, "caches: shape is ", first.shape_text(), ", wanted [num_blocks, ...]");
  for (size_t i = 1; i < caches.size(); i++) {
    const Array& cache = *caches[i];
    cache.require_same_device(first);
    require_no_gradient({&cache});
    cache.require_ndim(first.ndim(), "the same shape as caches[0]");
    if (!cache.has_dtype_of(first))
      fail<TypeError>("caches[", i, "]: dtype is ", cache.dtype_name(), ", wanted ", first.dtype_name(),
                      " as caches[0]");
    for (int d = 0; d < first.ndim(); d++)
      PAGED_OPS_REQUIRE(
          cache.shape(d) == first.shape(d) && (cache.stride(d) == first.stride(d) || cache.shape(d) <= 1),
          "caches[", i, "]: shape ", cache.shape_text(), " or its strides differ from caches[0] ",
          first.shape_text());
  }
  const bool recording = require_no_gradient({&first});
  const Array block_pairs(block_pairs_in, "block_pairs");
  const int64_t* pairs = pairs_of(block_pairs);
  block_pairs.require_same_device(first);
  for (const auto& cache : caches) cache->require_no_overlap(block_pairs);
  require_distinct(caches);
  const BlockCopyParams p{.caches = addresses.data(),
                          .num_caches = narrow(int64_t(addresses.size()), "the number of caches"),
                          .block = block_shapes<1>({&first})[0],
                          .block_stride = first.stride_nbytes(0),
                          .num_blocks = first.shape(0),
                          .block_pairs = pairs,
                          .num_pairs = block_pairs.shape(0)};
  const Backend& backend = backend_for(first);
  const Context context = context_for(first, check);
  if (p.num_pairs == 0 || first.size() == 0) return;
  {
    const WithoutGil no_gil;
    backend.block_copy(p, context);
  }
  if (recording) {
    std::vector<const Array*> written;
    for (const auto& cache : caches) written.push_back(cache.get());
    count_writes(written.data(), written.size());
  }
}

void swap_blocks(py::handle source_in, py::handle destination_in, py::handle block_pairs_in) {
  const Array source(source_in, "source");
  const Array destination(destination_in, "destination", Array::Use::output);
  const Array block_pairs(block_pairs_in, "block_pairs");
  PAGED_OPS_REQUIRE(source.ndim() >= 2, "source: shape is ", source.shape_text(),
                    ", wanted [num_blocks, ...]");
  destination.require_ndim(source.ndim(), "as many dimensions as source");
  for (int d = 1; d < source.ndim(); d++) destination.require_shape(d, source.shape(d), "as in source");
  if (!destination.has_dtype_of(source))
    fail<TypeError>("destination: dtype is ", destination.dtype_name(), ", wanted ", source.dtype_name(),
                    " as source");
  require_apart({&destination}, {&source, &block_pairs});
  const int64_t* pairs = pairs_of(block_pairs);
  PAGED_OPS_REQUIRE(!on_device(block_pairs), "block_pairs: is on ", block_pairs.device_name(),
                    ", wanted cpu: the copies are issued by the host");
  const auto [from, to] = block_shapes<2>({&source, &destination});
  const BlockSwapParams p{.source = source.data(),
                          .destination = destination.data(),
                          .source_block = from,
                          .destination_block = to,
                          .source_block_stride = source.stride_nbytes(0),
                          .destination_block_stride = destination.stride_nbytes(0),
                          .source_num_blocks = source.shape(0),
                          .destination_num_blocks = destination.shape(0),
                          .block_pairs = pairs,
                          .num_pairs = block_pairs.shape(0),
                          .source_on_device = on_device(source),
                          .destination_on_device = on_device(destination)};
  const Array& device_side = on_device(destination) ? destination : source;
  const bool recording = require_no_gradient({&source, &destination});
  const Backend& backend = backend_for(device_side);
  const Context context = context_for(device_side, true);
  if (p.num_pairs == 0 || source.size() == 0 || destination.size() == 0) return;
  {
    const WithoutGil no_gil;
    backend.block_swap(p, context);
  }
  if (recording) count_writes({&destination});
}

}  // namespace paged_ops::bind
