"""The benchmarks in a tiny form: all are checked, goals are judged, wrong results are told. No timing."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import paged_ops
from bench import chart, compare, limits, report, runner
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.cases import SUITES
from bench.timing import Samples, Spread, sample_in_turn

MIB = 1 << 20


def has_compiler() -> bool:
    try:
        limits.build()
    except limits.NoLimits:
        return False
    return True


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    threads = paged_ops.get_num_threads(), torch.get_num_threads()
    found = compare.make_setting(arena_nbytes=16 * MIB, num_threads=2, peers=("torch", "numpy"), shrink=64)
    yield found
    found.peers.close()
    paged_ops.set_num_threads(threads[0])
    torch.set_num_threads(threads[1])


def case_named(suite: str, name: str) -> Case:
    return next(case for case in SUITES[suite] if case.name == name)


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_is_checked_and_told(suite: str, setting: Setting) -> None:
    told = compare.compare(SUITES[suite], setting, rounds=2, echo=False)
    rows = told["rows"]
    assert {row["case"] for row in rows} == {case.name for case in SUITES[suite]}
    for row in rows:
        assert row["verified"] and not row["wrong_peers"], report.problems(rows)
        assert row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
        assert set(row["ratios"]) == set(row["others"]) and row["others"]
        for goal in row["goals"]:
            assert goal["met"] in (True, False) and math.isfinite(goal["measured"]["median"])
    # Without peers a prefill has a goal only where there are tiles.
    has_goals = suite != "prefill" or "amx" in setting.isas
    assert any(row["goals"] for row in rows) == has_goals
    if setting.limits is not None:
        assert all(row["limits"] for row in rows if suite != "overhead")
    assert json.loads(json.dumps(told)) == told
    text = compare.text(told)
    assert (
        all(row["case"] in text for row in rows) and ("met" in text or not has_goals) and "WRONG" not in text
    )
    ElementTree.fromstring(chart.bars(told))  # well-formed


@pytest.mark.parametrize("suite", SUITES)
def test_a_wrong_result_is_told_and_not_timed(
    suite: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "decode": "paged_attention_decode",
        "prefill": "paged_attention",
        "write": "write_kv_cache",
        "copy": "copy_blocks",
        "swap": "swap_blocks",
        "overhead": "paged_attention_decode",
    }
    right = getattr(paged_ops, names[suite])

    def wrong(*arguments: Any, **options: Any) -> Any:
        if suite in ("decode", "prefill", "overhead"):
            result = right(*arguments, **options)
            out = options["out"]
            out[0, 0] = 0.9 * out[0, 0] + 0.01
            return result
        if suite == "write":  # the last row goes nowhere
            return right(*arguments[:4], torch.where(torch.arange(64) < 63, arguments[4][:64], -1), **options)
        return right(*arguments[:-1], arguments[-1][1:], **options)  # the first pair is forgotten

    monkeypatch.setattr(paged_ops, names[suite], wrong)
    told = compare.compare(SUITES[suite][:1], setting, rounds=1, echo=False)
    assert told["rows"]
    for row in told["rows"]:
        assert not row["verified"] and row["complaint"] and "seconds" not in row
    assert "WRONG" in compare.text(told)


def test_a_peer_that_is_wrong_or_fails_is_told_and_left_out(setting: Setting) -> None:
    def fail(turn: int) -> str:
        raise RuntimeError("no such op")

    def die(turn: int, num_calls: int) -> float:
        raise RuntimeError("ended")

    good = Candidate(lambda turn, num_calls: 1.0, lambda turn: "")
    trial = Trial(
        {"ours": good},
        {
            "off": Candidate(good.clock, lambda turn: "is off"),
            "without": Candidate(good.clock, fail),
            "dead": Candidate(die, lambda turn: ""),
            "fine": good,
        },
        goals={"ours": (Goal("w", "share:fine", 0.5), Goal("w", "share:off", 0.5))},
    )
    (row,) = runner.measure(Case("decode", "made up", lambda _: trial), trial, rounds=2)
    assert row["verified"] and set(row["ratios"]) == {"fine"}
    assert row["wrong_peers"] == {
        "off": "is off",
        "without": "RuntimeError: no such op",
        "dead": "RuntimeError: ended",
    }
    assert [goal["metric"] for goal in row["goals"]] == ["share:fine"]


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("w", "share:limit", at_least=0.8), 0.5, False),
        (Goal("w", "share:limit", at_least=0.4), 0.5, True),
        (Goal("w", "time:limit", at_most=0.55), 2.0, False),
        (Goal("w", "per_byte:other", at_most=1.3), 1.0, True),
        (Goal("w", "beyond:other", at_most=0.9), 1.0, False),
        (Goal("w", "seconds", at_most=3.0), 2.0, True),
        (Goal("w", "tflops", at_least=1.6), 1.5, False),
    ],
)
def test_goals_are_judged_by_the_median_round(goal: Goal, value: float, met: bool) -> None:
    trial = Trial(
        {"ours": Candidate(lambda t, n: 0.0, nbytes=200, operations=3 * 10**12)},
        {
            "limit": Candidate(lambda t, n: 0.0, nbytes=200),
            "other": Candidate(lambda t, n: 0.0, nbytes=100),
        },
    )
    # The slow round is slow for everybody, which no ratio shows.
    seconds = {"ours": [2.0, 2.0, 8.0], "limit": [1.0, 1.0, 4.0], "other": [1.0, 1.0, 4.0]}
    samples = Samples(seconds, {name: [False] * 3 for name in seconds})
    reached = runner.goal_reached(goal, "ours", trial, samples)
    assert reached["measured"]["median"] == pytest.approx(value)
    assert reached["met"] is met
    assert reached["of_best"] == pytest.approx(value)


def test_rounds_are_interleaved_on_fresh_turns() -> None:
    told: list[tuple[str, int]] = []

    def clock(name: str) -> Any:
        def measure(turn: int, num_calls: int) -> float:
            told.extend((name, turn + i) for i in range(num_calls))
            return 1.0

        return measure

    clocks = {"a": clock("a"), "b": clock("b")}
    samples = sample_in_turn(clocks, rounds=4, settle_seconds=0, waited=lambda: 0.0)
    assert samples.seconds == {"a": [1.0] * 4, "b": [1.0] * 4}
    turns = [turn for _, turn in told]
    assert turns == list(range(len(turns)))  # nobody meets data that was touched before
    timed = [name for name, _ in told[4:]][::2]
    assert all({*timed[i : i + 2]} == {"a", "b"} for i in range(0, 8, 2))


def test_a_disturbed_measurement_is_taken_again() -> None:
    # The times get better and better, the waiting first worse, then none: only the waiting may decide.
    waiting, times = (
        [0.5, 0.2, 0.4, 0.0, 0.9],
        iter([9.0, 9.0, 9.0, 5.0, 8.0, 4.0, 7.0, 3.0, 6.0, 2.0, 6.0, 1.0]),
    )
    steps = iter(step for share in waiting for step in (0.0, share))
    total = [0.0]

    def clock(turn: int, num_calls: int) -> float:
        return next(times)

    def waited() -> float:
        total[0] += next(steps) * 10
        return total[0]

    samples = sample_in_turn({"a": clock}, rounds=2, settle_seconds=0, waited=waited)
    assert samples.disturbed == {"a": [True, False]}
    assert samples.seconds == {"a": [4.0, 2.0]}  # the second of three tries, then the first


def test_disturbed_rounds_are_left_out_where_enough_are_left() -> None:
    seconds = {"a": [1.0, 9.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0, 8.0]}
    quiet = {"a": [False] * 4, "b": [False] * 4}
    assert Samples(seconds, quiet).pairs("a", "b") == ([(1, 2), (9, 2), (1, 2), (1, 8)], False)
    once = {"a": [False, True, False, False], "b": [False] * 4}
    assert Samples(seconds, once).pairs("a", "b") == ([(1, 2), (1, 2), (1, 8)], False)
    twice = {"a": [False, True, False, False], "b": [False, False, False, True]}
    assert Samples(seconds, twice).pairs("a", "b") == ([(1, 2), (9, 2), (1, 2), (1, 8)], True)


def test_spread() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (spread.low, spread.q1, spread.median, spread.q3, spread.high) == (1, 2, 3, 4, 5)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7)


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_limits_move_what_they_say() -> None:
    found = limits.Limits(2)
    source = np.arange(64 * 1000, dtype=np.uint8).reshape(64, 1000)
    target = np.zeros_like(source)
    order = np.random.default_rng(0).permutation(64).astype(np.uint64)
    to = np.uint64(target.ctypes.data) + order * np.uint64(1000)
    rows = np.uint64(source.ctypes.data) + np.arange(64, dtype=np.uint64) * np.uint64(1000)
    assert found.copy(to, rows, 1000) > 0
    assert (target[order.astype(int)] == source).all()
    for nbytes in (64, 320, 960):  # none a multiple of what a turn of the loop reads
        assert found.gather(rows, nbytes) > 0
    assert found.read_in_sequence(source.ctypes.data, source.nbytes, 3) > 0
    assert found.multiply_add_rate() > 1e9


def test_without_a_compiler_there_are_no_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(limits.NoLimits, match="'no-such-compiler' is not installed"):
        limits.build(cache=tmp_path)
    setting = compare.make_setting(arena_nbytes=4 * MIB, num_threads=1, peers=(), shrink=64)
    told = compare.compare([case_named("decode", "64 MiB random G=4")], setting, rounds=1, echo=False)
    assert "not installed" in told["missing"]["limits"]
    assert all(row["verified"] and not row["limits"] for row in told["rows"])
    assert "without limits" in compare.text(told)


def test_a_peer_that_is_not_here_is_told(tmp_path: Path) -> None:
    setting = compare.make_setting(
        arena_nbytes=4 * MIB, num_threads=1, peers=("vllm",), vllm_python=sys.executable, shrink=64
    )
    assert setting.peers.found or "vllm is not installed" in setting.peers.notes["vllm"]
    setting.peers.close()


def test_suites_under_pytest_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "bench", "--tiny", "-q", "-p", "no:cacheprovider"]
    command += ["-k", "swap or in-order or write", "--out", str(tmp_path)]
    command += ["--benchmark-json", str(tmp_path / "benchmark.json")]
    # Inside a worker of pytest-xdist, which it would take itself for one of, it would not measure.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    folder = limits.SOURCE.parents[1]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert "| case " in run.stdout and "goals" in run.stdout
    told = json.loads((tmp_path / "bench.json").read_text())
    assert {"decode", "write", "swap"} <= {row["suite"] for row in told["rows"]}
    ElementTree.parse(tmp_path / "bench.svg")
    for measured in json.loads((tmp_path / "benchmark.json").read_text())["benchmarks"]:
        info = measured["extra_info"]
        assert {"variant", "nbytes", "percent_of_limit", "peer_over_ours", "goals"} <= set(info)
        assert measured["stats"]["median"] > 0 and info["peer_over_ours"]


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = compare.make_setting(arena_nbytes=16 * MIB, num_threads=1, peers=(), shrink=64)
    monkeypatch.setattr(compare, "make_setting", lambda **options: tiny)
    arguments = ["--suite", "swap,copy", "--case", "16 pairs", "--quick", "--rounds", "1"]
    arguments += ["--json", str(tmp_path / "a" / "told.json"), "--svg", str(tmp_path / "told.svg")]
    assert compare.main(arguments) == 0
    told = json.loads((tmp_path / "a" / "told.json").read_text())
    assert {row["suite"] for row in told["rows"]} == {"copy", "swap"}
    ElementTree.parse(tmp_path / "told.svg")
    monkeypatch.setattr(paged_ops, "swap_blocks", lambda *arguments: None)
    assert compare.main(arguments[:2] + arguments[2:7]) == 1
    with pytest.raises(SystemExit):
        compare.main(["--suite", "nothing"])


def test_a_peer_that_ends_says_how(tmp_path: Path) -> None:
    """vLLM's kernels may kill their process, as those for AVX-512 do on a machine without."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexit 7\n")
    interpreter.chmod(0o755)
    setting = compare.make_setting(
        arena_nbytes=4 * MIB, num_threads=1, peers=("vllm",), vllm_python=str(interpreter), shrink=64
    )
    assert not setting.peers.found and "exit status 7" in setting.peers.notes["vllm"]
    setting.peers.close()
