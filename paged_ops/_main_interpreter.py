"""Refuses to be imported in a subinterpreter, where loading the native module would wait for ever."""

from __future__ import annotations

from typing import Any


def _interpreters() -> Any:
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on, and before
        try:
            return __import__(name)
        except ImportError:
            pass
    return None


def require() -> None:
    """ImportError unless this is the process's main interpreter."""
    module = _interpreters()
    if module is not None and module.get_current() != module.get_main():
        raise ImportError("paged_ops works in the main interpreter only, this is a subinterpreter")


require()
