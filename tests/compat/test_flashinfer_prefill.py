"""FlashInfer's prefill wrapper and its masks against the oracle, in its own layouts."""

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

# A whole prompt, a chunk, one token, none, and a length at a page's end.
CASES = [
    Case((20, 37, 16, 30, 520), (20, 5, 1, 0, 9), num_q_heads=8),
    Case((20, 37, 16), (20, 5, 1), num_q_heads=8, causal=False),
    Case((7, 33, 48), (7, 2, 48), dtype="bfloat16", num_q_heads=6, block_size=1),
    Case((19, 4), (3, 4), dtype="float16", head_dim=40, value_head_dim=24, block_size=5, scale=0.2),
]


def wrapper_of(given: FlashInferCase, kv_layout: str = "NHD", **options: Any) -> Any:
    """A wrapper that has planned this case."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(given.workspace(), kv_layout)
    case = given.inputs.case
    options = {"sm_scale": case.scale, "causal": case.causal, "head_dim_vo": case.value_head_dim, **options}
    wrapper.plan(given.qo_indptr, *given.table, *given.shapes, q_data_type=case.dtype, **options)
    return wrapper


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_base_2_lse(target: Target, case: Case, kv_layout: str) -> None:
    pair = case.value_head_dim is not None  # which do not fit into one tensor
    given = flashinfer_case(case, kv_layout, pair=pair, device=target.device)
    with target.use():
        out, lse = wrapper_of(given, kv_layout).run(given.q, given.cache, return_lse=True)
    expected(case).check(out, natural(lse))


def test_causal_is_not_the_default() -> None:
    given = flashinfer_case(CASES[1])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(given.workspace())
    wrapper.plan(given.qo_indptr, *given.table, *given.shapes, q_data_type=torch.float32)
    expected(CASES[1]).check(wrapper.run(given.q, given.cache))


def test_max_sequence_kv_bounds_the_table() -> None:
    given = flashinfer_case(CASES[0])
    expected(CASES[0]).check(wrapper_of(given, max_sequence_kv=520).run(given.q, given.cache))
    with pytest.raises(ValueError, match="seq_lens"):
        wrapper_of(given, max_sequence_kv=500).run(given.q, given.cache)


def test_block_tables_in_place_of_pages() -> None:
    """Wild entries past the sequences' ends included; of the page table nothing but its shape counts."""
    given = flashinfer_case(CASES[0])
    for tensor in given.table:
        tensor.zero_()
    tables = (arrays.to_torch(x) for x in (given.inputs.block_tables, given.inputs.seq_lens))
    wrapper = wrapper_of(given, **dict(zip(("block_tables", "seq_lens"), tables, strict=True)))
    expected(CASES[0]).check(wrapper.run(given.q, given.cache))


@pytest.mark.parametrize("window_left", [0, 3, 16])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_window_soft_cap_and_sinks(case: Case, window_left: int) -> None:
    given, inputs = flashinfer_case(case), build(case)
    sinks = np.linspace(-2, 3, 8).astype(np.float32)
    out, lse = wrapper_of(given, window_left=window_left, logits_soft_cap=2.0).run(
        given.q, given.cache, return_lse=True, sinks=torch.from_numpy(sinks)
    )
    wanted, wanted_lse = inputs.attention(reference, window=window_left + 1, soft_cap=2.0, sinks=sinks)
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)


# --- custom masks -----------------------------------------------------------------------------------------


def mask_of(case: Case, rule: Any) -> list[torch.Tensor]:
    """bool [q_len, kv_len] per sequence: rule(query row, key position, first query's position)."""
    masks = []
    for q_len, kv_len in zip(case.query_lens, case.seq_lens, strict=True):
        row, key = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
        masks.append(rule(row, key, kv_len - q_len).expand(q_len, kv_len))
    return masks


def causal_rule(row: Any, key: Any, prefix: int) -> Any:
    return key <= prefix + row


def tree_rule(row: Any, key: Any, prefix: int) -> Any:
    """The prefix, itself, and every third of the query tokens before."""
    ancestor = (key >= prefix) & (key - prefix < row) & ((row - (key - prefix)) % 3 == 0)
    return (key < prefix) | (key == prefix + row) | ancestor


def pack(masks: list[torch.Tensor]) -> torch.Tensor:
    """8 bits to a byte from the lowest up, each sequence from a new byte on."""
    packed = [np.packbits(mask.numpy().reshape(-1), bitorder="little") for mask in masks]
    return torch.from_numpy(np.concatenate(packed))


def dense(case: Case, masks: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's softmax under any mask: keys that a row does not see are left out."""
    inputs, outs, lses = build(case), [], []
    scale = case.applied_scale
    for seq, mask in enumerate(masks):
        first, last = inputs.cu_seqlens_q[seq : seq + 2]
        length = inputs.seq_lens[seq]
        caches = inputs.key_cache, inputs.value_cache
        k, v = (reference.sequence_tokens(c, inputs.block_tables[seq], length).swapaxes(0, 1) for c in caches)
        for row, seen in zip(range(first, last), mask.numpy(), strict=True):
            query = inputs.query[row].astype(np.float64).reshape(case.num_kv_heads, case.group, -1)
            scores = reference.logits(query, k[:, seen], scale=scale)
            out, lse = reference.attend(scores, v[:, seen])
            outs.append(out.reshape(case.num_q_heads, -1))
            lses.append(lse.reshape(case.num_q_heads))
    return np.stack(outs), np.stack(lses)


def custom(masks: list[torch.Tensor], packed: bool) -> dict[str, torch.Tensor]:
    if packed:
        return {"packed_custom_mask": pack(masks)}
    return {"custom_mask": torch.cat([mask.reshape(-1) for mask in masks])}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", [causal_rule, lambda row, key, prefix: (row >= 0) & (key >= 0)])
def test_masks_that_are_causal_or_full(rule: Any, packed: bool) -> None:
    """They need no trees, and may have any number of query tokens. `causal` itself does not count then."""
    case = Case((80, 37, 16), (80, 5, 1), num_q_heads=8)
    given, masks = flashinfer_case(case), mask_of(case, rule)
    out, lse = wrapper_of(given, causal=rule is not causal_rule, **custom(masks, packed)).run(
        given.q, given.cache, return_lse=True
    )
    wanted, wanted_lse = dense(case, masks)
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)


