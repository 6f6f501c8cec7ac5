"""FlashInfer's cache layouts as views in the ops' own: nothing is copied, the ops take any strides."""

from __future__ import annotations

import torch

PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_kv_layout(kv_layout: str) -> None:
    """``KeyError``, as in FlashInfer, unless it is NHD or HND."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"kv_layout: is {kv_layout!r}, wanted 'NHD' or 'HND'")


def paged_views(paged_kv_cache: PagedCache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache ``[num_pages, page_size, num_kv_heads, head_dim]`` each, views of what came.

    paged_kv_cache: one tensor ``[num_pages, 2, ...]``, or a pair of ``[num_pages, ...]``, with ``page_size,
    num_kv_heads, head_dim`` (NHD) or ``num_kv_heads, page_size, head_dim`` (HND) behind.
    """
    if isinstance(paged_kv_cache, (tuple, list)):
        if len(paged_kv_cache) != 2:
            raise ValueError(f"paged_kv_cache: has {len(paged_kv_cache)} tensors, wanted (k_cache, v_cache)")
        key, value = paged_kv_cache
        for cache in (key, value):
            if cache.ndim != 4:
                raise ValueError(f"paged_kv_cache: shape is {tuple(cache.shape)}, wanted 4 dimensions")
    else:
        if paged_kv_cache.ndim != 5 or paged_kv_cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache: shape is {tuple(paged_kv_cache.shape)}, wanted [num_pages, 2, ., ., .]"
            )
        key, value = paged_kv_cache.unbind(1)
    return (key, value) if kv_layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))


def one_page(key: torch.Tensor, value: torch.Tensor, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous keys and values of one sequence as caches of one page: views ``[1, kv_len, heads, dim]``."""
    check_kv_layout(kv_layout)
    for name, tensor in (("k", key), ("v", value)):
        if tensor.ndim != 3:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}, wanted 3 dimensions")
    if kv_layout == "HND":
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    return key[None], value[None]
