"""paged_attention_shared_prefix and common_prefix_blocks: attention in two parts, shared blocks and tails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import paged_ops
from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import LAYOUTS, WILD_BLOCK_IDS, Case, Inputs, build
from paged_ops.testing.checks import require_same_bits
from paged_ops.testing.covering import covering
from paged_ops.testing.tolerance import expected_shared_prefix


def shared_inputs(case: Case, num_shared: int) -> tuple[Inputs, np.ndarray]:
    """Inputs whose tables begin with the blocks of the first sequence, and that beginning by itself."""
    inputs = build(case)
    shared = inputs.block_tables[0, :num_shared].copy()
    tables = inputs.block_tables.copy()
    tables[:, :num_shared] = shared
    return replace(inputs, block_tables=tables), shared


def attend(ops: Any, inputs: Inputs, shared: Any, shared_len: int, **options: Any) -> Any:
    options = {"sinks": inputs.sinks, "soft_cap": inputs.case.soft_cap, "return_lse": True} | options
    return ops.paged_attention_shared_prefix(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        shared,
        shared_len,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
        scale=inputs.case.scale,
        **options,
    )


def shared_cases(target: Target) -> list[tuple[Case, int]]:
    axes = {
        "dtype": tuple(arrays.DTYPES),
        "dims": ((64, 64), (128, 128), (40, 80), (256, 256)),
        "heads": ((4, 2), (8, 1), (3, 3)),
        "block_size": (1, 16, 32),
        "layout": tuple(LAYOUTS),
        "varlen": (False, True),
        "sinks": (False, True),
        "soft_cap": (None, 5.0),
        "strided": (False, True),
        "shared_tokens": (32, 128, 544),
    }
    cases = []
    for seed, row in enumerate(covering(axes, seed=5)):
        shared_len, varlen = row.pop("shared_tokens"), row.pop("varlen")
        if row["block_size"] == 1 and shared_len > 128:
            shared_len = 128
        head_dim, value_head_dim = row.pop("dims")
        num_q_heads, num_kv_heads = row.pop("heads")
        tails = (20, 1, 40, 7, 33)
        case = Case(
            tuple(shared_len + tail for tail in tails),
            (3, 2, 40, 0, 17) if varlen else None,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            padding=3 if varlen else 0,
            seed=seed,
            **row,
        )
        cases.append((case, shared_len // case.block_size))
    return cases


@pytest.mark.grid(cases=shared_cases)
def test_against_the_oracle(ops: HostOps, case: tuple[Case, int]) -> None:
    """The shared columns of the tables are not looked at; what nobody may read is NaN."""
    inputs, shared = shared_inputs(*case)
    wanted = expected_shared_prefix(inputs, case[1])
    inputs.block_tables[:, : case[1]] = WILD_BLOCK_IDS[0]
    wanted.check(*attend(ops, inputs, shared, case[1] * case[0].block_size))


def test_the_oracle_is_attention_over_the_joined_tables() -> None:
    inputs, shared = shared_inputs(Case((40, 37), sinks=True), 2)
    out, lse = inputs.attention(reference)
    inputs.block_tables[:, :2] = -1
    again = attend(reference, inputs, shared, 32)
    require_same_bits("out", out, again[0])
    require_same_bits("lse", lse, again[1])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_given_outputs_are_written_in_full(target: Target, kind: Any) -> None:
    ops = HostOps(target, kind)
    case = Case((52, 33, 70), (5, 1, 20), dtype="bfloat16", num_q_heads=6, padding=2, sinks=True)
    inputs, shared = shared_inputs(case, 2)
    wanted = attend(ops, inputs, shared, 32)
    out, lse = inputs.new_out(), np.full(inputs.query.shape[:2], np.nan, np.float32)
    assert len(attend(ops, inputs, shared, 32, out=out, lse=lse)) == 2
    require_same_bits("out", wanted[0], out)
    require_same_bits("lse", wanted[1], lse)
    assert (out[-2:] == 0).all() and np.isneginf(lse[-2:]).all(), "padding sees nothing"
    alone = attend(ops, inputs, shared, 32, return_lse=False)
    require_same_bits("out", wanted[0], alone)


def test_nothing_shared_is_the_ordinary_op(ops: HostOps) -> None:
    inputs, shared = shared_inputs(Case((52, 0, 70), dtype="float16"), 2)
    for wanted, actual in zip(inputs.attention(ops), attend(ops, inputs, shared, 0), strict=True):
        require_same_bits("result", wanted, actual)


def test_no_tails_at_all(ops: HostOps) -> None:
    """Query tokens that are the prefix's last one: the tables have no further column, and need none."""
    case = Case((32, 32), num_q_heads=4)
    inputs, shared = shared_inputs(case, 2)
    wanted = expected_shared_prefix(inputs, 2)
    inputs = replace(inputs, block_tables=np.ascontiguousarray(inputs.block_tables[:, :2]))
    wanted.check(*attend(ops, inputs, shared, 32))


