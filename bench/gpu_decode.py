"""The decode parts of the GPU report: over shapes, and of latent caches."""

from __future__ import annotations

from typing import Any

from bench.gpu_part import Options, copy_bandwidth, percent, us
from bench.timing import significant


def _decode_shapes(options: Options) -> list[Any]:
    from bench.workloads import Shape

    if options.quick:
        return [
            Shape(2, 40, 2, 2, 64),
            Shape(1, 530, 1, 4, 128, dtype="float16"),
            Shape(2, 40, 2, 2, 64, quantised="int8", scales="token"),
        ]
    main = [Shape(64, 4096, 8, group, 128) for group in (1, 4, 8, 16)]
    pages = [Shape(64, 4096, 8, 4, 128, block_size=size) for size in (1, 8, 32, 64, 256)]
    dims = [Shape(64, 4096, 8, 4, dim) for dim in (64, 80, 256)]
    batches = [Shape(n, 65536 // n * 4, 8, 4, 128) for n in (1, 4, 16, 256)]
    dtypes = [Shape(64, 4096, 8, 4, 128, dtype=dtype) for dtype in ("float16", "float32")]
    eight_bits = [
        *(Shape(64, 4096, 8, group, 128, quantised="float8_e4m3fn") for group in (1, 8)),
        Shape(64, 4096, 8, 4, 128, quantised="float8_e4m3fn", scales="token"),
        *(Shape(64, 4096, 8, 4, dim, quantised="int8") for dim in (64, 128, 256)),
    ]
    return main + pages + dims + batches + dtypes + eight_bits + [Shape(1, 262_144, 1, 8, 128)]


def decode(options: Options) -> dict[str, Any]:
    """Decode over shapes: verified against float64, then percent of the copy's bandwidth, beside SDPA."""
    import torch

    from bench.timing import time_interleaved

    bandwidth = copy_bandwidth(options)
    rows = []
    for shape in _decode_shapes(options):
        inputs = shape.inputs(options.device)
        out = torch.empty_like(inputs.query)
        error = inputs.worst_error(inputs.decode(out=out), num_checked=1)
        if not error < (1e-4 if shape.dtype == "float32" else 2e-2):
            raise AssertionError(f"{shape}: wrong by {error} of the largest output")
        key, value = inputs.contiguous_kv()
        query = inputs.query[:, :, None]
        candidates = {
            "ours": lambda inputs=inputs, out=out: inputs.decode(out=out),
            "sdpa": lambda q=query, k=key, v=value: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=True
            ),
        }
        timings = time_interleaved(candidates, device=options.device, rounds=3 if options.quick else 7)
        ours, sdpa = timings["ours"], timings["sdpa"]
        rows.append(
            {
                "shape": str(shape),
                "kv_mib": significant(shape.kv_nbytes / 2**20, 4),
                "us": us(ours.median),
                "us_low_high": [us(ours.low), us(ours.high)],
                "percent_of_copy": percent(shape.kv_nbytes, ours.median, bandwidth),
                "sdpa_us": us(sdpa.median),
                "error": significant(error, 2),
            }
        )
    return {"copy_gb_per_s": significant(bandwidth / 1e9, 4), "rows": rows}


def latent(options: Options) -> dict[str, Any]:
    """Decode over one KV head of 576 dims whose values are its first 512 (MLA, absorbed), as ``decode``."""
    import numpy as np
    import torch

    import paged_ops
    from bench.timing import time_interleaved
    from paged_ops import reference

    device, bandwidth, block_size, dim, value_dim = options.device, copy_bandwidth(options), 64, 576, 512
    num_seqs, seq_len = (2, 70) if options.quick else (64, 4096)
    per_seq = -(-seq_len // block_size)
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    cache = noise(num_seqs * per_seq, block_size, 1, dim)
    tables = torch.randperm(len(cache), generator=generator, device=device, dtype=torch.int32)
    tables = tables.view(num_seqs, per_seq)
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    rows = []
    for num_heads in (2,) if options.quick else (16, 128):
        query = noise(num_seqs, num_heads, dim)
        out = torch.empty(num_seqs, num_heads, value_dim, dtype=query.dtype, device=device)

        def call(query: Any = query, out: Any = out) -> Any:
            return paged_ops.paged_attention_decode(
                query, cache, cache[..., :value_dim], tables, lens, out=out
            )

        host = cache[tables[0].long()].float().cpu().numpy()
        expected = reference.paged_attention_decode(
            query[:1].float().cpu().numpy(),
            host,
            host[..., :value_dim],
            np.arange(per_seq, dtype=np.int32)[None],
            lens[:1].cpu().numpy(),
        )
        error = float(np.abs(call()[:1].float().cpu().numpy() - expected).max() / np.abs(expected).max())
        if not error < 2e-2:
            raise AssertionError(f"{num_heads} heads: wrong by {error} of the largest output")
        timing = time_interleaved({"ours": call}, device=device, rounds=3 if options.quick else 7)["ours"]
        nbytes = num_seqs * seq_len * dim * cache.element_size()
        operations = 2 * num_seqs * seq_len * num_heads * (dim + value_dim)
        rows.append(
            {
                "heads": num_heads,
                "us": us(timing.median),
                "percent_of_copy": percent(nbytes, timing.median, bandwidth),
                "tflop_per_s": significant(operations / timing.median / 1e12, 3),
                "error": significant(error, 2),
            }
        )
    return {"rows": rows}
