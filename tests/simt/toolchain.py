"""Compiles drivers that use csrc: by g++ against the emulator, or by nvcc for a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CSRC = REPOSITORY / "csrc"
GXX = os.environ.get("CXX") or shutil.which("g++")

EMULATOR_FLAGS = [
    "-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DPAGED_OPS_EMULATED",
    "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas",
]  # fmt: skip


def run(command: Sequence[str | Path]) -> None:
    """Run a compiler; what it says becomes the error."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def compile_objects(
    sources: Sequence[Path], folder: Path, flags: Sequence[str], include: Path = CSRC
) -> list[Path]:
    """Compile each source with g++ into `folder`, two at a time; headers come from `include`."""
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        run([GXX or "g++", *EMULATOR_FLAGS, *flags, f"-I{include}", "-x", "c++", "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def emulator_objects(folder: Path, flags: Sequence[str] = ()) -> list[Path]:
    """The emulator itself, compiled with `flags`."""
    return compile_objects(sorted((CSRC / "simt" / "emulator").glob("*.cpp")), folder, flags)


def link(objects: Sequence[Path], target: Path, flags: Sequence[str] = ()) -> Path:
    run([GXX or "g++", *flags, *objects, "-pthread", "-o", target])
    return target


def find_nvcc() -> str | None:
    """nvcc on PATH, in CUDA_HOME, or in the folder of NVIDIA's wheels."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))
