"""Block pool, block table and prefix index on their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from reference_engine.block_pool import BlockPool, OutOfBlocks
from reference_engine.block_table import BlockTable
from reference_engine.prefix_index import PrefixIndex, block_material, root_material


def pool_of(num_blocks: int) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex(block_size=2)
    return BlockPool(num_blocks, index), index


def test_blocks_are_handed_out_in_ascending_order() -> None:
    pool, _ = pool_of(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([2, 0])
    assert pool.allocate(3) == [0, 2, 4]


def test_allocation_is_all_or_nothing() -> None:
    pool, _ = pool_of(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="wanted 2 blocks, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.allocate(1) == [2]


def test_double_free_raises() -> None:
    pool, _ = pool_of(2)
    (block,) = pool.allocate(1)
    pool.retain([block])
    pool.release([block, block])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release([block])
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.retain([block])
    assert pool.num_free == 2


def test_cached_blocks_are_reused_last_and_oldest_first() -> None:
    pool, index = pool_of(4)
    a, b, c = pool.allocate(3)
    parent = index.publish(index.root(""), (1, 2), a)
    index.publish(parent, (3, 4), b)
    pool.release([b, a, c])
    assert pool.num_cached == 2
    pool.retain([b])
    assert pool.allocate(2) == [c, 3]  # those of no use first
    assert pool.allocate(1) == [a] and not index.holds(a)
    assert index.match("", (1, 2, 3, 4), 2) == []


def test_index_finds_the_longest_prefix_and_no_more() -> None:
    index = PrefixIndex(block_size=2)
    one = index.publish(index.root("s"), (1, 2), 7)
    two = index.publish(one, (3, 4), 8)
    assert index.match("s", (1, 2, 3, 4, 5, 6), 3) == [one, two]
    assert index.match("s", (1, 2, 3, 4), 1) == [one]
    assert index.match("s", (1, 2, 9, 4), 2) == [one]
    assert index.match("", (1, 2), 1) == [] == index.match("s", (3, 4), 1)
    assert index.publish(one, (3, 4), 9) is two and not index.holds(9)


def test_index_survives_a_hash_that_always_collides() -> None:
    index = PrefixIndex(block_size=1, hash_bytes=lambda data: b"")
    index.publish(index.root("a"), (1,), 0)
    assert index.match("b", (1,), 1) == [] and index.match("a", (2,), 1) == []
    newer = index.publish(index.root("a"), (2,), 1)
    assert index.match("a", (2,), 1) == [newer] and not index.holds(0) and len(index) == 1


def test_a_prefix_computed_anew_is_not_continued_by_blocks_of_the_old_one() -> None:
    index = PrefixIndex(block_size=1)
    old = index.publish(index.root(""), (1,), 0)
    index.publish(old, (2,), 1)
    index.forget(0)
    new = index.publish(index.root(""), (1,), 5)
    assert index.match("", (1, 2), 2) == [new]
    child = index.publish(new, (2,), 6)
    assert index.match("", (1, 2), 2) == [new, child] and not index.holds(1)


def test_key_material_is_injective() -> None:
    parents = (b"", b"B", b"\0" * 8, b"\0" * 16)
    tokens = ((), (0,), (1,), (-1,), (-2,), (0, 0), (256,), (1, 2), (2, 1))
    materials = [block_material(p, t) for p, t in itertools.product(parents, tokens)]
    materials += [root_material(salt) for salt in ("", "R", "B", "\0", "é", "\ud800")]
    assert len(set(materials)) == len(materials)


def test_table_snapshots_survive_appends_and_copies() -> None:
    table = BlockTable(block_size=3)
    table.append([5, 2])
    snapshot, fork = table.ids, table.fork()
    table.append(list(range(10, 30)))
    assert table.replace(1, 9) == 2
    assert snapshot.tolist() == [5, 2] == fork.ids.tolist()
    assert table.ids.tolist() == [5, 9, *range(10, 30)] and table.capacity == 66
    np.testing.assert_array_equal(table.slots(2, 5), [5 * 3 + 2, 9 * 3, 9 * 3 + 1])
