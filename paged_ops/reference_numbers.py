"""The definition of quantised caches: what a stored number is worth, and which one a number becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# The greatest number that quantisation gives, by the dtype of a cache's tensor; numbers in uint8 are of int4.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0, "uint8": 7.0}


def dequantise(cache: ArrayLike, scale: ArrayLike | None) -> NDArray[Any]:
    """`x = q * scale`, float64 as the cache `[num_blocks, block_size, num_kv_heads, head_dim]`.

    scale: a number, `[1]`, `[num_kv_heads]`, or `[num_blocks, block_size, num_kv_heads]`; None leaves a cache
    that is not quantised as it is. A cache of int4 is uint8 `[..., head_dim / 2]` (`unpack_int4`); its scale
    is `[num_blocks, block_size, num_kv_heads, num_groups]`, and each belongs to head_dim / num_groups
    consecutive elements.
    """
    cache = np.asarray(cache)
    if scale is None:
        return cache
    if cache.dtype == np.uint8:
        numbers = unpack_int4(cache).astype(np.float64)
        groups = in_groups(numbers, np.shape(scale)[-1]) * np.asarray(scale, np.float64)[..., None]
        return groups.reshape(numbers.shape)
    return cache.astype(np.float64) * np.asarray(scale, np.float64)[..., None]


def quantise(rows: NDArray[Any], scale: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`q = rows / scale`, to the nearest (ties to even), saturated at `LARGEST`, infinities too.

    NaN stays NaN, and becomes 0 in integers. rows `[..., head_dim]`, scale as `rows` without it, or for int4
    (dtype uint8) `[..., num_groups]`. The quotient is one of float32, so that rounding it is defined to the
    bit.
    """
    groups = in_groups(rows, scale.shape[-1]) if dtype == np.uint8 else rows
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = groups.astype(np.float32) / np.asarray(scale, np.float32)[..., None]
    quotient = np.clip(quotient, -LARGEST[dtype.name], LARGEST[dtype.name]).reshape(rows.shape)
    if dtype in (np.int8, np.uint8):
        quotient = np.rint(np.nan_to_num(quotient, nan=0.0))
    return pack_int4(quotient) if dtype == np.uint8 else quotient.astype(dtype)


def scale_of(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """The scale per row with which its greatest finite size becomes `LARGEST`; 1 for a row of zeros.

    rows `[..., n]` -> float32 `[...]`: head_dim elements, or those of a group.
    """
    size = np.abs(rows.astype(np.float32))
    scale = np.where(np.isfinite(size), size, 0).max(axis=-1) / np.float32(LARGEST[dtype.name])
    return np.where(scale > 0, scale, np.float32(1))


def in_groups(rows: NDArray[Any], num_groups: int) -> NDArray[Any]:
    """Rows `[..., head_dim]` as `[..., num_groups, head_dim / num_groups]`."""
    return rows.reshape(*rows.shape[:-1], num_groups, rows.shape[-1] // num_groups)


def pack_int4(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Integers from -8 to 7 `[..., n]` as uint8 `[..., n / 2]`, two's complement, the first one low."""
    halves = numbers.astype(np.int8).view(np.uint8) & np.uint8(15)
    return halves[..., ::2] | halves[..., 1::2] << np.uint8(4)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The reverse of `pack_int4`: int8 `[..., n]`."""
    halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return ((halves ^ 8).astype(np.int8) - 8).astype(np.int8)
