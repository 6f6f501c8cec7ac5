"""JAX arrays on the CPU, by DLPack: read without copies, never written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.cases import Case, Inputs, build
from paged_ops.testing.checks import expected

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")

RULES = {"window": 40, "soft_cap": 6.0, "alibi": True, "sinks": True}
CASES = [
    Case(seq_lens=(513, 1, 40), dtype=dtype, num_q_heads=8, num_kv_heads=2, **more)  # type: ignore[arg-type]
    for dtype in arrays.DTYPES
    for more in (
        {},
        {"q_lens": (5, 1, 33)},
        {"q_lens": (5, 1, 33), **RULES},
        {"cache_dtype": "float8_e4m3fn", "scales": "token"},
        {"cache_dtype": "int8", "scales": "head"},
    )
]


def as_jax(inputs: Inputs) -> Inputs:
    # Bit by bit: a poisoned slot's NaN must stay one.
    return inputs.map(lambda array: jax.device_put(np.ascontiguousarray(array)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case) -> None:
    inputs = as_jax(build(case))
    assert isinstance(inputs.key_cache, jax.Array)
    before = [np.array(array).tobytes() for array in (inputs.query, inputs.key_cache, inputs.value_cache)]
    out = build(case).new_out()
    lse = np.full(out.shape[:2], np.nan, np.float32)
    inputs.attention(paged_ops, out=out, lse=lse)
    expected(case).check(out, lse)
    after = [np.array(array).tobytes() for array in (inputs.query, inputs.key_cache, inputs.value_cache)]
    assert before == after


def test_write_and_gather_take_rows_of_jax() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((20, 2, 64)).astype(np.float32) for _ in range(2)]
    caches = [np.zeros((4, 8, 2, 64), np.float32) for _ in range(2)]
    slots = rng.permutation(32)[:20].astype(np.int64)
    wanted = [cache.copy() for cache in caches]
    reference.write_kv_cache(*rows, *wanted, slots)
    with jax.enable_x64(True):
        paged_ops.write_kv_cache(*map(jax.device_put, rows), *caches, jax.device_put(slots))
    assert all(np.array_equal(cache, other) for cache, other in zip(caches, wanted, strict=True))


def immutable(name: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(name) + r": is a \S+, which is immutable")


def test_nothing_writes_to_a_jax_array() -> None:
    """They share memory by value: a write would change arrays that have nothing to do with it."""
    cache = jax.numpy.zeros((4, 8, 2, 64))
    twin = cache + 0
    rows, slots = np.ones((3, 2, 64), np.float32), np.arange(3)
    other = np.zeros(cache.shape, np.float32)
    with immutable("key_cache"):
        paged_ops.write_kv_cache(rows, rows, cache, other, slots)
    with immutable("value_cache"):
        paged_ops.write_kv_cache(rows, rows, other, cache, slots)
    with immutable("caches"):
        paged_ops.copy_blocks([cache], np.array([[0, 1]]))
    with immutable("out"):
        query, tables, lens = (
            np.ones((1, 4, 64), np.float32),
            np.zeros((1, 1), np.int32),
            np.ones(1, np.int32),
        )
        paged_ops.paged_attention_decode(query, other, other, tables, lens, out=jax.numpy.zeros((1, 4, 64)))
    assert (np.asarray(cache) == np.asarray(twin)).all() and not other.any()
    with pytest.raises(ValueError, match="out: JAX arrays are immutable"):
        paged_ops.paged_attention_decode(jax.device_put(query), cache, cache, tables, lens)
