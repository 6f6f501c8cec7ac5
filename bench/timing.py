"""Timing that can be trusted on a noisy machine: candidates in turn, several rounds, medians and spreads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the rounds of one candidate."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


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
