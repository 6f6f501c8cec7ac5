"""Each function of ptx.h: fragment layouts as the PTX ISA draws them, conversions over all 16-bit values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from driver import Driver, Drivers

pytestmark = pytest.mark.xdist_group("simt")

LANES = range(32)
DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture
def instructions(drivers: Drivers, backend: str) -> Driver:
    return drivers("instructions", backend)


def fragment(matrix: np.ndarray) -> np.ndarray:
    """The register of each lane [32] for an 8 x 8 matrix: lane 4 g + t has row g, columns 2t and 2t+1."""
    return np.array(
        [int(matrix[g // 4, g % 4 * 2]) | int(matrix[g // 4, g % 4 * 2 + 1]) << 16 for g in LANES]
    )


@pytest.mark.parametrize("kind", ["x2", "x2_trans", "x4", "x4_trans"])
def test_ldmatrix(instructions: Driver, kind: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.permutation(1 << 16)[:256].astype(np.uint16).reshape(32, 8)
    order = rng.permutation(32).astype(np.int32)
    out = np.zeros((32, 4), np.uint32)
    which = ["x2", "x2_trans", "x4", "x4_trans"].index(kind)
    assert instructions.ldmatrix(rows, order, out, which) is None
    num_matrices = int(kind[1])
    for i in range(num_matrices):
        matrix = rows[order[8 * i : 8 * i + 8]]
        assert np.array_equal(out[:, i], fragment(matrix.T if "trans" in kind else matrix)), i
    assert (out[:, num_matrices:] == 0).all()


def test_movmatrix(instructions: Driver) -> None:
    matrix = np.random.default_rng(1).permutation(1 << 16)[:64].reshape(8, 8)
    out = np.zeros(32, np.uint32)
    assert instructions.movmatrix(fragment(matrix).astype(np.uint32), out) is None
    assert np.array_equal(out, fragment(matrix.T))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_is_a_matrix_product(instructions: Driver, dtype: str) -> None:
    rng = np.random.default_rng(2)
    # Small integers: exact in any order, so that a GPU must agree too.
    a = rng.integers(-8, 9, (16, 16)).astype(DTYPES[dtype])
    b = rng.integers(-8, 9, (16, 8)).astype(DTYPES[dtype])
    c = rng.integers(-100, 101, (16, 8)).astype(np.float32)
    out = c.copy()
    assert getattr(instructions, f"mma_{dtype}")(a.view(np.uint16), b.view(np.uint16), out, 0) is None
    assert np.array_equal(out, c + a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_accumulates_in_order_of_k(instructions: Driver, backend: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (
        rng.standard_normal((16, 16)).astype(DTYPES[dtype]),
        rng.standard_normal((16, 8)).astype(DTYPES[dtype]),
    )
    c = rng.standard_normal((16, 8)).astype(np.float32)
    want = c.copy()
    for k in range(16):
        want += a[:, k : k + 1].astype(np.float32) * b[k : k + 1].astype(np.float32)
    assert getattr(instructions, f"mma_{dtype}")(a.view(np.uint16), b.view(np.uint16), c, 0) is None
    if backend == "cuda":
        np.testing.assert_allclose(c, want, atol=1e-5)
    else:
        assert np.array_equal(c, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tiles", [1, 2, 5])
def test_tiled_product_through_copies_and_ldmatrix(instructions: Driver, dtype: str, num_tiles: int) -> None:
    rng = np.random.default_rng(num_tiles)
    a = rng.integers(-8, 9, (16, 16 * num_tiles)).astype(DTYPES[dtype])
    b = rng.integers(-8, 9, (16 * num_tiles, 8)).astype(DTYPES[dtype])
    out = np.full((16, 8), np.nan, np.float32)
    assert getattr(instructions, f"mma_{dtype}")(a.view(np.uint16), b.view(np.uint16), out, num_tiles) is None
    assert np.array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_keeps_nan_and_infinity_in_their_place(instructions: Driver, dtype: str) -> None:
    a, b = np.ones((16, 16), DTYPES[dtype]), np.ones((16, 8), DTYPES[dtype])
    a[3, 5], b[2, 6] = np.nan, np.inf
    out = np.zeros((16, 8), np.float32)
    assert getattr(instructions, f"mma_{dtype}")(a.view(np.uint16), b.view(np.uint16), out, 0) is None
    want = np.full((16, 8), 16, np.float32)
    want[:, 6], want[3] = np.inf, np.nan
    assert np.array_equal(out, want, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(instructions: Driver, dtype: str) -> None:
    n = 1 << 16
    codes = np.arange(n, dtype=np.uint16)
    rng = np.random.default_rng(4)
    # All magnitudes, the values halfway between two 16-bit ones, and what rounds to infinity.
    floats = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    wide = codes.view(DTYPES[dtype]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        halfway = ((wide[:-1].astype(np.float64) + wide[1:]) / 2).astype(np.float32)
    floats[: n // 2] = rng.choice(halfway, n // 2)
    floats[-6:] = [65504, 65519.996, 65520, np.inf, -np.inf, np.nan]
    widened, unpacked = np.zeros(n, np.float32), np.zeros((n, 2), np.float32)
    narrowed, packed = np.zeros(n, np.uint16), np.zeros(n, np.uint32)
    call = getattr(instructions, f"convert_{dtype}")
    assert call(codes, widened, unpacked, floats, narrowed, packed, n) is None

    assert np.array_equal(widened, wide, equal_nan=True)
    assert np.array_equal(unpacked, np.stack([wide, wide[::-1]], axis=1), equal_nan=True)
    with np.errstate(over="ignore", invalid="ignore"):
        want = floats.astype(DTYPES[dtype])
    nan = np.isnan(floats)
    assert np.array_equal(narrowed[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(narrowed.view(DTYPES[dtype])[nan].astype(np.float32)).all()
    pairs = packed.view(np.uint16).reshape(n, 2)
    assert np.array_equal(pairs, np.stack([narrowed, narrowed[::-1]], axis=1))


def test_sixteen_byte_pieces(instructions: Driver) -> None:
    pieces = np.random.default_rng(5).integers(1, 256, (64, 16)).astype(np.uint8)
    out = np.zeros((128, 16), np.uint8)
    assert instructions.pieces(pieces, out, 64) is None
    want = pieces * (np.arange(64) % 2 == 0)[:, None]
    assert np.array_equal(out[:64], want[::-1])
    assert np.array_equal(out[64:], pieces)


def test_byte_perm(instructions: Driver) -> None:
    values = np.random.default_rng(6).integers(0, 1 << 32, (64, 3), dtype=np.uint64).astype(np.uint32)
    values[:, 2] &= 0x7777
    out = np.zeros(64, np.uint32)
    assert instructions.byte_perm(values, out) is None
    for (a, b, selector), got in zip(values.tolist(), out.tolist(), strict=True):
        source = (b << 32 | a).to_bytes(8, "little")
        assert got.to_bytes(4, "little") == bytes(source[selector >> 4 * i & 7] for i in range(4))


def test_ex2(instructions: Driver) -> None:
    x = np.concatenate([np.linspace(-125, 127, 1000), [0, -np.inf, np.inf, np.nan, -126.5, -140, 128]])
    x = x.astype(np.float32)
    out = np.full(len(x), -1, np.float32)
    assert instructions.ex2(x, out, len(x)) is None
    np.testing.assert_allclose(out[:1000], np.exp2(x[:1000].astype(np.float64)), rtol=3e-7)
    assert np.array_equal(
        out[1000:], np.array([1, 0, np.inf, np.nan, 0, 0, np.inf], np.float32), equal_nan=True
    )


def test_lg2(instructions: Driver) -> None:
    x = np.exp2(np.linspace(-126, 127, 1000)).astype(np.float32)
    x = np.concatenate([x, np.array([2.0**-140, 1, 0, np.inf, np.nan, -1], np.float32)])
    out = np.full(len(x), 7, np.float32)
    assert instructions.lg2(x, out, len(x)) is None
    np.testing.assert_allclose(out[:1002], np.log2(x[:1002].astype(np.float64)), rtol=3e-7, atol=3e-7)
    assert np.array_equal(out[1002:], np.array([-np.inf, np.inf, np.nan, np.nan], np.float32), equal_nan=True)


def test_cp_async4(instructions: Driver) -> None:
    words = np.random.default_rng(0).integers(1, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    out = np.full(64, 7, np.uint32)
    assert instructions.words(words, out, 64) is None
    assert np.array_equal(out[::-1], np.where(np.arange(64) % 2 == 0, words, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fma2(instructions: Driver, dtype: str) -> None:
    """Exact results, subnormal ones too: what the kernels ask of it."""
    kind = DTYPES[dtype]
    least = 2.0 ** (-24 if dtype == "f16" else -133)
    triples = np.array(
        [[3, 256, -1152], [-1, 0.5, 0.25], [least, 256, 0], [3 * least, 1, -least], [-0.0, 5, -0.0],
         [np.inf, 1, 1], [np.nan, 1, 1], [1.5, -2, 3]]
    ).astype(kind)  # fmt: skip
    pairs = np.stack([triples, triples[::-1]], axis=-1)  # low, high
    packed = np.ascontiguousarray(pairs).view(np.uint32).reshape(8, 3)
    out = np.zeros(8, np.uint32)
    assert instructions.fma2(np.ascontiguousarray(packed), out, 8, int(dtype == "bf16")) is None
    a, b, c = np.moveaxis(pairs.astype(np.float64), 1, 0)
    wanted = (a * b + c).astype(kind)
    got = out.view(kind).reshape(8, 2)
    assert np.array_equal(wanted.astype(np.float32), got.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(wanted[4]), np.signbit(got[4]))


EIGHT_BITS = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}


@pytest.mark.parametrize("stored", EIGHT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widening_is_exact(instructions: Driver, dtype: str, stored: str) -> None:
    """All 256 codes at each of four places: zeros with their sign, subnormals, infinities and NaN."""
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), 77 * i) for i in range(4)], axis=1)
    out = np.zeros((2, 256), np.uint32)
    kind = 3 * list(DTYPES).index(dtype) + list(EIGHT_BITS).index(stored)
    assert instructions.widen_bytes(codes.view(np.uint32).reshape(256), out, 256, kind) is None
    got = out.view(DTYPES[dtype]).reshape(2, 256, 2)
    wanted = codes.view(EIGHT_BITS[stored]).astype(np.float32)
    for i in range(4):
        actual = got[i % 2, :, i // 2].astype(np.float32)
        assert np.array_equal(wanted[:, i], actual, equal_nan=True)
        assert np.array_equal(np.signbit(wanted[:, i]), np.signbit(actual))


def test_widen_e4m3(instructions: Driver) -> None:
    """The instruction that newer machines have."""
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), 77 * i) for i in range(4)], axis=1)
    out = np.zeros((2, 256), np.uint32)
    assert instructions.widen_bytes(codes.view(np.uint32).reshape(256), out, 256, 6) is None
    got = np.moveaxis(out.view(np.float16).reshape(2, 256, 2), 0, 1).reshape(256, 4)
    wanted = codes.view(EIGHT_BITS["e4m3"]).astype(np.float32)
    assert np.array_equal(wanted, got.astype(np.float32), equal_nan=True)
