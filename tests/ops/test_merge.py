"""merge_attention_states: against the oracle, as an algebra, and as the way to split attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps
from paged_ops.testing.cases import Case, build
from paged_ops.testing.checks import check_merge, expected, merge_states, require_same_bits

dtypes = pytest.mark.parametrize("dtype", arrays.DTYPES)


@dtypes
@pytest.mark.parametrize("into", ["new", "out", "a", "b"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8), (33, 3, 40), (7, 64, 256), (200, 2, 128), (5, 2, 264), (3, 16, 512), (3, 2, 576)],
    ids=str,
)
def test_against_the_oracle(ops: HostOps, shape: tuple[int, int, int], dtype: str, into: str) -> None:
    check_merge(ops, *shape, dtype, into=into)


@dtypes
def test_empty_states_are_the_identity(ops: HostOps, dtype: str) -> None:
    """Exactly, on either side, though the empty state's output is NaN."""
    out, lse, _, _ = merge_states(9, 3, 40, dtype)
    out, lse = np.nan_to_num(out), np.where(np.isneginf(lse), 1.0, lse).astype(np.float32)
    empty = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for merged in (
        ops.merge_attention_states(out, lse, *empty),
        ops.merge_attention_states(*empty, out, lse),
    ):
        require_same_bits("out", out + out.dtype.type(0), merged[0] + out.dtype.type(0))  # -0 may become 0
        require_same_bits("lse", lse, merged[1])
    nothing, lse_of_nothing = ops.merge_attention_states(*empty, *empty)
    assert (nothing == 0).all() and np.isneginf(lse_of_nothing).all()


@pytest.mark.parametrize("head_dim", [0, 1, 3, 12, 260])
def test_head_dims_that_no_kernel_takes_are_refused(ops: HostOps, head_dim: int) -> None:
    """A multiple of 8 in every op: the kernels move whole groups of 8, which here would go past the end."""
    states = merge_states(3, 2, head_dim, "float32")
    with pytest.raises(ValueError, match=f"^out_a: head_dim is {head_dim}"):
        ops.merge_attention_states(*states)


@pytest.mark.parametrize("other", [-np.inf, 0.5, np.nan])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_nan_lse_is_never_taken_for_an_empty_state(ops: HostOps, other: float, swapped: bool) -> None:
    out = np.ones((1, 1, 8), np.float32)
    states = [(out, np.array([[x]], np.float32)) for x in (np.nan, other)]
    a, b = reversed(states) if swapped else states
    _, lse = ops.merge_attention_states(*a, *b)
    assert np.isnan(lse).all()


def test_rows_do_not_depend_on_each_other(ops: HostOps) -> None:
    states = merge_states(40, 3, 40, "bfloat16")
    out, lse = ops.merge_attention_states(*states)
    for row in (0, 17, 39):
        alone = ops.merge_attention_states(*(array[row : row + 1] for array in states))
        require_same_bits("out", out[row : row + 1], alone[0])
        require_same_bits("lse", lse[row : row + 1], alone[1])


@dtypes
def test_strided_states(ops: HostOps, dtype: str) -> None:
    """Views into wider tensors on either side, and as output; around the output nothing changes."""
    states = merge_states(11, 4, 40, dtype)
    wanted = ops.merge_attention_states(*states)
    wide = [np.full((11, 6, 50), 7.0, states[0].dtype) for _ in range(3)]
    views = [array[:, 1:5, 8:48] for array in wide]
    views[0][...], views[1][...] = states[0], states[2]
    out, lse = ops.merge_attention_states(views[0], states[1], views[1], states[3], out=views[2])
    require_same_bits("out", wanted[0], np.ascontiguousarray(views[2]))
    require_same_bits("lse", wanted[1], lse)
    around = np.full(wide[2].shape, True)
    around[:, 1:5, 8:48] = False
    assert (wide[2][around] == 7).all()


@pytest.mark.parametrize("cut_block", [0, 1, 7, 38])
def test_attention_in_two_parts(ops: HostOps, cut_block: int) -> None:
    """Over the blocks before a cut and those after it, merged: attention over all."""
    case = Case((600, 20, 5), num_q_heads=6)
    inputs = build(case)
    cut = cut_block * case.block_size
    first = replace(inputs, seq_lens=np.minimum(inputs.seq_lens, cut).astype(np.int32))
    rest = replace(
        inputs,
        seq_lens=np.maximum(inputs.seq_lens - cut, 0).astype(np.int32),
        block_tables=np.ascontiguousarray(inputs.block_tables[:, cut_block:]),
    )
    out, lse = ops.merge_attention_states(*first.attention(ops), *rest.attention(ops))
    wanted = expected(case)
    replace(wanted, out_bound=3 * wanted.out_bound, lse_bound=3 * wanted.lse_bound).check(out, lse)