def test_the_first_query_token_may_be_the_last_shared_one(ops: HostOps) -> None:
    inputs, shared = shared_inputs(Case((36, 32), (5, 1)), 2)
    expected_shared_prefix(inputs, 2).check(*attend(ops, inputs, shared, 32))


def test_no_sequences_and_no_tokens(ops: HostOps) -> None:
    inputs, shared = shared_inputs(Case((40, 37)), 2)
    none = replace(
        inputs,
        query=inputs.query[:0],
        block_tables=inputs.block_tables[:0],
        seq_lens=inputs.seq_lens[:0],
    )
    out, lse = attend(ops, none, shared, 32)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    padding = replace(none, query=inputs.query, cu_seqlens_q=np.zeros(1, np.int32))
    out, lse = attend(ops, padding, shared, 32)
    assert (out == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_rows_do_not_depend_on_each_other(ops: HostOps, dtype: str) -> None:
    """However many sequences share the prefix, each row has the same bits."""
    case = Case((600, 548, 570, 545, 560, 600, 544, 550, 700, 571), dtype=dtype, num_q_heads=4)
    inputs, shared = shared_inputs(case, 34)
    wanted = attend(ops, inputs, shared, 544)
    for seqs in ([3], [9, 0], list(range(5)), [8, 3, 3, 1, 0, 2, 4, 5, 6]):
        some = replace(
            inputs,
            query=inputs.query[seqs],
            block_tables=inputs.block_tables[seqs],
            seq_lens=inputs.seq_lens[seqs],
        )
        for whole, part in zip(wanted, attend(ops, some, shared, 544), strict=True):
            require_same_bits("rows", whole[seqs], part)


# --- bad input ------------------------------------------------------------------------------------------


def good(**changes: Any) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """A call that works, spoilt by `changes`; and its outputs, which must stay as they are."""
    inputs, shared = shared_inputs(Case((52, 40), (5, 1)), 2)
    out, lse = np.full_like(inputs.query, 7), np.full(inputs.query.shape[:2], 7, np.float32)
    call: dict[str, Any] = {
        "query": inputs.query,
        "key_cache": inputs.key_cache,
        "value_cache": inputs.value_cache,
        "shared_block_table": shared,
        "shared_len": 32,
        "block_tables": inputs.block_tables,
        "seq_lens": inputs.seq_lens,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "out": out,
        "lse": lse,
        "check": True,
    }
    return call | changes, (out, lse)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


FAULTS: list[tuple[str, Any, Any, str]] = [
    ("shared_len", 31, ValueError, "is 31, wanted a multiple of the block size, 16"),
    ("shared_len", -16, ValueError, "is -16, wanted at least 0"),
    ("shared_len", 48, ValueError, "shared_block_table: has 2 blocks"),
    ("shared_len", 2.0, TypeError, "wanted an integer"),
    ("shared_len", True, TypeError, "wanted an integer"),
    ("shared_block_table", 3, TypeError, "is a int"),
    ("shared_block_table", [1, 2], TypeError, "is a list"),
    ("shared_block_table", np.zeros((1, 2), np.int32), ValueError, r"\(1, 2\)"),
    ("shared_block_table", np.zeros(2, np.int64), TypeError, "int64"),
    ("shared_block_table", np.zeros(4, np.int32)[::2], ValueError, "stride"),
    ("shared_block_table", np.ma.masked_array(i32(0, 1), mask=False), TypeError, "masked"),
    ("shared_block_table", i32(0, 1000), ValueError, r"\[1\] = 1000: wanted 0 <= block < "),
    ("shared_block_table", i32(-1, 0), ValueError, r"\[0\] = -1"),
    ("block_tables", None, TypeError, "NoneType"),
    ("block_tables", i32(1, 2), ValueError, r"\(2,\)"),
    ("block_tables", np.zeros((2, 1), np.int32), ValueError, "has 1 blocks per sequence, wanted at least 2"),
    ("block_tables", np.zeros((2, 4), np.float32), TypeError, "float32"),
    (
        "block_tables",
        np.full((2, 4), 1000, np.int32),
        ValueError,
        r"\[0, 0\] = 1000.*behind the 2 shared blocks",
    ),
    ("seq_lens", "text", TypeError, "is a str"),
    ("seq_lens", np.zeros(2, np.int64), TypeError, "int64"),
    ("seq_lens", i32(52), ValueError, "cu_seqlens_q: shape"),
    ("seq_lens", i32(52, 31), ValueError, r"\[1\] = 31: wanted at least 32"),
    ("seq_lens", i32(35, 40), ValueError, r"\[0\] = 35: wanted at least 36"),
    ("seq_lens", i32(52, 400), ValueError, r"\[1\] = 368: .*behind the 2 shared blocks"),
    ("cu_seqlens_q", i32(0, 5), ValueError, r"\(2,\), wanted \(3,\)"),
    ("cu_seqlens_q", np.zeros(3, np.int64), TypeError, "int64"),
    ("cu_seqlens_q", i32(1, 5, 6), ValueError, r"\[0\] = 1: wanted 0"),
    ("cu_seqlens_q", i32(0, 5, 4), ValueError, r"\[2\] = 4: wanted 5"),
    ("cu_seqlens_q", i32(0, 5, 7), ValueError, r"\[2\] = 7"),
    ("query", 3, TypeError, "int"),
    ("key_cache", 3, TypeError, "int"),
    ("value_cache", np.zeros((3, 16, 2, 64), np.float32), ValueError, "num_blocks"),
    ("out", np.zeros((6, 4, 64), np.float16), TypeError, "float16"),
    ("lse", np.zeros((5, 4), np.float32), ValueError, "lse"),
    ("window", 4, ValueError, "differ from sequence to sequence"),
    ("alibi_slopes", np.ones(4, np.float32), ValueError, "differ from sequence to sequence"),
    ("scale", "text", TypeError, "scale"),
    ("soft_cap", -1.0, ValueError, "soft_cap"),
    ("sinks", np.ones(3, np.float32), ValueError, "sinks"),
    ("check", 1, TypeError, "wanted True or False"),
    ("return_lse", None, TypeError, "wanted True or False"),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), FAULTS, ids=lambda x: str(x)[:24])
