"""FlashInfer's decode wrapper against the oracle, in its own layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashinfer_cases import (  # noqa: E402
    FlashInferCase,
    flashinfer_case,
    natural,
    require_close,
)

from paged_ops import reference  # noqa: E402
from paged_ops.compat import flashinfer  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402
from paged_ops.testing.cases import Case, build  # noqa: E402
from paged_ops.testing.checks import expected  # noqa: E402

# Lengths on both sides of a page's end, none at all, and more than one chunk of keys.
LENGTHS = (1, 15, 16, 17, 0, 530)
CASES = [
    Case(LENGTHS, num_q_heads=8),
    Case(LENGTHS, dtype="float16", num_q_heads=2),
    Case(LENGTHS, dtype="bfloat16", num_q_heads=6, block_size=1),
    Case((40, 7, 33), num_q_heads=6, head_dim=40, block_size=5, scale=0.21),
]


def wrapper_of(given: FlashInferCase, kv_layout: str = "NHD", **options: Any) -> Any:
    """A wrapper that has planned this case."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(given.workspace(), kv_layout)
    dtype = given.inputs.case.dtype
    options.setdefault("sm_scale", given.inputs.case.scale)
    wrapper.plan(*given.table, *given.shapes, q_data_type=dtype, **options)
    return wrapper


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True], ids=["5-D", "pair"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_base_2_lse(target: Target, case: Case, pair: bool, kv_layout: str) -> None:
    given = flashinfer_case(case, kv_layout, pair=pair, device=target.device)
    with target.use():
        out, lse = wrapper_of(given, kv_layout).run(given.q, given.cache, return_lse=True)
    assert out.dtype == given.q.dtype and lse.dtype == torch.float32
    expected(case).check(out, natural(lse))


def test_run_returns_what_it_is_asked_for() -> None:
    given = flashinfer_case(CASES[0])
    wrapper = wrapper_of(given)
    out, lse = wrapper.run_return_lse(given.q, given.cache)
    assert torch.equal(wrapper.run(given.q, given.cache), out)
    into, lse_into = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    result = wrapper.run(given.q, given.cache, out=into, lse=lse_into, return_lse=True)
    assert result[0] is into and result[1] is lse_into
    assert torch.equal(into, out) and torch.equal(lse_into, lse)
    lse_into.fill_(torch.nan)
    assert wrapper.run(given.q, given.cache, out=into, lse=lse_into) is into
    assert torch.equal(lse_into, lse)


def test_begin_forward_and_a_second_plan() -> None:
    """A plan replaces all of the one before."""
    first, second = flashinfer_case(CASES[0]), flashinfer_case(CASES[3])
    wrapper = wrapper_of(first, q_len_per_req=1)
    wrapper.begin_forward(*second.table, *second.shapes, q_data_type="float32", sm_scale=0.21)
    expected(CASES[3]).check(wrapper.run(second.q, second.cache))
    wrapper.end_forward()


def test_last_page_len_of_a_sequence_without_pages_does_not_count() -> None:
    """With pages of one token engines fill last_page_len with ones."""
    case = Case((3, 0, 5), block_size=1)
    given = flashinfer_case(case)
    given.last_page_len.fill_(1)
    expected(case).check(wrapper_of(given).run(given.q, given.cache))


def test_pages_may_be_fewer_than_indices() -> None:
    given = flashinfer_case(CASES[0])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(given.workspace())
    spare = torch.cat([given.indices, torch.full((7,), 2**30, dtype=torch.int32)])
    wrapper.plan(given.indptr, spare, given.last_page_len, *given.shapes, q_data_type="float32")
    expected(CASES[0]).check(wrapper.run(given.q, given.cache))


def test_block_tables_in_place_of_pages() -> None:
    """Wild entries past the sequences' ends included; of the page table nothing but its shape counts."""
    inputs, given = build(CASES[0]), flashinfer_case(CASES[0])
    for tensor in given.table:
        tensor.zero_()
    wrapper = wrapper_of(
        given,
        block_tables=arrays.to_torch(inputs.block_tables),
        seq_lens=arrays.to_torch(inputs.seq_lens),
    )
    expected(CASES[0]).check(wrapper.run(given.q, given.cache))


def test_several_query_tokens_per_sequence() -> None:
    """q_len_per_req: a sequence's last tokens, causal among themselves."""
    case = Case((20, 3, 17), (3, 3, 3), num_q_heads=8)
    given = flashinfer_case(case)
    wrapper = wrapper_of(given, q_len_per_req=3)
    out, lse = wrapper.run(given.q, given.cache, return_lse=True)
    expected(case).check(out, natural(lse))
    with pytest.raises(ValueError, match=r"^q: has 8 rows"):
        wrapper.run(given.q[:-1], given.cache)
    # And a plan for one token each is one of decode again.
    single = flashinfer_case(Case((20, 3, 17), num_q_heads=8))
    wrapper.plan(*single.table, *single.shapes, q_data_type="float32")
    expected(single.inputs.case).check(wrapper.run(single.q, single.cache))


def test_scales_of_unquantised_tensors() -> None:
    """x = stored * scale: those of q and k go into the logits, that of v into the output."""
    case = CASES[3]
    given, inputs = flashinfer_case(case), build(case)
    out, lse = wrapper_of(given).run(
        given.q, given.cache, q_scale=1.5, k_scale=0.75, v_scale=torch.tensor(0.5), return_lse=True
    )
    wanted, wanted_lse = inputs.attention(reference, scale=0.21 * 1.5 * 0.75)
    require_close(out, 0.5 * wanted)
    require_close(natural(lse), wanted_lse)
    for name in ("q_scale", "k_scale"):
        with pytest.raises(NotImplementedError, match=f"^{name}: is a tensor"):
            wrapper_of(given).run(given.q, given.cache, **{name: torch.tensor(2.0)})


@pytest.mark.parametrize("window_left", [-1, 0, 1, 15, 16, 600])
def test_window(window_left: int) -> None:
    """window_left keys before the query, and the query's own."""
    given, inputs = flashinfer_case(CASES[0]), build(CASES[0])
    out, lse = wrapper_of(given, window_left=window_left).run(given.q, given.cache, return_lse=True)
    wanted, wanted_lse = inputs.attention(reference, window=None if window_left < 0 else window_left + 1)
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)


