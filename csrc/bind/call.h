// From a caller's tensors to a backend's call: which backend, which stream, which common views.
#pragma once
#include <optional>

#include "bind/array.h"
#include "core/paged_kv.h"
#include "params/backend.h"

namespace paged_ops::bind {

// Lets other Python threads run while it lives. pybind11's own also looks its internals up, twice.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The backend that serves tensors on this array's device, or a ValueError that says what was built.
const Backend& backend_for(const Array& array);

Context context_for(const Array& array, bool check);

// What the numbers of a cache are; those of int4 lie in a tensor of uint8.
DType cache_dtype(const Array& cache);

// The caches of one layer, checked against each other:
// [num_blocks, block_size, num_kv_heads, head_dim] with any strides, or [..., head_dim / x, x] with the last
// dimension contiguous; same dtype, device and first three extents.
PagedKV paged_kv(const Array& key_cache, const Array& value_cache);

// The number that an object is, or a TypeError that says what was wanted.
double number(py::handle object, const char* name, const char* wanted);

// What scales a quantised cache, as the caller gives it: a number, or float32 [1], [num_kv_heads] or
// [num_blocks, block_size, num_kv_heads]; for int4 float32 [num_blocks, block_size, num_kv_heads, head_dim /
// group]. `array` keeps a tensor's view. None for any other cache.
// writes: the op finds scales per token and stores them.
ScaleView scale_view(std::optional<Array>& array, py::handle scale, const char* name, const Array& cache,
                     bool writes);

// The scales of an op that writes: those that it finds are outputs, others inputs; null where there are none.
struct WrittenScales {
  std::optional<Array> key, value;

  // Into kv, from what the caller gave.
  void view(PagedKV& kv, py::handle k_scale, py::handle v_scale, const Array& key_cache,
            const Array& value_cache);
  const Array* key_output() const { return of(key, key_is_output_); }
  const Array* value_output() const { return of(value, value_is_output_); }
  const Array* key_input() const { return of(key, !key_is_output_); }
  const Array* value_input() const { return of(value, !value_is_output_); }

 private:
  static const Array* of(const std::optional<Array>& array, bool wanted) {
    return array && wanted ? &*array : nullptr;
  }
  bool key_is_output_ = false, value_is_output_ = false;
};

// block_tables int32 [num_seqs, max_blocks_per_seq] and seq_lens int32 [num_seqs].
BlockTables block_tables_of(const Array& block_tables, const Array& seq_lens);

// A ValueError that names the argument when the combination is none that the kernels take.
void require_supported(const Array& array, DType dtype, int64_t num_q_heads, const PagedKV& kv);

// Keys or values of tokens, as the cache has them: [num_tokens, num_kv_heads, head_dim].
void require_rows(const Array& rows, DType dtype, const PagedKV& kv, int head_dim, const char* cache_name);

// The rows and slots of a write, checked, into `p`, whose kv and dtype are there.
void fill_rows(CacheWriteParams& p, const Array& key, const Array& value, const Array& slot_mapping);

// Element i of an output may only depend on element i of an input that shares its memory.
void require_same_or_apart(const Array& output, const Array& input);

// A number of things that has to fit an int32 in the kernels' parameters.
int32_t narrow(int64_t value, const char* what);

}  // namespace paged_ops::bind
