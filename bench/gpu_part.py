"""What the parts of the GPU report share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.timing import significant


@dataclass(frozen=True)
class Options:
    backend: str  # "cuda" or "emulated"
    quick: bool

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "cuda" else "cpu"


@dataclass(frozen=True)
class Part:
    """A part, how long it may take, and on which backends it makes sense."""

    run: Callable[[Options], dict[str, Any]]
    limit_seconds: int
    backends: tuple[str, ...] = ("cuda", "emulated")

    @property
    def name(self) -> str:
        return self.run.__name__


def copy_bandwidth(options: Options) -> float:
    """Bytes per second, read and written, of a large copy within the device: the limit for others."""
    import torch

    from bench.timing import time_interleaved

    nbytes = (1 << 22) if options.quick else (4 << 30 if options.device == "cuda" else 256 << 20)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, device=options.device)["copy"]
    return 2 * nbytes / timing.low


def us(seconds: float) -> float:
    return significant(seconds * 1e6, 4)


def percent(nbytes: int, seconds: float, bandwidth: float) -> float:
    """What share of the limit moving so many bytes in this time is; tiny on the emulator, never zero."""
    return significant(100 * nbytes / seconds / bandwidth, 3)
