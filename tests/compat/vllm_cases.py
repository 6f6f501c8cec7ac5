"""The shared cases in vLLM's terms: its layouts, written out element by element, and its uint8 caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paged_ops.testing import arrays
from paged_ops.testing.cases import Case, Inputs, build

# vLLM's name of what a cache holds.
KV_CACHE_DTYPES = {None: "auto", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2"}


def kv_cache_dtype(case: Case) -> str:
    return KV_CACHE_DTYPES[case.cache_dtype]


def packed_keys(cache: np.ndarray) -> np.ndarray:
    """[num_blocks, block_size, heads, dim] as [num_blocks, heads, dim / x, block_size, x], x for 16 bytes."""
    num_blocks, block_size, heads, dim = cache.shape
    x = 16 // cache.itemsize
    packed = np.empty((num_blocks, heads, dim // x, block_size, x), cache.dtype)
    block, token, head, d = np.indices(cache.shape)
    packed[block, head, d // x, token, d % x] = cache[block, token, head, d]
    return packed


def transposed_values(cache: np.ndarray) -> np.ndarray:
    """[num_blocks, block_size, heads, dim] as [num_blocks, heads, dim, block_size]."""
    num_blocks, block_size, heads, dim = cache.shape
    transposed = np.empty((num_blocks, heads, dim, block_size), cache.dtype)
    block, token, head, d = np.indices(cache.shape)
    transposed[block, head, d, token] = cache[block, token, head, d]
    return transposed


def as_bytes(cache: np.ndarray) -> np.ndarray:
    """8-bit numbers as vLLM keeps them; others stay."""
    return cache.view(np.uint8) if cache.itemsize == 1 else cache


def put(array: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """A tensor of the array's bits, with memory of its own."""
    return arrays.to_torch(np.ascontiguousarray(array).copy(), device)


def put_scale(scale: Any, device: str = "cpu") -> Any:
    return put(scale, device) if isinstance(scale, np.ndarray) else scale


@dataclass(frozen=True)
class ClassicCase:
    """A decode case with the classic pair of caches; NaN stays in all unused slots."""

    inputs: Inputs
    query: torch.Tensor
    key_cache: torch.Tensor  # [num_blocks, num_kv_heads, head_dim / x, block_size, x]
    value_cache: torch.Tensor  # [num_blocks, num_kv_heads, head_dim, block_size]
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    alibi_slopes: torch.Tensor | None
    scales: tuple[Any, Any]
    out: torch.Tensor  # NaN

    def arguments(self) -> dict[str, Any]:
        """Of ``paged_attention_v1``, by name."""
        case = self.inputs.case
        return {
            "out": self.out,
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "num_kv_heads": case.num_kv_heads,
            "scale": case.applied_scale,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "block_size": case.block_size,
            "max_seq_len": max(case.seq_lens, default=0),
            "alibi_slopes": self.alibi_slopes,
            "kv_cache_dtype": kv_cache_dtype(case),
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
        }


def classic_case(case: Case, device: str = "cpu") -> ClassicCase:
    inputs = build(case)
    slopes = inputs.alibi_slopes
    plain = case.cache_dtype is None
    return ClassicCase(
        inputs,
        put(inputs.query, device),
        put(as_bytes(packed_keys(inputs.key_cache)), device),
        put(as_bytes(transposed_values(inputs.value_cache)), device),
        put(inputs.block_tables, device),
        put(inputs.seq_lens, device),
        None if slopes is None else put(slopes, device),
        (1.0, 1.0) if plain else (put_scale(inputs.k_scale, device), put_scale(inputs.v_scale, device)),
        put(inputs.new_out(), device),
    )
