"""vLLM's writes to its caches against the oracle's write, laid out number by number; all memory compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_cases import (  # noqa: E402
    as_bytes,
    kv_cache_dtype,
    packed_keys,
    put,
    put_scale,
    transposed_values,
)

from paged_ops import reference, reference_numbers  # noqa: E402
from paged_ops.compat import vllm  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402
from paged_ops.testing.cases import Case, Inputs, build  # noqa: E402
from paged_ops.testing.checks import require_same_memory, rows_to_write  # noqa: E402

CASES = [
    Case((20, 16, 3)),
    Case((20, 16, 3), dtype="bfloat16", head_dim=80, block_size=8, strided=True),
    Case((20, 16, 3), dtype="float16", num_kv_heads=4, block_size=32),
    Case((20, 16, 3), dtype="bfloat16", cache_dtype="float8_e4m3fn"),
    Case((20, 16, 3), dtype="float32", cache_dtype="float8_e5m2", scales="tensor", head_dim=96),
]


def scales_of(inputs: Inputs, device: str = "cpu") -> tuple[Any, Any]:
    if inputs.case.cache_dtype is None:
        return 1.0, 1.0
    return put_scale(inputs.k_scale, device), put_scale(inputs.v_scale, device)


def written(case: Case) -> Inputs:
    """The case's caches after the oracle has written the case's rows."""
    inputs = build(case)
    quantised = case.cache_dtype is not None
    scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale} if quantised else {}
    key, value, slots = rows_to_write(case)
    reference.write_kv_cache(key, value, inputs.key_cache, inputs.value_cache, slots, **scales)
    return inputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reshape_and_cache(target: Target, case: Case) -> None:
    """Every slot that is not written keeps its bits, NaN included; slots below 0 are skipped."""
    inputs, wanted = build(case), written(case)
    key_cache = put(as_bytes(packed_keys(inputs.key_cache)), target.device)
    value_cache = put(as_bytes(transposed_values(inputs.value_cache)), target.device)
    rows = [arrays.to_torch(x, target.device) for x in rows_to_write(case)]
    addresses = key_cache.data_ptr(), value_cache.data_ptr()
    with target.use():
        result = vllm.reshape_and_cache(
            *rows[:2],
            key_cache,
            value_cache,
            rows[2],
            kv_cache_dtype(case),
            *scales_of(inputs, target.device),
        )
    assert result is None and addresses == (key_cache.data_ptr(), value_cache.data_ptr())
    assert arrays.same_bits(key_cache, as_bytes(packed_keys(wanted.key_cache)))
    assert arrays.same_bits(value_cache, as_bytes(transposed_values(wanted.value_cache)))


FLASH_CASES = [
    Case((20, 16, 3), layout="NHD", dtype="bfloat16"),
    Case((20, 16, 3), layout="HND", head_dim=40, block_size=5),
    Case((20, 16, 3), layout="interleaved", dtype="float16", strided=True),
    Case((20, 16, 3), layout="pool HND", dtype="bfloat16"),
    Case((20, 16, 3), layout="HND", dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="head"),
    Case((20, 16, 3), layout="interleaved", cache_dtype="float8_e5m2", scales="tensor"),
    Case((20, 16, 3), layout="NHD", dtype="float16", cache_dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize("as_bytes_too", [True, False], ids=["uint8", "float8"])
@pytest.mark.parametrize("case", FLASH_CASES, ids=str)
def test_reshape_and_cache_flash(target: Target, case: Case, as_bytes_too: bool) -> None:
    """Written through the strides of NHD, HND and pools, and nothing around them."""
    if target.device != "cpu":
        pytest.skip("memory around views is compared on the host")
    inputs, wanted = build(case), written(case)
    caches = [arrays.to_torch(x) for x in (inputs.key_cache, inputs.value_cache)]
    if case.cache_dtype is not None and as_bytes_too:
        caches = [cache.view(torch.uint8) for cache in caches]
    rows = [arrays.to_torch(x) for x in rows_to_write(case)]
    with target.use():
        vllm.reshape_and_cache_flash(*rows[:2], *caches, rows[2], kv_cache_dtype(case), *scales_of(inputs))
    require_same_memory("key_cache", wanted.key_cache, inputs.key_cache)
    require_same_memory("value_cache", wanted.value_cache, inputs.value_cache)


MLA = [
    pytest.param(Case((20, 16, 3), num_kv_heads=1, num_q_heads=1, **options), rank, id=f"{rank} {options}")
    for rank in (64, 512)
    for options in (
        {"head_dim": rank + 64, "dtype": "bfloat16"},
        {"head_dim": rank + 64, "layout": "pool", "strided": True},
        {"head_dim": rank + 64, "dtype": "float16", "cache_dtype": "float8_e4m3fn", "scales": "tensor"},
        {"head_dim": rank + 64, "dtype": "bfloat16", "cache_dtype": "float8_e5m2"},
    )
]


@pytest.mark.parametrize(("case", "rank"), MLA)
def test_concat_and_cache_mla(target: Target, case: Case, rank: int) -> None:
    """Latent and rotated key side by side, with one scale for both."""
    if target.device != "cpu":
        pytest.skip("memory around views is compared on the host")
    inputs, wanted = build(case), build(case)
    rows, _, slots = rows_to_write(case)
    parts = slice(0, rank), slice(rank, None)
    scale, scales = 1.0, {}
    if case.cache_dtype is not None:
        scale = inputs.k_scale
        scales = {"k_scale": scale, "v_scale": scale}
    halves = [wanted.key_cache[..., part] for part in parts]
    reference.write_kv_cache(*(rows[..., part] for part in parts), *halves, slots, **scales)
    cache = as_bytes(inputs.key_cache[:, :, 0])
    given = [arrays.to_torch(x) for x in (*(rows[:, 0, part] for part in parts), cache, slots)]
    with target.use():
        vllm.concat_and_cache_mla(*given, kv_cache_dtype(case), put_scale(scale))
    require_same_memory("kv_cache", wanted.key_cache, inputs.key_cache)


# --- bad input --------------------------------------------------------------------------------------------


def flash_arguments() -> dict[str, Any]:
    inputs = build(CASES[0])
    key, value, slots = map(put, rows_to_write(CASES[0]))
    return {
        "key": key,
        "value": value,
        "key_cache": put(inputs.key_cache),
        "value_cache": put(inputs.value_cache),
        "slot_mapping": slots,
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }


def as_fp8(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    zeros = {
        name: torch.zeros_like(arguments[name], dtype=torch.uint8) for name in ("key_cache", "value_cache")
    }
    return {"kv_cache_dtype": "fp8", **zeros, **changes}


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "key of another dtype": (
        lambda a: {"key": a["key"].half()},
        TypeError,
        r"^key: dtype is float16.*\(from paged_ops.write_kv_cache\)",
    ),
    "int32 slots": (lambda a: {"slot_mapping": a["slot_mapping"].int()}, TypeError, "^slot_mapping: dtype"),
    "more slots than rows": (
        lambda a: {"key": a["key"][:3], "value": a["value"][:3]},
        ValueError,
        "^slot_mapping: shape",
    ),
    "a slot too large": (
        lambda a: {"slot_mapping": a["slot_mapping"].clone().fill_(10**6)},
        ValueError,
        "^slot_mapping",
    ),
    "values of other heads": (
        lambda a: {"value_cache": a["value_cache"][:, :, :1]},
        ValueError,
        "^value_cache: shape",
    ),
    "scales of other heads": (
        lambda a: as_fp8(a, k_scale=torch.ones(3)),
        ValueError,
        r"^k_scale: shape is \(?\[?3.*wanted a number or float32 \[1\], \[num_kv_heads\]",
    ),
    "a scale that is none": (lambda a: as_fp8(a, v_scale=torch.zeros(1)), ValueError, "^v_scale: is 0"),
    "no scale": (lambda a: as_fp8(a, k_scale=None), ValueError, "^k_scale: is None"),
    "one plain, one of bytes": (
        lambda a: {"value_cache": a["value_cache"].view(torch.uint8)},
        TypeError,
        "^value_cache: dtype is torch.uint8",
    ),
    "another format": (
        lambda a: as_fp8(a, kv_cache_dtype="nvfp4"),
        NotImplementedError,
        "^kv_cache_dtype: is 'nvfp4'",
    ),
    "e5m2 as e4m3": (
        lambda a: as_fp8(a, key_cache=torch.zeros_like(a["key_cache"], dtype=torch.float8_e5m2)),
        TypeError,
        "^key_cache: dtype is torch.float8_e5m2, and kv_cache_dtype 'fp8' wants",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    change, error, message = WRONG[what]
    arguments = flash_arguments()
    arguments |= change(arguments)
    before = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    with pytest.raises(error, match=message):
        vllm.reshape_and_cache_flash(**arguments)
    for was, name in zip(before, ("key_cache", "value_cache"), strict=True):
        assert arrays.same_bits(was, arguments[name])


def test_bad_mla_input() -> None:
    kv_c, k_pe, cache = torch.zeros(2, 16), torch.zeros(2, 8), torch.zeros(3, 4, 24)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"^kv_cache: shape is .*wanted \[num_blocks, block_size, 24\]"):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache[..., :20], slots, "auto", 1.0)
    with pytest.raises(ValueError, match=r"^k_pe: shape is \(2, 1, 8\)"):
        vllm.concat_and_cache_mla(kv_c, k_pe[:, None], cache, slots, "auto", 1.0)
    with pytest.raises(TypeError, match=r"^k_pe: dtype is float16.*\(from paged_ops.write_kv_cache\)"):
        vllm.concat_and_cache_mla(kv_c, k_pe.half(), cache, slots, "auto", 1.0)
    with pytest.raises(ValueError, match=r"^scale: is None"):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache.to(torch.uint8), slots, "fp8", None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="^kv_cache_dtype: is 'fp8_ds_mla'"):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache.to(torch.uint8), slots, "fp8_ds_mla", 1.0)
    assert not cache.any()


# --- convert_fp8 ------------------------------------------------------------------------------------------

FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_convert_from_all_codes(kv_dtype: str, dtype: str) -> None:
    """number * scale in float32, rounded once."""
    codes = np.arange(256, dtype=np.uint8).reshape(4, 4, 16)
    numbers = codes.view(arrays.CACHE_DTYPES[FORMATS[kv_dtype]]).astype(np.float32)
    for scale in (1.0, 0.37, torch.tensor([0.37])):
        output = torch.full(codes.shape, 7.0, dtype=getattr(torch, dtype))
        assert vllm.convert_fp8(output, put(codes), scale, kv_dtype) is None
        with np.errstate(over="ignore"):
            wanted = (numbers * np.float32(0.37 if scale != 1.0 else 1.0)).astype(arrays.DTYPES[dtype])
        np.testing.assert_array_equal(arrays.to_numpy(output).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_convert_to_what_the_write_stores(kv_dtype: str, dtype: str) -> None:
    """Ties, subnormals, what saturates, infinities and NaN: the numbers of the oracle's write."""
    rng = np.random.default_rng(3)
    wide = rng.standard_normal(4096) * 2.0 ** rng.integers(-20, 20, 4096)
    number = arrays.CACHE_DTYPES[FORMATS[kv_dtype]]
    every = np.arange(256, dtype=np.uint8).view(number).astype(np.float64)
    finite = np.sort(every[np.isfinite(every)])
    ties = (finite[1:] + finite[:-1]) / 2
    odd = [np.inf, -np.inf, np.nan, 0.0, -0.0, 448.0, 464.0, 480.0, 57344.0, 61440.0]
    with np.errstate(over="ignore"):
        rows = np.concatenate([wide, every, ties, odd]).astype(arrays.DTYPES[dtype])
    for scale in (1.0, 0.37):
        wanted = reference_numbers.quantise(rows, np.float32(scale), number)
        output = torch.full(rows.shape, 7, dtype=torch.uint8)
        vllm.convert_fp8(output, put(rows), scale, kv_dtype)
        actual = arrays.to_numpy(output).view(number)
        np.testing.assert_array_equal(actual.astype(np.float32), wanted.astype(np.float32))
        zeros = wanted.astype(np.float32) == 0
        assert (np.signbit(actual[zeros]) == np.signbit(wanted[zeros])).all()


