"""Registers the ops with torch.library as soon as torch is there, whichever of the two is imported first.

``import paged_ops`` must not import torch (NumPy users would pay for it), yet ``torch.compile`` has to find
the ops registered when it traces its first call. So when torch has not been imported yet, its import is
followed up.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


def install() -> None:
    """Register now if torch is imported, else right after it will be."""
    if "torch" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _TorchFinder())


def _register() -> None:
    import paged_ops._torch  # noqa: F401


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find torch, and has its loader call us when the module has run."""

    _asking_others = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self._asking_others:
            return None
        # Not the last time, perhaps: whoever only asks where torch is throws the answer away.
        self._asking_others = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_then_register(module: ModuleType) -> None:
                run_module(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = run_then_register  # type: ignore[method-assign]
        return spec
