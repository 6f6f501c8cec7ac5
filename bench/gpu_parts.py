"""The parts of the GPU report: each returns what it found, and raises when the thing itself fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_decode import decode, latent
from bench.gpu_part import Options, Part, copy_bandwidth, percent, us
from bench.timing import significant

ROOT = Path(__file__).parents[1]


def _output(*command: str, limit_seconds: int = 60, **environment: str) -> str:
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    if run.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {run.returncode}: {(run.stdout + run.stderr)[-2000:]}"
        )
    return run.stdout


# ---- what is here -------------------------------------------------------------------------------


def machine(options: Options) -> dict[str, Any]:
    """The chip, the driver, the compiler and the libraries at hand."""
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}
    for library in (
        "torch",
        "cupy-cuda13x",
        "numpy",
        "pybind11",
        "cmake",
        "ninja",
        "pytest",
        "flashinfer-python",
    ):
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = None
    if nvcc := shutil.which("nvcc"):
        found["nvcc"] = _output(nvcc, "--version").strip().splitlines()[-1]
    if smi := shutil.which("nvidia-smi"):
        query = "name,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.mem,ecc.mode.current"
        found["nvidia-smi"] = _output(smi, f"--query-gpu={query}", "--format=csv,noheader").strip()
    if options.backend == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["arch"] = f"{properties.major}{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def build(options: Options) -> dict[str, Any]:
    """The CUDA backend for this chip alone, in place."""
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    tail = _output(
        sys.executable,
        "setup.py",
        "build_ext",
        "--inplace",
        limit_seconds=220,
        PAGED_OPS_CUDA="on",
        PAGED_OPS_CUDA_ARCHS=f"{major}{minor}-real",
        PAGED_OPS_BUILD_DIR=str(ROOT / "build" / "gpu-report"),
    )[-500:]
    return {
        "arch": f"sm_{major}{minor}",
        "log_tail": tail,
        "report": _output(sys.executable, "-m", "paged_ops"),
    }


# ---- is it right ---------------------------------------------------------------------------------


def tests(options: Options) -> dict[str, Any]:
    """The op tests on this backend."""
    files = ["tests/ops/test_merge.py"] if options.quick else ["tests/ops"]
    has_xdist = importlib.util.find_spec("xdist") is not None
    workers = ["-n", "8"] if has_xdist and len(os.sched_getaffinity(0)) >= 8 else []
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *files,
            "--backend",
            options.backend,
            "-q",
            "--tb=short",
            *workers,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    lines = run.stdout.strip().splitlines()
    result = {"summary": lines[-1] if lines else run.stderr[-500:], "passed": run.returncode == 0}
    if run.returncode != 0:
        result["failures"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:40]
        result["tail"] = "\n".join(lines[-60:])
    return result


def twins(options: Options) -> dict[str, Any]:
    """The emulator's host twins against the instructions that they imitate."""
    files = ["tests/simt/test_vocabulary.py", "tests/simt/test_instructions.py"]
    command = [sys.executable, "-m", "pytest", *files, "-k", "cuda", "-q", "--tb=short"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = run.stdout.strip().splitlines()
    return {"summary": lines[-1] if lines else run.stderr[-500:], "passed": run.returncode == 0}


_SANITIZED = """
import torch
from bench.workloads import Shape
import paged_ops
shapes = (
    Shape(3, 700, 2, 4, 64),
    Shape(2, 90, 1, 3, 128, block_size=5),
    Shape(2, 70, 2, 2, 64, dtype="float32"),
)
for shape in shapes:
    inputs = shape.inputs("cuda")
    inputs.decode(return_lse=True)
    paged_ops.copy_blocks([inputs.key_cache, inputs.value_cache], torch.tensor([[0, 1]], device="cuda"))
    rows = torch.ones(2, shape.num_kv_heads, shape.head_dim, dtype=inputs.query.dtype, device="cuda")
    slots = torch.tensor([3, -1], device="cuda")
    paged_ops.write_kv_cache(rows, rows, inputs.key_cache, inputs.value_cache, slots)
    paged_ops.gather_kv_cache(inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens)
torch.cuda.synchronize()
"""


def sanitizer(options: Options) -> dict[str, Any]:
    """NVIDIA's compute-sanitizer over a small set: memory errors, then races in shared memory."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"skipped": "compute-sanitizer is not installed"}
    found = {}
    for check in ("memcheck", "racecheck"):
        text = _output(tool, "--tool", check, sys.executable, "-c", _SANITIZED, limit_seconds=60)
        found[check] = re.findall(r"^=+ (.*SUMMARY.*)$", text, re.MULTILINE)
    return found


# ---- how fast is it ------------------------------------------------------------------------------


def other_ops(options: Options) -> dict[str, Any]:
    """Writes, block copy, gather and prefill: percent of the copy's bandwidth, or TFLOP/s."""
    import torch

    import paged_ops
    from bench.timing import time_interleaved
    from bench.workloads import Shape

    bandwidth, device = copy_bandwidth(options), options.device
    shape = Shape(2, 48, 2, 2, 64) if options.quick else Shape(64, 4096, 8, 4, 128)
    inputs = shape.inputs(device)
    num_tokens = 32 if options.quick else 8192
    num_slots = inputs.key_cache.shape[0] * shape.block_size
    rows = torch.randn(num_tokens, shape.num_kv_heads, shape.head_dim, device=device).to(inputs.query.dtype)
    slots = torch.randperm(num_slots, device=device)[:num_tokens]
    num_blocks = inputs.key_cache.shape[0]
    pairs = torch.randperm(num_blocks, device=device)[: num_blocks // 2 * 2].view(-1, 2).contiguous()
    caches = [inputs.key_cache, inputs.value_cache]
    block_nbytes = 2 * inputs.key_cache[0].numel() * inputs.key_cache.element_size()
    seq = 1
    prefill_len = min(shape.seq_len, 32 if options.quick else 4096)
    query = torch.randn(prefill_len, shape.num_kv_heads * shape.group, shape.head_dim, device=device)
    query = query.to(inputs.query.dtype)
    cu_seqlens = torch.tensor([0, prefill_len], dtype=torch.int32, device=device)
    lens = torch.tensor([prefill_len], dtype=torch.int32, device=device)
    eight_bits = [torch.zeros_like(cache, dtype=torch.float8_e4m3fn) for cache in caches]
    positions = torch.arange(num_tokens, device=device)
    angles = torch.randn(num_tokens, shape.head_dim, device=device)
    rope = torch.cat([angles.cos()[:, ::2], angles.sin()[:, ::2]], dim=1)
    query_rows = rows.repeat_interleave(shape.group, dim=1)
    candidates = {
        "write_kv_cache": lambda: paged_ops.write_kv_cache(rows, rows, *caches, slots),
        "write_kv_cache to float8_e4m3fn": lambda: paged_ops.write_kv_cache(
            rows, rows, *eight_bits, slots, k_scale=0.01, v_scale=0.01
        ),
        "rope_and_write_kv_cache": lambda: paged_ops.rope_and_write_kv_cache(
            query_rows, rows, rows, *caches, slots, positions, rope, query_out=query_rows
        ),
        "copy_blocks": lambda: paged_ops.copy_blocks(caches, pairs),
        "gather_kv_cache": lambda: paged_ops.gather_kv_cache(*caches, inputs.block_tables, inputs.seq_lens),
        "prefill": lambda: paged_ops.paged_attention(
            query, *caches, inputs.block_tables[:seq], lens, cu_seqlens
        ),
    }
    timings = time_interleaved(candidates, device=device, rounds=3 if options.quick else 7)
    nbytes = {
        "write_kv_cache": 4 * rows.numel() * rows.element_size(),
        "write_kv_cache to float8_e4m3fn": 2 * rows.numel() * (rows.element_size() + 1),
        "rope_and_write_kv_cache": (4 * rows.numel() + 2 * query_rows.numel()) * rows.element_size()
        + rope.numel() * rope.element_size(),
        "copy_blocks": 2 * len(pairs) * block_nbytes,
        "gather_kv_cache": 2 * shape.kv_nbytes,
    }
    found: dict[str, Any] = {
        name: {
            "us": us(timings[name].median),
            "percent_of_copy": percent(count, timings[name].median, bandwidth),
        }
        for name, count in nbytes.items()
    }
    rows_of = [c[inputs.block_tables[0].long()].flatten(0, 1)[:prefill_len].transpose(0, 1) for c in caches]
    key, value = (rows[None].contiguous() for rows in rows_of)
    sdpa = time_interleaved(
        {
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None], key, value, is_causal=True, enable_gqa=True
            )
        },
        device=device,
        rounds=3,
    )["sdpa"]
    half_flops = 2 * prefill_len**2 * query.shape[1] * shape.head_dim  # causal: half of 4 * n^2 * h * d
    found["prefill"] = {
        "us": us(timings["prefill"].median),
        "tflop_per_s": significant(half_flops / timings["prefill"].median / 1e12, 3),
        "sdpa_us": us(sdpa.median),
    }
    return found


