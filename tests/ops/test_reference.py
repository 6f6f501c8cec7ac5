"""The oracle itself, held to formulas written by others and to the algebra of attention."""

from __future__ import annotations

import numpy as np
import pytest

from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.cases import Case, build


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_agrees_with_torch_in_float64(dtype: str, causal: bool) -> None:
    torch = pytest.importorskip("torch")
    case = Case(
        (7, 70, 33), (7, 5, 1), dtype=dtype, num_q_heads=6, causal=causal, value_head_dim=40, scale=0.3
    )
    inputs = build(case)
    out, lse = inputs.attention(reference)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        rows = slice(*inputs.cu_seqlens_q[seq : seq + 2])
        query = torch.from_numpy(inputs.query[rows].astype(np.float64)).transpose(0, 1)
        key, value = (
            torch.from_numpy(reference.sequence_tokens(cache, inputs.block_tables[seq], seq_len)).transpose(
                0, 1
            )
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        mask = torch.ones(q_len, seq_len, dtype=torch.bool)
        if causal:
            mask = mask.tril(seq_len - q_len)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
        )
        np.testing.assert_allclose(out[rows], wanted.transpose(0, 1).numpy(), rtol=1e-12, atol=1e-13)
        scores = 0.3 * query @ key.repeat_interleave(3, 0).transpose(1, 2)
        wanted_lse = scores.masked_fill(~mask, -torch.inf).logsumexp(2)
        np.testing.assert_allclose(lse[rows], wanted_lse.transpose(0, 1).numpy(), rtol=1e-12)


def test_merging_parts_gives_the_whole() -> None:
    rng = np.random.default_rng(0)
    query, keys, values = (rng.standard_normal((2, n, 8)) for n in (3, 50, 50))
    scores = reference.logits(query, keys, scale=0.5)
    whole = reference.attend(scores, values)
    out, lse = reference.attend(scores[..., :0], values[:, :0])
    for part in np.split(np.arange(50), [1, 20, 20, 49]):
        out, lse = reference.merge_attention_states(
            out, lse, *reference.attend(scores[..., part], values[:, part])
        )
    np.testing.assert_allclose(out, whole[0], rtol=1e-12)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-12)


def test_a_single_key_is_its_value() -> None:
    inputs = build(Case((1, 1), num_q_heads=2))
    out, lse = inputs.attention(reference)
    blocks = inputs.block_tables[:, 0]
    np.testing.assert_array_equal(out, inputs.value_cache[blocks, 0])
    dots = (inputs.query.astype(np.float64) * inputs.key_cache[blocks, 0]).sum(2) * 64**-0.5
    np.testing.assert_allclose(lse, dots)


def test_logit_offset_moves_the_lse_only() -> None:
    for offset in (0.0, 50.0):
        out, lse = build(Case((1,), logit_offset=offset, num_q_heads=2)).attention(reference)
        assert abs(lse - offset).max() < 20 and np.isfinite(out).all()


@pytest.mark.parametrize(
    ("slots", "name"), [([0, 99], "slot_mapping"), ([6], "slot_mapping")], ids=["far", "next"]
)
def test_slots_out_of_range(slots: list[int], name: str) -> None:
    rows, cache = np.zeros((2, 1, 8)), np.zeros((3, 2, 1, 8))
    with pytest.raises(ValueError, match=f"^{name}: "):
        reference.write_kv_cache(rows, rows, cache, cache.copy(), np.array(slots))


def test_indices_out_of_range() -> None:
    cache = np.zeros((3, 2, 1, 8))
    for table, seq_len, name in [
        ([[3]], 1, "block_tables"),
        ([[-1]], 1, "block_tables"),
        ([[0]], 3, "seq_lens"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            reference.gather_kv_cache(cache, cache, table, [seq_len])
    for pairs in ([[0, 3]], [[-1, 0]], [[0, 1], [1, 2]], [[0, 1], [2, 1]]):
        with pytest.raises(ValueError, match="^block_pairs: "):
            reference.copy_blocks(cache, pairs)
    for pairs in ([[0, 3]], [[-1, 0]], [[0, 1], [2, 1]]):
        with pytest.raises(ValueError, match="^block_pairs: "):
            reference.swap_blocks(cache, cache.copy(), pairs)


def test_writing_nothing_is_nothing() -> None:
    cache = np.zeros((2, 4, 1, 8), np.float32)
    reference.write_kv_cache(np.ones((3, 1, 8)), np.ones((3, 1, 8)), cache, cache.copy(), [])
    assert not cache.any()
