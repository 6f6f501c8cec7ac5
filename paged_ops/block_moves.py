"""Moving blocks about a pool, out of it and into it: made of the copies of whole blocks that the ops offer.

Two ways to move more than a copy-on-write does: compaction by a permutation, whose sources and destinations
overlap; and a sequence's blocks of all layers as one contiguous buffer, which another process (a decoder that
a prefill hands over to) or a disk can take as it is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_ops import _arrays, _backend, ops

Pairs = NDArray[np.int64]
_NO_PAIRS: Pairs = np.empty((0, 2), np.int64)


def move_blocks(caches: Any, block_pairs: Any, *, scratch: Any = None) -> None:
    """Move blocks inside caches as if all sources were read before any destination is written.

    Chains run from their far end in as many rounds as they have links, each round one :func:`copy_blocks`
    over all caches; a cycle first puts one of its blocks aside. So a block is read once and written once, but
    for one block of each cycle, which moves twice.

    Args:
        caches: a tensor ``[num_blocks, ...]`` or a list of such with one shape, dtype and strides, written in
            place.
        block_pairs: int64 ``[num_pairs, 2]`` of (source, destination), or a permutation int64
            ``[num_blocks]`` that says where each block goes, on the CPU. Destinations differ; sources may
            repeat and may be destinations. A block that is nobody's destination keeps what it holds.
        scratch: a tensor ``[at least 1, ...]``, or a list of as many as there are caches, shaped as they are
            but for the number of blocks, to put blocks of cycles aside; as many cycles run side by side as it
            has blocks. None: a block per cycle and cache is allocated.
    """
    caches = _listed(caches)
    scratch = None if scratch is None else _listed(scratch)
    if caches and ops._compiling(caches[0]):
        return ops._torch_ops.move(caches, block_pairs, scratch)
    return move_real_blocks(caches, block_pairs, scratch)


def move_real_blocks(caches: list[Any], block_pairs: Any, scratch: list[Any] | None) -> None:
    """The op on real tensors, in lists."""
    num_blocks = _require_alike(caches)
    pairs = _pairs_of(block_pairs, num_blocks)
    _copy(caches, pairs[:0])  # every complaint about caches comes from here
    rounds, cycles = _plan(pairs)
    if scratch is None:
        scratch = [_arrays.empty_like(cache, (max(len(cycles), 1), *cache.shape[1:])) for cache in caches]
    at_once = _require_scratch(scratch, caches)
    for cache, blocks in zip(caches, scratch, strict=True):  # and about scratch from here
        _swap(cache, blocks, _NO_PAIRS, "caches", "scratch")
        _swap(blocks, cache, _NO_PAIRS, "scratch", "caches")
    for some in rounds:
        _copy(caches, some)
    for first in range(0, len(cycles), at_once):
        _turn_cycles(caches, cycles[first : first + at_once], scratch)


def export_blocks(caches: Any, block_ids: Any, *, out: Any = None) -> Any:
    """Blocks of all caches as one contiguous buffer: what a sequence needs to go on in another process.

    Args:
        caches: a tensor ``[num_blocks, ...]`` or a list of such with one shape and dtype (K and V of each
            layer, or a whole pool), any strides.
        block_ids: int64 ``[n]`` on the CPU, or a list of integers. May repeat.
        out: ``[n, num_caches, ...block shape]`` of the caches' dtype, to write to, on their device or another
            (pinned host memory, say, or shared memory); allocated beside the caches when None.

    Returns:
        ``out``. Its bytes are what :func:`import_blocks` takes.
    """
    caches = _listed(caches)
    if caches and ops._compiling(caches[0]):
        return ops._torch_ops.export(caches, block_ids, out)
    return export_real_blocks(caches, block_ids, out)


def export_real_blocks(caches: list[Any], block_ids: Any, out: Any) -> Any:
    """The op on real tensors, in a list."""
    ids = _ids_of(block_ids, _require_alike(caches))
    shape = packed_shape(caches, len(ids))
    if out is None:
        out = _arrays.empty_like(caches[0], shape)
    _require_packed("out", out, caches, shape)
    pairs = np.stack([ids, np.arange(len(ids))], axis=1)
    for some in (pairs[:0], pairs):  # all complaints before all writes
        for i, cache in enumerate(caches):
            _swap(cache, out[:, i], some, f"caches[{i}]", "out")
    return out


def import_blocks(packed: Any, caches: Any, block_ids: Any) -> None:
    """Put exported blocks into caches, which may be other ones, in other blocks, of other strides.

    Args:
        packed: what :func:`export_blocks` gave, on the caches' device or another, or its bytes (``bytes``,
            ``bytearray``, ``memoryview``).
        caches: as many as were exported, of the same shape but for the number of blocks, written in place.
        block_ids: int64 ``[n]`` on the CPU, or a list of integers: where each block goes. All differ.
    """
    caches = _listed(caches)
    if caches and ops._compiling(caches[0]):
        return ops._torch_ops.import_(packed, caches, block_ids)
    return import_real_blocks(packed, caches, block_ids)


def import_real_blocks(packed: Any, caches: list[Any], block_ids: Any) -> None:
    """The op on real tensors, in a list."""
    ids = _ids_of(block_ids, _require_alike(caches))
    if len(np.unique(ids)) != len(ids):
        raise ValueError("block_ids: a block comes twice, wanted each at most once")
    shape = packed_shape(caches, len(ids))
    if isinstance(packed, (bytes, bytearray, memoryview)):
        packed = _from_bytes(packed, caches[0], shape)
    _require_packed("packed", packed, caches, shape)
    pairs = np.stack([np.arange(len(ids)), ids], axis=1)
    for some in (pairs[:0], pairs):  # all complaints before all writes
        for i, cache in enumerate(caches):
            _swap(packed[:, i], cache, some, "packed", f"caches[{i}]")


def packed_shape(caches: list[Any], count: int) -> tuple[int, ...]:
    """Of the buffer that holds `count` blocks of all caches."""
    return (count, len(caches), *caches[0].shape[1:])


# --- the order of copies --------------------------------------------------------------------------------


def _plan(pairs: Pairs) -> tuple[list[Pairs], list[Pairs]]:
    """Rounds of pairs that one copy may do at once, to be done in turn; then the cycles that are left.

    A block may be written once nobody has it to read any more. A cycle's pairs come in the order in which
    they may be done when its first destination has been put aside.
    """
    source_of = {int(d): int(s) for s, d in pairs if s != d}
    readers: dict[int, int] = {}
    for source in source_of.values():
        readers[source] = readers.get(source, 0) + 1
    rounds = []
    ready = [block for block in source_of if block not in readers]
    while ready:
        done = [(source_of.pop(block), block) for block in ready]
        rounds.append(np.array(done, np.int64))
        ready = []
        for source, _ in done:
            readers[source] -= 1
            if readers[source] == 0 and source in source_of:
                ready.append(source)
    cycles = []
    while source_of:
        block, cycle = next(iter(source_of)), []
        while block in source_of:
            cycle.append((source_of[block], block))
            block = source_of.pop(block)
        cycles.append(np.array(cycle, np.int64))
    return rounds, cycles


def _turn_cycles(caches: list[Any], cycles: list[Pairs], scratch: list[Any]) -> None:
    """Side by side: each one's first destination aside, then all its pairs but the last, which comes back."""
    aside = np.arange(len(cycles))
    firsts = np.stack([[cycle[0, 1] for cycle in cycles], aside], axis=1)
    lasts = np.stack([aside, [cycle[-1, 1] for cycle in cycles]], axis=1)
    for cache, blocks in zip(caches, scratch, strict=True):
        _swap(cache, blocks, firsts, "caches", "scratch")
    for i in range(max(map(len, cycles)) - 1):
        _copy(caches, np.array([cycle[i] for cycle in cycles if i < len(cycle) - 1], np.int64))
    for cache, blocks in zip(caches, scratch, strict=True):
        _swap(blocks, cache, lasts, "scratch", "caches")


