"""vLLM's cache layouts as views in the ops' own: nothing is copied, the ops take any strides."""

from __future__ import annotations

import torch


def heads_first_view(name: str, cache: torch.Tensor) -> torch.Tensor:
    """``[num_blocks, num_kv_heads, block_size, head_dim]``, as vLLM's CPU backend has it, tokens first."""
    if cache.ndim != 4:
        raise ValueError(
            f"{name}: shape is {tuple(cache.shape)}, wanted [num_blocks, num_kv_heads, block_size, head_dim]"
        )
    return cache.transpose(1, 2)
