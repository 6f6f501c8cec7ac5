"""Thousands of random lives of a scheduler, each checked against the shadow pool at every step."""

from __future__ import annotations

from collections import Counter

import pytest
from scheduler_shadow import run_scenario

NUM_BATCHES, BATCH = 12, 250


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_random_scenarios(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            run_scenario(seed)
        except Exception as error:
            raise AssertionError(f"scenario {seed}: {error}") from error


def test_scenarios_reach_the_hard_places() -> None:
    """A generator that never preempts, copies or hits the index would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        simulation = run_scenario(seed)
        counters = simulation.scheduler.counters
        seen["preempted"] += counters.preemptions > 0
        seen["copied"] += counters.copied_blocks > 0
        seen["hit"] += counters.hit_tokens > 0
        for _, reason in simulation.outcomes.values():
            seen[reason.value] += 1
    for what in ("preempted", "copied", "hit", "stop", "length", "error"):
        assert seen[what] >= 10, f"{what}: {seen[what]} times in 200 scenarios"
