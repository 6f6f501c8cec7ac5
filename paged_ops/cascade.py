"""Attention of sequences that begin with the same blocks: the shared blocks once for all, then the tails.

What many requests have in common (a system prompt, few-shot examples, the samples of one prompt) lies in the
same blocks of the cache. The ordinary op reads them once per sequence; here the query tokens of all sequences
are rows of one sequence over the shared blocks, so that their keys and values come in once and meet all rows
in one matrix product. The two partial results are merged by their LSEs (Juravsky et al. 2024, Hydragen,
arXiv:2402.05099; FlashInfer's cascade attention, Ye et al. 2025, arXiv:2501.01005).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from paged_ops import _arrays, _backend, ops


def paged_attention_shared_prefix(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    shared_block_table: Any,
    shared_len: int,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window: int | None = None,
    alibi_slopes: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    check: bool | None = None,
) -> Any:
    """:func:`paged_attention_decode`, or :func:`paged_attention`, of sequences that share their first blocks.

    The first ``shared_len`` tokens of every sequence are those of ``shared_block_table``; its own are the
    entries of its block table from ``shared_len // block_size`` on. The result is that of the ordinary op but
    for roundings: the outputs over the shared blocks and over the tails are rounded to the query's dtype
    before they are merged. A row's bits depend on where the cut is, and on nothing of other rows.

    Args:
        query, key_cache, value_cache: as in :func:`paged_attention_decode`.
        shared_block_table: int32 ``[num_blocks]``, of at least ``shared_len // block_size`` entries.
        shared_len: tokens in the shared blocks, a multiple of ``block_size``. May be 0.
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``, at least as many columns as there are shared
            blocks. The entries of the shared blocks are not read.
        seq_lens: int32 ``[num_seqs]``, the shared tokens included.
        cu_seqlens_q: int32 ``[num_seqs + 1]``: causal attention of several query tokens per sequence. None:
            one each. Every query token sees all shared tokens, so that the first one of a sequence stands at
            the last of them or later.
        scale, soft_cap, k_scale, v_scale, out, lse, return_lse: as there.
        sinks: as there; counted once per row.
        window, alibi_slopes: refused. Both go by the distance from a query token to a key, which differs from
            sequence to sequence, and the shared blocks meet all of them as rows of one.
        check: check block ids and lengths first; always on for the CPU.

    Returns:
        ``out``, or ``(out, lse)`` with ``return_lse``.
    """
    for name, rule in (("window", window), ("alibi_slopes", alibi_slopes)):
        if rule is not None:
            raise ValueError(
                f"{name}: is given, wanted None: it goes by distances between query and key, which differ "
                "from sequence to sequence, and over a shared prefix all are rows of one"
            )
    shared_len = ops._count("shared_len", shared_len)
    if ops._compiling(query):
        return ops._torch_ops.shared_prefix(
            query, key_cache, value_cache, shared_block_table, shared_len, block_tables, seq_lens,
            cu_seqlens_q, scale, soft_cap, sinks, k_scale, v_scale, out, lse, return_lse, check,
        )  # fmt: skip
    check = _backend.check_by_default if check is None else ops._flag("check", check)
    return attend_in_parts(
        query, key_cache, value_cache, shared_block_table, shared_len, block_tables, seq_lens,
        cu_seqlens_q, scale, soft_cap, sinks, k_scale, v_scale,
        out, lse, ops._flag("return_lse", return_lse), check,
    )  # fmt: skip


def attend_in_parts(
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
    check: bool,
) -> Any:
    """The op on real tensors, its options resolved. Nothing is written to `out` before all is checked."""
    _require_int32("shared_block_table", shared_block_table, "[num_blocks]")
    _require_int32("block_tables", block_tables, "[num_seqs, max_blocks_per_seq]")
    _require_int32("seq_lens", seq_lens, "[num_seqs]")
    num_shared = _shared_blocks(shared_len, key_cache)
    for name, columns in (
        ("shared_block_table", shared_block_table.shape[0]),
        ("block_tables", block_tables.shape[1]),
    ):
        if columns < num_shared:
            raise ValueError(f"{name}: has {columns} blocks per sequence, wanted at least {num_shared}")
    attention = _backend.module.attention

    def tails(tables: Any, lens: Any, out: Any, lse: Any, return_lse: bool) -> Any:
        return attention(
            query, key_cache, value_cache, tables, lens, cu_seqlens_q, scale, True,
            None, soft_cap, None, sinks, None, k_scale, v_scale, out, lse, return_lse, None, check,
        )  # fmt: skip

    num_seqs, num_tokens = seq_lens.shape[0], getattr(query, "shape", (0,))[0]
    if num_shared == 0 or num_seqs == 0 or num_tokens == 0:
        return tails(block_tables, seq_lens, out, lse, return_lse)
    if cu_seqlens_q is not None:
        _require_int32("cu_seqlens_q", cu_seqlens_q, "[num_seqs + 1]")
        if cu_seqlens_q.shape[0] != num_seqs + 1:
            shape = tuple(cu_seqlens_q.shape)
            raise ValueError(f"cu_seqlens_q: shape is {shape}, wanted ({num_seqs + 1},), as seq_lens has it")
        if check or _arrays.on_host(seq_lens):
            _check_lengths(shared_len, seq_lens, cu_seqlens_q, num_tokens)

    # One sequence whose query tokens are all there are but the padding's, which see nothing. Its bounds are
    # made where the tensors are, without looking at them.
    if cu_seqlens_q is None:
        bounds = _arrays.int32_range(query, 0, num_tokens + 1, num_tokens)
    else:
        bounds = cu_seqlens_q[::num_seqs] + 0
    try:
        shared_out, shared_lse = attention(
            query, key_cache, value_cache, shared_block_table[:num_shared][None],
            _arrays.int32_range(query, shared_len, shared_len + 1, 1), bounds, scale, False,
            None, soft_cap, None, None, None, k_scale, v_scale, None, None, True, None, check,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        words = str(error)
        if words.startswith("block_tables"):  # what the native module knows the shared one as
            words = words.replace("block_tables[0, ", "shared_block_table[", 1)
            raise type(error)(words.replace("block_tables", "shared_block_table", 1)) from None
        raise
    try:
        out, lse = tails(block_tables[:, num_shared:], seq_lens - shared_len, out, lse, True)
    except ValueError as error:
        if str(error).startswith("seq_lens["):  # in words about the whole, where it can be said
            _check_lengths(shared_len, seq_lens, cu_seqlens_q, num_tokens)
        if str(error).startswith(("seq_lens[", "block_tables[")):
            raise ValueError(f"{error}, counted behind the {num_shared} shared blocks") from None
        raise
    _backend.module.merge_attention_states(shared_out, shared_lse, out, lse, out, lse)
    return (out, lse) if return_lse else out


def common_prefix_blocks(block_tables: Any, seq_lens: Any, block_size: int) -> int:
    """How many whole blocks all sequences have in common at their beginning.

    Args:
        block_tables: ``[num_seqs, max_blocks_per_seq]``, integers in host memory.
        seq_lens: ``[num_seqs]``, integers in host memory. A block counts when every sequence fills it.
        block_size: tokens in a block.

    Returns:
        The number ``n``; ``n * block_size`` is the ``shared_len`` of :func:`paged_attention_shared_prefix`,
        and ``block_tables[0, :n]`` its ``shared_block_table``. 0 without sequences.
    """
    block_size = ops._count("block_size", block_size)
    if block_size < 1:
        raise ValueError(f"block_size: is {block_size}, wanted at least 1")
    tables, lens = (
        _arrays.host_values("block_tables", block_tables),
        _arrays.host_values("seq_lens", seq_lens),
    )
    if tables.ndim != 2:
        raise ValueError(f"block_tables: shape is {tables.shape}, wanted [num_seqs, max_blocks_per_seq]")
    if lens.shape != tables.shape[:1]:
        raise ValueError(f"seq_lens: shape is {lens.shape}, wanted {tables.shape[:1]} as in block_tables")
    if len(lens) == 0:
        return 0
    whole = max(0, min(int(lens.min()) // block_size, tables.shape[1]))
    equal = (tables[:, :whole] == tables[:1, :whole]).all(axis=0)
    return int(equal.argmin()) if not equal.all() else whole


def _shared_blocks(shared_len: int, key_cache: Any) -> int:
    """The number of shared blocks; a cache that is none at all is left for the native module to name."""
    if shared_len < 0:
        raise ValueError(f"shared_len: is {shared_len}, wanted at least 0")
    shape: Any = getattr(key_cache, "shape", ())
    if shared_len == 0 or len(shape) not in (4, 5) or shape[1] < 1:
        return 0
    if shared_len % shape[1]:
        raise ValueError(f"shared_len: is {shared_len}, wanted a multiple of the block size, {shape[1]}")
    return int(shared_len // shape[1])


@functools.cache
def _is_int32(dtype: Any) -> bool:
    return _arrays.dtype_name(dtype) == "int32"


def _require_int32(name: str, array: Any, wanted: str) -> None:
    """What indexing and subtracting need; the native module checks the rest."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{name}: is a {type(array).__name__}, wanted a tensor of torch, NumPy or cupy")
    if len(array.shape) != wanted.count(",") + 1:
        raise ValueError(f"{name}: shape is {tuple(array.shape)}, wanted {wanted}")
    if not _is_int32(array.dtype):
        raise TypeError(f"{name}: dtype is {_arrays.dtype_name(array.dtype)}, wanted int32")


