"""The package as installed: version, types, what an import pulls in, and what the machine report says."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import paged_ops
from paged_ops import _native


def python(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    import os

    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_version_is_one() -> None:
    assert paged_ops.__version__ == importlib.metadata.version("paged_ops")


def test_types_ship_with_the_package() -> None:
    folder = Path(paged_ops.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "_native.pyi").read_text()
    for name in dir(_native):
        if not name.startswith("__"):
            assert name in stub, f"{name} is missing from _native.pyi"


def test_import_brings_no_framework() -> None:
    run = python(
        "-c", "import sys, paged_ops; print([m for m in ('torch', 'cupy', 'jax') if m in sys.modules])"
    )
    assert run.stdout.strip() == "[]", run.stderr


def test_ops_are_registered_whichever_import_comes_first() -> None:
    for order in ("import torch, paged_ops", "import paged_ops, torch"):
        run = python("-c", f"{order}; print(torch.ops.paged_ops.attention.default.name())")
        assert run.stdout.strip() == "paged_ops::attention", run.stderr


def test_machine_report() -> None:
    run = python("-m", "paged_ops")
    assert run.returncode == 0, run.stderr
    for word in ("paged_ops", paged_ops.__version__, "scalar", "in use", "cuda", "numpy"):
        assert word in run.stdout


def test_isa_override_by_environment() -> None:
    code = "import numpy as np, paged_ops; from paged_ops import _native; print(_native.cpu_isa())"
    for isa in _native.cpu_isas():
        assert python("-c", code, PAGED_OPS_CPU_ISA=isa).stdout.strip() == isa
    run = python("-c", code, PAGED_OPS_CPU_ISA="sse9")
    assert run.returncode != 0
    assert "PAGED_OPS_CPU_ISA" in run.stderr and "sse9" in run.stderr and "scalar" in run.stderr
