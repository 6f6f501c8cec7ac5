"""The generator of cases does what it promises; otherwise the tests built on it would be blind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.cases import (
    LAYOUTS,
    WILD_BLOCK_IDS,
    Case,
    build,
    one_sequence_per_token,
    select_sequences,
)
from paged_ops.testing.covering import covering

CASES = [
    Case((600, 33), num_q_heads=8, num_kv_heads=2),
    Case((600, 33), (20, 33), dtype="float16", head_dim=8, scale=0.3),
    Case((600, 33), dtype="bfloat16", head_dim=256, logit_offset=100.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_spread_and_spikes_hold_a_share(case: Case) -> None:
    inputs = build(case)
    for seq, seq_len in enumerate(case.seq_lens):
        keys = reference.sequence_tokens(inputs.key_cache, inputs.block_tables[seq], seq_len).swapaxes(0, 1)
        rows = slice(seq, seq + 1) if case.q_lens is None else slice(*inputs.cu_seqlens_q[seq : seq + 2])
        query = (
            inputs.query[rows].astype(np.float64).reshape(-1, case.num_kv_heads, case.group, case.head_dim)
        )
        scores = np.stack([reference.logits(row, keys, scale=case.applied_scale) for row in query])
        assert scores.std(axis=-1).mean() > 1.5
        share = np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True))
        for place in (0, seq_len // 2, seq_len - 1):
            assert share[..., place].max() > 0.02, place
        assert share.max(axis=-1).mean() < 0.9  # no spike hides all the others


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_unused_memory_is_poison(layout: str, dtype: str) -> None:
    case = Case((0, 5, 33), dtype=dtype, layout=layout, block_size=4, strided=True)
    inputs = build(case)
    used = sum(case.seq_lens) * case.num_kv_heads * case.head_dim
    for cache in (inputs.key_cache, inputs.value_cache):
        assert np.isfinite(cache.astype(np.float32)).sum() == used
    storage = arrays.storage_of(inputs.key_cache).astype(np.float32)
    shared = layout not in ("NHD", "HND", "unaligned")
    assert np.isfinite(storage).sum() == used * (2 if shared else 1)
    for seq, seq_len in enumerate(case.seq_lens):
        blocks = case.blocks_of(seq_len)
        assert len(set(inputs.block_tables[seq, :blocks].tolist())) == blocks
        assert set(inputs.block_tables[seq, blocks:].tolist()) <= set(WILD_BLOCK_IDS)


def test_tables_are_permuted() -> None:
    table = build(Case((1000,))).block_tables[0, :60]
    assert (np.diff(table) < 0).any() and len(set(table.tolist())) == 60


def test_equal_cases_give_equal_bits() -> None:
    case = Case((3, 70), (1, 20), dtype="bfloat16", padding=2)
    a, b, other = build(case), build(case), build(replace(case, seed=1))
    assert arrays.same_bits(a.query, b.query) and arrays.same_bits(a.key_cache, b.key_cache)
    assert not arrays.same_bits(a.query, other.query)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_torch_tensors_have_the_same_bits_and_strides(dtype: str, layout: str) -> None:
    pytest.importorskip("torch")
    inputs = build(Case((5, 33), dtype=dtype, layout=layout, strided=True))
    tensors = inputs.map(arrays.to_torch)
    for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens"):
        array, tensor = getattr(inputs, name), getattr(tensors, name)
        assert arrays.same_bits(array, tensor), name
        assert [s * array.itemsize for s in tensor.stride()] == list(array.strides), name
        assert np.shares_memory(array, arrays.to_numpy(tensor)), name


def test_other_forms_mean_the_same() -> None:
    inputs = build(Case((40, 9, 20), (5, 9, 1)))
    out, lse = inputs.attention(reference)
    tokens = one_sequence_per_token(inputs).attention(reference)
    np.testing.assert_array_equal(out, tokens[0])
    np.testing.assert_array_equal(lse, tokens[1])
    chosen = select_sequences(inputs, [2, 0]).attention(reference)
    np.testing.assert_array_equal(np.concatenate([out[14:15], out[:5]]), chosen[0])


def test_covering_array_covers() -> None:
    axes = {"a": range(7), "b": range(4), "c": (False, True), "d": range(5)}
    rows = list(covering(axes))
    for (x, xs), (y, ys) in itertools.combinations(axes.items(), 2):
        assert {(row[x], row[y]) for row in rows} == set(itertools.product(xs, ys))
    assert len(rows) < 60
