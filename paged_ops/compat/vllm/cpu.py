"""vLLM's CPU backend: its write, its attention over many query tokens, and its plan, which is empty here.

Caches are ``[num_blocks, num_kv_heads, block_size, head_dim]``, mostly the two halves of one allocation.
vLLM packs the numbers inside for the instruction set that ``isa`` names; here they lie as the shape says,
and kernels for what the machine has are chosen as the op runs, so that ``isa`` is not looked at. Caches
written by vLLM's own build cannot be read here, nor the other way round. ``fp8`` is rounded to the nearest,
where vLLM 0.32 cuts off: half its error.
"""

from __future__ import annotations

import torch

import paged_ops
from paged_ops.compat.vllm._call import call
from paged_ops.compat.vllm._format import Scale, as_stored, scales
from paged_ops.compat.vllm._layout import heads_first_view


def cpu_attn_get_scheduler_metadata(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    query_start_loc: torch.Tensor,
    causal: bool,
    sliding_window_size: int,
    isa: str,
    enable_kv_split: bool,
    dynamic_causal: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:
    """An empty int8 tensor: the ops have no plan. It says nothing and fits every call."""
    return torch.empty(0, dtype=torch.int8)


def cpu_attn_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Write new keys and values ``[num_tokens, num_kv_heads, head_dim]`` to their slots.

    slot_mapping int64 ``[at most num_tokens]``, negative: skipped. Scales count with ``fp8`` caches alone.
    """
    caches = _caches(key_cache, value_cache, kv_cache_dtype)
    options = scales(kv_cache_dtype, k_scale, v_scale)
    call(paged_ops.write_kv_cache, key, value, *caches, slot_mapping, **options)


def cpu_attention_with_kv_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Attention of the last tokens of each sequence over its blocks, into ``output``.

    query, output ``[num_tokens, num_q_heads, head_dim]``, query_start_loc int32 ``[num_reqs + 1]``,
    seq_lens int32 ``[num_reqs]``, block_table int32 ``[num_reqs, max_blocks_per_seq]``. sliding_window:
    tokens that a query sees, its own with them, 0 or less: all; or the older pair (tokens before it, after
    it). ``softcap`` 0: none. s_aux ``[num_q_heads]``, float32 or bfloat16: a logit more in each row,
    without a value. dynamic_causal ``[num_reqs]`` takes causal's place; all its entries have to say the
    same. Rows of query behind the last sequence give 0 (vLLM leaves theirs).
    """
    causal = _causal_of_all(causal, dynamic_causal)
    window = _window(sliding_window)
    right = not isinstance(sliding_window, int) and sliding_window[1] >= 0
    if (window is not None or right) and not causal:
        raise NotImplementedError(
            "sliding_window: is given without causal, where vLLM's hides keys on both sides; that of "
            "paged_ops.paged_attention hides those on the left"
        )
    call(
        paged_ops.paged_attention,
        query,
        *_caches(key_cache, value_cache, kv_cache_dtype),
        block_table,
        seq_lens,
        query_start_loc,
        causal=causal,
        scale=scale,
        window=window,
        soft_cap=softcap or None,
        alibi_slopes=alibi_slopes,
        sinks=None if s_aux is None else s_aux.float(),
        out=output,
        names={
            "block_tables": "block_table",
            "cu_seqlens_q": "query_start_loc",
            "soft_cap": "softcap",
            "sinks": "s_aux",
            "out": "output",
        },
        **scales(kv_cache_dtype, k_scale, v_scale),
    )


def _caches(
    key_cache: torch.Tensor, value_cache: torch.Tensor, kv_cache_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (
        heads_first_view(name, as_stored(name, cache, kv_cache_dtype))
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache))
    )
    return key, value


def _causal_of_all(causal: bool, dynamic_causal: torch.Tensor | None) -> bool:
    if dynamic_causal is None:
        return causal
    each = dynamic_causal.bool()
    if bool(each.any()) and not bool(each.all()):
        raise NotImplementedError(
            "dynamic_causal: says one thing of some sequences and another of others, and a call of "
            "paged_ops.paged_attention has one rule; call once for each kind"
        )
    return bool(each.all())


def _window(sliding_window: int | tuple[int, int]) -> int | None:
    """The ops' window, which counts the query's own token."""
    tokens = sliding_window if isinstance(sliding_window, int) else sliding_window[0] + 1
    return tokens if tokens > 0 else None
