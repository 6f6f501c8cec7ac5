"""vLLM's copies of whole blocks: inside caches, between pools, and between addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

import paged_ops
from paged_ops.compat.vllm._call import call


def copy_blocks(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """Copy blocks inside the caches of all layers, keys and values, in one call.

    caches: ``[num_blocks, ...]`` each, of one dtype, with equal and dense blocks, whatever they hold;
    block_mapping int64 ``[num_pairs, 2]`` of (source, destination) on their device, where no block is both.
    """
    if len(key_caches) != len(value_caches):
        raise ValueError(
            f"value_caches: has {len(value_caches)} tensors, wanted {len(key_caches)}, as key_caches"
        )
    named = {"key_caches": key_caches, "value_caches": value_caches}
    flat = [
        _flat(f"{name}[{i}]", cache, 1) for name, caches in named.items() for i, cache in enumerate(caches)
    ]
    if flat:
        names = {"block_pairs": "block_mapping", "caches": "key_caches + value_caches"}
        call(paged_ops.copy_blocks, flat, block_mapping, names=names)


def swap_blocks(
    src: torch.Tensor,
    dst: torch.Tensor,
    block_size_in_bytes: int | torch.Tensor | None = None,
    block_mapping: torch.Tensor | None = None,
) -> None:
    """Copy blocks from one pool to another, on the same or on different devices.

    block_mapping: int64 ``[num_pairs, 2]`` of (source, destination), on the CPU. With
    ``block_size_in_bytes`` the pools are so many bytes after the other in memory, whatever their shapes
    say; in the older form, ``swap_blocks(src, dst, block_mapping)``, blocks are what the first dimension
    counts.
    """
    if block_mapping is None:
        block_size_in_bytes, block_mapping = None, block_size_in_bytes  # type: ignore[assignment]
    if not isinstance(block_mapping, torch.Tensor):
        raise TypeError(f"block_mapping: is {block_mapping!r}, wanted an int64 tensor [num_pairs, 2]")
    if block_size_in_bytes is not None:
        if not isinstance(block_size_in_bytes, int):
            raise TypeError(f"block_size_in_bytes: is {block_size_in_bytes!r}, wanted an integer")
        src, dst = (_of_bytes(n, t, block_size_in_bytes) for n, t in (("src", src), ("dst", dst)))
    names = {"source": "src", "destination": "dst", "block_pairs": "block_mapping"}
    call(paged_ops.swap_blocks, src, dst, block_mapping, names=names)


def swap_blocks_batch(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    sizes: torch.Tensor,
    is_src_access_order_any: bool = False,
) -> None:
    """Copy ``sizes[i]`` bytes from the address ``src_ptrs[i]`` to ``dst_ptrs[i]``, one i after the other.

    int64 ``[num_copies]`` each, on the CPU. Addresses of host memory only, and nobody can check that they
    and the bytes behind them are the caller's: it is all in the caller's hands, as it is in vLLM. Negative
    sizes and null addresses are refused before anything is written. Once CUDA runs in the process an
    address may be a GPU's, which looks no different, and ``NotImplementedError`` says so.
    """
    columns = {"src_ptrs": src_ptrs, "dst_ptrs": dst_ptrs, "sizes": sizes}
    for name, column in columns.items():
        if column.device.type != "cpu":
            raise ValueError(f"{name}: is on {column.device}, wanted cpu: the copies are issued by the host")
        if column.dtype != torch.int64:
            raise TypeError(f"{name}: dtype is {column.dtype}, wanted int64")
        if column.ndim != 1 or len(column) != len(src_ptrs):
            raise ValueError(f"{name}: shape is {tuple(column.shape)}, wanted [num_copies], as src_ptrs")
    if torch.cuda.is_initialized():
        raise NotImplementedError(
            "swap_blocks_batch: CUDA is in use, and whether an address is a GPU's cannot be told from it; "
            "paged_ops.swap_blocks takes the tensors"
        )
    copies = list(zip(*(column.tolist() for column in columns.values()), strict=True))
    for i, (source, destination, nbytes) in enumerate(copies):
        if nbytes < 0:
            raise ValueError(f"sizes: holds {nbytes} at {i}, wanted 0 or more bytes")
        for name, address in (("src_ptrs", source), ("dst_ptrs", destination)):
            if address <= 0 < nbytes:
                raise ValueError(f"{name}: holds {address} at {i}, which is no address")
    for source, destination, nbytes in copies:
        ctypes.memmove(destination, source, nbytes)


def _flat(name: str, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """A view with all dimensions from ``first`` on as one, in the order in which they lie in memory."""
    inner = sorted(range(first, tensor.ndim), key=tensor.stride, reverse=True)
    ordered = tensor.permute(*range(first), *inner)
    if tensor.numel() and not ordered[(0,) * first].is_contiguous():
        raise ValueError(
            f"{name}: shape is {tuple(tensor.shape)} and strides are {tensor.stride()}, wanted "
            f"{'blocks' if first else 'a pool'} without gaps; paged_ops.copy_blocks and paged_ops."
            "swap_blocks take others"
        )
    return ordered.view(*tensor.shape[:first], tensor.shape[first:].numel())


def _of_bytes(name: str, pool: torch.Tensor, block_nbytes: int) -> torch.Tensor:
    """The pool's memory as uint8 ``[num_blocks, block_nbytes]``."""
    memory = _flat(name, pool, 0).view(torch.uint8)
    if block_nbytes < 1 or len(memory) % block_nbytes:
        raise ValueError(
            f"block_size_in_bytes: is {block_nbytes}, wanted a part of the {len(memory)} bytes of {name}"
        )
    return memory.view(-1, block_nbytes)