def _copy(caches: list[Any], pairs: Pairs) -> None:
    _backend.module.copy_blocks(caches, _arrays.beside(caches[0], pairs), False)


def _swap(source: Any, destination: Any, pairs: Pairs, source_name: str, destination_name: str) -> None:
    """`swap_blocks`, whose complaints are about the arguments as they are called here."""
    try:
        _backend.module.swap_blocks(source, destination, pairs)
    except (ValueError, TypeError) as error:
        words = str(error)
        for native, name in (("source", source_name), ("destination", destination_name)):
            if words.startswith(native):
                words = name + words[len(native) :]
                break
        raise type(error)(words) from None


# --- what is given --------------------------------------------------------------------------------------


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _require_alike(caches: list[Any]) -> int:
    """One shape and dtype. The number of blocks."""
    if not caches:
        raise ValueError("caches: is empty, wanted at least one tensor")
    for i, cache in enumerate(caches):
        name = "caches" if len(caches) == 1 else f"caches[{i}]"
        if not hasattr(cache, "shape") or not hasattr(cache, "dtype"):
            raise TypeError(f"{name}: is a {type(cache).__name__}, wanted a tensor of torch, NumPy or cupy")
        if len(cache.shape) < 2:
            raise ValueError(f"{name}: shape is {tuple(cache.shape)}, wanted [num_blocks, ...]")
        if tuple(cache.shape) != tuple(caches[0].shape):
            shape = tuple(caches[0].shape)
            raise ValueError(f"{name}: shape is {tuple(cache.shape)}, wanted {shape} as caches[0]")
        if cache.dtype != caches[0].dtype:
            raise TypeError(f"{name}: dtype is {cache.dtype}, wanted {caches[0].dtype} as caches[0]")
    return int(caches[0].shape[0])


