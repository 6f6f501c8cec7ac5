"""The cache ops and the merge done wrong: the checks must complain about each fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class OpMutation:
    """One fault of one op."""

    name: str
    op: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __str__(self) -> str:
        return self.name

    def __call__(self, ops: Any) -> Any:
        """`ops` with this op at fault."""
        return _Faulty(ops, self)


class _Faulty:
    def __init__(self, ops: Any, mutation: OpMutation) -> None:
        self._ops, self._mutation = ops, mutation

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        return self._mutation.wrap(op) if name == self._mutation.op else op


OP_MUTATIONS: list[OpMutation] = []


def _mutation(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function (true op, *its arguments) -> result under its name."""

    def register(faulty: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(true_op: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **options: faulty(true_op, *args, **options)

        OP_MUTATIONS.append(OpMutation(faulty.__name__, op, wrap))
        return faulty

    return register


# --- write_kv_cache ---------------------------------------------------------------------------------------


@_mutation("write_kv_cache")
def writes_one_slot_further(
    write: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any
) -> None:
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    write(key, value, key_cache, value_cache, np.where(slots >= 0, (slots + 1) % num_slots, slots))


@_mutation("write_kv_cache")
def writes_skipped_tokens_to_slot_0(
    write: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any
) -> None:
    write(key, value, key_cache, value_cache, np.maximum(slots, 0)[:1])
    write(key, value, key_cache, value_cache, slots)


@_mutation("write_kv_cache")
def writes_all_but_the_last(
    write: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any
) -> None:
    last = np.flatnonzero(slots >= 0)[-1]
    write(key, value, key_cache, value_cache, slots[:last])


@_mutation("write_kv_cache")
def writes_heads_rotated(
    write: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any
) -> None:
    write(np.roll(key, 1, axis=1), np.roll(value, 1, axis=1), key_cache, value_cache, slots)


@_mutation("write_kv_cache")
def writes_padding(write: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    """One row too many, to a slot that nobody asked for."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    unused = np.setdiff1d(np.arange(num_slots), slots)[:1]
    write(key, value, key_cache, value_cache, np.concatenate([slots, unused]))


@_mutation("write_kv_cache")
def forgets_values(write: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    write(key, value, key_cache, value_cache.copy(), slots)


# --- copy_blocks, swap_blocks -----------------------------------------------------------------------------


@_mutation("copy_blocks")
def copies_backwards(copy: Any, caches: Any, pairs: Any) -> None:
    for source, destination in pairs:
        copy(caches, np.array([[destination, source]], np.int64))


@_mutation("copy_blocks")
def copies_first_cache_only(copy: Any, caches: Any, pairs: Any) -> None:
    if len(caches) > 1:
        copy(caches[:1], pairs)


@_mutation("copy_blocks")
def copies_all_pairs_but_one(copy: Any, caches: Any, pairs: Any) -> None:
    copy(caches, pairs[1:])


@_mutation("copy_blocks")
def copies_part_of_a_block(copy: Any, caches: Any, pairs: Any) -> None:
    copy([cache[:, :, :, :-8] for cache in caches], pairs)


@_mutation("copy_blocks")
def copies_the_next_block(copy: Any, caches: Any, pairs: Any) -> None:
    for source, destination in pairs:
        copy(caches, np.array([[(source + 1) % len(caches[0]), destination]], np.int64))


@_mutation("swap_blocks")
def swaps_into_the_next_block(swap: Any, source: Any, destination: Any, pairs: Any) -> None:
    swap(source, destination, np.stack([pairs[:, 0], (pairs[:, 1] + 1) % len(destination)], axis=1))


@_mutation("swap_blocks")
def swaps_all_pairs_but_the_last(swap: Any, source: Any, destination: Any, pairs: Any) -> None:
    swap(source, destination, pairs[:-1])


@_mutation("swap_blocks")
def swaps_part_of_a_block(swap: Any, source: Any, destination: Any, pairs: Any) -> None:
    swap(source[..., 8:], destination[..., 8:], pairs)


# --- gather_kv_cache --------------------------------------------------------------------------------------


@_mutation("gather_kv_cache")
def gathers_one_token_off(gather: Any, *tensors: Any, **options: Any) -> Any:
    key, value, cu_seqlens = gather(*tensors, **options)
    return np.roll(key, 1, axis=0), np.roll(value, 1, axis=0), cu_seqlens


@_mutation("gather_kv_cache")
def gathers_heads_rotated(gather: Any, *tensors: Any, **options: Any) -> Any:
    key, value, cu_seqlens = gather(*tensors, **options)
    return np.roll(key, 1, axis=1), value, cu_seqlens


@_mutation("gather_kv_cache")
def leaves_spare_rows_unwritten(gather: Any, *tensors: Any, **options: Any) -> Any:
    key, value, cu_seqlens = gather(*tensors, **options)
    key = np.copy(key)
    key[cu_seqlens[-1] :] = np.nan
    return key, value, cu_seqlens


@_mutation("gather_kv_cache")
def counts_without_the_last_sequence(gather: Any, *tensors: Any, **options: Any) -> Any:
    key, value, cu_seqlens = gather(*tensors, **options)
    return key, value, np.append(cu_seqlens[:-1], cu_seqlens[-2])


# --- merge_attention_states -------------------------------------------------------------------------------


@_mutation("merge_attention_states")
def averages_states(merge: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, **options: Any) -> Any:
    out, lse = merge(out_a, lse_a, out_b, lse_b, **options)
    return ((out_a.astype(np.float32) + out_b) / 2).astype(out.dtype), lse


@_mutation("merge_attention_states")
def takes_lse_as_base_2(merge: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, **options: Any) -> Any:
    ln2 = np.float32(np.log(2))
    out, lse = merge(out_a, lse_a * ln2, out_b, lse_b * ln2, **options)
    return out, lse / ln2


@_mutation("merge_attention_states")
def keeps_the_larger_state(merge: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, **options: Any) -> Any:
    _, lse = merge(out_a, lse_a, out_b, lse_b, **options)
    return np.where((lse_a >= lse_b)[..., None], out_a, out_b), lse


@_mutation("merge_attention_states")
def gives_nan_for_two_empty_states(merge: Any, *states: Any, **options: Any) -> Any:
    out, lse = merge(*states, **options)
    return np.where(np.isneginf(lse)[..., None], np.nan, out), lse


@_mutation("merge_attention_states")
def looks_at_empty_states(merge: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, **options: Any) -> Any:
    """Weighs the output of an empty state with 0 instead of leaving it out: 0 * NaN."""
    out, lse = merge(out_a, lse_a, out_b, lse_b, **options)
    return out + (0 * out_a.astype(np.float32)).astype(out.dtype), lse


# --- rope_and_write_kv_cache ------------------------------------------------------------------------------


@_mutation("rope_and_write_kv_cache")
def pairs_the_other_elements(rope: Any, *arguments: Any, interleaved: bool, query_out: Any) -> Any:
    return rope(*arguments, interleaved=not interleaved, query_out=query_out)


@_mutation("rope_and_write_kv_cache")
def turns_the_other_way(rope: Any, *arguments: Any, **options: Any) -> Any:
    *others, table = arguments
    signs = np.repeat([1, -1], table.shape[1] // 2).astype(table.dtype)
    return rope(*others, table * signs, **options)


@_mutation("rope_and_write_kv_cache")
def turns_by_the_next_position(rope: Any, *arguments: Any, **options: Any) -> Any:
    *others, positions, table = arguments
    return rope(*others, (positions + 1) % len(table), table, **options)


@_mutation("rope_and_write_kv_cache")
def leaves_the_keys_as_they_are(
    rope: Any, query: Any, key: Any, value: Any, key_cache: Any, *rest: Any, **options: Any
) -> Any:
    out = rope(query, key, value, key_cache, *rest, **options)
    slots, block_size = rest[1], key_cache.shape[1]
    written = np.flatnonzero(slots >= 0)
    key_cache[slots[written] // block_size, slots[written] % block_size] = key[written]
    return out
