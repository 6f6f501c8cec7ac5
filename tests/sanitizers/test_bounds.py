"""AddressSanitizer and undefined-behaviour checks over the kernels: that they see, then that all is well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_under_asan
from toolchain import GXX, compile_objects, emulator_objects, link

pytestmark = [
    pytest.mark.xdist_group("address"),
    pytest.mark.skipif(GXX is None, reason="needs g++"),
]

HERE = Path(__file__).parent
FLAGS = [f"-fsanitize={run_under_asan.SANITIZERS}", "-fno-omit-frame-pointer"]


def test_group_stays_on_one_worker(request: pytest.FixtureRequest) -> None:
    """Else every worker would build each program of this folder anew."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@address"), "pytest-xdist does not honour xdist_group"


BUGS = {
    "table_read_past_end": "AddressSanitizer: heap-buffer-overflow",
    "global_write_past_end": "AddressSanitizer: heap-buffer-overflow",
    "dynamic_shared_past_end": "AddressSanitizer: use-after-poison",
    "static_shared_past_end": "AddressSanitizer: use-after-poison",
    "misaligned_vector": "misaligned address",
    "shift_too_far": "shift exponent 41 is too large",
}


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("address")
    objects = compile_objects([HERE / "planted.cpp"], folder, FLAGS)
    return link([*objects, *emulator_objects(folder / "emulator", FLAGS)], folder / "planted", FLAGS)


def run_planted(program: Path, bug: str, run: tuple[int, int, int]) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, ASAN_OPTIONS="exitcode=67", UBSAN_OPTIONS="halt_on_error=1:exitcode=67")
    command = [str(program), bug, *map(str, run)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("run", [(0, 0, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_seen(planted: Path, bug: str, run: tuple[int, int, int]) -> None:
    result = run_planted(planted, bug, run)
    assert result.returncode == 67 and BUGS[bug] in result.stderr, result.stderr[:2000]


@pytest.mark.parametrize("run", [(0, 0, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_clean_kernel_passes(planted: Path, run: tuple[int, int, int]) -> None:
    result = run_planted(planted, "none", run)
    assert (result.returncode, result.stdout.strip()) == (0, "right"), result.stderr[:2000]


# ---- the ops, from Python --------------------------------------------------------------------------------

DECODE = """
import numpy as np, paged_ops
from paged_ops.testing.backends import use_backend
query = np.ones((1, 2, 64), np.float16)
cache = np.ones((4, 16, 2, 64), np.float16)
with use_backend("emulated"):
    out = paged_ops.paged_attention_decode(
        query, cache, cache.copy(), np.array([[{block}]], np.int32), np.array([16], np.int32), check=False
    )
print(out.sum())
"""


@pytest.fixture(scope="session")
def python_under_asan() -> list[str]:
    """Has the module built, once."""
    pytest.importorskip("pybind11")
    result = run_under_asan.run(["-c", "import paged_ops._emulated as m; print(m.__file__)"])
    assert result.returncode == 0
    return [sys.executable, str(HERE / "run_under_asan.py")]


@pytest.mark.parametrize(("block", "seen"), [(3, False), (4, True), (-1, True)])
def test_wrong_block_id_is_seen(python_under_asan: list[str], block: int, seen: bool) -> None:
    result = subprocess.run(
        [*python_under_asan, "-c", DECODE.format(block=block)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == (67 if seen else 0), result.stderr[-3000:]
    assert ("AddressSanitizer" in result.stderr) == seen


def test_op_tests_pass_under_asan(python_under_asan: list[str]) -> None:
    tests = [f"tests/ops/test_{name}.py" for name in ("attention", "cache_ops", "merge", "quantised")]
    tests += [f"tests/ops/test_packed.py::{name}" for name in ("test_packs_of_any_size", "test_one_of_both")]
    options = ["--backend", "emulated", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    # What is compiled with -O1, see CMakeLists.txt; of the calls that move megabytes two.
    kept = "not any_case and not long_sequence and not bfloat16 and (not quantised or float16 and int8)"
    kept += " and (not long_calls or 33-4095 or 1-393215)"
    result = subprocess.run(
        [*python_under_asan, "-m", "pytest", *tests, *options, "-k", kept],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
