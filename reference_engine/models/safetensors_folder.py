"""Reads the safetensors of a Hugging Face folder: one file, or the shards that an index lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from reference_engine.models.config import ModelError
from reference_engine.models.json_file import read_json
from reference_engine.models.requirements import require

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """The tensors of a folder's `model.safetensors`, or of the shards that its index lists."""

    def __init__(self, folder: Path) -> None:
        self._safetensors = require("safetensors")
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._index = index if index.exists() else single
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
                raise ModelError(f"{index}: 'weight_map' must map tensor names to file names")
            for name, file in weight_map.items():
                if Path(file).name != file:
                    raise ModelError(
                        f"{index}: tensor {name!r} is said to lie outside the folder, in {file!r}"
                    )
                self._files[name] = folder / file
            for path in sorted(set(self._files.values())):
                held = set(self._handle(path).keys())
                lacking = sorted(n for n, f in self._files.items() if f == path and n not in held)
                if lacking:
                    raise ModelError(
                        f"{path}: tensor {lacking[0]!r} is missing, though {index.name} lists it here"
                    )
                self._files.update((name, path) for name in held)
        elif single.exists():
            self._files = {name: single for name in list(self._handle(single).keys())}
        else:
            pickled = sorted(folder.glob("*.bin"))
            hint = f"; {pickled[0].name} is a pickle, which is not loaded: convert it" if pickled else ""
            raise ModelError(f"{single}: no such file, and no {index.name}{hint}")

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._safetensors.safe_open(path, framework="pt")
            except (OSError, self._safetensors.SafetensorError) as error:
                raise ModelError(
                    f"{path}: not readable as safetensors, broken or cut short: {error}"
                ) from None
        return self._open[path]

    def names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        stored = self._slice(name).get_dtype()
        if stored not in _STORED_DTYPES:
            raise ModelError(
                f"{self.where(name)}: tensor {name!r} is stored as {stored}; "
                f"supported are {', '.join(_STORED_DTYPES)}"
            )
        tensor: torch.Tensor = self._handle(self._files[name]).get_tensor(name)
        return tensor

    def where(self, name: str) -> str:
        return str(self._files.get(name, self._index))

    def dtype(self, name: str) -> torch.dtype | None:
        """What a tensor is stored as; None when it is absent or nothing to compute with."""
        return _STORED_DTYPES.get(self._slice(name).get_dtype()) if name in self._files else None

    def _slice(self, name: str) -> Any:
        return self._handle(self._files[name]).get_slice(name)
