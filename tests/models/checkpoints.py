"""Small random checkpoints on disk, made by transformers; attention for the decoder; greedy generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import paged_ops
from reference_engine.models import Attend, Decoder, ModelConfig

VOCAB = 256


def make_model(kind: str, seed: int = 0, **settings: Any) -> Any:
    """A transformers model with random weights, wide enough that its greedy choices are not ties or loops."""
    import transformers

    torch.manual_seed(seed)
    classes = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config_class, model_class = classes[kind]
    if kind == "gpt2":
        base = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    else:
        base = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        }
    ids = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = model_class(config_class(**{**ids, **base, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(1, 0.2)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


class ContiguousAttention:
    """Attention of one sequence over plain tensors, in float32: what a paged cache must equal."""

    def __init__(self, config: ModelConfig) -> None:
        self.groups = config.num_q_heads // config.num_kv_heads
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.keys[layer].append(key.clone())
        self.values[layer].append(value.clone())
        keys, values = (
            torch.cat(kept).float().transpose(0, 1).repeat_interleave(self.groups, dim=0)
            for kept in (self.keys[layer], self.values[layer])
        )
        num_queries, num_keys = query.shape[0], keys.shape[1]
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        out = F.scaled_dot_product_attention(query.float().transpose(0, 1), keys, values, attn_mask=mask)
        return out.transpose(0, 1).to(query.dtype)


class PagedAttention:
    """Attention of one sequence through the public ops, over blocks handed out in random order."""

    def __init__(self, config: ModelConfig, block_size: int = 7, dtype: torch.dtype = torch.float32) -> None:
        num_blocks = -(-config.max_positions // block_size)
        self.pool = paged_ops.allocate_kv_pool(
            num_blocks,
            block_size,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            dtype=dtype,
            device="cpu",
        )
        self.block_size = block_size
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks))
        self.table = order.to(torch.int32)[None]
        self.lengths = [0] * config.num_layers

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        num_tokens = len(query)
        positions = torch.arange(self.lengths[layer], self.lengths[layer] + num_tokens)
        self.lengths[layer] += num_tokens
        slots = self.table[0, positions // self.block_size].long() * self.block_size
        slots += positions % self.block_size
        cache = self.pool.key(layer), self.pool.value(layer)
        paged_ops.write_kv_cache(key, value, *cache, slots)
        lengths = torch.tensor([self.lengths[layer]], dtype=torch.int32)
        if num_tokens == 1:
            return paged_ops.paged_attention_decode(query, *cache, self.table, lengths)
        bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
        return paged_ops.paged_attention(query, *cache, self.table, lengths, bounds)


@torch.inference_mode()
def logits_of(decoder: Decoder, attend: Attend, token_ids: list[int], start: int = 0) -> torch.Tensor:
    """Scores after each of the tokens of one sequence, which begin at position `start`."""
    positions = torch.arange(start, start + len(token_ids))
    return decoder.logits(decoder(torch.tensor(token_ids), positions, attend))


def greedy(decoder: Decoder, attend: Attend, prompt: list[int], num_tokens: int) -> list[int]:
    """The prompt in one go, then token by token."""
    sequence, computed = list(prompt), 0
    while len(sequence) < len(prompt) + num_tokens:
        scores = logits_of(decoder, attend, sequence[computed:], start=computed)
        computed = len(sequence)
        sequence.append(int(scores[-1].argmax()))
    return sequence[len(prompt) :]


@torch.inference_mode()
def greedy_of_transformers(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What `generate` makes of the prompt, end-of-sequence ids ignored."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        suppress_tokens=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
