"""What the scheduler decides in small situations that can be followed by hand."""

from __future__ import annotations

import pytest

from reference_engine.request import FinishReason, Request, RequestRefused
from reference_engine.sampling_params import SamplingParams
from reference_engine.scheduler import Scheduler, SchedulerConfig, Update
from reference_engine.step_plan import StepArrays, StepPlan


def scheduler_of(num_blocks: int = 100, block_size: int = 4, **config: int | bool) -> Scheduler:
    return Scheduler(SchedulerConfig(num_blocks, block_size, config.pop("max_model_len", 1000), **config))  # type: ignore[arg-type]


def submit(
    scheduler: Scheduler, number: int, length: int, *, priority: int = 0, first: int = 0, **params: int
) -> None:
    """A prompt of `length` tokens that no other prompt shares, after `first` tokens that all share."""
    prompt = tuple(range(first)) + tuple(1000 * (number + 1) + i for i in range(length - first))
    scheduler.submit(Request(number, prompt, SamplingParams(**params), priority))  # type: ignore[arg-type]


def step(scheduler: Scheduler, token: int = 7) -> tuple[StepPlan, list[Update]]:
    plan = scheduler.plan()
    return plan, scheduler.commit(plan, [[token + i for i in span.samples] for span in plan.spans])


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(span.sequence.request.id, span.start, span.stop) for span in plan.spans]


def test_prefill_is_cut_to_the_budget_and_decodes_go_first() -> None:
    scheduler = scheduler_of(max_step_tokens=8)
    submit(scheduler, 0, 5)
    submit(scheduler, 1, 10)
    submit(scheduler, 2, 3)
    assert shape(step(scheduler)[0]) == [(0, 0, 5), (1, 0, 3)]
    assert shape(step(scheduler)[0]) == [(0, 5, 6), (1, 3, 10)]
    assert shape(step(scheduler)[0]) == [(0, 6, 7), (1, 10, 11), (2, 0, 3)]


def test_arrays_of_a_mixed_step() -> None:
    scheduler = scheduler_of(max_step_tokens=8)
    submit(scheduler, 0, 5)
    submit(scheduler, 1, 10)
    step(scheduler)
    arrays = StepArrays.of(scheduler.plan())
    assert arrays.token_ids.tolist() == [7, *range(2003, 2010)]
    assert arrays.positions.tolist() == [5, *range(3, 10)]
    assert arrays.cu_seqlens_q.tolist() == [0, 1, 8] and arrays.seq_lens.tolist() == [6, 10]
    assert arrays.block_tables.tolist() == [[0, 1, 0], [2, 3, 4]]
    assert arrays.slots.tolist() == [5, *range(11, 18)]
    assert arrays.sample_rows.tolist() == [0, 7] and arrays.copies.shape == (0, 2)


def test_what_can_never_fit_is_refused_with_numbers_and_the_queue_goes_on() -> None:
    scheduler = scheduler_of(num_blocks=3, block_size=4, max_model_len=20)
    with pytest.raises(RequestRefused, match="prompt has 20 tokens; the model's context of 20"):
        submit(scheduler, 0, 20)
    with pytest.raises(RequestRefused, match="13 tokens need 4 blocks of 4; the pool has 3"):
        submit(scheduler, 1, 13)
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        submit(scheduler, 2, 0)
    submit(scheduler, 3, 12)
    with pytest.raises(RequestRefused, match="id is in use"):
        submit(scheduler, 3, 1)
    assert shape(step(scheduler)[0]) == [(3, 0, 12)]


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_an_error() -> None:
    scheduler = scheduler_of(num_blocks=2, block_size=2)
    submit(scheduler, 0, 3, max_tokens=10)
    updates = [update for _ in range(3) for update in step(scheduler)[1]]
    assert [u.finish_reason for u in updates] == [None, None, FinishReason.ERROR]
    ended = updates[-1].sequence
    assert ended.error == "5 tokens need 3 blocks of 2; the pool has 2"
    assert ended.num_preemptions == 0 and not scheduler.has_work and scheduler.pool.num_free == 2


