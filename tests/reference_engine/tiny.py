"""A tiny random model with a byte tokenizer, and what it should generate without pages or batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

import paged_ops
from reference_engine import sampler
from reference_engine.models.config import ModelConfig, RopeConfig, rope_frequencies
from reference_engine.models.decoder import Decoder
from reference_engine.models.loader import LoadedModel
from reference_engine.models.tokenizer import Tokenizer
from reference_engine.sampling_params import SamplingParams

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that most characters of a random answer are broken, and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=(EOS,))


def tiny_model(dtype: torch.dtype = torch.float32, *, device: str = "cpu", seed: int = 0) -> LoadedModel:
    """Llama-like, two layers, grouped queries; weights are large enough for logits to differ clearly."""
    config = ModelConfig(
        architecture="tiny",
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        gated_mlp=True,
        rope=RopeConfig(rope_frequencies(8, 10000.0)),
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
    )
    decoder = Decoder(config, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        scale = 1.0 if parameter.ndim == 1 else 2.0 * parameter.shape[1] ** -0.5
        parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return LoadedModel("tiny", Path("tiny"), config, decoder, byte_tokenizer(), (EOS,))


def attend_to_all(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over this very sequence, in float64."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (
        query.double(),
        key.double().repeat_interleave(group, 1),
        value.double().repeat_interleave(group, 1),
    )
    logits = torch.einsum("qhd,khd->hqk", q, k) * query.shape[2] ** -0.5
    future = torch.ones(logits.shape[1:], dtype=torch.bool, device=logits.device).triu(1)
    weights = logits.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)


def attend_by_op(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by the op itself, over one block that holds the sequence."""
    num_tokens = len(query)
    lens = torch.tensor([num_tokens], dtype=torch.int32, device=query.device)
    table, cu_seqlens_q = torch.zeros_like(lens)[None], torch.cat([torch.zeros_like(lens), lens])
    return paged_ops.paged_attention(query, key[None], value[None], table, lens, cu_seqlens_q)


@torch.inference_mode()
def alone(model: LoadedModel, prompt: list[int], params: SamplingParams, sample_index: int = 0) -> list[int]:
    """What sample `sample_index` should generate: everything computed anew for each token."""
    tokens = list(prompt)
    # Kernels that round weights to 16 bits, as matrix units want them, are an ulp from float64, which may
    # turn a near tie; not so from themselves.
    attend = attend_to_all if model.decoder.dtype == torch.float32 else attend_by_op
    while True:
        device = model.decoder.device
        positions = torch.arange(len(tokens), device=device)
        hidden = model.decoder(torch.tensor(tokens, device=device), positions, attend)
        key = (params.seed or 0, sample_index, len(tokens))
        (token,), _ = sampler.sample(model.decoder.logits(hidden[-1:]), [params], [key])
        tokens.append(token)
        output = tokens[len(prompt) :]
        ends = token in params.stop_token_ids or (token in model.eos_token_ids and not params.ignore_eos)
        if ends or len(output) == params.max_tokens or len(tokens) == model.config.max_positions:
            return output


CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def save_checkpoint(kind: str, folder: Path) -> Any:
    """A small random Hugging Face checkpoint with the byte tokenizer; returns the transformers model."""
    import transformers

    torch.manual_seed(3)
    shared = {"vocab_size": 257, "bos_token_id": EOS, "eos_token_id": EOS}
    if kind == "gpt2":
        config = transformers.GPT2Config(**shared, n_embd=64, n_layer=2, n_head=4, n_positions=128)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            **shared,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return model.eval()
