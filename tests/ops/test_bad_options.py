"""Flags, counts, odd dtypes and interrupts: what else a caller can get wrong, beside tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_bad_input import Call, decode, each_argument, invoke, require_refused, varlen

import paged_ops
from paged_ops import _backend
from paged_ops.testing.backends import HostOps, Target


@pytest.mark.parametrize("dtype", ["clongdouble", "complex64", "longdouble"])
@each_argument
def test_dtypes_of_unusual_size(ops: HostOps, make: Callable[[], Call], name: str, dtype: str) -> None:
    """A complex number of two long doubles has 256 bits, which wraps to none in a byte."""
    if ops.target.device != "cpu":
        pytest.skip("numpy's own dtypes")
    call = make()
    call.arguments[name] = call.arguments[name].astype(dtype)
    with pytest.raises((TypeError, ValueError), match="dtype is "):
        invoke(ops, call)


@pytest.mark.parametrize("flag", ["causal", "check", "return_lse"])
@pytest.mark.parametrize("value", [None, "x", 1])
def test_a_flag_is_true_or_false(ops: HostOps, flag: str, value: Any) -> None:
    """None above all: for `causal` it would quietly mean False."""
    if flag == "check" and value is None:
        return  # the default: PAGED_OPS_CHECK decides
    call = varlen()
    call.arguments[flag] = value
    message = require_refused(ops, call, (flag,), TypeError)
    assert f"is {value!r}, wanted True or False" in message


BAD_RULES: list[tuple[str, Any, type[Exception]]] = [
    *(("window", value, ValueError) for value in (0, -1, -(2**80))),
    *(("window", value, TypeError) for value in (1.5, "4", True, [4])),
    *(("soft_cap", value, ValueError) for value in (0, 0.0, -2.0, 1e-40, np.nan, np.inf, 3e38)),
    *(("soft_cap", value, TypeError) for value in ("30", [30.0], 1j)),
    *((name, np.ones(4, np.float64), TypeError) for name in ("alibi_slopes", "sinks")),
    *((name, np.ones(3, np.float32), ValueError) for name in ("alibi_slopes", "sinks")),
    *((name, np.ones((4, 1), np.float32), ValueError) for name in ("alibi_slopes", "sinks")),
    *((name, np.ones(8, np.float32)[::2], ValueError) for name in ("alibi_slopes", "sinks")),
    *((name, 0.5, TypeError) for name in ("alibi_slopes", "sinks")),
    ("tree_mask", np.ones(7, np.int32), TypeError),
    ("tree_mask", np.ones(6, np.int64), ValueError),
    ("tree_mask", np.ones((7, 7), np.int64), ValueError),
]


@pytest.mark.parametrize(("rule", "value", "error"), BAD_RULES)
def test_bad_rules_are_named(ops: HostOps, rule: str, value: Any, error: type[Exception]) -> None:
    for make in (varlen, decode):
        if rule == "tree_mask" and make is decode:
            continue
        call = make()
        call.arguments[rule] = value
        if make is decode and isinstance(value, np.ndarray) and ops.target.device != "cpu":
            continue
        require_refused(ops, call, (rule,), error)


def test_a_tree_narrows_causal(ops: HostOps) -> None:
    call = varlen()
    call.arguments |= {"tree_mask": np.ones(7, np.int64), "causal": False}
    assert "causal" in require_refused(ops, call, ("tree_mask",), ValueError)


def test_a_tree_has_several_tokens_per_sequence(target: Target) -> None:
    """The public ops cannot ask for anything else, the registered one can."""
    torch = pytest.importorskip("torch")
    call = decode()
    tensors = [torch.from_numpy(call.arguments[name]).to(target.device) for name in list(call.arguments)[:6]]
    *inputs, out = tensors
    mask = torch.ones(3, dtype=torch.int64, device=target.device)
    rules = None, None, None, None, mask, None, None
    with target.use(), pytest.raises(ValueError, match="^tree_mask: is given without cu_seqlens_q"):
        torch.ops.paged_ops.attention(*inputs, None, None, True, *rules, out, None, None, None)


def test_a_tree_is_no_wider_than_its_masks(ops: HostOps) -> None:
    call = varlen()
    call.arguments |= {"query": np.ones((70, 4, 16), np.float32), "tree_mask": np.ones(70, np.int64)}
    call.arguments |= {"out": np.ones((70, 4, 8), np.float32), "lse": np.ones((70, 4), np.float32)}
    call.arguments["cu_seqlens_q"] = np.array([0, 5, 5, 70], np.int32)
    call.arguments["check"] = True
    message = require_refused(ops, call, ("tree_mask",), ValueError)
    assert "sequence 2 has 65 query tokens, wanted at most 64" in message


def test_counts_are_named() -> None:
    good: dict[str, Any] = {
        "num_seqs": 2, "max_blocks_per_seq": 4, "block_size": 16, "num_q_heads": 2, "num_kv_heads": 1,
        "head_dim": 64, "value_head_dim": 64, "num_tokens": 2,
    }  # fmt: skip
    for name in good:
        for value in (1.5, "2", True, 2**70):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: is "):
                paged_ops.workspace_size(**{**good, name: value}, dtype="float32")
    support = {name: good[name] for name in ("num_q_heads", "num_kv_heads", "head_dim", "block_size")}
    for name in support:
        assert paged_ops.supports(dtype="float32", **{**support, name: 1.5}).reason.startswith(
            f"{name}: is 1.5"
        )
    with pytest.raises(ValueError, match="max_blocks_per_seq: is .* 2\\^63"):
        huge = dict.fromkeys(("num_seqs", "num_tokens", "max_blocks_per_seq", "num_q_heads"), 2**20)
        paged_ops.workspace_size(**{**good, **huge, "block_size": 2**30}, dtype="float32")
    for value in (1.5, "2", None, True):
        with pytest.raises(TypeError, match="num_threads: is "):
            paged_ops.set_num_threads(value)


def test_a_wrong_length_is_found_before_memory_is_asked_for(ops: HostOps) -> None:
    """Rows for 2^31 tokens would be 256 GiB: the message is about the length, not about memory."""
    cache = np.zeros((2, 4, 8, 64), np.float32)
    tables = np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] = 2147483647: wanted 0 <= length <= 12"):
        ops.gather_kv_cache(cache, cache.copy(), tables, np.array([2**31 - 1, 0], np.int32), check=True)


def test_an_interrupt_inside_an_exporter_stays_one(ops: HostOps) -> None:
    class Interrupted:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **options: Any) -> Any:
            raise KeyboardInterrupt

    call = decode()
    call.arguments["query"] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        invoke(ops, call)


def test_the_native_functions_count_their_arguments(target: Target) -> None:
    """They are called without a dispatcher that would."""
    with target.use():
        module = _backend.module
        for name in ("attention", "write_kv_cache", "gather_kv_cache", "copy_blocks", "swap_blocks"):
            with pytest.raises(TypeError, match="got 1 arguments, wanted "):
                getattr(module, name)(None)
        with pytest.raises(TypeError, match="^caches: is a int, wanted a list"):
            module.copy_blocks(5, None, True)
        with pytest.raises(TypeError, match="keyword"):
            module.swap_blocks(source=None)


def test_a_call_that_does_nothing_looks_at_no_ids(ops: HostOps) -> None:
    """As documented: with no query tokens, or blocks without bytes, wrong ids are nobody's harm."""
    cache = np.zeros((2, 4, 1, 8), np.float32)
    tables, lens = np.array([[99]], np.int32), np.array([3], np.int32)
    starts = np.array([0, 7], np.int32)
    out = ops.paged_attention(np.zeros((0, 1, 8), np.float32), cache, cache, tables, lens, starts, check=True)
    assert out.shape == (0, 1, 8)
    empty = np.zeros((2, 0, 8), np.float32)
    ops.copy_blocks(empty, np.array([[0, 99]], np.int64), check=True)
    ops.swap_blocks(empty, empty.copy(), np.array([[0, 99]], np.int64))
