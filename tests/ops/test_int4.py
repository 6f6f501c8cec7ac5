"""Caches of int4 with scales of groups: what every code is worth, what numbers become, bits, bad input."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scale_checks import require_bad_scale

import paged_ops
from paged_ops import reference, reference_numbers
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target, use_num_threads
from paged_ops.testing.cases import LAYOUTS, Case, build, one_sequence_per_token, select_sequences
from paged_ops.testing.checks import check_attention, check_write, expected, require_same_bits
from paged_ops.testing.grids import int4_cases

F32 = np.float32


@pytest.mark.grid(cases=int4_cases)
def test_attention(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


GROUPS = [(dim, group) for dim in (8, 24, 40, 96, 256) for group in range(8, dim + 1, 8) if dim % group == 0]


@pytest.mark.parametrize(("head_dim", "group"), [*GROUPS, (576, 8), (576, 192)])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_every_size_of_groups(ops: HostOps, dtype: str, head_dim: int, group: int) -> None:
    """In keys; in values the smallest."""
    case = Case((21, 40), (3, 1), dtype, 4, 2, head_dim, 24, cache_dtype="int4", scale_groups=(group, 8))
    check_attention(lambda inputs: inputs.attention(ops), case)
    check_write(ops, case)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_write(ops: HostOps, dtype: str) -> None:
    for layout, head_dim in zip(LAYOUTS, (64, 8, 40, 128, 80, 256), strict=True):
        case = Case((0, 9, 33), None, dtype, 6, 3, head_dim, 24, 4, layout, strided=layout == "HND")
        for group in {8, head_dim // 2 // 8 * 8 or 8, head_dim}:
            if head_dim % group == 0:
                check_write(ops, replace(case, cache_dtype="int4", scale_groups=(group, 24)))


# --- codes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_what_each_code_is_worth(ops: HostOps, dtype: str) -> None:
    """A sequence of one token has its value for a result: all pairs of the 16 codes, by its group's scale."""
    codes = np.arange(256, dtype=np.uint8).reshape(2, 1, 1, 128)
    zeros = np.zeros((2, 1, 1, 128), np.uint8)
    query = np.zeros((2, 1, 256), arrays.DTYPES[dtype])
    tables, lens = np.arange(2, dtype=np.int32)[:, None], np.ones(2, np.int32)
    for num_groups in (1, 2, 4, 8, 16, 32):
        scale = (2.0 ** np.linspace(-9, 9, 2 * num_groups)).astype(F32).reshape(2, 1, 1, num_groups)
        ones = np.ones((2, 1, 1, 32), F32)
        out = ops.paged_attention_decode(query, zeros, codes, tables, lens, k_scale=ones, v_scale=scale)
        low, high = codes % 16, codes // 16
        numbers = np.stack([low, high], axis=-1).reshape(2, num_groups, -1).astype(int)
        numbers -= 16 * (numbers > 7)
        wanted = (numbers.astype(F32) * scale.reshape(2, num_groups, 1)).astype(out.dtype).reshape(out.shape)
        require_same_bits("out", wanted + 0, out)


@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_what_each_number_becomes(ops: HostOps, dtype: str) -> None:
    """All numbers of 16 bits, or as many of 32: to the nearest code of their group, NaN to 0."""
    kind = arrays.DTYPES[dtype]
    if kind.itemsize == 2:
        numbers = np.arange(2**16, dtype=np.uint16).view(kind)
    else:
        rng = np.random.default_rng(0)
        numbers = rng.integers(0, 2**32, 2**16, dtype=np.uint64).astype(np.uint32).view(F32)
    numbers[8:16] = [7, 0.5, 1.5, -2.5, np.inf, -np.inf, np.nan, -7]  # a scale of 1, ties, what does not fit
    rows = numbers.reshape(-1, 1, 256)
    caches = [np.full((len(rows), 1, 1, 128), 0x88, np.uint8) for _ in range(4)]
    scales = [np.full((len(rows), 1, 1, groups), np.nan, F32) for groups in (32, 4, 32, 4)]
    slots = np.arange(len(rows))
    for part, run in ((slice(0, 2), ops), (slice(2, 4), reference)):
        (k_scale, v_scale), pair = scales[part], caches[part]
        run.write_kv_cache(rows, rows, *pair, slots, k_scale=k_scale, v_scale=v_scale)
    for i, name in enumerate(["key_cache", "value_cache"]):
        require_same_bits(name, caches[2 + i], caches[i])
        require_same_bits(f"scales of {name}", scales[2 + i], scales[i])
    written = reference_numbers.unpack_int4(caches[0])
    assert written.min() == -7 and written.max() == 7  # -8 is read only
    assert (scales[0] > 0).all() and np.isfinite(scales[0]).all()
    assert (written[0, 0, 0, 8:16] == [7, 0, 2, -2, 7, -7, 0, -7]).all() and scales[0][0, 0, 0, 1] == 1