def test_the_last_in_rank_waits_is_preempted_and_recomputed() -> None:
    scheduler = scheduler_of(num_blocks=5, block_size=2, prefix_caching=False)
    submit(scheduler, 0, 3, max_tokens=6)
    submit(scheduler, 1, 3, max_tokens=6)
    assert shape(step(scheduler)[0]) == [(0, 0, 3), (1, 0, 3)]
    assert shape(step(scheduler)[0]) == [(0, 3, 4), (1, 3, 4)]
    assert shape(step(scheduler)[0]) == [(0, 4, 5)]  # took the last free block; the other keeps its own
    assert shape(step(scheduler)[0]) == [(0, 5, 6)]
    plan, _ = step(scheduler)
    assert shape(plan) == [(0, 6, 7)] and [s.request.id for s in plan.preempted] == [1]
    assert shape(step(scheduler)[0]) == [(0, 7, 8)]  # the last of its six
    assert shape(step(scheduler)[0]) == [(1, 0, 5)]
    assert scheduler.counters.recomputed_tokens == 4 == scheduler.counters.computed_tokens - (8 + 5)


def test_a_newcomer_leaves_a_free_block_for_each_sequence_ahead() -> None:
    scheduler = scheduler_of(num_blocks=4, block_size=2)
    submit(scheduler, 0, 3)
    submit(scheduler, 1, 3)
    assert shape(step(scheduler)[0]) == [(0, 0, 3)]


def test_a_higher_priority_takes_the_blocks_of_a_lower_one() -> None:
    scheduler = scheduler_of(num_blocks=4, block_size=2)
    submit(scheduler, 0, 6, priority=1)
    step(scheduler)
    submit(scheduler, 1, 6, priority=0)
    plan, _ = step(scheduler)
    assert shape(plan) == [(1, 0, 6)] and [s.request.id for s in plan.preempted] == [0]


def test_samples_share_the_prompt_and_copy_only_the_last_block() -> None:
    scheduler = scheduler_of(block_size=4)
    submit(scheduler, 0, 10, n=3)
    step(scheduler)
    assert scheduler.pool.num_used == 3
    assert [s.output for s in scheduler.sequences_of(0)] == [[7], [8], [9]]
    plan, _ = step(scheduler)
    assert plan.copies == ((2, 3), (2, 4))  # the third sample, by then alone, writes in place
    assert scheduler.pool.num_used == 5
    scheduler.abort(0)
    assert scheduler.pool.num_free == 100 and not scheduler.has_work


def test_a_common_prefix_is_computed_once_even_for_prompts_that_arrive_together() -> None:
    scheduler = scheduler_of(block_size=4)
    for number in range(3):
        submit(scheduler, number, 12, first=9)
    assert shape(step(scheduler)[0]) == [(0, 0, 12)]
    assert shape(step(scheduler)[0]) == [(0, 12, 13), (1, 8, 12), (2, 8, 12)]
    assert scheduler.counters.hit_tokens == 16 and scheduler.counters.lookup_tokens == 36


def test_prefixes_are_not_shared_across_salts() -> None:
    scheduler = scheduler_of(block_size=4)
    scheduler.submit(Request(0, tuple(range(9)), cache_salt="a"))
    scheduler.submit(Request(1, tuple(range(9)), cache_salt="b"))
    assert shape(step(scheduler)[0]) == [(0, 0, 9), (1, 0, 9)]


def test_only_one_plan_is_in_flight() -> None:
    scheduler = scheduler_of()
    submit(scheduler, 0, 4)
    plan = scheduler.plan()
    with pytest.raises(RuntimeError, match="neither committed nor cancelled"):
        scheduler.plan()
    scheduler.cancel(plan)
    with pytest.raises(RuntimeError, match="not the one in flight"):
        scheduler.commit(plan, [[1]])
    assert shape(step(scheduler)[0]) == [(0, 0, 4)]
