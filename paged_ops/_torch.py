"""The ops under torch.library, for ``torch.compile(fullgraph=True)`` and ``torch.export`` to trace through.

Imported by ``_torch_hook`` once torch is there. Eager calls do not pass through here: they go from ``ops.py``
to the native module directly. One table holds each op's schema, what runs it and what a fake tensor becomes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paged_ops import _arrays, _backend, block_moves, cascade, ops

_LIBRARY = torch.library.Library("paged_ops", "DEF")


def _check(check: bool | None) -> bool:
    return _backend.check_by_default if check is None else check


def _attention(*arguments: Any) -> None:
    """Of the schema's arguments, in the native module's order, which has `return_lse` before the last two."""
    *tensors_and_options, workspace, check = arguments
    _backend.module.attention(*tensors_and_options, False, workspace, _check(check))


def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> None:
    _backend.module.merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)


def _write(*arguments: Any) -> None:
    *tensors, check = arguments
    _backend.module.write_kv_cache(*tensors, _check(check))


def _copy(caches: list[Any], block_pairs: Any, check: bool | None) -> None:
    _backend.module.copy_blocks(caches, block_pairs, _check(check))


def _swap(source: Any, destination: Any, block_pairs: Any) -> None:
    _backend.module.swap_blocks(source, destination, block_pairs)


def _gather(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    out_dtype: Any,
    num_tokens: int | None,
    check: bool | None,
) -> tuple[Any, Any, Any]:
    dtype = None if out_dtype is None else _arrays.dtype_name(out_dtype)
    return _backend.module.gather_kv_cache(
        key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale, dtype, None, None, num_tokens,
        _check(check),
    )  # fmt: skip


def _gather_out(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    key: Any,
    value: Any,
    check: bool | None,
) -> Any:
    return _backend.module.gather_kv_cache(
        key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale, None, key, value, None,
        _check(check),
    )[2]  # fmt: skip


def _nothing(*_: Any) -> None:
    return None


def _row_elements(cache: Any) -> Any:
    """Of a cache whose head dims may lie in packs."""
    return cache.shape[3] if cache.ndim == 4 else cache.shape[3] * cache.shape[4]


def _head_dim(cache: Any) -> Any:
    """The same in numbers: of int4 there are two in each element of uint8."""
    return _row_elements(cache) * (2 if cache.dtype == torch.uint8 else 1)


def _fake_gather(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    out_dtype: Any,
    num_tokens: Any,
    check: bool | None,
) -> tuple[Any, Any, Any]:
    num_seqs, max_blocks_per_seq = block_tables.shape
    if num_tokens is None:
        if key_cache.device.type == "cpu":
            num_tokens = torch.library.get_ctx().new_dynamic_size()
        else:
            num_tokens = num_seqs * max_blocks_per_seq * key_cache.shape[1]
    scaled = k_scale is not None

    def rows(cache: Any) -> Any:
        extent = _head_dim(cache) if scaled else _row_elements(cache)
        dtype = (out_dtype or torch.float32) if scaled else cache.dtype
        return cache.new_empty((num_tokens, cache.shape[2], extent), dtype=dtype)

    return rows(key_cache), rows(value_cache), seq_lens.new_empty((num_seqs + 1,))


def _fake_gather_out(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    key: Any,
    value: Any,
    check: bool | None,
) -> Any:
    return seq_lens.new_empty((seq_lens.shape[0] + 1,))


def _shared_prefix(*arguments: Any) -> None:
    attend: Callable[..., Any] = cascade.attend_in_parts
    attend(*arguments[:-1], False, _check(arguments[-1]))


def _rope_and_write(*arguments: Any) -> None:
    _backend.module.rope_and_write_kv_cache(*arguments[:-1], _check(arguments[-1]))


def _export(caches: list[Any], block_ids: Any, out: Any) -> None:
    block_moves.export_real_blocks(caches, block_ids, out)


_TABLE: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor? cu_seqlens_q, Scalar? scale, bool causal, SymInt? window, Scalar? soft_cap, "
        "Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, "
        "Tensor(a!) out, Tensor(b!)? lse, "
        "Tensor(c!)? workspace, bool? check) -> ()",
        _attention,
        _nothing,
    ),
    (
        "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, "
        "Tensor(b!) lse) -> ()",
        _merge,
        _nothing,
    ),
    (
        "write_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, Tensor(c!)? k_scale, Tensor(d!)? v_scale, bool? check) -> ()",
        _write,
        _nothing,
    ),
    ("copy_blocks(Tensor(a!)[] caches, Tensor block_pairs, bool? check) -> ()", _copy, _nothing),
    ("swap_blocks(Tensor source, Tensor(a!) destination, Tensor block_pairs) -> ()", _swap, _nothing),
    (
        "gather_kv_cache(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor? k_scale, Tensor? v_scale, ScalarType? out_dtype, SymInt? num_tokens, "
        "bool? check) -> (Tensor, Tensor, Tensor)",
        _gather,
        _fake_gather,
    ),
    (
        "gather_kv_cache_out(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor? k_scale, Tensor? v_scale, Tensor(a!) key, Tensor(b!) value, bool? check) -> Tensor",
        _gather_out,
        _fake_gather_out,
    ),
    (
        "attention_shared_prefix(Tensor query, Tensor key_cache, Tensor value_cache, "
        "Tensor shared_block_table, SymInt shared_len, Tensor block_tables, Tensor seq_lens, "
        "Tensor? cu_seqlens_q, Scalar? scale, Scalar? soft_cap, Tensor? sinks, Tensor? k_scale, "
        "Tensor? v_scale, Tensor(a!) out, "
        "Tensor(b!)? lse, bool? check) -> ()",
        _shared_prefix,
        _nothing,
    ),
    (
        "rope_and_write_kv_cache(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_mapping, Tensor positions, Tensor cos_sin_cache, "
        "bool interleaved, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor(e!) query_out, "
        "bool? check) -> ()",
        _rope_and_write,
        _nothing,
    ),
    (
        "move_blocks(Tensor(a!)[] caches, Tensor block_pairs, Tensor(b!)[]? scratch) -> ()",
        block_moves.move_real_blocks,
        _nothing,
    ),
    ("export_blocks(Tensor[] caches, Tensor block_ids, Tensor(a!) out) -> ()", _export, _nothing),
    (
        "import_blocks(Tensor packed, Tensor(a!)[] caches, Tensor block_ids) -> ()",
        block_moves.import_real_blocks,
        _nothing,
    ),
)


def _without_gradient(name: str) -> Callable[..., Any]:
    """What autograd runs: refuses tensors that require a gradient, as the native module does."""
    op = getattr(torch.ops.paged_ops, name).default
    names = [argument.name for argument in op._schema.arguments]

    def run(*values: Any) -> Any:
        if torch.is_grad_enabled():
            for argument, value in zip(names, values, strict=False):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        raise ValueError(
                            f"{argument}: requires a gradient, and the ops have no backward; "
                            "detach it or call under torch.no_grad()"
                        )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*values)

    return run


for _schema, _run, _fake in _TABLE:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _run, "CPU")
    _LIBRARY.impl(_name, _run, "CUDA")
    _LIBRARY.impl(_name, _without_gradient(_name), "Autograd")
    torch.library.register_fake(f"paged_ops::{_name}", _fake, lib=_LIBRARY)


def _real(name: str, value: Any) -> float:
    """Any real number (NumPy's, a fraction) as the schema's own; dynamo may make a symbol of it."""
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name}: is a {type(value).__name__}, wanted a number")


def _scale_tensors(like: Any, k_scale: Any, v_scale: Any) -> list[Any]:
    """Scales as tensors, which is what the schemas take: a number becomes one."""

    def tensor(name: str, scale: Any) -> Any:
        if scale is None or isinstance(scale, torch.Tensor):
            return scale
        if hasattr(scale, "__dlpack__"):
            return torch.as_tensor(scale, device=like.device)
        return torch.full((1,), _real(name, scale), dtype=torch.float32, device=like.device)

    return [tensor("k_scale", k_scale), tensor("v_scale", v_scale)]


class _TracedOps:
    """What ``ops.py`` calls while torch traces: the public ops' options, down to the registered ops."""

    @staticmethod
    def attention(
        query: Any,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        seq_lens: Any,
        cu_seqlens_q: Any,
        scale: float | None,
        causal: bool,
        window: int | None,
        soft_cap: float | None,
        alibi_slopes: Any,
        sinks: Any,
        tree_mask: Any,
        k_scale: Any,
        v_scale: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        workspace: Any,
        check: bool | None,
    ) -> Any:
        tensors = query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q
        if scale is not None and not isinstance(scale, (int, float)):
            scale = _real("scale", scale)
        if soft_cap is not None and not isinstance(soft_cap, (int, float)):
            soft_cap = _real("soft_cap", soft_cap)
        rules = window, soft_cap, alibi_slopes, sinks, tree_mask, *_scale_tensors(query, k_scale, v_scale)
        if out is None:
            out = query.new_empty((*query.shape[:2], _head_dim(value_cache)))
        if lse is None and return_lse:
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        torch.ops.paged_ops.attention(*tensors, scale, causal, *rules, out, lse, workspace, check)
        return (out, lse) if return_lse else out

    @staticmethod
    def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> tuple[Any, Any]:
        out = torch.empty_like(out_a) if out is None else out
        lse = torch.empty_like(lse_a) if lse is None else lse
        torch.ops.paged_ops.merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse

    @staticmethod
    def write(
        key: Any,
        value: Any,
        key_cache: Any,
        value_cache: Any,
        slot_mapping: Any,
        k_scale: Any,
        v_scale: Any,
        check: bool | None,
    ) -> None:
        scales = _scale_tensors(key, k_scale, v_scale)
        torch.ops.paged_ops.write_kv_cache(key, value, key_cache, value_cache, slot_mapping, *scales, check)

    @staticmethod
    def copy(caches: list[Any], block_pairs: Any, check: bool | None) -> None:
        torch.ops.paged_ops.copy_blocks(caches, block_pairs, check)

    @staticmethod
    def swap(source: Any, destination: Any, block_pairs: Any) -> None:
        torch.ops.paged_ops.swap_blocks(source, destination, block_pairs)

    @staticmethod
    def gather(
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        seq_lens: Any,
        k_scale: Any,
        v_scale: Any,
        out_dtype: str | None,
        key: Any,
        value: Any,
        num_tokens: int | None,
        check: bool | None,
    ) -> tuple[Any, Any, Any]:
        tensors = key_cache, value_cache, block_tables, seq_lens, *_scale_tensors(seq_lens, k_scale, v_scale)
        if key is None:
            dtype = None if out_dtype is None else getattr(torch, out_dtype)
            return torch.ops.paged_ops.gather_kv_cache(*tensors, dtype, num_tokens, check)
        cu_seqlens = torch.ops.paged_ops.gather_kv_cache_out(*tensors, key, value, check)
        return key, value, cu_seqlens

    @staticmethod
    def shared_prefix(
        query: Any,
        key_cache: Any,
        value_cache: Any,
        shared_block_table: Any,
        shared_len: int,
        block_tables: Any,
        seq_lens: Any,
        cu_seqlens_q: Any,
        scale: float | None,
        soft_cap: float | None,
        sinks: Any,
        k_scale: Any,
        v_scale: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        check: bool | None,
    ) -> Any:
        tables = shared_block_table, shared_len, block_tables, seq_lens, cu_seqlens_q
        if scale is not None and not isinstance(scale, (int, float)):
            scale = _real("scale", scale)
        if soft_cap is not None and not isinstance(soft_cap, (int, float)):
            soft_cap = _real("soft_cap", soft_cap)
        if out is None:
            out = query.new_empty((*query.shape[:2], _head_dim(value_cache)))
        if lse is None and return_lse:
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        torch.ops.paged_ops.attention_shared_prefix(
            query, key_cache, value_cache, *tables, scale, soft_cap, sinks,
            *_scale_tensors(query, k_scale, v_scale), out, lse, check,
        )  # fmt: skip
        return (out, lse) if return_lse else out

    @staticmethod
    def rope_and_write(
        query: Any,
        key: Any,
        value: Any,
        key_cache: Any,
        value_cache: Any,
        slot_mapping: Any,
        positions: Any,
        cos_sin_cache: Any,
        interleaved: bool,
        k_scale: Any,
        v_scale: Any,
        query_out: Any,
        check: bool | None,
    ) -> Any:
        tensors = query, key, value, key_cache, value_cache, slot_mapping, positions, cos_sin_cache
        if query_out is None:
            query_out = query.new_empty(query.shape)
        scales = _scale_tensors(key, k_scale, v_scale)
        torch.ops.paged_ops.rope_and_write_kv_cache(*tensors, interleaved, *scales, query_out, check)
        return query_out

    @staticmethod
    def move(caches: list[Any], block_pairs: Any, scratch: list[Any] | None) -> None:
        torch.ops.paged_ops.move_blocks(caches, block_pairs, scratch)

    @staticmethod
    def export(caches: list[Any], block_ids: Any, out: Any) -> Any:
        if not isinstance(block_ids, torch.Tensor):
            block_ids = torch.tensor(block_ids, dtype=torch.int64)
        if out is None:
            out = caches[0].new_empty(block_moves.packed_shape(caches, block_ids.shape[0]))
        torch.ops.paged_ops.export_blocks(caches, block_ids, out)
        return out

    @staticmethod
    def import_(packed: Any, caches: list[Any], block_ids: Any) -> None:
        if not isinstance(block_ids, torch.Tensor):
            block_ids = torch.tensor(block_ids, dtype=torch.int64)
        torch.ops.paged_ops.import_blocks(packed, caches, block_ids)


# Looked up once, and the cheapest that tell: every eager call asks. What else sets `torch.compiler`'s flag,
# such as torch.export without dynamo, traces through dispatch modes.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_jit_tracing = torch._C._is_tracing


def _tracing(first: Any) -> bool:
    """Whether somebody records ops instead of only running them: dynamo, a dispatch mode, torch.jit.trace.

    The last two see torch tensors only: a call whose `first` tensor is none of torch's is simply run.
    """
    if _is_dynamo_compiling():
        return True
    return (_num_dispatch_modes() != 0 or _is_jit_tracing()) and isinstance(first, torch.Tensor)


ops._torch_ops = _TracedOps
ops._compiling = _tracing
