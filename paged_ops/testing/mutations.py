"""Attention done wrong in every way that a kernel is likely to: the checks must complain about each one.

A mutation wraps attention, a function from (numpy) `Inputs` to `(out, lse)`, so that it has one particular
fault. It `applies` to a case when the fault shows there by definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_ops.testing.cases import CHUNK_TOKENS, Case, Inputs, one_sequence_per_token

Array = NDArray[Any]
Result = tuple[Array, Array]
Attention = Callable[[Inputs], Result]


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    name: str
    wrap: Callable[[Attention, Inputs], Result]
    applies: Callable[[Case], bool]

    def __str__(self) -> str:
        return self.name

    def __call__(self, attention: Attention) -> Attention:
        return lambda inputs: self.wrap(attention, inputs)


ATTENTION_MUTATIONS: list[Mutation] = []


def _mutation(applies: Callable[[Case], bool] = lambda case: True) -> Callable[..., Any]:
    """Registers a function (attention, inputs) -> result under its name."""

    def register(wrap: Callable[[Attention, Inputs], Result]) -> Callable[[Attention, Inputs], Result]:
        ATTENTION_MUTATIONS.append(Mutation(wrap.__name__, wrap, applies))
        return wrap

    return register


def _is_decode(case: Case) -> bool:
    return case.q_lens is None


def _is_causal_chunk(case: Case) -> bool:
    """Several query tokens, each with a full context before it."""
    return case.q_lens is not None and case.causal and any(q > 1 for q in case.q_lens)


def _contexts(case: Case) -> list[int]:
    """Tokens before each sequence's first query token."""
    return [seq_len - q_len for seq_len, q_len in zip(case.seq_lens, case.query_lens, strict=True)]


def _has_context(case: Case) -> bool:
    return max(_contexts(case)) > 0


def _full_blocks(case: Case) -> list[tuple[int, int]]:
    """(sequence, index) of each block that is full and wholly before the sequence's first query token."""
    return [
        (seq, index)
        for seq, context in enumerate(_contexts(case))
        for index in range(context // case.block_size)
    ]


# --- tokens ---------------------------------------------------------------------------------------------


@_mutation(lambda case: _has_context(case) and case.window is None)
def drops_first_token(attention: Attention, inputs: Inputs) -> Result:
    return attention(_without_token(inputs, 0))


@_mutation(_has_context)
def drops_last_context_token(attention: Attention, inputs: Inputs) -> Result:
    return attention(_without_token(inputs, -1))


@_mutation(lambda case: max(_contexts(case)) > CHUNK_TOKENS and case.window is None)
def drops_first_token_of_second_chunk(attention: Attention, inputs: Inputs) -> Result:
    return attention(_without_token(inputs, CHUNK_TOKENS))


@_mutation(lambda case: any(case.seq_lens))
def takes_length_one_less(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, seq_lens=np.maximum(inputs.seq_lens - 1, 0)))


@_mutation(lambda case: _is_decode(case) and any(n % case.block_size for n in case.seq_lens))
def takes_length_one_more(attention: Attention, inputs: Inputs) -> Result:
    """The token past the end is an ordinary one, not poison."""

    def repeat_last(keys: Array, values: Array, q_len: int) -> tuple[Array, Array]:
        if len(keys) % inputs.case.block_size == 0:
            return keys, values
        return keys[[*range(len(keys)), -1]], values[[*range(len(keys)), -1]]

    return attention(_with_sequences(inputs, repeat_last))


# --- blocks ---------------------------------------------------------------------------------------------


@_mutation(lambda case: len({seq for seq, _ in _full_blocks(case)}) > 1)
def swaps_blocks_of_two_sequences(attention: Attention, inputs: Inputs) -> Result:
    places = {seq: (seq, index) for seq, index in _full_blocks(inputs.case)}
    a, b, *_ = places.values()
    tables = inputs.block_tables.copy()
    tables[a], tables[b] = inputs.block_tables[b], inputs.block_tables[a]
    return attention(replace(inputs, block_tables=tables))


@_mutation(lambda case: len({seq for seq, _ in _full_blocks(case)}) > 1)
def reads_stale_block(attention: Attention, inputs: Inputs) -> Result:
    (first, *_), (*_, last) = _full_blocks(inputs.case), _full_blocks(inputs.case)
    tables = inputs.block_tables.copy()
    tables[last] = tables[first]
    return attention(replace(inputs, block_tables=tables))


@_mutation(lambda case: any(index >= 1 for _, index in _full_blocks(case)))
def swaps_two_blocks_of_keys_only(attention: Attention, inputs: Inputs) -> Result:
    seq, index = max(_full_blocks(inputs.case), key=lambda place: place[1])
    ids = inputs.block_tables[seq, [0, index]]
    key_cache = inputs.key_cache.copy()
    key_cache[ids] = key_cache[ids[::-1]]
    return attention(replace(inputs, key_cache=key_cache))