def swap(options: Options) -> dict[str, Any]:
    """Blocks between the device and pinned host memory, both directions, on the current stream."""
    import torch

    import paged_ops
    from bench.timing import time_interleaved

    num_blocks, block = 512, (32, 2, 16, 8, 128)  # 2 MiB: 32 layers of K and V
    device_pool = torch.zeros(num_blocks, *block, dtype=torch.bfloat16, device="cuda")
    host_pool = torch.zeros(num_blocks, *block, dtype=torch.bfloat16, pin_memory=True)
    pairs = torch.randperm(num_blocks)[:256].repeat(2, 1).T.contiguous()
    timings = time_interleaved(
        {
            "out": lambda: paged_ops.swap_blocks(device_pool, host_pool, pairs),
            "in": lambda: paged_ops.swap_blocks(host_pool, device_pool, pairs),
        },
        device="cuda",
        rounds=5,
    )
    nbytes = len(pairs) * device_pool[0].numel() * 2
    return {f"{name}_gb_per_s": significant(nbytes / t.median / 1e9, 4) for name, t in timings.items()}


def graph(options: Options) -> dict[str, Any]:
    """A captured decode replayed on other lengths gives the bits of a direct call, and costs no more."""
    import torch

    from bench.timing import time_interleaved
    from bench.workloads import Shape

    shape = Shape(8, 2048, 8, 4, 128)
    inputs = shape.inputs("cuda")
    out = torch.empty_like(inputs.query)
    inputs.decode(out=out)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        inputs.decode(out=out)
    equal = True
    for length in (2048, 1, 513, 0, 1999):
        inputs.seq_lens.fill_(length)
        expected = inputs.decode().clone()
        out.fill_(float("nan"))
        captured.replay()
        torch.cuda.synchronize()
        equal = equal and torch.equal(out, expected)
    if not equal:
        raise AssertionError("a replayed graph and a direct call differ")
    inputs.seq_lens.fill_(shape.seq_len)
    candidates = {"direct": lambda: inputs.decode(out=out), "replay": captured.replay}
    timings = time_interleaved(candidates, device="cuda")
    return {"replays_equal": equal, **{f"{name}_us": us(t.median) for name, t in timings.items()}}


