"""gather_kv_cache out of quantised caches: numbers as they are, and times their scales."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, PACKED_LAYOUTS, Case, Inputs, build
from paged_ops.testing.checks import require_same_bits
from paged_ops.testing.covering import covering

F32 = np.float32
KINDS = [(name, scales) for name in arrays.EIGHT_BITS for scales in ("number", "tensor", "head", "token")]
KINDS += [("int4", "groups")]


def gather_cases(target: Target) -> list[tuple[Case, str, bool]]:
    """(case, dtype of the rows, whether they are given)."""
    axes = {
        "kind": tuple(KINDS),
        "dims": ((64, 64), (8, 24), (40, 8), (256, 128)),
        "num_kv_heads": (1, 3),
        "block_size": (1, 5, 16),
        "layout": tuple(LAYOUTS | PACKED_LAYOUTS),
        "out_dtype": tuple(arrays.DTYPES),
        "given": (False, True),
    }
    cases = []
    for seed, row in enumerate(covering(axes, seed=7)):
        (cache_dtype, scales), (head_dim, value_head_dim) = row.pop("kind"), row.pop("dims")
        out_dtype, given = row.pop("out_dtype"), row.pop("given")
        quantised: dict[str, Any] = {"cache_dtype": cache_dtype, "scales": scales}
        if cache_dtype == "int4":
            quantised = {"cache_dtype": "int4", "scale_groups": (8, value_head_dim)}
        case = Case(
            (0, 1, 33, 5, 40),
            num_q_heads=row["num_kv_heads"],
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            seed=seed,
            **row,
            **quantised,
        )
        cases.append((case, out_dtype, given))
    return cases


def tensors_of(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens


def scales_of(inputs: Inputs) -> dict[str, Any]:
    return {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}


def rounded(rows: Any, dtype: str) -> Any:
    """A product of float32 is what 53 bits of it, which are all, round to."""
    with np.errstate(over="ignore"):
        return rows.astype(F32).astype(arrays.DTYPES[dtype])


@pytest.mark.grid(cases=gather_cases)
def test_numbers_times_scales(ops: HostOps, case: tuple[Case, str, bool]) -> None:
    """Bit for bit, rows past the last 0, into the rows of one tensor or into new ones."""
    which, out_dtype, given = case
    inputs = build(which)
    num_rows = sum(which.seq_lens) + 3
    scales = {name: np.asarray(scale, F32) for name, scale in scales_of(inputs).items()}
    *wanted, bounds = reference.gather_kv_cache(*tensors_of(inputs), num_tokens=num_rows, **scales)
    options: dict[str, Any] = {"num_tokens": num_rows, "out_dtype": out_dtype}
    if given:
        shape = num_rows, which.num_kv_heads, which.head_dim + which.dim_value
        both = arrays.filled(shape, arrays.DTYPES[out_dtype])
        options = {"out": (both[..., : which.head_dim], both[..., which.head_dim :])}
    key, value, cu_seqlens = ops.gather_kv_cache(*tensors_of(inputs), **scales_of(inputs), **options)
    require_same_bits("key", rounded(wanted[0], out_dtype), key)
    require_same_bits("value", rounded(wanted[1], out_dtype), value)
    require_same_bits("cu_seqlens", bounds, cu_seqlens)


@pytest.mark.parametrize("out_dtype", arrays.DTYPES)
@pytest.mark.parametrize("cache_dtype", arrays.CACHE_DTYPES)
def test_every_code(ops: HostOps, cache_dtype: str, out_dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 1, 1, 128).view(arrays.CACHE_DTYPES[cache_dtype])
    scale: Any = 0.37
    if cache_dtype == "int4":
        scale = np.array([0.37, 3e-3] * 4, F32).reshape(2, 1, 1, 4)
    caches = codes, codes[::-1].copy()
    tables, lens = np.arange(2, dtype=np.int32)[:, None], np.ones(2, np.int32)
    options = {"k_scale": scale, "v_scale": scale}
    key, value, _ = ops.gather_kv_cache(*caches, tables, lens, out_dtype=out_dtype, **options)
    wanted = reference.gather_kv_cache(*caches, tables, lens, **{k: F32(v) for k, v in options.items()})
    for rows, right in ((key, wanted[0]), (value, wanted[1])):
        right = rounded(right, out_dtype)
        nan = np.isnan(right.astype(F32))
        require_same_bits("rows", np.where(nan, 0, right), np.where(nan, 0, rows))
        assert (np.isnan(rows.astype(F32)) == nan).all()


@pytest.mark.parametrize("cache_dtype", arrays.CACHE_DTYPES)
def test_numbers_as_they_are(ops: HostOps, cache_dtype: str) -> None:
    groups = (8, 16) if cache_dtype == "int4" else None
    for layout, give_out in itertools.product(LAYOUTS | PACKED_LAYOUTS, (False, True)):
        quantised: dict[str, Any] = {"cache_dtype": cache_dtype, "scale_groups": groups}
        inputs = build(Case((0, 9, 33), None, "float32", 2, 2, 24, 32, 4, layout, **quantised))
        *_, tables, lens = tensors_of(inputs)
        as_bytes = [cache.view(np.uint8) for cache in (inputs.key_cache, inputs.value_cache)]
        *wanted, _ = reference.gather_kv_cache(*as_bytes, tables, lens, num_tokens=44)
        options: dict[str, Any] = {"num_tokens": 44}
        if give_out:
            kind = arrays.CACHE_DTYPES[cache_dtype]
            options = {"out": tuple(np.full(rows.shape, 1, kind) for rows in wanted)}
        key, value, _ = ops.gather_kv_cache(*tensors_of(inputs), **options)
        assert key.dtype == value.dtype == arrays.CACHE_DTYPES[cache_dtype]
        require_same_bits("key", wanted[0].astype(np.uint8), key.view(np.uint8))
        require_same_bits("value", wanted[1].astype(np.uint8), value.view(np.uint8))


@pytest.mark.parametrize("layout", ["NHD", "vLLM"])
@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
def test_torch_tensors_eager_and_compiled(target: Target, cache_dtype: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    groups = (16, 24) if cache_dtype == "int4" else None
    quantised: dict[str, Any] = {"cache_dtype": cache_dtype, "scale_groups": groups}
    case = Case((33, 70), None, "bfloat16", 6, 2, 64, 48, layout=layout, **quantised)
    inputs = build(case).map(lambda array: arrays.to_torch(array, target.device))
    tensors, options = tensors_of(inputs), scales_of(inputs)

    def rows_of(tensors: Any, options: Any) -> Any:
        plain = paged_ops.gather_kv_cache(*tensors, num_tokens=110)
        full = paged_ops.gather_kv_cache(*tensors, **options, num_tokens=110)
        half = paged_ops.gather_kv_cache(*tensors, **options, out_dtype=torch.float16, num_tokens=110)
        into = [torch.ones_like(rows) for rows in half[:2]]
        paged_ops.gather_kv_cache(*tensors, **options, out=into)
        return *plain, *full, *half, *into

    with target.use():
        eager = rows_of(tensors, options)
        assert [rows.dtype for rows in eager[3:]] == [
            *(torch.float32, torch.float32, torch.int32),
            *(torch.float16, torch.float16, torch.int32, torch.float16, torch.float16),
        ]
        torch._dynamo.reset()
        compiled = torch.compile(rows_of, fullgraph=True, backend="aot_eager")
        for want, actual in zip(eager, compiled(tensors, options), strict=True):
            assert arrays.same_bits(want, actual)


def test_faults_of_scales_are_seen(ops: HostOps) -> None:
    """What attention would see as well shows bit for bit here."""
    for cache_dtype, scales, groups in (("int8", "token", None), ("int4", "number", (8, 16))):
        case = Case((33,), cache_dtype=cache_dtype, scales=scales, scale_groups=groups)
        inputs = build(case)
        right = ops.gather_kv_cache(*tensors_of(inputs), **scales_of(inputs))
        for axis in range(inputs.k_scale.ndim):
            wrong = {name: np.roll(scale, 1, axis) for name, scale in scales_of(inputs).items()}
            rows = ops.gather_kv_cache(*tensors_of(inputs), **wrong)
            assert all((a != b).mean() > 0.5 for a, b in zip(right[:2], rows[:2], strict=True))


# --- bad input ------------------------------------------------------------------------------------------


def new_caches(dtype: Any = np.int8) -> tuple[Any, ...]:
    tables, lens = np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    return np.zeros((2, 4, 2, 8), dtype), np.zeros((2, 4, 2, 8), dtype), tables, lens


def test_one_scale_without_the_other(ops: HostOps) -> None:
    for name, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        with pytest.raises(ValueError, match=f"^{other}: is None, wanted a number"):
            ops.gather_kv_cache(*new_caches(), **{name: 1.0})


def test_scales_of_a_plain_cache(ops: HostOps) -> None:
    with pytest.raises(ValueError, match="^k_scale: is given, and key_cache is float32"):
        ops.gather_kv_cache(*new_caches(F32), k_scale=1.0, v_scale=1.0)


@pytest.mark.parametrize("out_dtype", ["int8", "float64", "float8_e5m2", np.int32, "nonsense"])
def test_rows_of_what_they_cannot_be(ops: HostOps, out_dtype: Any) -> None:
    name = out_dtype if isinstance(out_dtype, str) else "int32"
    with pytest.raises(TypeError, match=f"^out_dtype: dtype is {name}, wanted float32, float16 or bfloat16"):
        ops.gather_kv_cache(*new_caches(), k_scale=1.0, v_scale=1.0, out_dtype=out_dtype)


def test_out_dtype_is_for_new_rows_with_scales(ops: HostOps) -> None:
    for caches in (new_caches(), new_caches(F32)):
        with pytest.raises(ValueError, match="^out_dtype: is given without scales"):
            ops.gather_kv_cache(*caches, out_dtype="float32")
    out = np.zeros((1, 2, 8), F32), np.zeros((1, 2, 8), F32)
    with pytest.raises(ValueError, match="^out_dtype: is given beside out"):
        ops.gather_kv_cache(*new_caches(), k_scale=1.0, v_scale=1.0, out=out, out_dtype="float32")


def test_out_of_the_wrong_dtype(ops: HostOps) -> None:
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    full, half, whole = (np.full((1, 2, 8), 7, dtype) for dtype in (F32, np.float16, np.int8))
    for out, options, message in [
        ((whole, whole.copy()), scales, r"^out\[0\]: dtype is int8, wanted float32, float16 or bfloat16"),
        ((full, half), scales, r"^out\[1\]: dtype is float16, wanted float32"),
        ((full, full.copy()), {}, r"^out\[0\]: dtype is float32, wanted int8"),
    ]:
        with pytest.raises(TypeError, match=message):
            ops.gather_kv_cache(*new_caches(), out=out, **options)
        assert all((rows == 7).all() for rows in out)
    wide = np.zeros((1, 2, 16), np.uint8)
    int4 = [np.zeros((2, 4, 2, 8), np.uint8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"^out\[0\]: shape is \(1, 2, 16\), wanted 8"):
        ops.gather_kv_cache(*int4, *new_caches()[2:], out=(wide, wide.copy()))


def test_rows_share_no_memory_with_scales(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    scale, value = np.ones((2, 4, 2), F32), np.zeros((1, 2, 8), F32)
    rows = scale.reshape(1, 2, 8)
    with pytest.raises(ValueError, match=r"^out\[0\]: shares memory with k_scale"):
        ops.gather_kv_cache(*new_caches(), k_scale=scale, v_scale=1.0, out=(rows, value))
