"""The public ops. Each is defined by the function of the same name in :mod:`paged_ops.reference`.

Tensors may be of torch, NumPy or cupy (any type with DLPack); outputs are of the query's kind.
Common shapes::

    query         [num_tokens, num_q_heads, head_dim]                float32, float16, bfloat16
    key_cache     [num_blocks, block_size, num_kv_heads, head_dim]   as query, or float8_e4m3fn, float8_e5m2,
                                                                     int8, or two int4 in each element of
                                                                     uint8 [..., head_dim / 2]; any strides,
                                                                     or head dims in packs of x,
                                                                     [..., head_dim / x, x]
    value_cache   the same; its head_dim may differ
    block_tables  [num_seqs, max_blocks_per_seq]                     int32
    seq_lens      [num_seqs]                                         int32
    slot_mapping  [num_tokens]                                       int64, block * block_size + offset

Errors in shape, dtype, strides, device or options raise ``ValueError`` or ``TypeError`` that name the
argument, before anything is written. Block ids, lengths and slots out of range raise ``ValueError`` on the
CPU always, on CUDA with ``check=True`` or ``PAGED_OPS_CHECK=1``; unchecked, CUDA never reads or writes
outside the caches through a slot out of range, but results that depend on a wrong block id are undefined. A
call that has nothing to do, with no query tokens, no pairs or no bytes in a block, looks at none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from paged_ops import _arrays, _backend


def _compiling(first: Any) -> bool:
    """Whether torch traces a call with this tensor. ``paged_ops._torch`` puts torch's own answer here."""
    return False


# The ops as torch.library knows them, for traces; set by `paged_ops._torch`.
_torch_ops: Any = None


def _flag(name: str, value: Any) -> bool:
    """A bool as it came; anything else, None above all, is not taken for one."""
    if type(value).__name__ in ("bool", "bool_"):  # Python's and NumPy's
        return bool(value)
    raise TypeError(f"{name}: is {value!r}, wanted True or False")


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: is {value!r}, wanted an integer")
    if abs(int(value)) >= 1 << 63:
        raise ValueError(f"{name}: is {value}, wanted less than 2^63")
    return int(value)


def paged_attention_decode(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
) -> Any:
    """Attention of one query token per sequence over its keys and values in the paged cache.

    ``out[s, h] = softmax_j(scale * query[s, h] . key[s, j, h // group]) @ value[s, j, h // group]`` over the
    ``seq_lens[s]`` tokens ``j`` of sequence ``s`` (Kwon et al., PagedAttention, SOSP 2023, eq. 4),
    accumulated in float32. The bits of a row depend on nothing but that row's own query, keys, values,
    length, rules and scales.

    Args:
        query: ``[num_seqs, num_q_heads, head_dim]``; ``num_q_heads`` is a multiple of the caches'
            ``num_kv_heads``.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the query's dtype or
            quantised, any strides, or ``[num_blocks, block_size, num_kv_heads, head_dim /
            x, x]`` with the last dimension contiguous, as vLLM has its keys; head_dim a multiple of 8 up to
            576, value_cache's may differ from key_cache's.
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``; entries past a sequence's length are not read.
        seq_lens: int32 ``[num_seqs]``. A sequence of length 0 gives output 0 and LSE ``-inf``.
        scale: multiplies the logits; default ``head_dim ** -0.5``.
        window: a query sees its own position and the ``window - 1`` before it only (Mistral's sliding window;
            FlashAttention's left window is ``window - 1``). Tiles of keys before it are left out; their
            entries in the table still have to be blocks.
        soft_cap: ``logit = soft_cap * tanh(scale * query . key / soft_cap)`` (Gemma 2).
        alibi_slopes: float32 ``[num_q_heads]``: logits gain ``slope * (key position - query position)``,
            after the soft cap (Press et al. 2022, arXiv:2108.12409).
        sinks: float32 ``[num_q_heads]``: each row has one more logit, whose value is 0 (gpt-oss). It counts
            in the LSE, and a row of a sequence without keys has it as its LSE; when states are merged, give
            it to one of them.
        k_scale, v_scale: what the numbers of a quantised cache are multiplied by, mandatory with one: a
            number, or float32 ``[1]``, ``[num_kv_heads]`` or ``[num_blocks, block_size, num_kv_heads]``. For
            int4 (element ``2 i`` in the lower half of a byte, two's complement) float32 ``[num_blocks,
            block_size, num_kv_heads, num_groups]``: each belongs to ``head_dim / num_groups`` consecutive
            elements, a multiple of 8, which need not be as many in keys as in values.
        out: ``[num_seqs, num_q_heads, value_head_dim]`` of the query's dtype, written in full; allocated when
            None. It may not share memory with an input.
        lse: float32 ``[num_seqs, num_q_heads]``, contiguous, to write the LSE to.
        return_lse: also return the natural logarithm of the softmax's denominator.
        workspace: any tensor of at least :func:`workspace_size` bytes; allocated with the caller's framework
            when None (the CPU backend keeps scratch of its own). Its contents do not matter. One per stream.
        check: check block ids and lengths first; default from ``PAGED_OPS_CHECK``, always on for the CPU.

    Returns:
        ``out``, or ``(out, lse)`` with ``return_lse``.
    """
    if _compiling(query):
        return _torch_ops.attention(
            query, key_cache, value_cache, block_tables, seq_lens, None,
            scale, True, window, soft_cap, alibi_slopes, sinks, None, k_scale, v_scale,
            out, lse, return_lse, workspace, check,
        )  # fmt: skip
    if check is None:
        check = _backend.check_by_default
    elif check is not True and check is not False:
        check = _flag("check", check)
    if return_lse is not True and return_lse is not False:
        return_lse = _flag("return_lse", return_lse)
    return _backend.module.attention(
        query, key_cache, value_cache, block_tables, seq_lens, None,
        scale, True, window, soft_cap, alibi_slopes, sinks, None, k_scale, v_scale,
        out, lse, return_lse, workspace, check,
    )  # fmt: skip


