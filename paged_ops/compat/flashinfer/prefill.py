"""FlashInfer's prefill and append: several query tokens per sequence."""

from __future__ import annotations

import functools
from typing import Any

import torch

from paged_ops.compat.flashinfer import _masks, _refuse, _tables
from paged_ops.compat.flashinfer._attend import Logits, Scale, Scales, attend, to_base_2
from paged_ops.compat.flashinfer._layout import PagedCache, one_page
from paged_ops.compat.flashinfer._wrapper import DType, PagedWrapper, Shapes, torch_dtype


def _require_no_window_in_a_tree(mask: _masks.Mask, window_left: int) -> None:
    if mask.tree_mask is not None and window_left >= 0:
        raise NotImplementedError(
            "window_left: is given with a custom mask, and in a tree the ops count a window by depth, not by "
            "row"
        )


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of the last tokens of each sequence over its pages; a plan serves all layers of a step."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            jit_args,
            backend,
        )
        self._causal = False
        self._num_rows: int | None = None  # of q, where the plan could read it

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Takes the page table, the mask and the options of the following calls of :meth:`run`.

        qo_indptr, paged_kv_indptr ``[num_seqs + 1]``, paged_kv_indices ``[num_pages]``,
        paged_kv_last_page_len ``[num_seqs]``: best on the CPU, see :mod:`._tables`. ``block_tables`` and
        ``seq_lens`` take the place of the table when both are given; ``max_sequence_kv`` bounds the tokens of
        a sequence. ``custom_mask`` and ``packed_custom_mask``: see :mod:`._masks`. ``ValueError`` for tables
        that contradict themselves (as far as they are on the CPU), ``NotImplementedError`` for what is not
        carried over.
        """
        _refuse.position_encoding(pos_encoding_mode)
        _refuse.given(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        _tables.check_csr(names, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        if qo_indptr.shape != paged_kv_indptr.shape:
            raise ValueError(f"qo_indptr: shape is {tuple(qo_indptr.shape)}, wanted [{len(paged_kv_indptr)}]")
        self._num_rows = None
        if _tables.on_host(qo_indptr):
            _tables.check_indptr("qo_indptr", qo_indptr)
            self._num_rows = int(qo_indptr[-1])
        query_dtype = torch_dtype(q_data_type)
        if o_data_type is not None:
            _refuse.output_dtype(torch_dtype(o_data_type), query_dtype)
        lengths = self._lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
        mask = _masks.from_arguments(causal, custom_mask, packed_custom_mask, qo_indptr, lengths)
        _require_no_window_in_a_tree(mask, window_left)
        if block_tables is not None and seq_lens is not None:
            lengths = seq_lens
        self._keep_tables(
            paged_kv_indptr, paged_kv_indices, lengths, page_size, block_tables, max_sequence_kv
        )
        self._keep("qo_indptr", qo_indptr.to(torch.int32))
        if mask.tree_mask is None:
            self._kept.pop("tree_mask", None)
        else:
            self._keep("tree_mask", mask.tree_mask)
        self._causal = mask.causal
        self._shapes = Shapes(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_qk if head_dim_vo is None else head_dim_vo,
            page_size,
            query_dtype,
            torch_dtype(kv_data_type or query_dtype),
        )
        self._logits = Logits(sm_scale, window_left, logits_soft_cap)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        """q ``[num_tokens, num_qo_heads, head_dim_qk]`` -> out ``[., ., head_dim_vo]``, or (out, base-2 LSE).

        ``RuntimeError`` before a plan, ``ValueError`` for tensors that do not fit it, ``NotImplementedError``
        for what is not carried over.
        """
        _refuse.custom_arguments(args)
        _refuse.given(
            kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor
        )
        self._check_window(window_left)
        scales = Scales(q_scale, k_scale, v_scale)
        out, lse = self._run(q, paged_kv_cache, scales, sinks=sinks, out=out, lse=lse, return_lse=return_lse)
        return to_base_2(out, lse, return_lse)  # type: ignore[arg-type]

    def _run(self, q: torch.Tensor, paged_kv_cache: PagedCache, scales: Scales, **options: Any) -> Any:
        """(out, natural LSE)."""
        # Rows for a graph's largest batch are no mistake: the ops give 0 for those past the last sequence.
        if self._num_rows is not None and len(q) != self._num_rows and not self._use_cuda_graph:
            raise ValueError(f"q: has {len(q)} rows, qo_indptr ends at {self._num_rows}")
        tree_mask = self._kept.get("tree_mask")
        return self._attend(q, paged_kv_cache, scales, causal=self._causal, tree_mask=tree_mask, **options)

    run_return_lse = functools.partialmethod(run, return_lse=True)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> Any:
    """The last ``qo_len`` tokens of one sequence over contiguous keys and values, which become one page.

    q ``[qo_len, num_qo_heads, head_dim_qk]``; k, v ``[kv_len, num_kv_heads, head_dim]`` (NHD) or
    ``[num_kv_heads, kv_len, head_dim]`` (HND), not copied; custom_mask bool ``[qo_len, kv_len]`` or packed,
    on the CPU, see :mod:`._masks` -> out ``[qo_len, num_qo_heads, head_dim_vo]``, or (out, base-2 LSE).
    """
    _refuse.position_encoding(pos_encoding_mode)
    _refuse.backend(backend)
    _refuse.given(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    _refuse.output_dtype(o_dtype, q.dtype)
    if q.ndim != 3:
        raise ValueError(f"q: shape is {tuple(q.shape)}, wanted [qo_len, num_qo_heads, head_dim]")
    caches = one_page(k, v, kv_layout)
    kv_len = caches[0].shape[1]
    # The lengths of one sequence are known from shapes: masks need no page table on the CPU here.
    offsets, lengths = torch.tensor([0, len(q)]), torch.tensor([kv_len])
    mask = _masks.from_arguments(causal, custom_mask, packed_custom_mask, offsets, lengths)
    _require_no_window_in_a_tree(mask, window_left)
    if kv_len == 0:
        out = q.new_zeros((*q.shape[:2], v.shape[-1]))
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return (out, lse) if return_lse else out
    table = torch.zeros((1, 1), dtype=torch.int32, device=q.device)
    length = torch.full((1,), kv_len, dtype=torch.int32, device=q.device)
    cu_seqlens_q = torch.arange(2, dtype=torch.int32, device=q.device) * len(q)
    out, natural = attend(
        q,
        caches,
        (table, length),
        cu_seqlens_q,
        Logits(sm_scale, window_left, logits_soft_cap),
        Scales(None, k_scale, v_scale),
        causal=mask.causal,
        tree_mask=None if mask.tree_mask is None else mask.tree_mask.to(q.device, non_blocking=True),
        return_lse=return_lse,
    )
    return to_base_2(out, natural, return_lse)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)
