"""Paged-attention operators for LLM engines, on CUDA and on the CPU, for torch, NumPy and cupy tensors."""

from paged_ops import _torch_hook
from paged_ops._version import __version__
from paged_ops.block_moves import export_blocks, import_blocks, move_blocks
from paged_ops.cascade import common_prefix_blocks, paged_attention_shared_prefix
from paged_ops.ops import (
    Support,
    copy_blocks,
    gather_kv_cache,
    merge_attention_states,
    paged_attention,
    paged_attention_decode,
    rope_and_write_kv_cache,
    supports,
    swap_blocks,
    workspace_size,
    write_kv_cache,
)
from paged_ops.pool import KVPool, allocate_kv_pool
from paged_ops.threads import get_num_threads, set_num_threads

_torch_hook.install()

__all__ = [
    "KVPool",
    "Support",
    "__version__",
    "allocate_kv_pool",
    "common_prefix_blocks",
    "copy_blocks",
    "export_blocks",
    "gather_kv_cache",
    "get_num_threads",
    "import_blocks",
    "merge_attention_states",
    "move_blocks",
    "paged_attention",
    "paged_attention_decode",
    "paged_attention_shared_prefix",
    "rope_and_write_kv_cache",
    "set_num_threads",
    "supports",
    "swap_blocks",
    "workspace_size",
    "write_kv_cache",
]
