"""Bad input raises, names the argument, and leaves every output as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paged_ops
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target

Arguments = dict[str, Any]
F32 = np.float32


@dataclass
class Call:
    """A call that works, to be spoilt: arguments by name, and which of them the op writes."""

    op: str
    arguments: Arguments
    writes: tuple[str, ...]
    options: tuple[str, ...] = ()  # keyword-only arguments among them
    constrained: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # dimensions whose extent is prescribed


def _ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def decode() -> Call:
    return Call(
        "paged_attention_decode",
        {
            "query": _ones(3, 4, 16),
            "key_cache": _ones(5, 2, 2, 16),
            "value_cache": _ones(5, 2, 2, 8),
            "block_tables": np.array([[0, 1], [2, 3], [4, 99]], np.int32),
            "seq_lens": np.array([3, 4, 1], np.int32),
            "out": _ones(3, 4, 8),
            "lse": _ones(3, 4),
        },
        ("out", "lse"),
        ("out", "lse"),
        {
            "query": (0, 1, 2),
            "key_cache": (0, 1, 2, 3),
            "value_cache": (0, 1, 2, 3),
            "block_tables": (0,),
            "seq_lens": (0,),
            "out": (0, 1, 2),
            "lse": (0, 1),
        },
    )


def varlen() -> Call:
    call = decode()
    call.op = "paged_attention"
    call.arguments |= {"query": _ones(7, 4, 16), "out": _ones(7, 4, 8), "lse": _ones(7, 4)}
    call.arguments["cu_seqlens_q"] = np.array([0, 3, 3, 6], np.int32)
    call.constrained["cu_seqlens_q"] = (0,)
    return call


def merge() -> Call:
    names = {"out_a": 3, "lse_a": 2, "out_b": 3, "lse_b": 2, "out": 3, "lse": 2}
    arguments = {name: _ones(*(4, 3, 8)[:ndim]) for name, ndim in names.items()}
    dims = {name: tuple(range(ndim)) for name, ndim in names.items()}
    return Call("merge_attention_states", arguments, ("out", "lse"), ("out", "lse"), dims)


def write() -> Call:
    return Call(
        "write_kv_cache",
        {
            "key": _ones(3, 2, 16),
            "value": _ones(3, 2, 8),
            "key_cache": np.zeros((5, 2, 2, 16), F32),
            "value_cache": np.zeros((5, 2, 2, 8), F32),
            "slot_mapping": np.array([0, -1, 9], np.int64),
        },
        ("key_cache", "value_cache"),
        (),
        {
            "key": (0, 1, 2),
            "value": (0, 1, 2),
            "key_cache": (0, 1, 2, 3),
            "value_cache": (0, 1, 2, 3),
        },
    )


def gather() -> Call:
    return Call(
        "gather_kv_cache",
        {
            "key_cache": _ones(5, 2, 2, 16),
            "value_cache": _ones(5, 2, 2, 8),
            "block_tables": np.array([[0, 1], [2, 99]], np.int32),
            "seq_lens": np.array([3, 2], np.int32),
            "out[0]": np.zeros((9, 2, 16), F32),
            "out[1]": np.zeros((9, 2, 8), F32),
        },
        ("out[0]", "out[1]"),
        ("out[0]", "out[1]"),
        {
            "key_cache": (0, 1, 2, 3),
            "value_cache": (0, 1, 2, 3),
            "block_tables": (0,),
            "seq_lens": (0,),
            "out[0]": (0, 1, 2),
            "out[1]": (0, 1, 2),
        },
    )


def swap() -> Call:
    return Call(
        "swap_blocks",
        {
            "source": _ones(4, 2, 8),
            "destination": np.zeros((6, 2, 8), F32),
            "block_pairs": np.array([[0, 5], [3, 1]], np.int64),
        },
        ("destination",),
        (),
        {"source": (1, 2), "destination": (1, 2), "block_pairs": (1,)},
    )


def copy() -> Call:
    return Call(
        "copy_blocks",
        {
            "caches[0]": _ones(6, 2, 8),
            "caches[1]": np.zeros((6, 2, 8), F32),
            "block_pairs": np.array([[0, 5], [0, 1]], np.int64),
        },
        ("caches[0]", "caches[1]"),
        (),
        {"caches[0]": (0, 1, 2), "caches[1]": (0, 1, 2), "block_pairs": (1,)},
    )


CALLS: list[Callable[[], Call]] = [decode, varlen, merge, write, gather, swap, copy]


def invoke(ops: Any, call: Call) -> Any:
    """Puts the arguments where they belong."""
    arguments = dict(call.arguments)
    if call.op == "copy_blocks":
        caches = [arguments.pop("caches[0]"), arguments.pop("caches[1]")]
        return ops.copy_blocks(caches, **arguments)
    if call.op == "gather_kv_cache" and "out[0]" in arguments:
        arguments["out"] = (arguments.pop("out[0]"), arguments.pop("out[1]"))
    return getattr(ops, call.op)(**arguments)


def require_refused(
    ops: Any, call: Call, names: tuple[str, ...], errors: Any = (ValueError, TypeError)
) -> str:
    """The call raises one of `errors`, its message begins with one of the names, nothing is written."""
    before = {
        name: arrays.bits(call.arguments[name]) for name in call.writes if _is_array(call.arguments[name])
    }
    with pytest.raises(errors) as caught:
        invoke(ops, call)
    message = str(caught.value)
    if not message.startswith(names):
        pytest.fail(f"wanted one of {names} named first: {message}", pytrace=False)
    for name, bits in before.items():
        assert (arrays.bits(call.arguments[name]) == bits).all(), f"{name} was written"
    return message


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.isnative and all(s >= 0 for s in value.strides)


def _each_argument() -> list[Any]:
    return [pytest.param(make, name, id=f"{make().op}-{name}") for make in CALLS for name in make().arguments]


each_argument = pytest.mark.parametrize(("make", "name"), _each_argument())


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make().op)
def test_unspoilt_calls_work(ops: HostOps, make: Callable[[], Call]) -> None:
    invoke(ops, make())


# --- what a tensor is -----------------------------------------------------------------------------------


@each_argument
@pytest.mark.parametrize("value", [3, "text", [1.0, 2.0], object()], ids=["int", "str", "list", "object"])
def test_not_a_tensor(ops: HostOps, make: Callable[[], Call], name: str, value: Any) -> None:
    call = make()
    call.arguments[name] = value
    message = require_refused(ops, call, (bare(name),), TypeError)
    assert type(value).__name__ in message


def bare(name: str) -> str:
    """The name as far as messages agree on it: elements of a list may be named as such or by the list."""
    return name.partition("[")[0] if name.startswith("caches") else name


@each_argument
def test_wrong_dtype(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    call = make()
    array = call.arguments[name]
    wrong = [np.uint8, np.complex64, np.bool_, np.float64] + [
        np.int64 if array.dtype == np.int32 else np.int32
    ]
    if call.op in ("swap_blocks", "copy_blocks") and array.dtype == F32:
        wrong = [np.float64, np.int16]  # any dtype will do, but the same in all
    for dtype in wrong:
        call = make()
        call.arguments[name] = array.astype(dtype)
        # Which of two floats is the odd one out is not for the message to know.
        names = tuple(map(bare, call.arguments)) if array.dtype == F32 else (bare(name),)
        message = require_refused(ops, call, names, (TypeError, ValueError))
        assert "float64" in message or np.dtype(dtype).name in message


@each_argument
def test_bytes_of_the_other_order(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    if ops.target.device != "cpu":
        pytest.skip("numpy's own forms of arrays")
    call = make()
    call.arguments[name] = call.arguments[name].astype(call.arguments[name].dtype.newbyteorder(">"))
    require_refused(ops, call, (bare(name),), TypeError)


@each_argument
def test_wrong_number_of_dimensions(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    for change in (lambda a: a[None], lambda a: a[0]):
        call = make()
        call.arguments[name] = np.array(change(call.arguments[name]))
        if call.op in ("swap_blocks", "copy_blocks") and name != "block_pairs":
            others = tuple(map(bare, call.arguments))  # which of the two is wrong, nobody can tell
            require_refused(ops, call, others, ValueError)
        else:
            others = tuple(n for n in call.arguments if n.endswith("_cache"))  # may have five: packs
            message = require_refused(ops, call, others if name in others else (bare(name),), ValueError)
            assert any(str(call.arguments[n].shape) in message for n in (name, *others))


@each_argument
def test_wrong_extent(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    """Each prescribed dimension one larger; the message names one of the arguments that disagree."""
    for dim in make().constrained.get(name, ()):
        call = make()
        array = call.arguments[name]
        call.arguments[name] = np.concatenate([array, np.take(array, [0], axis=dim)], axis=dim)
        require_refused(ops, call, tuple(map(bare, call.arguments)), ValueError)


@each_argument
def test_strides(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    """Every last dimension is contiguous, but of caches and blocks; no stride is negative."""
    if ops.target.device != "cpu":
        pytest.skip("torch has no negative strides")
    call = make()
    array = call.arguments[name]
    call.arguments[name] = array[::-1]
    require_refused(ops, call, (bare(name),), ValueError)
    if bare(name) in ("caches", "source", "destination", "key_cache", "value_cache"):
        return  # any strides will do
    call = make()
    spread = np.repeat(array, 2, axis=-1)[..., ::2]
    assert spread.shape == array.shape and not spread.flags.c_contiguous
    call.arguments[name] = spread
    message = require_refused(ops, call, (bare(name),), ValueError)
    assert "stride" in message


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make().op)
def test_outputs_must_be_writable_and_must_not_overlap_themselves(
    ops: HostOps, make: Callable[[], Call]
) -> None:
    if ops.target.device != "cpu":
        pytest.skip("numpy arrays are copied to the device")
    for name in make().writes:
        call = make()
        call.arguments[name].flags.writeable = False
        assert "read-only" in require_refused(ops, call, (bare(name),), ValueError)
        call = make()
        array = call.arguments[name]
        strides = (0, *array.strides[1:])
        call.arguments[name] = np.lib.stride_tricks.as_strided(array, array.shape, strides)
        require_refused(ops, call, (bare(name),), ValueError)


@each_argument
def test_masked_arrays_are_refused(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    """No op heeds a mask, and dropping it silently would count what is masked."""
    if ops.target.device != "cpu":
        pytest.skip("masks are NumPy's: a GPU takes none of its arrays")
    call = make()
    call.arguments[name] = np.ma.masked_array(call.arguments[name], mask=False)
    message = require_refused(ops, call, (bare(name),), TypeError)
    assert "is a masked array, whose mask no op heeds" in message


def test_read_only_inputs_are_fine(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("numpy's own forms of arrays")
    for make in CALLS:
        call = make()
        for name, array in call.arguments.items():
            array.flags.writeable = name in call.writes
        invoke(ops, call)


# --- memory shared between arguments --------------------------------------------------------------------


@pytest.mark.parametrize("make", [decode, varlen], ids=["decode", "varlen"])
def test_attention_must_not_write_what_it_reads(ops: HostOps, make: Callable[[], Call]) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    for shared in ("query", "key_cache", "value_cache"):
        call = make()
        array = call.arguments[shared]
        tokens = len(call.arguments["query"])
        memory = np.zeros(max(array.size, tokens * 4 * 8), F32)
        memory[: array.size] = array.ravel()
        call.arguments[shared] = memory[: array.size].reshape(array.shape)
        call.arguments["out"] = memory[-tokens * 4 * 8 :].reshape(tokens, 4, 8)
        require_refused(ops, call, ("out: shares memory",), ValueError)
    call = make()
    call.arguments["lse"] = call.arguments["out"].reshape(-1)[: len(call.arguments["out"]) * 4].reshape(-1, 4)
    require_refused(ops, call, ("lse: shares memory", "out: shares memory"), ValueError)


def test_merge_may_write_over_an_input_but_not_beside_it(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    call = merge()
    memory = np.ones((5, 3, 8), F32)
    call.arguments["out_a"], call.arguments["out"] = memory[:4], memory[1:]
    require_refused(ops, call, ("out: shares memory with out_a",), ValueError)
    call = merge()
    memory = np.ones((5, 3), F32)
    call.arguments["lse_b"], call.arguments["lse"] = memory[:4], memory[1:]
    require_refused(ops, call, ("lse: shares memory with lse_b",), ValueError)


def test_caches_must_not_be_written_from_themselves(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    call = write()
    call.arguments["key"] = call.arguments["key_cache"].reshape(-1, 2, 16)[:3]
    require_refused(ops, call, ("key_cache: shares memory with key",), ValueError)
    call = swap()
    call.arguments["source"] = call.arguments["destination"][:4]
    require_refused(ops, call, ("destination: shares memory with source",), ValueError)
    call = gather()
    call.arguments["out[0]"] = call.arguments["key_cache"].reshape(-1, 2, 16)[:9]
    require_refused(ops, call, ("out[0]: shares memory with key_cache",), ValueError)


# --- values of indices ----------------------------------------------------------------------------------

INDEX_FAULTS = [
    (decode, "block_tables", (1, 1), 5),
    (decode, "block_tables", (0, 0), -1),
    (decode, "block_tables", (2, 0), 2**31 - 1),
    (decode, "seq_lens", (1,), 5),
    (decode, "seq_lens", (2,), -1),
    (varlen, "block_tables", (1, 0), 5),
    (varlen, "seq_lens", (0,), 2**31 - 1),
    (varlen, "cu_seqlens_q", (0,), 1),
    (varlen, "cu_seqlens_q", (2,), 1),
    (varlen, "cu_seqlens_q", (3,), 8),
    (gather, "block_tables", (0, 1), 5),
    (gather, "block_tables", (1, 0), -(2**31)),
    (gather, "seq_lens", (1,), 5),
    (write, "slot_mapping", (0,), 10),
    (write, "slot_mapping", (2,), 2**62),
    (copy, "block_pairs", (0, 0), 6),
    (copy, "block_pairs", (1, 1), -1),
    (copy, "block_pairs", (0, 1), 1),  # a destination twice
    (copy, "block_pairs", (1, 0), 5),  # a chain
    (swap, "block_pairs", (0, 0), 4),
    (swap, "block_pairs", (1, 1), 6),
    (swap, "block_pairs", (0, 1), -1),
    (swap, "block_pairs", (0, 1), 1),  # a destination twice
]


@pytest.mark.parametrize(
    ("make", "name", "place", "value"), INDEX_FAULTS, ids=lambda x: x().op if callable(x) else str(x)
)
def test_index_out_of_range(
    ops: HostOps, make: Callable[[], Call], name: str, place: tuple[int, ...], value: int
) -> None:
    """On the CPU always, with checks on elsewhere; the message tells where and what."""
    call = make()
    call.arguments[name][place] = value
    if ops.target.backend != "cpu" and call.op != "swap_blocks":
        call.arguments["check"] = True
    message = require_refused(ops, call, (name,), ValueError)
    assert str(value) in message, message
    if name != "block_pairs":
        assert f"[{', '.join(map(str, place))}]" in message, message


def test_checks_by_environment(target: Target) -> None:
    """PAGED_OPS_CHECK=1 turns them on where they are off."""
    if target.backend != "emulated":
        pytest.skip("on by default on the CPU; the emulator stands for every other backend")
    code = (
        "import numpy as np, paged_ops; from paged_ops.testing.backends import use_backend\n"
        "rows, cache = np.ones((1, 1, 8), 'f4'), np.ones((2, 4, 1, 8), 'f4'); slots = np.array([8])\n"
        "with use_backend('emulated'): paged_ops.write_kv_cache(rows, rows, cache, cache.copy(), slots)"
    )
    for check, raises in (("0", False), ("1", True)):
        environment = {**os.environ, "PAGED_OPS_CHECK": check}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert ("ValueError: slot_mapping[0] = 8" in done.stderr) == raises, done.stderr


def test_first_of_many_faults_is_reported(ops: HostOps) -> None:
    call = write()
    call.arguments["slot_mapping"] = np.array([3, 77, 88], np.int64)
    if ops.target.backend != "cpu":
        call.arguments["check"] = True
    assert "slot_mapping[1]" in require_refused(ops, call, ("slot_mapping",), ValueError)


def test_wild_entries_past_the_end_are_no_fault(ops: HostOps) -> None:
    for make in (decode, varlen, gather):
        call = make()
        if ops.target.backend != "cpu":
            call.arguments["check"] = True
        call.arguments["block_tables"][call.arguments["seq_lens"] <= 2, 1] = -(2**31)
        invoke(ops, call)


def test_out_too_small_for_a_gather(ops: HostOps) -> None:
    """On the CPU, where the lengths are at hand. Elsewhere rows past the end of `out` are not written."""
    call = gather()
    call.arguments["out[0]"], call.arguments["out[1]"] = (call.arguments[f"out[{i}]"][:4] for i in (0, 1))
    if ops.target.backend != "cpu":
        call.arguments["check"] = True
    require_refused(ops, call, ("out", "num_tokens", "seq_lens"), ValueError)


# --- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [np.nan, np.inf, 3e38, -1e39, "text", [1.0]], ids=str)
@pytest.mark.parametrize("make", [decode, varlen], ids=["decode", "varlen"])
def test_bad_scale(ops: HostOps, make: Callable[[], Call], scale: Any) -> None:
    call = make()
    call.arguments["scale"] = scale
    error = TypeError if isinstance(scale, (str, list)) else ValueError
    require_refused(ops, call, ("scale",), error)


def test_bad_num_tokens(ops: HostOps) -> None:
    call = gather()
    del call.arguments["out[0]"], call.arguments["out[1]"]
    call.writes = ()
    call.arguments["num_tokens"] = -1
    require_refused(ops, call, ("num_tokens",), ValueError)
    if ops.target.backend == "cpu":
        call.arguments["num_tokens"] = 4
        require_refused(ops, call, ("out", "num_tokens"), ValueError)


def test_gather_out_wants_two(ops: HostOps) -> None:
    call = gather()
    for out in ((call.arguments["out[0]"],), (call.arguments["out[0]"],) * 3):
        with pytest.raises(ValueError, match="^out: "):
            ops.gather_kv_cache(*list(call.arguments.values())[:4], out=out)


def test_no_caches_to_copy(ops: HostOps) -> None:
    with pytest.raises(ValueError, match="^caches: "):
        ops.copy_blocks([], np.zeros((0, 2), np.int64))


def test_varlen_without_cu_seqlens(ops: HostOps) -> None:
    call = varlen()
    call.arguments["cu_seqlens_q"] = None
    require_refused(ops, call, ("cu_seqlens_q",), TypeError)


# --- any shapes at all ----------------------------------------------------------------------------------

extent = st.integers(0, 3)
shapes = st.fixed_dictionaries(
    {
        "query": st.tuples(extent, st.integers(0, 4), st.sampled_from([8, 16, 12])),
        "key_cache": st.tuples(extent, extent, st.integers(0, 2), st.sampled_from([8, 16, 12])),
        "value_cache": st.tuples(extent, extent, st.integers(0, 2), st.sampled_from([8, 16])),
        "block_tables": st.tuples(extent, extent),
        "seq_lens": st.tuples(extent),
        "out": st.tuples(extent, st.integers(0, 4), st.sampled_from([8, 16])),
    }
)


def fits(s: dict[str, tuple[int, ...]]) -> bool:
    """Whether the shapes of a decode call agree with each other and with what is supported."""
    num_seqs, num_q_heads, head_dim = s["query"]
    num_blocks, block_size, num_kv_heads, key_head_dim = s["key_cache"]
    return (
        s["value_cache"][:3] == (num_blocks, block_size, num_kv_heads)
        and key_head_dim == head_dim
        and head_dim % 8 == 0
        and num_kv_heads > 0
        and num_q_heads > 0
        and num_q_heads % num_kv_heads == 0
        and block_size > 0
        and s["block_tables"][0] == s["seq_lens"][0] == num_seqs
        and s["out"] == (num_seqs, num_q_heads, s["value_cache"][3])
    )


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shapes=shapes, agree=st.booleans())
def test_any_shapes(ops: HostOps, shapes: dict[str, tuple[int, ...]], agree: bool) -> None:
    """A decode over empty sequences works exactly when the shapes fit."""
    if agree:  # by chance they hardly ever do
        num_seqs, num_q_heads, head_dim = shapes["query"]
        num_blocks, block_size, num_kv_heads, _ = shapes["key_cache"]
        shapes |= {
            "key_cache": (num_blocks, block_size, num_kv_heads, head_dim),
            "value_cache": (num_blocks, block_size, num_kv_heads, shapes["value_cache"][3]),
            "block_tables": (num_seqs, shapes["block_tables"][1]),
            "seq_lens": (num_seqs,),
            "out": (num_seqs, num_q_heads, shapes["value_cache"][3]),
        }
    dtypes = {"block_tables": np.int32, "seq_lens": np.int32}
    arguments = {name: np.zeros(shape, dtypes.get(name, F32)) for name, shape in shapes.items()}
    call = Call("paged_attention_decode", arguments, ("out",))
    arguments["out"][...] = 7
    if fits(shapes):
        invoke(ops, call)
        assert (arguments["out"] == 0).all()
    else:
        require_refused(ops, call, tuple(arguments), ValueError)


# --- devices --------------------------------------------------------------------------------------------


@each_argument
def test_tensor_without_memory(ops: HostOps, make: Callable[[], Call], name: str) -> None:
    """A meta tensor: has a shape, and nothing behind it."""
    torch = pytest.importorskip("torch")
    call = make()
    tensors = {key: arrays.to_torch(array, ops.target.device) for key, array in call.arguments.items()}
    tensors[name] = torch.empty_like(tensors[name], device="meta")
    spoilt = Call(call.op, tensors, (), call.options)
    with ops.target.use(), pytest.raises((ValueError, TypeError, RuntimeError, BufferError)) as caught:
        invoke(paged_ops, spoilt)
    if not str(caught.value).startswith(tuple(map(bare, call.arguments))):
        pytest.fail(f"wanted an argument named first: {caught.value!r:.200}", pytrace=False)
