"""Every implementation that this machine can run, and the switch between them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import paged_ops
from paged_ops import _backend, _native
from paged_ops.testing import arrays

Backend = Literal["cpu", "emulated", "cuda"]


@contextlib.contextmanager
def use_backend(name: Backend) -> Iterator[Any]:
    """Lets the public ops call another native module inside a `with`; yields the module.

    "cpu" and "cuda" are both in `_native`, where the tensors' device decides. "emulated" sends CPU tensors to
    the CUDA kernels as built for the host emulator.
    """
    if name == "emulated":
        from paged_ops import _emulated  # type: ignore[attr-defined]  # built for tests only

        module: Any = _emulated
    else:
        module = _native
    previous, _backend.module = _backend.module, module
    try:
        yield module
    finally:
        _backend.module = previous


@contextlib.contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """The CPU backend's kernels for another instruction set inside a `with`."""
    previous = _native.cpu_isa()
    _native.set_cpu_isa(name)
    try:
        yield
    finally:
        _native.set_cpu_isa(previous)


@contextlib.contextmanager
def use_num_threads(num_threads: int) -> Iterator[None]:
    """Another number of threads of the CPU backend inside a `with`."""
    previous = _native.num_threads()
    _native.set_num_threads(num_threads)
    try:
        yield
    finally:
        _native.set_num_threads(previous)


@contextlib.contextmanager
def use_emulator(**settings: Any) -> Iterator[None]:
    """Settings of the emulator (its `configure`) inside a `with`, the defaults after it."""
    with use_backend("emulated") as module:
        module.configure(**settings)
        try:
            yield
        finally:
            module.configure()


@dataclass(frozen=True)
class Target:
    """An implementation under test: a backend, and on the CPU the instruction set of its kernels."""

    backend: Backend
    isa: str | None = None

    def __str__(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}"

    @property
    def device(self) -> str:
        """Where its tensors live."""
        return "cuda" if self.backend == "cuda" else "cpu"

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Makes the public ops call this implementation; yields the native module."""
        isa = contextlib.nullcontext() if self.isa is None else use_cpu_isa(self.isa)
        with use_backend(self.backend) as module, isa:
            yield module


def available_targets() -> list[Target]:
    """The CPU backend once per instruction set, the emulated one where built, CUDA where there is a GPU."""
    targets = [Target("cpu", isa) for isa in _native.cpu_isas()]
    if importlib.util.find_spec("paged_ops._emulated"):
        targets.append(Target("emulated"))
    if _native.cuda_archs and _has_gpu():
        targets.append(Target("cuda"))
    return targets


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


class HostOps:
    """The public ops on numpy arrays, run by a target: it can stand where `paged_ops.reference` stands.

    With kind "torch" the arrays go in as torch tensors of the same memory. Arrays that an op writes are
    written; results come back as numpy arrays.
    """

    def __init__(self, target: Target, kind: Literal["numpy", "torch"] = "numpy") -> None:
        self.target = target
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.target}-{self.kind}"

    def __getattr__(self, name: str) -> Any:
        if not hasattr(paged_ops, name):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def swap_blocks(self, source: Any, destination: Any, block_pairs: Any) -> Any:
        """As the op, whose `block_pairs` stay in host memory."""
        if isinstance(block_pairs, np.ndarray) and self._as_torch:
            block_pairs = arrays.to_torch(block_pairs)
        return self._call("swap_blocks", source, destination, block_pairs)

    @property
    def _as_torch(self) -> bool:
        return self.kind == "torch" or self.target.device != "cpu"

    def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        sent: list[tuple[NDArray[Any], Any]] = []
        with self.target.use():
            result = getattr(paged_ops, name)(*self._send(args, sent), **self._send(options, sent))
        for array, tensor in sent:
            back = arrays.to_numpy(tensor)
            if not np.shares_memory(array, back):
                array[...] = back
        return _received(result)

    def _send(self, value: Any, sent: list[tuple[NDArray[Any], Any]]) -> Any:
        if isinstance(value, np.ndarray):
            tensor = arrays.to_torch(value, self.target.device) if self._as_torch else value
            sent.append((value, tensor))
            return tensor
        if isinstance(value, (list, tuple)):
            return type(value)(self._send(item, sent) for item in value)
        if isinstance(value, dict):
            return {key: self._send(item, sent) for key, item in value.items()}
        return value


def _received(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_received(item) for item in result)
    return result if result is None or isinstance(result, int) else arrays.to_numpy(result)