def _check_lengths(shared_len: int, seq_lens: Any, cu_seqlens_q: Any, num_tokens: int) -> None:
    """That every query token sees all of the prefix, which a part by itself does not show.

    What else is wrong with a length, the native module says.
    """
    lens = _arrays.to_host(seq_lens)
    least: Any = shared_len
    if cu_seqlens_q is not None:
        bounds = _arrays.to_host(cu_seqlens_q).astype(np.int64)
        q_lens = np.diff(bounds)
        if bounds[0] != 0:
            raise ValueError(f"cu_seqlens_q[0] = {bounds[0]}: wanted 0")
        if (q_lens < 0).any() or bounds[-1] > num_tokens:
            falls = q_lens < 0
            i = int(falls.argmax()) + 1 if falls.any() else len(lens)
            raise ValueError(
                f"cu_seqlens_q[{i}] = {bounds[i]}: wanted {bounds[i - 1]} to {num_tokens}, the query tokens"
            )
        least = shared_len + np.maximum(q_lens - 1, 0)
    if (lens < least).any():
        i = int((lens < least).argmax())
        wanted = np.broadcast_to(least, lens.shape)[i]
        raise ValueError(
            f"seq_lens[{i}] = {lens[i]}: wanted at least {wanted}, so that its query tokens see all "
            f"{shared_len} shared tokens"
        )
