"""Planning: no word from the device, tables as wide as they must be, graphs' addresses, errors by name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashinfer_cases import flashinfer_case, require_close  # noqa: E402

from paged_ops import reference  # noqa: E402
from paged_ops.compat import flashinfer  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.cases import Case, build  # noqa: E402
from paged_ops.testing.checks import expected  # noqa: E402

CASE = Case((20, 37, 0, 16), (2, 3, 0, 1), num_q_heads=8)
DECODE = Case((20, 37, 0, 16), num_q_heads=8)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_plan(workspace: Any, table: Any, given: Any, **options: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    wrapper.plan(*table, *given.shapes, q_data_type="float32", **options)
    return wrapper


# --- what may be read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("indptr_on_host", [False, True])
def test_a_plan_reads_nothing_from_the_device(indptr_on_host: bool) -> None:
    """Meta tensors have no values: whoever asks for one gets an error. The shapes are all that is left."""
    given = flashinfer_case(CASE)
    meta = lambda tensor: tensor.to("meta")  # noqa: E731
    workspace = meta(given.workspace())
    table = given.indptr if indptr_on_host else meta(given.indptr), *map(meta, given.table[1:])
    width = 3 if indptr_on_host else len(given.indices)
    with pytest.raises((RuntimeError, NotImplementedError)):
        meta(given.indptr).max().item()

    wrapper = decode_plan(workspace, table, given)
    assert wrapper._kept["block_tables"].shape == (4, width) and wrapper._kept["seq_lens"].is_meta
    wrapper.plan(*table, *given.shapes, q_data_type="float32", q_len_per_req=2)
    assert wrapper._kept["qo_indptr"].is_meta

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    wrapper.plan(meta(given.qo_indptr), *table, *given.shapes, causal=True)
    assert wrapper._kept["block_tables"].shape == (4, width)
    wrapper.plan(meta(given.qo_indptr), *table, *given.shapes, max_sequence_kv=33)
    assert wrapper._kept["block_tables"].shape == (4, 3)
    with pytest.raises(NotImplementedError, match="^custom_mask: .* on the CPU"):
        mask = torch.ones(1, dtype=torch.bool, device="meta")
        wrapper.plan(meta(given.qo_indptr), *table, *given.shapes, custom_mask=mask)

    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    lengths = meta(int32(*CASE.seq_lens))
    kinds = torch.float32, torch.float32
    wrapper.plan(meta(given.qo_indptr), *table[:2], lengths, 8, 64, 16, 16, True, 0.1, *kinds)
    assert wrapper._kept["block_tables"].shape == (4, width)

    levels = [[meta(given.qo_indptr)] * 2, *([tensor] * 2 for tensor in table)]
    flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace).plan(*levels, *given.shapes)


def test_helpers_read_nothing_from_the_device() -> None:
    meta = {"dtype": torch.int32, "device": "meta"}
    indptr, lengths, indices = torch.empty(4, **meta), torch.empty(3, **meta), torch.empty(9, **meta)
    assert flashinfer.get_seq_lens(indptr, lengths, 16).shape == (3,)
    batch, position = flashinfer.get_batch_indices_positions(indptr, lengths, 11)
    assert batch.shape == position.shape == (11,) and batch.is_meta and indices.is_meta


def test_the_bound_by_shapes_gives_the_same_result() -> None:
    """As wide a table as a device's plan has."""
    given = flashinfer_case(DECODE)
    wrapper = decode_plan(given.workspace(), given.table, given)
    narrow = wrapper.run(given.q, given.cache)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(given.workspace())
    options: dict[str, Any] = dict(causal=True, q_data_type="float32")
    wrapper.plan(given.qo_indptr, *given.table, *given.shapes, max_sequence_kv=1000, **options)
    assert wrapper._kept["block_tables"].shape == (4, 63)
    assert torch.equal(wrapper.run(given.q, given.cache), narrow)


def test_tables_name_pages_that_exist_past_a_sequence() -> None:
    """On a GPU, where nobody checks, a length that is too large must stay inside the cache."""
    given = flashinfer_case(DECODE)
    indices = int32(5, 3, 1, 2, 6, 4)
    wrapper = decode_plan(given.workspace(), (int32(0, 2, 5, 5, 6), indices, given.last_page_len), given)
    assert wrapper._kept["block_tables"].tolist() == [[5, 3, 0], [1, 2, 6], [0, 0, 0], [4, 0, 0]]
    assert wrapper._kept["seq_lens"].tolist() == [20, 37, 0, 16]


