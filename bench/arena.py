"""One large piece of memory full of noise, on huge pages, that every case cuts its caches from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import paged_ops
from bench.workloads import Inputs, Shape, as_numbers

# A prime, so that the noise is at another place in every block.
_NOISE_LENGTH = 999_983
# Of windows: as many as there is room for.
ALL = 1 << 30


class Arena:
    """Standard normal bfloat16 numbers; seen as float32 nearly the same, as float16 of size 1 to 3.

    Or of another dtype as `as_numbers` makes them.
    """

    def __init__(self, nbytes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        pool = paged_ops.allocate_kv_pool(nbytes >> 12, 1, 1, 1, 2048 // dtype.itemsize, dtype=dtype)
        self.memory: Any = pool.tensor.view(-1)
        self.nbytes = int(self.memory.nbytes)
        noise = torch.randn(_NOISE_LENGTH, generator=torch.Generator().manual_seed(seed))
        noise = as_numbers(noise, dtype)
        for piece in self.memory.split(_NOISE_LENGTH):
            piece.copy_(noise[: len(piece)])

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())

    def view(self, dtype: torch.dtype) -> Any:
        """All of it, flat."""
        return self.memory.view(dtype)

    def pool(self, shape: Shape, num_layers: int = 1) -> paged_ops.KVPool:
        """As many of a shape's blocks as there is room for."""
        inner = (shape.block_size, shape.num_kv_heads)
        if shape.layout == "HND":
            inner = inner[::-1]
        extents = (num_layers, 2, *inner, shape.head_dim)
        flat = self.view(shape.cache_dtype)
        num_blocks = len(flat) // int(np.prod(extents))
        tensor = flat[: num_blocks * int(np.prod(extents))].view(num_blocks, *extents)
        return paged_ops.KVPool(tensor, shape.layout)


@dataclass(frozen=True)
class Windows:
    """The inputs of one shape on many windows of an arena: what turn n reads is out of the caches by then."""

    shape: Shape
    inputs: list[Inputs]

    def __getitem__(self, turn: int) -> Inputs:
        return self.inputs[turn % len(self.inputs)]

    def __len__(self) -> int:
        return len(self.inputs)

    def pieces(self, turn: int) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], int]:
        """Addresses of K and V of each block in the order of the tables, and the bytes of each."""
        inputs = self[turn]
        tables = inputs.block_tables.flatten().numpy().astype(np.uint64)
        columns = []
        for cache in (inputs.key_cache, inputs.value_cache):
            stride = np.uint64(cache.stride(0) * cache.itemsize)
            columns.append(np.uint64(cache.data_ptr()) + tables * stride)
        cache = inputs.key_cache
        return np.stack(columns, axis=1).reshape(-1), int(cache[0].numel() * cache.itemsize)


def windows(arena: Arena, shape: Shape, order: str, most: int = ALL, seed: int = 0) -> Windows:
    """order: "in-order" tables ascend through one window; "random" ones are strewn over the whole arena.

    most: windows to make at most; with 1 every turn reads the same, which caches may hold.
    """
    pool = arena.pool(shape)
    per_seq = -(-shape.seq_len // shape.block_size)
    per_window = shape.num_seqs * per_seq
    num_windows = min(pool.num_blocks // per_window, most)
    assert num_windows >= 1, f"{shape} needs {per_window} blocks, the arena holds {pool.num_blocks}"
    generator = torch.Generator().manual_seed(seed)
    if order == "random":
        blocks = torch.randperm(pool.num_blocks, generator=generator, dtype=torch.int32)
    else:
        blocks = torch.arange(pool.num_blocks, dtype=torch.int32)
    tables = blocks[: num_windows * per_window].view(num_windows, shape.num_seqs, per_seq)
    query = torch.randn(shape.num_seqs, shape.num_kv_heads * shape.group, shape.head_dim, generator=generator)
    first = Inputs(
        query=(2 * query).to(shape.torch_dtype),  # logits get a standard deviation of about 2
        key_cache=pool.key(0),
        value_cache=pool.value(0),
        block_tables=tables[0],
        seq_lens=torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32),
        scales=shape.scaling(pool.num_blocks, "cpu"),
    )
    return Windows(shape, [replace(first, block_tables=table.contiguous()) for table in tables])
