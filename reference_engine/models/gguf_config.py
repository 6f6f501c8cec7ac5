"""Reads the metadata of a GGUF file: to a ModelConfig, and the names that its tensors have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_engine.models.config import ModelConfig, ModelError, RopeConfig, rope_frequencies
from reference_engine.models.gguf_file import GgufFile, shorten
from reference_engine.models.weights import Naming

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
                f"got {shorten(divisors)}"
            )
        frequencies = tuple(f / divisor for f, divisor in zip(frequencies, divisors, strict=True))
    return RopeConfig(frequencies)


def ignorable() -> set[str]:
    """Tensors that a file may carry without being a parameter."""
    return {_ROPE_DIVISORS}
