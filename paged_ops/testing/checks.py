"""One check per op: make inputs, run the op, compare with the oracle; an AssertionError says what differs.

`ops` is anything with the public ops' names that takes numpy arrays: `HostOps`, a mutation of it, the oracle
itself. Moved data is compared bit by bit, together with all memory around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.cases import LAYOUTS, Case, Inputs, build
from paged_ops.testing.tolerance import Expected, expected_attention, expected_merge, rope_bound

Array = NDArray[Any]


@functools.lru_cache(maxsize=256)
def expected(case: Case) -> Expected:
    """The oracle's result for a case, computed once for all targets."""
    return expected_attention(build(case))


def check_attention(attention: Callable[[Inputs], tuple[Array, Array]], case: Case) -> None:
    """attention: (numpy) Inputs -> (out, lse)."""
    expected(case).check(*attention(build(case)))


def merge_states(
    num_tokens: int, num_heads: int, head_dim: int, dtype: str, *, seed: int = 0
) -> tuple[Array, Array, Array, Array]:
    """Two states (out_a, lse_a, out_b, lse_b) whose LSEs lie close together, far apart, or at -inf.

    The output of an empty state is NaN, which must not show.
    """
    rng = np.random.default_rng(seed)
    shape = num_tokens, num_heads
    lse_a = (20 * rng.standard_normal(shape)).astype(np.float32)
    lse_b = (lse_a + rng.choice([0, 0.5, -3, 30, -200], shape)).astype(np.float32)
    lse_a[rng.random(shape) < 0.2] = -np.inf
    lse_b[rng.random(shape) < 0.2] = -np.inf
    out_a, out_b = (rng.standard_normal((*shape, head_dim)).astype(arrays.DTYPES[dtype]) for _ in range(2))
    out_a[np.isneginf(lse_a)] = np.nan
    out_b[np.isneginf(lse_b)] = np.nan
    return out_a, lse_a, out_b, lse_b


def check_merge(
    ops: Any, num_tokens: int, num_heads: int, head_dim: int, dtype: str, *, into: str = "new"
) -> None:
    """into: "new", "out", "a" or "b": where the result goes."""
    states = merge_states(num_tokens, num_heads, head_dim, dtype)
    wanted = expected_merge(*states, dtype)
    out_a, lse_a, out_b, lse_b = states
    given = {
        "new": (None, None),
        "out": (np.full_like(out_a, np.nan), np.full_like(lse_a, np.nan)),
        "a": (out_a, lse_a),
        "b": (out_b, lse_b),
    }
    out, lse = given[into]
    wanted.check(*ops.merge_attention_states(*states, out=out, lse=lse))
    if into != "new":
        wanted.check(out, lse)


