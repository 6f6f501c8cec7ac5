"""The examples as a reader runs them: each a process of its own, which checks its own result."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

# What each example needs besides paged_ops.
NEEDS = {
    "torch_engine": ("torch",),
    "numpy_ops": (),
    "cupy_ops": ("cupy",),
    "jax_ops": ("jax",),
    "handover": (),
    "speculative_verify": (),
    "transformers_generate": ("torch", "transformers"),
}
# Which say in one line what is missing, instead of failing on an import.
EXPLAIN = ("cupy_ops", "jax_ops", "transformers_generate")


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    # From elsewhere: an example may not lean on the folder it is called from. One thread: the sizes are tiny.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAGED_OPS_NUM_THREADS": "1"}
    command = [sys.executable, *options, str(EXAMPLES / f"{script}.py")]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=EXAMPLES.parent.parent
    )


def has_gpu() -> bool:
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str) -> None:
    missing = [module for module in NEEDS[name] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    done = run(name)
    if name == "cupy_ops" and not has_gpu():
        assert done.returncode != 0 and done.stderr.startswith("cupy_ops: needs a GPU")
        return
    assert done.returncode == 0, done.stderr
    assert 1 <= len(done.stdout.splitlines()) <= 2


@pytest.mark.parametrize("name", EXPLAIN)
def test_example_without_its_library(name: str, tmp_path: Path) -> None:
    """One line that names it, and no traceback."""
    hidden = NEEDS[name][-1]
    launcher = tmp_path / "launcher.py"
    # None in sys.modules is what Python itself takes for "not importable".
    launcher.write_text(
        f"import runpy, sys\nsys.modules[{hidden!r}] = None\n"
        f"runpy.run_path({str(EXAMPLES / f'{name}.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(launcher)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and hidden in done.stderr
    assert done.stderr.startswith(f"{name}: needs") and len(done.stderr.splitlines()) == 1
