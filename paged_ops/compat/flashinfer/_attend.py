"""From FlashInfer's arguments to one call of a public op, and the logarithm's base on the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import paged_ops

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

Scale = float | torch.Tensor


@dataclass(frozen=True)
class Logits:
    """How a query and a key become a logit, in FlashInfer's terms."""

    sm_scale: float | None = None  # None: head_dim ** -0.5
    window_left: int = -1  # keys before the query that it sees; -1: all
    logits_soft_cap: float | None = None  # None or 0: none

    def options(self) -> dict[str, Any]:
        """The same as the ops' ``window``, which counts the query itself, and ``soft_cap``."""
        return {
            "window": None if self.window_left < 0 else self.window_left + 1,
            "soft_cap": self.logits_soft_cap if self.logits_soft_cap else None,
        }


@dataclass(frozen=True)
class Scales:
    """Factors of quantised tensors: what is stored times the scale is meant."""

    q_scale: Scale | None = None
    k_scale: Scale | None = None
    v_scale: Scale | None = None

    def __post_init__(self) -> None:
        if isinstance(self.q_scale, torch.Tensor):
            raise NotImplementedError(
                "q_scale: is a tensor, and reading it would stop the stream; give a float"
            )


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens_q: torch.Tensor | None,
    logits: Logits,
    scales: Scales,
    *,
    causal: bool = True,
    tree_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q over pages; the LSE is the natural one of the ops.

    q ``[num_tokens, num_qo_heads, head_dim]``; caches as :func:`._layout.paged_views` gives them; tables
    (block_tables, seq_lens); cu_seqlens_q None: one token per sequence, in which case the last three options
    of masks do not count. -> (out, lse), lse None unless asked for by ``lse`` or ``return_lse``.

    Where the caches are of the query's dtype, scales that are numbers become part of the softmax's scale and
    of the output, as they do in FlashInfer; quantised caches are the ops' business, scales and all.
    """
    scale = q.shape[-1] ** -0.5 if logits.sm_scale is None else logits.sm_scale
    scale *= 1.0 if scales.q_scale is None else scales.q_scale
    k_scale, v_scale = scales.k_scale, scales.v_scale
    after = None
    if caches[0].dtype == q.dtype:
        if isinstance(k_scale, torch.Tensor):
            raise NotImplementedError(
                "k_scale: is a tensor for keys of the query's dtype, and reading it would stop the stream; "
                "give a float"
            )
        scale *= 1.0 if k_scale is None else k_scale
        k_scale, v_scale, after = None, None, v_scale

    options: dict[str, Any] = {
        "scale": scale,
        **logits.options(),
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "out": out,
        "lse": lse,
        "return_lse": return_lse or lse is not None,
    }
    if cu_seqlens_q is None:
        result = paged_ops.paged_attention_decode(q, *caches, *tables, **options)
    else:
        result = paged_ops.paged_attention(
            q, *caches, *tables, cu_seqlens_q, causal=causal, tree_mask=tree_mask, **options
        )
    out, lse = result if options["return_lse"] else (result, None)
    assert out is not None
    if after is not None:
        out.mul_(after)
    return out, lse


def to_base_2(out: torch.Tensor, lse: torch.Tensor | None, return_lse: bool) -> Any:
    """What ``run`` returns: ``out``, or ``(out, lse)`` with the LSE to base 2, converted in place."""
    if lse is not None:
        lse.mul_(LOG2_E)
    return (out, lse) if return_lse else out
