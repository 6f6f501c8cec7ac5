"""vLLM's decode attention against the oracle, in its classic layout of packed keys and transposed values."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_cases import classic_case  # noqa: E402

from paged_ops.compat import vllm  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402
from paged_ops.testing.cases import Case  # noqa: E402
from paged_ops.testing.checks import expected  # noqa: E402

# Lengths on both sides of a block's end, none at all, and more than one chunk of keys.
LENGTHS = (1, 15, 16, 17, 0, 530)
CASES = [
    Case(LENGTHS, num_q_heads=8),
    Case(LENGTHS, dtype="float16", num_q_heads=2, head_dim=128),
    Case(LENGTHS, dtype="bfloat16", num_q_heads=6, alibi=True),
    Case((40, 7, 33), dtype="bfloat16", num_q_heads=6, head_dim=80, block_size=8, scale=0.21),
    Case((40, 7, 33), num_q_heads=32, num_kv_heads=1, head_dim=256, block_size=32, alibi=True),
    Case(LENGTHS, dtype="bfloat16", cache_dtype="float8_e4m3fn"),
    Case(LENGTHS, dtype="float16", cache_dtype="float8_e4m3fn", scales="tensor", num_q_heads=8),
    Case((40, 7, 33), cache_dtype="float8_e5m2", scales="head", head_dim=96, block_size=32, alibi=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(target: Target, case: Case) -> None:
    """In place: into `out`, and into nothing else."""
    given = classic_case(case, target.device)
    before = [x.clone() for x in (given.query, given.key_cache, given.value_cache)]
    address = given.out.data_ptr()
    with target.use():
        assert vllm.paged_attention_v1(*given.arguments().values()) is None
    assert given.out.data_ptr() == address
    expected(case).check(given.out)
    for was, now in zip(before, (given.query, given.key_cache, given.value_cache), strict=True):
        assert arrays.same_bits(was, now)


@pytest.mark.parametrize("case", CASES[2:4], ids=str)
def test_v2_is_v1_and_leaves_its_scratch_alone(target: Target, case: Case) -> None:
    given = classic_case(case, target.device)
    arguments = given.arguments()
    with target.use():
        vllm.paged_attention_v1(**arguments)
        first = given.out.clone()
        given.out.fill_(torch.nan)
        partitions = -(-max(case.seq_lens) // 512)
        shape = (len(case.seq_lens), case.num_q_heads, partitions)
        scratch = [torch.full(s, 7.0, device=target.device) for s in (shape, shape, (*shape, case.head_dim))]
        vllm.paged_attention_v2(given.out, *scratch, *list(arguments.values())[1:])
    assert arrays.same_bits(given.out, first)
    assert all(bool((x == 7).all()) for x in scratch)


def test_rows_of_a_fused_tensor() -> None:
    """The query out of a fused QKV product, the output into a larger buffer."""
    case = CASES[2]
    given, heads = classic_case(case), case.num_q_heads
    fused = torch.full((len(case.seq_lens), heads + 4, case.head_dim), torch.nan, dtype=torch.bfloat16)
    fused[:, :heads] = given.query
    room = torch.full((len(case.seq_lens) + 2, heads, case.head_dim), 7.0, dtype=torch.bfloat16)
    arguments = given.arguments() | {"query": fused[:, :heads], "out": room[1:-1]}
    vllm.paged_attention_v1(**arguments)
    expected(case).check(room[1:-1])
    assert (room[[0, -1]] == 7).all()


def test_float8_tensors_are_as_good_as_bytes() -> None:
    given = classic_case(CASES[6])
    caches = {n: given.arguments()[n].view(torch.float8_e4m3fn) for n in ("key_cache", "value_cache")}
    vllm.paged_attention_v1(**given.arguments() | caches)
    expected(CASES[6]).check(given.out)


def test_scales_of_plain_caches_are_not_looked_at() -> None:
    given = classic_case(CASES[0])
    vllm.paged_attention_v1(**given.arguments() | {"k_scale": torch.tensor([torch.nan]), "v_scale": 3.0})
    expected(CASES[0]).check(given.out)


def test_tp_rank_and_the_neutral_blocksparse_arguments_have_no_effect() -> None:
    given = classic_case(CASES[0])
    vllm.paged_attention_v1(*given.arguments().values(), 3, 0, 1, 64, 0)
    expected(CASES[0]).check(given.out)


@pytest.mark.parametrize(
    ("name", "value"),
    [("local_blocks", 16), ("vert_stride", 8), ("block_size", 32), ("head_sliding_step", 1)],
)
def test_blocksparse_is_refused(name: str, value: int) -> None:
    given = classic_case(CASES[0])
    with pytest.raises(NotImplementedError, match=f"^blocksparse_{name}: is {value}.*window"):
        vllm.paged_attention_v1(**given.arguments(), **{f"blocksparse_{name}": value})
    assert given.out.isnan().all()


# What is wrong -> (the changed argument, from the given ones), the error, what it says.
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "num_kv_heads": (lambda a: {"num_kv_heads": 3}, ValueError, "^num_kv_heads: is 3, wanted 2"),
    "block_size": (lambda a: {"block_size": 32}, ValueError, "^block_size: is 32, wanted 16"),
    "flat keys": (
        lambda a: {"key_cache": a["key_cache"].flatten(3)},
        ValueError,
        r"^key_cache: shape is .*, wanted \[num_blocks, num_kv_heads, head_dim / 4, block_size, 4\]",
    ),
    "packs of another dtype": (
        lambda a: {"key_cache": a["key_cache"].unflatten(4, (2, 2)).flatten(2, 3)},
        ValueError,
        r"^key_cache: shape is .*block_size, 4\] for torch.float32",
    ),
    "5-D values": (lambda a: {"value_cache": a["key_cache"]}, ValueError, "^value_cache: shape is"),
    "values of other blocks": (
        lambda a: {"value_cache": a["value_cache"][1:]},
        ValueError,
        r"^value_cache: shape.*num_blocks.*\(from paged_ops.paged_attention_decode\)",
    ),
    "kv_cache_dtype": (
        lambda a: {"kv_cache_dtype": "fp8_ds_mla"},
        NotImplementedError,
        "^kv_cache_dtype: is 'fp8_ds_mla', carried over are 'auto', 'fp8'.*paged_ops.write_kv_cache",
    ),
    "plain caches as fp8": (
        lambda a: {"kv_cache_dtype": "fp8"},
        TypeError,
        "^key_cache: dtype is torch.float32, and kv_cache_dtype 'fp8' wants uint8",
    ),
    "bytes as plain caches": (
        lambda a: {"key_cache": a["key_cache"].view(torch.uint8)},
        TypeError,
        "^key_cache: dtype is torch.uint8, and kv_cache_dtype 'auto'",
    ),
    "int64 lengths": (
        lambda a: {"seq_lens": a["seq_lens"].long()},
        TypeError,
        r"^seq_lens: dtype is int64, wanted int32.*\(from paged_ops.paged_attention_decode\)",
    ),
    "a table of other sequences": (
        lambda a: {"block_tables": a["block_tables"][1:]},
        ValueError,
        "paged_attention_decode",
    ),
    "out of other heads": (lambda a: {"out": a["out"][:, 1:]}, ValueError, "^out: shape"),
    "slopes of other heads": (
        lambda a: {"alibi_slopes": torch.ones(3)},
        ValueError,
        "^alibi_slopes: shape",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    given = classic_case(CASES[0])
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        vllm.paged_attention_v1(**given.arguments() | change(given.arguments()))
    assert given.out.isnan().all()


def test_a_head_dim_that_the_ops_refuse_names_the_op() -> None:
    """vLLM's kernels have sizes of their own; ours are multiples of 8."""
    key_cache, value_cache = torch.zeros(2, 1, 25, 16, 4), torch.zeros(2, 1, 100, 16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.zeros(1, 1, 100)
    with pytest.raises(ValueError, match="100, wanted a multiple of 8.*paged_ops.paged_attention_decode"):
        vllm.paged_attention_v1(
            query,
            query.clone(),
            key_cache,
            value_cache,
            1,
            0.1,
            table,
            lengths,
            16,
            1,
            None,
            "auto",
            1.0,
            1.0,
        )


def test_blocks_that_are_none_of_the_caches() -> None:
    given = classic_case(CASES[0])
    given.block_tables[1, 0] = 10**6
    with pytest.raises(ValueError, match="block_tables.*1000000"):
        vllm.paged_attention_v1(**given.arguments())
    assert given.out.isnan().all()