def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
) -> Any:
    """Attention of several query tokens per sequence over the paged cache: prefill, chunks, verification.

    The query tokens of sequence ``s`` are rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1] - 1`` of
    ``query`` and are the *last* tokens of the sequence: token ``t`` sits at position ``seq_lens[s] -
    num_query_tokens + t``. With ``causal`` it sees the keys at positions up to its own, else all
    ``seq_lens[s]``. Their keys and values have to be in the cache already (:func:`write_kv_cache`). A row's
    bits are those that :func:`paged_attention_decode` gives for it at its position, however a prompt is cut
    into chunks.

    Args:
        query: ``[num_tokens, num_q_heads, head_dim]``. Rows from ``cu_seqlens_q[-1]`` on (padding) give 0,
            ``-inf``.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, starts at 0, never falls.
        causal: see above.
        tree_mask: int64 ``[num_tokens]``, for a sequence's query tokens that are a tree of drafts instead of
            a row of them: bit ``i`` of a token's mask says that it sees query token ``i`` of its sequence.
            Bits from its own on are not looked at, itself and all keys before the query tokens it always
            sees. At most 64 query tokens per sequence; only with ``causal``. ``window`` and ``alibi_slopes``
            go by a token's place behind those that it sees.
        Others as in :func:`paged_attention_decode`.

    Returns:
        ``out [num_tokens, num_q_heads, value_head_dim]``, or ``(out, lse)`` with ``return_lse``.
    """
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q: is None, wanted an int32 tensor [num_seqs + 1]")
    if _compiling(query):
        return _torch_ops.attention(
            query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q,
            scale, causal, window, soft_cap, alibi_slopes, sinks, tree_mask, k_scale, v_scale,
            out, lse, return_lse, workspace, check,
        )  # fmt: skip
    if check is None:
        check = _backend.check_by_default
    elif check is not True and check is not False:
        check = _flag("check", check)
    if causal is not True and causal is not False:
        causal = _flag("causal", causal)
    if return_lse is not True and return_lse is not False:
        return_lse = _flag("return_lse", return_lse)
    return _backend.module.attention(
        query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q,
        scale, causal, window, soft_cap, alibi_slopes, sinks, tree_mask, k_scale, v_scale,
        out, lse, return_lse, workspace, check,
    )  # fmt: skip


def merge_attention_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """Merge two partial attention results over disjoint sets of keys into the result over their union.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``. A
    state with LSE ``-inf`` is the identity, whatever its output holds; both ``-inf`` give output 0 and LSE
    ``-inf``.

    Args:
        out_a, out_b: ``[num_tokens, num_heads, head_dim]``, equal dtypes (float32, float16, bfloat16),
            head_dim a multiple of 8.
        lse_a, lse_b: float32 ``[num_tokens, num_heads]``, natural logarithm.
        out, lse: where to write; ``out`` may be ``out_a`` or ``out_b`` itself, ``lse`` may be ``lse_a`` or
            ``lse_b``.

    Returns:
        ``(out, lse)``.
    """
    if _compiling(out_a):
        return _torch_ops.merge(out_a, lse_a, out_b, lse_b, out, lse)
    return _backend.module.merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)


