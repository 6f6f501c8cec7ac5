"""Decode: KV far larger than the caches, within them, quantised; odd shapes, batches, the cost of paging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

import paged_ops
from bench.arena import ALL, Arena, Windows, windows
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.timing import called
from bench.workloads import Shape

# 64 MiB of KV in bfloat16: 16384 tokens.
MAIN = Shape(8, 2048, 8, 4, 128)
VLLM_BLOCKS = (16, 32, 128)
LAYOUTS: tuple[Literal["NHD", "HND"], ...] = ("NHD", "HND")


def ours(data: Windows, isa: str) -> Candidate:
    first = data[0]
    shape = (*first.query.shape[:2], first.value_cache.shape[3])
    out = torch.empty(shape, dtype=first.query.dtype)

    def call(turn: int) -> None:
        data[turn].decode(out=out)

    def check(turn: int) -> str:
        paged_ops._native.set_cpu_isa(isa)
        out.fill_(float("nan"))
        call(turn)
        last = len(first.seq_lens) - 1
        return data[turn].complaint(out, sorted({0, last}))

    clock = called(call, before=lambda: paged_ops._native.set_cpu_isa(isa))
    return Candidate(clock, check, data.shape.kv_nbytes)


def limits(setting: Setting, data: Windows) -> dict[str, Candidate]:
    """Reading as many bytes in sequence, and reading the very blocks."""
    found = setting.limits
    if found is None:
        return {}
    nbytes = data.shape.kv_nbytes
    begins = [setting.arena.address + i * nbytes for i in range(len(data))]
    pieces = [data.pieces(turn) for turn in range(len(data))]

    def sequential(turn: int, num_calls: int) -> float:
        return found.read_in_sequence(begins[turn % len(begins)], nbytes, num_calls)

    def gather(turn: int, num_calls: int) -> float:
        addresses, piece = pieces[turn % len(pieces)]
        return found.gather(addresses, piece, num_calls)

    return {"sequential": Candidate(sequential, nbytes=nbytes), "gather": Candidate(gather, nbytes=nbytes)}


def _trial(
    setting: Setting,
    shape: Shape,
    order: str,
    *,
    peers: bool = False,
    all_isas: bool = False,
    most: int = ALL,
) -> Trial:
    shape = replace(shape, seq_len=setting.length(shape.seq_len, 32))
    data = windows(setting.arena, shape, order, most)
    isas = setting.isas if all_isas else setting.isas[:1]
    trial = Trial({isa: ours(data, isa) for isa in isas}, limits(setting, data))
    if peers:
        trial.others |= setting.peers.candidates("decode", setting, shape, order, most)
        vllm = tuple(name for name in trial.others if name.startswith("vllm"))
        if vllm:
            trial.best_of["vllm at its best"] = vllm
    return trial


def _beside(setting: Setting, trial: Trial, name: str, shape: Shape, order: str = "in-order") -> None:
    """Puts our own kernel on another shape into the same rounds."""
    shape = replace(shape, seq_len=setting.length(shape.seq_len, 32))
    trial.others[name] = ours(windows(setting.arena, shape, order), setting.isas[0])


def _main(setting: Setting, *, group: int, order: str) -> Trial:
    trial = _trial(setting, replace(MAIN, group=group), order, peers=True, all_isas=True)
    work = f"decode past the caches, {order} tables, G={group}"
    if order == "in-order":
        goals = [Goal(work, "share:sequential", 0.80), Goal(work, "share:gather", 0.95)]
        at_most = {1: 0.55, 4: 0.30, 8: 0.20}[group]
        goals.append(Goal("decode against torch SDPA on contiguous KV", "time:torch", at_most=at_most))
        faster = (2.0, 1.15, 1.05)
    else:
        goals = [Goal(work, "share:sequential", 0.65)]
        faster = (1.0, 1.0, 1.0)
    for block, least in zip(VLLM_BLOCKS, faster, strict=True):
        goals.append(Goal(f"decode against vLLM, {order}", f"share:vllm block {block}", least))
    for isa in setting.isas:
        if isa == setting.isas[0]:
            trial.goals[isa] = tuple(goals)
        elif isa in ("avx2", "avx512") and order == "in-order":
            path = f"{isa} path, G={group}"
            trial.goals[isa] = (
                (Goal(path, "share:torch", 1.5),) if group == 8 else (Goal(path, "share:sequential", 0.60),)
            )
    return trial


def _in_cache(setting: Setting, *, group: int, layout: Literal["NHD", "HND"]) -> Trial:
    trial = _trial(setting, Shape(1, 512, 8, group, 128, layout=layout), "in-order", peers=True, most=1)
    goal = Goal(f"decode in cache, {layout}, G={group}", "share:vllm at its best", 1.25)
    trial.goals[setting.isas[0]] = (goal,)
    return trial


def _odd(setting: Setting, *, shape: Shape) -> Trial:
    trial = _trial(setting, shape, "in-order")
    near = 8 if shape.group > 6 else 4
    _beside(setting, trial, "main shape", replace(MAIN, group=near))
    goal = Goal("odd shapes, per byte", "per_byte:main shape", at_most=1.3)
    trial.goals[setting.isas[0]] = (goal,)
    return trial


def _paging(setting: Setting, *, group: int) -> Trial:
    shape = replace(MAIN, group=group)
    trial = _trial(setting, shape, "in-order")
    whole = replace(shape, block_size=setting.length(shape.seq_len, 32))
    _beside(setting, trial, "one block per sequence", whole)
    goal = Goal(f"cost of paging, G={group}", "time:one block per sequence", at_most=1.03)
    trial.goals[setting.isas[0]] = (goal,)
    return trial


def _batch(setting: Setting, *, num_seqs: int) -> Trial:
    shape = replace(MAIN, num_seqs=num_seqs, seq_len=MAIN.num_seqs * MAIN.seq_len // num_seqs)
    trial = _trial(setting, shape, "in-order")
    _beside(setting, trial, "main shape", MAIN)
    goal = Goal("batch 1 to 64 at equal total", "per_byte:main shape", at_most=1.15)
    trial.goals[setting.isas[0]] = (goal,)
    return trial


def _long(setting: Setting) -> Trial:
    trial = _trial(setting, Shape(1, 1_000_000, 1, 4, 64), "in-order")
    _beside(setting, trial, "main shape", MAIN)
    goal = Goal("one sequence of 1,000,000 tokens", "per_byte:main shape", at_most=1 / 0.9)
    trial.goals[setting.isas[0]] = (goal,)
    return trial


def _quantised(setting: Setting, *, dtype: str, scales: Literal["number", "token"], group: int) -> Trial:
    """Beside the same sequences in bfloat16."""
    shape = replace(MAIN, group=group, seq_len=setting.length(MAIN.seq_len, 32))
    quantised = replace(shape, quantised=dtype, scales=scales)
    arena = Arena(setting.arena.nbytes // 4, dtype=quantised.cache_dtype)
    data = windows(arena, quantised, "in-order")
    trial = Trial({isa: ours(data, isa) for isa in setting.isas[:1]}, limits(setting, data))
    _beside(setting, trial, "bfloat16", shape)
    if scales == "number":
        goal = Goal("decode of 8-bit caches against bfloat16", "share:bfloat16", at_least=1.6)
        trial.goals[setting.isas[0]] = (goal,)
    return trial


def _case(name: str, build: Callable[[Setting], Trial], quick: bool = True) -> Case:
    return Case("decode", name, build, quick)


def _odd_shapes() -> dict[str, Shape]:
    found = {f"G={group}": replace(MAIN, group=group) for group in (3, 5, 7)}
    found |= {f"D={dim}": replace(MAIN, head_dim=dim) for dim in (64, 80, 256)}
    found |= {f"block={size}": replace(MAIN, block_size=size) for size in (1, 8, 256)}
    found |= {dtype: replace(MAIN, dtype=dtype) for dtype in ("float16", "float32")}
    found["HND"] = replace(MAIN, layout="HND")
    return found


CASES = (
    *(
        _case(f"64 MiB {order} G={group}", partial(_main, group=group, order=order))
        for group in (1, 4, 8)
        for order in ("in-order", "random")
    ),
    *(
        _case(f"in cache {layout} G={group}", partial(_in_cache, group=group, layout=layout))
        for layout in LAYOUTS
        for group in (1, 4, 8)
    ),
    *(
        _case(f"odd {name}", partial(_odd, shape=shape), quick=name in ("G=5", "D=80", "block=1", "float32"))
        for name, shape in _odd_shapes().items()
    ),
    *(_case(f"paging G={group}", partial(_paging, group=group), quick=group == 4) for group in (1, 4, 8)),
    *(_case(f"batch {n}", partial(_batch, num_seqs=n), quick=n in (1, 64)) for n in (1, 2, 4, 16, 32, 64)),
    *(
        _case(
            f"{dtype}, scale per {scales}, G={group}",
            partial(_quantised, dtype=dtype, scales=scales, group=group),
            quick=group == 4 and scales == "token",
        )
        for dtype in ("float8_e4m3fn", "int8")
        for scales in ("number", "token")
        for group in (1, 4, 8)
    ),
    _case("1000000 tokens, 1 KV head, D=64", _long, quick=False),
)
