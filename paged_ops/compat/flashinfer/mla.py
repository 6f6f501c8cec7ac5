"""FlashInfer's multi-head latent attention: keys are a latent and a rotated part, values the latent again.

With the projections absorbed (DeepSeek-V2, arXiv:2405.04434) it is attention with one KV head, whose keys are
``latent | rotated`` and whose values are the first part of the same memory.
"""

from __future__ import annotations

from typing import Any

import torch

from paged_ops.compat.flashinfer import _refuse, _tables
from paged_ops.compat.flashinfer._attend import Logits, Scales, to_base_2
from paged_ops.compat.flashinfer._wrapper import PagedWrapper, Shapes


def joined(ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> torch.Tensor:
    """``ckv | kpe`` as one tensor: a view where they lie side by side in one, else a copy of both.

    ckv_cache ``[num_pages, page_size, head_dim_ckv]``, kpe_cache the same with ``head_dim_kpe``. Engines that
    allocate one cache and hand out its two parts pay nothing; two tensors are copied whole on every call.
    """
    latent, rotated = ckv_cache.shape[-1], kpe_cache.shape[-1]
    beside = (
        ckv_cache.stride() == kpe_cache.stride()
        and ckv_cache.untyped_storage().data_ptr() == kpe_cache.untyped_storage().data_ptr()
        and ckv_cache.storage_offset() + latent == kpe_cache.storage_offset()
        and ckv_cache.stride(-1) == 1
    )
    if beside:
        return ckv_cache.as_strided((*ckv_cache.shape[:-1], latent + rotated), ckv_cache.stride())
    return torch.cat([ckv_cache, kpe_cache], dim=-1)


class BatchMLAPagedAttentionWrapper(PagedWrapper):
    """Absorbed MLA over pages, decode and append; a plan serves all layers of a step."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, kv_indptr, kv_indices, None, backend)
        self._causal = False

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Takes the page table and the options of the following calls of :meth:`run`.

        qo_indptr, kv_indptr ``[num_seqs + 1]``, kv_indices ``[num_pages]``, kv_len_arr ``[num_seqs]``, the
        tokens of each sequence: best on the CPU, see :mod:`._tables`.
        """
        if use_profiler:
            raise NotImplementedError("use_profiler: the kernels hold no profiler")
        names = ("kv_indptr", "kv_indices", "")
        _tables.check_csr(names, kv_indptr, kv_indices, None, page_size)
        for name, tensor, count in (("qo_indptr", qo_indptr, 0), ("kv_len_arr", kv_len_arr, -1)):
            if tensor.shape != (len(kv_indptr) + count,):
                raise ValueError(f"{name}: shape is {tuple(tensor.shape)}, wanted [{len(kv_indptr) + count}]")
        if _tables.on_host(kv_indptr, kv_len_arr):
            room = _tables.page_counts(kv_indptr) * page_size
            if bool((kv_len_arr > room).any()):
                raise ValueError("kv_len_arr: holds more tokens than the pages of a sequence")
        self._keep_tables(kv_indptr, kv_indices, kv_len_arr, page_size, None, None)
        self._keep("qo_indptr", qo_indptr.to(torch.int32))
        self._causal = causal
        key_dim = head_dim_ckv + head_dim_kpe
        self._shapes = Shapes(num_heads, 1, key_dim, head_dim_ckv, page_size, q_data_type, kv_data_type)
        self._logits = Logits(sm_scale)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        """q_nope ``[num_tokens, num_heads, head_dim_ckv]``, q_pe the same with ``head_dim_kpe``, caches as
        :func:`joined` takes them -> out as q_nope, or (out, LSE), base 2 unless asked for as a natural one.

        ``kv_len`` and ``page_table`` are those of a backend that runs without a plan, and are refused.
        """
        _refuse.given(profiler_buffer=profiler_buffer)
        if kv_len is not None or page_table is not None:
            _refuse.backend("cutlass")
        for name, cache in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
            if cache.ndim != 3:
                raise ValueError(f"{name}: shape is {tuple(cache.shape)}, wanted [num_pages, page_size, .]")
        keys = joined(ckv_cache, kpe_cache)[:, :, None]
        q = torch.cat([q_nope, q_pe], dim=-1)
        out, lse = self._attend(
            q,
            (keys, keys[..., : q_nope.shape[-1]]),
            Scales(),
            causal=self._causal,
            out=out,
            lse=lse,
            return_lse=return_lse,
        )
        assert out is not None
        if return_lse_base_on_e:
            return (out, lse) if return_lse else out
        return to_base_2(out, lse, return_lse)