def test_soft_cap_and_sinks() -> None:
    given, inputs = flashinfer_case(CASES[0]), build(CASES[0])
    sinks = np.linspace(-2, 3, 8).astype(np.float32)
    out, lse = wrapper_of(given, logits_soft_cap=2.5, window_left=20).run(
        given.q, given.cache, return_lse=True, sinks=torch.from_numpy(sinks)
    )
    wanted, wanted_lse = inputs.attention(reference, window=21, soft_cap=2.5, sinks=sinks)
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)


def test_no_soft_cap_and_no_window_need_nothing_of_the_ops() -> None:
    """0 and -1 are FlashInfer's words for none."""
    given = flashinfer_case(CASES[0])
    wrapper = wrapper_of(given, logits_soft_cap=0.0, window_left=-1)
    expected(CASES[0]).check(wrapper.run(given.q, given.cache, window_left=-1))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [1, 37, 600])
def test_single_decode(target: Target, kv_len: int, kv_layout: str) -> None:
    case = Case((kv_len,), num_q_heads=6, block_size=kv_len, layout="HND")
    inputs = build(case)
    put = lambda array: arrays.to_torch(np.ascontiguousarray(array), target.device)  # noqa: E731
    block = inputs.block_tables[0, 0]
    rows = [inputs.key_cache[block], inputs.value_cache[block]]
    k, v = (put(x if kv_layout == "NHD" else x.swapaxes(0, 1)) for x in rows)
    with target.use():
        q = put(inputs.query[0])
        out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, kv_layout, return_lse=True)
        alone = flashinfer.single_decode_with_kv_cache(q, k, v, kv_layout)
    assert out.shape == (6, 64) and lse.shape == (6,) and torch.equal(alone, out)
    expected(case).check(out[None], natural(lse)[None])


def test_single_decode_over_nothing() -> None:
    q, nothing = torch.ones(4, 64), torch.ones(0, 2, 64)
    out, lse = flashinfer.single_decode_with_kv_cache(q, nothing, nothing, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
