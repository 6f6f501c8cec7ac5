"""vLLM's ``kv_cache_dtype``: what a cache's bytes are, and whether they have scales."""

from __future__ import annotations

from typing import Any

import torch

# What is stored; None: rows of the model's own dtype.
_STORED = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

Scale = float | torch.Tensor


def stored_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """The dtype of quantised caches, None for plain ones; ``NotImplementedError`` for other formats."""
    if kv_cache_dtype not in _STORED:
        raise NotImplementedError(
            f"kv_cache_dtype: is {kv_cache_dtype!r}, carried over are {', '.join(map(repr, _STORED))}; "
            "paged_ops.write_kv_cache and paged_ops.paged_attention_decode know int8, int4 and scales per "
            "token too"
        )
    return _STORED[kv_cache_dtype]


def as_stored(name: str, cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """The cache as the ops know it: bytes become a view in their format, plain caches stay as they are."""
    dtype = stored_dtype(kv_cache_dtype)
    if dtype is None:
        if cache.element_size() == 1:
            raise TypeError(
                f"{name}: dtype is {cache.dtype}, and kv_cache_dtype 'auto' wants the key's dtype"
            )
        return cache
    if cache.dtype not in (torch.uint8, dtype):
        raise TypeError(
            f"{name}: dtype is {cache.dtype}, and kv_cache_dtype {kv_cache_dtype!r} wants uint8 or {dtype}"
        )
    return cache.view(dtype)


def scales(kv_cache_dtype: str, k_scale: Scale, v_scale: Scale) -> dict[str, Any]:
    """The ops' options: none for plain caches, whose scales vLLM does not look at either."""
    if stored_dtype(kv_cache_dtype) is None:
        return {}
    return {"k_scale": k_scale, "v_scale": v_scale}
