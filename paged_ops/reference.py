"""The definition of every op: NumPy in float64, the clearest code that says what each one means.

Both backends are held to this file. It has the public names and argument order, takes arrays of any kind that
`numpy.asarray` accepts (bfloat16 through `ml_dtypes`) and returns float64; the ops that work in place write
the caches they are given, in the caches' own dtype. Arguments that say where to write or how to run (`out`,
`lse`, `workspace`, `check`) are left out, and so are `workspace_size` and `supports`, which speak about an
implementation.

Words used throughout

- A *paged cache* is `[num_blocks, block_size, num_kv_heads, head_dim]` with any strides; keys and values have
  one each, and their head dims may differ (`Dk`, `Dv`). Where head dims lie in packs of x it may also be
  `[num_blocks, block_size, num_kv_heads, head_dim / x, x]` (`plain`).
- Token `t` of sequence `s` lies in block `block_tables[s, t // block_size]` at offset `t % block_size`. Its
  *slot* is `block * block_size + offset`. Entries of a block table past `ceil(seq_lens[s] / block_size)` mean
  nothing and are not read; what a block holds past the sequence's end has no influence.
- Query head `h` reads KV head `h // (num_q_heads // num_kv_heads)` (grouped-query attention, Ainslie et al.
  2023, arXiv:2305.13245).
- A *state* is a pair `(out, lse)`: attention over some set of keys, and the natural log of the sum of the
  exponentials of their logits. It is all that is needed to go on over further keys (Milakov and Gimelshein
  2018, arXiv:1805.02867).
- A row that sees no key has `out = 0` and `lse = -inf`. Every row of an output is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_ops.reference_numbers import dequantise, in_groups, quantise, scale_of

F64 = NDArray[np.float64]


# --- attention: one predicate, one formula for a logit, one softmax -------------------------------------


def tree_sight(tree_mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of a sequence's query tokens each of them sees, by the bits of its mask: `[q_len, q_len]`.

    Token t sees itself, and token i < t when bit i of `tree_mask[t]` is set.
    """
    token = np.arange(len(tree_mask))
    bits = tree_mask[:, None] >> token & 1 == 1
    return bits & (token < token[:, None]) | (token == token[:, None])


