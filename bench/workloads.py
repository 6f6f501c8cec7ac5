"""Inputs of the size that benchmarks want, as torch tensors, with the bytes that each op has to move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import paged_ops

# What standard normal numbers are multiplied by before they become numbers of a quantised cache.
_GAIN = {torch.int8: 30.0, torch.float8_e4m3fn: 100.0}


def scale_of(dtype: torch.dtype) -> float:
    """What makes numbers of `as_numbers` standard normal again."""
    return 1.0 / _GAIN.get(dtype, 1.0)


def as_numbers(noise: Any, dtype: torch.dtype) -> Any:
    """Standard normal float32 numbers as a cache of `dtype` holds them."""
    noise = noise / scale_of(dtype)
    return (noise.round().clamp(-127, 127) if dtype == torch.int8 else noise).to(dtype)


@dataclass(frozen=True)
class Shape:
    """A decode batch. All sequences have `seq_len` tokens; tables are random permutations of the pool."""

    num_seqs: int
    seq_len: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"
    layout: Literal["NHD", "HND"] = "NHD"
    quantised: str = ""  # dtype of the caches, where it is not that of the query
    scales: Literal["number", "token"] = "number"  # of quantised caches

    def __str__(self) -> str:
        return (
            f"{self.dtype} {self.num_seqs}x{self.seq_len} kv{self.num_kv_heads} g{self.group} "
            f"d{self.head_dim} block{self.block_size}"
            + (" HND" if self.layout == "HND" else "")
            + (f" {self.quantised}, scale per {self.scales}" if self.quantised else "")
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.quantised or self.dtype)
        return dtype

    @property
    def kv_nbytes(self) -> int:
        """Bytes of K and V that the batch reads: what bounds a decode."""
        itemsize = self.cache_dtype.itemsize
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_dim * itemsize

    def scaling(self, num_blocks: int, device: str) -> dict[str, Any]:
        """The scales of a quantised cache, as the ops take them; none of another."""
        if not self.quantised:
            return {}
        scale = scale_of(self.cache_dtype)
        if self.scales == "number":
            return {"k_scale": scale, "v_scale": scale}
        per_token = (num_blocks, self.block_size, self.num_kv_heads)
        return {name: torch.full(per_token, scale, device=device) for name in ("k_scale", "v_scale")}

    def inputs(self, device: str, seed: int = 0) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        blocks_per_seq = -(-self.seq_len // self.block_size)
        num_blocks = self.num_seqs * blocks_per_seq
        pool = paged_ops.allocate_kv_pool(
            num_blocks,
            self.block_size,
            1,
            self.num_kv_heads,
            self.head_dim,
            dtype=self.cache_dtype,
            device=device,
            layout=self.layout,
        )
        # One cheap pass instead of a normal number per element: pools may be many gigabytes. Keys of
        # spread 1 and queries of spread 2 give logits a standard deviation of about 2.
        noise = torch.randn(1 << 16, generator=generator, device=device, dtype=torch.float32)
        noise = as_numbers(noise, self.cache_dtype)
        flat = pool.tensor.view(-1)
        for begin in range(0, len(flat), len(noise)):
            piece = flat[begin : begin + len(noise)]
            piece.copy_(noise.roll(begin // len(noise) * 977)[: len(piece)])
        order = torch.randperm(num_blocks, generator=generator, device=device, dtype=torch.int32)
        query = torch.randn(
            self.num_seqs, self.num_kv_heads * self.group, self.head_dim, generator=generator, device=device
        )
        return Inputs(
            query=(2 * query).to(self.torch_dtype),
            key_cache=pool.key(0),
            value_cache=pool.value(0),
            block_tables=order.view(self.num_seqs, blocks_per_seq),
            seq_lens=torch.full((self.num_seqs,), self.seq_len, dtype=torch.int32, device=device),
            scales=self.scaling(num_blocks, device),
        )


@dataclass(frozen=True)
class Inputs:
    query: Any
    key_cache: Any
    value_cache: Any
    block_tables: Any
    seq_lens: Any
    scales: dict[str, Any] = field(default_factory=dict)  # of quantised caches, as the ops take them

    def decode(self, **options: Any) -> Any:
        return paged_ops.paged_attention_decode(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.seq_lens,
            **self.scales,
            **options,
        )

    def _read(self, blocks: Any) -> tuple[Any, Any]:
        """Blocks of both caches; what is quantised in float32, times its scales."""

        def read(cache: Any, scale: Any) -> Any:
            return cache[blocks] if scale is None else cache[blocks].float() * scale

        scales = [self.scales.get(name) for name in ("k_scale", "v_scale")]
        scales = [s[blocks][..., None] if isinstance(s, torch.Tensor) else s for s in scales]
        return read(self.key_cache, scales[0]), read(self.value_cache, scales[1])

    def contiguous_kv(self) -> tuple[Any, Any]:
        """K and V as [num_seqs, num_kv_heads, seq_len, head_dim] like the query, for peers without paging."""
        seq_len = int(self.seq_lens[0])
        blocks = self._read(self.block_tables.long())
        rows = [x.to(self.query.dtype).flatten(1, 2)[:, :seq_len] for x in blocks]
        return rows[0].transpose(1, 2).contiguous(), rows[1].transpose(1, 2).contiguous()

    def worst_error(self, out: Any, num_checked: int = 2) -> float:
        """Largest error of the first sequences against float64, over the largest output."""
        import numpy as np

        from paged_ops import reference

        def host(x: Any) -> Any:
            return x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()

        tables = self.block_tables[:num_checked]
        used = tables.flatten().long()  # only the blocks that these sequences use travel to the host
        renumbered = np.arange(len(used), dtype=np.int32).reshape(tables.shape)
        expected = reference.paged_attention_decode(
            host(self.query[:num_checked]),
            *map(host, self._read(used)),
            renumbered,
            host(self.seq_lens[:num_checked]),
        )
        return float(np.abs(host(out[:num_checked]) - expected).max() / np.abs(expected).max())

    def complaint(self, out: Any, sequences: Sequence[int]) -> str:
        """What is wrong with these sequences' rows by the bounds that the tests use; empty if nothing is."""
        import numpy as np

        from paged_ops.testing import arrays, cases, tolerance

        rows = torch.tensor(sequences)
        tables = self.block_tables[rows]
        used, lens = tables.flatten().long(), self.seq_lens[rows]
        cache_dtype = str(self.key_cache.dtype).removeprefix("torch.")
        scales = {
            name: arrays.to_numpy(scale[used]) if isinstance(scale, torch.Tensor) else scale
            for name, scale in self.scales.items()
        }
        case = cases.Case(
            tuple(lens.tolist()),
            dtype=str(self.query.dtype).removeprefix("torch."),
            num_q_heads=self.query.shape[1],
            num_kv_heads=self.key_cache.shape[2],
            head_dim=self.query.shape[2],
            block_size=self.key_cache.shape[1],
            cache_dtype=cache_dtype if self.scales else None,
        )
        inputs = cases.Inputs(
            case=case,
            query=arrays.to_numpy(self.query[rows]),
            key_cache=arrays.to_numpy(self.key_cache[used]),
            value_cache=arrays.to_numpy(self.value_cache[used]),
            block_tables=np.arange(len(used), dtype=np.int32).reshape(tables.shape),
            seq_lens=arrays.to_numpy(lens),
            cu_seqlens_q=None,
            **scales,
        )
        return tolerance.expected_attention(inputs).complaint(arrays.to_numpy(out[rows]))
