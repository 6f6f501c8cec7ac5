"""The bits of a row depend on its own query, keys, values and length, and on nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target, use_emulator, use_num_threads
from paged_ops.testing.cases import (
    WILD_BLOCK_IDS,
    Case,
    Inputs,
    build,
    one_sequence_per_token,
    select_sequences,
)
from paged_ops.testing.checks import check_attention, require_same_state

# A little of everything: several chunks, an empty sequence, a tail, groups that fill a matrix tile or do not.
DECODE = [
    Case((5, 1300, 0, 513, 64, 1), dtype=dtype, num_q_heads=heads * 2, num_kv_heads=2, head_dim=head_dim)
    for dtype, (heads, head_dim) in itertools.product(arrays.DTYPES, [(1, 64), (3, 40), (8, 128)])
]
# The same with all rules at once, which every row has its own part of.
RULES: dict[str, Any] = {"window": 100, "soft_cap": 8.0, "alibi": True, "sinks": True}
DECODE += [replace(case, **RULES) for case in DECODE if case.group == 3]
VARLEN = [
    replace(case, seq_lens=(40, 530, 9, 600), q_lens=(40, 23, 1, 7), num_kv_heads=1, num_q_heads=case.group)
    for case in DECODE
]
# So many chunks that a task of one thread has several.
LONG = [
    replace(VARLEN[1], seq_lens=(5000, 700), q_lens=(5, 1), **rules)
    for rules in ({}, {"window": 900}, {**RULES, "window": 2000})
]
decode = pytest.mark.parametrize("case", DECODE, ids=str)
varlen = pytest.mark.parametrize("case", VARLEN, ids=str)
both = pytest.mark.parametrize("case", DECODE + VARLEN, ids=str)


@both
def test_alone_or_in_a_batch(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq in range(len(case.seq_lens)):
        alone = select_sequences(inputs, [seq]).attention(ops)
        require_same_state((out[inputs.rows_of(seq)], lse[inputs.rows_of(seq)]), alone)


@both
def test_order_of_the_batch(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    out, lse = inputs.attention(ops)
    order = np.random.default_rng(1).permutation(len(case.seq_lens)).tolist() * 2  # each sequence twice
    rows = np.concatenate([np.arange(len(out))[inputs.rows_of(seq)] for seq in order])
    require_same_state((out[rows], lse[rows]), select_sequences(inputs, order).attention(ops))


@both
def test_width_of_the_block_table(ops: HostOps, case: Case) -> None:
    """max_blocks_per_seq bounds the grid and nothing else."""
    inputs = build(case)
    widened = np.full((len(case.seq_lens), inputs.block_tables.shape[1] + 200), WILD_BLOCK_IDS[0], np.int32)
    widened[:, : inputs.block_tables.shape[1]] = inputs.block_tables
    require_same_state(inputs.attention(ops), replace(inputs, block_tables=widened).attention(ops))


@both
def test_repeated_calls(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    first = inputs.attention(ops)
    for _ in range(3 if ops.target.backend == "emulated" else 20):
        require_same_state(first, inputs.attention(ops))


@varlen
def test_varlen_equals_decode_token_by_token(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    require_same_state(one_sequence_per_token(inputs).attention(ops), inputs.attention(ops))


@varlen
def test_any_chunking_of_a_prefill(ops: HostOps, case: Case) -> None:
    """Each sequence's query tokens cut into calls anywhere: rows keep their bits."""
    inputs = build(case)
    out, lse = inputs.attention(ops)
    rng = np.random.default_rng(2)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        cuts = np.unique([0, q_len, *rng.integers(0, q_len + 1, 3)])
        for begin, end in itertools.pairwise(cuts.tolist()):
            rows = slice(inputs.rows_of(seq).start + begin, inputs.rows_of(seq).start + end)
            chunk = replace(
                inputs,
                query=inputs.query[rows],
                block_tables=inputs.block_tables[seq : seq + 1],
                seq_lens=np.array([seq_len - q_len + end], np.int32),
                cu_seqlens_q=np.array([0, end - begin], np.int32),
            )
            require_same_state((out[rows], lse[rows]), chunk.attention(ops))


@pytest.mark.parametrize("head_dim", [64, 104])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_columns_or_few(ops: HostOps, dtype: str, head_dim: int) -> None:
    """A batch large enough for CUDA's kernel for prefill, and each of its sequences, which is not."""
    case = Case((530, 9, 40, 23) * 4, (9,) * 16, dtype, num_q_heads=64, num_kv_heads=8, head_dim=head_dim)
    inputs = build(case)
    out, lse = inputs.attention(ops)
    check_attention(lambda inputs: inputs.attention(ops), case)
    for seq in (0, 1, 6, 15):
        rows = inputs.rows_of(seq)
        require_same_state((out[rows], lse[rows]), select_sequences(inputs, [seq]).attention(ops))


