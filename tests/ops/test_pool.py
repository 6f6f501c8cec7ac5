"""allocate_kv_pool, workspace_size, supports."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps
from paged_ops.testing.cases import Case, build
from paged_ops.testing.checks import expected

SIZES = {"num_blocks": 6, "block_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [*arrays.DTYPES, *arrays.CACHE_DTYPES])
def test_pool_has_the_shape_of_the_oracle(framework: Any, layout: Any, dtype: str) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    pool = paged_ops.allocate_kv_pool(**SIZES, dtype=dtype, layout=layout, framework=framework)
    numpy_dtype = (arrays.DTYPES | arrays.CACHE_DTYPES)[dtype]
    extent = SIZES["head_dim"] // (2 if dtype == "int4" else 1)
    wanted = reference.allocate_kv_pool(**SIZES | {"head_dim": extent}, dtype=numpy_dtype, layout=layout)
    assert arrays.same_bits(pool.tensor, wanted.tensor)  # zeros of the same shape and dtype
    assert type(pool.tensor).__module__.partition(".")[0] == framework
    arrays.to_numpy(pool.tensor)[...] = np.arange(wanted.tensor.size).reshape(wanted.tensor.shape) % 101
    wanted.tensor[...] = np.arange(wanted.tensor.size).reshape(wanted.tensor.shape) % 101
    for layer in range(3):
        for view, right in ((pool.key, wanted.key), (pool.value, wanted.value)):
            assert tuple(view(layer).shape) == (6, 4, 2, extent)
            assert arrays.same_bits(view(layer), right(layer))
            assert np.shares_memory(arrays.to_numpy(view(layer)), arrays.to_numpy(pool.tensor))
    address = arrays.to_numpy(pool.tensor).ctypes.data
    assert address % 4096 == 0


def test_pool_outlives_its_maker() -> None:
    """The memory lives as long as any view of it."""
    key = paged_ops.allocate_kv_pool(**SIZES, dtype="float32", framework="numpy").key(2)
    others = [paged_ops.allocate_kv_pool(**SIZES, dtype="float32", framework="numpy") for _ in range(20)]
    for pool in others:
        pool.tensor[...] = 1
    assert (key == 0).all()


def test_pool_gets_huge_pages() -> None:
    """Where the kernel gives them to who asks; touched memory must then be in huge pages."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no transparent huge pages here")
    before = _anonymous_huge_kilobytes()
    pool = paged_ops.allocate_kv_pool(64, 16, 8, 8, 128, dtype="float32", framework="numpy")  # 64 MiB
    pool.tensor[...] = 1
    gained = _anonymous_huge_kilobytes() - before
    assert gained * 1024 > pool.nbytes // 2, f"{gained} kB of {pool.nbytes >> 10} kB"


def _anonymous_huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attention_over_a_pool(ops: HostOps, layout: Any) -> None:
    case = Case((37, 5, 600), dtype="float16", block_size=4)
    inputs = build(case)
    num_blocks = len(inputs.key_cache)
    pool = paged_ops.allocate_kv_pool(
        num_blocks, 4, 3, 2, 64, dtype="float16", layout=layout, framework="numpy"
    )
    pool.tensor[...] = np.nan
    pool.key(1)[...], pool.value(1)[...] = inputs.key_cache, inputs.value_cache
    tensors = inputs.query, pool.key(1), pool.value(1), inputs.block_tables, inputs.seq_lens
    expected(case).check(*ops.paged_attention_decode(*tensors, return_lse=True))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [(name, bad, ValueError) for name, bad in itertools.product(SIZES, [0, -1])]
    + [
        ("layout", "NDH", ValueError),
        ("device", "tpu", ValueError),
        ("dtype", "int32", TypeError),
        ("framework", "jax", ValueError),
    ],
)
def test_bad_pools(name: str, value: Any, error: type[Exception]) -> None:
    arguments: dict[str, Any] = {**SIZES, "dtype": "float32", "framework": "numpy", name: value}
    with pytest.raises(error, match=f"^{name}: "):
        paged_ops.allocate_kv_pool(**arguments)


