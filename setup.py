"""Builds the native modules with CMake. Everything that is not the build lives in pyproject.toml.

Environment:
    PAGED_OPS_CUDA        auto (default: when nvcc is found), on, off, or pip (NVIDIA's wheels from PyPI)
    PAGED_OPS_CUDA_ARCHS  architectures in CMake's notation, e.g. "90-real" or "80-real;90-real;120"
    PAGED_OPS_EMULATED    1 also builds paged_ops._emulated, the CUDA kernels in the SIMT emulator (for tests)
    PAGED_OPS_SANITIZE    sanitizers for the emulated module, e.g. address,undefined
    PAGED_OPS_BUILD_DIR   where CMake builds; keep it between builds to build only what changed
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
EMULATED = os.environ.get("PAGED_OPS_EMULATED") == "1"


def find_nvcc() -> Path | None:
    """A system toolkit's nvcc: $CUDACXX, $CUDA_HOME, PATH, or the usual place."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    if home := os.environ.get("CUDA_HOME"):
        candidates.insert(1, f"{home}/bin/nvcc")
    return next((Path(c) for c in candidates if c and Path(c).exists()), None)


def find_pip_nvcc() -> tuple[Path, dict[str, str]]:
    """nvcc of NVIDIA's wheels in this environment, and the variables its linking step needs."""
    for entry in sys.path:
        for home in sorted(Path(entry).glob("nvidia/cu1[3-9]")) if entry else []:
            if (home / "bin" / "nvcc").exists():
                return home / "bin" / "nvcc", {"LIBRARY_PATH": str(home / "lib"), "CUDA_HOME": str(home)}
    sys.exit(
        "PAGED_OPS_CUDA=pip: no nvcc in this environment; install nvidia-cuda-nvcc nvidia-cuda-crt "
        "nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm and build with --no-build-isolation"
    )


def cuda_options() -> tuple[list[str], dict[str, str]]:
    """CMake options and environment for the CUDA backend, by PAGED_OPS_CUDA."""
    mode = os.environ.get("PAGED_OPS_CUDA", "auto").lower()
    if mode not in ("auto", "on", "off", "pip"):
        sys.exit(f"PAGED_OPS_CUDA is {mode!r}, wanted auto, on, off or pip")
    if mode == "off":
        return ["-DPAGED_OPS_CUDA=OFF"], {}
    environment: dict[str, str] = {}
    if mode == "pip":
        nvcc, environment = find_pip_nvcc()
    else:
        found = find_nvcc()
        if found is None:
            if mode == "on":
                sys.exit("PAGED_OPS_CUDA=on: no nvcc in $CUDACXX, $CUDA_HOME, PATH or /usr/local/cuda")
            return ["-DPAGED_OPS_CUDA=OFF"], {}
        nvcc = found
    options = ["-DPAGED_OPS_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    if archs := os.environ.get("PAGED_OPS_CUDA_ARCHS"):
        options.append(f"-DPAGED_OPS_CUDA_ARCHS={archs}")
    return options, environment


class CMakeBuild(build_ext):
    """Configures, builds and installs all modules at once beside the package's Python files."""

    def build_extensions(self) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath("paged_ops._native")).parent.resolve()
        build = Path(os.environ.get("PAGED_OPS_BUILD_DIR") or self.build_temp or "build").resolve()
        build.mkdir(parents=True, exist_ok=True)
        options, extra = cuda_options()
        environment = {**os.environ, **extra}
        options += [
            f"-DCMAKE_INSTALL_PREFIX={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPAGED_OPS_EMULATED={'ON' if EMULATED else 'OFF'}",
            f"-DPAGED_OPS_SANITIZE={os.environ.get('PAGED_OPS_SANITIZE', '')}",
        ]
        if ninja := shutil.which("ninja"):
            # By its path: the folder may have been configured with the ninja of an environment that is gone.
            options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        subprocess.run(["cmake", str(ROOT), *options], cwd=build, env=environment, check=True)
        subprocess.run(["cmake", "--build", ".", "--parallel", jobs], cwd=build, env=environment, check=True)
        subprocess.run(["cmake", "--install", "."], cwd=build, env=environment, check=True)

    def copy_extensions_to_source(self) -> None:
        # A file that a running process has mapped must not be written over: it is unlinked first.
        for extension in self.extensions:
            Path(
                self.get_finalized_command("build_py").get_package_dir(""), *self._file_of(extension)
            ).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def _file_of(self, extension: Extension) -> tuple[str, ...]:
        return Path(self.get_ext_filename(extension.name)).parts


modules = ["paged_ops._native"] + ["paged_ops._emulated"] * EMULATED
setup(ext_modules=[Extension(name, sources=[]) for name in modules], cmdclass={"build_ext": CMakeBuild})
