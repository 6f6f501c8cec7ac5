"""The shared cases in FlashInfer's terms: CSR page tables, its cache layouts, its logarithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paged_ops.testing import arrays
from paged_ops.testing.cases import Case, Inputs, build


@dataclass(frozen=True)
class FlashInferCase:
    """A case as FlashInfer is called with it. All but the numpy inputs are torch tensors on one device."""

    inputs: Inputs
    q: Any  # [num_tokens, num_qo_heads, head_dim]
    cache: Any  # 5-D, or a pair
    indptr: Any  # int32 [num_seqs + 1]
    indices: Any  # int32 [num_pages]
    last_page_len: Any  # int32 [num_seqs]
    qo_indptr: Any  # int32 [num_seqs + 1]

    @property
    def table(self) -> tuple[Any, Any, Any]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def shapes(self) -> tuple[int, int, int, int]:
        case = self.inputs.case
        return case.num_q_heads, case.num_kv_heads, case.head_dim, case.block_size

    def workspace(self) -> Any:
        return torch.empty(16, dtype=torch.uint8, device=self.q.device)


def flashinfer_case(
    case: Case, kv_layout: str = "NHD", *, pair: bool = False, device: str = "cpu"
) -> FlashInferCase:
    """Pages of the case's blocks, in the order of its block tables; NaN stays in all unused slots."""
    inputs = build(case)
    put = lambda array: arrays.to_torch(np.ascontiguousarray(array), device)  # noqa: E731
    counts = [case.blocks_of(length) for length in case.seq_lens]
    owned = [inputs.block_tables[seq, :count] for seq, count in enumerate(counts)]
    caches = [inputs.key_cache, inputs.value_cache]
    if kv_layout == "HND":
        caches = [cache.swapaxes(1, 2) for cache in caches]
    last = [
        length - (count - 1) * case.block_size for length, count in zip(case.seq_lens, counts, strict=True)
    ]
    bounds = inputs.cu_seqlens_q
    return FlashInferCase(
        inputs,
        put(inputs.query),
        tuple(map(put, caches)) if pair else put(np.stack(caches, axis=1)),
        put(np.cumsum([0, *counts]).astype(np.int32)),
        put(np.concatenate([np.zeros(0, np.int32), *owned]).astype(np.int32)),
        put(np.array([n if c else 0 for n, c in zip(last, counts, strict=True)], np.int32)),
        put(np.arange(len(counts) + 1, dtype=np.int32) if bounds is None else bounds),
    )


def natural(lse: Any) -> Any:
    """A base-2 LSE as a float64 natural one."""
    return arrays.to_numpy(lse).astype(np.float64) * np.log(2.0)


def require_close(actual: Any, wanted: Any, *, tolerance: float = 3e-5) -> None:
    """Within an absolute tolerance for float32 results of size 1; infinities equal."""
    actual = arrays.to_numpy(actual) if not isinstance(actual, np.ndarray) else actual
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
