"""Writing to vLLM's caches, and conversion to and from their 8-bit floats."""

from __future__ import annotations

import torch

import paged_ops
from paged_ops.compat.vllm._call import call
from paged_ops.compat.vllm._format import Scale, as_stored, scales, stored_dtype
from paged_ops.compat.vllm._layout import packed_views


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Write new keys and values to their slots.

    key, value ``[num_tokens, num_kv_heads, head_dim]``; caches ``[num_blocks, block_size, num_kv_heads,
    head_dim]``, where NHD or HND is a matter of strides; slot_mapping int64 ``[at most num_tokens]``,
    negative: skipped. Scales: floats, or float32 with one element or one per KV head; not looked at with
    ``auto``.
    """
    caches = (
        as_stored("key_cache", key_cache, kv_cache_dtype),
        as_stored("value_cache", value_cache, kv_cache_dtype),
    )
    options = scales(kv_cache_dtype, k_scale, v_scale)
    call(paged_ops.write_kv_cache, key, value, *caches, slot_mapping, **options)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """:func:`reshape_and_cache_flash` for the classic pair of caches (:func:`._layout.packed_views`)."""
    caches = packed_views(
        as_stored("key_cache", key_cache, kv_cache_dtype),
        as_stored("value_cache", value_cache, kv_cache_dtype),
    )
    options = scales(kv_cache_dtype, k_scale, v_scale)
    call(paged_ops.write_kv_cache, key, value, *caches, slot_mapping, **options)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: Scale,
) -> None:
    """Write latents and rotated keys side by side to the slots of an MLA cache.

    kv_c ``[num_tokens, kv_lora_rank]``, k_pe ``[num_tokens, pe_dim]``, kv_cache ``[num_blocks, block_size,
    kv_lora_rank + pe_dim]``; the rest as in :func:`reshape_and_cache_flash`, with one scale for both.
    """
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        if rows.ndim != 2:
            raise ValueError(f"{name}: shape is {tuple(rows.shape)}, wanted [num_tokens, .]")
    rank, dim = kv_c.shape[1], kv_c.shape[1] + k_pe.shape[1]
    if kv_cache.ndim != 3 or kv_cache.shape[2] != dim:
        raise ValueError(
            f"kv_cache: shape is {tuple(kv_cache.shape)}, wanted [num_blocks, block_size, {dim}], the sum of "
            "the widths of kv_c and k_pe"
        )
    cache = as_stored("kv_cache", kv_cache, kv_cache_dtype)[:, :, None]
    call(
        paged_ops.write_kv_cache,
        kv_c[:, None],
        k_pe[:, None],
        cache[..., :rank],
        cache[..., rank:],
        slot_mapping,
        names={
            "key": "kv_c",
            "value": "k_pe",
            "key_cache": "kv_cache",
            "value_cache": "kv_cache",
            "k_scale": "scale",
            "v_scale": "scale",
        },
        **scales(kv_cache_dtype, scale, scale),
    )


def convert_fp8(output: torch.Tensor, input: torch.Tensor, scale: Scale = 1.0, kv_dtype: str = "fp8") -> None:
    """``output = input / scale`` into 8-bit floats, or ``output = input * scale`` out of them.

    Equal shapes; one is uint8 (or the 8-bit float itself), the other float32, float16 or bfloat16. To the
    nearest, ties to even, saturated, infinities too; NaN stays NaN: the numbers of ``write_kv_cache``.
    """
    dtype = stored_dtype(kv_dtype)
    if dtype is None:
        raise ValueError(f"kv_dtype: is {kv_dtype!r}, which names no 8-bit float")
    if output.shape != input.shape:
        raise ValueError(f"output: shape is {tuple(output.shape)}, wanted {tuple(input.shape)}, as input")
    if (output.element_size() == 1) == (input.element_size() == 1):
        raise TypeError(
            f"output: dtype is {output.dtype} and that of input {input.dtype}, wanted 8 bits for one of them"
        )
    if output.element_size() == 1:
        most = torch.finfo(dtype).max
        scale = torch.as_tensor(scale, dtype=torch.float32, device=input.device)  # a number would be inverted
        rows = (input.float() / scale).clamp_(-most, most)
        as_stored("output", output, kv_dtype).copy_(rows.to(dtype))
    else:
        output.copy_(as_stored("input", input, kv_dtype).float() * scale)