def test_pool_of_half_bytes() -> None:
    sizes: dict[str, Any] = SIZES | {"head_dim": 7}
    with pytest.raises(ValueError, match="^head_dim: is 7, wanted a multiple of 2 for int4"):
        paged_ops.allocate_kv_pool(**sizes, dtype="int4", framework="numpy")


def test_pool_layer_out_of_range() -> None:
    pool = paged_ops.allocate_kv_pool(**SIZES, dtype="float32", framework="numpy")
    for layer in (-1, 3):
        for view in (pool.key, pool.value):
            with pytest.raises(ValueError, match="^layer: "):
                view(layer)


# --- workspace_size ---------------------------------------------------------------------------------------

SHAPES = {
    "num_seqs": 5,
    "max_blocks_per_seq": 100,
    "block_size": 16,
    "num_q_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
}


def test_workspace_grows_with_each_extent(ops: HostOps) -> None:
    size = lambda **other: ops.workspace_size(**{**SHAPES, **other}, dtype="bfloat16")  # noqa: E731
    assert size() >= 0
    for name in ("num_seqs", "max_blocks_per_seq", "num_q_heads"):
        assert size(**{name: 8 * SHAPES[name]}) >= size(), name
    assert size(num_tokens=500) >= size(num_tokens=5)
    assert size(num_seqs=0) == 0


@pytest.mark.parametrize("name", SHAPES)
def test_workspace_of_bad_shapes(ops: HostOps, name: str) -> None:
    with pytest.raises(ValueError, match=name.replace("num_q_heads", "num_q?_?heads")):
        ops.workspace_size(**{**SHAPES, name: -8}, dtype="float32")


def test_workspace_of_a_bad_dtype(ops: HostOps) -> None:
    with pytest.raises((TypeError, ValueError), match="^dtype.* int32"):
        ops.workspace_size(**SHAPES, dtype="int32")
    with pytest.raises(ValueError, match="^device: "):
        ops.workspace_size(**SHAPES, dtype="float32", device="tpu")


# --- supports: what it accepts works, what it refuses raises its reason ------------------------------------

geometries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*arrays.DTYPES, "float64", "int32"]),
        "num_kv_heads": st.integers(1, 3),
        "num_q_heads": st.integers(1, 12),
        "head_dim": st.sampled_from([1, 4, 8, 12, 16, 72, 128, 256, 264, 576, 584]),
        "value_head_dim": st.sampled_from([7, 8, 24, 128, 256, 512]),
        "block_size": st.sampled_from([1, 2, 5, 16, 300]),
    }
)


@given(geometry=geometries)
def test_supports_tells_the_truth(geometry: dict[str, Any]) -> None:
    answer = paged_ops.supports(**geometry)
    assert bool(answer) == answer.ok == (not answer.reason)
    dtype = arrays.DTYPES.get(geometry["dtype"]) or np.dtype(geometry["dtype"])
    query = np.ones((2, geometry["num_q_heads"], geometry["head_dim"]), dtype)
    caches = [
        np.ones((3, geometry["block_size"], geometry["num_kv_heads"], geometry[dim]), dtype)
        for dim in ("head_dim", "value_head_dim")
    ]
    tables, lens = np.array([[0], [1]], np.int32), np.array([1, 0], np.int32)
    if answer:
        out = paged_ops.paged_attention_decode(query, *caches, tables, lens)
        assert (out[0] == 1).all() and (out[1] == 0).all()
    else:
        with pytest.raises((ValueError, TypeError), match=r"^(query|key_cache|value_cache): "):
            paged_ops.paged_attention_decode(query, *caches, tables, lens)


def test_supports_gives_reasons() -> None:
    good = {"dtype": "bfloat16", "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    assert paged_ops.supports(**good)
    for name, value, reason in [
        ("head_dim", 12, "head_dim is 12"),
        ("head_dim", 584, "head_dim is 584"),
        ("value_head_dim", 0, "value head_dim is 0"),
        ("num_q_heads", 7, "num_q_heads is 7"),
        ("num_kv_heads", 0, "num_kv_heads is 0"),
        ("block_size", 0, "block_size is 0"),
        ("dtype", "float64", "float64"),
        ("cache_dtype", "float32", "float32"),
    ]:
        answer = paged_ops.supports(**{**good, name: value})  # type: ignore[arg-type]
        assert not answer and reason in answer.reason, (name, value, answer)