def places(seq_len: int, tree: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """Where each token of a sequence stands for the window and for ALiBi.

    At its position; a draft token of a tree right behind the query tokens that it sees, as if they were all.
    """
    place = np.arange(seq_len)
    if tree is not None and len(tree):
        first = seq_len - len(tree)
        drafts = first + tree.sum(axis=1) - 1
        place[max(first, 0) :] = drafts[max(-first, 0) :]
    return place


def visible(
    seq_len: int,
    query_position: int,
    *,
    causal: bool,
    window: int | None = None,
    tree: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Which keys a query token sees: `[seq_len]`. What it does not see has no influence, not even as NaN.

    causal: key_position <= query_position.
    window: place of key > place of query - window (`places`).
    tree:   of the sequence's query tokens, those that `tree_sight` says.
    """
    position = np.arange(seq_len)
    seen = np.ones(seq_len, bool)
    if causal:
        seen &= position <= query_position
    if query_position < 0:
        return seen
    place = places(seq_len, tree)
    if window is not None:
        seen &= place > place[query_position] - window
    if tree is not None:
        first = seq_len - len(tree)
        seen[max(first, 0) :] &= tree[query_position - first, max(-first, 0) :]
    return seen


def logits(
    query: F64,
    keys: F64,
    *,
    scale: float,
    soft_cap: float | None = None,
    alibi_slopes: F64 | None = None,
    distance: NDArray[Any] | None = None,
) -> F64:
    """The logit of each key for each query head.

        x = scale * (query . key)
        x = soft_cap * tanh(x / soft_cap)      with soft_cap
        x = x + slope * distance               with alibi_slopes; distance = place of key - place of query

    query `[num_kv_heads, group, Dk]`, keys `[num_kv_heads, num_keys, Dk]`, alibi_slopes
    `[num_kv_heads, group]`, distance `[num_keys]`
    -> `[num_kv_heads, group, num_keys]`; query head h is number h % group of KV head h // group.
    """
    x = scale * (query @ keys.swapaxes(1, 2))
    if soft_cap is not None:
        x = soft_cap * np.tanh(x / soft_cap)
    if alibi_slopes is not None and distance is not None:
        x = x + alibi_slopes[..., None] * distance
    return x


def attend(scores: F64, values: F64, sinks: F64 | None = None) -> tuple[F64, F64]:
    """The state of a set of keys: `out = sum_j exp(score_j - lse) value_j`, `lse = log sum_j exp(score_j)`.

    scores `[num_kv_heads, group, num_keys]`, values `[num_kv_heads, num_keys, Dv]`, sinks
    `[num_kv_heads, group]`: one more logit for the sum of the LSE, with a value of 0
    -> out `[num_kv_heads, group, Dv]`, lse `[num_kv_heads, group]`. No keys: 0, and -inf or the sink.
    """
    lse = np.logaddexp.reduce(scores, axis=2, initial=-np.inf)
    if sinks is not None:
        lse = np.logaddexp(lse, sinks)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - lse[..., None])
    return weights @ values, lse


def paged_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_seqlens_q: ArrayLike,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each sequence's last query tokens over its paged cache.

    query         `[num_tokens, num_q_heads, Dk]`
    key_cache     `[num_blocks, block_size, num_kv_heads, Dk]`, value_cache the same with `Dv`
    block_tables  `[num_seqs, max_blocks_per_seq]` int32
    seq_lens      `[num_seqs]` int32: tokens in the cache, those of the query included
    cu_seqlens_q  `[num_seqs + 1]` int32, from 0 upwards: rows `cu_seqlens_q[s] : cu_seqlens_q[s + 1]` of the
                  query belong to sequence s; rows from `cu_seqlens_q[num_seqs]` on are padding, see nothing
    scale         multiplies query . key; `Dk ** -0.5` unless given
    window        how many keys a query token sees at most, its own included (`visible`)
    soft_cap      bounds the logits (`logits`)
    alibi_slopes  `[num_q_heads]` (`logits`)
    sinks         `[num_q_heads]` (`attend`); padding has none
    tree_mask     `[num_tokens]` int64 (`tree_sight`), with causal only
    k_scale       what key_cache is multiplied by when it is quantised (`dequantise`), v_scale the same
    -> out `[num_tokens, num_q_heads, Dv]`, and with `return_lse` also lse `[num_tokens, num_q_heads]`

    The query tokens of a sequence are its last ones: token t of q_len sits at position `seq_len - q_len + t`,
    and when causal it sees the keys at positions up to its own. A token at a negative position
    (q_len > seq_len) sees nothing. When not causal every query token sees all `seq_len` keys.
    """
    query, cu_seqlens_q = _float64(query), np.asarray(cu_seqlens_q)
    key_cache, value_cache = dequantise(plain(key_cache), k_scale), dequantise(plain(value_cache), v_scale)
    block_tables, seq_lens = np.asarray(block_tables), np.asarray(seq_lens)
    num_tokens, num_q_heads, key_head_dim = query.shape
    num_kv_heads, value_head_dim = value_cache.shape[2:]
    group = num_q_heads // num_kv_heads
    if scale is None:
        scale = key_head_dim**-0.5

    def by_head(numbers: ArrayLike | None) -> F64 | None:
        return None if numbers is None else _float64(numbers).reshape(num_kv_heads, group)

    query = query.reshape(num_tokens, num_kv_heads, group, key_head_dim)
    out = np.zeros((num_tokens, num_kv_heads, group, value_head_dim))
    lse = np.full((num_tokens, num_kv_heads, group), -np.inf)
    for seq, seq_len in enumerate(seq_lens):
        keys = sequence_tokens(key_cache, block_tables[seq], seq_len).swapaxes(0, 1)
        values = sequence_tokens(value_cache, block_tables[seq], seq_len).swapaxes(0, 1)
        begin, end = cu_seqlens_q[seq], cu_seqlens_q[seq + 1]
        tree = None if tree_mask is None else tree_sight(np.asarray(tree_mask)[begin:end])
        place = places(seq_len, tree)
        for row in range(begin, end):
            query_position = seq_len - end + row
            seen = visible(seq_len, query_position, causal=causal, window=window, tree=tree)
            distance = place[seen] - (place[query_position] if query_position >= 0 else query_position)
            scores = logits(
                query[row],
                keys[:, seen],
                scale=scale,
                soft_cap=soft_cap,
                alibi_slopes=by_head(alibi_slopes),
                distance=distance,
            )
            out[row], lse[row] = attend(scores, values[:, seen], by_head(sinks))
    out = out.reshape(num_tokens, num_q_heads, value_head_dim)
    lse = lse.reshape(num_tokens, num_q_heads)
    return (out, lse) if return_lse else out


def paged_attention_decode(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query token per sequence: `paged_attention` with every q_len 1.

    query `[num_seqs, num_q_heads, Dk]`; the other arguments and the results as in `paged_attention`.
    """
    ones = np.arange(len(np.asarray(seq_lens)) + 1)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        ones,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )


def merge_attention_states(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[F64, F64]:
    """The state of the union of two disjoint sets of keys, from the state of each.

    out_a, out_b `[num_tokens, num_heads, head_dim]`, lse_a, lse_b `[num_tokens, num_heads]` -> out, lse alike

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    A state with `lse = -inf` is the identity: its `out` is not looked at. Two of them give 0 and -inf. The
    result may be written over either input.
    """
    out_a, lse_a, out_b, lse_b = _float64(out_a), _float64(lse_a), _float64(out_b), _float64(lse_b)
    lse = np.logaddexp(lse_a, lse_b)

    def share(out: F64, own_lse: F64) -> F64:
        empty = np.isneginf(own_lse)
        weight = np.exp(own_lse - np.where(empty, 0.0, lse))
        return np.where(empty[..., None], 0.0, weight[..., None] * out)

    return share(out_a, lse_a) + share(out_b, lse_b), lse


# --- the cache: write, copy, swap, gather ---------------------------------------------------------------


def write_kv_cache(
    key: ArrayLike,
    value: ArrayLike,
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    slot_mapping: ArrayLike,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Stores token t's key and value at slot `slot_mapping[t]` of the caches, in place.

    key `[>= num_tokens, num_kv_heads, Dk]`, value the same with `Dv`, slot_mapping `[num_tokens]` int64. A
    negative slot is skipped; `slot_mapping` alone says how many tokens there are, so key and value may be
    padded. Slots of one call are distinct (of two equal ones, which token stays is not defined). Nothing else
    is touched.

    Quantised caches have scales (`dequantise`), and rows are stored as `quantise` says; scales of the forms
    `[num_blocks, block_size, num_kv_heads]` and, of int4, `[num_blocks, block_size, num_kv_heads,
    num_groups]` are written too, as `scale_of` says.
    """
    key, value, slot_mapping = np.asarray(key), np.asarray(value), np.asarray(slot_mapping)
    num_blocks, block_size = key_cache.shape[:2]
    _require_below("slot_mapping", slot_mapping, num_blocks * block_size)
    kept = slot_mapping >= 0
    places = np.divmod(slot_mapping[kept].astype(np.int64), block_size)
    for cache, rows, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        rows = rows[: len(kept)][kept]
        if scale is not None and np.ndim(scale) >= 3:
            groups = in_groups(rows, scale.shape[3]) if scale.ndim == 4 else rows
            scale[places] = scale_of(groups, cache.dtype)
            rows = quantise(rows, scale[places], cache.dtype)
        elif scale is not None:
            rows = quantise(rows, np.broadcast_to(scale, rows.shape[:2]), cache.dtype)
        cache[places] = rows.reshape(len(rows), *cache.shape[2:])


def copy_blocks(caches: NDArray[Any] | Sequence[NDArray[Any]], block_pairs: ArrayLike) -> None:
    """For each pair (source, destination), in every cache: block destination becomes a copy of block source.

    caches: one tensor or a list of them, dimension 0 = block; block_pairs `[num_pairs, 2]` int64. The pairs
    have no order: destinations differ, and no block is both a source and a destination, but that a pair of a
    block with itself does nothing.
    """
    pairs = np.asarray(block_pairs)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    sources, destinations = pairs[:, 0], pairs[:, 1]
    if len(np.unique(destinations)) != len(pairs) or np.intersect1d(sources, destinations).size:
        raise ValueError("block_pairs: a block is a destination twice, or both a source and a destination")
    for cache in [caches] if isinstance(caches, np.ndarray) else caches:
        _require_index("block_pairs", pairs, len(cache))
        for source, destination in pairs:
            cache[destination] = cache[source]


def swap_blocks(source: NDArray[Any], destination: NDArray[Any], block_pairs: ArrayLike) -> None:
    """For each pair (s, d): block d of the pool `destination` becomes a copy of block s of the pool `source`.

    source, destination `[num_blocks, ...]`, alike but for num_blocks and strides, not overlapping, on any
    devices; block_pairs `[num_pairs, 2]` int64 in host memory, destinations differ.
    """
    pairs = np.asarray(block_pairs)
    if len(np.unique(pairs[:, 1])) != len(pairs):
        raise ValueError("block_pairs: a block is a destination twice")
    _require_index("block_pairs", pairs[:, 0], len(source))
    _require_index("block_pairs", pairs[:, 1], len(destination))
    for s, d in pairs:
        destination[d] = source[s]


def gather_kv_cache(
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    num_tokens: int | None = None,
) -> tuple[F64, F64, NDArray[np.int32]]:
    """The tokens of each sequence out of the paged caches, one after the other.

    -> key `[num_rows, num_kv_heads, Dk]`, value alike with `Dv`, cu_seqlens `[num_seqs + 1]` int32: token t
    of sequence s is row `cu_seqlens[s] + t`. `num_tokens` fixes num_rows (>= the sum of seq_lens); rows past
    the last token are zero. With scales a quantised cache's numbers times these (`dequantise`) come out.
    """
    key_cache, value_cache = dequantise(plain(key_cache), k_scale), dequantise(plain(value_cache), v_scale)
    block_tables, seq_lens = np.asarray(block_tables), np.asarray(seq_lens)
    cu_seqlens = np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32)
    num_rows = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
    key = np.zeros((num_rows, *key_cache.shape[2:]))
    value = np.zeros((num_rows, *value_cache.shape[2:]))
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(cu_seqlens[seq], cu_seqlens[seq + 1])
        key[rows] = sequence_tokens(key_cache, block_tables[seq], seq_len)
        value[rows] = sequence_tokens(value_cache, block_tables[seq], seq_len)
    return key, value, cu_seqlens


@dataclass(frozen=True)
class KVPool:
    """The keys and values of all layers, block-major: all of a block's bytes are contiguous.

    tensor  `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` for layout "NHD",
            `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` for layout "HND"
    """

    tensor: NDArray[Any]
    layout: Literal["NHD", "HND"]

    def key(self, layer: int) -> NDArray[Any]:
        """A layer's key cache: a view `[num_blocks, block_size, num_kv_heads, head_dim]` in any layout."""
        return self._cache(layer, 0)

    def value(self, layer: int) -> NDArray[Any]:
        """A layer's value cache, shaped as its key cache."""
        return self._cache(layer, 1)

    def _cache(self, layer: int, which: int) -> NDArray[Any]:
        cache = self.tensor[:, layer, which]
        return cache if self.layout == "NHD" else cache.swapaxes(1, 2)


def allocate_kv_pool(
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: Any = np.float32,
    layout: Literal["NHD", "HND"] = "NHD",
) -> KVPool:
    """A pool of zeros for `num_layers` layers; any extent at least 1."""
    inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    return KVPool(np.zeros((num_blocks, num_layers, 2, *inner, head_dim), dtype), layout)


# --- attention over a prefix that sequences share -------------------------------------------------------


def paged_attention_shared_prefix(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    shared_block_table: ArrayLike,
    shared_len: int,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_seqlens_q: ArrayLike | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
) -> Any:
    """Causal attention of sequences whose first `shared_len` tokens lie in the same blocks.

    shared_block_table `[>= shared_len / block_size]` int32; shared_len a multiple of block_size; block_tables
    and seq_lens as in `paged_attention`, the shared blocks and tokens included; cu_seqlens_q None is decode.

        attention(block_tables with the shared blocks in their first columns, seq_lens)

    which equals the merge of the states over the shared keys and over the rest; the sinks count once.
    """
    num_shared, rest = divmod(shared_len, np.asarray(key_cache).shape[1])
    if rest or shared_len < 0:
        raise ValueError(f"shared_len: got {shared_len}, wanted a multiple of the block size")
    tables = np.array(block_tables)
    tables[:, :num_shared] = np.asarray(shared_block_table)[:num_shared]
    if cu_seqlens_q is None:
        cu_seqlens_q = np.arange(len(tables) + 1)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        tables,
        seq_lens,
        cu_seqlens_q,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )


# --- rotary position embedding --------------------------------------------------------------------------


def rope(
    rows: ArrayLike, positions: ArrayLike, cos_sin_cache: ArrayLike, *, interleaved: bool = False
) -> F64:
    """Each token's rows turned by its position (Su et al. 2021, arXiv:2104.09864).

    rows `[num_tokens, num_heads, head_dim]`, positions `[num_tokens]`, cos_sin_cache `[max_position,
    rotary_dim]`: the cosines of rotary_dim / 2 pairs, then their sines -> float64, as rows

        x' = x cos - y sin
        y' = y cos + x sin

    for the pairs (x, y) at (i, i + rotary_dim / 2), or at (2 i, 2 i + 1) when interleaved; elements from
    rotary_dim on stay.
    """
    turned, table, positions = _float64(rows), _float64(cos_sin_cache), np.asarray(positions)
    _require_index("positions", positions, len(table))
    rotary_dim = table.shape[1]
    cos, sin = np.split(table[positions][:, None, :], 2, axis=2)
    first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    x, y = turned[..., first].copy(), turned[..., second].copy()
    turned[..., first], turned[..., second] = x * cos - y * sin, y * cos + x * sin
    return turned


def rope_and_write_kv_cache(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    slot_mapping: ArrayLike,
    positions: ArrayLike,
    cos_sin_cache: ArrayLike,
    *,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
) -> F64:
    """`rope` of query and key; the key, rounded to its dtype, and the value then go to `write_kv_cache`.

    query `[num_tokens, num_q_heads, Dk]`, key, value, slot_mapping and scales as there -> the rotated query
    """
    turned = rope(key, positions, cos_sin_cache, interleaved=interleaved).astype(np.asarray(key).dtype)
    write_kv_cache(turned, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return rope(query, positions, cos_sin_cache, interleaved=interleaved)


# --- blocks moved about a pool, out of it and into it ---------------------------------------------------


def move_blocks(caches: NDArray[Any] | Sequence[NDArray[Any]], block_pairs: ArrayLike) -> None:
    """For each pair (source, destination): block destination becomes what block source was before the call.

    caches as in `copy_blocks`; block_pairs `[num_pairs, 2]` int64, destinations differ, anything else goes;
    or a permutation `[num_blocks]`, where each block goes.
    """
    pairs = np.asarray(block_pairs)
    if pairs.ndim == 1:
        pairs = np.stack([np.arange(len(pairs)), pairs], axis=1)
    if len(np.unique(pairs[:, 1])) != len(pairs):
        raise ValueError("block_pairs: a block is a destination twice")
    for cache in [caches] if isinstance(caches, np.ndarray) else caches:
        _require_index("block_pairs", pairs, len(cache))
        cache[pairs[:, 1]] = cache[pairs[:, 0]].copy()


def export_blocks(caches: NDArray[Any] | Sequence[NDArray[Any]], block_ids: ArrayLike) -> NDArray[Any]:
    """Blocks of all caches in one array of their dtype: `[num_ids, num_caches, ...block shape]`."""
    ids, listed = np.asarray(block_ids), [caches] if isinstance(caches, np.ndarray) else caches
    _require_index("block_ids", ids, len(listed[0]))
    return np.stack([cache[ids] for cache in listed], axis=1)


def import_blocks(
    packed: NDArray[Any], caches: NDArray[Any] | Sequence[NDArray[Any]], block_ids: ArrayLike
) -> None:
    """Block `block_ids[i]` of cache c becomes `packed[i, c]`; the ids differ."""
    ids, listed = np.asarray(block_ids), [caches] if isinstance(caches, np.ndarray) else caches
    _require_index("block_ids", ids, len(listed[0]))
    for c, cache in enumerate(listed):
        cache[ids] = packed[:, c]


# --- shared ---------------------------------------------------------------------------------------------


def plain(cache: ArrayLike) -> NDArray[Any]:
    """The cache as `[num_blocks, block_size, num_kv_heads, head_dim]`; of `[..., head_dim / x, x]` a copy.

    Dim d is element d % x of pack d // x.
    """
    cache = np.asarray(cache)
    return cache if cache.ndim == 4 else cache.reshape(*cache.shape[:3], cache.shape[3] * cache.shape[4])


def sequence_tokens(cache: NDArray[Any], table: NDArray[Any], seq_len: int) -> F64:
    """The tokens of one sequence in order, float64 `[seq_len, num_kv_heads, head_dim]`: the page walk.

    cache `[num_blocks, block_size, num_kv_heads, head_dim]`, table `[max_blocks_per_seq]`. The only reader of
    a block table, and of as much of it as the sequence's length calls for.
    """
    num_blocks, block_size = cache.shape[:2]
    if not 0 <= seq_len <= len(table) * block_size:
        raise ValueError(f"seq_lens: got {seq_len}, wanted 0 .. {len(table) * block_size}")
    used = table[: -(-seq_len // block_size)]
    _require_index("block_tables", used, num_blocks)
    return _float64(cache[used].reshape(-1, *cache.shape[2:])[:seq_len])


def _float64(array: ArrayLike) -> F64:
    return np.asarray(array).astype(np.float64)


def _require_below(name: str, values: NDArray[Any], limit: int) -> None:
    if (values >= limit).any():
        raise ValueError(f"{name}: got {values.max()}, wanted below {limit}")


def _require_index(name: str, values: NDArray[Any], limit: int) -> None:
    if (values < 0).any():
        raise ValueError(f"{name}: got {values.min()}, wanted 0 .. {limit - 1}")
    _require_below(name, values, limit)