def test_a_group_comes_back_as_near_as_the_format_allows(ops: HostOps) -> None:
    rng = np.random.default_rng(0)
    size = 10.0 ** rng.uniform(-30, 30, (32, 2, 4, 1))
    rows = (rng.standard_normal((32, 2, 4, 16)) * size).reshape(32, 2, 64).astype(F32)
    cache = [np.zeros((8, 4, 2, 32), np.uint8) for _ in range(2)]
    scales = [np.full((8, 4, 2, 4), np.nan, F32) for _ in range(2)]
    ops.write_kv_cache(rows, rows, *cache, np.arange(32), k_scale=scales[0], v_scale=scales[1])
    back = reference_numbers.dequantise(cache[0], scales[0]).reshape(rows.shape)
    largest = np.abs(rows).reshape(32, 2, 4, 16).max(axis=3, keepdims=True)
    error = np.abs(back - rows).reshape(32, 2, 4, 16)
    assert (error <= 1.001 * largest / 14).all()


# --- bits, NaN, frameworks ------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(8, 64), (16, 16)])
def test_bits_do_not_depend_on_the_batch_the_cut_or_the_threads(
    ops: HostOps, groups: tuple[int, int]
) -> None:
    for dtype, q_lens in itertools.product(arrays.DTYPES, (None, (40, 3, 1))):
        inputs = build(Case((530, 9, 700), q_lens, dtype, 6, 2, cache_dtype="int4", scale_groups=groups))
        out, lse = inputs.attention(ops)
        if q_lens is not None:
            alone = one_sequence_per_token(inputs).attention(ops)
        else:
            parts = [select_sequences(inputs, [seq]).attention(ops) for seq in range(3)]
            alone = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
        require_same_bits("out", alone[0], out)
        require_same_bits("lse", alone[1], lse)
        for num_threads in (1, 2, 5):
            with use_num_threads(num_threads):
                require_same_bits("out", out, inputs.attention(ops)[0])


