"""A mask of transformers as what the ops know: a run of keys per sequence, causal or not, windowed or not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Spans:
    """What the queries of each sequence see.

    Sequence b is the keys from ``starts[b]``, ``lengths[b]`` of them. Its queries are its last tokens when
    causal, and each sees the keys up to its own, the last ``window`` of them only where that is given; when
    not causal each sees all. A query before ``starts[b]`` is padding and sees nothing.
    """

    starts: torch.Tensor | None  # int64 [batch]; None: all 0
    lengths: torch.Tensor  # int64 [batch]
    causal: bool
    window: int | None = None
    tables: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # block tables, by key strides


def of_shape(batch: int, end: int | torch.Tensor, *, causal: bool, device: torch.device) -> Spans:
    """No padding: every sequence is its keys up to ``end``."""
    lengths = torch.zeros(batch, dtype=torch.int64, device=device) + end
    return Spans(None, lengths, causal=causal)


def of_mask(mask: torch.Tensor, end: int | torch.Tensor) -> Spans:
    """What a mask says, as long as the ops can follow it.

    mask: bool ``[batch, q_len, kv_len]``, True is seen; end: one past the last query's own key. A query that
    does not see its own key is padding, whose result nobody uses, as long as others of its sequence do see
    theirs or it has no keys. ``NotImplementedError`` for other masks. Reads the mask: on a GPU that waits for
    it, once per mask.
    """
    _, q_len, kv_len = mask.shape
    key = torch.arange(kv_len, device=mask.device)
    count = mask.sum(2)
    first = torch.where(count > 0, mask.int().argmax(2), kv_len)
    starts = first.min(1).values

    own = torch.arange(q_len, device=mask.device) + (end - q_len)  # each query's own key
    real = (mask & (key == own[:, None])).any(2)
    cut = real & (first > starts[:, None])
    window = int(torch.where(cut, own + 1 - first, 0).max()) if mask.numel() else 0
    wanted = (key >= starts[:, None, None]) & (key <= own[:, None])
    if window:
        wanted &= key > own[:, None] - window
    known = real.any(1) | (count == 0).all(1)
    if bool((((wanted == mask) | ~real[..., None]).all((1, 2)) & known).all()):
        return Spans(starts, (end - starts).clamp(min=0), causal=True, window=window or None)

    lengths = count.max(1).values
    starts = torch.where(lengths > 0, starts, 0)
    wanted = (key >= starts[:, None]) & (key < (starts + lengths)[:, None])
    if bool((wanted[:, None] == mask).all()):
        return Spans(starts, lengths, causal=False)
    raise NotImplementedError(
        "attention_mask: is neither causal (with padding, with a window) nor one run of keys for all queries "
        "of a sequence; packed sequences and other patterns need another attention implementation"
    )
