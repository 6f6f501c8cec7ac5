"""Runs Python against the emulated CUDA backend built with AddressSanitizer and undefined-behaviour checks.

    python tests/sanitizers/run_under_asan.py -m pytest tests/ops --backend emulated -k decode

Builds paged_ops._emulated with the sanitizers (in build/asan, again when csrc has changed), puts it beside
copies of the package's other files, and starts the interpreter with the sanitizers' runtime loaded first.
With PAGED_OPS_SANITIZE_ALL=1 it has the attention kernels of all types, else of those that differ in their
types alone one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tools"))
from emulated_archive import BINDINGS, archive  # noqa: E402

# What a GPU would do in these cases is as undefined as what a CPU does. Checks of every pointer and enum are
# left out: they triple the time to compile the kernels.
SANITIZERS = "address,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"


def build(folder: Path) -> Path:
    """The sanitized module, built by the project's own CMakeLists.txt."""
    import pybind11

    folder.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise SystemExit("needs cmake")
    options = [
        "-DPAGED_OPS_EMULATED=ON",
        "-DPAGED_OPS_CUDA=OFF",
        f"-DPAGED_OPS_SANITIZE={SANITIZERS}",
        f"-DPAGED_OPS_ONE_OF_ALIKE={'OFF' if os.environ.get('PAGED_OPS_SANITIZE_ALL') == '1' else 'ON'}",
        f"-DPAGED_OPS_BIND_LIBRARY={archive('paged_ops_bind', BINDINGS) or ''}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    if shutil.which("ninja", path=path):
        options.append("-GNinja")
    environment = {**os.environ, "PATH": path}
    for command in (
        [cmake, str(REPOSITORY), *options],
        [cmake, "--build", ".", "--target", "_emulated", "-j2"],
    ):
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
    return next(folder.rglob("_emulated*.so"))


def overlay(module: Path, folder: Path) -> Path:
    """A folder with the package as it stands, but for the sanitized module."""
    package = folder / "paged_ops"
    shutil.copytree(
        REPOSITORY / "paged_ops", package, ignore=shutil.ignore_patterns("__pycache__", "_emulated*.so")
    )
    shutil.copy(module, package)
    return folder


def environment(package_folder: Path) -> dict[str, str]:
    """Variables for an interpreter that loads the sanitized module."""

    def runtime(name: str) -> str:
        return subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()

    return {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        # Python and its libraries leak at exit. Fibers come and go on stacks that the sanitizer is told of.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=67",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=67",
        "PYTHONMALLOC": "malloc",  # so that every object has its own red zones
        "PYTHONPATH": str(package_folder),
        "PYTHONSAFEPATH": "1",
    }


def run(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    folder = REPOSITORY / "build" / "asan"
    folder.mkdir(parents=True, exist_ok=True)
    # Two runs at once share the build; the first to come does it.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = build(folder / "cmake")
    with tempfile.TemporaryDirectory(dir=folder) as package_folder:
        variables = environment(overlay(module, Path(package_folder)))
        return subprocess.run([sys.executable, *arguments], env=variables, cwd=REPOSITORY)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1:]).returncode)
