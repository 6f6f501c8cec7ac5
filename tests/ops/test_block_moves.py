"""move_blocks, export_blocks and import_blocks: bit for bit, whatever overlaps, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, Case, build
from paged_ops.testing.checks import require_same_bits, require_same_memory

BLOCKS = 9


class HostPairs(HostOps):
    """The ops, whose block ids stay in host memory while the caches go to the target's device."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            sent: list[tuple[Any, Any]] = []
            host = [
                (arrays.to_torch(value) if self._as_torch else value)
                if _is_ids(value)
                else self._send(value, sent)
                for value in arguments
            ]
            with self.target.use():
                result = getattr(paged_ops, name)(*host, **self._send(options, sent))
            for array, tensor in sent:
                back = arrays.to_numpy(tensor)
                if not np.shares_memory(array, back):
                    array[...] = back
            return result if result is None else arrays.to_numpy(result)

        return call


def _is_ids(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "i"


@pytest.fixture(params=["numpy", "torch"])
def block_ops(target: Target, request: pytest.FixtureRequest) -> HostPairs:
    return HostPairs(target, request.param)


def pool(seed: int = 0, count: int = BLOCKS, dtype: str = "float16") -> list[np.ndarray]:
    """K and V of two layers, NaN among their numbers."""
    rng = np.random.default_rng(seed)
    caches = [rng.standard_normal((count, 4, 2, 8)).astype(arrays.DTYPES[dtype]) for _ in range(4)]
    for cache in caches:
        cache[rng.random(cache.shape) < 0.1] = np.nan
    return caches


MOVES = {
    "nothing": [],
    "itself": [[3, 3]],
    "apart": [[0, 5], [1, 6]],
    "chain": [[0, 1], [1, 2], [2, 3]],
    "chain backwards": [[2, 3], [1, 2], [0, 1]],
    "swap": [[0, 1], [1, 0]],
    "cycle": [[0, 4], [4, 2], [2, 0]],
    "cycle with a branch": [[0, 4], [4, 2], [2, 0], [2, 7], [7, 8]],
    "two cycles and a chain": [[0, 1], [1, 0], [2, 3], [3, 4], [4, 2], [5, 6], [6, 7]],
    "one to many": [[0, 1], [0, 2], [0, 3], [3, 0]],
    "compaction": [[2, 0], [3, 1], [5, 2], [6, 3], [8, 4]],
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_as_if_all_were_read_first(block_ops: HostPairs, name: str) -> None:
    pairs = np.array(MOVES[name], np.int64).reshape(-1, 2)
    wanted, actual = pool(), pool()
    reference.move_blocks(wanted, pairs)
    block_ops.move_blocks(actual, pairs)
    for a, b in zip(wanted, actual, strict=True):
        require_same_bits(name, a, b)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    sources=st.lists(st.integers(0, BLOCKS - 1), max_size=BLOCKS),
    order=st.permutations(range(BLOCKS)),
    spare=st.integers(0, 3),
)
def test_any_moves(ops: HostOps, sources: list[int], order: list[int], spare: int) -> None:
    """Whatever comes from where, with as little scratch as one block."""
    block_ops = HostPairs(ops.target)
    pairs = np.array(list(zip(sources, order, strict=False)), np.int64).reshape(-1, 2)
    wanted, actual = pool(), pool()
    reference.move_blocks(wanted, pairs)
    block_ops.move_blocks(actual, pairs, scratch=pool(count=spare) if spare else None)
    for a, b in zip(wanted, actual, strict=True):
        require_same_bits("moved", a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_permutation_in_every_layout(block_ops: HostPairs, layout: str) -> None:
    """And nothing around the blocks changes."""
    case = Case((9, 30), dtype="bfloat16", layout=layout, block_size=4)
    wanted, actual = build(case), build(case)
    places = np.random.default_rng(1).permutation(len(wanted.key_cache)).astype(np.int64)
    reference.move_blocks([wanted.key_cache, wanted.value_cache], places)
    block_ops.move_blocks([actual.key_cache, actual.value_cache], places)
    require_same_memory("key_cache", wanted.key_cache, actual.key_cache)
    require_same_memory("value_cache", wanted.value_cache, actual.value_cache)


def test_attention_does_not_notice_a_compaction(ops: HostOps) -> None:
    case = Case((37, 20), dtype="bfloat16", block_size=4)
    inputs = build(case)
    wanted = inputs.attention(ops)
    num_blocks = len(inputs.key_cache)
    used = np.concatenate([inputs.block_tables[0, :10], inputs.block_tables[1, :5]])
    free = np.setdiff1d(np.arange(num_blocks), used)
    places = np.empty(num_blocks, np.int64)
    places[np.concatenate([used, free])] = np.arange(num_blocks)
    HostPairs(ops.target).move_blocks([inputs.key_cache, inputs.value_cache], places)
    for seq, count in ((0, 10), (1, 5)):
        inputs.block_tables[seq, :count] = places[inputs.block_tables[seq, :count]]
    for a, b in zip(wanted, inputs.attention(ops), strict=True):
        require_same_bits("attention", a, b)


# --- out of a pool and into another -----------------------------------------------------------------------


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("ids", [[4, 0, 7], [], [2, 2]], ids=str)
def test_export(block_ops: HostPairs, ids: list[int], given_out: bool) -> None:
    blocks = np.array(ids, np.int64)
    wanted = reference.export_blocks(pool(), blocks)
    out = np.full_like(wanted, 7) if given_out else None
    found = block_ops.export_blocks(pool(), blocks, out=out)
    require_same_bits("packed", wanted, found)
    if out is not None:
        require_same_bits("out", wanted, out)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
@pytest.mark.parametrize("as_bytes", [None, bytes, bytearray, memoryview])
def test_there_and_back(block_ops: HostPairs, dtype: str, as_bytes: Any) -> None:
    """Into other blocks of a larger pool with other strides; the rest of it stays."""
    source = pool(dtype=dtype)
    ids, places = np.array([4, 0, 7], np.int64), np.array([11, 2, 5], np.int64)
    packed = block_ops.export_blocks(source, ids).copy()
    raw = arrays.bits(packed).tobytes()
    whole = np.zeros((14, 4, 4, 2, 8), source[0].dtype)
    wanted = whole.copy()
    for i in range(4):
        wanted[places, i] = source[i][ids]
    block_ops.import_blocks(
        packed if as_bytes is None else as_bytes(raw), [whole[:, i] for i in range(4)], places
    )
    require_same_bits("pool", wanted, whole)


def test_ids_may_be_a_list_and_caches_one_tensor(block_ops: HostPairs) -> None:
    blocks = np.arange(6 * 5.0, dtype=np.float32).reshape(6, 5)
    packed = block_ops.export_blocks(blocks, [4, 1])
    assert packed.shape == (2, 1, 5) and (packed[:, 0] == blocks[[4, 1]]).all()
    block_ops.import_blocks(packed, blocks, [0, 5])
    assert (blocks[0] == blocks[4]).all() and (blocks[5] == blocks[1]).all()


def test_bytes_of_a_pool_of_any_dtype(ops: HostOps) -> None:
    block_ops = HostPairs(ops.target)
    for dtype in ("uint8", "int32", "float64"):
        blocks = np.random.default_rng(0).integers(0, 100, (5, 3, 2)).astype(dtype)
        packed = blocks[[3, 1]][:, None].copy()
        if dtype != "int32":  # which these tests take for block ids
            require_same_bits("packed", packed, block_ops.export_blocks([blocks], [3, 1]))
            block_ops.move_blocks([blocks], np.array([[3, 1], [1, 3]]))
            require_same_bits("swapped", packed[::-1, 0].copy(), blocks[[3, 1]])


# --- bad input ------------------------------------------------------------------------------------------

I64 = np.int64
REFUSED: list[tuple[str, dict[str, Any], Any, str]] = [
    ("move", {"block_pairs": [[0, 1]]}, TypeError, "block_pairs: is a list"),
    (
        "move",
        {"block_pairs": np.array([[0, 9]])},
        ValueError,
        r"block_pairs\[0, 1\] = 9: wanted 0 <= block < 9",
    ),
    ("move", {"block_pairs": np.array([[-1, 2]])}, ValueError, r"block_pairs\[0, 0\] = -1"),
    (
        "move",
        {"block_pairs": np.array([[0, 1], [2, 1]])},
        ValueError,
        "block_pairs: block 1 is a destination twice",
    ),
    ("move", {"block_pairs": np.zeros((1, 3), I64)}, ValueError, r"block_pairs: shape is \(1, 3\)"),
    ("move", {"block_pairs": np.zeros((1, 2), np.int32)}, TypeError, "block_pairs: dtype is int32"),
    ("move", {"block_pairs": np.zeros(4, I64)}, ValueError, "block_pairs: has 4 places, wanted 9"),
    ("move", {"block_pairs": np.zeros(9, I64)}, ValueError, "block_pairs: block 0 is a destination twice"),
    ("move", {"caches": []}, ValueError, "caches: is empty"),
    ("move", {"caches": [3]}, TypeError, "caches: is a int"),
    ("move", {"caches": [np.zeros(9)]}, ValueError, r"caches: shape is \(9,\)"),
    ("move", {"caches": [np.zeros((9, 2)), np.zeros((9, 3))]}, ValueError, r"caches\[1\]: shape"),
    ("move", {"caches": [np.zeros((9, 2)), np.zeros((9, 2), "f4")]}, TypeError, r"caches\[1\]: dtype"),
    ("move", {"scratch": []}, ValueError, "scratch: has 0 tensors, wanted 4"),
    ("move", {"scratch": pool(count=0)}, ValueError, "scratch: shape is .*, wanted at least 1 block"),
    ("move", {"scratch": pool(count=1, dtype="float32")}, TypeError, "scratch: dtype is float32"),
    ("export", {"block_ids": [9]}, ValueError, r"block_ids\[0\] = 9"),
    ("export", {"block_ids": [1.5]}, TypeError, "block_ids: is 1.5, wanted an integer"),
    ("export", {"block_ids": np.zeros((1, 1), I64)}, ValueError, "block_ids: shape"),
    ("export", {"block_ids": np.zeros(1, np.int32)}, TypeError, "block_ids: dtype is int32"),
    ("export", {"block_ids": 3}, TypeError, "block_ids: is a int"),
    ("export", {"out": np.zeros((2, 4, 4, 2, 8), np.float32)}, TypeError, "out: dtype is float32"),
    (
        "export",
        {"out": np.zeros((3, 4, 4, 2, 8), np.float16)},
        ValueError,
        r"out: shape is \(3, 4, 4, 2, 8\)",
    ),
    ("export", {"out": 3}, TypeError, "out: is a int"),
    ("import", {"block_ids": [1, 1]}, ValueError, "block_ids: a block comes twice"),
    ("import", {"block_ids": [1]}, ValueError, r"packed: shape is \(2, 4, 4, 2, 8\), wanted \(1, 4, "),
    ("import", {"block_ids": [1, -1]}, ValueError, r"block_ids\[1\] = -1"),
    ("import", {"packed": b"abc"}, ValueError, "packed: has 3 bytes, wanted 1024"),
    ("import", {"packed": np.zeros((2, 4, 4, 2, 8), np.float32)}, TypeError, "packed: dtype is float32"),
    ("import", {"packed": "text"}, TypeError, "packed: is a str"),
]


@pytest.mark.parametrize(("op", "changes", "error", "words"), REFUSED, ids=lambda x: str(x)[:30])
def test_bad_input(target: Target, op: str, changes: dict[str, Any], error: Any, words: str) -> None:
    """Before a byte is moved."""
    calls: dict[str, dict[str, Any]] = {
        "move": {"caches": pool(), "block_pairs": np.array([[0, 1], [1, 0]])},
        "export": {"caches": pool(), "block_ids": [0, 1], "out": np.full((2, 4, 4, 2, 8), 7, np.float16)},
        "import": {"packed": np.zeros((2, 4, 4, 2, 8), np.float16), "caches": pool(), "block_ids": [0, 1]},
    }
    call = calls[op] | changes
    if target.device != "cpu":
        pytest.skip("NumPy's arrays are on the CPU: a GPU takes none of them")
    with target.use(), pytest.raises(error, match=f"^{words}"):
        getattr(paged_ops, f"{op}_blocks")(**call)
    if "caches" not in changes:
        for before, after in zip(pool(), call["caches"], strict=True):
            require_same_bits("caches", before, after)
    if op == "export" and "out" not in changes:
        assert (call["out"] == 7).all()


def test_memory_that_overlaps_or_cannot_be_written(target: Target) -> None:
    if target.device != "cpu":
        pytest.skip("NumPy's arrays are on the CPU: a GPU takes none of them")
    both = np.zeros((9, 4), np.float32)
    both.flags.writeable = False
    with target.use():
        with pytest.raises(ValueError, match="^caches: is read-only"):
            paged_ops.move_blocks(both, np.array([[0, 1]]))
        with pytest.raises(ValueError, match=r"^caches\[0\]: is read-only"):
            paged_ops.import_blocks(np.zeros((1, 1, 4), np.float32), both, [1])
        caches = np.zeros((9, 4), np.float32)
        with pytest.raises(ValueError, match="^out: shares memory with "):
            paged_ops.export_blocks(caches, [0, 1], out=caches[:2][:, None])


def test_in_a_full_graph(target: Target) -> None:
    torch = pytest.importorskip("torch")

    def step(caches: list[Any], pairs: Any, ids: Any) -> Any:
        paged_ops.move_blocks(caches, pairs)
        packed = paged_ops.export_blocks(caches, ids)
        paged_ops.import_blocks(packed + 1, caches, ids)
        return packed * 2

    def arguments() -> tuple[Any, ...]:
        caches = [arrays.to_torch(np.nan_to_num(cache), target.device) for cache in pool()]
        return caches, torch.tensor(MOVES["cycle with a branch"]), torch.tensor([3, 1])

    with target.use():
        eager, traced = arguments(), arguments()
        wanted = step(*eager)
        actual = torch.compile(step, fullgraph=True, backend="aot_eager")(*traced)
        assert arrays.same_bits(wanted, actual)
        for a, b in zip(eager[0], traced[0], strict=True):
            assert arrays.same_bits(a, b)


def test_nothing_is_written_before_all_tensors_are_looked_at(ops: HostOps) -> None:
    """Scratch and later caches that cannot be written, or that share memory, are found out first."""
    caches = [np.arange(24, dtype=np.float32).reshape(6, 4) for _ in range(2)]
    before = [cache.copy() for cache in caches]
    scratch = [np.zeros((1, 4), np.float32) for _ in range(2)]
    scratch[1].flags.writeable = False
    pairs = np.array([[0, 1], [2, 3], [3, 2]])
    if ops.target.device == "cpu":
        with pytest.raises(ValueError, match="^scratch: is read-only"):
            ops.move_blocks(caches, pairs, scratch=scratch)
    packed = np.ones((1, 2, 4), np.float32)
    caches[1].flags.writeable = False
    if ops.target.device == "cpu":
        with pytest.raises(ValueError, match=r"^caches\[1\]: is read-only"):
            ops.import_blocks(packed, caches, [3])
    for cache, old in zip(caches, before, strict=True):
        assert (cache == old).all()
