"""The checks must complain about every fault: tests that cannot fail prove nothing."""

from __future__ import annotations

import pytest

from paged_ops.testing.backends import HostOps
from paged_ops.testing.cache_mutations import OP_MUTATIONS, OpMutation
from paged_ops.testing.cases import Case
from paged_ops.testing.checks import (
    check_attention,
    check_copy,
    check_gather,
    check_merge,
    check_rope,
    check_swap,
    check_write,
)
from paged_ops.testing.mutations import ATTENTION_MUTATIONS, Mutation

DTYPES = ("float32", "float16", "bfloat16")
LENS, Q_LENS = (0, 1, 33, 300, 700), (2, 1, 5, 20, 3)
CASES = [
    case
    for dtype in DTYPES
    for case in (
        Case(LENS, dtype=dtype, num_q_heads=2, num_kv_heads=2, scale=0.3),
        Case(
            LENS,
            dtype=dtype,
            num_q_heads=8,
            num_kv_heads=2,
            head_dim=40,
            block_size=7,
            layout="HND",
            scale=0.1,
        ),
        Case(LENS, Q_LENS, dtype=dtype, num_q_heads=4, num_kv_heads=1, padding=2),
        Case(LENS, Q_LENS, dtype=dtype, num_q_heads=4, num_kv_heads=2, causal=False, scale=0.3),
        Case(LENS, dtype=dtype, soft_cap=4.0, window=200, alibi=True, sinks=True),
        Case(LENS, Q_LENS, dtype=dtype, soft_cap=4.0, window=20, alibi=True, sinks=True, tree=True),
    )
]


@pytest.mark.parametrize("mutation", ATTENTION_MUTATIONS, ids=str)
def test_attention_fault_is_seen(ops: HostOps, mutation: Mutation) -> None:
    attention = mutation(lambda inputs: inputs.attention(ops))
    cases = [case for case in CASES if mutation.applies(case)]
    assert cases, "no case has what this mutation needs"
    if ops.target.backend == "emulated":
        cases = cases[:2]
    for case in cases:
        with pytest.raises((AssertionError, ValueError)) as caught:
            check_attention(attention, case)
        complained = str(caught.value).startswith(("out: ", "lse: ", "block_tables: ", "seq_lens: "))
        assert complained, f"{case}: {caught.value}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_fault_nothing_is_seen(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutation", OP_MUTATIONS, ids=str)
def test_fault_of_another_op_is_seen(ops: HostOps, mutation: OpMutation, dtype: str) -> None:
    case = Case((0, 5, 33), dtype=dtype, block_size=4, layout="pool", strided=True)
    checks = {
        "write_kv_cache": lambda faulty: check_write(faulty, case),
        "copy_blocks": lambda faulty: check_copy(faulty, case),
        "swap_blocks": lambda faulty: check_swap(faulty, case, "HND"),
        "gather_kv_cache": lambda faulty: check_gather(faulty, case, spare_rows=3),
        "merge_attention_states": lambda faulty: check_merge(faulty, 7, 3, 40, dtype),
        "rope_and_write_kv_cache": lambda faulty: check_rope(
            faulty, case, 32, interleaved=False, in_place=False
        ),
    }
    check = checks[mutation.op]
    check(ops)
    with pytest.raises(AssertionError, match=r"^[a-z_ ]+: .*(differ|wrong)"):
        check(mutation(ops))
