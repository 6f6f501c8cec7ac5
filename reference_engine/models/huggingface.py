"""Reads the config.json of a Hugging Face folder: to a ModelConfig, and the names that its tensors have."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from reference_engine.models.config import (
    Activation,
    ModelConfig,
    ModelError,
    RopeConfig,
    llama3_rescale,
    rope_frequencies,
)
from reference_engine.models.json_file import Fields, read_json
from reference_engine.models.safetensors_folder import SafetensorsFolder
from reference_engine.models.weights import Naming

_LLAMA_NAMING = Naming(
    embedding="model.embed_tokens",
    layer="model.layers.{}",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
    unembedding="lm_head",
    rotary_halves=True,
)
_GPT2_NAMING = Naming(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    attention_output="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    unembedding="lm_head",
    transposed=True,  # GPT-2 calls its projections Conv1D
)

# Buffers that older checkpoints carry along: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields that change what a model computes, in a way that the decoder has no part for: name -> (meaning,
# values that switch it off). An absent or null field is off.
_UNSUPPORTED_FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "add_cross_attention": ("cross-attention", (False,)),
    "alibi": ("ALiBi position biases", (False,)),
    "attention_multiplier": ("a scaled attention", ()),
    "attn_logit_softcapping": ("soft-capped attention scores", ()),
    "clip_qkv": ("clipped projections", ()),
    "embedding_multiplier": ("scaled embeddings", (1,)),
    "final_logit_softcapping": ("soft-capped logits", ()),
    "is_encoder_decoder": ("an encoder", (False,)),
    "kv_lora_rank": ("multi-head latent attention", ()),
    "logit_scale": ("scaled logits", (1,)),
    "logits_scaling": ("scaled logits", (1,)),
    "n_routed_experts": ("a mixture of experts", (0, 1)),
    "no_rope_layers": ("layers without positions", ([],)),
    "num_experts": ("a mixture of experts", (0, 1)),
    "num_local_experts": ("a mixture of experts", (0, 1)),
    "partial_rotary_factor": ("rotary positions on a part of each head", (1,)),
    "quantization_config": ("quantised weights", ()),
    "residual_multiplier": ("scaled residuals", (1,)),
    "scale_attn_by_inverse_layer_idx": ("attention scaled by the layer's number", (False,)),
    "scale_attn_weights": ("unscaled attention", (True,)),
    "use_qk_norm": ("normalised queries and keys", (False,)),
}


def read_config(folder: Path) -> tuple[ModelConfig, Naming]:
    """The shape that `config.json` describes, and the names its tensors have.

    Raises:
        ModelError: broken, incomplete, or describing something that the decoder does not compute.
    """
    path = folder / "config.json"
    values = read_json(path)
    kind = values.get("model_type")
    if kind not in ("gpt2", "llama", "mistral", "qwen2"):
        raise ModelError(
            f"{path}: model_type {kind!r} is not supported; supported are gpt2, llama, mistral and qwen2"
        )
    fields = Fields(path, values)
    _refuse_unsupported(fields)
    try:
        return (_gpt2(fields), _GPT2_NAMING) if kind == "gpt2" else (_llama(fields, kind), _LLAMA_NAMING)
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from None


def _refuse_unsupported(fields: Fields) -> None:
    for name, (meaning, neutral) in _UNSUPPORTED_FIELDS.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral:
            raise ModelError(f"{fields.path}: {name} = {value!r} asks for {meaning}, which is not supported")


def _gpt2(fields: Fields) -> ModelConfig:
    hidden, heads = fields.get("n_embd", int), fields.get("n_head", int)
    if heads < 1 or hidden % heads:
        raise ModelError(f"n_embd must be a multiple of n_head, got {hidden} and {heads}")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.get("n_inner", int, 4 * hidden),
        num_layers=fields.get("n_layer", int),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=fields.get("n_positions", int),
        norm="layer",
        norm_eps=fields.get("layer_norm_epsilon", float, 1e-5),
        activation=_activation(fields, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tied_embeddings=fields.get("tie_word_embeddings", bool, True),
    )


def _llama(fields: Fields, kind: str) -> ModelConfig:
    hidden, heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    if fields.values.get("head_dim") is None and (heads < 1 or hidden % heads):
        raise ModelError(
            "without head_dim, hidden_size must be a multiple of num_attention_heads, "
            f"got {hidden} and {heads}"
        )
    head_dim = fields.get("head_dim", int, hidden // max(heads, 1))
    max_positions = fields.get("max_position_embeddings", int)
    _refuse_window(fields, max_positions)
    # Qwen2 has no field for its biases: they are part of the architecture.
    attention_bias = True if kind == "qwen2" else fields.get("attention_bias", bool, False)
    return ModelConfig(
        architecture=kind,
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.get("intermediate_size", int),
        num_layers=fields.get("num_hidden_layers", int),
        num_q_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm="rms",
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        activation=_activation(fields, "hidden_act", "silu"),
        gated_mlp=True,
        rope=_rope(fields, head_dim, max_positions),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and kind != "qwen2",
        mlp_bias=fields.get("mlp_bias", bool, False),
        tied_embeddings=fields.get("tie_word_embeddings", bool, False),
    )


def _activation(fields: Fields, name: str, default: str) -> Activation:
    value = fields.get(name, str, default)
    if value not in _ACTIVATIONS:
        raise ModelError(
            f"{fields.path}: {name} {value!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def _refuse_window(fields: Fields, max_positions: int) -> None:
    window = fields.values.get("sliding_window")
    windowed = window is not None and fields.values.get("use_sliding_window", True) is not False
    if windowed and fields.get("sliding_window", int) < max_positions:
        raise ModelError(
            f"{fields.path}: sliding_window = {window} within a context of {max_positions} "
            "asks for sliding window attention, which is not supported"
        )
    layers = fields.values.get("layer_types") or []
    if any(layer != "full_attention" for layer in layers):
        raise ModelError(
            f"{fields.path}: layer_types holds more than 'full_attention', which is not supported"
        )


_ROPE_FIELDS = {
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "type",
}


def _rope(fields: Fields, head_dim: int, max_positions: int) -> RopeConfig:
    # Newer files have one object with everything; older ones a theta, and an object only for rescaling.
    name = "rope_parameters" if fields.values.get("rope_parameters") is not None else "rope_scaling"
    rope = Fields(fields.path, fields.get(name, dict, {}))
    if rope.values.get("partial_rotary_factor") not in (None, 1):
        raise ModelError(f"{fields.path}: rotary positions on a part of each head are not supported")
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 10000.0))
    if not theta > 0:
        raise ModelError(f"{fields.path}: rope_theta must be positive, got {theta}")
    frequencies = rope_frequencies(head_dim, theta)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"{fields.path}: rope type {kind!r} is not supported; supported are default, linear and llama3"
        )
    unknown = sorted(rope.values.keys() - _ROPE_FIELDS)
    if unknown:
        raise ModelError(f"{fields.path}: {name} holds {unknown[0]!r}, which is not supported")
    if kind == "linear":
        factor = rope.get("factor", float)
        if not factor > 0:
            raise ModelError(f"{fields.path}: factor of {name} must be positive, got {factor}")
        frequencies = tuple(frequency / factor for frequency in frequencies)
    elif kind == "llama3":
        frequencies = llama3_rescale(
            frequencies,
            factor=rope.get("factor", float),
            low_freq_factor=rope.get("low_freq_factor", float),
            high_freq_factor=rope.get("high_freq_factor", float),
            original_max_positions=rope.get("original_max_position_embeddings", int, max_positions),
        )
    return RopeConfig(frequencies)


def adapt_naming(naming: Naming, source: SafetensorsFolder) -> Naming:
    """The names without their leading "model." or "transformer.", if the checkpoint leaves it out."""
    prefix = naming.embedding.split(".")[0] + "."
    if any(name.startswith(prefix) for name in source.names()):
        return naming
    bare = {
        field: getattr(naming, field).removeprefix(prefix)
        for field in ("embedding", "positions", "layer", "final_norm")
    }
    return replace(naming, **bare)


def ignorable(naming: Naming, config: ModelConfig, source: SafetensorsFolder) -> set[str]:
    """Tensors that a checkpoint may carry without need: buffers, and the copy of a tied embedding."""
    ignored = {name for name in source.names() if _BUFFERS.search(name)}
    if config.tied_embeddings:
        ignored.add(f"{naming.unembedding}.weight")
    return ignored


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: `generation_config.json` if it has any, else `config.json`."""
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise ModelError(f"{path}: eos_token_id must be an integer or a list of them, got {value!r}")
            return tuple(ids)
    return ()
