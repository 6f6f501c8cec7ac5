"""Latent attention (MLA), projections absorbed: one KV head whose values are the first dims of its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, use_emulator, use_num_threads
from paged_ops.testing.cases import Case, build, one_sequence_per_token, select_sequences
from paged_ops.testing.checks import (
    check_attention,
    require_same_bits,
    require_same_memory,
    require_same_state,
)
from paged_ops.testing.grids import wide_cases
from paged_ops.testing.tolerance import expected_shared_prefix

LATENT, ROTATED = 512, 64
DECODE = Case(
    (1, 513, 0, 40),
    dtype="bfloat16",
    num_q_heads=16,
    num_kv_heads=1,
    head_dim=LATENT + ROTATED,
    value_head_dim=LATENT,
    latent=True,
    scale=192**-0.5,
)
VARLEN = replace(DECODE, seq_lens=(40, 530, 3, 17), q_lens=(9, 4, 3, 0))
RULED = replace(VARLEN, window=100, soft_cap=8.0, alibi=True, sinks=True)
CASES = [replace(case, dtype=dtype) for case in (DECODE, VARLEN, RULED) for dtype in arrays.DTYPES]
calls = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.grid(cases=wide_cases)
def test_wide_heads(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.parametrize("num_q_heads", [16, 24, 128])
@pytest.mark.parametrize("base", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_many_heads(ops: HostOps, base: Case, num_q_heads: int) -> None:
    if ops.target.backend == "emulated":
        base = replace(base, seq_lens=(1, 40, 0, 17), q_lens=base.q_lens and (1, 4, 0, 2))
    check_attention(lambda inputs: inputs.attention(ops), replace(base, num_q_heads=num_q_heads))


# --- one memory for keys and values ---------------------------------------------------------------------


@calls
def test_the_bits_are_those_of_two_caches(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    apart = replace(inputs, value_cache=inputs.value_cache.copy())
    require_same_state(apart.attention(ops), inputs.attention(ops))


def test_a_cache_that_only_looks_alike_is_another(ops: HostOps) -> None:
    """Values that begin later in the keys' rows, and those of the block after: not the first dims."""
    inputs = build(DECODE)
    for values in (
        inputs.key_cache[..., ROTATED:],
        np.lib.stride_tricks.as_strided(
            inputs.key_cache, inputs.value_cache.shape, (0, *inputs.key_cache.strides[1:])
        ),
    ):
        shared = replace(inputs, value_cache=values)
        apart = replace(inputs, value_cache=values.copy())
        require_same_state(apart.attention(ops), shared.attention(ops))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("num_q_heads", [3, 16])
