"""Window, soft cap, ALiBi, sinks and trees of drafts, in any combination, on every implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps
from paged_ops.testing.cases import Case, Inputs, build, select_sequences
from paged_ops.testing.checks import check_attention, require_same_bits
from paged_ops.testing.grids import ruled_cases
from paged_ops.testing.tolerance import expected_attention

ALL_RULES: dict[str, Any] = {"soft_cap": 6.0, "alibi": True, "sinks": True}


@pytest.mark.grid(cases=ruled_cases)
def test_rules(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


# --- the oracle, held to formulas of others -------------------------------------------------------------


def test_the_oracle_agrees_with_a_formula_in_torch() -> None:
    torch = pytest.importorskip("torch")
    case = Case((70, 33), (7, 33), num_q_heads=6, window=12, soft_cap=6.0, alibi=True)
    inputs = build(case)
    out, lse = inputs.attention(reference)
    slopes = torch.from_numpy(inputs.alibi_slopes.astype(np.float64))
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        rows = slice(*inputs.cu_seqlens_q[seq : seq + 2])
        query = torch.from_numpy(inputs.query[rows].astype(np.float64)).transpose(0, 1)
        key, value = (
            torch.from_numpy(reference.sequence_tokens(cache, inputs.block_tables[seq], seq_len))
            .transpose(0, 1)
            .repeat_interleave(3, 0)
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        scores = 6.0 * torch.tanh(query @ key.transpose(1, 2) / 8 / 6.0)
        distance = torch.arange(seq_len)[None] - torch.arange(seq_len - q_len, seq_len)[:, None]
        scores = scores + slopes[:, None, None] * distance
        scores = scores.masked_fill((distance > 0) | (distance <= -12), -torch.inf)
        wanted = scores.softmax(2) @ value
        np.testing.assert_allclose(out[rows], wanted.transpose(0, 1).numpy(), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse[rows], scores.logsumexp(2).transpose(0, 1).numpy(), rtol=1e-12)


def test_a_sink_is_a_key_of_value_0() -> None:
    """Whose logit is the sink: keys and a query with one dim more say the same."""
    plain = build(Case((20, 3), num_q_heads=2, head_dim=16, scale=1.0, block_size=32))
    sinks = build(Case((20, 3), num_q_heads=2, head_dim=16, scale=1.0, block_size=32, sinks=True)).sinks
    query = np.pad(plain.query, ((0, 0), (0, 0), (0, 1)))
    query[..., -1] = np.where(np.isneginf(sinks), -1e9, sinks)
    keys = np.pad(plain.key_cache, ((0, 0), (0, 0), (0, 0), (0, 1)))
    values = plain.value_cache.copy()
    for seq, seq_len in enumerate((20, 3)):
        place = plain.block_tables[seq, 0], seq_len
        keys[place], values[place] = np.eye(17)[-1], 0
    longer = replace(plain, query=query, key_cache=keys, value_cache=values, seq_lens=plain.seq_lens + 1)
    wanted = longer.attention(reference)
    actual = replace(plain, sinks=sinks).attention(reference)
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-12)
    np.testing.assert_allclose(actual[1], wanted[1], rtol=1e-12)


def path(inputs: Inputs, row: int) -> Inputs:
    """The decode call of a row of a tree: a sequence of the context and of the drafts that it sees."""
    seq = int(np.searchsorted(inputs.cu_seqlens_q, row, "right")) - 1
    first_row, end_row = map(int, inputs.cu_seqlens_q[seq : seq + 2])
    seq_len, q_len = int(inputs.seq_lens[seq]), end_row - first_row
    drafts = np.flatnonzero(reference.tree_sight(inputs.tree_mask[first_row:end_row])[row - first_row])
    position = np.concatenate([np.arange(seq_len - q_len), seq_len - q_len + drafts])
    block_size = inputs.case.block_size
    used = inputs.block_tables[seq, position // block_size], position % block_size
    num_blocks = -(-len(position) // block_size)

    def moved(cache: Any) -> Any:
        rows = np.zeros((num_blocks * block_size, *cache.shape[2:]), cache.dtype)
        rows[: len(position)] = cache[used]
        return rows.reshape(num_blocks, block_size, *cache.shape[2:])

    return replace(
        inputs,
        query=inputs.query[[row]],
        key_cache=moved(inputs.key_cache),
        value_cache=moved(inputs.value_cache),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        seq_lens=np.array([len(position)], np.int32),
        cu_seqlens_q=None,
        tree_mask=None,
    )


@pytest.mark.parametrize("window", [None, 3, 13])
def test_a_draft_of_a_tree_is_the_end_of_its_path(window: int | None) -> None:
    """For the window and for ALiBi too: the drafts that it does not see might as well not be there."""
    case = Case((40, 21, 9), (9, 21, 7), num_q_heads=4, tree=True, window=window, block_size=4, **ALL_RULES)
    inputs = build(case)
    rng = np.random.default_rng(3)
    masks = []
    for q_len in case.query_lens:  # each draft hangs on an earlier one, or on the context
        sight: list[int] = []
        for token in range(q_len):
            parent = int(rng.integers(-1, token))
            sight.append((sight[parent] if parent >= 0 else 0) | 1 << token)
        masks += sight
    inputs = replace(inputs, tree_mask=np.array(masks))
    out, lse = inputs.attention(reference)
    for row in range(len(out)):
        alone = path(inputs, row).attention(reference)
        np.testing.assert_allclose(out[[row]], alone[0], rtol=1e-12)
        np.testing.assert_allclose(lse[[row]], alone[1], rtol=1e-12)


# --- what is hidden does not show -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e4])
@pytest.mark.parametrize("q_lens", [None, (9, 30)])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_keys_before_a_window_do_not_show(
    ops: HostOps, dtype: str, q_lens: tuple[int, ...] | None, bad: float
) -> None:
    """Whole blocks of them, and those that other rows of a tile still see."""
    window = 70
    case = Case((600, 1100), q_lens, dtype, 8, 2, window=window, block_size=16, **ALL_RULES)
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        for token in sorted({0, q_len // 2, q_len - 1}):
            hidden = np.arange(seq_len - q_len + token - window + 1)  # from this token and later ones
            changed = build(case)
            place = changed.block_tables[seq, hidden // 16], hidden % 16
            changed.key_cache[place] = bad
            changed.value_cache[place] = bad
            begin = seq if q_lens is None else int(inputs.cu_seqlens_q[seq])
            rows = slice(begin + token, begin + q_len)
            out_changed, lse_changed = changed.attention(ops)
            require_same_bits("out", out[rows], out_changed[rows])
            require_same_bits("lse", lse[rows], lse_changed[rows])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (12, 1), (1, 1)])
def test_drafts_that_a_row_does_not_see_do_not_show(
    ops: HostOps, dtype: str, heads: tuple[int, int], bad: float
) -> None:
    case = Case((40, 530, 64), (9, 30, 64), dtype, *heads, tree=True, **ALL_RULES)
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        first_row = int(inputs.cu_seqlens_q[seq])
        sight = reference.tree_sight(inputs.tree_mask[first_row : first_row + q_len])
        for draft in (0, q_len // 2, q_len - 2):
            position = seq_len - q_len + draft
            changed = build(case)
            place = changed.block_tables[seq, position // case.block_size], position % case.block_size
            changed.key_cache[place] = bad
            changed.value_cache[place] = bad
            rows = first_row + np.flatnonzero(~sight[:, draft])
            out_changed, lse_changed = changed.attention(ops)
            require_same_bits("out", out[rows], out_changed[rows])
            require_same_bits("lse", lse[rows], lse_changed[rows])


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_a_slope_that_is_no_number_shows(ops: HostOps, dtype: str, bits: int) -> None:
    """Whatever its bits: not as a row without keys."""
    inputs = build(Case((40, 3), None, dtype, 6, 2, alibi=True))
    inputs.alibi_slopes[1] = np.array(bits, np.uint32).view(np.float32)
    out, lse = inputs.attention(ops)
    assert np.isnan(out[:, 1]).all() and np.isnan(lse[:, 1]).all()
    assert np.isfinite(out[:, [0, 2, 3, 4, 5]].astype(np.float32)).all()


# --- a row's bits are its own ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", arrays.DTYPES)
@pytest.mark.parametrize("window", [None, 20, 300])
def test_trees_alone_or_in_a_batch(ops: HostOps, dtype: str, window: int | None) -> None:
    case = Case((40, 530, 20, 700), (9, 30, 20, 1), dtype, 6, 2, tree=True, window=window, **ALL_RULES)
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq in range(4):
        rows = slice(*map(int, inputs.cu_seqlens_q[seq : seq + 2]))
        alone = select_sequences(inputs, [seq]).attention(ops)
        require_same_bits("out", out[rows], alone[0])
        require_same_bits("lse", lse[rows], alone[1])


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_a_tree_that_is_a_row_of_drafts_is_causal(ops: HostOps, dtype: str) -> None:
    case = Case((40, 530, 64), (9, 30, 64), dtype, 6, 2, window=33, **ALL_RULES)
    inputs = build(case)
    chain = replace(inputs, tree_mask=np.full(len(inputs.query), -1, np.int64))
    for wanted, actual in zip(inputs.attention(ops), chain.attention(ops), strict=True):
        require_same_bits("out and lse", wanted, actual)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_rules_that_do_nothing_change_nothing(ops: HostOps, dtype: str) -> None:
    """Slopes of 0, sinks of -inf and a window over everything leave the plain call's result."""
    case = Case((0, 5, 700), dtype=dtype, num_q_heads=6)
    inputs = build(case)
    plain = inputs.attention(ops)
    idle = replace(inputs, sinks=np.full(6, -np.inf, np.float32)).attention(ops, window=2**40)
    for wanted, actual in zip(plain, idle, strict=True):
        require_same_bits("out and lse", wanted, actual)
    flat = replace(inputs, alibi_slopes=np.zeros(6, np.float32))
    check_attention(lambda _: flat.attention(ops), case)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_merging_parts_with_a_sink_in_one_of_them(ops: HostOps, dtype: str) -> None:
    case = Case((300,), dtype=dtype, num_q_heads=6, sinks=True, block_size=20)
    inputs = build(case)
    head = replace(inputs, seq_lens=np.array([200], np.int32), sinks=None)
    tail = replace(inputs, seq_lens=np.array([100], np.int32), block_tables=inputs.block_tables[:, 10:])
    wanted = expected_attention(inputs)
    # Each part was rounded to the tensors' dtype on its way.
    wanted = replace(wanted, out_bound=3 * wanted.out_bound, lse_bound=3 * wanted.lse_bound)
    wanted.check(*ops.merge_attention_states(*head.attention(ops), *tail.attention(ops)))
