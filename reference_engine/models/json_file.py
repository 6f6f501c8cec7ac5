"""JSON objects whose fields are taken by name and type, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from reference_engine.models.config import ModelError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError names the file when it is missing, broken or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """A JSON object of the file at `path`."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field, or the default if it is absent or null; ModelError if it is of another type."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path}: {name!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: {name!r} must be {kind.__name__}, got {value!r}")
        return value