def test_tables_on_the_host_may_be_int64() -> None:
    given = flashinfer_case(DECODE)
    table = [tensor.long() for tensor in given.table]
    expected(DECODE).check(decode_plan(given.workspace(), table, given).run(given.q, given.cache))


# --- CUDA graphs ------------------------------------------------------------------------------------------


def test_addresses_last_from_the_first_plan_on() -> None:
    given, longer = flashinfer_case(CASE), flashinfer_case(Case((9, 50, 3, 1), (1, 4, 1, 1), num_q_heads=8))
    buffers = [torch.empty_like(given.qo_indptr) for _ in range(2)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        given.workspace(),
        use_cuda_graph=True,
        qo_indptr_buf=buffers[0],
        paged_kv_indptr_buf=buffers[1],
        paged_kv_indices_buf=int32(*range(12)),
        paged_kv_last_page_len_buf=int32(*range(4)),
    )
    assert wrapper.is_cuda_graph_enabled
    kept = []
    for case in (given, longer, given):
        wrapper.plan(case.qo_indptr, *case.table, *case.shapes, causal=True, q_data_type="float32")
        expected(case.inputs.case).check(wrapper.run(case.q, case.cache))
        kept.append({name: tensor.data_ptr() for name, tensor in wrapper._kept.items()})
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 3
    # They are the wrapper's own: the caller's tensors may go or change.
    assert wrapper._kept["qo_indptr"].data_ptr() not in {x.data_ptr() for x in (given.qo_indptr, *buffers)}
    # A graph's q has rows for its largest batch; those past the last sequence's are empty.
    padded = torch.cat([given.q, given.q[:3]])
    assert (wrapper.run(padded, given.cache)[len(given.q) :] == 0).all()

    with pytest.raises(ValueError, match="^indptr: is of 3 sequences and 5 pages"):
        wrapper.plan(given.qo_indptr[:-1], given.indptr[:-1], given.indices[:5], *short(given))
    with pytest.raises(ValueError, match="^indptr: is of 4 sequences and 13 pages"):
        wrapper.plan(given.qo_indptr, given.indptr, int32(*range(13)), given.last_page_len, *given.shapes)
    with pytest.raises(ValueError, match=r"^block_tables: shape is \(4, 7\), the CUDA graph's is \(4, 12\)"):
        tables = torch.zeros(4, 7, dtype=torch.int32)
        wrapper.plan(given.qo_indptr, *given.table, *given.shapes, block_tables=tables)


def short(given: Any) -> tuple[Any, ...]:
    return given.last_page_len[:-1], *given.shapes


def test_graphs_want_buffers() -> None:
    with pytest.raises(ValueError, match="^use_cuda_graph"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), use_cuda_graph=True)


