"""Makes the suites in this folder: one arena for all, the form (quick or full), and the report at the end.

python -m pytest bench [--full] [-k TEXT]        # `make bench`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

# Before numpy comes in: the oracle's threads would spin beside those that are timed.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

import paged_ops
from bench import compare, runner
from bench.case import Case, Setting
from bench.cases import SUITES

OUT = Path(__file__).parents[1] / "build" / "bench"
_REPORT = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every case, more rounds, a larger pool")
    parser.addoption("--tiny", action="store_true", help="small shapes: whether it runs, not how fast")
    parser.addoption("--out", type=Path, default=OUT, help="folder of bench.json and bench.svg")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` becomes each case of the suites that the test names by its marker."""
    if "case" in metafunc.fixturenames:
        names = metafunc.definition.get_closest_marker("suites").args
        cases = [case for name in names for case in SUITES[name]]
        if not metafunc.config.getoption("--full"):
            cases = [case for case in cases if case.quick]
        metafunc.parametrize("case", cases, ids=[f"{case.suite}: {case.name}" for case in cases])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "suites(names): `case` becomes each case of these suites")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def setting(full: bool, request: pytest.FixtureRequest) -> Iterator[Setting]:
    tiny = request.config.getoption("--tiny")
    mib = 16 if tiny else 2048 if full else 1024
    found = compare.make_setting(
        arena_nbytes=mib * compare.MIB, peers=compare.default_peers(), shrink=64 if tiny else 1
    )
    yield found
    found.peers.close()


@pytest.fixture
def run(
    benchmark: Any, setting: Setting, full: bool, request: pytest.FixtureRequest
) -> Callable[[Case], None]:
    """Checks the case, takes its ratios in interleaved rounds, then times our best variant by itself.

    These are pytest-benchmark's own figures. They hold half a microsecond of our clock, and where ops run
    in turn both of them; the ratios, in extra_info and in the report, hold neither.
    """
    stash = request.config.stash

    def run_case(case: Case) -> None:
        if _REPORT not in stash:
            stash[_REPORT] = compare.empty_report(setting, 15 if full else 5)
        told = stash[_REPORT]
        before = paged_ops._native.cpu_isa()
        with torch.inference_mode():
            trial = runner.make_ready(case, setting)
            rows = runner.measure(case, trial, told["rounds"], setting.waited)
            told["rows"] += rows
            wrong = [f"{row['variant']}: {row['complaint']}" for row in rows if not row["verified"]]
            assert not wrong, wrong
            first, candidate, turns = rows[0], trial.ours[rows[0]["variant"]], count()
            iterations = max(1, min(1000, int(1e-3 / first["seconds"]["median"])))
            benchmark.group = case.suite
            benchmark.extra_info.update(
                variant=first["variant"],
                nbytes=first["nbytes"],
                percent_of_limit={
                    name: round(100 * first["ratios"][name]["median"], 1) for name in first["limits"]
                },
                peer_over_ours={
                    name: spread["median"]
                    for name, spread in first["ratios"].items()
                    if name not in first["limits"]
                },
                goals=[goal for row in rows for goal in row["goals"]],
            )
            benchmark.pedantic(
                lambda: candidate.clock(next(turns), 1),
                rounds=10 if full else 5,
                iterations=iterations,
                warmup_rounds=1,
            )
        paged_ops._native.set_cpu_isa(before)

    return run_case


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    told = config.stash.get(_REPORT, None)
    if told is not None:
        out = config.getoption("--out")
        compare.write_files(told, out / "bench.json", out / "bench.svg")
        terminalreporter.write_line(compare.text(told))
        terminalreporter.write_line(f"written to {out / 'bench.json'} and {out / 'bench.svg'}")
