"""FlashInfer's page tables (CSR: ``indptr``, ``indices``, ``last_page_len``) as block tables and lengths.

A block table is a rectangle, so its width is a bound on the pages of any one sequence, and reading the exact
one from a GPU would stop its stream. The bound is, in this order:

1. the width of ``block_tables``, or ``max_sequence_kv`` in pages, where the caller of ``plan`` gave one;
2. the largest difference in ``indptr``, where that is on the CPU: engines mostly build it there, and it is
   worth handing over as it is, for the table is then as small as it can be;
3. the number of ``indices``: one sequence may own them all. No sync, and right, but ``num_seqs`` times as
   large as the pages of the batch; time and scratch of the ops on a GPU grow with the width, too.
"""

from __future__ import annotations

import torch


def on_host(*tensors: torch.Tensor | None) -> bool:
    """Whether all of these can be read without waiting for a device."""
    return all(tensor is None or tensor.device.type == "cpu" for tensor in tensors)


def page_counts(indptr: torch.Tensor) -> torch.Tensor:
    """Pages of each sequence, ``[num_seqs]``."""
    return indptr[1:] - indptr[:-1]


def sequence_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each sequence, int32 ``[num_seqs]``; 0 without pages, whatever ``last_page_len`` says.

    The last is FlashInfer's kernels' rule, not that of its ``get_seq_lens``: engines with pages of one token
    fill ``last_page_len`` with ones once and for all.
    """
    counts = page_counts(indptr)
    lengths = (counts - 1) * page_size + last_page_len
    return torch.where(counts > 0, lengths, 0).to(torch.int32)


def check_csr(
    names: tuple[str, str, str],
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor | None,
    page_size: int,
) -> None:
    """``ValueError`` for shapes that disagree, and for numbers that do as far as they are on the CPU."""
    indptr_name, indices_name, last_name = names
    if indptr.ndim != 1 or len(indptr) == 0:
        raise ValueError(f"{indptr_name}: shape is {tuple(indptr.shape)}, wanted [num_seqs + 1]")
    if indices.ndim != 1:
        raise ValueError(f"{indices_name}: shape is {tuple(indices.shape)}, wanted [num_pages]")
    if last_page_len is not None and last_page_len.shape != (len(indptr) - 1,):
        raise ValueError(f"{last_name}: shape is {tuple(last_page_len.shape)}, wanted [{len(indptr) - 1}]")
    if on_host(indptr):
        check_indptr(indptr_name, indptr)
        if int(indptr[-1]) > len(indices):
            raise ValueError(
                f"{indices_name}: has {len(indices)} pages, {indptr_name} ends at {int(indptr[-1])}"
            )
    if last_page_len is not None and on_host(indptr, last_page_len):
        used = last_page_len[page_counts(indptr) > 0]
        if len(used) and not 1 <= int(used.min()) <= int(used.max()) <= page_size:
            worst = int(used.min()) if int(used.min()) < 1 else int(used.max())
            raise ValueError(f"{last_name}: holds {worst}, wanted 1 to page_size, {page_size}")


def check_indptr(name: str, indptr: torch.Tensor) -> None:
    """``ValueError`` unless these offsets, on the CPU, start at 0 and never fall."""
    if int(indptr[0]) != 0 or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(f"{name}: starts at {int(indptr[0])} or falls, wanted a start at 0 and no fall")


def table_width(indptr: torch.Tensor, indices: torch.Tensor) -> int:
    """Bounds 2 and 3 of the module's docstring; at least one column."""
    if on_host(indptr) and len(indptr) > 1:
        return max(1, int(page_counts(indptr).max()))
    return max(1, len(indices))


def block_tables_of(indptr: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    """Row s: the pages of sequence s in order, then 0. int32 ``[num_seqs, width]`` on the tensors' device.

    Entries past a sequence's pages are not read by the ops. They name a page that exists all the same, so
    that lengths which do not fit the pages stay inside the cache on a GPU, where nobody checks them.
    """
    num_seqs = len(indptr) - 1
    if len(indices) == 0:
        return indptr.new_zeros((num_seqs, width), dtype=torch.int32)
    column = torch.arange(width, device=indptr.device)
    place = indptr[:-1, None] + column
    owned = column < page_counts(indptr)[:, None]
    pages = indices[place.clamp(max=len(indices) - 1).long()]
    return torch.where(owned, pages, 0).to(torch.int32)
