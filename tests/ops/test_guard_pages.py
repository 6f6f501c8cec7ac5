"""No op touches a byte outside its tensors: each lies against a page that nobody may access.

A stray access is a segmentation fault, so every target runs in a process of its own: this file as a script.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target, available_targets
from paged_ops.testing.cases import LAYOUTS, PACKED_LAYOUTS, Case, build
from paged_ops.testing.checks import block_pairs, expected, merge_states, rows_to_rotate, rows_to_write

PAGE = mmap.PAGESIZE
PROT_NONE = 0


class GuardedMemory:
    """Copies of arrays with forbidden pages before and after, flush with one of them."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.mappings: list[mmap.mmap] = []

    def __call__(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        storage = arrays.storage_of(array)
        size = -(-max(storage.nbytes, 1) // PAGE) * PAGE
        mapping = mmap.mmap(-1, size + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mappings.append(mapping)
        memory = np.frombuffer(mapping, np.uint8)
        for guard in (0, PAGE + size):
            status = self.libc.mprotect(ctypes.c_void_p(memory.ctypes.data + guard), PAGE, PROT_NONE)
            assert status == 0, ctypes.get_errno()
        begin = PAGE + (size - storage.nbytes if self.at_end else 0)
        integers = f"u{array.itemsize}"  # not all of ml_dtypes go through NumPy's array interface
        copy = memory[begin : begin + storage.nbytes].view(integers)
        copy[...] = storage.view(integers)
        offset = (array.ctypes.data - storage.ctypes.data) // array.itemsize
        return np.lib.stride_tricks.as_strided(copy[offset:], array.shape, array.strides).view(array.dtype)


def run(ops: HostOps) -> None:
    """Every op over tensors of every layout, guarded on either side."""
    emulated = ops.target.backend == "emulated"
    layouts = itertools.cycle(LAYOUTS | PACKED_LAYOUTS)
    dims = [(8, 8), (40, 24), (264, 320)]
    if not emulated:
        dims += [(72, 128), (256, 256), (576, 512)]
    for at_end, dtype, (head_dim, value_head_dim), block_size, q_lens in itertools.product(
        (True, False), arrays.DTYPES, dims, (1, 5, 16), (None, (1, 3, 0, 9))
    ):
        guarded = GuardedMemory(at_end=at_end)
        case = Case(
            (1, 16, 0, 33),
            q_lens,
            dtype=dtype,
            num_q_heads=6,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            block_size=block_size,
            layout=next(layouts),
        )
        inputs = build(case).map(guarded)
        # A last block that is used to its end, and no column or block to spare behind it.
        inputs.attention(
            ops, out=guarded(build(case).new_out()), lse=guarded(np.zeros((len(inputs.query), 6), "f4"))
        )
        expected(case).check(*inputs.attention(ops))
        if q_lens is not None:
            continue
        caches = inputs.key_cache, inputs.value_cache
        rows = sum(case.seq_lens)
        out = [guarded(np.zeros((rows, 2, dim), arrays.DTYPES[dtype])) for dim in (head_dim, value_head_dim)]
        ops.gather_kv_cache(*caches, inputs.block_tables, inputs.seq_lens, out=tuple(out))
        key, value, slots = map(guarded, rows_to_write(case))
        ops.write_kv_cache(key[: len(slots)], value[: len(slots)], *caches, slots)
        pairs = guarded(block_pairs(len(caches[0])))
        for cache in caches:
            ops.copy_blocks(cache, pairs)
            ops.swap_blocks(cache, guarded(cache.copy("K")), pairs)
        states = [guarded(array) for array in merge_states(7, 3, head_dim, dtype)]
        ops.merge_attention_states(*states, out=guarded(states[0].copy()), lse=guarded(states[1].copy()))


def run_quantised(ops: HostOps) -> None:
    """The ops that take scales, with one per token, or per group of int4."""
    layouts = itertools.cycle(LAYOUTS | PACKED_LAYOUTS)
    block_sizes = itertools.cycle((1, 5, 16))
    on_cpu = ops.target.backend == "cpu"
    dims = [(8, 8), (40, 24), (72, 128)] if on_cpu else [(40, 24)]
    for at_end, dtype, cache_dtype, (head_dim, value_head_dim), q_lens in itertools.product(
        (True, False), arrays.DTYPES, arrays.CACHE_DTYPES, dims, (None, (1, 3, 0, 9))
    ):
        guarded = GuardedMemory(at_end=at_end)
        case = Case(
            (1, 16, 0, 33),
            q_lens,
            dtype=dtype,
            num_q_heads=6,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            block_size=next(block_sizes),
            layout=next(layouts),
            cache_dtype=cache_dtype,
            scales="token",
            scale_groups=(8, value_head_dim) if cache_dtype == "int4" else None,
        )
        inputs = build(case).map(guarded)
        caches = inputs.key_cache, inputs.value_cache
        scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        for kind, options in ((arrays.DTYPES[dtype], scales), (caches[0].dtype, {})):
            numbers = 2 if kind == np.uint8 else 1  # of int4
            rows = sum(case.seq_lens), 2
            out = [guarded(np.zeros((*rows, dim // numbers), kind)) for dim in (head_dim, value_head_dim)]
            ops.gather_kv_cache(*caches, inputs.block_tables, inputs.seq_lens, out=tuple(out), **options)
        if not on_cpu:
            continue
        expected(case).check(*inputs.attention(ops))
        if q_lens is None:
            query, key, value, slots, positions, table = map(guarded, rows_to_rotate(case, 8))
            ops.write_kv_cache(key[: len(slots)], value[: len(slots)], *caches, slots, **scales)
            ops.rope_and_write_kv_cache(query, key, value, *caches, slots, positions, table, **scales)


def test_no_op_leaves_its_tensors(target: Target) -> None:
    if target.device != "cpu":
        pytest.skip("host memory only; compute-sanitizer checks the device's")
    done = subprocess.run(
        [sys.executable, __file__, str(target)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode} (-11: touched a guard page)\n{done.stderr}"


@pytest.mark.parametrize("at_end", [True, False])
def test_guards_guard(at_end: bool) -> None:
    code = (
        "import ctypes, numpy as np; from test_guard_pages import GuardedMemory; "
        f"x = GuardedMemory(at_end={at_end})(np.zeros(5, 'f4')); x[0] = x[4] = 1; "
        f"ctypes.string_at(x.ctypes.data + {20 if at_end else -4}, 4)"
    )
    folder = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == -11, done.stderr


if __name__ == "__main__":
    ops = next(HostOps(target) for target in available_targets() if str(target) == sys.argv[1])
    run(ops)
    run_quantised(ops)
