"""The CPU backend among threads and processes: calls at once, after a fork, inside pools of others."""

from __future__ import annotations

import multiprocessing.connection
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import paged_ops
from paged_ops.testing.backends import HostOps, Target, use_num_threads
from paged_ops.testing.cases import Case, build
from paged_ops.testing.checks import require_same_bits

CASES = [
    Case((900, 5, 0, 600), dtype="bfloat16", num_q_heads=8),
    Case((300, 40), (60, 40), num_q_heads=4),
    Case((33,) * 40, dtype="float16", head_dim=128),
]


def attend_all(ops: Any) -> list[Any]:
    return [build(case).attention(ops) for case in CASES]


def require_equal(wanted: list[Any], actual: list[Any]) -> None:
    for one, other in zip(wanted, actual, strict=True):
        require_same_bits("out", one[0], other[0])
        require_same_bits("lse", one[1], other[1])


@pytest.fixture
def cpu(target: Target) -> HostOps:
    if target.backend != "cpu":
        pytest.skip("threads and processes are the CPU backend's")
    return HostOps(target)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_calls_at_once(cpu: HostOps, num_threads: int) -> None:
    """The GIL is released inside an op: several Python threads compute at once, each with its own scratch."""
    with cpu.target.use(), use_num_threads(num_threads):
        wanted = attend_all(paged_ops)
        with ThreadPoolExecutor(6) as pool:
            for actual in pool.map(lambda _: attend_all(paged_ops), range(24)):
                require_equal(wanted, actual)


def test_after_a_fork(cpu: HostOps) -> None:
    """A child has none of its parent's threads; it must neither wait for them nor give other bits."""
    wanted = attend_all(cpu)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no test framework in here: report by a byte
        try:
            require_equal(wanted, attend_all(cpu))
            os.write(writer, b"y")
        except BaseException:
            os.write(writer, b"n")
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready = multiprocessing.connection.wait([reader], timeout=60)
        assert ready, "the child hangs"
        assert os.read(reader, 1) == b"y"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
    require_equal(wanted, attend_all(cpu))  # and the parent goes on


def test_number_of_threads() -> None:
    before = paged_ops.get_num_threads()
    try:
        paged_ops.set_num_threads(3)
        assert paged_ops.get_num_threads() == 3
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="^num_threads: "):
                paged_ops.set_num_threads(wrong)
        assert paged_ops.get_num_threads() == 3
    finally:
        paged_ops.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up and pinned as Linux has it")
def test_workers_leave_the_callers_cpu_and_keep_their_affinity() -> None:
    """A worker that wakes where its caller runs goes elsewhere; where it may run stays what it was."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    code = """
import os, time
import numpy as np, paged_ops

tasks = lambda: {int(name) for name in os.listdir("/proc/self/task")}
cpus = os.sched_getaffinity(0)
one = min(cpus)
paged_ops.set_num_threads(2)
cache = np.ones((64, 16, 8, 128), np.float16)
table, length = np.arange(64, dtype=np.int32)[None], np.array([1024], np.int32)
inputs = np.ones((1, 8, 128), np.float16), cache, cache, table, length
call = lambda: paged_ops.paged_attention_decode(*inputs)
before = tasks()
call()
(worker,) = tasks() - before
os.sched_setaffinity(os.getpid(), {one})  # the caller
moved = 0
for _ in range(50):
    os.sched_setaffinity(worker, {one})  # there it falls asleep
    call()
    time.sleep(0.002)
    os.sched_setaffinity(worker, cpus)
    call()
    time.sleep(0.002)
    deadline = time.monotonic() + 10
    while os.sched_getaffinity(worker) != cpus:  # it may be on its way
        assert time.monotonic() < deadline, os.sched_getaffinity(worker)
    with open(f"/proc/self/task/{worker}/stat") as stat:
        moved += int(stat.read().rsplit(")", 1)[1].split()[36]) != one
print(moved)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_subinterpreter_is_refused_at_once() -> None:
    """Loading the native module there first would wait for the main interpreter for ever."""
    code = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
inner = interpreters.create()
interpreters.run_string(inner, '''
try:
    import paged_ops
except ImportError as error:
    print(error)
''')
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert "paged_ops works in the main interpreter only" in done.stdout, done.stderr
