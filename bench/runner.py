"""Runs a case: checks every candidate, times them in turn, and turns the rounds into ratios and goals met."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import paged_ops
from bench import timing
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.timing import Samples, Spread, significant

Row = dict[str, Any]


def run_cases(cases: Iterable[Case], setting: Setting, rounds: int) -> Iterator[Row]:
    """The rows of all cases, as they are done."""
    before = paged_ops._native.cpu_isa()
    try:
        with torch.inference_mode():
            for case in cases:
                yield from run_case(case, setting, rounds)
    finally:
        paged_ops._native.set_cpu_isa(before)


def run_case(case: Case, setting: Setting, rounds: int) -> list[Row]:
    """One row per variant of ours. A candidate whose result is wrong is told of and not timed."""
    return measure(case, make_ready(case, setting), rounds, setting.waited)


def make_ready(case: Case, setting: Setting) -> Trial:
    """The case's trial, with the threads that it wants and our best instruction set."""
    paged_ops._native.set_cpu_isa(setting.isas[0])
    num_threads = case.num_threads or setting.num_threads
    paged_ops.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
    if setting.limits is not None:
        setting.limits.num_threads = num_threads
    return case.build(setting)


def measure(case: Case, trial: Trial, rounds: int, waited: Callable[[], float] = timing.waited) -> list[Row]:
    """Checks and times what is ready."""
    complaints = {name: complaint_of(candidate) for name, candidate in {**trial.others, **trial.ours}.items()}
    for name, candidate in trial.others.items():  # a peer in another process may have ended since
        complaints[name] = complaints[name] or _failure_to_run(candidate)
    sound = {name: c for name, c in {**trial.others, **trial.ours}.items() if not complaints[name]}
    clocks = {name: c.clock for name, c in sound.items()}
    waited = (lambda: 0.0) if trial.crowded else waited
    samples = timing.sample_in_turn(clocks, rounds=rounds, waited=waited)
    flags = list(itertools.chain(*samples.disturbed.values()))
    share_disturbed = round(statistics.fmean(flags), 2) if flags else 0.0
    for name, members in trial.best_of.items():
        if all(member in samples.seconds for member in members):
            # One of them for all rounds; the quickest of each round would be a better one than any is.
            best = min(members, key=lambda member: statistics.median(samples.seconds[member]))
            samples.seconds[name], samples.disturbed[name] = samples.seconds[best], samples.disturbed[best]
    wrong_peers = {name: complaints[name] for name in trial.others if complaints[name]}
    return [
        {
            "suite": case.suite,
            "case": case.name,
            "variant": variant,
            "verified": variant in sound,
            "complaint": complaints[variant],
            "wrong_peers": wrong_peers,
            "disturbed": share_disturbed,
            **(_measured(variant, trial, samples) if variant in sound else {}),
        }
        for variant in trial.ours
    ]


def complaint_of(candidate: Candidate) -> str:
    """What is wrong with the candidate, whatever way it fails; turns 0 and 1 read different data."""
    if candidate.check is None:
        return ""
    try:
        return candidate.check(0) or candidate.check(1)
    except Exception as error:  # a peer that fails is a result, not the end of the run
        return f"{type(error).__name__}: {error}"[:500]


def _failure_to_run(candidate: Candidate) -> str:
    try:
        candidate.clock(0, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _measured(variant: str, trial: Trial, samples: Samples) -> dict[str, Any]:
    ours = trial.ours[variant]
    own = Spread.of([time for time, _ in samples.pairs(variant, variant)[0]])
    others = {name: of for name, of in samples.seconds.items() if name not in trial.ours}
    found: dict[str, Any] = {
        "seconds": own.as_dict(),
        "nbytes": ours.nbytes,
        "gb_per_s": significant(ours.nbytes / own.median / 1e9, 4),
        "others": {name: Spread.of(of).as_dict() for name, of in others.items()},
        "limits": [name for name in trial.others if trial.others[name].check is None],
        "ratios": {
            name: Spread.of([b / a for a, b in samples.pairs(variant, name)[0]]).as_dict() for name in others
        },
        "goals": [
            goal_reached(goal, variant, trial, samples)
            for goal in trial.goals.get(variant, ())
            if not goal.of or goal.of in samples.seconds  # a peer or the limits may be missing
        ],
    }
    if ours.operations:
        found["tflops"] = significant(ours.operations / own.median / 1e12, 4)
    return found


def goal_reached(goal: Goal, variant: str, trial: Trial, samples: Samples) -> dict[str, Any]:
    """A goal beside what was measured: the metric of each round, and whether its median is good enough."""
    ours, kind = trial.ours[variant], goal.metric.partition(":")[0]

    def metric(own: float, of: float) -> float:
        if kind == "seconds":
            return own
        if kind == "tflops":
            return ours.operations / own / 1e12
        if kind == "share":
            return of / own
        if kind == "time":
            return own / of
        if kind == "per_byte":
            return own / of * trial.others[goal.of].nbytes / ours.nbytes
        if kind == "beyond":
            return own - of
        raise ValueError(f"metric: is {goal.metric!r}")

    pairs, disturbed = samples.pairs(variant, goal.of or variant)
    spread = Spread.of([metric(own, of) for own, of in pairs])
    best = metric(min(own for own, _ in pairs), min(of for _, of in pairs))
    return {
        **asdict(goal),
        "measured": spread.as_dict(),
        "rounds": len(pairs),
        "disturbed": disturbed,
        "of_best": significant(best, 5),
        "met": goal.met(spread.median),
    }


def machine(setting: Setting) -> dict[str, Any]:
    """What the figures come from."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    found: dict[str, Any] = {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "threads": setting.num_threads,
        "isas": list(setting.isas),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": [round(x, 2) for x in os.getloadavg()],  # of others too: read ratios, not times
        "arena_mib": setting.arena.nbytes >> 20,
    }
    if setting.limits is not None:
        found["multiply_add_gflops"] = significant(setting.limits.multiply_add_rate() / 1e9, 4)
        found["tile_tflops"] = significant(setting.limits.tile_rate() / 1e12, 3)
    return found
