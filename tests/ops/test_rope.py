"""rope_and_write_kv_cache: against the oracle, bit by bit against its parts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_bad_input as bad

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, Case, build
from paged_ops.testing.checks import check_rope, require_same_bits, require_same_memory, rows_to_rotate
from paged_ops.testing.covering import covering


def rope_cases(target: Target) -> list[tuple[Case, dict[str, Any]]]:
    """Widths that fill vectors and packets and that do not, all of a row and little of it."""
    axes = {
        "dtype": tuple(arrays.DTYPES),
        "dims": (
            (64, 64, 64),
            (128, 128, 128),
            (256, 256, 64),
            (576, 512, 64),
            (576, 320, 576),
            (40, 80, 40),
            (80, 80, 20),
            (8, 8, 2),
            (64, 8, 24),
        ),
        "heads": ((1, 1), (7, 7), (6, 2)),
        "block_size": (1, 16),
        "layout": tuple(LAYOUTS),
        "strided": (False, True),
        "interleaved": (False, True),
        "in_place": (False, True),
        "positions_dtype": ("int64", "int32"),
    }
    cases = []
    for seed, row in enumerate(covering(axes, seed=6)):
        head_dim, value_head_dim, rotary_dim = row.pop("dims")
        num_q_heads, num_kv_heads = row.pop("heads")
        options = {name: row.pop(name) for name in ("interleaved", "in_place", "positions_dtype")}
        case = Case(
            (0, 1, 17, 40),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            seed=seed,
            **row,
        )
        cases.append((case, options | {"rotary_dim": rotary_dim}))
    return cases


@pytest.mark.grid(cases=rope_cases)
def test_against_the_oracle(ops: HostOps, case: tuple[Case, dict[str, Any]]) -> None:
    check_rope(ops, case[0], **case[1])


@pytest.mark.grid(cases=rope_cases)
def test_bits_are_those_of_two_steps(ops: HostOps, case: tuple[Case, dict[str, Any]]) -> None:
    """Keys rotated as queries are, with nowhere to be written, and then written."""
    options = dict(case[1])
    interleaved = options.pop("interleaved")
    del options["in_place"]
    query, key, value, slots, positions, table = rows_to_rotate(case[0], **options)
    one, two, untouched = build(case[0]), build(case[0]), build(case[0])
    fused = ops.rope_and_write_kv_cache(
        query, key, value, one.key_cache, one.value_cache, slots, positions, table, interleaved=interleaved
    )
    nowhere = np.full(len(key), -1)

    def rope(rows: np.ndarray) -> Any:
        caches = two.key_cache, two.value_cache
        return ops.rope_and_write_kv_cache(
            rows, key, value, *caches, nowhere, positions, table, interleaved=interleaved
        )

    turned = rope(key)
    require_same_memory("key_cache", untouched.key_cache, two.key_cache)
    ops.write_kv_cache(turned, value, two.key_cache, two.value_cache, slots)
    require_same_bits("query_out", rope(query), fused)
    require_same_memory("key_cache", two.key_cache, one.key_cache)
    require_same_memory("value_cache", two.value_cache, one.value_cache)


def quantised_cases(target: Target) -> list[tuple[Case, dict[str, Any]]]:
    """All forms of scales, in turns over the widths."""
    kinds = [(name, scales) for name in arrays.EIGHT_BITS for scales in ("number", "tensor", "head", "token")]
    cases = []
    for i, (case, options) in enumerate(rope_cases(target)):
        if i % 4 == 3:
            quantised: dict[str, Any] = {"cache_dtype": "int4", "scale_groups": (8, case.dim_value)}
        else:
            kind = kinds[(i - i // 4) % len(kinds)]  # every fourth is int4
            quantised = dict(zip(("cache_dtype", "scales"), kind, strict=True))
        cases.append((replace(case, **quantised), options))
    assert {(case.cache_dtype, case.scales) for case, _ in cases} >= set(kinds)
    return cases


@pytest.mark.grid(cases=quantised_cases)
def test_quantised_bits_are_those_of_two_steps(ops: HostOps, case: tuple[Case, dict[str, Any]]) -> None:
    """Keys rotated and rounded to their dtype, then written: numbers, scales and all around them."""
    which, options = case[0], dict(case[1])
    interleaved = options.pop("interleaved")
    in_place = options.pop("in_place")
    query, key, value, slots, positions, table = rows_to_rotate(which, **options)
    one, two = build(which), build(which)
    plain = build(replace(which, cache_dtype=None, scales="number", scale_groups=None))
    nowhere = np.full(len(key), -1)

    def rope(rows: np.ndarray) -> Any:
        caches = plain.key_cache, plain.value_cache
        return ops.rope_and_write_kv_cache(
            rows, key, value, *caches, nowhere, positions, table, interleaved=interleaved
        )

    turned, turned_query = rope(key), rope(query)
    for inputs in (one, two):
        scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        caches = inputs.key_cache, inputs.value_cache
        if inputs is two:
            ops.write_kv_cache(turned, value, *caches, slots, **scales)
            continue
        fused = ops.rope_and_write_kv_cache(
            query, key, value, *caches, slots, positions, table,
            interleaved=interleaved, query_out=query if in_place else None, **scales,
        )  # fmt: skip
    require_same_bits("query_out", turned_query, fused)
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        if isinstance(wanted := getattr(two, name), np.ndarray):
            require_same_memory(name, wanted, getattr(one, name))


def test_quantised_keys_are_the_oracles(ops: HostOps) -> None:
    """By a quarter, where rotation is exact: key, scale and value bit for bit."""
    case = Case((0, 5, 33), dtype="float16", num_q_heads=6, cache_dtype="int4", scale_groups=(16, 8))
    query, key, value, slots, positions, table = rows_to_rotate(case, 32)
    table[:, :16], table[:, 16:] = 0, 1
    wanted, actual = build(case), build(case)
    for inputs, run in ((wanted, reference), (actual, ops)):
        with np.errstate(invalid="ignore"):  # infinities times 0
            run.rope_and_write_kv_cache(
                query, key, value, inputs.key_cache, inputs.value_cache, slots, positions, table,
                k_scale=inputs.k_scale, v_scale=inputs.v_scale,
            )  # fmt: skip
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        require_same_memory(name, getattr(wanted, name), getattr(actual, name))


def test_torch_tensors(target: Target) -> None:
    for interleaved in (False, True):
        case = Case((0, 5, 33), dtype="bfloat16", layout="pool", block_size=4, num_q_heads=6)
        check_rope(HostOps(target, "torch"), case, 32, interleaved=interleaved, in_place=True)


def test_the_oracle_turns_pairs() -> None:
    """By a quarter: (x, y) becomes (-y, x); by nothing: all stays."""
    row = np.arange(1.0, 7.0).reshape(1, 1, 6)
    quarter, nothing = np.array([[0.0, 0, 1, 1]]), np.array([[1.0, 1, 0, 0]])
    assert reference.rope(row, [0], quarter).ravel().tolist() == [-3, -4, 1, 2, 5, 6]
    assert reference.rope(row, [0], quarter, interleaved=True).ravel().tolist() == [-2, 1, -4, 3, 5, 6]
    assert (reference.rope(row, [0], nothing) == row).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_of_one_tensor(ops: HostOps, interleaved: bool) -> None:
    """Queries, keys and values side by side as a projection gives them, the queries rotated in place."""
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their neighbours on the way to the device")
    case = Case((0, 5, 33), dtype="float16", num_q_heads=6)
    query, key, value, slots, positions, table = rows_to_rotate(case, 64)
    fused = np.concatenate([query, key, value], axis=1)
    wanted, actual = build(case), build(case)
    out = ops.rope_and_write_kv_cache(
        query,
        key,
        value,
        wanted.key_cache,
        wanted.value_cache,
        slots,
        positions,
        table,
        interleaved=interleaved,
    )
    parts = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    ops.rope_and_write_kv_cache(
        *parts, actual.key_cache, actual.value_cache, slots, positions, table,
        interleaved=interleaved, query_out=parts[0],
    )  # fmt: skip
    require_same_bits("query", out, fused[:, :6])
    require_same_bits("key", key, fused[:, 6:8])
    require_same_bits("value", value, fused[:, 8:])
    require_same_memory("key_cache", wanted.key_cache, actual.key_cache)


def test_what_is_not_finite_stays_in_its_pair(ops: HostOps) -> None:
    case = Case((5,), num_q_heads=2)
    query, key, value, slots, positions, table = rows_to_rotate(case, 32)
    query[0, 0, 3], query[1, 1, 40] = np.inf, np.nan
    inputs = build(case)
    out = ops.rope_and_write_kv_cache(
        query, key, value, inputs.key_cache, inputs.value_cache, slots, positions, table
    )
    finite = np.isfinite(out)
    assert not finite[0, 0, 3] and not finite[0, 0, 19] and not finite[1, 1, 40]
    assert finite.sum() == out.size - 3


def test_no_tokens_and_no_slots(ops: HostOps) -> None:
    case = Case((5,))
    query, key, value, slots, positions, table = rows_to_rotate(case, 64)
    inputs, untouched = build(case), build(case)
    caches = inputs.key_cache, inputs.value_cache
    none = ops.rope_and_write_kv_cache(
        query[:0], key[:0], value[:0], *caches, slots[:0], positions[:0], table[:0]
    )
    assert none.shape == (0, *query.shape[1:])
    ops.rope_and_write_kv_cache(query, key, value, *caches, slots[:0], positions, table)
    require_same_memory("key_cache", untouched.key_cache, caches[0])
    require_same_memory("value_cache", untouched.value_cache, caches[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_in_a_full_graph(target: Target, interleaved: bool, in_place: bool) -> None:
    torch = pytest.importorskip("torch")
    case = Case((0, 5, 33), dtype="bfloat16", num_q_heads=6)

    def arguments() -> list[Any]:
        inputs = build(case)
        query, key, value, *rest = rows_to_rotate(case, 32)
        given = [query, key, value, inputs.key_cache, inputs.value_cache, *rest]
        return [arrays.to_torch(array, target.device) for array in given]

    def layer(*x: Any) -> Any:
        out = x[0] if in_place else None
        out = paged_ops.rope_and_write_kv_cache(*x, interleaved=interleaved, query_out=out)
        return out + 1, x[3] * 2

    with target.use():
        eager, traced = arguments(), arguments()
        wanted = layer(*eager)
        actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(*traced)
        for a, b in zip([*wanted, *eager], [*actual, *traced], strict=True):
            assert arrays.same_bits(a, b)


@pytest.mark.parametrize(("cache_dtype", "scales"), [("int8", "number"), ("int8", "token"), ("int4", "")])
def test_quantised_in_a_full_graph(target: Target, cache_dtype: str, scales: str) -> None:
    torch = pytest.importorskip("torch")
    groups = (8, 16) if cache_dtype == "int4" else None
    case = Case((0, 5, 33), dtype="bfloat16", cache_dtype=cache_dtype, scales=scales, scale_groups=groups)

    def arguments() -> list[Any]:
        inputs = build(case)
        query, key, value, *rest = rows_to_rotate(case, 32)
        scales = inputs.k_scale, inputs.v_scale
        given = [query, key, value, inputs.key_cache, inputs.value_cache, *rest, *scales]
        return [x if isinstance(x, float) else arrays.to_torch(x, target.device) for x in given]

    def layer(*x: Any) -> Any:
        out = paged_ops.rope_and_write_kv_cache(*x[:-2], k_scale=x[-2], v_scale=x[-1])
        return out + 1

    with target.use():
        eager, traced = arguments(), arguments()
        wanted = layer(*eager)
        torch._dynamo.reset()
        actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(*traced)
        for a, b in zip([wanted, *eager], [actual, *traced], strict=True):
            assert isinstance(a, float) or arrays.same_bits(a, b)


# --- bad input ------------------------------------------------------------------------------------------


def rope() -> bad.Call:
    ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    return bad.Call(
        "rope_and_write_kv_cache",
        {
            "query": ones(3, 4, 16),
            "key": ones(3, 2, 16),
            "value": ones(3, 2, 8),
            "key_cache": np.zeros((5, 2, 2, 16), np.float32),
            "value_cache": np.zeros((5, 2, 2, 8), np.float32),
            "slot_mapping": np.array([0, -1, 9], np.int64),
            "positions": np.array([0, 5, 3], np.int64),
            "cos_sin_cache": ones(6, 8),
            "query_out": ones(3, 4, 16),
        },
        ("key_cache", "value_cache", "query_out"),
        ("query_out",),
        {
            "query": (0, 1, 2),
            "key": (0, 1, 2),
            "value": (0, 1, 2),
            "key_cache": (0, 1, 2, 3),
            "value_cache": (0, 1, 2, 3),
            "positions": (0,),
            "cos_sin_cache": (1,),
            "query_out": (0, 1, 2),
        },
    )


SPOILINGS: list[Callable[..., None]] = [
    bad.test_wrong_dtype,
    bad.test_bytes_of_the_other_order,
    bad.test_wrong_number_of_dimensions,
    bad.test_wrong_extent,
    bad.test_strides,
    bad.test_masked_arrays_are_refused,
    bad.test_tensor_without_memory,
]


@pytest.mark.parametrize("name", list(rope().arguments))
@pytest.mark.parametrize("spoil", SPOILINGS, ids=lambda spoil: spoil.__name__)
def test_spoilt_arguments(ops: HostOps, spoil: Callable[..., None], name: str) -> None:
    if spoil is bad.test_wrong_dtype and name == "positions":
        pytest.skip("takes either integer: see below")
    spoil(ops, rope, name)


@pytest.mark.parametrize("name", list(rope().arguments))
def test_no_tensor(ops: HostOps, name: str) -> None:
    for value in (3, "text", [1.0]):
        bad.test_not_a_tensor(ops, rope, name, value)


def test_outputs(ops: HostOps) -> None:
    bad.invoke(ops, rope())
    bad.test_outputs_must_be_writable_and_must_not_overlap_themselves(ops, rope)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("slot_mapping", 2, 10), ("positions", 1, 6), ("positions", 2, -1), ("positions", 0, 2**40)],
)
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_index_out_of_range(ops: HostOps, name: str, place: int, value: int, dtype: Any) -> None:
    call = rope()
    if name == "positions" and value < 2**31:
        call.arguments[name] = call.arguments[name].astype(dtype)
    call.arguments[name][place] = value
    if ops.target.backend != "cpu":
        call.arguments["check"] = True
    message = bad.require_refused(ops, call, (name,), ValueError)
    assert f"{name}[{place}] = {value}:" in message


def test_unchecked_positions_read_nothing_outside(target: Target) -> None:
    """On CUDA, whose checks are off: whatever comes out, the neighbours of the table do not."""
    if target.backend == "cpu":
        pytest.skip("always checked")
    call = rope()
    table = np.full((8, 8), np.nan, np.float32)
    table[1:7] = 1
    call.arguments |= {"cos_sin_cache": table[1:7], "positions": np.array([-1, 6, 2**40], np.int64)}
    assert np.isfinite(bad.invoke(HostOps(target), call)).all()


@pytest.mark.parametrize("width", [0, 3, 7, 18])
def test_rotary_dims_that_cannot_be(ops: HostOps, width: int) -> None:
    call = rope()
    call.arguments["cos_sin_cache"] = np.ones((6, width), np.float32)
    message = bad.require_refused(ops, call, ("cos_sin_cache",), ValueError)
    assert f"rotary_dim is {width}, wanted an even number from 2 to 16" in message


def test_other_refusals(ops: HostOps) -> None:
    for changes, error, words in [
        (
            {"slot_mapping": np.zeros(4, np.int64)},
            ValueError,
            "slot_mapping: shape is .* at most the 3 tokens",
        ),
        (
            {"positions": np.zeros(3, np.float32)},
            TypeError,
            "positions: dtype is float32, wanted int64 or int32",
        ),
        ({"cos_sin_cache": np.ones((0, 8), np.float32)}, ValueError, "cos_sin_cache: has no positions"),
        ({"interleaved": 1}, TypeError, "interleaved: is 1"),
        ({"check": "no"}, TypeError, "check: is 'no'"),
    ]:
        call = rope()
        call.arguments |= changes
        with pytest.raises(error, match=words):
            bad.invoke(ops, call)


def test_quantised_caches_want_scales(ops: HostOps) -> None:
    ones: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ValueError, "^k_scale: is None, wanted a number"),
        ({"k_scale": 1.0}, ValueError, "^v_scale: is None, wanted a number"),
        ({"k_scale": np.ones((5, 2, 1), np.float32), "v_scale": 1.0}, ValueError, "^k_scale: .*num_kv_heads"),
        (ones | {"query": np.ones((3, 4, 16), np.float16)}, TypeError, "^query: dtype"),
        (ones | {"key": np.ones((3, 2, 16), np.int8)}, ValueError, "^key: dtype"),
    ]
    for changes, error, words in cases:
        call = rope()
        for name in ("key_cache", "value_cache"):
            call.arguments[name] = call.arguments[name].astype(np.int8)
        call.arguments |= changes
        with pytest.raises(error, match=words):
            bad.invoke(ops, call)
        assert not call.arguments["key_cache"].any()
    call = rope()
    call.arguments |= ones
    with pytest.raises(ValueError, match="^k_scale: is given, and key_cache is float32"):
        bad.invoke(ops, call)


def test_scales_stay_apart(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    scales = np.ones((5, 2, 2), np.float32)
    for changes in (
        {"k_scale": scales, "v_scale": scales},
        {"k_scale": scales, "v_scale": 1.0, "cos_sin_cache": scales.reshape(-1)[:16].reshape(2, 8)},
        {"k_scale": 1.0, "v_scale": (out := np.ones((3, 4, 16), np.float32))[0, 0, :2], "query_out": out},
    ):
        call = rope()
        for name in ("key_cache", "value_cache"):
            call.arguments[name] = call.arguments[name].astype(np.int8)
        call.arguments |= changes
        call.arguments["positions"] = np.zeros(3, np.int64)
        with pytest.raises(ValueError, match="shares memory with"):
            bad.invoke(ops, call)


def test_memory_shared_between_arguments(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    memory = np.ones((4, 4, 16), np.float32)
    for changes, names in [
        ({"query": memory[:3], "query_out": memory[1:]}, ("query_out: shares memory with query",)),
        ({"key": memory[:3, :2], "query_out": memory[:3]}, ("query_out: shares memory with key",)),
        ({"key_cache": np.zeros((5, 2, 2, 16), np.float32)}, ()),
    ]:
        call = rope()
        call.arguments |= changes
        if not names:
            call.arguments["query"] = call.arguments["key_cache"].reshape(5, 4, 16)[:3]
            names = ("key_cache: shares memory with query", "query: shares memory")
        bad.require_refused(ops, call, names, ValueError)
