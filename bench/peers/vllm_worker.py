"""vLLM's CPU attention in a process and an environment of its own; answers requests, a line of JSON each.

Needs torch and the `vllm` package's compiled operators, which it loads without importing the package, so that
none of its requirements are needed. Started by `vllm_peer`, by path: it imports nothing of ours.
"""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import torch

_NOISE_LENGTH = 999_983


def load_ops() -> Any:
    """The operators for this CPU, under their usual names."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("vllm is not installed in this environment")
    folder = Path(next(iter(found.submodule_search_locations)))
    # As vLLM chooses (platforms/cpu.py): the wrong one ends the process with an illegal instruction.
    variant = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        variant = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(str(folder / f"{variant}.abi3.so"))
    return torch.ops._C


class Worker:
    def __init__(self, arena_nbytes: int, num_threads: int) -> None:
        self.ops = load_ops()
        torch.set_num_threads(num_threads)
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # asks the system for the tiles, as importing vLLM would
        self.memory = _noise_on_huge_pages(arena_nbytes)
        self.cases: dict[str, list[Any]] = {}

    def prepare(
        self,
        name: str,
        num_seqs: int,
        seq_len: int,
        query_len: int,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        block_size: int,
        order: str,
        most: int,
    ) -> dict[str, Any]:
        """Makes the calls of a case, and checks one on a cache of its own. query_len 1 is a decode."""
        isa = "amx" if block_size % 32 == 0 and torch.cpu._is_amx_tile_supported() else None
        isa = isa or ("vec" if block_size % 32 == 0 else "vec16")
        num_q_heads = num_kv_heads * group
        per_seq = -(-seq_len // block_size)
        num_blocks = len(self.memory) // (num_kv_heads * 2 * block_size * head_dim)
        # The memory's layout depends on the instruction set; noise is noise in any.
        cache = self.memory[: num_blocks * num_kv_heads * 2 * block_size * head_dim]
        cache = cache.view(num_blocks, num_kv_heads, 2 * block_size, head_dim)
        generator = torch.Generator().manual_seed(0)
        blocks = torch.arange(num_blocks, dtype=torch.int32)
        if order == "random":
            blocks = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
        num_windows = min(num_blocks // (num_seqs * per_seq), most)
        tables = blocks[: num_windows * num_seqs * per_seq].view(num_windows, num_seqs, per_seq)
        lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
        query = torch.randn(num_seqs * query_len, num_q_heads, head_dim, generator=generator)
        query = (2 * query).bfloat16()
        out = torch.empty_like(query)
        scale = head_dim**-0.5
        plan = self.ops.get_scheduler_metadata(
            num_seqs, num_q_heads, num_kv_heads, head_dim, lens, torch.bfloat16, starts, True, -1, isa, True,
            None, "auto",
        )  # fmt: skip

        def attend(cache: Any, table: Any) -> None:
            key, value = cache.chunk(2, dim=2)
            self.ops.cpu_attention_with_kv_cache(
                query, key, value, out, starts, lens, scale, True, None, -1, table, 0.0, plan, None, None,
                1.0, 1.0, "auto",
            )  # fmt: skip

        # The check: keys and values that are known, written by vLLM's own operator.
        own = torch.zeros(num_seqs * per_seq, *cache.shape[1:], dtype=torch.bfloat16)
        table = torch.randperm(num_seqs * per_seq, generator=generator, dtype=torch.int32)
        table = table.view(num_seqs, per_seq)
        key, value = torch.randn(
            2, num_seqs * seq_len, num_kv_heads, head_dim, generator=generator
        ).bfloat16()
        position = torch.arange(seq_len)
        slots = table[:, position // block_size].long() * block_size + position % block_size
        self.ops.cpu_attn_reshape_and_cache(
            key, value, *own.chunk(2, dim=2), slots.flatten(), isa, 1.0, 1.0, "auto"
        )
        out.fill_(math.nan)
        attend(own, table)
        wanted = _attention(query[:query_len], key[:seq_len], value[:seq_len], scale)
        error = float((out[:query_len].double() - wanted).abs().max() / wanted.abs().max())
        # Views are made once, as its engine does for each layer.
        key_cache, value_cache = cache.chunk(2, dim=2)
        self.cases[name] = [
            (query, key_cache, value_cache, out, starts, lens, scale, True, None, -1, table.contiguous(), 0.0,
             plan, None, None, 1.0, 1.0, "auto")
            for table in tables
        ]  # fmt: skip
        return {"error": error, "isa": isa}

    def time(self, name: str, turn: int, num_calls: int) -> dict[str, Any]:
        calls, attend = self.cases[name], self.ops.cpu_attention_with_kv_cache
        before = _waited()
        begin = time.perf_counter()
        for i in range(turn, turn + num_calls):
            attend(*calls[i % len(calls)])
        end = time.perf_counter()
        return {"seconds": (end - begin) / num_calls, "waited": _waited() - before}


def _waited() -> float:
    """Seconds for which this process's threads were ready to run and had no CPU."""
    return 1e-9 * sum(int(p.read_text().split()[1]) for p in Path("/proc/self/task").glob("*/schedstat"))


def _noise_on_huge_pages(nbytes: int) -> Any:
    """As our own pools are: advised to be huge before they are touched."""
    huge = 2 << 20
    buffer = mmap.mmap(-1, nbytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(buffer, dtype=torch.uint8)
    begin = -everything.data_ptr() % huge
    memory = everything[begin : begin + nbytes].view(torch.bfloat16)
    noise = torch.randn(_NOISE_LENGTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    for piece in memory.split(_NOISE_LENGTH):
        piece.copy_(noise[: len(piece)])
    return memory


def _attention(query: Any, key: Any, value: Any, scale: float) -> Any:
    """Causal attention of the last tokens of one sequence in float64; the formula, written out."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    out = torch.empty(query.shape, dtype=torch.float64)
    first = len(key) - len(query)
    for head in range(query.shape[1]):
        logits = scale * query[:, head] @ key[:, head // group].T
        seen = torch.arange(len(key))[None] <= first + torch.arange(len(query))[:, None]
        out[:, head] = logits.masked_fill(~seen, -math.inf).softmax(1) @ value[:, head // group]
    return out


def main() -> None:
    worker: Worker | None = None
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            with torch.inference_mode():
                if request["do"] == "start":
                    worker = Worker(request["arena_nbytes"], request["num_threads"])
                    answer: dict[str, Any] = {}
                else:
                    answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
