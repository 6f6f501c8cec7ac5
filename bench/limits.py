"""The machine's limits, measured by `limits.cpp`: the yardsticks that benchmarks stand beside."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("limits.cpp")
CACHE = Path(__file__).parents[1] / "build" / "bench"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")

Addresses = NDArray[np.uint64]


class NoLimits(RuntimeError):
    """The limits cannot be measured on this machine; says why."""


def build(compiler: str | None = None, cache: Path = CACHE) -> Path:
    """The compiled `limits.cpp`, from the cache unless source, flags or compiler changed."""
    name = compiler or os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise NoLimits(f"no limits: the compiler {name!r} is not installed (apt install g++)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\n".join([SOURCE.read_text(), version, *FLAGS, _cpu()]).encode()).hexdigest()[:16]
    target = cache / f"limits-{key}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        run = subprocess.run([path, *FLAGS, str(SOURCE), "-o", str(partial)], capture_output=True, text=True)
        if run.returncode != 0:
            raise NoLimits(f"no limits: {name} failed on {SOURCE.name}: {run.stderr[-2000:]}")
        partial.replace(target)  # whole or not at all, however many build at once
    return target


def _cpu() -> str:
    """What -march=native depends on, so that a cache that moved to another machine is not used."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith("flags")), "")


class Limits:
    """Each method does the work once and returns its seconds, taken in native threads."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._library = library = ctypes.CDLL(str(build()))
        pointer, size, count, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
        for name, arguments in {
            "read_in_sequence": [pointer, size, integer, integer, integer],
            "gather": [pointer, count, size, integer, size, integer],
            "copy": [pointer, pointer, count, size, integer, integer],
            "multiply_add_rate": [integer, count],
            "tile_rate": [integer, count],
            "waited_seconds": [],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_double
        self._read_form = 1
        self._gather_ahead = 1024

    def calibrate(self, begins: Sequence[int], nbytes: int) -> dict[str, int]:
        """Finds the forms of reading that are fastest here, on these pieces of memory in turn."""
        piece = min(nbytes, 32 << 10)
        pieces = [
            np.arange(begin, begin + nbytes // piece * piece, piece, dtype=np.uint64) for begin in begins
        ]
        forms: dict[int, list[float]] = {form: [] for form in range(4)}
        distances: dict[int, list[float]] = {ahead: [] for ahead in (512, 1024, 2048, 4096)}
        turn = 0
        for _ in range(6):
            for form, seconds in forms.items():
                seconds.append(self._read(begins[turn % len(begins)], nbytes, form, 1))
                turn += 1
            for ahead, seconds in distances.items():
                seconds.append(self._gather(pieces[turn % len(begins)], piece, ahead, 1))
                turn += 1
        # By the best time: what others do on the machine makes medians of a few rounds a lottery.
        self._read_form = min(forms, key=lambda form: min(forms[form]))
        self._gather_ahead = min(distances, key=lambda ahead: min(distances[ahead]))
        return {"read_form": self._read_form, "gather_ahead": self._gather_ahead}

    def read_in_sequence(self, begin: int, nbytes: int, repeats: int = 1) -> float:
        return self._read(begin, nbytes, self._read_form, repeats)

    def gather(self, pieces: Addresses, nbytes: int, repeats: int = 1) -> float:
        """Reads pieces of `nbytes` each, in the order of their addresses' list."""
        return self._gather(pieces, nbytes, self._gather_ahead, repeats)

    def copy(
        self, to: Addresses, source: Addresses, nbytes: int, repeats: int = 1, num_threads: int = 0
    ) -> float:
        """memcpy of pieces of `nbytes` each."""
        assert len(to) == len(source)
        return float(
            self._library.copy(
                to.ctypes.data, source.ctypes.data, len(to), nbytes, num_threads or self.num_threads, repeats
            )
        )

    def multiply_add_rate(self) -> float:
        """Operations per second of float32 vectors."""
        return float(self._library.multiply_add_rate(self.num_threads, 200_000))

    def tile_rate(self) -> float:
        """Operations per second of bfloat16 tiles; 0 where there are none."""
        return float(self._library.tile_rate(self.num_threads, 50_000))

    def waited(self) -> float:
        """Seconds for which the threads of all measurements so far were ready to run and had no CPU."""
        return float(self._library.waited_seconds())

    def _read(self, begin: int, nbytes: int, form: int, repeats: int) -> float:
        return float(self._library.read_in_sequence(begin, nbytes, self.num_threads, form, repeats))

    def _gather(self, pieces: Addresses, nbytes: int, ahead: int, repeats: int) -> float:
        assert pieces.dtype == np.uint64 and pieces.flags.c_contiguous
        return float(
            self._library.gather(pieces.ctypes.data, len(pieces), nbytes, self.num_threads, ahead, repeats)
        )
