"""The scheduler under hypothesis: it looks for a shortest sequence of calls that breaks an invariant."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_shadow import VOCAB, Simulation, weak_hash

from reference_engine.prefix_index import sha256
from reference_engine.sampling_params import SamplingParams
from reference_engine.scheduler import SchedulerConfig


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from((1, 2, 3, 7, 16)),
        num_blocks=st.integers(1, 12),
        max_model_len=st.integers(2, 60),
        max_step_tokens=st.integers(1, 20),
        max_step_seqs=st.integers(1, 5),
        prefix_caching=st.booleans(),
        hash_bytes=st.sampled_from((sha256, weak_hash(0), weak_hash(2))),
    )
    def start(self, hash_bytes, **config):  # type: ignore[no-untyped-def]
        self.simulation = Simulation(SchedulerConfig(**config), hash_bytes)

    @rule(
        tokens=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        after=st.integers(0, 5),
        max_tokens=st.integers(1, 10),
        n=st.integers(1, 4),
        priority=st.integers(0, 2),
        salt=st.sampled_from(("", "other")),
        eos=st.sampled_from((None, 0)),
    )
    def submit(self, tokens, after, max_tokens, n, priority, salt, eos):  # type: ignore[no-untyped-def]
        if after < len(self.simulation.requests):  # goes on from an earlier request
            request = self.simulation.requests[after]
            tokens = [*request.prompt, *self.simulation.outcomes.get((after, 0), ([], None))[0], *tokens]
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=after)
        self.simulation.submit(tokens, params, priority=priority, salt=salt, eos=eos)

    @rule()
    def step(self) -> None:
        self.simulation.step()

    @rule(rng=st.randoms(use_true_random=False))
    def step_fails(self, rng: random.Random) -> None:
        self.simulation.step(fail=rng)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data, in_flight):  # type: ignore[no-untyped-def]
        number = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        if in_flight:
            self.simulation.step(abort_in_flight=number)
        else:
            self.simulation.abort(number)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
