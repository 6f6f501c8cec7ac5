"""``python -m paged_ops``: what this build holds and what this machine offers it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

import paged_ops
from paged_ops import _native


def _cuda() -> str:
    if not _native.cuda_archs:
        return "not built (PAGED_OPS_CUDA=on builds it)"
    devices = "; ".join(_native.cuda_devices()) or "no device or no driver here, the cpu backend serves"
    return f"built for {_native.cuda_archs.replace(',', ', ')}; {devices}"


def _libraries() -> str:
    found = []
    for name in ("numpy", "torch", "cupy", "ml_dtypes", "jax", "transformers"):
        if importlib.util.find_spec(name) is not None:
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(name)
    return ", ".join(found)


def main() -> int:
    """Print one line per fact; returns the exit code, 2 where the environment asks for what cannot be."""
    try:
        facts = _facts()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, fact in facts.items():
        print(f"{name:<10} {fact}")
    return 0


def _facts() -> dict[str, str]:
    isas = ", ".join(f"{isa} (in use)" if isa == _native.cpu_isa() else isa for isa in _native.cpu_isas())
    return {
        "paged_ops": f"{paged_ops.__version__}, Python {platform.python_version()}, {platform.machine()}",
        "cpu": f"{isas}; {paged_ops.get_num_threads()} threads",
        "cuda": _cuda(),
        "emulated": "built"
        if importlib.util.find_spec("paged_ops._emulated")
        else "not built (for tests only)",
        "libraries": _libraries(),
    }


if __name__ == "__main__":
    sys.exit(main())
