"""The roofline model deals out work as the launch code does, and knows what bounds a kernel."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_audit import audit

roofline = audit.roofline
CSRC = Path(__file__).resolve().parents[2] / "csrc"
NARROW, WIDE = roofline.Kernel(8, 3, 64 * 1024, 249), roofline.Kernel(16, 3, 64 * 1024, 366)
SPLIT = roofline.Kernel(64, 2, 40 * 1024, 308, 4)
KERNELS = {kernel.columns: kernel for kernel in (NARROW, WIDE, SPLIT)}
A100, H100, H200 = roofline.CHIPS
MIXED = next(shape for shape in roofline.SHAPES if "65536" in shape.name)


def predict(shape: object, chip: object = H200) -> object:
    kernel = KERNELS[roofline.plan(shape)[0]]
    return roofline.predict(shape, kernel, chip, *roofline.launch(shape, kernel, chip))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("kernels/attention_args.h", "kChunkTokens", roofline.CHUNK_TOKENS),
        ("kernels/attention_args.h", "kTileTokens", roofline.TILE_TOKENS),
        ("kernels/work_line.cuh", "kChunkOverhead", roofline.CHUNK_OVERHEAD_TILES),
        ("launch/attention_config.h", "kPrefillCtas", roofline.PREFILL_CTAS),
        ("launch/attention_config.h", "kSplitColumnTiles", roofline.SPLIT_COLUMN_TILES),
        ("launch/attention_config.h", "kMaxSplitHeadDim", roofline.MAX_SPLIT_HEAD_DIM),
    ],
)
def test_constants_are_those_of_the_kernels(file: str, name: str, value: int) -> None:
    assert re.search(rf"constexpr \w+ .*\b{name} = (\d+)[,;]", (CSRC / file).read_text())[1] == str(value)  # type: ignore[index]


def test_every_policy_deals_out_every_token_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        places = [rng.choice([0, 1, 512, 513, rng.randrange(20000)]) for _ in range(rng.randrange(1, 30))]
        chunks = sum(map(roofline.num_chunks, places))
        for ctas in (
            roofline.one_cta_per_place(places),
            roofline.static_grid(places, rng.randrange(1, 50)),
            roofline.work_list(places, rng.randrange(1, 400)),
        ):
            assert sum(cta.tokens for cta in ctas) == sum(places)
            assert sum(cta.chunks for cta in ctas) == chunks


def test_the_work_list_leaves_no_cta_idle_and_none_with_much_more() -> None:
    ctas, launches = roofline.launch(MIXED, NARROW, H200)
    assert (len(ctas), launches) == (396, 2)
    assert all(cta.chunks for cta in ctas)
    fair = sum(cta.chunks for cta in ctas) / len(ctas)
    assert max(cta.chunks for cta in ctas) <= fair + 2
    grid = roofline.static_grid(MIXED.places(8), 128)
    assert sum(cta.chunks == 0 for cta in grid) == 63 * 8 * 127


@pytest.mark.parametrize("chip", roofline.CHIPS, ids=lambda chip: chip.name)
def test_a_mixed_batch_comes_near_the_roofline(chip: object) -> None:
    kernel = NARROW if chip is not A100 else replace(NARROW, ctas=2)
    share = roofline.predict(MIXED, kernel, chip, *roofline.launch(MIXED, kernel, chip)).of_bandwidth
    grid = roofline.static_grid(MIXED.places(8), MIXED.max_chunks)
    assert 0.945 < share < 1
    assert roofline.predict(MIXED, kernel, chip, grid, 2).of_bandwidth < share - 0.03


def test_the_widest_table_row_does_not_change_the_prediction() -> None:
    """A static grid pays for it; the work list does not, as long as it may have the workspace."""
    wide_table = replace(MIXED, capacity=1 << 18)
    assert predict(wide_table).seconds == predict(MIXED).seconds
    assert roofline.plan(wide_table)[1] and not roofline.plan(replace(MIXED, capacity=1 << 20))[1]


def test_bytes_and_operations_of_a_shape() -> None:
    decode = roofline.Attention("", (100, 50), num_kv_heads=2, group=4, head_dim=64)
    assert decode.kv_nbytes == 150 * 2 * 2 * 64 * 2
    assert decode.memory_nbytes == decode.kv_nbytes + 2 * 2 * 8 * 64 * 2
    assert decode.flops == 4 * 150 * 64 * 8
    prefill = roofline.Attention("", (5,), (3,), num_kv_heads=1, group=1, head_dim=64)
    assert prefill.flops == 4 * (3 + 4 + 5) * 64
    assert prefill.places(8) == [5]
    assert replace(prefill, group=8).places(8) == [3, 4, 5]


def test_a_window_leaves_keys_out() -> None:
    decode = roofline.Attention("", (100, 5), num_kv_heads=1, group=1, head_dim=64, window=10)
    assert decode.kv_nbytes == (10 + 5) * 2 * 64 * 2 and decode.flops == 4 * 15 * 64
    assert decode.places(8) == [100 - 80, 5], "from the tile of the first key on"
    prefill = roofline.Attention("", (5,), (4,), num_kv_heads=1, group=1, head_dim=64, window=2)
    assert prefill.kv_nbytes == 5 * 2 * 64 * 2 and prefill.flops == 4 * 8 * 64


def test_what_bounds_a_kernel() -> None:
    full = roofline.Attention("", (8192,) * 128)
    assert predict(full).bound == "memory" and predict(full).of_bandwidth > 0.98
    slow = replace(NARROW, loop=5000)
    ctas, launches = roofline.launch(full, slow, H200)
    assert roofline.predict(full, slow, H200, ctas, launches).bound == "issue"
    shallow = replace(NARROW, ctas=1, ring_nbytes=8192)
    assert roofline.predict(full, shallow, H200, ctas, launches).bound == "in flight"
    assert predict(roofline.Attention("", (16,))).bound == "latency"
    prefill = roofline.Attention("", (4096,), (4096,))
    assert predict(prefill).of_roofline == predict(prefill).of_matrix_peak > predict(prefill).of_bandwidth


def test_columns_that_share_a_pass() -> None:
    """The same numbers as in launch_driver.cpp."""

    def columns(tokens: int, length: int = 8192, **options: int) -> int:
        return roofline.plan(roofline.Attention("", (length,), (tokens,), **options))[0]

    assert columns(4096) == columns(4096, head_dim=64) == 64
    assert columns(4096, head_dim=136) == 16 and columns(4096, itemsize=4) == 8
    assert (columns(495), columns(496), columns(1023, 512), columns(1024, 512)) == (16, 64, 16, 64)
    assert roofline.plan(roofline.Attention("", (8192,), (1023,)))[1]
    assert not roofline.plan(roofline.Attention("", (8192,), (1024,)))[1]


def test_columns_that_are_split_take_prefill_off_l2() -> None:
    prefill = next(shape for shape in roofline.SHAPES if shape.name == "prefill 1 x 4096")
    now = predict(prefill)
    before = roofline.predict(prefill, WIDE, H200, roofline.one_cta_per_place(prefill.places(16)[::-1]), 1)
    assert (before.bound, now.bound) == ("L2", "issue")
    assert 1.3 < before.seconds / now.seconds < 2
    free = replace(SPLIT, loop=1)
    shared = roofline.predict(prefill, free, H200, *roofline.launch(prefill, free, H200))
    assert shared.bound == "shared memory" and 0.45 < shared.of_matrix_peak < 0.55
    alone = replace(free, warps=1, ring_nbytes=1 << 20)
    matrix = roofline.predict(prefill, alone, H200, *roofline.launch(prefill, alone, H200))
    assert matrix.bound == "matrix" and 0.8 < matrix.of_matrix_peak <= 1


def test_no_time_beats_the_roofline() -> None:
    for shape in roofline.SHAPES:
        for chip in roofline.CHIPS:
            assert 0 < predict(shape, chip).of_bandwidth <= 1, shape.name
    assert roofline.moved(1 << 30, H200, 64 * 1024) > (1 << 30) / H200.bytes_per_second


def test_tables() -> None:
    kernels = {("sm_90", 128, 8, False): NARROW, ("sm_90", 128, 16, False): WIDE}
    rows = roofline.attention_rows(kernels)
    assert not any("window" in row[0] for row in rows), "their kernel is another"
    more = roofline.attention_rows(
        kernels | {("sm_90", 128, 8, True): NARROW, ("sm_90", 128, 64, True): SPLIT}
    )
    assert sum("window" in row[0] for row in more) == 4
    assert {row[1] for row in rows[1:]} == {"H100", "H200"}
    assert all(len(row) == len(rows[0]) for row in rows)
    moves = roofline.move_rows({("sm_90", "block_copy_kernel<uint4>"): 65536})
    assert len(moves) == 3
    assert "H200" in roofline.table(rows) and "us" in roofline.table(moves).splitlines()[0]
