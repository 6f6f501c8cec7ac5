"""Timing that can be trusted on a noisy machine: candidates in turn, several rounds, medians and spreads."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# (turn, number of calls) -> seconds per call. A turn chooses the data, so that successive ones are cold.
Clock = Callable[[int, int], float]


def significant(number: float, digits: int) -> float:
    """Rounded to so many digits that say something: whatever the size, only zero becomes zero."""
    return float(f"{number:.{digits}g}")


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the rounds of one candidate."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Spread:
    """Quartiles and extremes of a number that was measured once per round."""

    median: float
    q1: float
    q3: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        q1, median, q3 = (
            statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
        )
        return cls(median, q1, q3, min(numbers), max(numbers))

    def as_dict(self) -> dict[str, float]:
        return {name: significant(value, 5) for name, value in asdict(self).items()}


def waited() -> float:
    """Seconds for which this process's threads were ready to run and had no CPU, as far as Linux tells."""
    nanoseconds = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            nanoseconds += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            pass  # the thread has ended, or this kernel does not count
    return 1e-9 * nanoseconds


# A measurement is disturbed when its threads waited for a CPU for more than this share of its time.
DISTURBED = 0.03

# Rounds without a disturbance that a ratio is trusted on.
ENOUGH_ROUNDS = 3


@dataclass(frozen=True)
class Samples:
    """Element i of all lists is of the same round."""

    seconds: dict[str, list[float]]  # per call
    disturbed: dict[str, list[bool]]  # whether others on the machine took a CPU from it

    def pairs(self, a: str, b: str) -> tuple[list[tuple[float, float]], bool]:
        """The seconds of two, round by round, and whether the machine was too busy to trust them.

        Of the rounds in which neither was disturbed, if these are enough, else of all.
        """
        both = list(zip(self.seconds[a], self.seconds[b], strict=True))
        flags = zip(self.disturbed[a], self.disturbed[b], strict=True)
        quiet = [pair for pair, flag in zip(both, flags, strict=True) if not any(flag)]
        return (quiet, False) if len(quiet) >= min(ENOUGH_ROUNDS, len(both)) else (both, True)


def sample_in_turn(
    clocks: Mapping[str, Clock],
    *,
    rounds: int,
    round_seconds: float = 1e-3,
    settle_seconds: float = 5e-3,
    tries: int = 3,
    waited: Callable[[], float] = waited,
) -> Samples:
    """Each clock once per round.

    Before each measurement a pause lets the thread pools of the one before go to sleep (torch's OpenMP spins
    for up to 3.5 ms after a call), and a call that is not counted wakes its own. A disturbed measurement is
    taken again, up to `tries` times, and the one least disturbed is kept: chosen by how long its threads
    waited, never by its time.
    """
    turns = itertools.count()

    def measure(clock: Clock, num_calls: int) -> float:
        return clock([next(turns) for _ in range(num_calls)][0], num_calls)

    def attempt(name: str) -> tuple[float, float]:
        """The share of the time in which threads waited, and the seconds per call."""
        time.sleep(settle_seconds)
        measure(clocks[name], 1)
        before = waited()
        taken = measure(clocks[name], num_calls[name])
        return (waited() - before) / max(taken * num_calls[name], 1e-9), taken

    num_calls: dict[str, int] = {}
    for name, clock in clocks.items():
        measure(clock, 1)
        num_calls[name] = max(1, min(1000, int(round_seconds / max(measure(clock, 1), 1e-7))))
    order = list(clocks)
    shuffle = random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in clocks}
    disturbed: dict[str, list[bool]] = {name: [] for name in clocks}
    for _ in range(rounds):
        shuffle(order)  # so that nobody always runs after the same neighbour
        for name in order:
            share, taken = attempt(name)
            for _ in range(tries - 1):
                if share <= DISTURBED:
                    break
                share, taken = min((share, taken), attempt(name), key=lambda found: found[0])
            seconds[name].append(taken)
            disturbed[name].append(share > DISTURBED)
    return Samples(seconds, disturbed)


def called(call: Callable[[int], Any], *, before: Callable[[], Any] | None = None) -> Clock:
    """The clock of a Python call that takes the turn; what comes before it is not counted."""

    def clock(turn: int, num_calls: int) -> float:
        if before is not None:
            before()
        begin = time.perf_counter()
        for i in range(turn, turn + num_calls):
            call(i)
        return (time.perf_counter() - begin) / num_calls

    return clock


def time_interleaved(
    candidates: Mapping[str, Callable[[], Any]], *, device: str, rounds: int = 9, round_seconds: float = 0.02
) -> dict[str, Timing]:
    """Time each candidate in every round, one after the other, so that drift of the machine meets all alike.

    On a GPU a round is a train of calls between two events; on the CPU it is timed by the wall clock.
    """
    timer = _time_on_gpu if device == "cuda" else _time_on_cpu
    calls = {}
    for name, call in candidates.items():
        timer(call, 2)  # warm up
        calls[name] = max(1, min(1000, int(round_seconds / max(timer(call, 2), 1e-7))))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            seconds[name].append(timer(call, calls[name]))
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in seconds.items()}


def _time_on_cpu(call: Callable[[], Any], num_calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begin) / num_calls


def _time_on_gpu(call: Callable[[], Any], num_calls: int) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / num_calls
