"""Reads a GGUF file: the container, its metadata as a ModelConfig, its tensors dequantised by gguf."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from reference_engine.models.config import ModelConfig, ModelError, RopeConfig, rope_frequencies
from reference_engine.models.requirements import require
from reference_engine.models.weights import Naming

T = TypeVar("T")

_NAMING = Naming(
    embedding="token_embd",
    positions="position_embd",
    layer="blk.{}",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    attention_output="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    final_norm="output_norm",
    unembedding="output",
)
_GPT2_NAMING = Naming(
    embedding="token_embd",
    positions="position_embd",
    layer="blk.{}",
    attention_norm="attn_norm",
    qkv="attn_qkv",
    attention_output="attn_output",
    mlp_norm="ffn_norm",
    up="ffn_up",
    down="ffn_down",
    final_norm="output_norm",
    unembedding="output",
)
_ROPE_DIVISORS = "rope_freqs.weight"  # context extension, as one divisor per frequency

# struct codes of the scalar value types, by their number in the file; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Settings that change what a model computes, in a way that the decoder has no part for: key after the
# architecture's name -> (meaning, values that switch it off).
_UNSUPPORTED_KEYS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "attention.clamp_kqv": ("clipped projections", (0.0,)),
    "attention.max_alibi_bias": ("ALiBi position biases", (0.0,)),
    "attention.scale": ("a scaled attention", (0.0,)),
    "attention.sliding_window": ("sliding window attention", (0,)),
    "attn_logit_softcapping": ("soft-capped attention scores", (0.0,)),
    "embedding_scale": ("scaled embeddings", (0.0, 1.0)),
    "expert_count": ("a mixture of experts", (0,)),
    "final_logit_softcapping": ("soft-capped logits", (0.0,)),
    "logit_scale": ("scaled logits", (0.0, 1.0)),
    "rope.scale_linear": ("rotary positions rescaled in an old way", (0.0, 1.0)),
    "residual_scale": ("scaled residuals", (0.0, 1.0)),
    "use_parallel_residual": ("parallel residuals", (False,)),
}


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
            raise ModelError(f"{self.path}: metadata {key!r} must be {kind.__name__}, got {_shorten(value)}")
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


def read_config(file: GgufFile) -> tuple[ModelConfig, Naming]:
    """The shape that the metadata describes, and the names its tensors have.

    Raises:
        ModelError: incomplete, or describing something that the decoder does not compute.
    """
    kind = file.get("general.architecture", str)
    if kind not in ("gpt2", "llama", "qwen2"):
        raise ModelError(
            f"{file.path}: architecture {kind!r} is not supported; supported are gpt2, llama and qwen2"
        )
    for key, (meaning, neutral) in _UNSUPPORTED_KEYS.items():
        value = file.metadata.get(f"{kind}.{key}")
        if value is not None and value not in neutral:
            raise ModelError(
                f"{file.path}: {kind}.{key} = {value!r} asks for {meaning}, which is not supported"
            )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")

    hidden = file.get(f"{kind}.embedding_length", int)
    heads = file.get(f"{kind}.attention.head_count", int)
    head_dim = file.get(f"{kind}.attention.key_length", int, hidden // max(heads, 1))
    value_dim = file.get(f"{kind}.attention.value_length", int, head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{file.path}: key and value head dims differ ({head_dim}, {value_dim}): not supported"
        )
    gpt2 = kind == "gpt2"
    eps_key = "attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"
    has_bias = "blk.0.attn_q.bias" in file.tensors
    try:
        config = ModelConfig(
            architecture=kind,
            vocab_size=file.shape("token_embd.weight")[0],
            hidden_size=hidden,
            intermediate_size=file.get(f"{kind}.feed_forward_length", int),
            num_layers=file.get(f"{kind}.block_count", int),
            num_q_heads=heads,
            num_kv_heads=file.get(f"{kind}.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            max_positions=file.get(f"{kind}.context_length", int),
            norm="layer" if gpt2 else "rms",
            norm_eps=file.get(f"{kind}.{eps_key}", float),
            activation="gelu_tanh" if gpt2 else "silu",
            gated_mlp=not gpt2,
            rope=None if gpt2 else _rope(file, kind, head_dim),
            attention_bias=gpt2 or has_bias,
            attention_output_bias=gpt2 or "blk.0.attn_output.bias" in file.tensors,
            mlp_bias=gpt2,
            tied_embeddings="output.weight" not in file.tensors,
        )
    except ModelError as error:
        raise error if str(file.path) in str(error) else ModelError(f"{file.path}: {error}") from None
    if gpt2:
        return config, _GPT2_NAMING
    # The converter brings llama's query and key rows into pairs of neighbours; others keep halves.
    return config, replace(_NAMING, rotary_halves=kind != "llama")


def _rope(file: GgufFile, kind: str, head_dim: int) -> RopeConfig:
    rotated = file.get(f"{kind}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{file.path}: rotary positions on {rotated} of {head_dim} dimensions of a head are not supported"
        )
    frequencies = rope_frequencies(head_dim, file.get(f"{kind}.rope.freq_base", float, 10000.0))
    scaling = file.get(f"{kind}.rope.scaling.type", str, "none")
    if scaling == "linear":
        factor = file.get(f"{kind}.rope.scaling.factor", float)
        if not factor > 0:
            raise ModelError(f"{file.path}: {kind}.rope.scaling.factor must be positive, got {factor}")
        frequencies = tuple(frequency / factor for frequency in frequencies)
    elif scaling != "none":
        raise ModelError(
            f"{file.path}: rope scaling {scaling!r} is not supported; supported are none and linear"
        )
    if _ROPE_DIVISORS in file.tensors:
        divisors = file.read(_ROPE_DIVISORS).flatten().tolist()
        if len(divisors) != len(frequencies) or not all(divisor > 0 for divisor in divisors):
            raise ModelError(
                f"{file.path}: tensor {_ROPE_DIVISORS!r} must hold {len(frequencies)} positive numbers, "
                f"got {_shorten(divisors)}"
            )
        frequencies = tuple(f / divisor for f, divisor in zip(frequencies, divisors, strict=True))
    return RopeConfig(frequencies)


def ignorable() -> set[str]:
    """Tensors that a file may carry without being a parameter."""
    return {_ROPE_DIVISORS}


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