def write_kv_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check: bool | None = None,
) -> None:
    """Write new keys and values into their slots: ``cache[slot // block_size, slot % block_size] = row``.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``, dtype of the caches (with quantised ones: float32,
            float16 or bfloat16), last dimension contiguous.
        value: ``[num_tokens, num_kv_heads, value_head_dim]``.
        key_cache, value_cache: as in :func:`paged_attention_decode`, written in place.
        slot_mapping: int64, at most ``num_tokens`` slots: it says how many rows are written, so ``key`` and
            ``value`` may be padded. A negative slot skips its row. No slot may come twice (the result would
            be either row).
        k_scale, v_scale: of quantised caches, as in :func:`paged_attention_decode`: what is stored is ``row /
            scale``, rounded to the nearest, ties to even, and saturated at the greatest finite number (127 in
            int8, 7 in int4), infinities too; NaN stays NaN, in integers it becomes 0. Scales per token,
            ``[num_blocks, block_size, num_kv_heads]`` or with groups, are written: the greatest finite size
            of each row or group over that number (1 for zeros).
        check: check slots first; always on for the CPU.
    """
    if _compiling(key_cache):
        return _torch_ops.write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, check)
    if check is None:
        check = _backend.check_by_default
    elif check is not True and check is not False:
        check = _flag("check", check)
    _backend.module.write_kv_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, check)
    return None


def copy_blocks(caches: Any, block_pairs: Any, *, check: bool | None = None) -> None:
    """Copy whole blocks inside caches, in every one of them in one call (copy-on-write over all layers).

    Args:
        caches: a tensor ``[num_blocks, ...]`` or a list of such with one shape, dtype and strides (K and V of
            each layer, or a whole block-major pool), written in place.
        block_pairs: int64 ``[num_pairs, 2]`` of (source, destination), on the caches' device. Destinations
            differ, and no block is both a source and a destination; a pair of a block with itself does
            nothing.
        check: check block ids first; always on for the CPU.
    """
    if not isinstance(caches, (list, tuple)):
        caches = [caches]
    if _compiling(caches[0] if caches else None):
        return _torch_ops.copy(list(caches), block_pairs, check)
    if check is None:
        check = _backend.check_by_default
    elif check is not True and check is not False:
        check = _flag("check", check)
    _backend.module.copy_blocks(caches, block_pairs, check)
    return None


def swap_blocks(source: Any, destination: Any, block_pairs: Any) -> None:
    """Copy whole blocks from one pool to another, on the same or on different devices.

    Args:
        source, destination: ``[num_blocks, ...]``, equal in dtype and in every extent but the first. Copies
            between a GPU and the host run on the caller's current stream; with pinned host memory they are
            asynchronous.
        block_pairs: int64 ``[num_pairs, 2]`` of (source block, destination block), on the CPU; ids are
            checked.
    """
    if _compiling(source):
        return _torch_ops.swap(source, destination, block_pairs)
    _backend.module.swap_blocks(source, destination, block_pairs)
    return None


def gather_kv_cache(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    out: Sequence[Any] | None = None,
    num_tokens: int | None = None,
    check: bool | None = None,
) -> tuple[Any, Any, Any]:
    """Gather the sequences' keys and values into contiguous rows, one sequence after the other.

    Args:
        key_cache, value_cache, block_tables, seq_lens: as in :func:`paged_attention_decode`. Without scales
            the elements come out as they are, those of quantised caches too (int4 as ``[num_rows,
            num_kv_heads, head_dim / 2]``).
        k_scale, v_scale: of quantised caches, as there: numbers times scales come out instead, computed in
            float32 and rounded once.
        out_dtype: float32 (the default), float16 or bfloat16, for rows allocated with scales.
        out: ``(key, value)`` to write to, ``[num_rows, num_kv_heads, head_dim]`` each, of one dtype.
        num_tokens: rows to allocate without ``out``. On the CPU the default is the sum of ``seq_lens``; on a
            GPU, where reading it would stop the stream, the bound ``num_seqs * max_blocks_per_seq *
            block_size``.
        check: check block ids and lengths first; always on for the CPU.

    Returns:
        ``(key, value, cu_seqlens)``, ``cu_seqlens`` int32 ``[num_seqs + 1]``. Token ``t`` of sequence ``s``
        is row ``cu_seqlens[s] + t``; rows from ``cu_seqlens[-1]`` on are 0.
    """
    if out is not None and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise ValueError(f"out: is {type(out).__name__}, wanted a pair (key, value)")
    key, value = out if out is not None else (None, None)
    if out_dtype is not None:
        out_dtype = _arrays.dtype_name(out_dtype)
    if _compiling(key_cache):
        return _torch_ops.gather(
            key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale, out_dtype,
            key, value, num_tokens, check,
        )  # fmt: skip
    if check is None:
        check = _backend.check_by_default
    elif check is not True and check is not False:
        check = _flag("check", check)
    if num_tokens is not None:
        num_tokens = _count("num_tokens", num_tokens)
    return _backend.module.gather_kv_cache(
        key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale, out_dtype,
        key, value, num_tokens, check,
    )  # fmt: skip


