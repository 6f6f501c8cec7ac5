"""What a benchmark case is: candidates timed in turn, a check of each, and goals for their ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench import timing
from bench.arena import Arena
from bench.limits import Limits
from bench.timing import Clock

if TYPE_CHECKING:
    from bench.peers import Peers

# (turn) -> what is wrong with the candidate's result on that turn's data; empty if nothing
Check = Callable[[int], str]


@dataclass(frozen=True)
class Candidate:
    clock: Clock
    check: Check | None = None  # limits have none: they compute nothing
    nbytes: int = 0  # that a call has to move
    operations: int = 0  # that a call has to do, where arithmetic is the bound


@dataclass(frozen=True)
class Goal:
    """A bound on one metric of a row.

    Metrics: ``share:X`` is X's time over ours, ``time:X`` ours over X's, ``per_byte:X`` the same per byte,
    ``beyond:X`` our seconds less X's, ``seconds`` ours, ``tflops`` our 10^12 operations per second.
    """

    work: str  # the line of the table of goals
    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        if self.at_least is not None and value < self.at_least:
            return False
        return self.at_most is None or value <= self.at_most

    @property
    def of(self) -> str:
        return self.metric.partition(":")[2]


@dataclass
class Trial:
    """A case made ready: ours (by variant, such as an instruction set) and what they stand beside."""

    ours: dict[str, Candidate]
    others: dict[str, Candidate] = field(default_factory=dict)
    best_of: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the quickest of some
    goals: dict[str, tuple[Goal, ...]] = field(default_factory=dict)  # by variant
    # Its own threads may keep each other waiting, and how much is what it measures: no sign of a disturbance.
    crowded: bool = False


@dataclass(frozen=True)
class Case:
    suite: str
    name: str
    build: Callable[[Setting], Trial]
    quick: bool = True  # part of the quick form
    num_threads: int = 0  # 0: as many as the run has


@dataclass
class Setting:
    """What all cases of a run share."""

    arena: Arena
    num_threads: int
    isas: tuple[str, ...]  # best first
    peers: Peers
    limits: Limits | None
    shrink: int = 1  # lengths are divided by this: for smoke tests

    def waited(self) -> float:
        """Seconds for which the threads of all candidates so far were ready and had no CPU."""
        limits = self.limits.waited() if self.limits is not None else 0.0
        return timing.waited() + limits + self.peers.waited()

    def length(self, num_tokens: int, at_least: int = 1) -> int:
        return max(num_tokens // self.shrink, at_least)
