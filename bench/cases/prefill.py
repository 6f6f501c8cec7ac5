"""Prefill: causal attention of a whole prompt over a paged cache, beside the peak of the arithmetic."""

from __future__ import annotations

from functools import partial

import torch

import paged_ops
from bench.arena import Windows, windows
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.timing import called
from bench.workloads import Inputs, Shape


def operations(shape: Shape) -> int:
    """Of the half that a causal mask leaves: two products of 2 n^2 d operations a head, halved."""
    return 2 * shape.seq_len**2 * shape.num_kv_heads * shape.group * shape.head_dim


def rows_as_decodes(inputs: Inputs, rows: list[int]) -> Inputs:
    """Some query tokens of a prompt, each as the decode that has to give the same."""
    return Inputs(
        query=inputs.query[rows],
        key_cache=inputs.key_cache,
        value_cache=inputs.value_cache,
        block_tables=inputs.block_tables.expand(len(rows), -1),
        seq_lens=torch.tensor(rows, dtype=torch.int32) + 1,
    )


def _ours(data: Windows, query: torch.Tensor, isa: str) -> Candidate:
    num_tokens = len(query)
    out = torch.empty_like(query)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    rows = sorted({0, num_tokens // 3, num_tokens // 2, num_tokens - 2, num_tokens - 1})

    def call(turn: int) -> None:
        of = data[turn]
        paged_ops.paged_attention(
            query, of.key_cache, of.value_cache, of.block_tables, of.seq_lens, starts, out=out
        )

    def check(turn: int) -> str:
        paged_ops._native.set_cpu_isa(isa)
        out.fill_(float("nan"))
        call(turn)
        of = data[turn]
        prompt = Inputs(query, of.key_cache, of.value_cache, of.block_tables, of.seq_lens)
        return rows_as_decodes(prompt, rows).complaint(out[rows], range(len(rows)))

    clock = called(call, before=lambda: paged_ops._native.set_cpu_isa(isa))
    return Candidate(clock, check, data.shape.kv_nbytes, operations(data.shape))


def _limit(setting: Setting, shape: Shape) -> dict[str, Candidate]:
    found = setting.limits
    if found is None:
        return {}
    limits = {"multiply-adds": found.multiply_add_rate}
    if "amx" in setting.isas and found.tile_rate() > 0:
        limits = {"tiles": found.tile_rate, **limits}
    count = operations(shape)

    def candidate(name: str) -> Candidate:
        # The time that as many operations take at the peak, which is measured anew in each round.
        return Candidate(lambda turn, num_calls: count / limits[name](), operations=count)

    return {name: candidate(name) for name in limits}


def _prefill(setting: Setting, *, num_tokens: int) -> Trial:
    shape = Shape(1, setting.length(num_tokens, 32), 8, 4, 128)
    data = windows(setting.arena, shape, "random", most=16)
    query = torch.randn(
        shape.seq_len,
        shape.num_kv_heads * shape.group,
        shape.head_dim,
        generator=torch.Generator().manual_seed(1),
    )
    query = (2 * query).bfloat16()
    # The other instruction sets at one length only: they take seconds for the longest.
    isas = setting.isas if num_tokens == 512 else setting.isas[:1]
    trial = Trial({isa: _ours(data, query, isa) for isa in isas}, _limit(setting, shape))
    trial.others |= setting.peers.candidates("prefill", setting, shape)
    vllm = tuple(name for name in trial.others if name.startswith("vllm"))
    if vllm:
        trial.best_of["vllm at its best"] = vllm
    work = "prefill, 512 to 2048 query tokens"
    goals = [Goal(work, "share:vllm at its best", 1.5)]
    if setting.isas[0] == "amx":
        goals.append(Goal(work, "tflops", 1.6))
    trial.goals[setting.isas[0]] = tuple(goals)
    return trial


CASES = tuple(
    Case("prefill", f"{n} tokens", partial(_prefill, num_tokens=n), quick=n != 1024)
    for n in (512, 1024, 2048)
)
