"""vLLM's decode attention over the classic caches: one query token per sequence."""

from __future__ import annotations

import torch

import paged_ops
from paged_ops.compat.vllm._call import call
from paged_ops.compat.vllm._format import Scale, as_stored, scales
from paged_ops.compat.vllm._layout import packed_views


def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one query token per sequence over its keys and values, into ``out``.

    out, query ``[num_seqs, num_q_heads, head_dim]``; caches as :func:`._layout.packed_views` takes them;
    block_tables int32 ``[num_seqs, max_blocks_per_seq]``, seq_lens int32 ``[num_seqs]``, alibi_slopes
    float32 ``[num_q_heads]``. Scales: floats, or float32 with one entry, or with one per KV head; not
    looked at with ``auto``. ``max_seq_len`` is not looked at: no scratch depends on it. ``tp_rank`` counts
    with block-sparse attention alone, which is refused.
    """
    _refuse_blocksparse(
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )
    caches = packed_views(
        as_stored("key_cache", key_cache, kv_cache_dtype),
        as_stored("value_cache", value_cache, kv_cache_dtype),
    )
    for name, given, axis in (("num_kv_heads", num_kv_heads, 1), ("block_size", block_size, 3)):
        if given != key_cache.shape[axis]:
            raise ValueError(f"{name}: is {given}, wanted {key_cache.shape[axis]}, as in key_cache")
    call(
        paged_ops.paged_attention_decode,
        query,
        *caches,
        block_tables,
        seq_lens,
        scale=scale,
        alibi_slopes=alibi_slopes,
        out=out,
        **scales(kv_cache_dtype, k_scale, v_scale),
    )


def paged_attention_v2(
    out: torch.Tensor,
    exp_sum: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """:func:`paged_attention_v1`, bit for bit: there is one op here, which splits long sequences by itself.

    ``exp_sum``, ``max_logits`` and ``tmp_out`` are left as they are: they are sized for vLLM's own
    partitions, and no caller reads them.
    """
    paged_attention_v1(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )


def _refuse_blocksparse(local_blocks: int, vert_stride: int, block_size: int, head_sliding_step: int) -> None:
    """``NotImplementedError`` for what is not vLLM's way to say that attention is dense."""
    neutral = {
        "local_blocks": (local_blocks, (0,)),
        "vert_stride": (vert_stride, (0, 1)),
        "block_size": (block_size, (64,)),
        "head_sliding_step": (head_sliding_step, (0,)),
    }
    for name, (value, dense) in neutral.items():
        if value not in dense:
            raise NotImplementedError(
                f"blocksparse_{name}: is {value}, and the ops skip no blocks by pattern; "
                "paged_ops.paged_attention_decode has window for the last tokens alone"
            )
