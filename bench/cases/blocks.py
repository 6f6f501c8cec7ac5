"""Whole blocks: copy-on-write inside a pool over all layers, and swaps between two pools, beside memcpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import paged_ops
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.timing import called
from bench.workloads import Shape
from paged_ops import reference
from paged_ops.testing import arrays

SHAPE = Shape(1, 1, 8, 1, 128)
_PIECE_NBYTES = 32 << 10  # K of one block of one layer


@dataclass(frozen=True)
class BlockData:
    """Two pools, which may be one, block-major over all layers; pairs (source, destination) for each turn."""

    source: Any  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    destination: Any
    pairs: Any  # [num_turns, num_pairs, 2] int64

    @property
    def nbytes(self) -> int:
        """Read and written by a call."""
        return 2 * self.pairs.shape[1] * int(self.source[0].nbytes)

    def turn(self, turn: int) -> Any:
        return self.pairs[turn % len(self.pairs)]

    def candidate(self, call: Callable[[int], Any]) -> Candidate:
        """A candidate that is checked bit for bit."""

        def check(turn: int) -> str:
            sources, destinations = self.turn(turn).T
            self.destination[destinations] = (
                0  # what a call on this turn copied before must not help this one
            )
            count = len(sources)
            pool = arrays.to_numpy(torch.cat([self.source[sources], self.destination[destinations]]))
            reference.copy_blocks(pool, np.stack([np.arange(count), count + np.arange(count)], axis=1))
            call(turn)
            found = torch.cat([self.source[sources], self.destination[destinations]])
            return "" if arrays.same_bits(found, pool) else "the copied blocks differ from the oracle's"

        return Candidate(called(call), check, self.nbytes)


def _limit(setting: Setting, data: BlockData) -> dict[str, Candidate]:
    found = setting.limits
    if found is None:
        return {}
    block = int(data.source[0].nbytes)
    pieces = np.arange(0, block, _PIECE_NBYTES, dtype=np.uint64)

    def addresses(pool: Any, blocks: Any) -> Any:
        begins = np.uint64(pool.data_ptr()) + blocks.numpy().astype(np.uint64) * np.uint64(block)
        return (begins[:, None] + pieces).reshape(-1)

    lists = [
        (addresses(data.destination, pairs[:, 1]), addresses(data.source, pairs[:, 0]))
        for pairs in data.pairs
    ]

    def memcpy(turn: int, num_calls: int) -> float:
        turns = (lists[(turn + i) % len(lists)] for i in range(num_calls))
        return sum(found.copy(*lists_of_turn, _PIECE_NBYTES) for lists_of_turn in turns) / num_calls

    return {"memcpy": Candidate(memcpy, nbytes=data.nbytes)}


def _pairs(sources: Any, destinations: Any, num_pairs: int) -> Any:
    """Pairs in which no block comes twice, as many turns of them as there are."""
    num_turns = min(len(sources), len(destinations)) // num_pairs
    count = num_turns * num_pairs
    return torch.stack([sources[:count], destinations[:count]], dim=1).view(num_turns, num_pairs, 2)


def _pool(setting: Setting) -> Any:
    num_layers = setting.length(32)  # 2 MiB a block
    return setting.arena.pool(SHAPE, num_layers).tensor


def _copy(setting: Setting, *, num_pairs: int, per_layer: bool = False) -> Trial:
    pool = _pool(setting)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    half = len(pool) // 2
    data = BlockData(pool, pool, _pairs(order[:half], order[half:], num_pairs))
    caches = [pool[:, layer, which] for layer in range(pool.shape[1]) for which in (0, 1)]

    def call(turn: int) -> None:
        paged_ops.copy_blocks(caches if per_layer else pool, data.turn(turn))

    trial = Trial({"ours": data.candidate(call)}, _limit(setting, data))
    trial.others |= setting.peers.candidates("copy", setting, data)
    trial.goals["ours"] = (Goal("block copy, all layers", "share:memcpy", 0.95),)
    return trial


def _swap(setting: Setting, *, num_pairs: int) -> Trial:
    pool = _pool(setting)
    half = len(pool) // 2
    generator = torch.Generator().manual_seed(0)
    pairs = _pairs(
        torch.randperm(half, generator=generator), torch.randperm(half, generator=generator), num_pairs
    )
    data = BlockData(pool[:half], pool[half : 2 * half], pairs)

    def call(turn: int) -> None:
        paged_ops.swap_blocks(data.source, data.destination, data.turn(turn))

    trial = Trial({"ours": data.candidate(call)}, _limit(setting, data))
    trial.others |= setting.peers.candidates("copy", setting, data)
    trial.goals["ours"] = (Goal("host swap, all layers", "share:memcpy", 0.95),)
    return trial


COPY_CASES = (
    *(Case("copy", f"{n} pairs", partial(_copy, num_pairs=n)) for n in (1, 16)),
    Case("copy", "16 pairs, 1 thread", partial(_copy, num_pairs=16), num_threads=1),
    Case("copy", "16 pairs, a cache per layer", partial(_copy, num_pairs=16, per_layer=True)),
)
SWAP_CASES = tuple(Case("swap", f"{n} pairs", partial(_swap, num_pairs=n)) for n in (1, 16))
