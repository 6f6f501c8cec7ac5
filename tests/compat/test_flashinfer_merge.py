"""FlashInfer's merging of states and its cascade, against the oracle; logarithms to base 2."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashinfer_cases import flashinfer_case, natural, require_close  # noqa: E402

from paged_ops import reference  # noqa: E402
from paged_ops.compat import flashinfer  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.cases import Case, build  # noqa: E402

LN_2 = np.log(2.0)


def states(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """v [5, count, 3, 16] and base-2 s [5, count, 3], some of them -inf."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(5, count, 3, 16, generator=generator)
    s = 2 * torch.randn(5, count, 3, generator=generator)
    s[0, 0], s[1, -1], s[2] = -torch.inf, -torch.inf, -torch.inf
    return v, s


def merged(v: torch.Tensor, s: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """By the oracle, state after state; base 2."""
    out, lse = v[:, 0].double().numpy(), s[:, 0].double().numpy() * LN_2
    for state in range(1, v.shape[1]):
        out, lse = reference.merge_attention_states(
            out, lse, v[:, state], s[:, state].double().numpy() * LN_2
        )
    return out, lse / LN_2


def test_merge_state() -> None:
    v, s = states(2)
    before = v.clone(), s.clone()
    out, lse = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    wanted, wanted_lse = merged(v, s)
    require_close(out, wanted)
    require_close(lse, wanted_lse)
    assert arrays.same_bits(v, before[0]) and arrays.same_bits(s, before[1])


def test_merge_state_takes_other_dtypes_of_s() -> None:
    v, s = states(2)
    out, lse = flashinfer.merge_state(v[:, 0], s[:, 0].double(), v[:, 1], s[:, 1].double())
    require_close(out, merged(v, s)[0])
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("strided", [False, True])
def test_merge_in_place_writes_its_own_tensors(strided: bool) -> None:
    v, s = states(2)
    wanted, wanted_lse = merged(v, s)
    v_own, s_own, v_other, s_other = v[:, 0], s[:, 0], v[:, 1].clone(), s[:, 1].clone()
    if not strided:
        v_own, s_own = v_own.contiguous(), s_own.contiguous()
    others = v[:, 1].clone(), s[:, 1].clone()
    assert flashinfer.merge_state_in_place(v_own, s_own, v_other, s_other) is None
    require_close(v_own, wanted)
    require_close(s_own, wanted_lse)
    assert torch.equal(v_other, others[0]) and torch.equal(s_other, others[1])


def test_merge_in_place_of_a_state_with_itself() -> None:
    v, s = states(1)
    wanted, wanted_lse = merged(v.repeat(1, 2, 1, 1), s.repeat(1, 2, 1))
    v, s = v[:, 0].contiguous(), s[:, 0].contiguous()
    flashinfer.merge_state_in_place(v, s, v, s)
    require_close(v, wanted)
    require_close(s, wanted_lse)


def test_merge_in_place_of_chosen_rows() -> None:
    """The others keep their bits, NaN included."""
    v, s = states(2)
    wanted, wanted_lse = merged(v, s)
    v[4], s[4] = torch.nan, torch.nan
    mask = torch.tensor([True, True, True, False, False])
    v_own, s_own = v[:, 0].clone(), s[:, 0].clone()
    flashinfer.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1], mask)
    require_close(v_own[mask], wanted[mask])
    require_close(s_own[mask], wanted_lse[mask])
    assert arrays.same_bits(v_own[~mask], v[~mask, 0]) and arrays.same_bits(s_own[~mask], s[~mask, 0])
    with pytest.raises(ValueError, match="^mask: shape"):
        flashinfer.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1], mask[:-1])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge_states(count: int) -> None:
    v, s = states(count)
    before = v.clone(), s.clone()
    out, lse = flashinfer.merge_states(v, s)
    wanted, wanted_lse = merged(v, s)
    require_close(out, np.where(np.isneginf(wanted_lse)[..., None], out, wanted) if count == 1 else wanted)
    require_close(lse, wanted_lse)
    assert arrays.same_bits(v, before[0]) and arrays.same_bits(s, before[1])
    assert out.data_ptr() != v.data_ptr()


def test_merge_of_no_states() -> None:
    out, lse = flashinfer.merge_states(torch.ones(4, 0, 3, 16), torch.ones(4, 0, 3))
    assert out.shape == (4, 3, 16) and (out == 0).all() and (lse == -torch.inf).all()
    with pytest.raises(ValueError, match="^v: shape"):
        flashinfer.merge_states(torch.ones(4, 2, 3, 16), torch.ones(4, 3))


def test_states_of_a_wrapper_merge() -> None:
    """Two halves of the keys give the whole: both ends speak base 2."""
    case = Case((64,), num_q_heads=8)
    given, inputs = flashinfer_case(case), build(case)
    parts = []
    for pages in (slice(0, 2), slice(2, 4)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(given.workspace())
        indptr, last = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
        wrapper.plan(indptr, given.indices[pages], last, *given.shapes, q_data_type="float32")
        parts += wrapper.run(given.q, given.cache, return_lse=True)
    out, lse = flashinfer.merge_state(*parts)
    wanted, wanted_lse = inputs.attention(reference)
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_cascade_equals_one_table(kv_layout: str, causal: bool) -> None:
    """Three pages shared by all, two shared by the first two sequences, and each one's own."""
    case = Case((100, 90, 85), (3, 7, 5), num_q_heads=8, causal=causal)
    given, inputs = flashinfer_case(case, kv_layout), build(case)
    tables = inputs.block_tables
    tables[:, :3] = tables[0, :3]
    tables[1, 3:5] = tables[0, 3:5]
    counts = [case.blocks_of(n) for n in case.seq_lens]
    int32 = lambda values: torch.tensor(np.asarray(values, np.int32))  # noqa: E731
    shared, pair = tables[0, :3], tables[0, 3:5]
    own = [tables[0, 5 : counts[0]], tables[1, 5 : counts[1]], tables[2, 3 : counts[2]]]
    last = [n - (c - 1) * 16 for n, c in zip(case.seq_lens, counts, strict=True)]
    levels = [
        ([0, 15], [0, 3], shared, [16]),
        ([0, 10, 15], [0, 2, 2], pair, [16, 0]),
        ([0, 3, 10, 15], np.cumsum([0, *map(len, own)]), np.concatenate(own), last),
    ]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, given.workspace(), kv_layout)
    wrapper.plan(
        *([int32(level[i]) for level in levels] for i in range(4)),
        *given.shapes,
        causal=causal,
        q_data_type="float32",
    )
    require_close(wrapper.run(given.q, given.cache), inputs.attention(reference)[0])


def test_cascade_counts_its_levels() -> None:
    given = flashinfer_case(Case((20,), (3,)))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, given.workspace())
    with pytest.raises(ValueError):
        wrapper.plan(*([x] for x in (given.qo_indptr, *given.table)), *given.shapes)
    with pytest.raises(ValueError, match="^num_levels"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, given.workspace())
    with pytest.raises(ValueError, match="^qo_indptr_buf_arr: has 1"):
        flashinfer.MultiLevelCascadeAttentionWrapper(
            2, given.workspace(), qo_indptr_buf_arr=[given.qo_indptr]
        )
