"""vLLM's cache layouts as views in the ops' own: nothing is copied, the ops take any strides."""

from __future__ import annotations

import torch


def packed_views(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The classic pair: keys in packs of 16 bytes, values with the tokens of a block side by side.

    key_cache ``[num_blocks, num_kv_heads, head_dim / x, block_size, x]`` with x = 16 / itemsize,
    value_cache ``[num_blocks, num_kv_heads, head_dim, block_size]`` -> ``[num_blocks, block_size,
    num_kv_heads, head_dim / x, x]`` and ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    """
    x = 16 // key_cache.element_size()
    if key_cache.ndim != 5 or key_cache.shape[4] != x:
        raise ValueError(
            f"key_cache: shape is {tuple(key_cache.shape)}, wanted [num_blocks, num_kv_heads, head_dim / "
            f"{x}, block_size, {x}] for {key_cache.dtype}"
        )
    if value_cache.ndim != 4:
        raise ValueError(
            f"value_cache: shape is {tuple(value_cache.shape)}, wanted [num_blocks, num_kv_heads, head_dim, "
            "block_size]"
        )
    return key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)


def heads_first_view(name: str, cache: torch.Tensor) -> torch.Tensor:
    """``[num_blocks, num_kv_heads, block_size, head_dim]``, as vLLM's CPU backend has it, tokens first."""
    if cache.ndim != 4:
        raise ValueError(
            f"{name}: shape is {tuple(cache.shape)}, wanted [num_blocks, num_kv_heads, block_size, head_dim]"
        )
    return cache.transpose(1, 2)
