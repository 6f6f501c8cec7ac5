"""vLLM's custom ops for the paged KV cache on top of the public ops: names, argument orders, layouts.

``from paged_ops.compat import vllm as ops`` takes the place of ``from vllm import _custom_ops as ops`` for
what is listed below, on a GPU or on the CPU; signatures are those of vLLM 0.32, and of the last releases
that had the op. Tensors are torch's. What differs:

- What sizes or chooses among vLLM's kernels is taken and has no effect: ``max_seq_len``, the scratch of
  ``paged_attention_v2``, ``isa``, ``enable_kv_split``, scheduler metadata, ``is_src_access_order_any``.
- ``fp8`` caches may be uint8, as in vLLM, or torch's own 8-bit floats. What is stored is ``row / scale``,
  to the nearest, ties to even, saturated.
- What is not carried over raises ``NotImplementedError`` that says why. Errors of the ops name the argument
  as it is called here, and the op that they come from.
"""

from paged_ops.compat.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_ops.compat.vllm.blocks import copy_blocks, swap_blocks, swap_blocks_batch
from paged_ops.compat.vllm.cache import (
    concat_and_cache_mla,
    convert_fp8,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from paged_ops.compat.vllm.cpu import (
    cpu_attention_with_kv_cache,
    cpu_attn_get_scheduler_metadata,
    cpu_attn_reshape_and_cache,
)
from paged_ops.compat.vllm.gather import cp_gather_cache, gather_and_maybe_dequant_cache
from paged_ops.compat.vllm.merge import merge_attn_states

__all__ = [
    "concat_and_cache_mla",
    "convert_fp8",
    "copy_blocks",
    "cp_gather_cache",
    "cpu_attention_with_kv_cache",
    "cpu_attn_get_scheduler_metadata",
    "cpu_attn_reshape_and_cache",
    "gather_and_maybe_dequant_cache",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
]
