"""The definition of quantised caches: what a stored number is worth, and which one a number becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# The greatest number that quantisation gives, by the name of a cache's dtype.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def dequantise(cache: ArrayLike, scale: ArrayLike | None) -> NDArray[Any]:
    """`x = q * scale`, float64 as the cache `[num_blocks, block_size, num_kv_heads, head_dim]`.

    scale: a number, `[1]`, `[num_kv_heads]`, or `[num_blocks, block_size, num_kv_heads]`; None leaves a cache
    that is not quantised as it is.
    """
    cache = np.asarray(cache)
    if scale is None:
        return cache
    return cache.astype(np.float64) * np.asarray(scale, np.float64)[..., None]


def quantise(rows: NDArray[Any], scale: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`q = rows / scale`, to the nearest (ties to even), saturated at `LARGEST`, infinities too.

    NaN stays NaN, and in int8 becomes 0. rows `[..., head_dim]`, scale as `rows` without it. The quotient is
    one of float32, so that rounding it is defined to the bit.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = rows.astype(np.float32) / np.asarray(scale, np.float32)[..., None]
    quotient = np.clip(quotient, -LARGEST[dtype.name], LARGEST[dtype.name])
    if dtype == np.int8:
        quotient = np.rint(np.nan_to_num(quotient, nan=0.0))
    return quotient.astype(dtype)


def scale_of(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """The scale per row with which its greatest finite size becomes `LARGEST`; 1 for a row of zeros.

    rows `[..., head_dim]` -> float32 `[...]`.
    """
    size = np.abs(rows.astype(np.float32))
    scale = np.where(np.isfinite(size), size, 0).max(axis=-1) / np.float32(LARGEST[dtype.name])
    return np.where(scale > 0, scale, np.float32(1))
