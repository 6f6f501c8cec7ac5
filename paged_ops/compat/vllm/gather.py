"""vLLM's gathers: pieces of sequences out of a paged cache, into consecutive rows.

A piece may start at any token, so each token is handed to ``paged_ops.gather_kv_cache`` as a page of its
own, and all of them as one sequence; the op gathers keys and values at once, which are the two halves of
each row here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import paged_ops
from paged_ops.compat.vllm._call import call
from paged_ops.compat.vllm._format import Scale, as_stored, scales, stored_dtype


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Scale,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """:func:`cp_gather_cache` of ``num_tokens`` rows at most, from ``fp8`` to dst's dtype times ``scale``.

    Computed in float32 and rounded once. ``token_to_seq`` is not looked at: ``cu_seq_lens`` says the same.
    """
    if not 0 <= num_tokens <= len(dst):
        raise ValueError(f"num_tokens: is {num_tokens}, wanted 0 to the {len(dst)} rows of dst")
    rows = dst[:num_tokens]
    if stored_dtype(kv_cache_dtype) is None:
        _gather(src_cache, rows, block_table, cu_seq_lens, seq_starts)
        return
    options = scales(kv_cache_dtype, scale, scale)
    stored = as_stored("src_cache", src_cache, kv_cache_dtype)
    _gather(stored, rows, block_table, cu_seq_lens, seq_starts, **options)


def cp_gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Row ``cu_seq_lens[b] + t`` of ``dst`` becomes token ``seq_starts[b] + t`` of sequence b, bit for bit.

    src_cache ``[num_blocks, block_size, width]`` or ``[num_blocks, block_size, heads, width]`` of any
    dtype, dst alike with ``[num_rows]`` in front, block_table int32 ``[batch_size, max_blocks_per_seq]``,
    cu_seq_lens int32 ``[batch_size + 1]`` from 0 on, seq_starts int32 ``[batch_size]``, 0 when None. Rows
    from ``cu_seq_lens[-1]`` on stay as they are on the CPU, and become 0 on a GPU, where the op clears
    them.
    """
    if batch_size != cu_seq_lens.numel() - 1:
        raise ValueError(
            f"batch_size: is {batch_size}, wanted {cu_seq_lens.numel() - 1}, as cu_seq_lens has it"
        )
    if batch_size >= 0 and _on_host(cu_seq_lens):
        num_rows = int(cu_seq_lens.flatten()[-1])
        if num_rows > len(dst):
            raise ValueError(f"dst: has {len(dst)} rows, wanted at least {num_rows}, as cu_seq_lens has it")
    _gather(src_cache, dst, block_table, cu_seq_lens, seq_starts)


def _gather(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    **scales: Any,
) -> None:
    """The rows of dst that a sequence owns: as they are, or with scales the numbers that are meant."""
    _check(src_cache, dst, block_table, cu_seq_lens, seq_starts, same_dtype=not scales)
    if seq_starts is None:
        seq_starts = torch.zeros_like(cu_seq_lens[1:])
    if _on_host(dst):
        dst = dst[: int(cu_seq_lens[-1])]
    if len(dst) == 0 or len(seq_starts) == 0:
        return
    if src_cache.ndim == 3:
        src_cache, dst = src_cache[:, :, None], dst[:, None]
    if not scales:  # bits are bits: any dtype is moved as one that the op takes
        src_cache, dst = _as_16_bit("src_cache", src_cache), _as_16_bit("dst", dst)
    pages, page_of_block, page_of_token = _pages(src_cache)
    block, offset = _places(src_cache, dst, block_table, cu_seq_lens, seq_starts)
    table = (block * page_of_block + offset * page_of_token).to(torch.int32)[None]
    half = src_cache.shape[-1] // 16 * 8
    call(
        paged_ops.gather_kv_cache,
        pages[..., :half],
        pages[..., half:],
        table,
        cu_seq_lens[-1:].clamp(max=len(dst)),
        out=(dst[..., :half], dst[..., half:]),
        names={
            "key_cache": "src_cache",
            "value_cache": "src_cache",
            "out[0]": "dst",
            "out[1]": "dst",
            "k_scale": "scale",
            "v_scale": "scale",
        },
        **scales,
    )


def _as_16_bit(name: str, rows: torch.Tensor) -> torch.Tensor:
    try:
        return rows.view(torch.bfloat16)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: strides are {rows.stride()}, and its rows cannot be moved: {error}"
        ) from None