def invariance(options: Options) -> dict[str, Any]:
    """Each sequence's bits alone and in a batch of others. What that costs: see `batches` and `peers`."""
    import dataclasses

    import torch

    inputs = _mixed_batch(options)
    together = inputs.decode()
    for seq in range(len(inputs.seq_lens)):
        one = slice(seq, seq + 1)
        alone = dataclasses.replace(
            inputs,
            query=inputs.query[one],
            block_tables=inputs.block_tables[one],
            seq_lens=inputs.seq_lens[one],
        )
        if not torch.equal(alone.decode(), together[one]):
            raise AssertionError(f"sequence {seq} has other bits alone than in the batch")
    return {"sequences_equal": len(inputs.seq_lens)}


def _mixed_batch(options: Options) -> Any:
    """One long sequence among many short ones, on tables as wide as the long one needs."""
    import dataclasses

    import torch

    from bench.workloads import Shape

    heads, dim, short, long, count = (1, 64, 17, 530, 3) if options.quick else (8, 128, 512, 65536, 63)
    lengths = [short] * count + [long]
    inputs = Shape(count + 1, -(-sum(lengths) // (count + 1)) + 16, heads, 4, dim).inputs(options.device)
    blocks = [-(-length // 16) for length in lengths]
    tables = torch.zeros(count + 1, max(blocks), dtype=torch.int32, device=options.device)
    ids = inputs.block_tables.flatten()
    for row, mine in zip(tables, ids.split([*blocks, len(ids) - sum(blocks)]), strict=False):
        row[: len(mine)] = mine
    return dataclasses.replace(
        inputs, block_tables=tables, seq_lens=torch.tensor(lengths, dtype=torch.int32, device=options.device)
    )


def batches(options: Options) -> dict[str, Any]:
    """As many tokens in batches of any size and mixture: no cliff is what is wanted."""
    from bench.timing import time_interleaved
    from bench.workloads import Shape

    bandwidth = copy_bandwidth(options)
    total, sizes = (256, (1, 2, 4)) if options.quick else (1 << 18, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    heads, dim = (1, 64) if options.quick else (8, 128)
    named: dict[str, Any] = {}
    for size in sizes:
        inputs = Shape(size, total // size, heads, 4, dim).inputs(options.device)
        named[f"{size} x {total // size}"] = inputs
    named["mixed"] = _mixed_batch(options)
    timings = time_interleaved(
        {name: inputs.decode for name, inputs in named.items()},
        device=options.device,
        rounds=3 if options.quick else 7,
    )
    rows = []
    for name, inputs in named.items():
        row_nbytes = 2 * inputs.key_cache[0, 0].numel() * inputs.key_cache.element_size()
        nbytes = int(inputs.seq_lens.sum()) * row_nbytes
        seconds = timings[name].median
        share = percent(nbytes, seconds, bandwidth)
        rows.append({"batch": name, "us": us(seconds), "percent_of_copy": share})
    equal = [row["percent_of_copy"] for row in rows[:-1]]
    return {"worst_over_best": significant(min(equal) / max(equal), 3), "rows": rows}


def grid(options: Options) -> dict[str, Any]:
    """Page sizes x groups x dtypes, verified, as percent of the copy's bandwidth."""
    from bench.timing import time_interleaved
    from bench.workloads import Shape

    bandwidth = copy_bandwidth(options)
    pages, groups = ((1, 16), (1, 12)) if options.quick else ((1, 16, 64, 256), (1, 4, 8, 16))
    seqs, length, heads, dim = (2, 40, 1, 64) if options.quick else (32, 4096, 8, 128)
    rows = []
    for dtype in ("bfloat16", "float16", "float32"):
        for group in groups:
            row: dict[str, Any] = {"dtype": dtype, "group": group}
            for page in pages:
                shape = Shape(seqs, length, heads, group, dim, block_size=page, dtype=dtype)
                inputs = shape.inputs(options.device)
                error = inputs.worst_error(inputs.decode(), num_checked=1)
                if not error < (1e-4 if dtype == "float32" else 2e-2):
                    raise AssertionError(f"{shape}: wrong by {error} of the largest output")
                timing = time_interleaved({"ours": inputs.decode}, device=options.device, rounds=3)["ours"]
                row[f"page {page}"] = percent(shape.kv_nbytes, timing.median, bandwidth)
            rows.append(row)
    return {"rows": rows}


def peers(options: Options) -> dict[str, Any]:
    """Ours beside whatever peers are installed, each held to our result before it is timed."""
    import torch

    from bench.gpu_peers import PEERS
    from bench.timing import time_interleaved
    from bench.workloads import Shape

    shapes = [Shape(64, 4096, 8, group, 128) for group in (1, 4, 8, 16)] + [Shape(1, 131072, 8, 4, 128)]
    rows: list[dict[str, Any]] = []
    for shape in [Shape(2, 40, 2, 2, 64)] if options.quick else shapes:
        inputs = shape.inputs(options.device)
        ours = inputs.decode()
        candidates: dict[str, Callable[[], Any]] = {"ours": inputs.decode}
        row: dict[str, Any] = {"shape": str(shape), "ours": ""}
        for name, prepare in PEERS.items():
            try:
                call = prepare(shape, inputs)
                error = float((call().float() - ours.float()).abs().max() / ours.float().abs().max())
                if options.device == "cuda":
                    torch.cuda.synchronize()
                if not error < 3e-2:
                    raise ValueError(f"differs by {error:.2g}")
                candidates[name] = call
            except ImportError:
                row[name] = "not installed"
            except Exception as error:  # a peer's trouble is a finding, not ours
                row[name] = f"{type(error).__name__}: {error}"[:80].replace("|", "/").replace("\n", " ")
        timings = time_interleaved(candidates, device=options.device, rounds=3 if options.quick else 7)
        row |= {name: us(timing.median) for name, timing in timings.items()}
        rows.append({name: row[name] for name in ("shape", "ours", *PEERS)})
    return {"unit": "us", "rows": rows}


PARTS = (
    Part(machine, 30),
    Part(build, 230, ("cuda",)),
    Part(tests, 110),
    Part(sanitizer, 90, ("cuda",)),
    Part(graph, 30, ("cuda",)),
    Part(invariance, 40),
    Part(decode, 110),
    Part(latent, 30),
    Part(batches, 50),
    Part(other_ops, 40),
    Part(swap, 30, ("cuda",)),
    Part(peers, 90),
    Part(grid, 60),
    Part(twins, 60, ("cuda",)),
)
