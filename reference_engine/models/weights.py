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
    """A checkpoint format's names. `layer` has a {} for the layer's number; names inside a layer follow it.

    Either `qkv` names a fused projection, or `query`, `key` and `value` name three.
    `transposed` projections are stored [in, out].
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


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, and the shape it must have in the file."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


Plan = Iterator[tuple[str, list[Piece]]]


def weight_plan(config: ModelConfig, naming: Naming) -> Plan:
    """For each decoder parameter, its name and the pieces that are stacked along its first dimension.

    One by one, so that a configuration that claims a billion layers fails at the first one that is not there.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

    def vector(target: str, *parts: tuple[str, int]) -> Plan:
        yield target, [Piece(name, (size,)) for name, size in parts]

    def projection(target: str, in_size: int, bias: bool, *parts: tuple[str, int]) -> Plan:
        def shape(out_size: int) -> tuple[int, int]:
            return (in_size, out_size) if naming.transposed else (out_size, in_size)

        yield (
            f"{target}.weight",
            [Piece(f"{name}.weight", shape(out_size), naming.transposed) for name, out_size in parts],
        )
        if bias:
            yield from vector(f"{target}.bias", *((f"{name}.bias", out) for name, out in parts))

    def norm(target: str, name: str) -> Plan:
        yield from vector(f"{target}.weight", (f"{name}.weight", hidden))
        if config.norm == "layer":
            yield from vector(f"{target}.bias", (f"{name}.bias", hidden))

    yield "embedding", [Piece(f"{naming.embedding}.weight", (config.vocab_size, hidden))]
    if config.rope is None:
        yield "position_embedding", [Piece(f"{naming.positions}.weight", (config.max_positions, hidden))]
    q_size, kv_size = config.num_q_heads * dim, config.num_kv_heads * dim
    for index in range(config.num_layers):
        target, prefix = f"layers.{index}", naming.layer.format(index) + "."
        if naming.qkv:
            heads = [(prefix + naming.qkv, q_size + 2 * kv_size)]
        else:
            heads = [
                (prefix + naming.query, q_size),
                (prefix + naming.key, kv_size),
                (prefix + naming.value, kv_size),
            ]
        names = [naming.gate, naming.up] if config.gated_mlp else [naming.up]
        yield from norm(f"{target}.attention_norm", prefix + naming.attention_norm)
        yield from projection(f"{target}.qkv", hidden, config.attention_bias, *heads)
        yield from projection(
            f"{target}.attention_output",
            q_size,
            config.attention_output_bias,
            (prefix + naming.attention_output, hidden),
        )
        yield from norm(f"{target}.mlp_norm", prefix + naming.mlp_norm)
        inputs = [(prefix + name, inner) for name in names]
        yield from projection(f"{target}.mlp_input", hidden, config.mlp_bias, *inputs)
        yield from projection(f"{target}.mlp_output", inner, config.mlp_bias, (prefix + naming.down, hidden))
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
            tensor = source.read(piece.name)
            tensor = tensor.t() if piece.transposed else tensor
            parameter[row : row + tensor.shape[0]].copy_(tensor)
            row += tensor.shape[0]
    assert not unfilled, f"the plan leaves out {sorted(unfilled)}"