def _pages(cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The cache ``[num_blocks, block_size, heads, width]`` as pages of one token, whatever its strides.

    -> (``[num_pages, 1, heads, width]``, pages from a block to the next, pages from a token to the next).
    Where blocks are farther apart than their tokens make them, some pages are of no use, and nobody asks
    for them.
    """
    num_blocks, block_size, heads, width = cache.shape
    stride_block, stride_token, *rest = cache.stride()
    step = math.gcd(stride_block if num_blocks > 1 else 0, stride_token if block_size > 1 else 0) or 1
    of_block, of_token = stride_block // step, stride_token // step
    num_pages = (
        (num_blocks - 1) * of_block * (num_blocks > 1) + (block_size - 1) * of_token * (block_size > 1) + 1
    )
    if not 0 < num_pages < 2**31:
        raise ValueError(f"src_cache: has {num_pages} places for tokens, wanted 1 to 2^31 - 1")
    return cache.as_strided((num_pages, 1, heads, width), (step, step, *rest)), of_block, of_token


def _places(
    cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset in it of each row's token, int64 ``[num_rows]``.

    ``ValueError`` for tokens that the table has no block for and for blocks that the cache does not have,
    on the CPU. On a GPU rows that nobody owns have a place too, so that nothing is read outside; the op
    does not ask.
    """
    num_blocks, block_size = cache.shape[:2]
    row = torch.arange(len(dst), device=dst.device)
    seq = torch.searchsorted(cu_seq_lens[1:].long(), row, right=True).clamp_(max=len(seq_starts) - 1)
    position = row - cu_seq_lens[seq] + seq_starts[seq]
    place, width = position // block_size, block_table.shape[1]
    if not _on_host(dst):
        place = place.clamp(0, width - 1)
    elif not 0 <= int(place.min()) <= int(place.max()) < width:
        raise ValueError(
            f"block_table: has {width} blocks per sequence, and seq_starts with cu_seq_lens ask for blocks "
            f"{int(place.min())} to {int(place.max())}"
        )
    block = block_table[seq, place].long()
    if _on_host(dst) and not 0 <= int(block.min()) <= int(block.max()) < num_blocks:
        wrong = block[(block < 0) | (block >= num_blocks)]
        raise ValueError(f"block_table: holds {int(wrong[0])}, wanted 0 to {num_blocks - 1}")
    return block, position % block_size


def _on_host(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _check(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    *,
    same_dtype: bool,
) -> None:
    """Shapes, dtypes and devices, and what the host can see of the numbers."""
    if src_cache.ndim not in (3, 4):
        raise ValueError(
            f"src_cache: shape is {tuple(src_cache.shape)}, wanted [num_blocks, block_size, width] or "
            "[num_blocks, block_size, heads, width]"
        )
    row_nbytes = src_cache.shape[-1] * src_cache.element_size()
    if row_nbytes % 16 or row_nbytes < 32:
        raise ValueError(
            f"src_cache: its width has {row_nbytes} bytes, wanted a multiple of 16 from 32 on, for "
            "paged_ops.gather_kv_cache moves both halves of it in units of 8 numbers"
        )
    if dst.shape[1:] != src_cache.shape[2:]:
        raise ValueError(
            f"dst: shape is {tuple(dst.shape)}, wanted rows of {tuple(src_cache.shape[2:])}, as src_cache"
        )
    if same_dtype and dst.dtype != src_cache.dtype:
        raise TypeError(f"dst: dtype is {dst.dtype}, wanted {src_cache.dtype}, as src_cache")
    num_seqs = max(cu_seq_lens.numel() - 1, 0)
    shapes = {
        "cu_seq_lens": (cu_seq_lens, 1, num_seqs + 1, "batch_size + 1"),
        "block_table": (block_table, 2, num_seqs, "batch_size, max_blocks_per_seq"),
    }
    if seq_starts is not None:
        shapes["seq_starts"] = (seq_starts, 1, num_seqs, "batch_size")
    for name, (tensor, ndim, length, wanted) in shapes.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: dtype is {tensor.dtype}, wanted int32")
        if tensor.ndim != ndim or len(tensor) < length:
            raise ValueError(
                f"{name}: shape is {tuple(tensor.shape)}, wanted [{wanted}] with batch_size {num_seqs}, as "
                "cu_seq_lens has it"
            )
    for name, tensor in {"dst": dst, **{name: row[0] for name, row in shapes.items()}}.items():
        if tensor.device != src_cache.device:
            raise ValueError(f"{name}: is on {tensor.device}, wanted {src_cache.device}, as src_cache")
    if _on_host(cu_seq_lens) and (
        int(cu_seq_lens[0]) != 0 or bool((cu_seq_lens[1:] < cu_seq_lens[:-1]).any())
    ):
        raise ValueError("cu_seq_lens: wanted numbers from 0 that never fall")
