"""What FlashInfer's batch wrappers share: their plan as tensors and numbers, kept over CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paged_ops.compat.flashinfer import _refuse, _tables
from paged_ops.compat.flashinfer._attend import Logits, Scales, attend
from paged_ops.compat.flashinfer._layout import PagedCache, check_kv_layout, paged_views

DType = str | torch.dtype


def torch_dtype(dtype: DType) -> torch.dtype:
    """A dtype by itself or by its name."""
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Shapes:
    """What ``plan`` was told about the tensors of ``run``."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype

    def check(self, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        """``ValueError`` for tensors that are not what was planned for. The caches as the ops see them."""
        for name, tensor, dtype in (
            ("q", q, self.q_data_type),
            ("paged_kv_cache", key_cache, self.kv_data_type),
        ):
            if tensor.dtype != dtype:
                raise ValueError(f"{name}: dtype is {tensor.dtype}, planned was {dtype}")
        page = (self.page_size, self.num_kv_heads)
        wanted = (
            ("q", q.shape[1:], (self.num_qo_heads, self.head_dim_qk)),
            ("paged_kv_cache", key_cache.shape[1:], (*page, self.head_dim_qk)),
            ("paged_kv_cache", value_cache.shape[1:], (*page, self.head_dim_vo)),
        )
        for name, shape, planned in wanted:
            if tuple(shape) != planned:
                raise ValueError(f"{name}: shape is [., {', '.join(map(str, shape))}], planned was {planned}")


class PagedWrapper:
    """A plan, and attention by it. The tensors of a plan live on the device of the workspace buffer.

    With ``use_cuda_graph`` they keep their addresses from the first plan on, so that a graph that has
    captured ``run`` sees each later plan. Their shapes are fixed by the sizes of the buffers given for the
    page table (and by ``block_tables`` or ``max_sequence_kv`` of the first plan, which make them smaller).
    The buffers themselves are not written.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        indptr_buffer: torch.Tensor | None,
        indices_buffer: torch.Tensor | None,
        jit_args: list[Any] | None,
        backend: str,
    ) -> None:
        check_kv_layout(kv_layout)
        _refuse.given(jit_args=jit_args)
        _refuse.backend(backend)
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._fixed: tuple[int, int] | None = None  # sequences and pages that a graph's tables hold
        if use_cuda_graph:
            if indptr_buffer is None or indices_buffer is None:
                raise ValueError(
                    "use_cuda_graph: wants the buffers of the page table, whose sizes it goes by"
                )
            self._fixed = len(indptr_buffer) - 1, len(indices_buffer)
        self._kept: dict[str, torch.Tensor] = {}
        self._shapes: Shapes | None = None
        self._logits = Logits()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the plan's tensors keep their addresses."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Takes buffers of the same device; their memory is not used."""
        if float_workspace_buffer.device != self.device:
            raise ValueError(
                f"float_workspace_buffer: is on {float_workspace_buffer.device}, the wrapper on {self.device}"
            )

    def end_forward(self) -> None:
        """Nothing: kept for engines that still call it."""

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Holds a tensor of the plan on the wrapper's device, at one address where graphs ask for it."""
        kept = self._kept.get(name)
        if not self._use_cuda_graph or kept is None:
            moved = tensor.to(self.device, non_blocking=True)
            # A graph's tensors are ours to write: never the caller's own, which `to` may have handed back.
            self._kept[name] = moved.clone() if self._use_cuda_graph and moved is tensor else moved
            return
        if kept.shape != tensor.shape:
            raise ValueError(
                f"{name}: shape is {tuple(tensor.shape)}, the CUDA graph's is {tuple(kept.shape)}"
            )
        kept.copy_(tensor, non_blocking=True)

    def _lengths(self, indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
        """Tokens of each sequence: on the CPU where both came from there, else on the wrapper's device."""
        if not _tables.on_host(indptr, last_page_len):
            indptr = indptr.to(self.device, non_blocking=True)
            last_page_len = last_page_len.to(self.device, non_blocking=True)
        return _tables.sequence_lengths(indptr, last_page_len, page_size)

    def _keep_tables(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        block_tables: torch.Tensor | None,
        max_sequence_kv: int | None,
    ) -> None:
        """The block table and lengths of this plan; `seq_lens` may be on any device."""
        num_seqs = len(indptr) - 1
        if self._fixed is not None and (num_seqs != self._fixed[0] or len(indices) > self._fixed[1]):
            raise ValueError(
                f"indptr: is of {num_seqs} sequences and {len(indices)} pages, the CUDA graph's buffers of "
                f"{self._fixed[0]} sequences and {self._fixed[1]} pages"
            )
        if block_tables is None:
            if max_sequence_kv is not None:
                width = max(1, -(-max_sequence_kv // page_size))
            elif self._fixed is not None:
                width = max(1, self._fixed[1])
            else:
                width = _tables.table_width(indptr, indices)
            indptr, indices = (x.to(self.device, non_blocking=True) for x in (indptr, indices))
            block_tables = _tables.block_tables_of(indptr, indices, width)
        elif block_tables.ndim != 2 or len(block_tables) != num_seqs:
            raise ValueError(f"block_tables: shape is {tuple(block_tables.shape)}, wanted [{num_seqs}, .]")
        self._keep("block_tables", block_tables.to(torch.int32))
        self._keep("seq_lens", seq_lens.reshape(-1).to(torch.int32))

    def _attend(self, q: torch.Tensor, paged_kv_cache: PagedCache, scales: Scales, **options: Any) -> Any:
        """(out, natural LSE) by the plan; options as :func:`._attend.attend` takes them."""
        if self._shapes is None:
            raise RuntimeError("plan() has to be called before run()")
        caches = paged_views(paged_kv_cache, self._kv_layout)
        self._shapes.check(q, *caches)
        tables = self._kept["block_tables"], self._kept["seq_lens"]
        cu_seqlens_q = self._kept.get("qo_indptr")
        return attend(q, caches, tables, cu_seqlens_q, self._logits, scales, **options)

    def _check_window(self, window_left: int | None) -> None:
        """FlashInfer takes a window in ``run`` only to hear the plan's once more."""
        if window_left is not None and window_left != self._logits.window_left:
            raise ValueError(f"window_left: is {window_left}, planned was {self._logits.window_left}")
