"""Pools whose offsets exceed 32 bits, in bytes and in elements: virtual memory, little of it touched."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps
from paged_ops.testing.cases import Case, Inputs, build
from paged_ops.testing.checks import require_same_bits

BLOCK_SIZE, HEADS, HEAD_DIM = 16, 2, 64
BLOCK = BLOCK_SIZE * HEADS * HEAD_DIM  # elements

# 2^31 and 2^32 bytes, 2^31 and 2^32 elements: an offset that wraps at one lands in another block of the pool.
CRITICAL_ELEMENTS = [2**30, 2**31, 2**32]


def sparse(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError:
        pytest.skip(f"this machine does not map {nbytes >> 30} GiB of virtual memory")
    return np.frombuffer(memory, dtype).reshape(shape)


@pytest.fixture(params=["NHD", "HND", "interleaved"])
def caches(request: pytest.FixtureRequest, ops: HostOps) -> Iterator[tuple[Any, Any]]:
    """float16 key and value caches of more than 2^32 elements each."""
    if ops.target.device != "cpu":
        pytest.skip("virtual memory is the host's")
    num_blocks = CRITICAL_ELEMENTS[-1] // BLOCK + 40
    dtype = arrays.DTYPES["float16"]
    if request.param == "NHD":
        yield tuple(sparse((num_blocks, BLOCK_SIZE, HEADS, HEAD_DIM), dtype) for _ in range(2))
    elif request.param == "HND":
        shape = num_blocks, HEADS, BLOCK_SIZE, HEAD_DIM
        yield tuple(sparse(shape, dtype).swapaxes(1, 2) for _ in range(2))
    else:
        both = sparse((num_blocks, 2, BLOCK_SIZE, HEADS, HEAD_DIM), dtype)
        yield both[:, 0], both[:, 1]


def far_blocks(num_blocks: int) -> np.ndarray[Any, Any]:
    """Blocks on both sides of each critical offset, the last ones among them."""
    blocks = [edge // BLOCK + i for edge in CRITICAL_ELEMENTS for i in (-1, 0, 1, 3)]
    blocks += [
        edge // BLOCK // 2 + i for edge in CRITICAL_ELEMENTS for i in (-1, 0)
    ]  # of the interleaved cache
    blocks += [num_blocks - 1, num_blocks - 2]
    return np.random.default_rng(0).permutation(np.unique(blocks)).astype(np.int32)


def moved(inputs: Inputs, caches: tuple[Any, Any]) -> Inputs:
    """The inputs with their blocks in the large caches."""
    far = far_blocks(len(caches[0]))
    tables = inputs.block_tables.copy()
    taken = 0
    for seq, seq_len in enumerate(inputs.case.seq_lens):
        count = inputs.case.blocks_of(seq_len)
        tables[seq, :count] = far[taken : taken + count]
        taken += count
        for large, small in zip(caches, (inputs.key_cache, inputs.value_cache), strict=True):
            large[tables[seq, :count]] = small[inputs.block_tables[seq, :count]]
    return replace(inputs, key_cache=caches[0], value_cache=caches[1], block_tables=tables)


CASE = Case((90, 33, 100), dtype="float16", num_q_heads=8, num_kv_heads=HEADS)


@pytest.mark.parametrize("q_lens", [None, (3, 33, 20)], ids=["decode", "varlen"])
def test_attention(ops: HostOps, caches: tuple[Any, Any], q_lens: tuple[int, ...] | None) -> None:
    small = build(replace(CASE, q_lens=q_lens))
    large = moved(small, caches)
    for wanted, actual in zip(small.attention(ops), large.attention(ops), strict=True):
        require_same_bits("attention", wanted, actual)


def test_gather(ops: HostOps, caches: tuple[Any, Any]) -> None:
    small = build(CASE)
    large = moved(small, caches)
    results = [
        ops.gather_kv_cache(
            x.key_cache, x.value_cache, x.block_tables, x.seq_lens, num_tokens=sum(CASE.seq_lens)
        )
        for x in (small, large)
    ]
    for wanted, actual in zip(*results, strict=True):
        require_same_bits("gather", wanted, actual)


def test_write(ops: HostOps, caches: tuple[Any, Any]) -> None:
    rng = np.random.default_rng(1)
    far = far_blocks(len(caches[0])).astype(np.int64)
    slots = far * BLOCK_SIZE + rng.integers(0, BLOCK_SIZE, len(far))
    key, value = (rng.standard_normal((len(far), HEADS, HEAD_DIM)).astype(np.float16) for _ in range(2))
    ops.write_kv_cache(key, value, *caches, slots)
    for rows, cache in ((key, caches[0]), (value, caches[1])):
        require_same_bits("cache", rows, cache[far, slots % BLOCK_SIZE])
        cache[far, slots % BLOCK_SIZE] = 0
        assert not cache[far].any()  # nothing beside the slots
        for edge in CRITICAL_ELEMENTS:  # nothing where a wrapped offset would have gone
            assert not cache[np.maximum(far - edge // BLOCK, 0)].any()


def test_copy_and_swap(ops: HostOps, caches: tuple[Any, Any]) -> None:
    far = far_blocks(len(caches[0])).astype(np.int64)
    sources, destinations = far[: len(far) // 2], far[len(far) // 2 :][: len(far) // 2]
    pairs = np.stack([sources, destinations], axis=1)
    content = np.random.default_rng(2).standard_normal((len(sources), BLOCK_SIZE, HEADS, HEAD_DIM))
    for cache in caches:
        cache[sources] = content
    ops.copy_blocks(list(caches), pairs)
    for cache in caches:
        require_same_bits("copied", cache[sources], cache[destinations])
    host = np.zeros((len(sources), BLOCK_SIZE, HEADS, HEAD_DIM), np.float16)
    out = np.stack([destinations, np.arange(len(sources))], axis=1)
    ops.swap_blocks(caches[1], host, out)
    require_same_bits("swapped out", content.astype(np.float16), host)
    caches[0][sources] = 0
    ops.swap_blocks(host, caches[0], np.stack([np.arange(len(sources)), sources], axis=1))
    require_same_bits("swapped in", host, caches[0][sources])


def test_layers_far_apart(ops: HostOps) -> None:
    """A block-major pool whose one block spans more than 2^31 bytes: strides alone exceed 32 bits."""
    if ops.target.device != "cpu":
        pytest.skip("virtual memory is the host's")
    dtype = arrays.DTYPES["float16"]
    num_layers = 2**31 // (2 * BLOCK) + 5
    pool = sparse((8, num_layers, 2, BLOCK_SIZE, HEADS, HEAD_DIM), dtype)
    small = build(replace(CASE, seq_lens=(20, 33)))
    layer = num_layers - 1
    caches = pool[:, layer, 0], pool[:, layer, 1]
    for cache, content in zip(caches, (small.key_cache, small.value_cache), strict=True):
        cache[: len(content)] = content
    large = replace(small, key_cache=caches[0], value_cache=caches[1])
    for wanted, actual in zip(small.attention(ops), large.attention(ops), strict=True):
        require_same_bits("attention", wanted, actual)
