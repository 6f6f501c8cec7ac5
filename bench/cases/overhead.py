"""What a call costs beside its kernel, and whether our threads and torch's get in each other's way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import paged_ops
from bench.arena import windows
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.timing import Clock, called
from bench.workloads import Inputs, Shape

TINY = Shape(1, 16, 1, 4, 64)
_ALTERNATIONS = 5


def _repeated(call: Callable[..., Any], *arguments: Any, **options: Any) -> Clock:
    """As `called`, without a Python function between the clock and the call."""

    def clock(turn: int, num_calls: int) -> float:
        begin = time.perf_counter()
        for _ in itertools.repeat(None, num_calls):
            call(*arguments, **options)
        return (time.perf_counter() - begin) / num_calls

    return clock


def _one_tiny_sequence(setting: Setting, *, numpy: bool) -> Trial:
    data = windows(setting.arena, TINY, "in-order", most=1)[0]
    out = torch.zeros_like(data.query)
    tensors = [data.query, data.key_cache, data.value_cache, data.block_tables, data.seq_lens]
    given = [*tensors, out]
    if numpy:
        from paged_ops.testing import arrays

        given = [arrays.to_numpy(tensor) for tensor in given]

    def check(turn: int) -> str:
        out.fill_(float("nan"))
        paged_ops.paged_attention_decode(*given[:5], out=given[5])
        return data.complaint(out, [0])

    def check_native(turn: int) -> str:
        out.fill_(float("nan"))
        paged_ops._native.attention(*native)
        return data.complaint(out, [0])

    native = (*given[:5], None, None, True, *[None] * 7, given[5], None, False, None, True)
    trial = Trial(
        {"ours": Candidate(_repeated(paged_ops.paged_attention_decode, *given[:5], out=given[5]), check)},
        {"native module": Candidate(_repeated(paged_ops._native.attention, *native), check_native)},
    )
    if not numpy:
        trial.others |= setting.peers.candidates("overhead", setting, TINY)
        trial.goals["ours"] = (
            Goal("call overhead, one tiny sequence, torch", "seconds", at_most=3e-6),
            Goal("the wrapper's part of it", "beyond:native module", at_most=1e-6),
        )
    return trial


def _alternating(setting: Setting, *, timed: str) -> Trial:
    """Attention over 16 MiB of KV and a product with 8 MiB of weights, in turn, beside each alone."""
    shape = Shape(8, setting.length(512, 32), 8, 4, 128)
    data = windows(setting.arena, shape, "in-order")
    out = torch.empty_like(data[0].query)
    width = setting.length(2048, 64)
    # Several weights: between attentions and without them they come from memory alike.
    weights = setting.arena.memory[-(8 * width * width) :].view(8, width, width)
    rows = torch.randn(16, width).bfloat16()
    product = torch.empty(16, width, dtype=torch.bfloat16)

    def attention(turn: int) -> None:
        data[turn].decode(out=out)

    def matmul(turn: int) -> None:
        torch.mm(rows, weights[turn % len(weights)], out=product)

    def check_attention(turn: int) -> str:
        out.fill_(float("nan"))
        matmul(turn)
        attention(turn)
        return data[turn].complaint(out, [0])

    def check_matmul(turn: int) -> str:
        product.fill_(float("nan"))
        attention(turn)
        matmul(turn)
        wanted = rows.double() @ weights[turn % len(weights)].double()
        error = float((product.double() - wanted).abs().max() / wanted.abs().max())
        return "" if error < 0.01 else f"the product is wrong by {error:.3g} of its largest element"

    first, second = (attention, matmul) if timed == "attention" else (matmul, attention)

    def in_turn(turn: int, num_calls: int) -> float:
        taken = 0.0
        num_calls = max(num_calls, _ALTERNATIONS)
        for i in range(turn, turn + num_calls):
            second(i)
            begin = time.perf_counter()
            first(i)
            taken += time.perf_counter() - begin
        return taken / num_calls

    def alone(turn: int, num_calls: int) -> float:
        return called(first)(turn, max(num_calls, _ALTERNATIONS))

    check = check_attention if timed == "attention" else check_matmul
    nbytes = shape.kv_nbytes if timed == "attention" else int(weights[0].nbytes)
    trial = Trial(
        {f"{timed} in turn": Candidate(in_turn, check, nbytes)}, {"alone": Candidate(alone, check, nbytes)}
    )
    trial.crowded = True
    goal = Goal("ops alternating with torch matmuls", "time:alone", at_most=1.1)
    trial.goals[f"{timed} in turn"] = (goal,)
    return trial


def _one_token_written(setting: Setting) -> Trial:
    data: Inputs = windows(setting.arena, TINY, "in-order", most=1)[0]
    key = torch.randn(1, TINY.num_kv_heads, TINY.head_dim).bfloat16()
    slots = torch.tensor([3])
    arguments = (key, key, data.key_cache, data.value_cache, slots)

    def check(turn: int) -> str:
        data.key_cache[0, 3] = 0
        paged_ops.write_kv_cache(*arguments)
        written = torch.equal(data.key_cache[0, 3], key[0]) and torch.equal(data.value_cache[0, 3], key[0])
        return "" if written else "the row is not in its slot"

    native = (*arguments, None, None, True)
    return Trial(
        {"ours": Candidate(_repeated(paged_ops.write_kv_cache, *arguments), check)},
        {"native module": Candidate(_repeated(paged_ops._native.write_kv_cache, *native), check)},
    )


CASES = (
    Case("overhead", "decode, torch tensors", partial(_one_tiny_sequence, numpy=False)),
    Case("overhead", "decode, NumPy arrays", partial(_one_tiny_sequence, numpy=True)),
    Case("overhead", "write of one token", _one_token_written),
    Case("overhead", "attention between matmuls", partial(_alternating, timed="attention")),
    Case("overhead", "matmul between attentions", partial(_alternating, timed="matmul")),
)