@_mutation(lambda case: case.block_size > 1 and bool(_full_blocks(case)))
def reverses_values_in_blocks(attention: Attention, inputs: Inputs) -> Result:
    ids = [inputs.block_tables[place] for place in _full_blocks(inputs.case)]
    value_cache = inputs.value_cache.copy()
    value_cache[ids] = value_cache[ids][:, ::-1]
    return attention(replace(inputs, value_cache=value_cache))


@_mutation(lambda case: case.head_dim == case.dim_value and any(n > 1 for n in case.seq_lens))
def reads_keys_as_values(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, value_cache=inputs.key_cache))


# --- heads ----------------------------------------------------------------------------------------------


@_mutation()
def skips_last_head(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return _edited(out, np.s_[:, -1], 0), lse


@_mutation(lambda case: case.num_q_heads > 1)
def repeats_a_head(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return _edited(out, np.s_[:, -1], out[:, -2]), lse


@_mutation(lambda case: case.num_kv_heads > 1 and case.group > 1)
def interleaves_groups(attention: Attention, inputs: Inputs) -> Result:
    """Query head h reads KV head h % num_kv_heads."""
    case = inputs.case
    order = np.arange(case.num_q_heads).reshape(case.group, case.num_kv_heads).T.ravel()
    out, lse = attention(replace(inputs, query=inputs.query[:, order]))
    back = np.argsort(order)
    return out[:, back], lse[:, back]


@_mutation(lambda case: case.num_kv_heads > 1)
def reads_first_kv_head_only(attention: Attention, inputs: Inputs) -> Result:
    first = [0] * inputs.case.num_kv_heads
    return attention(
        replace(inputs, key_cache=inputs.key_cache[:, :, first], value_cache=inputs.value_cache[:, :, first])
    )


@_mutation(lambda case: any(n > 1 for n in case.seq_lens))
def ignores_last_dims_of_keys(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, query=_edited(inputs.query, np.s_[..., -8:], 0)))


@_mutation()
def leaves_out_last_dims_of_values(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return _edited(out, np.s_[..., -8:], 0), lse


# --- masks and positions --------------------------------------------------------------------------------


@_mutation(_is_causal_chunk)
def sees_one_token_more(attention: Attention, inputs: Inputs) -> Result:
    return _token_by_token(attention, inputs, lambda position, start: position + 1)


@_mutation(_is_causal_chunk)
def sees_one_token_fewer(attention: Attention, inputs: Inputs) -> Result:
    return _token_by_token(attention, inputs, lambda position, start: position - 1)


@_mutation(lambda case: _is_causal_chunk(case) and _has_context(case))
def counts_positions_from_the_chunk(attention: Attention, inputs: Inputs) -> Result:
    """A causal mask aligned to the top left instead of the bottom right."""
    return _token_by_token(attention, inputs, lambda position, start: position - start)


@_mutation(lambda case: _is_causal_chunk(case) and not case.tree)
def ignores_causality(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, case=replace(inputs.case, causal=False)))


@_mutation(lambda case: case.q_lens is not None and not case.causal and any(q > 1 for q in case.q_lens))
def is_causal_unasked(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, case=replace(inputs.case, causal=True)))


# --- numbers --------------------------------------------------------------------------------------------


@_mutation()
def returns_zeros(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return np.zeros_like(out), lse


@_mutation(lambda case: case.scale is not None and any(n > 1 for n in case.seq_lens))
def ignores_scale(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, case=replace(inputs.case, scale=None)))


@_mutation(lambda case: any(case.seq_lens))
def gives_lse_to_base_2(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return out, lse / np.log(2.0)


@_mutation(lambda case: _is_decode(case) and any(n > 2 for n in case.seq_lens))
def averages_parts_without_their_weights(attention: Attention, inputs: Inputs) -> Result:
    half = lambda array: len(array) // 2  # noqa: E731
    first, lse = attention(_with_sequences(inputs, lambda k, v, q: (k[: half(k)], v[: half(v)])))
    second, _ = attention(_with_sequences(inputs, lambda k, v, q: (k[half(k) :], v[half(v) :])))
    return (first + second) / 2, lse


@_mutation(lambda case: case.dtype == "float32" and any(n > 1 for n in case.seq_lens))
def multiplies_in_tf32(attention: Attention, inputs: Inputs) -> Result:
    """Keys and queries lose all but 10 bits of their fractions, as in a tensor core's TF32 mode."""
    cut = lambda array: (array.copy().view(np.uint32) & 0xFFFFE000).view(np.float32)  # noqa: E731
    return attention(replace(inputs, query=cut(inputs.query), key_cache=cut(inputs.key_cache)))


# --- rules ----------------------------------------------------------------------------------------------


def _with_window(inputs: Inputs, change: int) -> Inputs:
    assert inputs.case.window is not None
    return replace(inputs, case=replace(inputs.case, window=inputs.case.window + change))


def _window_hides(case: Case) -> bool:
    return case.window is not None and any(seq_len > case.window for seq_len in case.seq_lens)


@_mutation(_window_hides)
def widens_window_by_one(attention: Attention, inputs: Inputs) -> Result:
    return attention(_with_window(inputs, 1))


@_mutation(_window_hides)
def narrows_window_by_one(attention: Attention, inputs: Inputs) -> Result:
    return attention(_with_window(inputs, -1))


@_mutation(lambda case: case.soft_cap is not None)
def ignores_soft_cap(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, case=replace(inputs.case, soft_cap=None)))


