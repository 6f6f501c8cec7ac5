"""The GPU report on the emulated backend: it runs unattended, and survives parts that fail or hang."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_decode, gpu_parts, gpu_report
from bench.gpu_peers import NAIVE
from paged_ops.testing.backends import use_backend

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paged_ops._emulated") is None, reason="needs the emulated build"
)


def test_report_on_the_emulated_backend(tmp_path: Path) -> None:
    assert gpu_report.main(["--backend", "emulated", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert list(report) == [
        "machine", "tests", "invariance", "decode", "latent", "batches", "other_ops", "peers", "grid"
    ]  # fmt: skip
    assert {name: part for name, part in report.items() if part["status"] != "ok"} == {}
    assert report["invariance"]["found"]["sequences_equal"] == 4
    assert 0 < report["batches"]["found"]["worst_over_best"] <= 1
    assert report["batches"]["found"]["rows"][-1]["batch"] == "mixed"
    assert len(report["grid"]["found"]["rows"]) == 6
    (latent,) = report["latent"]["found"]["rows"]
    assert latent["heads"] == 2 and latent["us"] > 0 and latent["error"] < 2e-2
    assert "int8, scale per token" in report["decode"]["found"]["rows"][-1]["shape"]
    (peers,) = report["peers"]["found"]["rows"]
    assert peers["ours"] > 0 and peers["sdpa"] > 0 and peers["naive"] == peers["flex"] == "not installed"
    for row in report["decode"]["found"]["rows"]:
        assert row["us"] > 0 and row["sdpa_us"] > 0 and row["error"] < 2e-2
    text = (tmp_path / "gpu-report.md").read_text()
    assert "| decode | ok |" in text and "percent_of_copy" in text


@pytest.mark.parametrize("part", [gpu_parts.batches, gpu_parts.grid, gpu_parts.decode])
def test_shares_of_a_limit_far_away_are_not_zero(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to a tenth of a percent, a slow emulator's share was none, and a ratio of shares failed."""
    for module in (gpu_parts, gpu_decode):
        monkeypatch.setattr(module, "copy_bandwidth", lambda options: 1e15)
    with use_backend("emulated"):
        found = part(gpu_parts.Options("emulated", quick=True))
    names = ("percent_of_copy", "page 1", "page 16")
    shares = [row[name] for row in found["rows"] for name in names if name in row]
    assert len(shares) >= len(found["rows"]) and all(0 < share < 0.01 for share in shares)
    assert part is not gpu_parts.batches or 0 < found["worst_over_best"] <= 1


def test_a_part_that_hangs_is_ended_and_told(tmp_path: Path) -> None:
    options = gpu_parts.Options("emulated", quick=True)
    result = gpu_report.supervise("decode", 0.2, options, tmp_path)
    assert result["status"] == "timed out"


def test_a_part_that_fails_is_told(tmp_path: Path) -> None:
    options = gpu_parts.Options("emulated", quick=True)
    result = gpu_report.supervise("graph", 60, options, tmp_path)  # needs a GPU
    assert result["status"] == "failed" and "CUDA" in result["tail"]


def test_a_peer_that_is_wrong_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import gpu_peers

    def wrong(shape: object, inputs: object) -> object:
        right = gpu_peers.sdpa(shape, inputs)
        return lambda: right() * 1.1

    def broken(shape: object, inputs: object) -> object:
        raise RuntimeError("no | such\nkernel")

    monkeypatch.setattr(gpu_peers, "PEERS", {"sdpa": gpu_peers.sdpa, "wrong": wrong, "broken": broken})
    with use_backend("emulated"):
        (row,) = gpu_parts.peers(gpu_parts.Options("emulated", quick=True))["rows"]
    assert row["sdpa"] > 0
    assert row["wrong"].startswith("ValueError: differs by")
    assert row["broken"] == "RuntimeError: no / such kernel"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_naive_kernel_compiles(tmp_path: Path) -> None:
    source = tmp_path / "naive.cu"
    source.write_text(NAIVE)
    command = ["nvcc", "-arch=sm_80", "-cubin", source, "-o", tmp_path / "naive.cubin"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_no_time_left(tmp_path: Path) -> None:
    arguments = ["--backend", "emulated", "--quick", "--out", str(tmp_path), "--limit", "4"]
    assert gpu_report.main(arguments) == 1
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert {part["status"] for part in report.values()} == {"no time left"}


def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Driver:
        """One that is installed and has nothing to drive."""

        def __init__(self, init: int, count: int) -> None:
            self.init, self.count = init, count

        def cuInit(self, flags: int) -> int:
            return self.init

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = self.count
            return 0

    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    for driver, why in (
        (absent, "no NVIDIA driver is installed"),
        (lambda name: Driver(100, 0), "answers with error 100"),
        (lambda name: Driver(0, 0), "finds none"),
    ):
        monkeypatch.setattr(gpu_report.ctypes, "CDLL", driver)
        assert gpu_report.main(["--out", str(tmp_path / "report")]) == gpu_report.EXIT_NO_GPU == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("no GPU to report on: ") and why in line
        assert not (tmp_path / "report").exists()
    monkeypatch.setattr(gpu_report.ctypes, "CDLL", lambda name: Driver(0, 1))
    assert gpu_report.missing_gpu() == ""
