"""Every broken rule is reported, names who broke it and where, and leaves the emulator usable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from driver import SWITCHES, Driver, Drivers

pytestmark = pytest.mark.xdist_group("simt")

FORWARD, REVERSE, RANDOM = range(3)
AT_WAIT, AT_ONCE, LAND_RANDOM = range(3)
POISON = 0xFFFFFFFF

WHERE = r" at faults\.cpp:\d+: "
WHO = r" \[block \(\d+, 0, 0\) thread \(\d+, \d+, 0\)\]$"
# What each planted fault is called. The order of fibers may decide which of two threads is blamed.
FAULTS = {
    "divergent_barrier": f"__syncthreads{WHERE}divergent barrier: other threads wait in __.*{WHO}",
    "barrier_of_another_kind": f"__syncthreads(_count)?{WHERE}divergent barrier: .*{WHO}",
    "mismatched_collective": f"(__shfl_xor_sync|__ballot_sync){WHERE}divergent warp: .* wait in __.*{WHO}",
    "divergent_shuffle": f"__shfl_xor_sync{WHERE}divergent warp: .*{WHO}",
    "overlapping_masks": f"__syncwarp{WHERE}(lane 1?\\d returns while|mask .* returned).*{WHO}",
    "crossed_masks": r"deadlock in block .*: 32 of 32 threads wait for .*__syncwarp .*; .*__syncwarp",
    "lane_outside_its_mask": f"__shfl_xor_sync{WHERE}lane \\d+ is not in its own mask 0xffff{WHO}",
    "lane_exited_before": f"__shfl_xor_sync{WHERE}(mask .* never were: 0x8|lane 3 returns).*{WHO}",
    "lane_absent": f"__syncwarp{WHERE}mask 0xffffffff names lanes that have .* never were: 0xffffff00{WHO}",
    "lane_exits_while_others_wait": f"__syncwarp{WHERE}(lane 31 returns while|mask .* returned).*{WHO}",
    "reads_lane_outside_mask": f"__shfl_sync{WHERE}reads lane 20, which is not in the mask{WHO}",
    "odd_width": f"__shfl_sync{WHERE}width 12 is not a power of two up to 32{WHO}",
    "misaligned_copy_destination": f"cp_async16{WHERE}destination is not 16-byte aligned{WHO}",
    "misaligned_copy_source": f"cp_async16{WHERE}source is not 16-byte aligned{WHO}",
    "misaligned_ldmatrix": f"ldmatrix_x4{WHERE}row address is not 16-byte aligned{WHO}",
    "misaligned_load": f"load16{WHERE}address is not 16-byte aligned{WHO}",
    "misaligned_atomic": f"atomicAdd{WHERE}misaligned address{WHO}",
    "exit_with_copy_in_flight": f"cp_async16{WHERE}a thread returns with this copy still in flight{WHO}",
    "exit_with_copy_uncommitted": f"cp_async16{WHERE}a thread returns with this copy still in flight{WHO}",
    "deadlock": r"deadlock in block \(0, 0, 0\): \d+ of 64 threads wait for each other: from thread .*"
    r"(__syncwarp|__syncthreads) at faults\.cpp:\d+",
    "too_much_static_shared": f"SIMT_SHARED{WHERE}49153 bytes of static shared memory, at most 49152{WHO}",
    "too_much_shared_in_all": f"SIMT_SHARED{WHERE}49152 \\+ 204800 bytes of .* at most 232448{WHO}",
    "too_much_dynamic_shared": "launch: 232449 bytes of dynamic shared memory; at most 232448",
    "too_many_threads": "launch: a block of 512 x 3 x 1 threads; at most 1024 threads",
    "too_deep_a_block": "launch: a block of 1 x 1 x 65 threads; .* 64 in z",
    "empty_grid": "launch: a grid of 0 x 1 x 1 blocks; .* at least one",
    "too_high_a_grid": "launch: a grid of 1 x 65536 x 1 blocks; at most 2147483647 x 65535 x 65535",
    "second_block_fails": f"__shfl_xor_sync{WHERE}lane \\d+ is not in its own mask 0xffff"
    r" \[block \(1, 0, 0\) thread \(\d+, 0, 0\)\]$",
}


@pytest.fixture(params=SWITCHES)
def faults(drivers: Drivers, request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = drivers("faults", request.param)
    configure(driver)
    yield driver
    configure(driver)


def configure(
    driver: Driver,
    order: int = FORWARD,
    landing: int = AT_WAIT,
    seed: int = 1,
    workers: int = 1,
    poison: int = 1,
) -> None:
    driver.configure(order, landing, seed, workers, poison)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(faults: Driver, name: str) -> None:
    for order, landing, workers in product((FORWARD, REVERSE, RANDOM), (AT_WAIT, AT_ONCE), (1, 2)):
        configure(faults, order, landing, workers=workers)
        message = faults.plant(name)
        assert message is not None, "nothing was reported"
        assert re.match(f"simt: {FAULTS[name]}", message), message
        assert faults.plant("nothing_wrong") is None, "the emulator is not usable any more"


def test_fault_is_a_device_error(faults: Driver) -> None:
    assert faults.library.fault_is_a_device_error() == 1


def turns(driver: Driver, num_blocks: int = 3, num_threads: int = 40) -> np.ndarray:
    """When each thread had its turn: [round, block, thread]."""
    out = np.zeros((2, num_blocks, num_threads), np.int32)
    assert driver.turns(out, num_blocks, num_threads) is None
    assert sorted(out.ravel()) == list(range(out.size))
    return out


def test_fiber_orders(faults: Driver) -> None:
    forward = turns(faults)
    assert np.array_equal(forward[0], np.arange(40) + 80 * np.arange(3)[:, None])
    assert (forward[1] > forward[0]).all()
    configure(faults, REVERSE)
    reverse = turns(faults)
    assert np.array_equal(reverse[0], np.arange(40)[::-1] + 80 * np.arange(3)[::-1, None])
    configure(faults, RANDOM, seed=5)
    first, again = turns(faults), turns(faults)
    assert np.array_equal(first, again), "the same seed gives the same order"
    configure(faults, RANDOM, seed=6)
    assert not np.array_equal(first, turns(faults))
    assert len({tuple(np.argsort(first[0, block])) for block in range(3)}) == 3, (
        "each block has its own order"
    )


def test_order_of_blocks_is_shuffled_too(faults: Driver) -> None:
    configure(faults, RANDOM, seed=3)
    starts = turns(faults, num_blocks=16, num_threads=1)[0, :, 0]
    assert list(np.argsort(starts)) not in (list(range(16)), list(range(16))[::-1])


def test_race_shows_in_some_order(faults: Driver) -> None:
    seen = set()
    for order in (FORWARD, REVERSE, RANDOM):
        configure(faults, order)
        out = np.zeros(64, np.int32)
        assert faults.race(out) is None
        seen.add(tuple(out))
    assert len(seen) > 1
    right = tuple((np.arange(64) + 1) % 64)
    assert seen != {right}


@pytest.mark.parametrize("poison", [1, 0])
def test_landing_and_poison(faults: Driver, poison: int) -> None:
    source = np.array([1, 1, 1, 1, 2, 2, 2, 2], np.uint32)

    def first_sight() -> list[int]:
        out = np.zeros(6, np.uint32)
        assert faults.first_sight(source, out) is None
        return [int(x) for x in out]

    configure(faults, landing=AT_ONCE, poison=poison)
    at_once = first_sight()
    assert at_once[2:] == [1, 1, 2, 2], "read before the wait, and there"
    configure(faults, landing=AT_WAIT, poison=poison)
    at_wait = first_sight()
    if poison:
        assert at_once[:2] == at_wait[:2] == [POISON, POISON], "shared memory starts as NaN"
        assert at_wait[2:] == [POISON, 1, POISON, 2], "a missing wait reads poison, whatever was there before"
    else:
        assert (at_wait[2], at_wait[3], at_wait[5]) == (5, 1, 2)

    mixed = set()
    for seed in range(20):
        configure(faults, landing=LAND_RANDOM, seed=seed, poison=poison)
        got = first_sight()
        assert got == first_sight(), "the same seed gives the same landing"
        assert (got[3], got[5]) == (1, 2)
        mixed.add((got[2] == 1, got[4] == 2))
    assert mixed == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("part", ["memory", "devices", "streams", "graphs"])
def test_runtime(drivers: Drivers, part: str) -> None:
    assert drivers("runtime").check_runtime(part) == ""