def test_bad_input(ops: HostOps, name: str, value: Any, error: Any, words: str) -> None:
    """The argument is named, and no output is touched."""
    if ops.target.device != "cpu" and isinstance(value, np.ndarray):
        pytest.skip("arrays lose their strides and masks on the way to the device")
    call, outputs = good(**{name: value})
    with pytest.raises(error, match=words) as caught:
        ops.paged_attention_shared_prefix(**call)
    named = str(caught.value).partition(":")[0].partition("[")[0]
    assert named in call, str(caught.value)
    for output in outputs:
        assert (output == 7).all()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seq_lens", i32(52, 31), r"^seq_lens\[1\] = 31: wanted at least 32"),
        ("seq_lens", i32(52, 2**31 - 1), r"^seq_lens\[1\] = .*behind the 2 shared blocks"),
        ("shared_block_table", i32(0, -5), r"^shared_block_table\[1\] = -5: wanted 0 <= block <"),
        ("block_tables", np.full((2, 4), -1, np.int32), r"^block_tables\[0, 0\] = -1"),
    ],
)
def test_bad_values_in_decode(ops: HostOps, name: str, value: Any, words: str) -> None:
    inputs, shared = shared_inputs(Case((52, 40)), 2)
    out = np.full_like(inputs.query, 7)
    call = {
        "query": inputs.query,
        "key_cache": inputs.key_cache,
        "value_cache": inputs.value_cache,
        "shared_block_table": shared,
        "block_tables": inputs.block_tables,
        "seq_lens": inputs.seq_lens,
        "check": None if ops.target.backend == "cpu" else True,
    } | {name: value}
    with pytest.raises(ValueError, match=words):
        ops.paged_attention_shared_prefix(**call, shared_len=32, out=out)
    assert (out == 7).all()


