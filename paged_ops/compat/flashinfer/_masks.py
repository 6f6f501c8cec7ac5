"""FlashInfer's custom masks, as far as the ops can follow them: causal, full, or a tree of draft tokens.

The ops take one 64-bit mask per query token over its own sequence's query tokens. So a custom mask is carried
over when its part before the query tokens is all visible and each query token sees itself, none after it, and
any of those before it. Whether that is so has to be read, which needs the mask on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged_ops.compat.flashinfer._tables import on_host

MAX_TREE_TOKENS = 64


class Mask(NamedTuple):
    """What the ops are told."""

    causal: bool
    tree_mask: torch.Tensor | None = None  # int64 [num_tokens]


def from_arguments(
    causal: bool,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
) -> Mask:
    """The mask of a call: ``packed_custom_mask`` before ``custom_mask`` before ``causal``, as in FlashInfer.

    custom_mask: bool, of any shape, the sequences' ``[q_len, kv_len]`` one after the other;
    packed_custom_mask: uint8, 8 of them to a byte from the lowest bit up, each sequence from a new byte on.
    ``NotImplementedError`` for masks that the ops cannot follow, ``ValueError`` for too few bits.
    """
    if custom_mask is None and packed_custom_mask is None:
        return Mask(causal)
    if not on_host(custom_mask, packed_custom_mask, qo_indptr, kv_lens):
        raise NotImplementedError(
            "custom_mask: only trees over the query tokens are supported, and whether it is one has to be "
            "read; plan with the mask and the page table on the CPU"
        )
    masks = _of_sequences(custom_mask, packed_custom_mask, qo_indptr, kv_lens)
    if all(torch.equal(mask, torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0])) for mask in masks):
        return Mask(causal=True)
    if all(bool(mask.all()) for mask in masks):
        return Mask(causal=False)
    rows = [_tree(seq, mask) for seq, mask in enumerate(masks)]
    return Mask(causal=True, tree_mask=torch.cat(rows))


def _of_sequences(
    custom_mask: torch.Tensor | None,
    packed: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
) -> list[torch.Tensor]:
    """bool ``[q_len, kv_len]`` of each sequence."""
    if packed is None:
        assert custom_mask is not None
        name, bits = "custom_mask", custom_mask.reshape(-1).bool()
        unit = 1
    else:
        name, unit = "packed_custom_mask", 8
        bits = (packed.reshape(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1).reshape(-1).bool()
    masks, first = [], 0
    for q_len, kv_len in zip((qo_indptr[1:] - qo_indptr[:-1]).tolist(), kv_lens.tolist(), strict=True):
        masks.append(bits[first : first + q_len * kv_len].reshape(-1))
        if masks[-1].numel() != q_len * kv_len:
            raise ValueError(
                f"{name}: has {len(bits)} bits, too few for {len(kv_lens)} sequences of q_len * kv_len"
            )
        masks[-1] = masks[-1].view(q_len, kv_len)
        first += -(-q_len * kv_len // unit) * unit
    return masks


def _tree(seq: int, mask: torch.Tensor) -> torch.Tensor:
    """The mask of one sequence as the ops' bits, int64 ``[q_len]``."""
    q_len, kv_len = mask.shape
    reason = None
    if q_len > MAX_TREE_TOKENS:
        reason = f"has {q_len} query tokens, and trees hold at most {MAX_TREE_TOKENS}"
    elif kv_len < q_len:
        reason = f"has {q_len} query tokens and {kv_len} keys: its query tokens are not among its keys"
    elif not bool(mask[:, : kv_len - q_len].all()):
        reason = "hides keys before its query tokens"
    elif not bool(mask[:, kv_len - q_len :].diagonal().all()):
        reason = "hides a query token from itself"
    elif bool(mask[:, kv_len - q_len :].triu(1).any()):
        reason = "shows a query token others that come after it"
    if reason is not None:
        raise NotImplementedError(f"custom_mask: sequence {seq} {reason}; only trees of drafts are supported")
    # Bit 63 is the sign: the sum of distinct powers of two wraps to the right pattern.
    return (mask[:, kv_len - q_len :].long() << torch.arange(q_len)).sum(1)
