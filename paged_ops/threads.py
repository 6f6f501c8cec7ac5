"""The CPU backend's threads: how many, and on which CPUs they may run."""

from __future__ import annotations

from numbers import Integral

from paged_ops import _native


def get_num_threads() -> int:
    """Threads that a CPU op may use, the caller's own included. Default: the CPUs this process may run on."""
    return int(_native.num_threads())


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of the CPU ops; ``PAGED_OPS_NUM_THREADS`` sets the first value."""
    if not isinstance(num_threads, Integral) or isinstance(num_threads, bool):
        raise TypeError(f"num_threads: is {num_threads!r}, wanted an integer")
    if not 1 <= num_threads <= 4096:
        raise ValueError(f"num_threads: is {num_threads}, wanted a number from 1 to 4096")
    _native.set_num_threads(int(num_threads))