@_mutation(lambda case: case.alibi)
def turns_alibi_round(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, alibi_slopes=-inputs.alibi_slopes))


@_mutation(lambda case: case.alibi and case.num_q_heads > 1)
def gives_all_heads_one_slope(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, alibi_slopes=np.full_like(inputs.alibi_slopes, inputs.alibi_slopes[0])))


@_mutation(lambda case: case.sinks)
def drops_sinks(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, sinks=None))


@_mutation(lambda case: case.sinks and case.num_q_heads > 1)
def shifts_sinks_by_one_head(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, sinks=np.roll(inputs.sinks, 1)))


@_mutation(lambda case: case.tree)
def ignores_tree(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, tree_mask=None))


@_mutation(lambda case: case.tree)
def shifts_tree_by_one_bit(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, tree_mask=inputs.tree_mask >> 1))


@_mutation(lambda case: case.tree and len(case.seq_lens) > 1)
def takes_trees_of_neighbours(attention: Attention, inputs: Inputs) -> Result:
    return attention(replace(inputs, tree_mask=np.roll(inputs.tree_mask, 1)))


# --- rows -----------------------------------------------------------------------------------------------


@_mutation(lambda case: len(set(case.seq_lens)) > 1)
def shifts_rows_by_one(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return np.roll(out, 1, axis=0), np.roll(lse, 1, axis=0)


@_mutation(lambda case: 0 in case.seq_lens or case.padding > 0)
def leaves_empty_rows_unwritten(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return np.where(np.isneginf(lse)[..., None], np.nan, out), lse


@_mutation(lambda case: 0 in case.seq_lens or case.padding > 0)
def gives_empty_rows_a_finite_lse(attention: Attention, inputs: Inputs) -> Result:
    out, lse = attention(inputs)
    return out, np.where(np.isneginf(lse), -1e30, lse)


# --- tools ----------------------------------------------------------------------------------------------


def _edited(array: Array, index: Any, value: Any) -> Array:
    array = array.copy()
    array[index] = value
    return array


def _with_sequences(inputs: Inputs, edit: Callable[[Array, Array, int], tuple[Array, Array]]) -> Inputs:
    """Every sequence's keys and values `[seq_len, num_kv_heads, dim]` replaced by what `edit` makes of them.

    edit(keys, values, q_len) may change the length as long as the blocks suffice.
    """
    key_cache, value_cache = inputs.key_cache.copy(), inputs.value_cache.copy()
    seq_lens = inputs.seq_lens.copy()
    block_size = inputs.case.block_size
    for seq, (seq_len, q_len) in enumerate(zip(inputs.seq_lens, inputs.case.query_lens, strict=True)):
        old = np.arange(seq_len)
        old_place = inputs.block_tables[seq, old // block_size], old % block_size
        keys, values = edit(inputs.key_cache[old_place], inputs.value_cache[old_place], q_len)
        new = np.arange(len(keys))
        new_place = inputs.block_tables[seq, new // block_size], new % block_size
        key_cache[new_place], value_cache[new_place], seq_lens[seq] = keys, values, len(keys)
    return replace(inputs, key_cache=key_cache, value_cache=value_cache, seq_lens=seq_lens)


def _without_token(inputs: Inputs, position: int) -> Inputs:
    """Every sequence without one token of its context, counted from the end of the context when negative."""

    def delete(keys: Array, values: Array, q_len: int) -> tuple[Array, Array]:
        context = len(keys) - q_len
        index = position if position >= 0 else context + position
        if not 0 <= index < context:
            return keys, values
        return np.delete(keys, index, axis=0), np.delete(values, index, axis=0)

    return _with_sequences(inputs, delete)


def _token_by_token(attention: Attention, inputs: Inputs, mistake: Callable[[Array, Array], Array]) -> Result:
    """A causal varlen call as decode, with every token's last visible position mistaken.

    mistake(position, position of the sequence's first query token) -> position
    """
    tokens = one_sequence_per_token(inputs)
    lens = np.diff(inputs.cu_seqlens_q)
    seq_len = np.repeat(inputs.seq_lens, lens)
    start = np.repeat(inputs.seq_lens - lens, lens)
    position = mistake(tokens.seq_lens - 1, start)
    decode = replace(tokens, seq_lens=np.clip(position + 1, 0, seq_len).astype(np.int32))
    out, lse = attention(decode)
    padding = len(inputs.query) - len(out)
    return np.pad(out, ((0, padding), (0, 0), (0, 0))), np.pad(
        lse, ((0, padding), (0, 0)), constant_values=-np.inf
    )
