"""FlashInfer 0.6's paged interface on top of the public ops: names, arguments, page tables, base-2 LSE.

``import paged_ops.compat.flashinfer as flashinfer`` takes the place of ``import flashinfer`` in an engine
that uses the paged wrappers, on a GPU or on the CPU. What differs:

- ``plan`` copies nothing from a device and compiles nothing. It turns the page table into a block table with
  a few tensor operations on the workspace's device; how wide that is, :mod:`._tables` says.
- Workspace buffers say where the wrapper's tensors live, and are not written.
- What only chooses among FlashInfer's kernels is taken and has no effect: ``backend``, ``use_tensor_cores``,
  ``enable_pdl``, ``fixed_split_size``, ``disable_split_kv``, ``use_fp16_qk_reduction``, ``non_blocking``.
- What is not carried over raises ``NotImplementedError`` that says why.

Here and only here a log-sum-exp (``lse``, ``s``) is to base 2, as it is in FlashInfer.
"""

from paged_ops.compat.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from paged_ops.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from paged_ops.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper
from paged_ops.compat.flashinfer.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from paged_ops.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