def test_without_graphs_a_plan_copies_no_table_of_the_caller() -> None:
    given = flashinfer_case(CASE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(given.workspace())
    wrapper.plan(given.qo_indptr, *given.table, *given.shapes)
    assert wrapper._kept["qo_indptr"].data_ptr() == given.qo_indptr.data_ptr()


# --- errors -----------------------------------------------------------------------------------------------


BAD_TABLES = {
    "indptr: starts": dict(indptr=int32(1, 2, 5, 5, 6)),
    "indptr: starts at 0 or falls": dict(indptr=int32(0, 2, 1, 5, 6)),
    "indptr: shape": dict(indptr=int32(0, 2, 5, 5, 6)[None]),
    "indices: shape": dict(indices=int32(1)[None]),
    "indices: has 4 pages, indptr ends at 6": dict(indices=int32(1, 2, 3, 4)),
    "last_page_len: shape": dict(last_page_len=int32(1, 2, 3)),
    "last_page_len: holds 17": dict(last_page_len=int32(4, 17, 0, 16)),
    "last_page_len: holds 0": dict(last_page_len=int32(4, 0, 0, 16)),
}


@pytest.mark.parametrize("message", BAD_TABLES)
def test_tables_that_contradict_themselves(message: str) -> None:
    given = flashinfer_case(DECODE)
    fields = dict(indptr=given.indptr, indices=given.indices, last_page_len=given.last_page_len)
    with pytest.raises(ValueError, match=f"^{message}"):
        decode_plan(given.workspace(), {**fields, **BAD_TABLES[message]}.values(), given)
    named = {f"paged_kv_{name}": value for name, value in {**fields, **BAD_TABLES[message]}.items()}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(given.workspace())
    with pytest.raises(ValueError, match="^paged_kv_"):
        wrapper.plan(given.qo_indptr, **named, **dict(zip(SHAPE_NAMES, given.shapes, strict=True)))


SHAPE_NAMES = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")


def test_tensors_that_were_not_planned_for() -> None:
    given = flashinfer_case(DECODE)
    wrapper = decode_plan(given.workspace(), given.table, given)
    for message, q, cache in (
        ("q: dtype is torch.float16, planned was torch.float32", given.q.half(), given.cache),
        ("paged_kv_cache: dtype is torch.float16", given.q, given.cache.half()),
        (r"q: shape is \[., 4, 64\], planned was \(8, 64\)", given.q[:, :4], given.cache),
        ("q: has 3 rows", given.q[:3], given.cache),
        (r"paged_kv_cache: shape is \[., 8, 2, 64\]", given.q, given.cache[:, :, :8]),
        (r"paged_kv_cache: shape is \(8, 2, 16, 2\), wanted", given.q, given.cache[..., 0]),
        ("paged_kv_cache: has 3 tensors", given.q, (given.cache[:, 0],) * 3),
        ("paged_kv_cache: shape is .* 4 dimensions", given.q, (given.cache, given.cache)),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            wrapper.run(q, cache)
    # What FlashInfer plans for when nobody says otherwise is float16.
    wrapper.plan(*given.table, *given.shapes)
    with pytest.raises(ValueError, match="^q: dtype is torch.float32, planned was torch.float16"):
        wrapper.run(given.q, given.cache)

    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(given.workspace())
    prefill.plan(given.qo_indptr, *given.table, *given.shapes, q_data_type="float32")
    with pytest.raises(ValueError, match="^q: has 5 rows, qo_indptr ends at 4"):
        prefill.run(torch.cat([given.q, given.q[:1]]), given.cache)
    with pytest.raises(ValueError, match="^qo_indptr: shape"):
        prefill.plan(given.qo_indptr[:-1], *given.table, *given.shapes)
    with pytest.raises(ValueError, match="^qo_indptr: starts"):
        prefill.plan(int32(0, 2, 1, 3, 4), *given.table, *given.shapes)


def test_run_before_plan() -> None:
    given = flashinfer_case(DECODE)
    for kind in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    ):
        with pytest.raises(RuntimeError, match="plan"):
            kind(given.workspace()).run(given.q, given.cache)


def test_layouts_by_name() -> None:
    with pytest.raises(KeyError, match="kv_layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), "NDH")
    with pytest.raises(KeyError, match="kv_layout"):
        flashinfer.single_decode_with_kv_cache(torch.ones(2, 8), *torch.ones(2, 3, 2, 8), kv_layout="nhd")
    for bad in ((torch.ones(8), torch.ones(3, 2, 8)), (torch.ones(2, 8), torch.ones(3, 8))):
        with pytest.raises(ValueError, match="^[qk]: shape"):
            flashinfer.single_decode_with_kv_cache(bad[0], bad[1], bad[1])


REFUSED_IN_PLAN: dict[str, Any] = {
    "pos_encoding_mode": "ROPE_LLAMA",
    "o_data_type": torch.float16,
}
REFUSED_IN_PREFILL_PLAN = {
    "prefix_len_ptr": int32(0),
    "token_pos_in_items_ptr": int32(0),
    "max_item_len_ptr": int32(0),
}
REFUSED_IN_RUN = {
    "kv_cache_sf": torch.ones(1),
    "skip_softmax_threshold_scale_factor": 1.0,
}


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_what_is_not_carried_over_says_why(kind: str) -> None:
    given = flashinfer_case(DECODE)
    wrapper_class = {
        "decode": flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        "prefill": flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    }[kind]
    wrapper = wrapper_class(given.workspace())
    first = (given.qo_indptr,) if kind == "prefill" else ()

    def plan(**options: Any) -> None:
        wrapper.plan(*first, *given.table, *given.shapes, q_data_type="float32", **options)

    refused = REFUSED_IN_PLAN | (REFUSED_IN_PREFILL_PLAN if kind == "prefill" else {"window_right": 1})
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: .{{15}}"):
            plan(**{name: value})
    with pytest.raises(NotImplementedError, match="ALIBI"):
        plan(pos_encoding_mode="ALIBI")
    with pytest.raises(KeyError, match="pos_encoding_mode"):
        plan(pos_encoding_mode="none")
    plan(o_data_type="float32")
    for name, value in REFUSED_IN_RUN.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: .{{15}}"):
            wrapper.run(given.q, given.cache, **{name: value})
    with pytest.raises(NotImplementedError, match=r"^\*args"):
        wrapper.run(given.q, given.cache, 1.0)
    with pytest.raises(ValueError, match="^window_left: is 3, planned was -1"):
        wrapper.run(given.q, given.cache, window_left=3)
    with pytest.raises(NotImplementedError, match="^jit_args"):
        wrapper_class(given.workspace(), jit_args=["name"])
    with pytest.raises(NotImplementedError, match="^backend: 'cudnn'"):
        wrapper_class(given.workspace(), backend="cudnn")


def test_what_only_chooses_a_kernel_has_no_effect() -> None:
    given = flashinfer_case(DECODE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        given.workspace(), use_tensor_cores=True, backend="fa3"
    )
    wrapper.plan(
        *given.table, *given.shapes, q_data_type="float32", fixed_split_size=4, disable_split_kv=True
    )
    wrapper.reset_workspace_buffer(torch.empty(3), torch.empty(3))
    assert wrapper.use_tensor_cores
    expected(DECODE).check(wrapper.run(given.q, given.cache, enable_pdl=True))
    with pytest.raises(ValueError, match="^float_workspace_buffer: is on meta"):
        wrapper.reset_workspace_buffer(torch.empty(3, device="meta"), torch.empty(3))


def test_argument_names_and_order() -> None:
    """Positional calls of FlashInfer's, as engines make them."""

    def names(function: Any) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]

    table = ["indptr", "indices", "last_page_len"]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    assert names(decode)[:4] == ["float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores"]
    assert names(decode.plan)[:10] == [
        *table, "num_qo_heads", "num_kv_heads", "head_dim", "page_size", "pos_encoding_mode", "window_left",
        "logits_soft_cap",
    ]  # fmt: skip
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    assert names(prefill.plan)[:17] == [
        "qo_indptr", *(f"paged_kv_{name}" for name in table), "num_qo_heads", "num_kv_heads", "head_dim_qk",
        "page_size", "head_dim_vo", "custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode",
        "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap",
    ]  # fmt: skip
    assert names(flashinfer.append_paged_kv_cache) == [
        "append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices",
        "kv_indptr", "kv_last_page_len", "kv_layout",
    ]  # fmt: skip
    assert names(flashinfer.BatchMLAPagedAttentionWrapper.plan)[:12] == [
        "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe",
        "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type",
    ]  # fmt: skip


# --- quantised caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tensor", [False, True])
def test_quantised_caches_go_to_the_ops_with_their_scales(as_tensor: bool) -> None:
    inputs = build(DECODE)
    given = flashinfer_case(DECODE, pair=True)
    stored = [
        (cache / scale).to(torch.float8_e4m3fn) for cache, scale in zip(given.cache, (0.5, 2.0), strict=True)
    ]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(given.workspace())
    wrapper.plan(*given.table, *given.shapes, q_data_type="float32", kv_data_type=torch.float8_e4m3fn)
    scales = (torch.tensor(0.5), torch.tensor(2.0)) if as_tensor else (0.5, 2.0)
    out = wrapper.run(given.q, tuple(stored), k_scale=scales[0], v_scale=scales[1])
    meant = [arrays.to_numpy(x.float()) * s for x, s in zip(stored, (0.5, 2.0), strict=True)]
    wanted = reference.paged_attention_decode(inputs.query, *meant, inputs.block_tables, inputs.seq_lens)
    require_close(out, np.asarray(wanted))