@pytest.mark.parametrize("packed", [False, True])
def test_tree_masks(packed: bool) -> None:
    case = Case((80, 37, 16, 100), (11, 5, 1, 64), num_q_heads=8)
    given, masks = flashinfer_case(case), mask_of(case, tree_rule)
    wrapper = wrapper_of(given, **custom(masks, packed))
    out, lse = wrapper.run(given.q, given.cache, return_lse=True)
    wanted, wanted_lse = dense(case, masks)
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)
    # The next plan knows nothing of the tree.
    wrapper.plan(given.qo_indptr, *given.table, *given.shapes, causal=True, q_data_type="float32")
    expected(case).check(wrapper.run(given.q, given.cache))


def test_tree_bits() -> None:
    """What the ops are told, bit 63 included; needs no support of theirs."""
    case = Case((70, 9), (64, 2))
    given = flashinfer_case(case)
    masks = mask_of(case, tree_rule)
    wrapper = wrapper_of(given, **custom(masks, packed=False))
    bits = [
        sum(1 << i for i in range(q_len) if mask[row, mask.shape[1] - q_len + i])
        for q_len, mask in zip(case.query_lens, masks, strict=True)
        for row in range(q_len)
    ]
    told = wrapper._kept["tree_mask"]
    assert told.dtype == torch.int64 and [x & (1 << 64) - 1 for x in told.tolist()] == bits


UNSUPPORTED = {
    "hides keys before its query tokens": lambda row, key, prefix: (key <= prefix + row) & (key != 3),
    "hides a query token from itself": lambda row, key, prefix: key < prefix + row,
    "shows a query token others that come after it": lambda row, key, prefix: key <= prefix + row + 1,
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_masks_that_are_no_trees_are_refused(reason: str) -> None:
    case = Case((16, 30), (1, 6))
    given, masks = flashinfer_case(case), mask_of(case, UNSUPPORTED[reason])
    masks[0] = torch.ones_like(masks[0])
    with pytest.raises(NotImplementedError, match=f"sequence 1 {reason}"):
        wrapper_of(given, **custom(masks, packed=False))


def test_trees_that_are_too_large_are_refused() -> None:
    case = Case((80,), (65,))
    with pytest.raises(NotImplementedError, match="65 query tokens, and trees hold at most 64"):
        wrapper_of(flashinfer_case(case), **custom(mask_of(case, tree_rule), packed=False))
    case = Case((5,), (6,))
    with pytest.raises(NotImplementedError, match="6 query tokens and 5 keys"):
        wrapper_of(flashinfer_case(case), custom_mask=torch.zeros(30, dtype=torch.bool))


def test_a_window_in_a_tree_is_refused() -> None:
    """FlashInfer counts it by row, the ops by depth."""
    case = Case((30,), (6,))
    with pytest.raises(NotImplementedError, match="^window_left"):
        wrapper_of(flashinfer_case(case), window_left=3, **custom(mask_of(case, tree_rule), packed=False))


@pytest.mark.parametrize("name", ["custom_mask", "packed_custom_mask"])
def test_masks_with_too_few_bits(name: str) -> None:
    case = Case((16, 30), (2, 6))
    mask = custom(mask_of(case, causal_rule), packed=name == "packed_custom_mask")
    with pytest.raises(ValueError, match=f"^{name}: has"):
        wrapper_of(flashinfer_case(case), **{name: mask[name][:-1]})


# --- one sequence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
def test_single_prefill(target: Target, causal: bool, kv_layout: str) -> None:
    case = Case((45,), (13,), num_q_heads=6, block_size=45, causal=causal, value_head_dim=32)
    inputs = build(case)
    put = lambda array: arrays.to_torch(np.ascontiguousarray(array), target.device)  # noqa: E731
    block = inputs.block_tables[0, 0]
    rows = [inputs.key_cache[block], inputs.value_cache[block]]
    k, v = (put(x if kv_layout == "NHD" else x.swapaxes(0, 1)) for x in rows)
    q, options = put(inputs.query), {"causal": causal, "kv_layout": kv_layout}
    with target.use():
        out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, **options)
        alone = flashinfer.single_prefill_with_kv_cache(q, k, v, v_scale=2.0, **options)
        (mask,) = mask_of(case, causal_rule)
        masked = flashinfer.single_prefill_with_kv_cache(
            q, k, v, kv_layout=kv_layout, packed_custom_mask=pack([mask])
        )
    expected(case).check(out, natural(lse))
    assert torch.equal(alone, 2 * out)
    assert torch.equal(masked, out) == causal


def test_single_prefill_over_nothing() -> None:
    q, nothing = torch.ones(3, 4, 64), torch.ones(0, 2, 64)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, nothing, nothing, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all() and lse.shape == (3, 4)
