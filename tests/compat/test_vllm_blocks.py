"""vLLM's block copies, inside caches, between pools, between addresses; all memory compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_cases import as_bytes, packed_keys, put, transposed_values  # noqa: E402

from paged_ops.compat import vllm  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 7, 8, 2, 16
PAIRS = [(1, 4), (6, 0), (2, 2), (1, 5)]


def numbers(seed: int, dtype: str = "bfloat16") -> np.ndarray:
    """[num_blocks, block_size, heads, dim]: random bits, NaN of any kind among them."""
    rng = np.random.default_rng(seed)
    known = arrays.DTYPES | arrays.CACHE_DTYPES
    wanted = known[dtype]
    bits = rng.integers(0, 256, (NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM * wanted.itemsize), dtype=np.uint8)
    return bits.view(wanted)


def mapping(pairs: list[tuple[int, int]] = PAIRS) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def copied(cache: np.ndarray) -> np.ndarray:
    after = cache.copy()
    for source, destination in PAIRS:
        after[destination] = cache[source]
    return after


def classic(key: np.ndarray, value: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return put(as_bytes(packed_keys(key))), put(as_bytes(transposed_values(value)))


def both_halves(key: np.ndarray, value: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    key_cache, value_cache = put(np.stack([key, value])).unbind(0)
    return key_cache, value_cache


def side_by_side(key: np.ndarray, value: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    key_cache, value_cache = put(np.stack([key, value], axis=1)).unbind(1)
    return key_cache, value_cache


def heads_first(key: np.ndarray, value: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    key_cache, value_cache = (put(x.swapaxes(1, 2)).transpose(1, 2) for x in (key, value))
    return key_cache, value_cache


LAYOUTS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "classic": classic,
    "[2, num_blocks]": both_halves,
    "[num_blocks, 2]": side_by_side,
    "HND": heads_first,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_blocks(target: Target, layout: str, dtype: str) -> None:
    if target.device != "cpu":
        pytest.skip("caches are laid out on the host")
    lay_out = LAYOUTS[layout]
    layers = [(numbers(seed, dtype), numbers(seed + 1, dtype)) for seed in (0, 2, 4)]
    caches = [lay_out(*layer) for layer in layers]
    addresses = [cache.data_ptr() for pair in caches for cache in pair]
    with target.use():
        assert vllm.copy_blocks([k for k, _ in caches], [v for _, v in caches], mapping()) is None
    for pair, (key, value) in zip(caches, layers, strict=True):
        for cache, wanted in zip(pair, lay_out(copied(key), copied(value)), strict=True):
            assert arrays.same_bits(cache, wanted)
    assert addresses == [cache.data_ptr() for pair in caches for cache in pair]


def test_copy_blocks_of_nothing() -> None:
    vllm.copy_blocks([], [], mapping())
    key, value = classic(numbers(0), numbers(1))
    vllm.copy_blocks([key], [value], mapping([]))
    assert arrays.same_bits(key, packed_keys(numbers(0)))


WRONG_COPIES: dict[str, tuple[Any, type[Exception], str]] = {
    "lists of two lengths": (
        lambda k, v: ([k], [v, v], mapping()),
        ValueError,
        "^value_caches: has 2 tensors, wanted 1",
    ),
    "a block that is none": (
        lambda k, v: ([k], [v], mapping([(0, 7)])),
        ValueError,
        r"^block_mapping.*7.*\(from paged_ops.copy_blocks\)",
    ),
    "int32 pairs": (lambda k, v: ([k], [v], mapping().int()), TypeError, "^block_mapping: dtype is int32"),
    "triples": (
        lambda k, v: ([k], [v], torch.zeros(2, 3, dtype=torch.int64)),
        ValueError,
        "^block_mapping: shape",
    ),
    "values of other blocks": (
        lambda k, v: ([k], [v[1:]], mapping()),
        ValueError,
        r"^key_caches \+ value_ca",
    ),
    "values of another dtype": (
        lambda k, v: ([k], [v.half()], mapping()),
        TypeError,
        r"^key_caches \+ value",
    ),
    "gaps": (
        lambda k, v: ([k], [v[..., ::2]], mapping()),
        ValueError,
        r"^value_caches\[0\]: shape is .*without gaps; paged_ops.copy_blocks",
    ),
    "one after the other": (lambda k, v: ([k], [v], mapping([(0, 1), (1, 2)])), ValueError, "^block_mapping"),
}


@pytest.mark.parametrize("what", WRONG_COPIES)
def test_copy_blocks_bad_input(what: str) -> None:
    key, value = classic(numbers(0), numbers(1))
    arguments, error, message = WRONG_COPIES[what]
    with pytest.raises(error, match=message):
        vllm.copy_blocks(*arguments(key, value))
    assert arrays.same_bits(key, packed_keys(numbers(0)))
    assert arrays.same_bits(value, transposed_values(numbers(1)))


# --- swap_blocks ------------------------------------------------------------------------------------------


def swapped(source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    after = destination.copy()
    for src, dst in PAIRS:
        after[dst] = source[src]
    return after


# In [num_blocks, 2] keys alone are memory with gaps, which only the older form takes.
FORMS = [
    (layout, form)
    for layout in LAYOUTS
    for form in ("by bytes", "by bytes and name", "older", "older and by name")
    if layout != "[num_blocks, 2]" or "older" in form
]


@pytest.mark.parametrize(("layout", "form"), FORMS)
def test_swap_blocks(target: Target, layout: str, form: str) -> None:
    """From a pool of 7 blocks to one of 6, of the same layout."""
    if target.device != "cpu":
        pytest.skip("caches are laid out on the host")
    lay_out, (src, dst) = LAYOUTS[layout], (numbers(0), numbers(1))
    source, _ = lay_out(src, src)
    destination, other = lay_out(dst[:6], dst[:6])
    wanted, stays = lay_out(swapped(src, dst[:6]), dst[:6])
    nbytes = source[0].nbytes
    names = {"src": source, "dst": destination, "block_mapping": mapping()}
    with target.use():
        if form == "by bytes":
            vllm.swap_blocks(source, destination, nbytes, mapping())
        elif form == "older":
            vllm.swap_blocks(source, destination, mapping())
        else:
            vllm.swap_blocks(**names, **({"block_size_in_bytes": nbytes} if "bytes" in form else {}))
    assert arrays.same_bits(destination, wanted) and arrays.same_bits(other, stays)
    assert arrays.same_bits(source, lay_out(src, src)[0])


def test_swap_blocks_by_bytes_does_not_look_at_shapes() -> None:
    """Blocks of both keys and values, and a destination of another shape."""
    src, dst = numbers(0), numbers(1)
    source, destination = put(np.stack([src, src], axis=1)), put(np.stack([dst, dst], axis=1)).flatten()
    vllm.swap_blocks(source, destination, source[0].nbytes, mapping())
    both = swapped(np.stack([src, src], axis=1), np.stack([dst, dst], axis=1))
    assert arrays.same_bits(destination, both.reshape(-1))


WRONG_SWAPS: dict[str, tuple[Any, type[Exception], str]] = {
    "no mapping": (lambda s, d: (s, d, 512), TypeError, "^block_mapping: is 512, wanted an int64 tensor"),
    "nothing": (lambda s, d: (s, d), TypeError, "^block_mapping: is None"),
    "a block that is none": (
        lambda s, d: (s, d, s[0].nbytes, mapping([(0, 1), (0, 7)])),
        ValueError,
        r"^block_mapping.*7.*\(from paged_ops.swap_blocks\)",
    ),
    "a source below 0": (lambda s, d: (s, d, mapping([(-1, 0)])), ValueError, "^block_mapping.*-1"),
    "int32 pairs": (lambda s, d: (s, d, mapping().int()), TypeError, "^block_mapping: dtype is int32"),
    "a size of no blocks": (
        lambda s, d: (s, d, 48, mapping()),
        ValueError,
        "^block_size_in_bytes: is 48, wanted a part of the 3584 bytes of src",
    ),
    "half a byte": (
        lambda s, d: (s, d, 51.5, mapping()),
        TypeError,
        "^block_size_in_bytes: is 51.5, wanted an integer",
    ),
    "no size": (lambda s, d: (s, d, 0, mapping()), ValueError, "^block_size_in_bytes: is 0"),
    "gaps": (
        lambda s, d: (s[:, :, ::2], d, 64, mapping()),
        ValueError,
        "^src: shape is .*wanted a pool without gaps; paged_ops.*swap_blocks",
    ),
    "other dtypes": (lambda s, d: (s, d.half(), mapping()), TypeError, "^dst: dtype is float16.*as src"),
    "into itself": (lambda s, d: (d, d, mapping()), ValueError, "^dst"),
}


@pytest.mark.parametrize("what", WRONG_SWAPS)
def test_swap_blocks_bad_input(what: str) -> None:
    source, destination = put(numbers(0)), put(numbers(1))
    arguments, error, message = WRONG_SWAPS[what]
    with pytest.raises(error, match=message):
        vllm.swap_blocks(*arguments(source, destination))
    assert arrays.same_bits(destination, numbers(1))


# --- swap_blocks_batch ------------------------------------------------------------------------------------


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_swap_blocks_batch() -> None:
    """Pieces of any size from and to any addresses, one after the other; the bytes around stay."""
    source = torch.arange(250, dtype=torch.uint8)
    destination = torch.full((100,), 255, dtype=torch.uint8)
    src, dst = source.data_ptr(), destination.data_ptr()
    pieces = [(0, 10, 7), (200, 50, 32), (17, 99, 1), (3, 0, 0)]
    sources, destinations, sizes = (int64(*column) for column in zip(*pieces, strict=True))
    assert vllm.swap_blocks_batch(sources + src, destinations + dst, sizes, True) is None
    wanted = torch.full((100,), 255, dtype=torch.uint8)
    for first, to, nbytes in pieces:
        wanted[to : to + nbytes] = source[first : first + nbytes]
    assert torch.equal(destination, wanted) and torch.equal(source, torch.arange(250, dtype=torch.uint8))


def test_swap_blocks_batch_of_overlapping_pieces() -> None:
    """Each as if its bytes were all read first, and the later one after the earlier."""
    memory = torch.arange(20, dtype=torch.uint8)
    address = memory.data_ptr()
    vllm.swap_blocks_batch(int64(0, 4) + address, int64(2, 15) + address, int64(8, 3))
    wanted = list(range(20))
    wanted[2:10] = range(8)
    wanted[15:18] = wanted[4:7]
    assert memory.tolist() == wanted


def test_swap_blocks_batch_of_nothing() -> None:
    vllm.swap_blocks_batch(int64(), int64(), int64())
    vllm.swap_blocks_batch(int64(0), int64(0), int64(0))


WRONG_BATCHES: dict[str, tuple[Any, type[Exception], str]] = {
    "a size below 0": (lambda p: (p, p, int64(4, -1)), ValueError, "^sizes: holds -1 at 1"),
    "no source": (lambda p: (p * int64(1, 0), p, int64(4, 4)), ValueError, "^src_ptrs: holds 0 at 1"),
    "no destination": (lambda p: (p, -p, int64(4, 4)), ValueError, "^dst_ptrs: holds -.* at 0"),
    "int32": (lambda p: (p, p, int64(4, 4).int()), TypeError, "^sizes: dtype is torch.int32, wanted int64"),
    "of two lengths": (lambda p: (p, p[:1], int64(4, 4)), ValueError, r"^dst_ptrs: shape is \(1,\)"),
    "two dimensions": (lambda p: (p[None], p, int64(4, 4)), ValueError, r"^src_ptrs: shape is \(1, 2\)"),
    "elsewhere": (lambda p: (p.to("meta"), p, int64(4, 4)), ValueError, "^src_ptrs: is on meta, wanted cpu"),
}


@pytest.mark.parametrize("what", WRONG_BATCHES)
def test_swap_blocks_batch_bad_input(what: str) -> None:
    memory = torch.arange(20, dtype=torch.uint8)
    arguments, error, message = WRONG_BATCHES[what]
    with pytest.raises(error, match=message):
        vllm.swap_blocks_batch(*arguments(int64(0, 10) + memory.data_ptr()))
    assert torch.equal(memory, torch.arange(20, dtype=torch.uint8))


def test_swap_blocks_batch_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of a GPU, read by the host, would end the process."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    memory = torch.arange(20, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="CUDA is in use.*paged_ops.swap_blocks"):
        vllm.swap_blocks_batch(*[int64(0) + memory.data_ptr()] * 2, int64(1))
