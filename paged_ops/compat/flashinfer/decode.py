"""FlashInfer's decode: one query token per sequence, or a few of a draft."""

from __future__ import annotations

import functools
from typing import Any

import torch

from paged_ops.compat.flashinfer import _refuse, _tables
from paged_ops.compat.flashinfer._attend import Logits, Scale, Scales, attend, to_base_2
from paged_ops.compat.flashinfer._layout import PagedCache, one_page
from paged_ops.compat.flashinfer._wrapper import DType, PagedWrapper, Shapes, torch_dtype


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of the last token of each sequence over its pages; a plan serves all layers of a step."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            jit_args,
            backend,
        )
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with; it makes no difference."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        window_right: int = 0,
    ) -> None:
        """Takes the page table and the options of the following calls of :meth:`run`.

        indptr ``[num_seqs + 1]``, indices ``[num_pages]``, last_page_len ``[num_seqs]``: best on the CPU, see
        :mod:`._tables`. ``block_tables`` and ``seq_lens`` take the place of the table when both are given.
        ``q_len_per_req``: query tokens per sequence, its last ones, causal among themselves. ``ValueError``
        for tables that contradict themselves (as far as they are on the CPU).
        """
        _refuse.position_encoding(pos_encoding_mode)
        if window_right != 0:
            raise NotImplementedError(f"window_right: is {window_right}, and no query sees keys after it")
        names = ("indptr", "indices", "last_page_len")
        _tables.check_csr(names, indptr, indices, last_page_len, page_size)
        query_dtype = torch_dtype(q_data_type or data_type or "float16")
        kv_dtype = torch_dtype(kv_data_type or data_type or query_dtype)
        if o_data_type is not None:
            _refuse.output_dtype(torch_dtype(o_data_type), query_dtype)
        lengths = self._lengths(indptr, last_page_len, page_size)
        if block_tables is not None and seq_lens is not None:
            lengths = seq_lens
        self._keep_tables(indptr, indices, lengths, page_size, block_tables, None)
        self._kept.pop("qo_indptr", None)
        if q_len_per_req > 1:
            counts = torch.arange(len(indptr), dtype=torch.int32, device=self.device)
            self._keep("qo_indptr", counts * q_len_per_req)
        self._q_len_per_req = q_len_per_req
        self._shapes = Shapes(
            num_qo_heads, num_kv_heads, head_dim, head_dim, page_size, query_dtype, kv_dtype
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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """q ``[num_seqs * q_len_per_req, num_qo_heads, head_dim]`` -> out alike, or (out, base-2 LSE).

        ``RuntimeError`` before a plan, ``ValueError`` for tensors that do not fit it, ``NotImplementedError``
        for what is not carried over.
        """
        _refuse.custom_arguments(args)
        _refuse.given(
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf
        )
        self._check_window(window_left)
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise ValueError(f"q_len_per_req: is {q_len_per_req}, planned was {self._q_len_per_req}")
        if "seq_lens" in self._kept and len(q) != len(self._kept["seq_lens"]) * self._q_len_per_req:
            raise ValueError(
                f"q: has {len(q)} rows, planned was {len(self._kept['seq_lens'])} * {self._q_len_per_req}"
            )
        scales = Scales(q_scale, k_scale, v_scale)
        out, lse = self._attend(
            q, paged_kv_cache, scales, sinks=sinks, out=out, lse=lse, return_lse=return_lse
        )
        return to_base_2(out, lse, return_lse)  # type: ignore[arg-type]

    run_return_lse = functools.partialmethod(run, return_lse=True)


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """One token of one sequence over contiguous keys and values, which become a page of ``kv_len`` tokens.

    q ``[num_qo_heads, head_dim]``; k, v ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads,
    kv_len, head_dim]`` (HND), not copied -> out ``[num_qo_heads, head_dim]``, or (out, base-2 LSE
    ``[num_qo_heads]``).
    """
    _refuse.position_encoding(pos_encoding_mode)
    if q.ndim != 2:
        raise ValueError(f"q: shape is {tuple(q.shape)}, wanted [num_qo_heads, head_dim]")
    caches = one_page(k, v, kv_layout)
    kv_len = caches[0].shape[1]
    if kv_len == 0:
        out, lse = (
            q.new_zeros((len(q), v.shape[-1])),
            q.new_full(q.shape[:1], -torch.inf, dtype=torch.float32),
        )
        return (out, lse) if return_lse else out
    table = torch.zeros((1, 1), dtype=torch.int32, device=q.device)
    length = torch.full((1,), kv_len, dtype=torch.int32, device=q.device)
    logits, scales = Logits(sm_scale, window_left, logits_soft_cap), Scales(q_scale, k_scale, v_scale)
    outs, lses = attend(q[None], caches, (table, length), None, logits, scales, return_lse=return_lse)
    return to_base_2(outs[0], None if lses is None else lses[0], return_lse)
