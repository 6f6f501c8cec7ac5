"""Pool map: one cell per block of the KV pool, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from reference_engine.request import Sequence
from reference_engine.scheduler import Scheduler


@dataclass(frozen=True)
class Cell:
    """A block: who holds it, how full it is, and whether it is free but known to the prefix index."""

    holders: tuple[Sequence, ...]
    filled: float  # 0 .. 1; 1 for a cached block
    cached: bool

    @property
    def shared(self) -> bool:
        return len(self.holders) > 1


def pool_map(scheduler: Scheduler) -> list[Cell]:
    size = scheduler.config.block_size
    holders: dict[int, list[Sequence]] = {}
    filled: dict[int, float] = {}
    for sequence in scheduler.running:
        for number, block in enumerate(sequence.table.ids.tolist()):
            holders.setdefault(block, []).append(sequence)
            tokens = min(size, max(0, sequence.num_computed - number * size))
            filled[block] = max(filled.get(block, 0.0), tokens / size)
    cells = []
    for block in range(scheduler.pool.num_blocks):
        cached = block not in holders and scheduler.index.holds(block)
        cells.append(Cell(tuple(holders.get(block, ())), 1.0 if cached else filled.get(block, 0.0), cached))
    return cells
