"""vLLM's gathers from paged caches against loops over their definition, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_cases import put  # noqa: E402

from paged_ops.compat import vllm  # noqa: E402
from paged_ops.compat.vllm import gather  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402

BLOCK_SIZE = 8
# A block and a bit, none at all, one token, up to a block's end.
LENGTHS = (13, 0, 1, 16)
STARTS = (3, 5, 7, 8)
NUM_BLOCKS = 11
WIDE = 20  # more rows in the destination than tokens: so many that a table would end before them


@pytest.fixture(params=[True, False], ids=["host", "as on a device"])
def on_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways: with the numbers at hand, and without reading any of them."""
    if not request.param:
        monkeypatch.setattr(gather, "_on_host", lambda tensor: False)
    return bool(request.param)


def random_bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(1).integers(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8
    )
    return bits.view(dtype)


def table() -> np.ndarray:
    """Blocks in no order; what no token needs is wild."""
    ids = np.full((len(LENGTHS), 4), 2**30, np.int32)
    order = iter(np.random.default_rng(2).permutation(NUM_BLOCKS))
    for seq, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        for place in range(-(-(start + length) // BLOCK_SIZE) if length else 0):
            ids[seq, place] = next(order)
    return ids


def cu_seq_lens() -> np.ndarray:
    return np.cumsum([0, *LENGTHS]).astype(np.int32)


def gathered(
    cache: np.ndarray, dst: np.ndarray, starts: tuple[int, ...], num_tokens: int, on_host: bool
) -> np.ndarray:
    """dst after the gather: rows that nobody owns stay, but on a device the op clears them."""
    wanted, row = dst.copy(), 0
    if not on_host:
        wanted[sum(LENGTHS) : num_tokens] = np.zeros(1, np.uint8).repeat(wanted.itemsize).view(wanted.dtype)
    for seq, length in enumerate(LENGTHS):
        for t in range(starts[seq], starts[seq] + length):
            if row < num_tokens:
                wanted[row] = cache[table()[seq, t // BLOCK_SIZE], t % BLOCK_SIZE]
            row += 1
    return wanted


@pytest.mark.parametrize("with_starts", [True, False], ids=["starts", "from 0"])
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        ((576,), "bfloat16"),
        ((2, 24), "float32"),
        ((656,), np.uint8),
        ((3, 16), "float16"),
        ((32,), ml_dtypes.float8_e5m2),
    ],
)
def test_cp_gather_cache(
    target: Target, on_host: bool, entry: tuple[int, ...], dtype: Any, with_starts: bool
) -> None:
    """Any rows of any dtype; those that nobody owns stay."""
    dtype = arrays.DTYPES.get(dtype, dtype)
    cache = random_bits((NUM_BLOCKS, BLOCK_SIZE, *entry), dtype)
    dst = random_bits((sum(LENGTHS) + WIDE, *entry), dtype)
    starts = STARTS if with_starts else (0,) * len(LENGTHS)
    tensor = put(dst, target.device)
    address = tensor.data_ptr()
    arguments = [
        put(cache, target.device),
        tensor,
        put(table(), target.device),
        put(cu_seq_lens(), target.device),
        len(LENGTHS),
    ]
    if with_starts:
        arguments.append(put(np.array(STARTS, np.int32), target.device))
    with target.use():
        assert vllm.cp_gather_cache(*arguments) is None
    assert tensor.data_ptr() == address and arrays.same_bits(arguments[0], cache)
    assert arrays.same_bits(tensor, gathered(cache, dst, starts, len(dst), on_host))


def layer_of_a_pool() -> tuple[np.ndarray, Any]:
    """Block-major: the blocks of a layer lie apart, by so many tokens."""
    return random_bits((NUM_BLOCKS, 3, BLOCK_SIZE, 40), np.float32), lambda pool: pool[:, 1]


def padded_blocks() -> tuple[np.ndarray, Any]:
    """Blocks that lie apart by tokens and a half."""
    pool = random_bits((NUM_BLOCKS, BLOCK_SIZE * 40 + 20), np.float32)
    return pool, lambda pool: pool[:, : BLOCK_SIZE * 40].reshape(NUM_BLOCKS, BLOCK_SIZE, 40)


@pytest.mark.parametrize("pool_of", [layer_of_a_pool, padded_blocks])
def test_cp_gather_through_strides(target: Target, on_host: bool, pool_of: Any) -> None:
    """Out of strided blocks, into rows of a wider workspace."""
    pool, cache_of = pool_of()
    room = random_bits((sum(LENGTHS), 50), np.float32)
    tensor, cache = put(room, target.device), cache_of(put(pool, target.device))
    assert not cache.is_contiguous()
    with target.use():
        vllm.cp_gather_cache(
            cache,
            tensor[:, 4:44],
            put(table(), target.device),
            put(cu_seq_lens(), target.device),
            4,
            put(np.array(STARTS, np.int32), target.device),
        )
    wanted = room.copy()
    wanted[:, 4:44] = gathered(cache_of(pool), room[:, 4:44], STARTS, len(room), on_host)
    assert arrays.same_bits(tensor, wanted)


@pytest.mark.parametrize("num_tokens", [0, 14, sum(LENGTHS), sum(LENGTHS) + WIDE])
def test_gather_without_dequantising(target: Target, on_host: bool, num_tokens: int) -> None:
    """At most num_tokens rows, which may be a bound as well as a part."""
    cache = random_bits((NUM_BLOCKS, BLOCK_SIZE, 48), np.float32)
    dst = random_bits((sum(LENGTHS) + WIDE, 48), np.float32)
    tensor, token_to_seq = put(dst, target.device), put(np.zeros(len(dst), np.int32), target.device)
    starts = put(np.array(STARTS, np.int32), target.device)
    with target.use():
        vllm.gather_and_maybe_dequant_cache(
            put(cache, target.device),
            tensor,
            put(table(), target.device),
            put(cu_seq_lens(), target.device),
            token_to_seq,
            num_tokens,
            "auto",
            1.0,
            starts,
        )
    assert arrays.same_bits(tensor, gathered(cache, dst, STARTS, num_tokens, on_host))


@pytest.mark.parametrize(
    "scale", [0.37, torch.tensor([0.37]), torch.tensor(0.37)], ids=["number", "[1]", "[]"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_gather_with_dequantising(
    target: Target, on_host: bool, kv_cache_dtype: str, dtype: str, scale: Any
) -> None:
    """number * scale, rounded once; all codes of the format come by."""
    number = arrays.CACHE_DTYPES["float8_e5m2" if kv_cache_dtype == "fp8_e5m2" else "float8_e4m3fn"]
    codes = random_bits((NUM_BLOCKS, BLOCK_SIZE, 48), np.uint8)
    dst = np.full((sum(LENGTHS) + WIDE, 48), 7, arrays.DTYPES[dtype])
    tensor, token_to_seq = put(dst, target.device), put(np.zeros(len(dst), np.int32), target.device)
    starts = put(np.array(STARTS, np.int32), target.device)
    arguments = [
        put(table(), target.device),
        put(cu_seq_lens(), target.device),
        token_to_seq,
        sum(LENGTHS),
        kv_cache_dtype,
        scale,
        starts,
    ]
    with target.use():
        vllm.gather_and_maybe_dequant_cache(put(codes, target.device), tensor, *arguments)
    with np.errstate(over="ignore", invalid="ignore"):
        meant = (codes.view(number).astype(np.float32) * np.float32(0.37)).astype(arrays.DTYPES[dtype])
    wanted = gathered(meant, dst, STARTS, sum(LENGTHS), on_host)
    actual = arrays.to_numpy(tensor)
    np.testing.assert_array_equal(actual.astype(np.float32), wanted.astype(np.float32))
    assert len(np.unique(gathered(codes, np.zeros(dst.shape, np.uint8), STARTS, len(dst), True))) == 256


def test_no_sequences() -> None:
    dst = torch.full((3, 8), 7.0)
    none = torch.zeros(0, 4, dtype=torch.int32)
    vllm.cp_gather_cache(torch.zeros(2, 4, 8), dst, none, torch.zeros(1, dtype=torch.int32), 0)
    assert (dst == 7).all()


def arguments() -> dict[str, Any]:
    return {
        "src_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 16),
        "dst": torch.full((sum(LENGTHS), 16), 7.0),
        "block_table": put(table()),
        "cu_seq_lens": put(cu_seq_lens()),
        "batch_size": len(LENGTHS),
        "seq_starts": torch.tensor(STARTS, dtype=torch.int32),
    }


def with_entry(ids: torch.Tensor, value: int) -> torch.Tensor:
    ids = ids.clone()
    ids[0, 1] = value
    return ids


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "flat cache": (lambda a: {"src_cache": torch.zeros(88, 16)}, ValueError, "^src_cache: shape is"),
    "narrow rows": (
        lambda a: {"src_cache": a["src_cache"][..., :4], "dst": a["dst"][:, :4]},
        ValueError,
        "^src_cache: its width has 16 bytes, wanted a multiple of 16 .* paged_ops.gather_kv_cache",
    ),
    "wide rows": (
        lambda a: {"src_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 4000), "dst": torch.zeros(30, 4000)},
        ValueError,
        r"^src_cache: head_dim is 4000, wanted .*\(from paged_ops.gather_kv_cache\)",
    ),
    "rows with gaps": (
        lambda a: {"src_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 32)[..., ::2]},
        ValueError,
        "^src_cache: strides are",
    ),
    "rows of another width": (
        lambda a: {"dst": a["dst"][:, :8]},
        ValueError,
        r"^dst: shape is .*wanted rows of \(16,\)",
    ),
    "rows of another dtype": (lambda a: {"dst": a["dst"].half()}, TypeError, "^dst: dtype is torch.float16"),
    "int64 table": (lambda a: {"block_table": a["block_table"].long()}, TypeError, "^block_table: dtype"),
    "int64 offsets": (lambda a: {"cu_seq_lens": a["cu_seq_lens"].long()}, TypeError, "^cu_seq_lens: dtype"),
    "int64 starts": (lambda a: {"seq_starts": a["seq_starts"].long()}, TypeError, "^seq_starts: dtype"),
    "a table of fewer sequences": (
        lambda a: {"block_table": a["block_table"][:3]},
        ValueError,
        "^block_table: shape is .* with batch_size 4",
    ),
    "starts of fewer sequences": (
        lambda a: {"seq_starts": a["seq_starts"][:3]},
        ValueError,
        "^seq_starts: shape",
    ),
    "no offsets": (
        lambda a: {"cu_seq_lens": a["cu_seq_lens"][:0], "batch_size": -1},
        ValueError,
        r"^cu_seq_lens: shape is \(0,\)",
    ),
    "one offset": (
        lambda a: {"cu_seq_lens": a["cu_seq_lens"][0], "batch_size": 0},
        ValueError,
        r"^cu_seq_lens: shape is \(\)",
    ),
    "too few rows": (
        lambda a: {"dst": a["dst"][:29]},
        ValueError,
        "^dst: has 29 rows, wanted at least 30",
    ),
    "rows elsewhere": (lambda a: {"dst": a["dst"].to("meta")}, ValueError, "^dst: is on meta, wanted cpu"),
    "batch_size": (lambda a: {"batch_size": 3}, ValueError, "^batch_size: is 3, wanted 4"),
    "falling offsets": (
        lambda a: {"cu_seq_lens": a["cu_seq_lens"].flip(0).contiguous()},
        ValueError,
        "^cu_seq_lens: wanted",
    ),
    "a start below 0": (
        lambda a: {"seq_starts": a["seq_starts"] - 9},
        ValueError,
        "^block_table: has 4 blocks per sequence, .* ask for blocks -1 to",
    ),
    "tokens past the table": (
        lambda a: {"block_table": a["block_table"][:, :2].contiguous()},
        ValueError,
        "^block_table: has 2 blocks per sequence, .* ask for blocks 0 to 2",
    ),
    "a block that is none": (
        lambda a: {"block_table": with_entry(a["block_table"], 11)},
        ValueError,
        "^block_table: holds 11, wanted 0 to 10",
    ),
    "a block below 0": (
        lambda a: {"block_table": with_entry(a["block_table"], -1)},
        ValueError,
        "^block_table: holds -1",
    ),
    "elsewhere": (
        lambda a: {"block_table": a["block_table"].to("meta")},
        ValueError,
        "^block_table: is on meta, wanted cpu",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    given = arguments()
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        vllm.cp_gather_cache(**given | change(given))
    assert (given["dst"] == 7).all()


def test_bad_input_of_the_other_gather() -> None:
    given = arguments()
    del given["batch_size"]
    given |= {"token_to_seq": torch.zeros(30, dtype=torch.int32), "num_tokens": 30, "scale": 1.0}
    codes = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 32, dtype=torch.uint8)
    given["dst"] = torch.full((sum(LENGTHS), 32), 7.0)
    call = vllm.gather_and_maybe_dequant_cache
    with pytest.raises(ValueError, match="^num_tokens: is 31, wanted 0 to the 30 rows"):
        call(**given | {"num_tokens": 31}, kv_cache_dtype="auto")
    with pytest.raises(TypeError, match="^src_cache: dtype is torch.float32"):
        call(**given | {"src_cache": codes.float()}, kv_cache_dtype="fp8")
    with pytest.raises(NotImplementedError, match="^kv_cache_dtype: is 'fp8_ds_mla'"):
        call(**given | {"src_cache": codes}, kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(ValueError, match=r"^scale: shape is \(2,\), wanted a number or float32 \[1\]"):
        call(**given | {"src_cache": codes, "scale": torch.ones(2)}, kv_cache_dtype="fp8")
    with pytest.raises(TypeError, match="^dst: dtype is uint8, wanted float32"):
        call(**given | {"src_cache": codes, "dst": given["dst"].to(torch.uint8)}, kv_cache_dtype="fp8")
    assert (given["dst"] == 7).all()
