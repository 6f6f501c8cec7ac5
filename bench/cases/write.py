"""Cache write on one thread: new tokens into random slots, both layouts, beside torch's `index_copy_`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import paged_ops
from bench.case import Candidate, Case, Goal, Setting, Trial
from bench.timing import called
from bench.workloads import Shape
from paged_ops import reference
from paged_ops.testing import arrays

SHAPE = Shape(1, 1, 8, 1, 128)
_CHECKED = 64  # tokens whose blocks are compared with the oracle's


@dataclass(frozen=True)
class WriteData:
    """Rows to write, and slots for each turn; K and V caches are halves of the arena, each without gaps."""

    layout: str
    key: Any  # [num_tokens, num_kv_heads, head_dim]
    value: Any
    key_cache: Any  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Any
    slots: Any  # [num_turns, num_tokens] int64

    @property
    def nbytes(self) -> int:
        """Read and written."""
        return 2 * int(self.key.nbytes + self.value.nbytes)

    def turn(self, turn: int) -> Any:
        return self.slots[turn % len(self.slots)]

    def rows(self, slots: Any) -> Any:
        """Where each head of the slots' tokens lies among all rows of one head: [num_tokens, heads]."""
        block_size, heads = self.key_cache.shape[1:3]
        head = torch.arange(heads)
        if self.layout == "NHD":
            return slots[:, None] * heads + head
        return (slots[:, None] // block_size * heads + head) * block_size + slots[:, None] % block_size

    def candidate(self, call: Callable[[int], Any]) -> Candidate:
        """A candidate that is checked bit for bit."""

        def check(turn: int) -> str:
            slots, block_size = self.turn(turn), self.key_cache.shape[1]
            blocks = torch.unique(slots[:_CHECKED] // block_size)
            inside = torch.isin(slots // block_size, blocks)
            local = torch.searchsorted(blocks, slots[inside] // block_size) * block_size
            local += slots[inside] % block_size
            caches = (self.key_cache, self.value_cache)
            for cache in caches:
                cache[blocks] = 0  # what a call on this turn wrote before must not help this one
            wanted = [arrays.to_numpy(cache[blocks]) for cache in caches]
            rows = [arrays.to_numpy(x[inside]) for x in (self.key, self.value)]
            reference.write_kv_cache(*rows, *wanted, local.numpy())
            call(turn)
            same = all(arrays.same_bits(c[blocks], w) for c, w in zip(caches, wanted, strict=True))
            return "" if same else "the written blocks differ from the oracle's"

        return Candidate(called(call), check, self.nbytes)


def _data(setting: Setting, num_tokens: int, layout: str) -> WriteData:
    generator = torch.Generator().manual_seed(0)
    flat = setting.arena.memory
    inner = (SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    extent = inner if layout == "NHD" else (inner[1], inner[0], inner[2])
    num_blocks = len(flat) // 2 // int(np.prod(extent))
    halves = flat[: 2 * num_blocks * int(np.prod(extent))].view(2, num_blocks, *extent)
    if layout == "HND":
        halves = halves.transpose(2, 3)
    num_slots = num_blocks * SHAPE.block_size
    num_tokens = min(num_tokens, num_slots // 2)
    slots = torch.randperm(num_slots, generator=generator)
    num_turns = min(num_slots // num_tokens, 256)
    key, value = torch.randn(2, num_tokens, *inner[1:], generator=generator).bfloat16()
    return WriteData(
        layout, key, value, halves[0], halves[1], slots[: num_turns * num_tokens].view(num_turns, -1)
    )


def _limit(setting: Setting, data: WriteData) -> dict[str, Candidate]:
    found = setting.limits
    if found is None:
        return {}
    heads = data.key.shape[1]
    together = heads if data.layout == "NHD" else 1  # heads of a token that lie side by side
    nbytes = together * data.key.shape[2] * data.key.itemsize
    source, targets = [], []
    for rows, cache in ((data.key, data.key_cache), (data.value, data.value_cache)):
        source.append(np.arange(len(rows) * heads // together, dtype=np.uint64) * np.uint64(nbytes))
        source[-1] += np.uint64(rows.data_ptr())
        row_nbytes = np.uint64(data.key.shape[2] * data.key.itemsize)
        targets.append(
            [
                data.rows(slots)[:, ::together].flatten().numpy().astype(np.uint64) * row_nbytes
                + np.uint64(cache.data_ptr())
                for slots in data.slots
            ]
        )
    both = np.concatenate(source)
    to = [np.concatenate(pair) for pair in zip(*targets, strict=True)]

    def memcpy(turn: int, num_calls: int) -> float:
        return sum(found.copy(to[(turn + i) % len(to)], both, nbytes) for i in range(num_calls)) / num_calls

    return {"memcpy": Candidate(memcpy, nbytes=data.nbytes)}


def _write(setting: Setting, *, num_tokens: int, layout: str) -> Trial:
    data = _data(setting, num_tokens, layout)

    def call(turn: int) -> None:
        paged_ops.write_kv_cache(
            data.key, data.value, data.key_cache, data.value_cache, data.turn(turn), check=True
        )

    trial = Trial({"ours": data.candidate(call)}, _limit(setting, data))
    trial.others |= setting.peers.candidates("write", setting, data)
    goal = Goal(f"cache write, {num_tokens} tokens, 1 thread, {layout}", "time:torch", at_most=1.0)
    trial.goals["ours"] = (goal,)
    return trial


CASES = tuple(
    Case(
        "write",
        f"{num_tokens} tokens {layout}",
        partial(_write, num_tokens=num_tokens, layout=layout),
        num_threads=1,
    )
    for num_tokens in (64, 4096)
    for layout in ("NHD", "HND")
)
