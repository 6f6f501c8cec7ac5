"""Attention, decode and varlen, against the oracle on every implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paged_ops
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, PACKED_LAYOUTS, Case, build
from paged_ops.testing.checks import check_attention, expected, require_same_bits
from paged_ops.testing.grids import decode_cases, extended_cases, varlen_cases


@pytest.mark.grid(cases=decode_cases)
def test_decode(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.grid(cases=varlen_cases)
def test_varlen(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.slow
@pytest.mark.grid(cases=extended_cases)
def test_extended_grid(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    """Small cases of every kind, decode and varlen."""
    num_seqs = draw(st.integers(0, 4))
    seq_lens = draw(st.lists(st.integers(0, 70), min_size=num_seqs, max_size=num_seqs))
    q_lens = draw(st.none() | st.lists(st.integers(0, 9), min_size=num_seqs, max_size=num_seqs))
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        tuple(seq_lens),
        None if q_lens is None else tuple(q_lens),
        dtype=draw(st.sampled_from(list(arrays.DTYPES))),
        num_q_heads=num_kv_heads * draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        head_dim=8 * draw(st.integers(1, 8)),
        value_head_dim=8 * draw(st.integers(1, 8)),
        block_size=draw(st.integers(1, 20)),
        layout=draw(st.sampled_from([*LAYOUTS, *PACKED_LAYOUTS])),
        causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.05, 0.5)),
        padding=0 if q_lens is None else draw(st.integers(0, 3)),
        strided=draw(st.booleans()),
        logit_offset=draw(st.sampled_from([0.0, 80.0, -80.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_cases())
def test_any_case(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


def test_long_sequence(ops: HostOps) -> None:
    """Many chunks, next to a sequence of one token."""
    longest = 3000 if ops.target.backend == "emulated" else 20_000
    case = Case(seq_lens=(1, longest), dtype="bfloat16", num_q_heads=2, num_kv_heads=1, head_dim=32)
    check_attention(lambda inputs: inputs.attention(ops), case)


# Not only NaN: a maximum drops NaN silently, and a large finite number survives a multiplication by zero.
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e4])
@pytest.mark.parametrize("q_lens", [None, (1, 4, 17, 3)])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_unused_memory_does_not_show(
    ops: HostOps, poison: float, q_lens: tuple[int, ...] | None, dtype: str
) -> None:
    case = Case((1, 15, 17, 520), q_lens, dtype=dtype, num_q_heads=6, poison=poison)
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_future_tokens_do_not_show(ops: HostOps, bad: float, dtype: str) -> None:
    """Causal: what a query token does not see may be NaN, though other rows of its tile see it."""
    case = Case((40, 530), (12, 9), dtype=dtype, num_q_heads=8, num_kv_heads=2)
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        first_row = int(inputs.cu_seqlens_q[seq])
        for poisoned_from in (seq_len - q_len + 1, seq_len - 3):
            changed = build(case)
            for position in range(poisoned_from, seq_len):
                block = changed.block_tables[seq, position // case.block_size]
                changed.key_cache[block, position % case.block_size] = bad
                changed.value_cache[block, position % case.block_size] = bad
            rows = slice(first_row, first_row + poisoned_from - (seq_len - q_len))
            out_changed, lse_changed = changed.attention(ops)
            require_same_bits("out", out[rows], out_changed[rows])
            require_same_bits("lse", lse[rows], lse_changed[rows])


@pytest.mark.parametrize("head_dim", [8, 40, 80, 112])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_other_heads_do_not_show(ops: HostOps, head_dim: int, dtype: str) -> None:
    """A head's last elements lie beside the first of the next head, which may be NaN."""
    case = Case((70, 17), dtype=dtype, num_q_heads=6, num_kv_heads=3, head_dim=head_dim)
    out, lse = build(case).attention(ops)
    changed = build(case)
    for cache in (changed.key_cache, changed.value_cache):
        cache[:, :, ::2] = np.nan
    out_changed, lse_changed = changed.attention(ops)
    require_same_bits("out", out[:, 2:4], out_changed[:, 2:4])
    require_same_bits("lse", lse[:, 2:4], lse_changed[:, 2:4])
    assert np.isnan(out_changed[:, :2].astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("q_lens", [None, (3, 0, 5)])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_writes_into_given_tensors(
    target: Target, kind: str, q_lens: tuple[int, ...] | None, dtype: str
) -> None:
    """`out` with strides, `lse` and a workspace full of NaN; around `out` nothing changes."""
    ops = HostOps(target, kind)  # type: ignore[arg-type]
    case = Case(
        (30, 0, 1100),
        q_lens,
        dtype=dtype,
        num_q_heads=4,
        head_dim=40,
        value_head_dim=24,
        padding=2 * bool(q_lens),
    )
    inputs = build(case)
    wide = arrays.filled((len(inputs.query), case.num_q_heads + 3, 24 + 8), arrays.DTYPES[dtype], 7.0)
    out = wide[:, 1:-2, 8:]
    out[...] = np.nan
    lse = arrays.filled(out.shape[:2], np.dtype(np.float32))
    nbytes = workspace_nbytes(ops, case)
    workspace = np.full(nbytes, 0xFF, np.uint8)  # NaN in every dtype
    inputs.attention(ops, out=out, lse=lse, return_lse=False, workspace=workspace)
    expected(case).check(out, lse)
    around = np.full(wide.shape, True)
    around[:, 1:-2, 8:] = False
    assert (wide[around] == 7).all()
    plain = inputs.attention(ops)
    require_same_bits("out", plain[0], np.ascontiguousarray(out))
    require_same_bits("lse", plain[1], lse)


def workspace_nbytes(ops: HostOps, case: Case) -> int:
    inputs = build(case)
    return ops.workspace_size(  # type: ignore[no-any-return]
        num_seqs=len(case.seq_lens),
        max_blocks_per_seq=inputs.block_tables.shape[1],
        block_size=case.block_size,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        value_head_dim=case.dim_value,
        num_tokens=None if case.q_lens is None else len(inputs.query),
        dtype=case.dtype,
        device=ops.target.device,
    )


def test_workspace_one_byte_short_is_refused(ops: HostOps) -> None:
    case = Case((700, 3), num_q_heads=2)
    nbytes = workspace_nbytes(ops, case)
    if nbytes == 0:
        pytest.skip("needs no workspace")
    with pytest.raises(ValueError, match=r"^workspace: .*\b" + str(nbytes)):
        build(case).attention(ops, workspace=np.zeros(nbytes - 1, np.uint8))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_empty_batches(target: Target, kind: str) -> None:
    ops = HostOps(target, kind)  # type: ignore[arg-type]
    nothing = Case((), ())
    out, lse = build(nothing).attention(ops)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    out, lse = build(Case(())).attention(ops)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    for case in (Case((), (), padding=3), Case((5, 9), (0, 0), padding=2), Case((0, 0)), Case((0,), (4,))):
        expected(case).check(*build(case).attention(ops))


def test_block_table_without_columns(ops: HostOps) -> None:
    inputs = build(Case((0, 0)))
    out, lse = ops.paged_attention_decode(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        np.zeros((2, 0), np.int32),
        inputs.seq_lens,
        return_lse=True,
    )
    assert (out == 0).all() and np.isneginf(lse).all()


def test_sequences_may_share_blocks(ops: HostOps) -> None:
    """A common prefix: several rows of the block table hold the same ids."""
    case = Case((100, 100, 100), dtype="float16")
    inputs = build(case)
    inputs.block_tables[1] = inputs.block_tables[0]
    inputs.block_tables[2, :3] = inputs.block_tables[0, :3]
    from paged_ops.testing.tolerance import expected_attention

    expected_attention(inputs).check(*inputs.attention(ops))


@pytest.mark.parametrize("dtype", arrays.DTYPES)
@pytest.mark.parametrize("q_lens", [None, (2, 1, 30)])
def test_kinds_of_arrays_give_the_same_bits(
    target: Target, dtype: str, q_lens: tuple[int, ...] | None
) -> None:
    """numpy and torch: equal bits, and the output is of the caller's kind."""
    torch = pytest.importorskip("torch")
    case = Case((3, 17, 600), q_lens, dtype=dtype, num_q_heads=6, layout="HND")
    inputs = build(case)
    with target.use():
        tensors = inputs.map(lambda array: arrays.to_torch(array, target.device))
        out, lse = tensors.attention(paged_ops)
        assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
        assert out.dtype == getattr(torch, dtype) and lse.dtype == torch.float32
        assert out.device == tensors.query.device and lse.device == tensors.query.device
        assert out.is_contiguous() and lse.is_contiguous()
        alone = tensors.attention(paged_ops, return_lse=False)
        assert isinstance(alone, torch.Tensor) and arrays.same_bits(alone, out)
        if target.device == "cpu":
            out_numpy, lse_numpy = inputs.attention(paged_ops)
            assert isinstance(out_numpy, np.ndarray) and isinstance(lse_numpy, np.ndarray)
            assert arrays.same_bits(out, out_numpy) and arrays.same_bits(lse, lse_numpy)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
@pytest.mark.parametrize("size", [3e1, 2e2, 1e6])
def test_equal_logits_of_any_size(ops: HostOps, dtype: str, size: float) -> None:
    """However large a logit is, its distance to itself is 0: no rounding of a product comes between."""
    if dtype == "float16" and size > 1e4:
        pytest.skip("not a float16")
    kind = arrays.DTYPES[dtype]
    for sign in (1, -1):
        query, keys = np.zeros((1, 3, 40), kind), np.zeros((1, 16, 1, 40), kind)
        query[..., 0], keys[..., 0] = size, sign * size
        values = np.ones_like(keys)
        tables, lens = np.zeros((1, 1), np.int32), np.array([16], np.int32)
        out, lse = ops.paged_attention_decode(query, keys, values, tables, lens, return_lse=True)
        assert (out == 1).all()
        logit = sign * float(query[0, 0, 0]) ** 2 / np.sqrt(40)
        assert np.allclose(lse, logit + np.log(16), rtol=1e-6)
