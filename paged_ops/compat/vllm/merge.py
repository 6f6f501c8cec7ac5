"""vLLM's merge of two partial attention results: LSEs by head, infinities, in place."""

from __future__ import annotations

import torch

import paged_ops
from paged_ops.compat.vllm._call import call


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """The result over the union of two disjoint sets of keys, from that over each, into ``output``.

    output, prefix_output, suffix_output ``[num_tokens, num_heads, head_dim]``, LSEs float32 ``[num_heads,
    num_tokens]``, natural; an infinite LSE, of either sign as in vLLM, is that of no keys at all: nothing
    of its output shows, and two of them give 0 and ``-inf``. ``output`` may be one of the inputs. Tokens
    from ``prefill_tokens_with_context`` on have no prefix: theirs is the suffix as it is.
    """
    if output_scale is not None:
        raise NotImplementedError(
            "output_scale: is given, and paged_ops.merge_attention_states writes no 8-bit outputs"
        )
    if output.ndim != 3:
        raise ValueError(f"output: shape is {tuple(output.shape)}, wanted [num_tokens, num_heads, head_dim]")
    num_tokens, num_heads, _ = output.shape
    lses = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}
    if output_lse is not None:
        lses["output_lse"] = output_lse
    for name, lse in lses.items():
        if lse.shape != (num_heads, num_tokens):
            raise ValueError(
                f"{name}: shape is {tuple(lse.shape)}, wanted [{num_heads}, {num_tokens}], num_heads and "
                "num_tokens of output"
            )
        if lse.dtype != torch.float32:
            raise TypeError(f"{name}: dtype is {lse.dtype}, wanted float32")
    merged = num_tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    if not 0 <= merged <= num_tokens:
        raise ValueError(f"prefill_tokens_with_context: is {merged}, wanted 0 to {num_tokens}")

    no_infinity = [_no_keys_below_all(lse) for lse in (prefix_lse, suffix_lse)]
    natural = [lse[:, :merged].t().contiguous() for lse in no_infinity]
    _, lse = call(
        paged_ops.merge_attention_states,
        prefix_output[:merged],
        natural[0],
        suffix_output[:merged],
        natural[1],
        out=output[:merged],
        names={"out_a": "prefix_output", "out_b": "suffix_output", "out": "output"},
    )
    output[merged:].copy_(suffix_output[merged:])
    if output_lse is not None:
        output_lse[:, :merged].copy_(lse.t())
        output_lse[:, merged:].copy_(no_infinity[1][:, merged:])


def _no_keys_below_all(lse: torch.Tensor) -> torch.Tensor:
    """The LSE with ``inf``, which FlashAttention 2 gives rows without keys, as the ``-inf`` that it is."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)
