"""The ops as torch sees them: torch.library registration, torch.compile, gradients, views, devices."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import paged_ops
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import Case, Inputs, build
from paged_ops.testing.checks import block_pairs, expected, merge_states, rows_to_rotate, rows_to_write

torch = pytest.importorskip("torch")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode

CASE = Case((20, 0, 300), dtype="bfloat16", num_q_heads=6)
VARLEN = Case((20, 9, 300), (3, 0, 20), dtype="float16", num_q_heads=6)


def put(array: Any, target: Target) -> Any:
    return arrays.to_torch(array, target.device)


def tensors_of(case: Case, target: Target) -> Inputs:
    return build(case).map(lambda array: put(array, target))


def attention_arguments(case: Case, target: Target) -> tuple[Any, ...]:
    x = tensors_of(case, target)
    out = torch.empty((*x.query.shape[:2], case.dim_value), dtype=x.query.dtype, device=x.query.device)
    lse = torch.empty(x.query.shape[:2], dtype=torch.float32, device=x.query.device)
    causal, scale = case.causal, case.scale
    first = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens, x.cu_seqlens_q
    return *first, scale, causal, *[None] * 7, out, lse, None, None


def shared_prefix_arguments(target: Target) -> tuple[Any, ...]:
    x = tensors_of(Case((52, 40), (5, 1), dtype="bfloat16"), target)
    tables = x.block_tables[0, :2].contiguous(), 32, x.block_tables, x.seq_lens, x.cu_seqlens_q
    lse = torch.empty(x.query.shape[:2], dtype=torch.float32, device=target.device)
    caches = x.key_cache, x.value_cache
    return x.query, *caches, *tables, *[None] * 5, torch.empty_like(x.query), lse, None


def rope_arguments(target: Target) -> tuple[Any, ...]:
    x = tensors_of(CASE, target)
    rows = [put(array, target) for array in rows_to_rotate(CASE, 32)]
    caches = x.key_cache, x.value_cache
    return *rows[:3], *caches, *rows[3:], True, None, None, torch.empty_like(rows[0]), None


def registered_calls(target: Target) -> dict[str, tuple[Any, ...]]:
    """Arguments for every op registered with torch.library, by name."""
    x = tensors_of(CASE, target)
    key, value, slots = (put(array, target) for array in rows_to_write(CASE))
    states = [put(array, target) for array in merge_states(7, 3, 40, "float16")]
    caches = x.key_cache, x.value_cache
    tables = x.block_tables, x.seq_lens
    pairs = put(block_pairs(len(x.key_cache)), target)
    rows = [torch.empty(320, 2, 64, dtype=torch.bfloat16, device=target.device) for _ in range(2)]
    swap_pairs = torch.tensor([[0, 1], [2, 0]])
    packed = torch.stack([cache[:2] for cache in caches], dim=1)
    return {
        "attention": attention_arguments(CASE, target),
        "merge_attention_states": (*states, torch.empty_like(states[0]), torch.empty_like(states[1])),
        "write_kv_cache": (key, value, *caches, slots, None, None, None),
        "copy_blocks": (list(caches), pairs, None),
        "swap_blocks": (x.key_cache, x.value_cache, swap_pairs),
        "gather_kv_cache": (*caches, *tables, None, None, None, 320, None),
        "gather_kv_cache_out": (*caches, *tables, None, None, *rows, None),
        "move_blocks": (list(caches), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 3]]), None),
        "export_blocks": (list(caches), torch.tensor([2, 0]), torch.empty_like(packed)),
        "import_blocks": (packed, list(caches), torch.tensor([0, 3])),
        "rope_and_write_kv_cache": rope_arguments(target),
        "attention_shared_prefix": shared_prefix_arguments(target),
    }


def test_every_registered_op_is_tested() -> None:
    names = {name for name in dir(torch.ops.paged_ops) if not name.startswith("_")} - {"name"}
    assert names <= set(registered_calls(Target("cpu"))), names


@pytest.mark.parametrize("name", list(registered_calls(Target("cpu"))))
def test_opcheck(target: Target, name: str) -> None:
    with target.use():
        torch.library.opcheck(getattr(torch.ops.paged_ops, name), registered_calls(target)[name])


def calls_with_scales(case: Case, target: Target) -> dict[str, tuple[Any, ...]]:
    """Of the ops that take scales, by name, over the quantised caches of a case."""
    x = tensors_of(case, target)
    rows = [put(array, target) for array in rows_to_rotate(case, 32)]
    caches, tables = (x.key_cache, x.value_cache), (x.block_tables, x.seq_lens)
    scales = x.k_scale, x.v_scale
    out = torch.empty((*x.query.shape[:2], case.dim_value), dtype=x.query.dtype, device=target.device)
    full = [torch.empty(320, 2, dim, device=target.device) for dim in (case.head_dim, case.dim_value)]
    return {
        "attention": (x.query, *caches, *tables, None, None, True, *[None] * 5, *scales, out, *[None] * 3),
        "write_kv_cache": (*rows[1:3], *caches, rows[3], *scales, None),
        "gather_kv_cache": (*caches, *tables, *scales, torch.float16, 320, None),
        "gather_kv_cache_out": (*caches, *tables, *scales, *full, None),
        "rope_and_write_kv_cache": (
            *(*rows[:3], *caches, *rows[3:], True, *scales),
            *(torch.empty_like(rows[0]), None),
        ),
    }


QUANTISED = [
    replace(CASE, cache_dtype="int8", scales="token"),
    replace(CASE, cache_dtype="int4", scale_groups=(8, 32)),
]


@pytest.mark.parametrize("case", QUANTISED, ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("name", list(calls_with_scales(QUANTISED[0], Target("cpu"))))
def test_opcheck_with_scales(target: Target, name: str, case: Case) -> None:
    with target.use():
        torch.library.opcheck(getattr(torch.ops.paged_ops, name), calls_with_scales(case, target)[name])


def test_opcheck_of_varlen(target: Target) -> None:
    with target.use():
        torch.library.opcheck(torch.ops.paged_ops.attention, attention_arguments(VARLEN, target))


def test_opcheck_of_a_gather_of_unknown_size(target: Target) -> None:
    arguments = list(registered_calls(target)["gather_kv_cache"])
    arguments[7] = None
    with target.use():
        torch.library.opcheck(torch.ops.paged_ops.gather_kv_cache, tuple(arguments))


@pytest.mark.parametrize("case", [CASE, VARLEN], ids=["decode", "varlen"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_in_a_full_graph(target: Target, case: Case, dynamic: bool) -> None:
    """Traced without a break, with torch ops around it, with the eager call's bits."""
    x = tensors_of(case, target)

    def layer(inputs: Inputs) -> Any:
        out, lse = inputs.map(lambda t: t).attention(paged_ops)
        return out + 1, lse * 2

    def traced(query: Any, key_cache: Any, value_cache: Any, tables: Any, lens: Any, cu: Any) -> Any:
        if cu is None:
            out, lse = paged_ops.paged_attention_decode(
                query, key_cache, value_cache, tables, lens, return_lse=True
            )
        else:
            out, lse = paged_ops.paged_attention(
                query, key_cache, value_cache, tables, lens, cu, return_lse=True
            )
        return out + 1, lse * 2

    with target.use():
        compiled = torch.compile(traced, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        arguments = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens, x.cu_seqlens_q
        for wanted, actual in zip(layer(x), compiled(*arguments), strict=True):
            assert arrays.same_bits(wanted, actual)


def test_a_step_of_a_model_in_a_full_graph(target: Target) -> None:
    """Write, attend into a given tensor, merge, gather, copy: mutations keep their order."""

    def step(x: dict[str, Any]) -> Any:
        paged_ops.write_kv_cache(x["key"], x["value"], x["key_cache"], x["value_cache"], x["slots"])
        paged_ops.copy_blocks([x["key_cache"], x["value_cache"]], x["pairs"])
        tensors = x["query"], x["key_cache"], x["value_cache"], x["tables"], x["lens"]
        out, lse = paged_ops.paged_attention_decode(*tensors, out=x["out"], return_lse=True)
        out, lse = paged_ops.merge_attention_states(out, lse, out, lse)
        rows = paged_ops.gather_kv_cache(*tensors[1:], num_tokens=8)
        paged_ops.swap_blocks(x["key_cache"], x["value_cache"], x["swap_pairs"])
        return out * 2, lse, rows[0] + rows[1]

    def arguments() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        tensor = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        x = {
            "key": tensor(2, 1, 8),
            "value": tensor(2, 1, 8),
            "key_cache": tensor(6, 4, 1, 8),
            "value_cache": tensor(6, 4, 1, 8),
            "slots": np.array([3, 4], np.int64),
            "pairs": np.array([[1, 2]], np.int64),
            "query": tensor(2, 2, 8),
            "tables": np.array([[0, 2], [3, 9]], np.int32),
            "lens": np.array([6, 1], np.int32),
            "out": tensor(2, 2, 8),
        }
        return {k: put(v, target) for k, v in x.items()} | {"swap_pairs": torch.tensor([[0, 5]])}

    with target.use():
        eager, traced = arguments(), arguments()
        wanted = step(eager)
        actual = torch.compile(step, fullgraph=True, backend="aot_eager")(traced)
        for a, b in zip(wanted, actual, strict=True):
            assert arrays.same_bits(a, b)
        for name in eager:
            assert arrays.same_bits(eager[name], traced[name]), name


@pytest.mark.slow
def test_inductor(target: Target) -> None:
    x = tensors_of(CASE, target)
    arguments = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens

    def layer(*tensors: Any) -> Any:
        return torch.relu(paged_ops.paged_attention_decode(*tensors)).sum(0)

    with target.use():
        wanted = layer(*arguments)
        actual = torch.compile(layer, fullgraph=True)(*arguments)
        torch.testing.assert_close(wanted, actual)


# --- what torch tensors can be besides memory --------------------------------------------------------------


def test_gradients_are_refused(target: Target) -> None:
    """Silently dropping out of the graph would be a wrong gradient."""
    x = tensors_of(Case((3,), num_q_heads=2), target)
    arguments = [x.query, x.key_cache, x.value_cache]
    for i, name in enumerate(("query", "key_cache", "value_cache")):
        tensors = list(arguments)
        tensors[i] = tensors[i].clone().requires_grad_()
        with target.use():
            with pytest.raises(ValueError, match=f"^{name}: requires a gradient"):
                paged_ops.paged_attention_decode(*tensors, x.block_tables, x.seq_lens)
            with torch.no_grad():
                paged_ops.paged_attention_decode(*tensors, x.block_tables, x.seq_lens)
            with torch.inference_mode():
                paged_ops.paged_attention_decode(*tensors, x.block_tables, x.seq_lens)


def test_parameters_are_tensors(target: Target) -> None:
    x = tensors_of(Case((3,), num_q_heads=2), target)
    query = torch.nn.Parameter(x.query, requires_grad=False)
    with target.use():
        wanted = paged_ops.paged_attention_decode(
            x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens
        )
        actual = paged_ops.paged_attention_decode(
            query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens
        )
    assert arrays.same_bits(wanted, actual)


def test_lazily_negated_views_are_refused(target: Target) -> None:
    """Their memory holds other bits than their values."""
    x = tensors_of(Case((3,), num_q_heads=2), target)
    negated = torch.complex(x.query, -x.query).conj().imag
    assert negated.is_neg() and torch.equal(negated, x.query)
    with target.use(), pytest.raises(ValueError, match="^query: "):
        paged_ops.paged_attention_decode(negated, x.key_cache, x.value_cache, x.block_tables, x.seq_lens)


def test_lazily_negated_views_of_one_element_a_row_are_refused(target: Target) -> None:
    """Their strides say nothing: a row of one element is contiguous however far the next would be."""
    states = [put(array, target) for array in merge_states(1, 1, 8, "float32")]
    lse = torch.complex(states[1], -states[1]).conj().imag
    assert lse.is_neg() and torch.equal(lse, states[1])
    with target.use():
        with pytest.raises(ValueError, match="^lse_a: is a lazily negated view"):
            paged_ops.merge_attention_states(states[0], lse, *states[2:])
        with pytest.raises(ValueError, match="^lse: is a lazily negated view"):
            paged_ops.merge_attention_states(*states, lse=lse)
        paged_ops.merge_attention_states(states[0], lse.resolve_neg(), *states[2:])


@pytest.mark.parametrize(
    "scale",
    [np.float32(0.3), np.float64(0.3), np.float16(0.3), np.int64(1), Fraction(1, 3), torch.tensor(0.3), 1],
    ids=repr,
)
def test_a_scale_of_any_kind_when_compiled(target: Target, scale: Any) -> None:
    x = tensors_of(CASE, target)
    arguments = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens

    def call(*tensors: Any) -> Any:
        return paged_ops.paged_attention_decode(*tensors, scale=scale)

    with target.use():
        torch._dynamo.reset()
        actual = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
        assert arrays.same_bits(call(*arguments), actual)


@pytest.mark.parametrize("scale", ["0.3", 1j])
def test_a_scale_that_is_no_number_is_named_when_traced(target: Target, scale: Any) -> None:
    x = tensors_of(CASE, target)
    arguments = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens
    with target.use(), Recorder() as recorder:
        with pytest.raises(TypeError, match="^scale: is a (str|complex), wanted a number"):
            paged_ops.paged_attention_decode(*arguments, scale=scale)
        assert recorder.ops == []
        paged_ops.paged_attention_decode(*arguments)
        assert "paged_ops.attention.default" in recorder.ops


class Recorder(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(function))
        return function(*args, **(kwargs or {}))


def test_numpy_arrays_under_a_dispatch_mode(ops: HostOps) -> None:
    """The mode sees torch's tensors; a call without them is none of its business, and works."""
    if ops.target.device != "cpu":
        pytest.skip("NumPy's arrays are on the CPU: a GPU takes none of them")
    inputs = build(CASE)
    key, value, slots = rows_to_write(CASE)
    caches = inputs.key_cache.copy(), inputs.value_cache.copy()
    states = merge_states(7, 3, 40, "float32")
    tables = inputs.block_tables, inputs.seq_lens
    tensors = inputs.map(arrays.to_torch)
    with ops.target.use(), Recorder() as recorder:
        expected(CASE).check(paged_ops.paged_attention_decode(inputs.query, *caches, *tables))
        paged_ops.merge_attention_states(*states)
        paged_ops.write_kv_cache(key, value, *caches, slots)
        paged_ops.copy_blocks(list(caches), block_pairs(len(caches[0])))
        paged_ops.swap_blocks(*caches, np.array([[0, 1]]))
        paged_ops.gather_kv_cache(*caches, *tables)
        with pytest.raises(ValueError, match="^caches: is empty"):
            paged_ops.copy_blocks([], block_pairs(2))
        assert recorder.ops == []
        # What is half torch's names the other half.
        with pytest.raises(RuntimeError, match="argument 'block_tables'.*ndarray"):
            paged_ops.paged_attention_decode(tensors.query, tensors.key_cache, tensors.value_cache, *tables)


def test_mixed_kinds(target: Target) -> None:
    """Tables from numpy beside tensors from torch: the output is of the query's kind."""
    if target.device != "cpu":
        pytest.skip("NumPy's arrays are on the CPU: a GPU takes none of them")
    inputs = build(CASE)
    tensors = inputs.map(arrays.to_torch)
    with target.use():
        out = paged_ops.paged_attention_decode(
            tensors.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, tensors.seq_lens
        )
        assert isinstance(out, torch.Tensor)
        expected(CASE).check(out)
        out = paged_ops.paged_attention_decode(
            inputs.query, tensors.key_cache, tensors.value_cache, tensors.block_tables, inputs.seq_lens
        )
        assert isinstance(out, np.ndarray)
        expected(CASE).check(out)


class Capsule:
    """A tensor with `__dlpack__` and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_a_type_with_a_dlpack_capsule_only(target: Target) -> None:
    """What torch before 2.10, cupy and JAX offer."""

    x = tensors_of(CASE, target)
    tensors = [Capsule(t) for t in (x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens)]
    out = torch.empty_like(x.query)
    with target.use():
        paged_ops.paged_attention_decode(*tensors, out=Capsule(out))
        expected(CASE).check(out)
        with pytest.raises(ValueError, match="^out: "):
            paged_ops.paged_attention_decode(*tensors)  # nobody knows how to make one


@pytest.mark.parametrize("fault", ["overlap", "dtype"])
def test_capsules_are_given_back(target: Target, fault: str) -> None:
    """Also when the call is refused: a tensor that nobody holds any more is freed."""
    x = tensors_of(Case((3,), num_q_heads=2), target)
    tensors = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens
    freed = []
    out = torch.zeros(x.query.shape, device=target.device, dtype=torch.float64)
    if fault == "overlap":
        out = out.to(x.query.dtype)[:, :1].expand(x.query.shape)
    weakref.finalize(out.untyped_storage(), freed.append, True)
    with target.use(), pytest.raises((ValueError, TypeError), match="^out: "):
        paged_ops.paged_attention_decode(*tensors, out=Capsule(out))
    del out
    gc.collect()
    assert freed


def test_registration_in_either_order_of_imports() -> None:
    probe = "import paged_ops, importlib.util; importlib.util.find_spec('torch'); import torch"
    for imports in ("import torch, paged_ops", "import paged_ops, torch", probe):
        code = f"{imports}; torch.ops.paged_ops.attention.default"
        subprocess.run([sys.executable, "-c", code], check=True)


# ---- what would go wrong without a word --------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_gradient_is_refused_when_compiled_too(target: Target, backend: str) -> None:
    x = tensors_of(CASE, target)
    query = x.query.float().to(x.query.dtype).requires_grad_()

    def loss(query: Any) -> Any:
        arguments = x.key_cache, x.value_cache, x.block_tables, x.seq_lens
        return (paged_ops.paged_attention_decode(query, *arguments) + query).sum()

    with target.use(), pytest.raises(Exception, match="query: requires a gradient"):
        torch.compile(loss, fullgraph=True, backend=backend)(query)


def test_an_old_tracer_records_the_ops(target: Target) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = tensors_of(CASE, target)

    def call(query: Any) -> Any:
        return (
            paged_ops.paged_attention_decode(query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens)
            * 1
        )

    with target.use():
        wanted = call(x.query)
        assert torch.equal(torch.jit.trace(call, (x.query,), check_trace=False)(x.query), wanted)
        assert torch.equal(make_fx(call)(x.query)(x.query), wanted)


@pytest.mark.parametrize("strict", [False, True], ids=["by dispatch modes", "by dynamo"])
def test_an_exported_program_holds_the_op(target: Target, strict: bool) -> None:
    x = tensors_of(CASE, target)
    arguments = x.query, x.key_cache, x.value_cache, x.block_tables, x.seq_lens

    class Layer(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return paged_ops.paged_attention_decode(*tensors) * 1

    with target.use():
        program = torch.export.export(Layer(), arguments, strict=strict)
        assert "paged_ops.attention" in str(program.graph)
        assert torch.equal(program.module()(*arguments), Layer()(*arguments))


def test_writes_are_counted_while_gradients_are_recorded(target: Target) -> None:
    """A backward that needs what a cache held before it was written says so instead of being wrong."""
    cache = torch.ones(2, 4, 1, 8, device=target.device)
    weight = torch.ones(2, 4, 1, 8, device=target.device, requires_grad=True)
    rows = torch.zeros(1, 1, 8, device=target.device)
    slot = torch.zeros(1, dtype=torch.int64, device=target.device)
    pairs = torch.tensor([[0, 1]], device=target.device)
    writes = {
        "write": lambda: paged_ops.write_kv_cache(rows, rows, cache, torch.ones_like(cache), slot),
        "copy": lambda: paged_ops.copy_blocks(cache, pairs),
        "swap": lambda: paged_ops.swap_blocks(torch.zeros_like(cache), cache, pairs.cpu()),
    }
    for name, write in writes.items():
        loss = (weight * cache).sum()
        with target.use():
            write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
            pytest.fail(name)
    with torch.inference_mode(), target.use():
        inner = torch.ones(2, 4, 1, 8, device=target.device)
        paged_ops.copy_blocks(inner, pairs)


def test_many_tensor_types_in_one_process(target: Target) -> None:
    x = tensors_of(CASE, target)
    for i in range(40):
        kind = type(f"Tensor{i}", (torch.Tensor,), {})
        with target.use():
            paged_ops.paged_attention_decode(
                x.query.as_subclass(kind), x.key_cache, x.value_cache, x.block_tables, x.seq_lens
            )
