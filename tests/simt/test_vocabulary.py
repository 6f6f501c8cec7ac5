"""Each word of simt.h against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from driver import Driver, Drivers

pytestmark = pytest.mark.xdist_group("simt")


@pytest.fixture
def vocabulary(drivers: Drivers, backend: str) -> Driver:
    return drivers("vocabulary", backend)


def test_thread_and_block_indices(vocabulary: Driver) -> None:
    grid, block = (2, 3, 2), (4, 3, 5)
    out = np.zeros((math.prod(grid), math.prod(block), 12), np.uint32)
    assert vocabulary.indices(out, np.array(grid, np.uint32), np.array(block, np.uint32)) is None
    for b in range(math.prod(grid)):
        for t in range(math.prod(block)):
            thread = t % 4, t // 4 % 3, t // 12
            of_grid = b % 2, b // 2 % 3, b // 6
            assert tuple(out[b, t]) == (*thread, *of_grid, *block, *grid)


def shuffled(values: np.ndarray, kind: str, argument: int, width: int) -> np.ndarray:
    result = values.copy()
    for i in range(len(values)):
        warp, lane = i // 32 * 32, i % 32
        group, inside = lane // width * width, lane % width
        if kind == "index":
            source = group + argument % width
        elif kind == "up":
            source = lane - argument if inside >= argument else lane
        elif kind == "down":
            source = lane + argument if inside + argument < width else lane
        else:
            source = lane ^ argument
            if source >= group + width:
                source = lane
        result[i] = values[warp + source]
    return result


@pytest.mark.parametrize("width", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("kind", ["index", "up", "down", "xor"])
def test_shuffles(vocabulary: Driver, kind: str, width: int) -> None:
    rng = np.random.default_rng(width)
    for dtype in (np.int32, np.float32, np.int64):
        values = rng.integers(-1000, 1000, 64).astype(dtype)
        call = getattr(vocabulary, f"shuffle_{np.dtype(dtype).name}")
        for argument in (0, 1, 3, 7, 16, 31):
            out = np.zeros_like(values)
            assert call(values, out, ["index", "up", "down", "xor"].index(kind), argument, width) is None
            assert np.array_equal(out, shuffled(values, kind, argument, width)), argument


def bits(votes: np.ndarray) -> int:
    return sum(1 << lane for lane, vote in enumerate(votes) if vote)


@pytest.mark.parametrize("threshold", [0, 20, 50, 101])
def test_votes_and_masks_that_part(vocabulary: Driver, threshold: int) -> None:
    votes = (np.random.default_rng(threshold).integers(0, 101, 64) < threshold).astype(np.int32)
    out = np.zeros((64, 6), np.uint32)
    assert vocabulary.votes(votes, out) is None
    for warp in (0, 32):
        mine = votes[warp : warp + 32]
        low, high = bits(mine) & 0xFFFF, bits(mine) & 0xFFFF0000
        for lane in range(32):
            in_low = lane < 16
            assert list(out[warp + lane]) == [
                bits(mine), int(mine.any()), int(mine.all()),
                low if in_low else high, lane ^ 5 if in_low else 0,
                high if 31 - lane >= 16 else low,
            ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_threads", "num_staying"), [(32, 32), (128, 128), (100, 70), (1024, 1), (96, 33)]
)
@pytest.mark.parametrize("votes_of", ["none", "some", "all"])
def test_block_votes(vocabulary: Driver, num_threads: int, num_staying: int, votes_of: str) -> None:
    some = np.random.default_rng(1).integers(0, 2, num_threads) * 7
    votes = {"none": np.zeros(num_threads), "some": some, "all": np.ones(num_threads)}[votes_of].astype(
        np.int32
    )
    out = np.full((num_threads, 3), -1, np.int32)
    assert vocabulary.block_votes(votes, out, num_threads, num_staying) is None
    staying = votes[:num_staying] != 0
    assert (out[:num_staying] == [staying.sum(), staying.any(), staying.all()]).all()
    assert (out[num_staying:] == -1).all()


def test_atomics(vocabulary: Driver) -> None:
    values = np.random.default_rng(2).integers(0, 1 << 20, 4 * 96).astype(np.int32)
    totals = np.zeros(
        1,
        [("sum", "i4"), ("maximum", "i4"), ("minimum", "i4"), ("claimed", "i4"), ("unsigned_sum", "u4"),
         ("exchanged", "u4"), ("long_sum", "u8"), ("float_sum", "f4"), ("unused", "f4")],
    )  # fmt: skip
    totals["minimum"] = 1 << 30
    totals["claimed"] = -1
    assert vocabulary.atomics(values, totals, 4, 96) is None
    got = totals[0]
    assert got["sum"] == got["unsigned_sum"] == values.sum()
    assert got["long_sum"] == int(values.astype(np.uint64).sum()) << 32
    assert got["float_sum"] == (values % 4).sum()
    assert (got["maximum"], got["minimum"]) == (values.max(), values.min())
    assert 0 <= got["claimed"] < len(values)
    # One thread found 0; it put 1000 on top of a 1, which a later exchange may have replaced.
    assert got["exchanged"] in (1, 1001)


def test_shared_memory(vocabulary: Driver) -> None:
    values = np.random.default_rng(3).standard_normal((3, 16, 16)).astype(np.float32)
    transposed, reversed_ = np.zeros_like(values), np.zeros_like(values)
    assert vocabulary.shared(values, transposed, reversed_, 3) is None
    assert np.array_equal(transposed, values.transpose(0, 2, 1))
    assert np.array_equal(reversed_, values.reshape(3, 256)[:, ::-1].reshape(3, 16, 16))


def test_last_block_adds_up(vocabulary: Driver) -> None:
    values = np.random.default_rng(4).integers(-50, 50, 128 * 9).astype(np.float32)
    total, counter = np.zeros(1, np.float32), np.zeros(1, np.uint32)
    assert vocabulary.last_block(values, total, counter, 9) is None
    assert total[0] == values.sum()
    assert counter[0] == 0


def test_scalars(vocabulary: Driver) -> None:
    values = np.random.default_rng(5).integers(-(1 << 31), 1 << 31, 32).astype(np.int32)
    values[:4] = [0, 1, -1, 1 << 30]
    out = np.zeros((32, 12), np.int32)
    assert vocabulary.scalars(values, out) is None
    unsigned, following = values.view(np.uint32), np.roll(values, -1)
    for i in range(32):
        x, y = int(values[i]), int(following[i])
        ux, uy = int(unsigned[i]), int(following.view(np.uint32)[i])
        lowest = (ux & -ux).bit_length()
        assert list(out[i][:7]) == [ux.bit_count(), 32 - ux.bit_length(), lowest, x, x, min(x, y), max(x, y)]
        assert int(out[i].view(np.uint32)[7]) == min(ux, uy)
        a, b = (np.float32(math.fmod(v, 1000)) for v in (x, y))
        floats = out[i].view(np.float32)
        assert floats[8] == np.float32(a * np.float32(0.1)) + b
        assert floats[9] == np.float32(np.float64(a) * np.float64(np.float32(0.1)) + np.float64(b))
        assert (floats[10], floats[11]) == (max(a, b), min(a, b))


def test_functions(vocabulary: Driver) -> None:
    x = np.linspace(0.01, 40, 32).astype(np.float32)
    out = np.zeros((32, 5), np.float32)
    assert vocabulary.functions(x, out) is None
    wide = x.astype(np.float64)
    want = np.stack([np.exp(-wide), np.log(wide), wide**-0.5, 1 / wide, np.exp2(-wide)], axis=1)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_vector_types(vocabulary: Driver) -> None:
    out = np.zeros(22, np.float32)
    assert vocabulary.vectors(out) is None
    assert list(out) == [*range(1, 19), 16, 32, 16, 32]
