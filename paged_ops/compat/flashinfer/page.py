"""Writing to FlashInfer's paged cache, and its helpers for page tables."""

from __future__ import annotations

import torch

import paged_ops
from paged_ops.compat.flashinfer._layout import PagedCache, check_kv_layout, paged_views
from paged_ops.compat.flashinfer._tables import on_host


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each sequence, ``[num_seqs]``: full pages and the last one."""
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and position of each new token, when the new ones are the last of their sequences.

    append_indptr ``[num_seqs + 1]``, seq_lens ``[num_seqs]`` with the new tokens counted -> batch_indices and
    positions, int32 ``[nnz]``. Rows from ``append_indptr[-1]`` on belong to nobody: both are -1, and
    :func:`append_paged_kv_cache` skips them.
    """
    row = torch.arange(nnz, device=append_indptr.device)
    if len(append_indptr) < 2:
        nobody = torch.full((nnz,), -1, dtype=torch.int32, device=append_indptr.device)
        return nobody, nobody.clone()
    ends = append_indptr[1:].long()
    batch = torch.searchsorted(ends, row, right=True)
    owned = batch < len(ends)
    batch = batch.clamp(max=len(ends) - 1)
    position = seq_lens.to(row.device)[batch] - ends[batch] + row
    batch_indices, positions = (torch.where(owned, x, -1).to(torch.int32) for x in (batch, position))
    return batch_indices, positions


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values to their places in the cache, whose page table counts them already.

    append_key, append_value ``[nnz, num_kv_heads, head_dim]``; batch_indices, positions ``[nnz]``, a negative
    position is skipped; the cache as in :func:`._layout.paged_views`; ``kv_last_page_len`` is not looked at.
    A position past its sequence's pages raises ``ValueError`` where the table is on the CPU, and is skipped
    where it is not.
    """
    check_kv_layout(kv_layout)
    key_cache, value_cache = paged_views(paged_kv_cache, kv_layout)
    if len(positions) == 0:
        return
    device, page_size = key_cache.device, key_cache.shape[1]
    batch = batch_indices.to(device).long()
    position = positions.to(device).long()
    indptr = kv_indptr.to(device)
    wanted = (position >= 0) & (batch >= 0)
    batch = torch.where(wanted, batch, 0)
    place = indptr[batch] + position // page_size
    inside = place < indptr[batch + 1]
    if on_host(inside) and bool((wanted & ~inside).any()):
        worst = int(position[wanted & ~inside][0])
        raise ValueError(f"positions: holds {worst}, past the pages of its sequence")
    wanted &= inside
    if len(kv_indices) == 0:
        return
    pages = kv_indices.to(device)[torch.where(wanted, place, 0).long()].long()
    slots = torch.where(wanted, pages * page_size + position % page_size, -1)
    paged_ops.write_kv_cache(append_key, append_value, key_cache, value_cache, slots)
