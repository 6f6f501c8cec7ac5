"""Memory that arguments lend for the call, and memory that they share: what is held, refused and allowed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paged_ops
from paged_ops.testing.backends import Target

NUM_SEQS, HEADS, DIM, BLOCK, NUM_BLOCKS = 3000, 1, 8, 1, 4


class Lender:
    """A tensor that exists for as long as its capsule is held, on pages that are gone after."""

    def __init__(self, make: Callable[[], np.ndarray[Any, Any]]) -> None:
        self.make = make

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.make().__dlpack__(**options)


def arguments() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    return {
        "query": rng.standard_normal((NUM_SEQS, HEADS, DIM), np.float32),
        "key_cache": rng.standard_normal((NUM_BLOCKS, BLOCK, HEADS, DIM), np.float32),
        "value_cache": rng.standard_normal((NUM_BLOCKS, BLOCK, HEADS, DIM), np.float32),
        "block_tables": rng.integers(0, NUM_BLOCKS, (NUM_SEQS, 1), np.int32),
        "seq_lens": np.ones(NUM_SEQS, np.int32),
        "cu_seqlens_q": np.arange(NUM_SEQS + 1, dtype=np.int32),
    }


@pytest.mark.parametrize("name", [*arguments(), "lse", "workspace"])
def test_a_capsule_is_held_to_the_end_of_the_call(target: Target, name: str) -> None:
    """Large enough that the allocator gives pages back at once: a use after their release would crash."""
    lent = arguments()
    with target.use():
        expected = paged_ops.paged_attention(**lent)
        size = paged_ops.workspace_size(
            num_seqs=NUM_SEQS, max_blocks_per_seq=1, block_size=BLOCK, num_q_heads=HEADS, num_kv_heads=HEADS,
            head_dim=DIM, num_tokens=NUM_SEQS, dtype="float32",
        )  # fmt: skip
        extra = {
            "lse": lambda: np.zeros((NUM_SEQS, HEADS), np.float32),
            "workspace": lambda: np.zeros(size + (1 << 20), np.uint8),
        }
        source = extra[name] if name in extra else lambda: lent[name].copy()
        for _ in range(3):
            actual = paged_ops.paged_attention(**{**lent, name: Lender(source)}, out=np.empty_like(expected))
            assert np.array_equal(actual, expected)


def test_a_capsule_of_another_dlpack_is_refused_and_deleted_once(target: Target) -> None:
    array = arguments()["query"]

    class Future(Lender):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = array.__dlpack__(max_version=(1, 1))
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            ctypes.c_uint32.from_address(pointer(capsule, b"dltensor_versioned")).value = 2
            return capsule

    before = sys.getrefcount(array)
    with target.use():
        for _ in range(4):
            with pytest.raises(ValueError, match="query: its __dlpack__ speaks version 2"):
                paged_ops.paged_attention(**{**arguments(), "query": Future(lambda: array)})
    assert sys.getrefcount(array) == before


OUTPUTS = ["out", "lse", "workspace"]


@pytest.mark.parametrize("shared", arguments())
@pytest.mark.parametrize("output", OUTPUTS)
def test_attention_may_not_write_what_it_reads(target: Target, output: str, shared: str) -> None:
    given = arguments()
    memory = np.zeros(1 << 20, np.uint8)

    def place(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        view = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view

    given[shared] = place(given[shared])
    written = {
        "out": memory[: given["query"].nbytes].view(np.float32).reshape(given["query"].shape),
        "lse": memory[: NUM_SEQS * HEADS * 4].view(np.float32).reshape(NUM_SEQS, HEADS),
        "workspace": memory,
    }[output]
    before = memory.copy()
    with target.use(), pytest.raises(ValueError, match=f"{output}: shares memory with {shared}"):
        paged_ops.paged_attention(**given, **{output: written})
    assert np.array_equal(memory, before)


def pool_with_pairs() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pool = np.zeros((4, 8), np.int64)
    pairs = pool[1].reshape(4, 2)[:2]
    pairs[...] = [[0, 1], [2, 3]]
    return pool, pairs


def test_block_pairs_may_not_lie_in_what_is_written(target: Target) -> None:
    pool, pairs = pool_with_pairs()
    with target.use():
        with pytest.raises(ValueError, match="caches: shares memory with block_pairs"):
            paged_ops.copy_blocks(pool, pairs)
        with pytest.raises(ValueError, match="destination: shares memory with block_pairs"):
            paged_ops.swap_blocks(np.zeros_like(pool), pool, pairs)
    assert np.array_equal(pool, pool_with_pairs()[0])


def test_caches_of_a_copy_may_not_share_blocks(target: Target) -> None:
    memory = np.zeros((5, 8), np.float32)
    pool = np.zeros((4, 3, 2, 8), np.float32)
    with target.use():
        with pytest.raises(ValueError, match=r"caches\[1\]: shares memory with caches\[0\]"):
            paged_ops.copy_blocks([memory[0:4], memory[1:5]], np.array([[0, 1]]))
        pool[2] = 7
        paged_ops.copy_blocks([pool[:, i, j] for i in range(3) for j in range(2)], np.array([[2, 0]]))
    assert (pool[0] == 7).all() and not pool[1].any()


def test_gather_and_write_want_two_places_for_two_things(target: Target) -> None:
    cache, other = np.zeros((2, 4, 1, 8), np.float32), np.ones((2, 4, 1, 8), np.float32)
    rows = np.zeros((4, 1, 8), np.float32)
    tables, lens = np.zeros((1, 1), np.int32), np.array([4], np.int32)
    with target.use():
        with pytest.raises(ValueError, match=r"out\[1\]: shares memory with out\[0\]"):
            paged_ops.gather_kv_cache(cache, other, tables, lens, out=(rows, rows))
        with pytest.raises(ValueError, match=r"out: one of \(key, value\) is None"):
            paged_ops.gather_kv_cache(cache, other, tables, lens, out=(None, rows))
        with pytest.raises(ValueError, match="num_tokens: is given beside out"):
            paged_ops.gather_kv_cache(cache, other, tables, lens, out=(rows, rows.copy()), num_tokens=4)
        with pytest.raises(ValueError, match="value_cache: shares memory with key_cache"):
            paged_ops.write_kv_cache(rows, rows, cache, cache, np.arange(4))
    assert not cache.any() and not rows.any()


def test_views_side_by_side_are_apart(target: Target) -> None:
    """Their ranges interleave, their bytes do not: heads of one tensor, layers and K beside V of one pool."""
    rng = np.random.default_rng(5)
    buffer = rng.standard_normal((2, 8, 16), np.float32)
    query, out = buffer[:, :4], buffer[:, 4:]
    pool = rng.standard_normal(
        (4, 3, 2, 4, 2, 16), np.float32
    )  # blocks, layers, K and V, tokens, heads, dims
    by_token = rng.standard_normal((4, 4, 2, 2, 16), np.float32)  # blocks, tokens, K and V, heads, dims
    tables, lens = np.array([[2, 0], [1, 3]], np.int32), np.array([7, 5], np.int32)
    with target.use():
        for key, value in [(pool[:, 1, 0], pool[:, 1, 1]), (by_token[:, :, 0], by_token[:, :, 1])]:
            expected = paged_ops.paged_attention_decode(query.copy(), key, value, tables, lens)
            paged_ops.paged_attention_decode(query, key, value, tables, lens, out=out)
            assert np.array_equal(out, expected)
            new = rng.standard_normal((2, 2, 16), np.float32)
            paged_ops.write_kv_cache(new, -new, key, value, np.array([3, 9]))
            assert np.array_equal(key[2, 1], new[1]) and np.array_equal(value[0, 3], -new[0])
        wanted = pool[2, 0].copy()
        paged_ops.swap_blocks(pool[:, 0], pool[:, 1], np.array([[2, 3]]))
        assert np.array_equal(pool[3, 1], wanted)


@pytest.mark.parametrize("shift", range(1, 7))
def test_views_that_do_meet_are_refused(target: Target, shift: int) -> None:
    """Heads 0..3 against heads shift.. of the same rows, or of the rows after."""
    buffer = np.zeros((3, 8, 16), np.float32)
    flat = buffer.reshape(-1)
    out = np.lib.stride_tricks.as_strided(flat[shift * 16 :], (2, 4, 16), (8 * 16 * 4, 16 * 4, 4))
    meets = shift < 4 or shift > 4  # heads shift .. shift + 3, wrapping into the next row's heads 0 ..
    cache = np.zeros((1, 4, 4, 16), np.float32)
    tables, lens = np.zeros((2, 1), np.int32), np.array([4, 2], np.int32)
    with target.use():
        if meets:
            with pytest.raises(ValueError, match="out: shares memory with query"):
                paged_ops.paged_attention_decode(buffer[:2, :4], cache, cache, tables, lens, out=out)
        else:
            paged_ops.paged_attention_decode(buffer[:2, :4], cache, cache, tables, lens, out=out)


@pytest.mark.slow
def test_the_longest_sequence_that_can_be_said(target: Target) -> None:
    """Positions up to 2^31 - 2: nothing may overflow on the way. One row, seen many times, stands for all."""
    if target.backend == "emulated" or target.isa == "scalar":
        pytest.skip("a walk of 2^31 tokens: the fast kernels only")
    key = np.lib.stride_tricks.as_strided(np.ones((1, 1, 1, 8), np.float32), (1, 2**30, 1, 8), (0, 0, 0, 4))
    tables, lens = np.zeros((1, 2), np.int32), np.array([2**31 - 1], np.int32)
    with target.use():
        out = paged_ops.paged_attention_decode(np.ones((1, 1, 8), np.float32), key, key, tables, lens)
    assert np.allclose(out, 1, atol=1e-3)
