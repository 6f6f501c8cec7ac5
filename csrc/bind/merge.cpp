// Binding of the merge of two partial attention results.
#include "bind/call.h"
#include "bind/ops.h"
#include "core/support.h"

namespace paged_ops::bind {

namespace {

void require_lse(const Array& lse, const Array& out) {
  lse.require_ndim(2, "[num_tokens, num_heads]");
  lse.require_dtype(DType::f32);
  lse.require_shape(0, out.shape(0), "num_tokens, as in out_a");
  lse.require_shape(1, out.shape(1), "num_heads, as in out_a");
  lse.require_contiguous();
  lse.require_same_device(out);
}

}  // namespace

py::tuple merge_attention_states(py::handle out_a_in, py::handle lse_a_in, py::handle out_b_in,
                                 py::handle lse_b_in, py::object out_in, py::object lse_in) {
  const Array out_a(out_a_in, "out_a");
  const Array lse_a(lse_a_in, "lse_a");
  const Array out_b(out_b_in, "out_b");
  const Array lse_b(lse_b_in, "lse_b");
  constexpr const char* wanted = "[num_tokens, num_heads, head_dim]";
  const auto require_state = [&](const Array& state) {
    state.require_ndim(3, wanted);
    state.require_dtype(out_a.dtype());
    for (int i = 0; i < 3; i++) state.require_shape(i, out_a.shape(i), "as in out_a");
    state.require_last_contiguous();
    state.require_same_device(out_a);
  };
  require_state(out_a);
  if (const DType dtype = out_a.dtype(); dtype == DType::i32 || dtype == DType::i64)
    fail<TypeError>("out_a: dtype is ", out_a.dtype_name(), ", wanted one of float32, float16, bfloat16");
  PAGED_OPS_REQUIRE(out_a.shape(2) > 0 && out_a.shape(2) % kHeadDimMultiple == 0, "out_a: head_dim is ",
                    out_a.shape(2), ", wanted a positive multiple of ", kHeadDimMultiple);
  require_state(out_b);
  require_lse(lse_a, out_a);
  require_lse(lse_b, out_a);

  if (out_in.is_none())
    out_in = empty_like(out_a, {out_a.shape(0), out_a.shape(1), out_a.shape(2)}, name(out_a.dtype()));
  if (lse_in.is_none()) lse_in = empty_like(out_a, {out_a.shape(0), out_a.shape(1)}, "float32");
  const Array out(out_in, "out", Array::Use::output);
  const Array lse(lse_in, "lse", Array::Use::output);
  require_state(out);
  require_lse(lse, out_a);
  for (const Array* input : {&out_a, &out_b}) {
    require_same_or_apart(out, *input);
    lse.require_no_overlap(*input);
  }
  for (const Array* input : {&lse_a, &lse_b}) {
    require_same_or_apart(lse, *input);
    out.require_no_overlap(*input);
  }
  lse.require_no_overlap(out);

  const MergeStatesParams p{.out_a = out_a.data(),
                            .out_b = out_b.data(),
                            .lse_a = static_cast<const float*>(lse_a.data()),
                            .lse_b = static_cast<const float*>(lse_b.data()),
                            .out = out.data(),
                            .lse = static_cast<float*>(lse.data()),
                            .a_stride_token = out_a.stride_nbytes(0),
                            .a_stride_head = out_a.stride_nbytes(1),
                            .b_stride_token = out_b.stride_nbytes(0),
                            .b_stride_head = out_b.stride_nbytes(1),
                            .out_stride_token = out.stride_nbytes(0),
                            .out_stride_head = out.stride_nbytes(1),
                            .num_tokens = narrow(out_a.shape(0), "num_tokens of out_a"),
                            .num_heads = narrow(out_a.shape(1), "num_heads of out_a"),
                            .head_dim = narrow(out_a.shape(2), "head_dim of out_a"),
                            .dtype = out_a.dtype()};
  const bool recording = require_no_gradient({&out_a, &lse_a, &out_b, &lse_b, &out, &lse});
  const Backend& backend = backend_for(out_a);
  const Context context = context_for(out_a, false);
  if (out_a.size() > 0) {
    const WithoutGil no_gil;
    backend.merge_states(p, context);
  }
  if (recording) count_writes({&out, &lse});
  return py::make_tuple(out_in, lse_in);
}

}  // namespace paged_ops::bind
