"""The one decoder: GPT-2 and Llama types, over a flat batch of tokens, with attention given by the caller."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_engine.models.config import Activation, ModelConfig

# attend(layer, query, key, value) -> attended. Query and attended are [num_tokens, num_q_heads, head_dim],
# key and value [num_tokens, num_kv_heads, head_dim]. The caller stores key and value, then attends over
# all that it has stored. Tokens and heads are strided; the last dimension is contiguous.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# Products in 16 bits with longer rows take at most so many tokens at once; see `linear`.
_LONG_ROW, _PIECE_TOKENS = 1024, 128

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Decoder(nn.Module):
    """A decoder-only transformer whose keys and values live elsewhere.

    Tokens of all sequences come as one flat batch without padding; only `attend` knows which sequence a token
    belongs to. Meant for `torch.inference_mode()`. Parameters are created uninitialised: a loader fills them.

    Args:
        config: the shape.
        dtype: of parameters and activations: float32, bfloat16 or float16.
        device: where the parameters live.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        make = _Factory(dtype, torch.device(device))
        self.embedding = make.parameter(config.vocab_size, config.hidden_size)
        if config.rope is None:
            self.position_embedding = make.parameter(config.max_positions, config.hidden_size)
        else:
            # Angles are formed in float64: float32 loses 1e-3 radians by position 16k.
            frequencies = torch.tensor(config.rope.frequencies, dtype=torch.float64, device=device)
            self.register_buffer("rope_frequencies", frequencies, persistent=False)
        self.layers = nn.ModuleList(_Layer(config, make) for _ in range(config.num_layers))
        self.final_norm = _norm(config, make)
        if not config.tied_embeddings:
            self.unembedding = make.parameter(config.vocab_size, config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of each token after the final norm.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens], each token's place in its own sequence, from 0.
            attend: called once per layer in order; see `Attend`.

        Returns:
            [num_tokens, hidden_size] in the decoder's dtype.
        """
        hidden = F.embedding(token_ids, self.embedding)
        rotation = None
        if self.config.rope is None:
            hidden = hidden + F.embedding(positions, self.position_embedding)
        else:
            angles = positions[:, None, None] * self.get_buffer("rope_frequencies")
            rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, index, attend)
        return self.final_norm(hidden)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Scores over the vocabulary: [n, hidden_size] -> float32 [n, vocab_size].

        Pass only the rows that are sampled from: in a prefill that is one row per sequence.
        """
        weight = self.embedding if self.config.tied_embeddings else self.unembedding
        return linear(hidden_rows, weight).contiguous().float()


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, make: _Factory) -> None:
        super().__init__()
        self.config = config
        attention_size = config.num_q_heads * config.head_dim
        # Projections that read the same input are one matrix: fewer, larger products.
        self.attention_norm = _norm(config, make)
        self.qkv = _Linear(
            config.hidden_size, config.num_heads_fused * config.head_dim, config.attention_bias, make
        )
        self.attention_output = _Linear(
            attention_size, config.hidden_size, config.attention_output_bias, make
        )
        self.mlp_norm = _norm(config, make)
        self.mlp_input = _Linear(
            config.hidden_size, config.intermediate_size * (1 + config.gated_mlp), config.mlp_bias, make
        )
        self.mlp_output = _Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, make)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor, rotation: Tensor | None, index: int, attend: Attend) -> Tensor:
        config = self.config
        heads = self.qkv(self.attention_norm(hidden))
        heads = heads.contiguous() if rotation is None else rotate(heads, rotation, config)
        heads = heads.view(-1, config.num_heads_fused, config.head_dim)
        query, key, value = heads.split((config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        attended = attend(index, query, key, value).flatten(1)
        hidden = hidden + self.attention_output(attended)

        inner = self.mlp_input(self.mlp_norm(hidden))
        if config.gated_mlp:
            gate, up = inner.chunk(2, dim=1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        return hidden + self.mlp_output(inner)


class _Linear(nn.Module):
    def __init__(self, in_size: int, out_size: int, bias: bool, make: _Factory) -> None:
        super().__init__()
        self.weight = make.parameter(out_size, in_size)
        self.bias = make.parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _LayerNorm(nn.Module):
    def __init__(self, config: ModelConfig, make: _Factory) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight, self.bias = make.parameter(config.hidden_size), make.parameter(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, arXiv:1910.07467).

    On the CPU torch makes it of ten small kernels, a tenth of a decode step. But the root mean square of x is
    the standard deviation of (x, -x), whose mean is 0, and LayerNorm is one kernel. Its weight is twice as
    long; the second half meets what is then cut off.
    """

    doubled: Tensor

    def __init__(self, config: ModelConfig, make: _Factory) -> None:
        super().__init__()
        size = config.hidden_size
        self.eps = config.norm_eps
        self.register_buffer("doubled", torch.ones_like(make.parameter(2 * size)), persistent=False)
        self.weight = nn.Parameter(self.doubled[:size], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        both = torch.cat((x, -x), dim=-1)
        return F.layer_norm(both, self.doubled.shape, self.doubled, None, self.eps)[:, : x.shape[1]]


def _norm(config: ModelConfig, make: _Factory) -> nn.Module:
    return _LayerNorm(config, make) if config.norm == "layer" else _RMSNorm(config, make)


class _Factory:
    """Makes uninitialised inference parameters of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, k] times the transpose of weight [n, k], plus bias [n]: [num_tokens, n].

    On the CPU a step of few tokens is bound by reading the weights once, and in 16 bits oneDNN does that best
    with the weight as the left operand, whose rows it takes as they lie; as the right operand (`F.linear`) it
    rearranges them in every call. The result is then stored column by column.

    This also gives a token the same bits whatever it is batched with, as long as oneDNN sums long rows in one
    order; so those go in pieces of few tokens (measured for k up to 1536; not promised).
    """
    if not x.is_cpu or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    num_tokens, k = x.shape
    if num_tokens == 1:
        # Given twice, because torch's 16-bit matrix-vector product is as slow as F.linear.
        product = torch.mm(weight, x.t().expand(-1, 2).contiguous())[:, :1].t()
    elif num_tokens > _PIECE_TOKENS and k > _LONG_ROW:
        product = torch.cat([torch.mm(weight, piece.t()).t() for piece in x.split(_PIECE_TOKENS)])
    else:
        product = torch.mm(weight, x.t()).t()
    return product if bias is None else product + bias


def rotate(fused: Tensor, rotation: Tensor, config: ModelConfig) -> Tensor:
    """Turn the query and key heads of `fused` [num_tokens, num_heads_fused * head_dim] to their positions.

    Args:
        rotation: complex64 [num_tokens, 1, head_dim / 2]: cos(angle) + i sin(angle) of each pair.

    Returns:
        The turned queries and keys, and the values as they were; contiguous, shaped like `fused`.
    """
    # In float32, where neighbours that are a pair are one complex number.
    exact = torch.empty(fused.shape, dtype=torch.float32, device=fused.device).copy_(fused)
    pairs = exact.view(-1, config.num_heads_fused, config.head_dim // 2, 2)
    torch.view_as_complex(pairs[:, : -config.num_kv_heads]).mul_(rotation)
    return exact.to(fused.dtype)
