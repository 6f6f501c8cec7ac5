"""Imports the optional packages of the `engine` extra, with an error that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any


def require(package: str) -> Any:
    """The module, or ImportError with the pip command."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"models need the package {package!r}: pip install 'paged_ops[engine]', or pip install {package}"
        ) from error
