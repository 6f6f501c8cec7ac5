"""Quantised caches: what every code is worth, what every number becomes, scales of all forms, bad ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scale_checks import require_bad_scale

import paged_ops
from paged_ops import reference, reference_numbers
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, Case, build
from paged_ops.testing.checks import check_attention, check_write, require_same_bits
from paged_ops.testing.grids import quantised_cases

F32 = np.float32


@pytest.mark.grid(cases=quantised_cases)
def test_attention(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.parametrize("scales", ["number", "tensor", "head", "token"])
@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_write(ops: HostOps, dtype: str, cache_dtype: str, scales: str) -> None:
    for layout, head_dim in zip(LAYOUTS, (64, 8, 40, 128, 80, 256), strict=True):
        case = Case((0, 9, 33), None, dtype, 6, 3, head_dim, 24, 4, layout, strided=layout == "HND")
        check_write(ops, replace(case, cache_dtype=cache_dtype, scales=scales))


# --- codes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_what_each_code_is_worth(ops: HostOps, dtype: str, cache_dtype: str) -> None:
    """A sequence of one token has its value for a result: all 256 codes, subnormals and NaN among them."""
    kind = arrays.CACHE_DTYPES[cache_dtype]
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256).view(kind)
    zeros = np.zeros((1, 1, 1, 256), kind)
    query = np.zeros((1, 1, 256), arrays.DTYPES[dtype])
    tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    scale = 0.5 if cache_dtype != "float8_e5m2" else 2.0**-3
    out = ops.paged_attention_decode(query, zeros, codes, tables, lens, k_scale=1.0, v_scale=scale)
    wanted = (codes.astype(F32) * F32(scale)).astype(out.dtype).reshape(out.shape)
    nan = np.isnan(wanted.astype(F32))
    require_same_bits("out", np.where(nan, 0, wanted + 0), np.where(nan, 0, out))
    assert (np.isnan(out.astype(F32)) == nan).all()


@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_what_each_number_becomes(ops: HostOps, dtype: str, cache_dtype: str) -> None:
    """All numbers of 16 bits, or as many of 32: to the nearest code, ties to even, saturated."""
    kind = arrays.DTYPES[dtype]
    if kind.itemsize == 2:
        numbers = np.arange(2**16, dtype=np.uint16).view(kind)
    else:
        numbers = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint64).astype(np.uint32)
        codes = np.arange(256, dtype=np.uint8).view(arrays.CACHE_DTYPES[cache_dtype]).astype(F32)
        codes = np.sort(codes[np.isfinite(codes)])
        numbers = numbers.view(F32)
        numbers[:255] = np.resize((codes[1:] + codes[:-1]) / 2, 255)  # ties
    rows = numbers.reshape(-1, 1, 256)
    caches = [np.zeros((len(rows), 1, 1, 256), arrays.CACHE_DTYPES[cache_dtype]) for _ in range(4)]
    slots = np.arange(len(rows))
    ops.write_kv_cache(rows, rows, *caches[:2], slots, k_scale=1.0, v_scale=0.37)
    reference.write_kv_cache(rows, rows, *caches[2:], slots, k_scale=1.0, v_scale=0.37)
    require_same_bits("key_cache", caches[2], caches[0])
    require_same_bits("value_cache", caches[3], caches[1])
    assert np.isfinite(caches[0][~np.isnan(rows[:, :, None])].astype(F32)).all()


@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
def test_a_row_comes_back_as_near_as_the_format_allows(ops: HostOps, cache_dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((32, 2, 64)) * 10.0 ** rng.uniform(-30, 30, (32, 2, 1))).astype(F32)
    cache = [np.zeros((8, 4, 2, 64), arrays.CACHE_DTYPES[cache_dtype]) for _ in range(2)]
    scales = [np.full((8, 4, 2), np.nan, F32) for _ in range(2)]
    ops.write_kv_cache(rows, rows, *cache, np.arange(32), k_scale=scales[0], v_scale=scales[1])
    back = reference_numbers.dequantise(cache[0], scales[0]).reshape(rows.shape)
    largest = np.abs(rows).max(axis=2, keepdims=True)
    relative, smallest = {
        "float8_e4m3fn": (2.0**-4, 2.0**-10 / 448),
        "float8_e5m2": (2.0**-3, 2.0**-17 / 57344),
        "int8": (0.0, 0.5 / 127),
    }[cache_dtype]
    assert (np.abs(back - rows) <= 1.001 * np.maximum(relative * np.abs(rows), smallest * largest)).all()


# --- bits, NaN, frameworks ------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
def test_bits_do_not_depend_on_the_batch_or_the_blocks(ops: HostOps, cache_dtype: str, scales: str) -> None:
    from paged_ops.testing.cases import one_sequence_per_token, select_sequences

    for dtype, q_lens in itertools.product(arrays.DTYPES, (None, (40, 3, 1))):
        case = Case((530, 9, 700), q_lens, dtype, 6, 2, cache_dtype=cache_dtype, scales=scales)
        inputs = build(case)
        out, lse = inputs.attention(ops)
        if q_lens is not None:
            alone = one_sequence_per_token(inputs).attention(ops)
        else:
            parts = [select_sequences(inputs, [seq]).attention(ops) for seq in range(3)]
            alone = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
        require_same_bits("out", alone[0], out)
        require_same_bits("lse", alone[1], lse)


@pytest.mark.parametrize(
    ("form", "scale"), [*itertools.product(("number", "head", "token"), (1e33, 1e-28)), ("token", 1e36)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
def test_value_scales_of_any_size(
    ops: HostOps, cache_dtype: str, dtype: str, scale: float, form: str
) -> None:
    """Equal logits give the mean of two values, large or small."""
    keys = np.zeros((1, 4, 2, 64), arrays.CACHE_DTYPES[cache_dtype])
    values = np.zeros_like(keys)
    values[:, 0], values[:, 1] = 1, 2
    shape = {"number": None, "head": 2, "token": (1, 4, 2)}[form]
    scales = {"k_scale": 1.0, "v_scale": scale} if shape is None else {
        "k_scale": np.ones(shape, F32), "v_scale": np.full(shape, scale, F32)
    }  # fmt: skip
    query = np.zeros((1, 4, 64), arrays.DTYPES[dtype])
    tables, lens = np.zeros((1, 1), np.int32), np.full(1, 2, np.int32)
    out = ops.paged_attention_decode(query, keys, values, tables, lens, **scales)
    np.testing.assert_allclose(out.astype(F32), F32(1.5 * scale), rtol=0.01)


@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
def test_scales_of_unused_tokens_do_not_show(ops: HostOps, cache_dtype: str) -> None:
    """Those past a sequence's end, and of tokens that only later rows see."""
    case = Case((70,), (9,), num_q_heads=8, cache_dtype=cache_dtype, scales="token", block_size=16)
    inputs = build(case)
    assert np.isnan(inputs.k_scale).any()  # of what was never written
    out, _ = inputs.attention(ops)
    for scale, bits in itertools.product(
        (inputs.k_scale, inputs.v_scale), (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF)
    ):
        place = inputs.block_tables[0, 66 // 16], 66 % 16
        before = scale[place].copy()
        scale[place] = np.array(bits, np.uint32).view(F32)
        changed, _ = inputs.attention(ops)
        require_same_bits("out", out[:5], changed[:5])
        assert np.isnan(changed[5:]).all()
        scale[place] = before


@pytest.mark.parametrize("scales", ["number", "head", "token"])
def test_a_shared_prefix(ops: HostOps, scales: str) -> None:
    """Attended to once, with the scales of its own blocks."""
    case = Case((100, 70), (3, 1), num_q_heads=6, cache_dtype="int8", scales=scales)
    inputs = build(case)
    inputs.block_tables[1, :2] = inputs.block_tables[0, :2]
    tensors = inputs.query, inputs.key_cache, inputs.value_cache
    tables = inputs.block_tables[0, :2].copy(), 32, inputs.block_tables, inputs.seq_lens, inputs.cu_seqlens_q
    options = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    out = ops.paged_attention_shared_prefix(*tensors, *tables, **options)
    np.testing.assert_allclose(out, inputs.attention(reference)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scales", ["number", "head", "token"])
@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
def test_torch_tensors_eager_and_compiled(target: Target, cache_dtype: str, scales: str) -> None:
    torch = pytest.importorskip("torch")
    case = Case((33, 70), None, "bfloat16", 6, 2, cache_dtype=cache_dtype, scales=scales)
    inputs = build(case)
    wanted = inputs.attention(HostOps(target))
    tensors = inputs.map(arrays.to_torch)

    def step(x: Any) -> Any:
        return x.attention(paged_ops)

    with target.use():
        assert arrays.same_bits(wanted[0], step(tensors)[0])
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for want, actual in zip(wanted, compiled(tensors), strict=True):
            assert arrays.same_bits(want, actual)


# --- faults must show -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
def test_faults_of_scales_are_seen(ops: HostOps, cache_dtype: str) -> None:
    case = Case((33, 300), None, num_q_heads=6, num_kv_heads=3, cache_dtype=cache_dtype, scales="head")
    inputs = build(case)
    token = build(replace(case, scales="token"))
    faults = [
        (case, replace(inputs, k_scale=inputs.v_scale)),
        (case, replace(inputs, v_scale=inputs.k_scale)),
        (case, replace(inputs, k_scale=np.roll(inputs.k_scale, 1))),
        (case, replace(inputs, v_scale=1 / inputs.v_scale)),
        (replace(case, scales="token"), replace(token, k_scale=np.roll(token.k_scale, 1, axis=0))),
        (replace(case, scales="token"), replace(token, v_scale=np.roll(token.v_scale, 1, axis=1))),
        (replace(case, scales="token"), replace(token, v_scale=np.roll(token.v_scale, 1, axis=2))),
    ]
    for right, wrong in faults:
        check_attention(lambda inputs: inputs.attention(ops), right)
        with pytest.raises(AssertionError, match="wrong"):
            check_attention(lambda _, wrong=wrong: wrong.attention(ops), right)


# --- bad input ------------------------------------------------------------------------------------------

BAD_SCALES: list[tuple[Any, type[Exception], str]] = [
    (None, ValueError, "is None, wanted a number or float32"),
    *((x, ValueError, "wanted a finite number above 0") for x in (0.0, -1.0, np.nan, np.inf, 1e39, 1e-60)),
    *(
        (np.array([x, 1.0], F32), ValueError, "wanted a finite number above 0")
        for x in (0.0, -1.0, np.nan, np.inf)
    ),
    ("1", TypeError, "wanted a number"),
    (np.ones(2, np.float64), TypeError, "wanted float32"),
    (np.ones(3, F32), ValueError, r"shape is \(3,\), wanted a number or float32"),
    (np.ones((2, 1), F32), ValueError, "shape is"),
    (np.ones((4, 16, 3), F32), ValueError, "num_kv_heads"),
    (np.ones((4, 8, 2), F32), ValueError, "block_size"),
    (np.ones((5, 16, 2), F32), ValueError, "num_blocks"),
]


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("scale", "error", "message"), BAD_SCALES)
def test_bad_scales_are_named(
    ops: HostOps, name: str, scale: Any, error: type[Exception], message: str
) -> None:
    scales = {"k_scale": 1.0, "v_scale": 1.0} | {name: scale}
    require_bad_scale(ops, np.zeros((4, 16, 2, 8), np.int8), scales, error, f"^{name}: .*{message}")


def test_plain_and_quantised_do_not_mix(ops: HostOps) -> None:
    plain, quantised = np.zeros((4, 16, 2, 8), F32), np.zeros((4, 16, 2, 8), np.int8)
    rows, slots = np.ones((3, 2, 8), F32), np.arange(3)
    with pytest.raises(TypeError, match="^value_cache: dtype is int8, wanted float32"):
        ops.write_kv_cache(rows, rows, plain, quantised, slots, k_scale=1.0, v_scale=1.0)
    with pytest.raises(TypeError, match="^value_cache: dtype is float32, wanted int8"):
        ops.write_kv_cache(rows, rows, quantised, plain, slots, k_scale=1.0, v_scale=1.0)
    with pytest.raises(ValueError, match="^k_scale: is given, and key_cache is float32"):
        ops.write_kv_cache(rows, rows, plain, plain.copy(), slots, k_scale=1.0)


@pytest.mark.parametrize("rope", [False, True])
def test_what_is_written_stays_apart_from_its_scales(ops: HostOps, rope: bool) -> None:
    """Found scales from each other, from scales that are read, and all of them from the numbers."""
    rows = np.ones((3, 2, 8), F32)
    memory = np.zeros((4, 16, 2, 8), np.int8)
    within = memory.reshape(-1)[:8].view(F32)
    within[:] = 1
    scales = np.ones((4, 16, 2), F32)
    table = np.zeros((8, 8), F32)

    def write(key_cache: Any, **given: Any) -> None:
        caches = key_cache, np.zeros_like(memory)
        if rope:
            ops.rope_and_write_kv_cache(
                rows.copy(), rows, rows, *caches, np.arange(3), np.arange(3), table, **given
            )
        else:
            ops.write_kv_cache(rows, rows, *caches, np.arange(3), **given)

    for key_cache, k_scale, v_scale in (
        (np.zeros_like(memory), scales, scales),
        (np.zeros_like(memory), scales[0, 0], scales),
        (np.zeros_like(memory), scales, scales[0, 0]),
        (memory, within, 1.0),
        (memory, 1.0, within),
    ):
        with pytest.raises(ValueError, match="share"):
            write(key_cache, k_scale=k_scale, v_scale=v_scale)
    assert (scales == 1).all() and not memory.reshape(-1)[8:].any()


@pytest.mark.parametrize("size", [1e-25, 1e-17, 1e17, 1e25])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_of_any_size(ops: HostOps, dtype: str, size: float) -> None:
    """Scales that the write finds for very small and very large rows; keys so that logits are as ever."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 300, 2, 64))
    query = (rng.standard_normal((1, 2, 64)) / size).astype(arrays.DTYPES[dtype])
    key, value = (size * rows).astype(arrays.DTYPES[dtype])
    caches = [np.zeros((20, 16, 2, 64), np.int8) for _ in range(2)]
    scales = {name: np.ones((20, 16, 2), F32) for name in ("k_scale", "v_scale")}
    ops.write_kv_cache(key, value, *caches, np.arange(300), **scales)
    tables, lens = np.arange(20, dtype=np.int32)[None], np.array([300], np.int32)
    out = ops.paged_attention_decode(query, *caches, tables, lens, **scales)
    wanted = reference.paged_attention_decode(query, *caches, tables, lens, **scales)
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=0, atol=0.01 * size)


def test_scales_that_are_written_have_no_gradient(ops: HostOps) -> None:
    torch = pytest.importorskip("torch")
    caches = [torch.zeros(4, 16, 2, 8, dtype=torch.int8) for _ in range(2)]
    rows, scales = torch.ones(3, 2, 8), torch.ones(4, 16, 2, requires_grad=True)
    with pytest.raises(ValueError, match="^k_scale: requires a gradient"):
        paged_ops.write_kv_cache(rows, rows, *caches, torch.arange(3), k_scale=scales, v_scale=1.0)
    one = torch.ones(1).expand(4, 16, 2)
    with pytest.raises(ValueError, match="^k_scale: "):
        paged_ops.write_kv_cache(rows, rows, *caches, torch.arange(3), k_scale=one, v_scale=1.0)
    assert not any(cache.any() for cache in caches)


def test_supports_says_so() -> None:
    shape: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    for dtype, cache_dtype in itertools.product(arrays.DTYPES, arrays.EIGHT_BITS):
        assert paged_ops.supports(dtype=dtype, cache_dtype=cache_dtype, **shape)
    assert not paged_ops.supports(dtype="float32", cache_dtype="bfloat16", **shape)
    assert not paged_ops.supports(dtype="int8", cache_dtype="int8", **shape)
