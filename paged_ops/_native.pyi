"""The native module. Its functions check their arguments; paged_ops.ops calls and documents them."""

from typing import Any

cuda_archs: str

def attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: Any | None,
    sinks: Any | None,
    tree_mask: Any | None,
    k_scale: Any | None,
    v_scale: Any | None,
    out: Any | None,
    lse: Any | None,
    return_lse: bool,
    workspace: Any | None,
    check: bool,
) -> Any: ...
def attention_workspace_nbytes(
    device: str,
    num_tokens: int,
    num_seqs: int,
    max_blocks_per_seq: int,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    dtype: str,
    decode: bool,
) -> int: ...
def write_kv_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    k_scale: Any | None,
    v_scale: Any | None,
    check: bool,
) -> None: ...
def gather_kv_cache(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scale: Any | None,
    v_scale: Any | None,
    out_dtype: str | None,
    key_out: Any | None,
    value_out: Any | None,
    num_tokens: int | None,
    check: bool,
) -> tuple[Any, Any, Any]: ...
def copy_blocks(caches: list[Any] | tuple[Any, ...], block_pairs: Any, check: bool) -> None: ...
def swap_blocks(source: Any, destination: Any, block_pairs: Any) -> None: ...
def merge_attention_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any | None, lse: Any | None
) -> tuple[Any, Any]: ...
def rope_and_write_kv_cache(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    interleaved: bool,
    k_scale: Any | None,
    v_scale: Any | None,
    query_out: Any | None,
    check: bool,
) -> Any: ...
def refusal(
    dtype: str,
    cache_dtype: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    block_size: int,
) -> str: ...
def cpu_isas() -> list[str]: ...
def compiled_cpu_isas() -> list[str]: ...
def cpu_isa() -> str: ...
def set_cpu_isa(name: str) -> None: ...
def cuda_devices() -> list[str]: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