@pytest.mark.parametrize("case", [case for case in CASES if case.q_lens], ids=str)
def test_what_is_not_seen_does_not_show(ops: HostOps, case: Case, num_q_heads: int, bad: float) -> None:
    """Of a tile that some rows see further than others, what only the others see. With few heads several
    query tokens are side by side in a matrix product."""
    case = replace(case, num_q_heads=num_q_heads)
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        first = int(inputs.cu_seqlens_q[seq])
        for num_clean in {1, q_len // 2, q_len - 1} & set(range(1, q_len)):
            changed = build(case)
            for position in range(seq_len - q_len + num_clean, seq_len):
                block = changed.block_tables[seq, position // case.block_size]
                changed.key_cache[block, position % case.block_size] = bad
            rows = slice(first, first + num_clean)
            changed_out, changed_lse = changed.attention(ops)
            require_same_state((out[rows], lse[rows]), (changed_out[rows], changed_lse[rows]))


# --- bits -----------------------------------------------------------------------------------------------


@calls
def test_bits_do_not_depend_on_the_batch(ops: HostOps, case: Case) -> None:
    """Alone, with a wider block table, or cut into single tokens."""
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq in range(len(case.seq_lens)):
        rows = inputs.rows_of(seq)
        alone = select_sequences(inputs, [seq])
        tables = np.concatenate([alone.block_tables, np.full((1, 200), -1, np.int32)], axis=1)
        for call in (alone, replace(alone, block_tables=tables)):
            require_same_state((out[rows], lse[rows]), call.attention(ops))
    if case.q_lens is not None:
        require_same_state((out, lse), one_sequence_per_token(inputs).attention(ops))


EMULATOR_SETTINGS: list[dict[str, Any]] = [
    {"order": "reverse", "workers": 2, "multiprocessors": 1},
    {"order": "random", "landing": "random", "seed": 1, "multiprocessors": 2},
    {"order": "forward", "landing": "at_once", "multiprocessors": 5},
]


@pytest.mark.parametrize("latent", [True, False])
@calls
def test_bits_do_not_depend_on_who_does_what(ops: HostOps, case: Case, latent: bool) -> None:
    """Threads, or the emulator's chips and schedules: chunks are shared or not, copies land early or late."""
    inputs = build(case)
    if not latent:
        inputs = replace(inputs, value_cache=inputs.value_cache.copy())
    wanted = inputs.attention(ops)
    if ops.target.backend == "cpu":
        for num_threads in (1, 2, 5):
            with use_num_threads(num_threads):
                require_same_state(wanted, inputs.attention(ops))
    elif ops.target.backend == "emulated":
        for settings in EMULATOR_SETTINGS:
            with use_emulator(**settings):
                require_same_state(wanted, inputs.attention(ops))


@calls
def test_bits_do_not_depend_on_the_layout(ops: HostOps, case: Case) -> None:
    """Rows that no wide copy can take."""
    inputs = build(case)
    wide = np.full((*inputs.key_cache.shape[:3], LATENT + ROTATED + 3), np.nan, inputs.key_cache.dtype)
    keys = wide[..., 1 : LATENT + ROTATED + 1]
    keys[...] = inputs.key_cache
    for values in (keys[..., :LATENT], inputs.value_cache):
        moved = replace(inputs, key_cache=keys, value_cache=values)
        require_same_state(inputs.attention(ops), moved.attention(ops))


@calls
def test_bits_do_not_depend_on_the_other_heads(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for heads in (slice(0, 1), slice(3, 12)):
        rules = {n: x[heads] for n in ("alibi_slopes", "sinks") if (x := getattr(inputs, n)) is not None}
        part = replace(inputs, query=inputs.query[:, heads], **rules)
        require_same_state((out[:, heads], lse[:, heads]), part.attention(ops))


# --- the cache ------------------------------------------------------------------------------------------


def written(ops: Any, case: Case, cache_dtype: str | None, scale: float | None) -> Any:
    """A cache that holds new tokens at random slots, given as a latent and a rotated part; and the slots."""
    rng = np.random.default_rng(3)
    kind = arrays.DTYPES[case.dtype] if cache_dtype is None else arrays.CACHE_DTYPES[cache_dtype]
    cache = np.zeros((9, 16, 1, LATENT + ROTATED), kind)
    slots = rng.permutation(9 * 16)[:50].astype(np.int64)
    slots[7] = -1
    kv_c, k_pe = (
        rng.standard_normal((50, 1, dim)).astype(arrays.DTYPES[case.dtype]) for dim in (LATENT, ROTATED)
    )
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
    ops.write_kv_cache(kv_c, k_pe, cache[..., :LATENT], cache[..., LATENT:], slots, **scales)
    return cache, slots, np.concatenate([kv_c, k_pe], axis=-1)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_write_in_two_parts(ops: HostOps, dtype: str) -> None:
    """The latent and the rotated part go to their places in one call."""
    cache, slots, rows = written(ops, replace(DECODE, dtype=dtype), None, None)
    wanted = np.zeros_like(cache)
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            wanted[slot // 16, slot % 16] = row
    require_same_bits("cache", wanted, cache)


@pytest.mark.parametrize("cache_dtype", arrays.EIGHT_BITS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_quantised(ops: HostOps, dtype: str, cache_dtype: str) -> None:
    """Written in two parts with one scale; read with scales of all kinds."""
    case = replace(DECODE, dtype=dtype)
    cache, _, _ = written(ops, case, cache_dtype, 0.02)
    wanted, _, _ = written(reference, case, cache_dtype, 0.02)
    require_same_bits("cache", wanted, cache)
    for scales in ("number", "head", "token"):
        for base in (DECODE, VARLEN):
            case = replace(base, dtype=dtype, cache_dtype=cache_dtype, scales=scales, num_q_heads=20)
            check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.parametrize("group", [8, 64])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_int4(ops: HostOps, dtype: str, group: int) -> None:
    """Scales of groups are the parts' own: a cache written in two parts is as one written whole."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((50, 1, LATENT + ROTATED)).astype(arrays.DTYPES[dtype])
    slots = rng.permutation(9 * 16)[:50].astype(np.int64)

    def write(ops: Any, cache: Any, scale: Any, cut: int) -> None:
        bytes_cut, groups_cut = cut // 2, cut // group
        ops.write_kv_cache(
            rows[..., :cut], rows[..., cut:], cache[..., :bytes_cut], cache[..., bytes_cut:], slots,
            k_scale=scale[..., :groups_cut], v_scale=scale[..., groups_cut:],
        )  # fmt: skip

    caches = [np.zeros((9, 16, 1, (LATENT + ROTATED) // 2), np.uint8) for _ in range(2)]
    scales = [np.ones((9, 16, 1, (LATENT + ROTATED) // group), np.float32) for _ in range(2)]
    write(reference, caches[0], scales[0], LATENT)
    write(ops, caches[1], scales[1], LATENT)
    require_same_bits("cache", *caches)
    require_same_bits("scale", *scales)
    for base in (DECODE, VARLEN):
        case = replace(base, dtype=dtype, cache_dtype="int4", scale_groups=(group, group), num_q_heads=20)
        check_attention(lambda inputs: inputs.attention(ops), case)


def test_gather(ops: HostOps) -> None:
    """Keys and the part of them that is values, from one memory."""
    inputs = build(DECODE)
    tensors = inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens
    wanted = reference.gather_kv_cache(*tensors)
    key, value, cu_seqlens = ops.gather_kv_cache(*tensors, num_tokens=sum(DECODE.seq_lens))
    require_same_bits("key", wanted[0].astype(key.dtype), key)
    require_same_bits("value", np.ascontiguousarray(key[..., :LATENT]), value)
    require_same_bits("cu_seqlens", wanted[2], cu_seqlens)


def test_blocks_move_with_both_parts(ops: HostOps) -> None:
    """A cache is one tensor to the ops on blocks; its parts are two, that lie apart."""
    wanted, actual = build(DECODE).key_cache, build(DECODE).key_cache
    pairs = np.array([[0, 5], [1, 7], [2, 8]], np.int64)
    reference.copy_blocks(wanted, pairs)
    ops.copy_blocks(actual, pairs)
    require_same_memory("cache", wanted, actual)
    parts = build(DECODE).key_cache
    for part in (parts[..., :LATENT], parts[..., LATENT:]):
        ops.copy_blocks(part, pairs)
    require_same_memory("cache", wanted, parts)


def test_shared_prefix(ops: HostOps) -> None:
    case = replace(DECODE, seq_lens=(70, 65, 90, 64))
    inputs = build(case)
    shared = inputs.block_tables[0, :4].copy()
    inputs.block_tables[:, :4] = shared
    wanted = expected_shared_prefix(inputs, 4)
    out, lse = ops.paged_attention_shared_prefix(
        inputs.query, inputs.key_cache, inputs.value_cache, shared, 64, inputs.block_tables,
        inputs.seq_lens, scale=case.scale, return_lse=True,
    )  # fmt: skip
    wanted.check(out, lse)


# --- refusals -------------------------------------------------------------------------------------------


def test_what_is_refused(ops: HostOps) -> None:
    inputs = build(DECODE)
    wide = np.zeros((1, 16, 1, 584), inputs.query.dtype)
    tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    query = np.zeros((1, 1, 584), inputs.query.dtype)
    with pytest.raises(ValueError, match="^key_cache: head_dim is 584, wanted a multiple of 8 from 8 to 576"):
        ops.paged_attention_decode(query, wide, wide[..., :512], tables, lens)
    with pytest.raises(ValueError, match="^value_cache: value head_dim is 584, wanted .* from 8 to 576"):
        ops.paged_attention_decode(query[..., :64], wide[..., :64], wide, tables, lens)
    rows, slots = np.zeros((2, 1, 576), inputs.query.dtype), np.arange(2)
    with pytest.raises(ValueError, match="^value_cache: shares memory with key_cache"):
        ops.write_kv_cache(rows, rows[..., :512], inputs.key_cache, inputs.value_cache, slots)
    with pytest.raises(ValueError, match="^out: shares memory with key_cache"):
        out = inputs.key_cache[:4, :, 0, :512]
        ops.paged_attention_decode(
            inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens, out=out
        )
