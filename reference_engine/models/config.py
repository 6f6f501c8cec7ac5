"""What shape a decoder has: one record that every checkpoint format is translated into (stdlib only)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

MAX_HEAD_DIM = 576  # what the paged ops take, besides the multiple of 8


class ModelError(ValueError):
    """A model that cannot be loaded: what is wrong, in which file, and what was wanted."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

    Pair i of a head's dimensions, (2i, 2i + 1), turns by `frequencies[i] * position` radians. Checkpoints
    that pair i with i + head_dim / 2 instead are brought into this order when they are loaded.

    Attributes:
        frequencies: radians per position, one per pair: [head_dim / 2]. Context extension by rescaled
            frequencies is already applied.
    """

    frequencies: tuple[float, ...]


def check_head_dim(head_dim: int) -> None:
    """Raises ModelError for what the paged attention ops do not take."""
    if head_dim < 8 or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ModelError(
            f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}: "
            "the paged attention ops take no other"
        )


def rope_frequencies(head_dim: int, theta: float) -> tuple[float, ...]:
    """theta ** (-2i / head_dim) for each pair i."""
    check_head_dim(head_dim)
    return tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))


def llama3_rescale(
    frequencies: tuple[float, ...],
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> tuple[float, ...]:
    """The context extension of Llama 3.1: divide slow pairs by `factor`, keep fast ones, blend in between.

    A pair is slow when it makes fewer than `low_freq_factor` turns over the original context, fast from
    `high_freq_factor` turns on.
    """

    if not (factor > 0 and high_freq_factor > low_freq_factor):
        raise ModelError(
            "llama3 rope wants factor > 0 and high_freq_factor > low_freq_factor, "
            f"got {factor}, {high_freq_factor} and {low_freq_factor}"
        )

    def rescale(frequency: float) -> float:
        turns = original_max_positions * frequency / (2 * math.pi)
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return frequency * (kept + (1 - kept) / factor)

    return tuple(rescale(frequency) for frequency in frequencies)


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder-only transformer of the GPT-2 or Llama kind.

    Attributes:
        architecture: the checkpoint's own word for it, for messages.
        max_positions: longest context, prompt and answer together, in tokens.
        rope: None means learned absolute position embeddings.
        gated_mlp: down(activation(gate(x)) * up(x)) instead of down(activation(up(x))).
        attention_bias, attention_output_bias, mlp_bias: which projections add a bias.
        tied_embeddings: the output projection is the token embedding.

    Raises:
        ModelError: a size that is not positive or does not fit the others.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm: Norm
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    rope: RopeConfig | None
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} "
                f"and {self.num_kv_heads}"
            )
        check_head_dim(self.head_dim)
        if self.rope is not None and len(self.rope.frequencies) != self.head_dim // 2:
            raise ModelError(
                f"rope must have head_dim / 2 = {self.head_dim // 2} frequencies, "
                f"got {len(self.rope.frequencies)}"
            )
        if not self.norm_eps >= 0:
            raise ModelError(f"norm_eps must be at least 0, got {self.norm_eps}")

    @property
    def num_heads_fused(self) -> int:
        """Heads in one row of the fused projection: queries, then keys, then values."""
        return self.num_q_heads + 2 * self.num_kv_heads
