"""What tests of quantised caches of any width have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def require_bad_scale(
    ops: Any, cache: np.ndarray, scales: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Write and decode refuse the scales with `message`, before anything is written.

    cache: zeros, of keys and of values; rows are made for the head dim that it stands for.
    """
    head_dim = cache.shape[3] * (2 if cache.dtype == np.uint8 else 1)
    caches = cache, cache.copy()
    rows, query = np.ones((3, cache.shape[2], head_dim), np.float32), np.ones((1, 2, head_dim), np.float32)
    with pytest.raises(error, match=message):
        ops.write_kv_cache(rows, rows, *caches, np.arange(3), **scales)
    assert not any(cache.any() for cache in caches)
    out = np.full(query.shape, 7, np.float32)
    tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(error, match=message):
        ops.paged_attention_decode(query, *caches, tables, lens, out=out, **scales)
    assert (out == 7).all()