def test_convert_fp8_defaults_and_other_tensors() -> None:
    rows = torch.randn(3, 5)
    output = torch.empty(3, 5, dtype=torch.float8_e4m3fn)
    vllm.convert_fp8(output, rows)
    assert arrays.same_bits(output, rows.to(torch.float8_e4m3fn))


def test_convert_fp8_bad_input() -> None:
    rows, codes = torch.zeros(3, 5), torch.full((3, 5), 7, dtype=torch.uint8)
    with pytest.raises(ValueError, match="^kv_dtype: is 'auto', which names no 8-bit float"):
        vllm.convert_fp8(codes, rows, 1.0, "auto")
    with pytest.raises(NotImplementedError, match="^kv_cache_dtype: is 'fp4'"):
        vllm.convert_fp8(codes, rows, 1.0, "fp4")
    with pytest.raises(ValueError, match=r"^output: shape is \(3, 5\), wanted \(3, 4\)"):
        vllm.convert_fp8(codes, rows[:, :4])
    with pytest.raises(TypeError, match="^output: dtype is torch.float32.*8 bits for one"):
        vllm.convert_fp8(rows.clone(), rows)
    with pytest.raises(TypeError, match="^output: dtype is torch.int8"):
        vllm.convert_fp8(codes.view(torch.int8), rows)
    assert (codes == 7).all()
