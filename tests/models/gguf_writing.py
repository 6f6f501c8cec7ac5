"""Writes small GGUF files from transformers models, with the names and row order of the usual converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    """The 256 letters in which byte-level BPE spells bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: specials, bytes, and a few words."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d"]
    return SPECIALS + byte_tokens() + [merge.replace(" ", "") for merge in merges], merges


def write_gguf(
    path: Path, model: Any, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **metadata: Any
) -> dict[str, torch.Tensor]:
    """Write `model`; returns its state dict as the file holds it, that is after quantisation.

    Matrices are quantised to `kind`, vectors stay float32. `metadata` overrides or adds keys: "__" stands for
    ".", "A" for the architecture.
    """
    config, state = model.config, model.state_dict()
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    tokens, merges = vocabulary()
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [
            3 if t in SPECIALS else 5 if t.startswith("[PAD") else 1 for t in tokens
        ],
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
        "tokenizer.chat_template": TEMPLATE,
    }
    if architecture == "gpt2":
        shape = {
            "block_count": config.n_layer,
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    else:
        shape = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        }
    for key, value in shape.items():
        fields[f"{architecture}.{key}"] = value if isinstance(value, float) else np.uint32(value)
    for key, value in metadata.items():
        fields[key.replace("A__", f"{architecture}__").replace("__", ".")] = value
    for key, value in fields.items():
        _add_field(writer, key, value)

    held = {}
    for name, tensor in state.items():
        target = _target_name(name, architecture)
        if target is None or (target == "output.weight" and config.tie_word_embeddings):
            continue
        array = tensor.float().numpy()
        if architecture == "gpt2" and array.ndim == 2 and ".h." in name:
            array = array.T
        heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
        permuted = heads.get(target.split(".")[-2]) if architecture == "llama" else None
        if permuted:
            array = to_neighbours(array, permuted)
        array = np.ascontiguousarray(array)
        chosen = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(array, chosen)
        writer.add_tensor(target, data, raw_dtype=chosen)
        array = gguf.dequantize(data, chosen).reshape(array.shape)
        if permuted:
            array = to_halves(array, permuted)
        if architecture == "gpt2" and array.ndim == 2 and ".h." in name:
            array = array.T
        held[name] = torch.from_numpy(np.ascontiguousarray(array))
    if "rope_freqs" in metadata:
        writer.add_tensor("rope_freqs.weight", metadata["rope_freqs"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def to_neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows (first halves, then second halves) of each head to rows in which rotary pairs are neighbours."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def to_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """The way back."""
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _target_name(name: str, architecture: str) -> str | None:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "transformer.wte.weight": "token_embd.weight",
        "transformer.wpe.weight": "position_embd.weight",
        "transformer.ln_f.weight": "output_norm.weight",
        "transformer.ln_f.bias": "output_norm.bias",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    names = _GPT2_NAMES if architecture == "gpt2" else _LLAMA_NAMES
    return f"blk.{layer}.{names[module]}.{kind}" if module in names else None


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.uint32):
        writer.add_uint32(key, int(value))
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