def _require_scratch(scratch: list[Any], caches: list[Any]) -> int:
    """How many blocks fit into each."""
    if len(scratch) != len(caches):
        raise ValueError(f"scratch: has {len(scratch)} tensors, wanted {len(caches)}, one for each of caches")
    for blocks, cache in zip(scratch, caches, strict=True):
        wanted = tuple(cache.shape[1:])
        if not hasattr(blocks, "shape") or not hasattr(blocks, "dtype"):
            raise TypeError(f"scratch: is a {type(blocks).__name__}, wanted a tensor")
        if len(blocks.shape) < 1 or tuple(blocks.shape[1:]) != wanted or blocks.shape[0] < 1:
            raise ValueError(f"scratch: shape is {tuple(blocks.shape)}, wanted at least 1 block of {wanted}")
        if blocks.dtype != cache.dtype:
            raise TypeError(f"scratch: dtype is {blocks.dtype}, wanted {cache.dtype} as caches")
    return min(int(blocks.shape[0]) for blocks in scratch)


def _require_packed(name: str, packed: Any, caches: list[Any], shape: tuple[int, ...]) -> None:
    if not hasattr(packed, "shape") or not hasattr(packed, "dtype"):
        raise TypeError(f"{name}: is a {type(packed).__name__}, wanted a tensor")
    if tuple(packed.shape) != shape:
        raise ValueError(f"{name}: shape is {tuple(packed.shape)}, wanted {shape}, [blocks, caches, ...]")
    if _arrays.dtype_name(packed.dtype) != _arrays.dtype_name(caches[0].dtype):
        raise TypeError(f"{name}: dtype is {packed.dtype}, wanted {caches[0].dtype} as caches")


def _pairs_of(block_pairs: Any, num_blocks: int) -> Pairs:
    pairs = _arrays.host_values("block_pairs", block_pairs)
    if pairs.dtype != np.int64:
        raise TypeError(f"block_pairs: dtype is {pairs.dtype}, wanted int64")
    if pairs.ndim == 1:
        if len(pairs) != num_blocks:
            raise ValueError(f"block_pairs: has {len(pairs)} places, wanted {num_blocks}, one for each block")
        pairs = np.stack([np.arange(num_blocks), pairs], axis=1)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"block_pairs: shape is {pairs.shape}, wanted [num_pairs, 2] or [num_blocks]")
    _require_blocks("block_pairs", pairs, num_blocks)
    blocks, counts = np.unique(pairs[:, 1], return_counts=True)
    if (counts > 1).any():
        block = blocks[counts > 1][0]
        raise ValueError(f"block_pairs: block {block} is a destination twice; wanted each destination once")
    return pairs


def _ids_of(block_ids: Any, num_blocks: int) -> Pairs:
    if isinstance(block_ids, Sequence) and not isinstance(block_ids, (str, bytes)):
        block_ids = np.array([ops._count("block_ids", block) for block in block_ids], np.int64)
    ids = _arrays.host_values("block_ids", block_ids)
    if ids.ndim != 1:
        raise ValueError(f"block_ids: shape is {ids.shape}, wanted [num_blocks]")
    if ids.dtype != np.int64:
        raise TypeError(f"block_ids: dtype is {ids.dtype}, wanted int64")
    _require_blocks("block_ids", ids, num_blocks)
    return ids


def _require_blocks(name: str, blocks: Pairs, num_blocks: int) -> None:
    bad = (blocks < 0) | (blocks >= num_blocks)
    if bad.any():
        at = tuple(map(int, np.argwhere(bad)[0]))
        place = ", ".join(map(str, at))
        raise ValueError(f"{name}[{place}] = {blocks[at]}: wanted 0 <= block < {num_blocks}")


def _from_bytes(data: Any, like: Any, shape: tuple[int, ...]) -> Any:
    """A view of the bytes as blocks, in host memory, of the kind of `like`."""
    nbytes = memoryview(data).nbytes
    wanted = int(np.prod(shape, dtype=np.int64)) * int(like.dtype.itemsize)
    if nbytes != wanted:
        raise ValueError(f"packed: has {nbytes} bytes, wanted {wanted}: {shape} of {like.dtype}")
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(like, torch.Tensor):
        return np.frombuffer(data, like.dtype).reshape(shape)
    if nbytes == 0:
        return torch.empty(shape, dtype=like.dtype)
    with warnings.catch_warnings():  # that bytes are read-only: they are only read
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=like.dtype).view(shape)