def check_write(ops: Any, case: Case) -> None:
    """New keys and values into distinct slots in random order, some of them skipped, more rows than slots."""
    wanted, actual = build(case), build(case)
    key, value, slot_mapping = rows_to_write(case)
    for inputs, run in ((wanted, reference), (actual, ops)):
        scales = {} if case.cache_dtype is None else {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        run.write_kv_cache(key, value, inputs.key_cache, inputs.value_cache, slot_mapping, **scales)
    require_same_memory("key_cache", wanted.key_cache, actual.key_cache)
    require_same_memory("value_cache", wanted.value_cache, actual.value_cache)
    if case.scales == "token" or case.scale_groups:
        require_same_memory("k_scale", wanted.k_scale, actual.k_scale)
        require_same_memory("v_scale", wanted.v_scale, actual.v_scale)


def rows_to_write(case: Case) -> tuple[Array, Array, Array]:
    """key, value, slot_mapping for the caches of a case; 3 more rows than slots, strided if the case is."""
    rng = np.random.default_rng(case.seed + 1)
    num_blocks = len(build(case).key_cache)
    num_slots = num_blocks * case.block_size
    slots = rng.permutation(num_slots)[: min(num_slots, 40)].astype(np.int64)
    slots[rng.random(len(slots)) < 0.2] = -1
    slots[:1] = -(2**40)
    dtype = arrays.DTYPES[case.dtype]
    rows = len(slots) + 3
    shape = rows, case.num_kv_heads, case.head_dim + case.dim_value
    both = rng.standard_normal(shape).astype(dtype)
    if case.cache_dtype is not None:  # what does not fit, what is none, and what nearly vanishes
        odd = [np.inf, -np.inf, np.nan, -np.nan, 6e4, -6e4, 0.0, -0.0, 1e-7, 1.7e-2, -3e-3]
        places = rng.integers(0, both.size, both.size // 8)
        both.reshape(-1)[places] = rng.choice(odd, len(places)).astype(dtype)
        both[:2] = 0
    key, value = both[..., : case.head_dim], both[..., case.head_dim :]
    return (key, value, slots) if case.strided else (key.copy(), value.copy(), slots)


def rows_to_rotate(
    case: Case, rotary_dim: int, *, positions_dtype: str = "int64", max_position: int = 50
) -> tuple[Array, ...]:
    """query, key, value, slot_mapping, positions, cos_sin_cache for a case's caches; the query strided."""
    rng = np.random.default_rng(case.seed + 2)
    key, value, slots = rows_to_write(case)
    wide = rng.standard_normal((len(key), case.num_q_heads + 2, case.head_dim + 8))
    query = wide.astype(key.dtype)[:, 1:-1, : case.head_dim]
    if not case.strided:
        query = query.copy()
    positions = rng.integers(0, max_position, len(key)).astype(positions_dtype)
    positions[:2] = 0, max_position - 1
    angles = rng.uniform(-np.pi, np.pi, (max_position, rotary_dim // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles), np.full_like(angles, np.nan)], axis=1)
    cos_sin_cache = table.astype(np.float32)[:, :rotary_dim]
    return query, key, value, slots, positions, cos_sin_cache


def check_rope(
    ops: Any, case: Case, rotary_dim: int, *, interleaved: bool, in_place: bool, **rows: Any
) -> None:
    """Rotated rows within one rounding of the oracle's, the rest of all memory bit by bit."""
    query, key, value, slots, positions, table = rows_to_rotate(case, rotary_dim, **rows)
    wanted, actual = build(case), build(case)
    given = query.copy()
    out = query if in_place else np.full_like(query, np.nan)
    returned = ops.rope_and_write_kv_cache(
        query, key, value, actual.key_cache, actual.value_cache, slots, positions, table,
        interleaved=interleaved, query_out=out,
    )  # fmt: skip
    require_same_bits("query_out", out, returned)
    written = slots >= 0
    rows_of = np.flatnonzero(written)
    places = slots[written] // case.block_size, slots[written] % case.block_size
    for name, before, after, at in [
        ("query_out", given, out, positions),
        ("key_cache", key[rows_of], reference.plain(actual.key_cache)[places], positions[rows_of]),
    ]:
        oracle = reference.rope(before, at, table, interleaved=interleaved)
        bound = rope_bound(before, at, table, case.dtype, interleaved=interleaved)
        error = np.abs(after.astype(np.float64) - oracle)
        wrong = ~(error <= bound)
        assert not wrong.any(), f"{name}: {wrong.sum()} of {wrong.size} elements are wrong"
        require_same_bits(f"the rest of {name}", before[..., rotary_dim:], after[..., rotary_dim:])
    wanted.key_cache[places] = actual.key_cache[places]
    wanted.value_cache[places] = value[rows_of].reshape(-1, *wanted.value_cache.shape[2:])
    require_same_memory("key_cache", wanted.key_cache, actual.key_cache)
    require_same_memory("value_cache", wanted.value_cache, actual.value_cache)


def block_pairs(num_blocks: int, *, seed: int = 0) -> Array:
    """Pairs that copy_blocks takes: sources repeated, destinations distinct, a block paired with itself."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_blocks)
    destinations, sources = order[: num_blocks // 2], order[num_blocks // 2 :]
    pairs = np.stack([rng.choice(sources, len(destinations)), destinations], axis=1)
    return np.concatenate([pairs, [[sources[0]] * 2]]).astype(np.int64)


def check_copy(ops: Any, case: Case) -> None:
    """K and V in one call where they are alike, and in one call each where they are not."""
    wanted, actual = build(case), build(case)
    pairs = block_pairs(len(wanted.key_cache), seed=case.seed)
    for inputs, run in ((wanted, reference), (actual, ops)):
        caches = [inputs.key_cache, inputs.value_cache]
        alike = caches[0].shape == caches[1].shape and caches[0].strides == caches[1].strides
        for group in [caches] if alike else [[cache] for cache in caches]:
            run.copy_blocks(group, pairs)
    require_same_memory("key_cache", wanted.key_cache, actual.key_cache)
    require_same_memory("value_cache", wanted.value_cache, actual.value_cache)


def check_swap(ops: Any, case: Case, destination_layout: str) -> None:
    """Blocks of a case's key cache into a larger pool of another layout."""
    source = build(case).key_cache
    num_blocks = len(source) + 5

    def destination() -> Array:
        dims = case.head_dim, case.dim_value
        new = lambda shape: arrays.filled(shape, source.dtype, 7.0)  # noqa: E731
        return LAYOUTS[destination_layout](num_blocks, case.block_size, case.num_kv_heads, dims, new)[0]

    rng = np.random.default_rng(case.seed)
    pairs = np.stack([rng.permutation(num_blocks) % len(source), rng.permutation(num_blocks)], axis=1)
    pairs = pairs[: max(1, num_blocks // 2)].astype(np.int64)
    wanted, actual = destination(), destination()
    reference.swap_blocks(source, wanted, pairs)
    ops.swap_blocks(source, actual, pairs)
    require_same_memory("destination", wanted, actual)


def check_gather(ops: Any, case: Case, *, spare_rows: int = 0, give_out: bool = False) -> None:
    """spare_rows past the sequences' tokens, asked for by `num_tokens` or by NaN-filled `out`."""
    inputs = build(case)
    tensors = inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens
    num_rows = sum(case.seq_lens) + spare_rows
    key, value, cu_seqlens = reference.gather_kv_cache(*tensors, num_tokens=num_rows)
    dtype = arrays.DTYPES[case.dtype]
    options: dict[str, Any] = {"num_tokens": num_rows}
    if give_out:
        # Rows of a tensor that holds both, so that they are strided.
        both = arrays.filled((num_rows, case.num_kv_heads, case.head_dim + case.dim_value), dtype)
        options = {"out": (both[..., : case.head_dim], both[..., case.head_dim :])}
    result = ops.gather_kv_cache(*tensors, **options)
    require_same_bits("key", key.astype(dtype), result[0].astype(dtype))
    require_same_bits("value", value.astype(dtype), result[1].astype(dtype))
    require_same_bits("cu_seqlens", cu_seqlens, result[2])
    if give_out:
        require_same_bits("out[0]", key.astype(dtype), options["out"][0])
        require_same_bits("out[1]", value.astype(dtype), options["out"][1])


def require_same_bits(name: str, wanted: Array, actual: Array) -> None:
    """AssertionError unless shape, dtype and bits are equal."""
    assert wanted.shape == actual.shape, f"{name}: shape is {actual.shape}, wanted {wanted.shape}"
    assert wanted.dtype == actual.dtype, f"{name}: dtype is {actual.dtype}, wanted {wanted.dtype}"
    differ = np.argwhere(arrays.bits(wanted) != arrays.bits(actual))
    if len(differ):
        first = tuple(map(int, differ[0]))
        raise AssertionError(
            f"{name}: {len(differ)} of {wanted.size} elements differ, the first at {first}: "
            f"is {actual[first]}, wanted {wanted[first]}"
        )


def require_same_state(wanted: tuple[Array, Array], actual: tuple[Array, Array]) -> None:
    """The same of two results of attention, outputs and LSEs."""
    require_same_bits("out", wanted[0], actual[0])
    require_same_bits("lse", wanted[1], actual[1])


def require_same_memory(name: str, wanted: Array, actual: Array) -> None:
    """AssertionError unless two views and all memory that their storages hold around them are equal."""
    require_same_bits(name, wanted, actual)
    around = f"the storage around {name}"
    require_same_bits(around, arrays.storage_of(wanted), arrays.storage_of(actual))
