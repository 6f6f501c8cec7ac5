"""Compiled drivers and how to call into them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toolchain import CSRC, compile_objects, emulator_objects, find_nvcc, link, load, run

DRIVERS = Path(__file__).parent / "drivers"
SWITCHES = {"by_hand": [], "ucontext": ["-DSIMT_USE_UCONTEXT"]}


class Driver:
    """A compiled driver: `driver.name(arrays and numbers)` calls it and gives its message, if any."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., str | None]:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p

        def call(*arguments: Any) -> str | None:
            message = function(*(self._convert(a) for a in arguments))
            return message.decode() if message is not None else None

        return call

    @staticmethod
    def _convert(argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            return argument.ctypes.data_as(ctypes.c_void_p)
        if isinstance(argument, str):
            return argument.encode()
        return argument


class Drivers:
    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self.emulators: dict[str, list[Path]] = {}
        self.loaded: dict[tuple[str, str], Driver] = {}

    def __call__(self, name: str, backend: str = "by_hand") -> Driver:
        key = name, backend
        if key not in self.loaded:
            folder = self.factory.mktemp(f"{backend}-{name}")
            library = folder / f"{name}.so"
            if backend == "cuda":
                nvcc = find_nvcc() or "nvcc"
                flags = ["-std=c++20", "-O2", "-arch=native", "-Xcompiler", "-fPIC", "-shared", f"-I{CSRC}"]
                run([nvcc, *flags, "-x", "cu", DRIVERS / f"{name}.cpp", "-o", library])
            else:
                flags = SWITCHES[backend]
                if backend not in self.emulators:
                    self.emulators[backend] = emulator_objects(self.factory.mktemp(backend), flags)
                objects = compile_objects([DRIVERS / f"{name}.cpp"], folder, flags)
                link([*objects, *self.emulators[backend]], library, ["-shared"])
            self.loaded[key] = Driver(load(library))
        return self.loaded[key]