def test_out_must_not_share_memory_with_an_input(ops: HostOps) -> None:
    if ops.target.device != "cpu":
        pytest.skip("arrays lose their overlap on the way to the device")
    call, _ = good()
    call["out"] = call["query"]
    before = call["query"].copy()
    with pytest.raises(ValueError, match="^out: shares memory with query"):
        ops.paged_attention_shared_prefix(**call)
    require_same_bits("query", before, call["query"])


# --- torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("varlen", [False, True])
def test_in_a_full_graph(target: Target, varlen: bool) -> None:
    torch = pytest.importorskip("torch")
    case = Case((52, 40), (5, 1) if varlen else None, dtype="bfloat16")
    inputs, shared = shared_inputs(case, 2)
    x = inputs.map(lambda array: arrays.to_torch(array, target.device))
    table = arrays.to_torch(shared, target.device)

    def layer(x: dict[str, Any]) -> Any:
        out, lse = paged_ops.paged_attention_shared_prefix(**x, shared_len=32, return_lse=True)
        return out + 1, lse * 2

    arguments = {
        "query": x.query,
        "key_cache": x.key_cache,
        "value_cache": x.value_cache,
        "shared_block_table": table,
        "block_tables": x.block_tables,
        "seq_lens": x.seq_lens,
        "cu_seqlens_q": x.cu_seqlens_q,
    }
    with target.use():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for wanted, actual in zip(layer(arguments), compiled(arguments), strict=True):
            assert arrays.same_bits(wanted, actual)


# --- how much is shared ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "lens", "wanted"),
    [
        ([[1, 2, 3], [1, 2, 4]], [12, 12], 2),
        ([[1, 2, 3], [1, 2, 3]], [12, 11], 2),  # the third is not filled by both
        ([[1, 2, 3], [1, 2, 3]], [12, 12], 3),
        ([[1, 2, 3], [5, 2, 3]], [12, 12], 0),
        ([[1, 2, 3], [1, 2, 3]], [12, 3], 0),
        ([[1, 2, 3]], [9], 2),
        ([[1, 2], [1, 2]], [100, 100], 2),  # no more than the tables have
        (np.zeros((0, 3), np.int32), np.zeros(0, np.int32), 0),
        (np.zeros((2, 0), np.int32), [0, 0], 0),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_common_prefix_blocks(tables: Any, lens: Any, wanted: int, kind: str) -> None:
    tables, lens = np.asarray(tables, np.int32), np.asarray(lens, np.int32)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        tables, lens = torch.from_numpy(tables), torch.from_numpy(lens)
    assert paged_ops.common_prefix_blocks(tables, lens, 4) == wanted


def test_common_prefix_blocks_names_what_is_wrong() -> None:
    tables, lens = np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    for arguments, error, words in [
        (([[1]], lens, 4), TypeError, "^block_tables: is a list"),
        ((tables[0], lens, 4), ValueError, "^block_tables: shape"),
        ((tables, lens[:1], 4), ValueError, "^seq_lens: shape"),
        ((tables, lens.astype(np.float32), 4), TypeError, "^seq_lens: dtype"),
        ((tables, lens, 0), ValueError, "^block_size: is 0"),
        ((tables, lens, 4.0), TypeError, "^block_size: is 4.0"),
    ]:
        with pytest.raises(error, match=words):
            paged_ops.common_prefix_blocks(*arguments)
