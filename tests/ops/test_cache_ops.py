"""write_kv_cache, copy_blocks, swap_blocks, gather_kv_cache: bit for bit, in every layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, Case, build
from paged_ops.testing.checks import (
    block_pairs,
    check_copy,
    check_gather,
    check_swap,
    check_write,
    require_same_bits,
    require_same_memory,
)
from paged_ops.testing.covering import covering


def cache_cases(target: Target) -> list[Case]:
    """Geometries of caches: pairs of every two axes."""
    axes = {
        "dtype": tuple(arrays.DTYPES),
        "dims": ((8, 8), (64, 64), (128, 128), (256, 256), (40, 80), (128, 8), (576, 512), (264, 320)),
        "num_kv_heads": (1, 2, 7),
        "block_size": (1, 3, 16, 256),
        "layout": tuple(LAYOUTS),
        "strided": (False, True),
    }
    cases = []
    for seed, row in enumerate(covering(axes, seed=3)):
        head_dim, value_head_dim = row.pop("dims")
        lens = (0, 1, 17, 40) if row["block_size"] < 256 else (0, 255, 300)
        cases.append(
            Case(
                lens,
                num_q_heads=row["num_kv_heads"],
                head_dim=head_dim,
                value_head_dim=value_head_dim,
                seed=seed,
                **row,
            )
        )
    return cases


@pytest.mark.grid(cases=cache_cases)
def test_write(ops: HostOps, case: Case) -> None:
    check_write(ops, case)


@pytest.mark.grid(cases=cache_cases)
def test_copy(ops: HostOps, case: Case) -> None:
    check_copy(ops, case)


@pytest.mark.grid(cases=cache_cases)
def test_swap(ops: HostOps, case: Case) -> None:
    layouts = list(LAYOUTS)
    check_swap(ops, case, layouts[case.seed % len(layouts)])


@pytest.mark.grid(cases=cache_cases)
def test_gather(ops: HostOps, case: Case) -> None:
    check_gather(ops, case)
    check_gather(ops, case, spare_rows=5, give_out=case.seed % 2 == 0)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_torch_tensors(target: Target, dtype: str) -> None:
    ops, case = HostOps(target, "torch"), Case((0, 5, 33), dtype=dtype, layout="pool", block_size=4)
    check_write(ops, case)
    check_copy(ops, case)
    check_swap(ops, case, "HND")
    check_gather(ops, case, spare_rows=2, give_out=True)


@pytest.mark.parametrize(("source", "destination"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_swap_between_any_two_layouts(ops: HostOps, source: str, destination: str) -> None:
    check_swap(ops, Case((9, 30), dtype="float16", layout=source, block_size=4, num_kv_heads=2), destination)


@pytest.mark.parametrize("view", ["dense", "runs", "runs of runs"])
def test_large_blocks(ops: HostOps, view: str) -> None:
    """Blocks that are shared out in pieces, at borders that are none of theirs, dense and scattered."""
    rng = np.random.default_rng(7)
    whole = {"dense": (4, 3, 5, 26_001), "runs": (4, 7, 52_003), "runs of runs": (4, 5, 3, 30_001)}[view]
    pools = [rng.integers(0, 256, whole, np.uint8) for _ in range(2)]
    cut = {
        "dense": lambda x: x,
        "runs": lambda x: x[:, :, 1:-1],
        "runs of runs": lambda x: x[:, ::2, :2, 5:-7],
    }[view]
    source, destination = map(cut, pools)
    wanted = [pool.copy() for pool in pools]
    cut(wanted[0])[2], cut(wanted[0])[1] = source[0], source[3]
    ops.copy_blocks([source], np.array([[0, 2], [3, 1]]))
    require_same_memory("source", wanted[0], pools[0])
    cut(wanted[1])[0] = source[2]
    ops.swap_blocks(source, destination, np.array([[2, 0]]))
    require_same_memory("destination", wanted[1], pools[1])


@pytest.mark.parametrize("nbytes", [2**20, 2**20 + 1, 3 * 128 * 1024 - 1, 4096 + 1023, 4095])
@pytest.mark.parametrize("offset", [0, 1, 33])
def test_long_calls_move_every_byte_and_no_other(ops: HostOps, nbytes: int, offset: int) -> None:
    """More than caches hold is copied by other means, whatever the runs' lengths and wherever they lie."""
    if ops.target.device != "cpu":
        pytest.skip("the CPU's way of copying long runs, at addresses that NumPy lets a test choose")
    num_pairs = 2**20 // nbytes + 1
    shape = 2 * num_pairs, nbytes + 37
    pairs = np.stack([np.arange(num_pairs), num_pairs + np.arange(num_pairs)], axis=1)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)

    def pool() -> np.ndarray:
        memory = np.empty(noise.size + 128, np.uint8)
        begin = -memory.ctypes.data % 64 + offset
        memory[begin : begin + noise.size] = noise.ravel()
        return memory[begin : begin + noise.size].reshape(shape)

    for name in ("copy_blocks", "swap_blocks"):
        wanted, found, source = noise.copy(), pool(), pool()
        wanted[pairs[:, 1], :nbytes] = wanted[pairs[:, 0], :nbytes]
        if name == "copy_blocks":
            ops.copy_blocks(found[:, :nbytes], pairs)
        else:
            ops.swap_blocks(source[:, :nbytes], found[:, :nbytes], pairs)
        require_same_bits(name, wanted, found)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("source", "destination"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_swap_between_host_and_device(target: Target, source: str, destination: str, pinned: bool) -> None:
    if target.backend != "cuda":
        pytest.skip("needs a GPU")
    torch = pytest.importorskip("torch")
    host = torch.arange(6 * 2 * 3 * 8.0).reshape(6, 2, 3, 8)
    blocks = {"cpu": host.pin_memory() if pinned else host.clone(), "cuda": host.cuda().neg_()}
    pairs = torch.tensor([[0, 5], [3, 1]])
    wanted, given = blocks[destination].cpu().clone(), blocks[source].cpu().clone()
    with target.use():
        paged_ops.swap_blocks(blocks[source], blocks[destination], pairs)
    torch.cuda.synchronize()
    wanted[pairs[:, 1]] = given[pairs[:, 0]]
    assert torch.equal(wanted, blocks[destination].cpu())


def test_write_of_nothing(ops: HostOps) -> None:
    """No slots, or all of them skipped: not a byte changes."""
    case = Case((5, 33), block_size=4)
    for slots in ([], [-1], [-1, -2, -(2**62)]):
        wanted, actual = build(case), build(case)
        key = value = np.ones((4, case.num_kv_heads, case.head_dim), np.float32)
        ops.write_kv_cache(key, value, actual.key_cache, actual.value_cache, np.array(slots, np.int64))
        require_same_memory("key_cache", wanted.key_cache, actual.key_cache)
        require_same_memory("value_cache", wanted.value_cache, actual.value_cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_write_then_attend(ops: HostOps, dtype: str) -> None:
    """Tokens written one by one through slots are the ones that attention and gather read."""
    case = Case((37,), dtype=dtype, block_size=4, layout="pool HND")
    given, written = build(case), build(case)
    keys, values, _ = ops.gather_kv_cache(
        given.key_cache, given.value_cache, given.block_tables, given.seq_lens
    )
    written.key_cache[...], written.value_cache[...] = np.nan, np.nan
    token = np.arange(37)
    slots = given.block_tables[0, token // 4].astype(np.int64) * 4 + token % 4
    for some in np.array_split(np.random.default_rng(0).permutation(37), 5):
        ops.write_kv_cache(keys[some], values[some], written.key_cache, written.value_cache, slots[some])
    require_same_memory("key_cache", given.key_cache, written.key_cache)
    for wanted, actual in zip(given.attention(ops), written.attention(ops), strict=True):
        require_same_bits("attention", wanted, actual)


def test_copy_of_a_whole_pool(ops: HostOps) -> None:
    """All layers in one call: as one tensor of any rank, or as a list of K and V of each layer."""
    shape = (10, 3, 2, 4, 2, 8)
    original = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    pairs = block_pairs(10)
    wanted, whole, listed = original.copy(), original.copy(), original.copy()
    reference.copy_blocks(wanted, pairs)
    ops.copy_blocks(whole, pairs)
    ops.copy_blocks([listed[:, layer, kv] for layer in range(3) for kv in range(2)], pairs)
    require_same_bits("one tensor", wanted, whole)
    require_same_bits("a list", wanted, listed)
    scattered = np.stack([original.swapaxes(1, 4)] * 2, axis=1)[:, 0]
    wanted = scattered.copy()
    reference.copy_blocks(wanted, pairs)
    ops.copy_blocks(scattered, pairs)
    require_same_bits("permuted dimensions", wanted, scattered)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float64"])
def test_copy_and_swap_move_bytes_of_any_dtype(ops: HostOps, dtype: str) -> None:
    original = np.random.default_rng(0).integers(0, 100, (6, 5, 3)).astype(dtype)
    pairs = np.array([[0, 3], [1, 4]], np.int64)
    wanted, actual = original.copy(), original.copy()
    reference.copy_blocks(wanted, pairs)
    ops.copy_blocks(actual, pairs)
    require_same_bits("copy_blocks", wanted, actual)
    wanted, actual = np.zeros_like(original), np.zeros_like(original)
    reference.swap_blocks(original, wanted, pairs)
    ops.swap_blocks(original, actual, pairs)
    require_same_bits("swap_blocks", wanted, actual)


def test_no_pairs(ops: HostOps) -> None:
    blocks = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    ops.copy_blocks(blocks, np.zeros((0, 2), np.int64))
    ops.swap_blocks(blocks, blocks.copy(), np.zeros((0, 2), np.int64))
    assert (blocks.ravel() == np.arange(12)).all()


def test_gather_of_nothing(ops: HostOps) -> None:
    case = Case((0, 0))
    inputs = build(case)
    tensors = inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens
    key, value, cu_seqlens = ops.gather_kv_cache(*tensors, num_tokens=0)
    assert key.shape == value.shape == (0, 2, 64) and cu_seqlens.tolist() == [0, 0, 0]
    none = np.zeros((0, 3), np.int32), np.zeros(0, np.int32)
    key, value, cu_seqlens = ops.gather_kv_cache(*tensors[:2], *none)
    assert key.shape == (0, 2, 64) and cu_seqlens.tolist() == [0]


def test_gather_then_attend_equals_attention_on_pages(ops: HostOps) -> None:
    """What is gathered is one block per sequence long enough to attend over."""
    case = Case((5, 40), dtype="float16")
    inputs = build(case)
    key, value, cu = ops.gather_kv_cache(
        inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens
    )
    wanted = inputs.attention(ops)
    for seq in range(2):
        one = slice(cu[seq], cu[seq + 1])
        tables = np.zeros((1, 1), np.int32)
        alone = (
            inputs.query[seq : seq + 1],
            key[None, one],
            value[None, one],
            tables,
            inputs.seq_lens[seq : seq + 1],
        )
        out, lse = ops.paged_attention_decode(*alone, return_lse=True)
        require_same_bits("out", wanted[0][seq : seq + 1], out)
        require_same_bits("lse", wanted[1][seq : seq + 1], lse)
