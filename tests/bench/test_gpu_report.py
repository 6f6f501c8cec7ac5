"""The GPU report on the emulated backend: it runs unattended, and survives parts that fail or hang."""

import importlib.util
import json
from pathlib import Path

import pytest

from bench import gpu_parts, gpu_report

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paged_ops._emulated") is None, reason="needs the emulated build"
)


def test_report_on_the_emulated_backend(tmp_path: Path) -> None:
    assert gpu_report.main(["--backend", "emulated", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert list(report) == ["machine", "tests", "decode", "other_ops"]
    assert all(part["status"] == "ok" for part in report.values())
    for row in report["decode"]["found"]["rows"]:
        assert row["us"] > 0 and row["sdpa_us"] > 0 and row["error"] < 2e-2
    text = (tmp_path / "gpu-report.md").read_text()
    assert "| decode | ok |" in text and "percent_of_copy" in text


def test_a_part_that_hangs_is_ended_and_told(tmp_path: Path) -> None:
    options = gpu_parts.Options("emulated", quick=True)
    result = gpu_report.supervise("decode", 0.2, options, tmp_path)
    assert result["status"] == "timed out"


def test_a_part_that_fails_is_told(tmp_path: Path) -> None:
    options = gpu_parts.Options("emulated", quick=True)
    result = gpu_report.supervise("graph", 60, options, tmp_path)  # needs a GPU
    assert result["status"] == "failed" and "CUDA" in result["tail"]


def test_no_time_left(tmp_path: Path) -> None:
    arguments = ["--backend", "emulated", "--quick", "--out", str(tmp_path), "--limit", "4"]
    assert gpu_report.main(arguments) == 1
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert {part["status"] for part in report.values()} == {"no time left"}
