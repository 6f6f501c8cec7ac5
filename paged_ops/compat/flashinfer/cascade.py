"""FlashInfer's merging of attention states, and its cascade of page tables with shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import paged_ops
from paged_ops.compat.flashinfer._attend import LN_2, LOG2_E, Scales
from paged_ops.compat.flashinfer._layout import PagedCache
from paged_ops.compat.flashinfer._wrapper import DType
from paged_ops.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper


def _natural(s: torch.Tensor) -> torch.Tensor:
    """A base-2 LSE as a new, contiguous float32 natural one, as the ops want it."""
    return (s.to(torch.float32) * LN_2).contiguous()


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state over the union of two disjoint sets of keys, from the state of each.

    v_a, v_b ``[num_tokens, num_heads, head_dim]``, s_a, s_b ``[num_tokens, num_heads]`` float32 to base 2, as
    is the result (v, s). A state with s = ``-inf`` changes nothing.
    """
    v, s = paged_ops.merge_attention_states(v_a, _natural(s_a), v_b, _natural(s_b))
    return v, s.mul_(LOG2_E)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """:func:`merge_state`, written over v and s. mask: bool ``[num_tokens]``, rows where it is False stay."""
    if mask is not None and mask.shape != s.shape[:1]:
        raise ValueError(f"mask: shape is {tuple(mask.shape)}, wanted [{len(s)}]")
    if mask is None:
        _, lse = paged_ops.merge_attention_states(v, _natural(s), v_other, _natural(s_other), out=v)
        s.copy_(lse.mul_(LOG2_E))
        return
    # Not by giving the other state -inf: a row that stays keeps its bits, whatever they are.
    merged, lse = merge_state(v, s, v_other, s_other)
    chosen = mask.bool()
    v.copy_(torch.where(chosen[:, None, None], merged, v))
    s.copy_(torch.where(chosen[:, None], lse, s))


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge_state` of several states, from the first to the last.

    v ``[num_tokens, num_states, num_heads, head_dim]``, s ``[num_tokens, num_states, num_heads]`` -> v, s
    without the second dimension. No states: 0 and ``-inf``.
    """
    if v.ndim != 4 or s.shape != v.shape[:3]:
        raise ValueError(
            f"v: shape is {tuple(v.shape)} and that of s {tuple(s.shape)}, wanted [num_tokens, num_states, "
            "num_heads, head_dim] and the first three of these"
        )
    if v.shape[1] == 0:
        return v.new_zeros((len(v), *v.shape[2:])), s.new_full((len(s), s.shape[2]), -torch.inf)
    merged, lse = v[:, 0].clone(), _natural(s[:, 0])
    for state in range(1, v.shape[1]):
        paged_ops.merge_attention_states(merged, lse, v[:, state], _natural(s[:, state]), out=merged, lse=lse)
    return merged, lse.mul_(LOG2_E)


class MultiLevelCascadeAttentionWrapper:
    """Attention over several page tables per query, one per level, whose results are merged.

    The first levels hold what sequences share (a common prompt: one sequence of pages for many query tokens),
    the last what each has alone. Causal is about the last level; the others are seen in full.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels: is {num_levels}, wanted at least 1")
        arrays: dict[str, Sequence[torch.Tensor] | None] = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        for name, array in arrays.items():
            if array is not None and len(array) != num_levels:
                raise ValueError(f"{name}_arr: has {len(array)} buffers, wanted num_levels, {num_levels}")
        self._wrappers = []
        for level in range(num_levels):
            buffers: dict[str, Any] = {n: array[level] for n, array in arrays.items() if array is not None}
            self._wrappers.append(
                BatchPrefillWithPagedKVCacheWrapper(
                    float_workspace_buffer, kv_layout, use_cuda_graph, **buffers
                )
            )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the plan's tensors keep their addresses."""
        return self._wrappers[0].is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Takes buffers of the same device; their memory is not used."""
        for wrapper, buffer in zip(self._wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """A page table per level, each as :class:`BatchPrefillWithPagedKVCacheWrapper` takes it.

        A window goes by positions within each level, as it does in FlashInfer.
        """
        levels = zip(
            self._wrappers,
            qo_indptr_arr,
            paged_kv_indptr_arr,
            paged_kv_indices_arr,
            paged_kv_last_page_len,
            strict=True,
        )
        for wrapper, qo_indptr, indptr, indices, last_page_len in levels:
            wrapper.plan(
                qo_indptr,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and wrapper is self._wrappers[-1],
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> Any:
        """q ``[num_tokens, num_qo_heads, head_dim]`` -> out alike, over the keys of all levels."""
        states = [
            wrapper._run(q, paged_kv_cache, Scales(), return_lse=True) for wrapper in reversed(self._wrappers)
        ]
        out, lse = states[0]
        for other, other_lse in states[1:]:
            paged_ops.merge_attention_states(out, lse, other, other_lse, out=out, lse=lse)
        return out

    forward = run

    def end_forward(self) -> None:
        """Nothing: kept for engines that still call it."""
