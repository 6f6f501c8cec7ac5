"""Reads a GGUF file: the container, its metadata, and its tensors, dequantised by the package gguf."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from reference_engine.models.config import ModelError
from reference_engine.models.requirements import require

T = TypeVar("T")

# struct codes of the scalar value types, by their number in the file; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major: the file's own order reversed."""

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


class GgufFile:
    """A GGUF file, version 2 or 3, little-endian; the format: ggml-org/ggml, docs/gguf.md.

    Attributes:
        metadata: key -> number, bool, str, or a list of them.
        tensors: name -> TensorInfo.

    Raises:
        ModelError: not GGUF, cut short, or inconsistent; names the file, and the tensor or key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = require("gguf")
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path}: not readable: {error}") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._at = 0
        self._reading = "the header"
        self._parse()

    def _parse(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file: it starts with {self._bytes[:4]!r}, not b'GGUF'")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version must be 2 or 3, little-endian, got {version:#x}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for index in range(num_keys):
            self._reading = f"metadata key {index} of {num_keys}"
            key = self._string()
            self._reading = f"metadata {key!r}"
            self.metadata[key] = self._value(self._number("I"))
        infos = []
        for index in range(num_tensors):
            self._reading = f"the description of tensor {index} of {num_tensors}"
            name, num_dims = self._string(), self._number("I")
            if num_dims > 4:
                raise ModelError(
                    f"{self.path}: tensor {name!r} has {num_dims} dimensions, at most 4 are possible"
                )
            shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
            infos.append((name, shape, self._number("I"), self._number("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment must be a positive integer, got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise ModelError(f"{self.path}: tensor {name!r} is described twice")
            self.tensors[name] = self._locate(name, shape, kind, start + offset)

    def _locate(self, name: str, shape: tuple[int, ...], kind_number: int, offset: int) -> TensorInfo:
        try:
            kind = self._gguf.GGMLQuantizationType(kind_number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown type {kind_number}") from None
        block_items, block_nbytes = self._gguf.GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block_items:
            raise ModelError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]}, "
                f"but {kind.name} wants a multiple of {block_items}"
            )
        nbytes = math.prod(shape) // block_items * block_nbytes
        if offset + nbytes > len(self._bytes):
            raise ModelError(
                f"{self.path}: tensor {name!r} ends at byte {offset + nbytes}, "
                f"but the file has {len(self._bytes)}: it is cut short"
            )
        return TensorInfo(shape, kind, offset, nbytes)

    def _take(self, nbytes: int) -> int:
        """Move past nbytes; returns where they start."""
        start = self._at
        if nbytes > len(self._bytes) - start:
            raise ModelError(f"{self.path}: ends within {self._reading}: it is cut short or broken")
        self._at = start + nbytes
        return start

    def _number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._bytes, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        nbytes = self._number("Q")
        start = self._take(nbytes)
        try:
            return str(self._bytes[start : start + nbytes], "utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {self._reading} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._number("I"), self._number("Q")
            if item_kind in _SCALARS:
                dtype = np.dtype(_SCALARS[item_kind]).newbyteorder("<")
                start = self._take(length * dtype.itemsize)
                return np.frombuffer(self._bytes, dtype, length, start).tolist()
            if item_kind == _STRING:
                return [self._string() for _ in range(length)]
            kind = item_kind  # arrays of arrays included: nothing that we read has any
        raise ModelError(f"{self.path}: {self._reading} has the unknown value type {kind}")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value by key and type."""
        value = self.metadata.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path}: metadata {key!r} is missing")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: metadata {key!r} must be {kind.__name__}, got {shorten(value)}")
        return value

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def where(self, name: str) -> str:
        return str(self.path)

    def read(self, name: str) -> torch.Tensor:
        """The tensor dequantised: float32, or float16 / bfloat16 where it is stored so."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.nbytes, info.offset)
        plain = self.dtype(name)
        if plain is not None:
            return torch.from_numpy(raw.copy()).view(plain).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            values = self._gguf.dequantize(rows, info.kind)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {info.kind.name}, which is not supported"
            ) from None
        return torch.from_numpy(values).reshape(info.shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """What a tensor is stored as; None when it is absent or quantised."""
        kinds = self._gguf.GGMLQuantizationType
        plain = {kinds.F32: torch.float32, kinds.F16: torch.float16, kinds.BF16: torch.bfloat16}
        return plain.get(self.tensors[name].kind) if name in self.tensors else None


def shorten(value: object) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
