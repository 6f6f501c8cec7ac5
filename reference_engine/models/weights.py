"""Which checkpoint tensors make up each decoder parameter, and the one place that fills them in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from reference_engine.models.config import ModelConfig, ModelError
from reference_engine.models.decoder import Decoder


class TensorSource(Protocol):
    """A checkpoint's tensors by name, read one at a time."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def where(self, name: str) -> str:
        """The file that holds the tensor, or should, for messages."""
        ...


@dataclass(frozen=True)
class Naming:
    """A checkpoint format's names: `layer` has a {} for the layer's number, names inside a layer follow it.

    Either `qkv` names a fused projection, or `query`, `key` and `value` name three.
    `transposed` projections are stored [in, out]. With `rotary_halves`, rotary pairs are
    (i, i + head_dim / 2).
    """

    embedding: str
    layer: str
    attention_norm: str
    attention_output: str
    mlp_norm: str
    up: str
    down: str
    final_norm: str
    unembedding: str
    gate: str = ""
    qkv: str = ""
    query: str = ""
    key: str = ""
    value: str = ""
    positions: str = ""
    transposed: bool = False
    rotary_halves: bool = False


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor: its shape in the file, and what brings it into the decoder's order."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    num_split_heads: int = 0  # heads whose rows lie in rotary halves

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the decoder wants it."""
        if self.transposed:
            tensor = tensor.t()
        if self.num_split_heads:
            tensor = tensor.unflatten(0, (self.num_split_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return tensor


Plan = Iterator[tuple[str, list[Piece]]]


def weight_plan(config: ModelConfig, naming: Naming) -> Plan:
    """For each decoder parameter, its name and the pieces that are stacked along its first dimension.

    One by one, so that a configuration that claims a billion layers fails at the first one that is not there.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_heads, kv_heads = config.num_q_heads, config.num_kv_heads

    def vector(target: str, name: str) -> Plan:
        yield target, [Piece(name, (hidden,))]

    def norm(target: str, name: str) -> Plan:
        yield from vector(f"{target}.weight", f"{name}.weight")
        if config.norm == "layer":
            yield from vector(f"{target}.bias", f"{name}.bias")

    def projection(target: str, in_size: int, bias: bool, *parts: tuple[str, int, int]) -> Plan:
        """Parts are (name, rows, heads in rotary halves)."""

        def weight(name: str, rows: int, split: int) -> Piece:
            shape = (in_size, rows) if naming.transposed else (rows, in_size)
            return Piece(f"{name}.weight", shape, naming.transposed, split)

        yield f"{target}.weight", [weight(*part) for part in parts]
        if bias:
            yield f"{target}.bias", [Piece(f"{n}.bias", (rows,), False, split) for n, rows, split in parts]

    yield "embedding", [Piece(f"{naming.embedding}.weight", (config.vocab_size, hidden))]
    if config.rope is None:
        yield "position_embedding", [Piece(f"{naming.positions}.weight", (config.max_positions, hidden))]
    for index in range(config.num_layers):
        target, prefix = f"layers.{index}.", naming.layer.format(index) + "."
        if naming.qkv:
            heads = [(naming.qkv, config.num_heads_fused, False)]
        else:
            halves = naming.rotary_halves
            heads = [
                (naming.query, q_heads, halves),
                (naming.key, kv_heads, halves),
                (naming.value, kv_heads, False),
            ]
        qkv = [(prefix + name, n * config.head_dim, n if split else 0) for name, n, split in heads]
        inputs = [naming.gate, naming.up] if config.gated_mlp else [naming.up]
        output = (prefix + naming.attention_output, hidden, 0)
        yield from norm(target + "attention_norm", prefix + naming.attention_norm)
        yield from projection(target + "qkv", hidden, config.attention_bias, *qkv)
        yield from projection(
            target + "attention_output", q_heads * config.head_dim, config.attention_output_bias, output
        )
        yield from norm(target + "mlp_norm", prefix + naming.mlp_norm)
        yield from projection(
            target + "mlp_input", hidden, config.mlp_bias, *((prefix + name, inner, 0) for name in inputs)
        )
        yield from projection(
            target + "mlp_output", inner, config.mlp_bias, (prefix + naming.down, hidden, 0)
        )
    yield from norm("final_norm", naming.final_norm)
    if not config.tied_embeddings:
        yield "unembedding", [Piece(f"{naming.unembedding}.weight", (config.vocab_size, hidden))]


def check(plan: Plan, source: TensorSource, ignored: set[str], architecture: str) -> None:
    """Compare the names and shapes of a checkpoint with the plan, before anything is allocated or read.

    Args:
        ignored: tensors that the file may hold and the decoder does not need.
        architecture: for messages.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape; names the tensor and the file.
    """
    present, known = set(source.names()), set(ignored)
    for piece in (piece for _, parts in plan for piece in parts):
        if piece.name not in present:
            raise ModelError(f"{source.where(piece.name)}: tensor {piece.name!r} is missing")
        shape = source.shape(piece.name)
        if shape != piece.shape:
            raise ModelError(
                f"{source.where(piece.name)}: tensor {piece.name!r} has shape {list(shape)}, "
                f"the model's configuration wants {list(piece.shape)}"
            )
        known.add(piece.name)
    unknown = sorted(present - known)
    if unknown:
        others = f" (nor have {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ModelError(
            f"{source.where(unknown[0])}: tensor {unknown[0]!r} has no place in a decoder of type "
            f"{architecture!r}{others}: the model has a part that is not supported"
        )


def fill(decoder: Decoder, plan: Plan, source: TensorSource) -> None:
    """Read every parameter of `decoder` from a checked `source`, converting to the decoder's dtype."""
    unfilled = dict(decoder.named_parameters())
    for target, parts in plan:
        parameter, row = unfilled.pop(target), 0
        for piece in parts:
            tensor = piece.arrange(source.read(piece.name))
            parameter[row : row + tensor.shape[0]].copy_(tensor)
            row += tensor.shape[0]
    assert not unfilled, f"the plan leaves out {sorted(unfilled)}"