def workspace_size(
    *,
    num_seqs: int,
    max_blocks_per_seq: int,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    num_tokens: int | None = None,
    dtype: Any,
    device: str = "cpu",
) -> int:
    """Bytes that an attention op needs as ``workspace`` for these shapes; a function of shapes only.

    ``num_tokens`` None is :func:`paged_attention_decode` (one per sequence), a number is
    :func:`paged_attention`. ``device`` is ``"cpu"`` or ``"cuda"`` (with or without an ordinal). May be 0.
    """
    return int(
        _backend.module.attention_workspace_nbytes(
            str(device).partition(":")[0],
            _count("num_tokens", num_seqs if num_tokens is None else num_tokens),
            _count("num_seqs", num_seqs),
            _count("max_blocks_per_seq", max_blocks_per_seq),
            _count("block_size", block_size),
            _count("num_q_heads", num_q_heads),
            _count("num_kv_heads", num_kv_heads),
            _count("head_dim", head_dim),
            _count("value_head_dim", head_dim if value_head_dim is None else value_head_dim),
            _arrays.dtype_name(dtype),
            num_tokens is None,
        )
    )


class Support(NamedTuple):
    """Whether a combination is supported; true or false by itself, and with the reason when it is not."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def supports(
    *,
    dtype: Any,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    block_size: int = 16,
    cache_dtype: Any = None,
) -> Support:
    """Whether the ops take this combination, by the predicate that each call asks.

    The same on every backend.
    """
    counts = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_head_dim": head_dim if value_head_dim is None else value_head_dim,
        "block_size": block_size,
    }
    try:
        reason = _backend.module.refusal(
            _arrays.dtype_name(dtype),
            _arrays.dtype_name(dtype if cache_dtype is None else cache_dtype),
            *(_count(name, value) for name, value in counts.items()),
        )
    except TypeError as error:
        reason = str(error)
    return Support(not reason, reason)


def rope_and_write_kv_cache(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    *,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    query_out: Any = None,
    check: bool | None = None,
) -> Any:
    """Rotate queries and keys by their positions, and write keys and values into their slots, in one pass.

    Rotary position embedding (Su et al. 2021, RoFormer, arXiv:2104.09864): of the first ``rotary_dim``
    elements of each row, a pair ``(x, y)`` becomes ``(x cos - y sin, y cos + x sin)``; the rest stays as it
    is. The pair's cosine and sine are those of ``cos_sin_cache`` at the token's position. Rotated in float32
    and rounded once, before keys are quantised too. The bits are those of rotating first and calling
    :func:`write_kv_cache` then.

    Args:
        query: ``[num_tokens, num_q_heads, head_dim]``, dtype of the key, last dimension contiguous.
        key: ``[num_tokens, num_kv_heads, head_dim]``, before rotation.
        value: ``[num_tokens, num_kv_heads, value_head_dim]``; stays as it is.
        key_cache, value_cache: as in :func:`paged_attention_decode`, written in place.
        slot_mapping: int64, at most ``num_tokens`` slots. A negative slot skips its key and value, and so
            does none at all (padding); their queries are rotated all the same. No slot may come twice.
        positions: int64 or int32 ``[num_tokens]``, each from 0 to ``max_position - 1``.
        cos_sin_cache: float32 ``[max_position, rotary_dim]``: the cosines of a position's ``rotary_dim / 2``
            pairs, then their sines. rotary_dim is even and at most head_dim.
        interleaved: False pairs element ``i`` with ``i + rotary_dim / 2`` (GPT-NeoX, Llama in Hugging Face's
            form), True ``2 i`` with ``2 i + 1`` (GPT-J, Llama in Meta's).
        k_scale, v_scale: of quantised caches, as in :func:`write_kv_cache`.
        query_out: where the rotated queries go, shaped as ``query``; may be ``query`` itself. Allocated when
            None.
        check: check slots and positions first; always on for the CPU.

    Returns:
        ``query_out``.
    """
    if _compiling(query):
        return _torch_ops.rope_and_write(
            query, key, value, key_cache, value_cache, slot_mapping, positions, cos_sin_cache,
            interleaved, k_scale, v_scale, query_out, check,
        )  # fmt: skip
    check = _backend.check_by_default if check is None else _flag("check", check)
    return _backend.module.rope_and_write_kv_cache(
        query, key, value, key_cache, value_cache, slot_mapping, positions, cos_sin_cache,
        _flag("interleaved", interleaved), k_scale, v_scale, query_out, check,
    )  # fmt: skip