@varlen
def test_padding_does_not_matter(ops: HostOps, case: Case) -> None:
    inputs = build(case)
    padded = replace(inputs, query=np.concatenate([inputs.query, inputs.query[:7]]))
    out, lse = padded.attention(ops)
    require_same_state(inputs.attention(ops), (out[:-7], lse[:-7]))
    assert (out[-7:] == 0).all() and np.isneginf(lse[-7:]).all()


@pytest.mark.parametrize("dtype", arrays.DTYPES)
@pytest.mark.parametrize("q_lens", [None, (17, 3, 1)])
def test_block_size_and_layout(ops: HostOps, dtype: str, q_lens: tuple[int, ...] | None) -> None:
    base = Case((30, 600, 513), q_lens, dtype=dtype, num_q_heads=6)
    wanted = build(base).attention(ops)
    for block_size, layout, in_order in [
        (1, "NHD", False),
        (1, "pool", True),
        (7, "HND", False),
        (8, "pool", False),
        (8, "NHD", True),
        (256, "pool", False),
        (16, "unaligned", False),
        (600, "interleaved", False),
    ]:
        moved = repaged(build(base), block_size, layout, in_order)
        require_same_state(wanted, moved.attention(ops))


def repaged(inputs: Inputs, block_size: int, layout: str, in_order: bool) -> Inputs:
    """The same keys and values in blocks of another size and layout; in order: one block after the other.

    (`build` would not do: it plants its spikes by block size.)
    """
    case = replace(inputs.case, block_size=block_size, layout=layout)
    moved = build(case)
    first_block = 0
    for seq, seq_len in enumerate(case.seq_lens):
        if in_order:
            num_blocks = -(-seq_len // block_size)
            moved.block_tables[seq, :num_blocks] = first_block + np.arange(num_blocks)
            first_block += num_blocks
        token = np.arange(seq_len)
        source = inputs.block_tables[seq, token // inputs.case.block_size], token % inputs.case.block_size
        destination = moved.block_tables[seq, token // block_size], token % block_size
        moved.key_cache[destination] = inputs.key_cache[source]
        moved.value_cache[destination] = inputs.value_cache[source]
    return replace(moved, query=inputs.query)


@pytest.mark.parametrize("case", DECODE + VARLEN + LONG, ids=str)
def test_threads_of_the_cpu_backend(target: Target, case: Case) -> None:
    if target.backend != "cpu":
        pytest.skip("threads are the CPU backend's")
    inputs, ops = build(case), HostOps(target)
    results = []
    for num_threads in (1, 2, 5):
        with use_num_threads(num_threads):
            results.append(inputs.attention(ops))
    for result in results[1:]:
        require_same_state(results[0], result)


EMULATOR_SETTINGS: list[dict[str, Any]] = [
    {"order": "reverse", "workers": 2},
    {"order": "random", "landing": "random", "seed": 1, "workers": 2},
    {"order": "random", "landing": "random", "seed": 2},
    {"order": "forward", "landing": "at_once", "workers": 2},
    {"order": "reverse", "landing": "at_once", "multiprocessors": 4},
]


@both
def test_schedules_of_the_emulator(target: Target, case: Case) -> None:
    """Order of threads, landing of asynchronous copies, size of the chip: a race would show as other bits."""
    if target.backend != "emulated":
        pytest.skip("the emulator's settings")
    inputs, ops = build(case), HostOps(target)
    wanted = inputs.attention(ops)
    for settings in EMULATOR_SETTINGS:
        with use_emulator(**settings):
            require_same_state(wanted, inputs.attention(ops))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [2, 4, 16])
def test_heads_of_a_group_whatever_their_neighbours_hold(ops: HostOps, dtype: str, group: int) -> None:
    """A head alone against the same head in its group, among heads whose logits are huge, tiny or -inf."""
    kind = arrays.DTYPES[dtype]
    keys = np.zeros((1, 192, 1, 32), np.float32)
    keys[0, :64, 0, 0], keys[0, 64:, 0, 0] = -1e30, np.linspace(-3, 3, 128)
    keys[0, :, 0, 1] = np.linspace(-0.5, 0.5, 192)
    query = np.zeros((1, group, 32), np.float32)
    for head in range(group):
        query[0, head, head % 2] = [1e30, 1.0, 1e-30, 2e4][head % 4]
    query, keys = query.astype(kind), keys.astype(kind)
    values = np.random.default_rng(2).standard_normal(keys.shape).astype(kind)
    rest = np.zeros((1, 1), np.int32), np.array([192], np.int32)
    together = ops.paged_attention_decode(query, keys, values, *rest, return_lse=True)
    for head in range(group):
        alone = ops.paged_attention_decode(query[:, [head]], keys, values, *rest, return_lse=True)
        require_same_state(tuple(x[:, [head]] for x in together), alone)
