"""Caches whose rows are not contiguous: keys in packs as vLLM has them, values token by token, any gaps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged_ops import reference
from paged_ops.testing import arrays
from paged_ops.testing.backends import HostOps, Target
from paged_ops.testing.cases import PACKED_LAYOUTS, Case, Inputs, build
from paged_ops.testing.checks import (
    check_attention,
    check_copy,
    check_gather,
    check_rope,
    check_write,
    expected,
    require_same_bits,
)
from paged_ops.testing.covering import covering

F32 = np.float32


def packed_cases(target: Target) -> list[Case]:
    """Pairs of every two of what says how rows lie and what becomes of them."""
    axes = {
        "dtype": tuple(arrays.DTYPES),
        "dims": ((8, 8), (64, 64), (128, 128), (256, 256), (40, 80), (72, 24), (264, 320)),
        "layout": tuple(PACKED_LAYOUTS),
        "block_size": (1, 3, 8, 16, 40),
        "group": (1, 3, 8, 40),  # rows share a tile, are unpacked once
        "varlen": (False, True),
        "cache_dtype": (None, None, *arrays.CACHE_DTYPES),
        "scales": ("number", "token"),
        "window": (None, 21),
    }
    cases = []
    for seed, row in enumerate(covering(axes, seed=11)):
        head_dim, value_head_dim = row.pop("dims")
        group, varlen = row.pop("group"), row.pop("varlen")
        if row["cache_dtype"] in (None, "int4"):
            row["scales"] = "number"
        if row["cache_dtype"] == "int4":
            row["scale_groups"] = (8, value_head_dim)
        case = Case(
            (1, 0, 37, 70, 16),
            (1, 0, 5, 9, 2) if varlen else None,
            num_q_heads=2 * group,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            soft_cap=20.0 if seed % 3 == 0 else None,
            seed=seed,
            **row,
        )
        cases.append(case)
    return cases


def cache_cases(target: Target) -> list[Case]:
    return [case for case in packed_cases(target) if case.cache_dtype is None]


def contiguous(inputs: Inputs) -> Inputs:
    """The same numbers in caches of contiguous rows."""
    key, value = (np.ascontiguousarray(reference.plain(c)) for c in (inputs.key_cache, inputs.value_cache))
    return replace(inputs, key_cache=key, value_cache=value)


@pytest.mark.grid(cases=packed_cases)
def test_attention(ops: HostOps, case: Case) -> None:
    check_attention(lambda inputs: inputs.attention(ops), case)


@pytest.mark.grid(cases=packed_cases)
def test_write(ops: HostOps, case: Case) -> None:
    check_write(ops, case)


@pytest.mark.grid(cases=cache_cases)
def test_gather_and_copy(ops: HostOps, case: Case) -> None:
    check_gather(ops, case, spare_rows=case.seed % 2, give_out=case.seed % 3 == 0)
    check_copy(ops, case)


@pytest.mark.grid(cases=cache_cases)
def test_rope(ops: HostOps, case: Case) -> None:
    for interleaved in (False, True):
        rotary_dim = case.head_dim if interleaved else max(2, case.head_dim // 2 - 2)
        check_rope(ops, case, rotary_dim, interleaved=interleaved, in_place=interleaved)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_long_sequences_have_the_bits_of_contiguous_rows(ops: HostOps, layout: str, dtype: str) -> None:
    """Chunks shared out, tiles over blocks of all sizes. AMX takes contiguous rows of bfloat16 itself."""
    for block_size, q_lens in itertools.product((16, 5, 64), (None, (1, 33, 2))):
        case = Case((1100, 530, 31), q_lens, dtype, 8, 2, 64, block_size=block_size, layout=layout)
        inputs = build(case)
        out, lse = inputs.attention(ops)
        expected(case).check(out, lse)
        if ops.target.isa == "amx" and dtype == "bfloat16":
            continue
        wanted = contiguous(inputs).attention(ops)
        require_same_bits("out", wanted[0], out)
        require_same_bits("lse", wanted[1], lse)


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_of_both(ops: HostOps, dtype: str, layout: str, which: str) -> None:
    """Keys and values need not lie alike."""
    case = Case((50, 600), (3, 1), dtype, 6, 2, 64, layout=layout)
    inputs = build(case)
    plain = getattr(contiguous(inputs), f"{which}_cache")
    mixed = replace(inputs, **{f"{which}_cache": plain})
    expected(case).check(*mixed.attention(ops))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_in_the_memory_of_packed_keys(ops: HostOps, dtype: str) -> None:
    """Latent attention: values are the first packs of the keys."""
    case = Case((70, 9), (5, 1), dtype, 16, 1, 576, 512, latent=True)
    inputs = build(case)
    blocks, size, heads, dim = inputs.key_cache.shape
    key = arrays.filled((blocks, heads, dim // 8, size, 8), inputs.query.dtype).transpose(0, 3, 1, 2, 4)
    key[...] = inputs.key_cache.reshape(key.shape)
    given = replace(inputs, key_cache=key, value_cache=key[..., :64, :])
    expected(case).check(*given.attention(ops))
    other = replace(given, value_cache=given.value_cache.copy("K"))
    for name, a, b in zip(("out", "lse"), given.attention(ops), other.attention(ops), strict=True):
        require_same_bits(name, a, b)


@pytest.mark.parametrize("x", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("dtype", arrays.DTYPES)
def test_packs_of_any_size(ops: HostOps, dtype: str, x: int) -> None:
    """Write, attend and gather with keys and values in packs of x, at whatever addresses."""
    case = Case((40, 7), None, dtype, 4, 2, 64)
    inputs = build(case)

    def packed(cache: np.ndarray[Any, Any], gap: int) -> np.ndarray[Any, Any]:
        blocks, size, heads, dim = cache.shape
        storage = arrays.filled((blocks, heads, dim // x, size, x + gap), cache.dtype)
        view = storage[..., gap:].transpose(0, 3, 1, 2, 4)
        view[...] = cache.reshape(blocks, size, heads, dim // x, x)
        return view

    given = replace(inputs, key_cache=packed(inputs.key_cache, 0), value_cache=packed(inputs.value_cache, 3))
    expected(case).check(*given.attention(ops))
    tables = inputs.block_tables, inputs.seq_lens
    gathered = ops.gather_kv_cache(given.key_cache, given.value_cache, *tables)
    wanted = ops.gather_kv_cache(inputs.key_cache, inputs.value_cache, *tables)
    for found, same in zip(gathered, wanted, strict=True):
        require_same_bits("gathered", same, found)


@pytest.mark.parametrize("cache_dtype", [None, *arrays.CACHE_DTYPES])
def test_what_was_written_is_attended_to(ops: HostOps, cache_dtype: str | None) -> None:
    """vLLM's layouts from an engine's side: fill a NaN cache through the ops, then ask."""
    case = Case(
        (33, 5, 70), None, "bfloat16", 8, 2, 128, layout="vLLM", cache_dtype=cache_dtype,
        scale_groups=(32, 64) if cache_dtype == "int4" else None,
    )  # fmt: skip
    full, empty = build(case), build(case)
    for cache in (empty.key_cache, empty.value_cache):
        cache[...] = {"int8": -128, "int4": 0x88}.get(cache_dtype or "", np.nan)
    rng = np.random.default_rng(1)
    tokens = sum(case.seq_lens)
    key, value = (rng.standard_normal((tokens, 2, 128)).astype(full.query.dtype) for _ in range(2))
    slots = np.concatenate(
        [
            full.block_tables[s, np.arange(n) // 16].astype(np.int64) * 16 + np.arange(n) % 16
            for s, n in enumerate(case.seq_lens)
        ]
    )
    for inputs, run in ((empty, ops), (full, reference)):
        scales = {} if cache_dtype is None else {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        run.write_kv_cache(key, value, inputs.key_cache, inputs.value_cache, slots, **scales)
    from paged_ops.testing.tolerance import expected_attention

    expected_attention(full).check(*empty.attention(ops))


def test_frameworks_and_shared_prefixes(target: Target) -> None:
    torch = pytest.importorskip("torch")
    import paged_ops

    case = Case((64 + 9, 64 + 30, 64 + 1), None, "bfloat16", 8, 2, 64, layout="vLLM")
    inputs = build(case)
    inputs.block_tables[:, :4] = inputs.block_tables[0, :4]
    wanted = inputs.attention(reference)[0]
    with target.use():
        tensors = inputs.map(lambda array: arrays.to_torch(array, target.device))
        caches = tensors.key_cache, tensors.value_cache
        assert caches[0].ndim == 5 and caches[1].stride(3) == 16
        out = paged_ops.paged_attention_shared_prefix(
            tensors.query, *caches, tensors.block_tables[0], 64, tensors.block_tables, tensors.seq_lens
        )
        torch.testing.assert_close(
            out.double().cpu(), torch.from_numpy(wanted.astype(np.float64)), atol=0.03, rtol=0.03
        )

        @torch.compile(fullgraph=True)
        def step(query: Any, key: Any, value: Any) -> Any:
            attended = paged_ops.paged_attention_decode(
                query, key, value, tensors.block_tables, tensors.seq_lens
            )
            return attended, paged_ops.gather_kv_cache(
                key, value, tensors.block_tables, tensors.seq_lens, num_tokens=250
            )

        attended, gathered = step(tensors.query, *caches)
        assert attended.shape == (3, 8, 64) and gathered[0].shape == gathered[1].shape == (250, 2, 64)
        eager = paged_ops.paged_attention_decode(
            tensors.query, *caches, tensors.block_tables, tensors.seq_lens
        )
        require_same_bits("out", arrays.to_numpy(eager), arrays.to_numpy(attended))


def test_blocks_of_vllms_tensors_move_whole(ops: HostOps) -> None:
    """copy_blocks and swap_blocks take the tensors as vLLM has them, and views of their permuted dims."""
    rng = np.random.default_rng(0)
    own = rng.standard_normal((6, 2, 8, 16, 8)).astype(
        F32
    )  # [num_blocks, kv_heads, head_dim / x, block_size, x]
    wanted = own.copy()
    wanted[4] = wanted[1]
    for view in (lambda x: x, lambda x: x.transpose(0, 3, 1, 2, 4)):
        cache = own.copy()
        ops.copy_blocks(view(cache), np.array([[1, 4]]))
        require_same_bits("cache", wanted, cache)
        other = np.zeros_like(own)
        ops.swap_blocks(view(own), view(other), np.array([[1, 4]]))
        require_same_bits("destination", own[1], other[4])
        assert (other[[0, 1, 2, 3, 5]] == 0).all()


def test_bad_packs(ops: HostOps) -> None:
    case = Case((9,), head_dim=64)
    inputs = build(case)

    def attend(key: Any, value: Any) -> Any:
        tensors = inputs.query, key, value, inputs.block_tables, inputs.seq_lens
        return ops.paged_attention_decode(*tensors)

    key, value = inputs.key_cache, inputs.value_cache
    packed = value.reshape(*value.shape[:3], 8, 8)
    spread = np.repeat(packed, 2, axis=-1)[..., ::2]
    for bad, words in [
        (spread, "value_cache: stride of the last dimension is 2, wanted 1"),
        (value.reshape(*value.shape[:3], 8, 8, 1), r"value_cache: shape is .*head_dim / x, x\]"),
        (value[..., 0], r"value_cache: shape is .*head_dim / x, x\]"),
        (packed[..., :3, :4], "value_cache: value head_dim is 12, wanted a multiple of 8"),
        (packed[..., :0], "value_cache: value head_dim is 0, wanted a multiple of 8"),
        (packed[:, :3], "value_cache: shape is .*block_size, as in key_cache"),
    ]:
        with pytest.raises(ValueError, match=words):
            attend(key, bad)
    with pytest.raises(ValueError, match="query: shape is .*wanted 56 .head_dim, as in key_cache"):
        attend(key.reshape(*key.shape[:3], 8, 8)[..., :7, :], value)
    rows = np.zeros((1, 2, 64), F32)
    folded = np.lib.stride_tricks.as_strided(key, (*key.shape[:3], 8, 8), (*key.strides[:3], 0, 4))
    with pytest.raises(ValueError, match="key_cache: overlaps itself"):
        ops.write_kv_cache(rows, rows, folded, value, np.zeros(1, np.int64))