def test_bits_do_not_depend_on_the_blocks(ops: HostOps) -> None:
    """The same tokens in blocks of other sizes."""
    case = Case((530, 9, 700), None, "bfloat16", 6, 2, cache_dtype="int4", scale_groups=(32, 8))
    inputs = build(case)
    out, lse = inputs.attention(ops)
    for block_size in (1, 7, 48, 700):
        columns = -(-700 // block_size)
        tables = np.arange(3 * columns, dtype=np.int32).reshape(3, columns)[:, ::-1]
        moved = {}
        for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
            from_blocks = getattr(inputs, name)
            to_blocks = np.full((3 * columns, block_size, *from_blocks.shape[2:]), 0x88, from_blocks.dtype)
            for seq, seq_len in enumerate(case.seq_lens):
                token = np.arange(seq_len)
                to_blocks[tables[seq, token // block_size], token % block_size] = from_blocks[
                    inputs.block_tables[seq, token // 16], token % 16
                ]
            moved[name] = to_blocks
        again = replace(inputs, block_tables=np.ascontiguousarray(tables), **moved).attention(ops)
        require_same_bits("out", out, again[0])
        require_same_bits("lse", lse, again[1])


def test_scales_of_unused_tokens_do_not_show(ops: HostOps) -> None:
    """Those past a sequence's end, and of tokens that only later rows see."""
    case = Case((70,), (9,), num_q_heads=8, cache_dtype="int4", scale_groups=(8, 16))
    inputs = build(case)
    assert np.isnan(inputs.k_scale).any()  # of what was never written
    out, _ = inputs.attention(ops)
    for scale in (inputs.k_scale, inputs.v_scale):
        scale[inputs.block_tables[0, 66 // 16], 66 % 16] = np.nan
    changed, _ = inputs.attention(ops)
    require_same_bits("out", out[:5], changed[:5])
    assert np.isnan(changed[5:]).all()


def test_a_shared_prefix(ops: HostOps) -> None:
    case = Case((100, 70), (3, 1), num_q_heads=6, cache_dtype="int4", scale_groups=(32, 8))
    inputs = build(case)
    inputs.block_tables[1, :2] = inputs.block_tables[0, :2]
    tensors = inputs.query, inputs.key_cache, inputs.value_cache
    tables = inputs.block_tables[0, :2].copy(), 32, inputs.block_tables, inputs.seq_lens, inputs.cu_seqlens_q
    options = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    out = ops.paged_attention_shared_prefix(*tensors, *tables, **options)
    np.testing.assert_allclose(out, inputs.attention(reference)[0], rtol=1e-4, atol=1e-5)


def test_torch_tensors_eager_and_compiled(target: Target) -> None:
    torch = pytest.importorskip("torch")
    case = Case((33, 70), None, "bfloat16", 6, 2, 64, 48, cache_dtype="int4", scale_groups=(16, 24))
    inputs = build(case)
    wanted = inputs.attention(HostOps(target))
    tensors = inputs.map(arrays.to_torch)
    rows = torch.randn(3, 2, 64, dtype=torch.bfloat16), torch.randn(3, 2, 48, dtype=torch.bfloat16)

    def step(x: Any) -> Any:
        results = x.attention(paged_ops)
        scales = {"k_scale": x.k_scale, "v_scale": x.v_scale}
        slots = torch.arange(3)
        paged_ops.write_kv_cache(*rows, x.key_cache, x.value_cache, slots, **scales)
        return results

    with target.use():
        assert arrays.same_bits(wanted[0], tensors.attention(paged_ops)[0])
        eager = inputs.map(lambda array: arrays.to_torch(array.copy()))
        step(eager)
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for want, actual in zip(wanted, compiled(tensors), strict=True):
            assert arrays.same_bits(want, actual)
        for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
            assert arrays.same_bits(getattr(eager, name), getattr(tensors, name)), name


# --- blocks and their scales ----------------------------------------------------------------------------


def test_scales_move_with_their_blocks(ops: HostOps) -> None:
    """By the same calls: scales are tensors whose dimension 0 is the block too."""
    case = Case((37, 90), None, num_q_heads=4, cache_dtype="int4", scale_groups=(16, 8))
    inputs = build(case)
    wanted = expected(case)
    num_blocks = len(inputs.key_cache)
    tensors = [inputs.key_cache, inputs.value_cache, inputs.k_scale, inputs.v_scale]

    def attend(tensors: list[Any], new_place: Any) -> None:
        tables = inputs.block_tables.copy()
        for seq, seq_len in enumerate(case.seq_lens):
            used = -(-seq_len // case.block_size)
            tables[seq, :used] = new_place[tables[seq, :used]]
        names = "key_cache", "value_cache", "k_scale", "v_scale"
        moved = dict(zip(names, tensors, strict=True))
        wanted.check(*replace(inputs, block_tables=tables, **moved).attention(ops))

    def larger(tensor: Any) -> Any:
        return np.full((num_blocks + 3, *tensor.shape[1:]), 0x88, tensor.dtype)

    attend(tensors, np.arange(num_blocks))
    order = np.random.default_rng(0).permutation(num_blocks)
    for tensor in tensors:
        ops.move_blocks(tensor, order)
    attend(tensors, order)

    pools = [larger(tensor) for tensor in tensors]
    pairs = np.stack([order, np.random.default_rng(1).permutation(num_blocks + 3)[:num_blocks]], axis=1)
    place = np.empty(num_blocks, int)
    place[np.arange(num_blocks)] = pairs[:, 1]  # block i moved to order[i] first
    for tensor, pool in zip(tensors, pools, strict=True):
        ops.swap_blocks(tensor, pool, pairs)
    attend(pools, place)

    others = [larger(tensor) for tensor in tensors]
    back = np.random.default_rng(2).permutation(num_blocks + 3)[:num_blocks]
    for pool, other in zip(pools, others, strict=True):
        ops.import_blocks(ops.export_blocks(pool, pairs[:, 1]), other, back)
    attend(others, back)

    spare = np.setdiff1d(np.arange(num_blocks + 3), back)[0]
    for other in others:
        ops.copy_blocks(other, np.array([[back[0], spare]]))
        other[back[0]] = 0x88 if other.dtype == np.uint8 else np.nan
    attend(others, np.concatenate([[spare], back[1:]]))


# --- faults must show -----------------------------------------------------------------------------------


def test_faults_are_seen(ops: HostOps) -> None:
    case = Case((33, 300), None, num_q_heads=6, num_kv_heads=3, cache_dtype="int4", scale_groups=(16, 16))
    inputs = build(case)
    check_attention(lambda inputs: inputs.attention(ops), case)
    swapped = inputs.key_cache << 4 | inputs.key_cache >> 4  # the halves of each byte
    faults = [
        replace(inputs, k_scale=inputs.v_scale),
        replace(inputs, v_scale=inputs.k_scale),
        *(replace(inputs, k_scale=np.roll(inputs.k_scale, 1, axis=axis)) for axis in range(4)),
        *(replace(inputs, v_scale=np.roll(inputs.v_scale, 1, axis=axis)) for axis in range(4)),
        replace(inputs, key_cache=swapped),
        replace(inputs, value_cache=inputs.value_cache << 4 | inputs.value_cache >> 4),
        replace(inputs, value_cache=inputs.value_cache ^ 0x88),
    ]
    for wrong in faults:
        with pytest.raises(AssertionError, match="wrong"):
            check_attention(lambda _, wrong=wrong: wrong.attention(ops), case)


# --- bad input ------------------------------------------------------------------------------------------

BAD_SCALES: list[tuple[Any, type[Exception], str]] = [
    (None, ValueError, r"is None, wanted float32 \[num_blocks, block_size, num_kv_heads, num_groups\]"),
    (1.0, ValueError, r"is a number, wanted float32 \[num_blocks"),
    ("1", TypeError, "wanted float32"),
    (np.ones((4, 16, 2, 3), np.float64), TypeError, "wanted float32"),
    (np.ones(1, F32), ValueError, r"shape is \(1,\), wanted float32 \[num_blocks"),
    (np.ones(2, F32), ValueError, r"shape is \(2,\), wanted float32 \[num_blocks"),
    (np.ones((4, 16, 2), F32), ValueError, r"shape is \(4, 16, 2\), wanted float32 \[num_blocks"),
    (np.ones((4, 16, 3, 3), F32), ValueError, "num_kv_heads"),
    (np.ones((4, 8, 2, 3), F32), ValueError, "block_size"),
    (np.ones((5, 16, 2, 3), F32), ValueError, "num_blocks"),
    *(
        (np.ones((4, 16, 2, groups), F32), ValueError, "number of groups that cuts 24")
        for groups in (0, 2, 4, 5, 6, 24)
    ),
]


def test_extents_that_overflow_are_refused() -> None:
    """A view of one element may have any, also one whose product with the size of a group is 0."""
    torch = pytest.importorskip("torch")
    cache = torch.zeros(1, 1, 1, 12, dtype=torch.uint8)
    rows, slots = torch.ones(1, 1, 24), torch.zeros(1, dtype=torch.int64)
    many = torch.ones(1, 1, 1, 1).expand(1, 1, 1, 2**61)
    with pytest.raises(ValueError, match="^k_scale: shape is .*number of groups that cuts 24"):
        paged_ops.write_kv_cache(rows, rows, cache, cache.clone(), slots, k_scale=many, v_scale=many)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("scale", "error", "message"), BAD_SCALES)
def test_bad_scales_are_named(
    ops: HostOps, name: str, scale: Any, error: type[Exception], message: str
) -> None:
    scales = {which: np.full((4, 16, 2, 3), 3, F32) for which in ("k_scale", "v_scale")} | {name: scale}
    require_bad_scale(ops, np.zeros((4, 16, 2, 12), np.uint8), scales, error, f"^{name}: .*{message}")


@pytest.mark.parametrize("nbytes", [2, 5, 6, 1024])
def test_bad_head_dims_are_named(ops: HostOps, nbytes: int) -> None:
    """Of numbers, not of bytes."""
    cache, scale = np.zeros((4, 16, 2, nbytes), np.uint8), np.ones((4, 16, 2, 1), F32)
    rows = np.ones((3, 2, 2 * nbytes), F32)
    with pytest.raises(ValueError, match=f"^key_cache: head_dim is {2 * nbytes}, wanted a multiple of 8"):
        ops.write_kv_cache(rows, rows, cache, cache.copy(), np.arange(3), k_scale=scale, v_scale=scale)


def test_kinds_of_caches_do_not_mix(ops: HostOps) -> None:
    int4, scale = np.zeros((4, 16, 2, 4), np.uint8), np.ones((4, 16, 2, 1), F32)
    rows, slots = np.ones((3, 2, 8), F32), np.arange(3)
    for other in (np.zeros((4, 16, 2, 8), F32), np.zeros((4, 16, 2, 8), np.int8)):
        with pytest.raises(TypeError, match=f"^value_cache: dtype is {other.dtype}, wanted uint8"):
            ops.write_kv_cache(rows, rows, int4, other, slots, k_scale=scale, v_scale=scale)
        with pytest.raises(TypeError, match=f"^value_cache: dtype is uint8, wanted {other.dtype}"):
            ops.write_kv_cache(rows, rows, other, int4, slots, k_scale=scale, v_scale=scale)
    with pytest.raises(ValueError, match=r"^key: shape is \(3, 2, 4\), wanted 8"):
        ops.write_kv_cache(rows[..., :4], rows, int4, int4.copy(), slots, k_scale=scale, v_scale=scale.copy())
    with pytest.raises(TypeError, match=r"^key: dtype is uint8"):
        ops.write_kv_cache(
            rows.astype(np.uint8), rows, int4, int4.copy(), slots, k_scale=scale, v_scale=scale.copy()
        )


def test_what_is_written_stays_apart(ops: HostOps) -> None:
    caches = [np.zeros((4, 16, 2, 4), np.uint8) for _ in range(2)]
    scale, rows = np.ones((4, 16, 2, 1), F32), np.ones((3, 2, 8), F32)
    with pytest.raises(ValueError, match="share"):
        ops.write_kv_cache(rows, rows, *caches, np.arange(3), k_scale=scale, v_scale=scale)
    one = np.lib.stride_tricks.as_strided(np.ones(1, F32), (4, 16, 2, 1), (0, 0, 0, 0))
    with pytest.raises(ValueError, match="^k_scale: "):
        ops.write_kv_cache(rows, rows, *caches, np.arange(3), k_scale=one, v_scale=scale)


def test_supports_says_so() -> None:
    shape: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2}
    for dtype in arrays.DTYPES:
        assert paged_ops.supports(dtype=dtype, cache_dtype="int4", head_dim=24, **shape)
    assert not paged_ops.supports(dtype="float32", cache_dtype="int4", head_dim=20, **shape)
    assert not paged_ops.supports(dtype="int4", cache_dtype="int4", head_dim=24, **shape)
