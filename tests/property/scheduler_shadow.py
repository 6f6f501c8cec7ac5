"""A shadow of the KV pool: slots remember the exact token prefix behind them, reads must see it.

`Simulation` drives a Scheduler the way the engine does, carries its plans out on the shadow instead of on
tensors, and checks the invariants of the block manager at every step. Anything wrong raises Violation.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable

from reference_engine.accounting import usage
from reference_engine.pool_map import pool_map
from reference_engine.prefix_index import Entry, sha256
from reference_engine.request import FinishReason, Request, RequestRefused, Sequence, State
from reference_engine.sampling_params import SamplingParams
from reference_engine.scheduler import Scheduler, SchedulerConfig
from reference_engine.step_plan import Span, StepArrays, StepPlan

VOCAB = 3  # small, so that prompts and outputs share prefixes by accident too
GARBAGE = -1

Outcome = tuple[list[int], FinishReason]


class Violation(AssertionError):
    """An invariant does not hold."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def draw(digest: int, seed: int, sample_index: int, position: int) -> int:
    """The stand-in for model and sampler: a token that depends on the whole prefix and the draw's keys."""
    return zlib.crc32(b"%d %d %d %d" % (digest, seed, sample_index, position)) % VOCAB


def rank(sequence: Sequence) -> tuple[int, float, int, int]:
    request = sequence.request
    return request.priority, request.arrival, request.id, sequence.sample_index


class Prefixes:
    """Numbers token prefixes, so that equal numbers mean equal prefixes (not merely equal hashes)."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}
        self._roots: dict[str, int] = {}
        self.digests: list[int] = []

    def root(self, salt: str) -> int:
        # One root per salt: a block that crosses over to another salt shows as a wrong prefix.
        if salt not in self._roots:
            self._roots[salt] = len(self.digests)
            self.digests.append(0)
        return self._roots[salt]

    def extend(self, prefix: int, token: int) -> int:
        if (prefix, token) not in self._ids:
            self._ids[prefix, token] = len(self.digests)
            self.digests.append(zlib.crc32(b"%d %d" % (self.digests[prefix], token)))
        return self._ids[prefix, token]

    def chain(self, salt: str, tokens: list[int]) -> list[int]:
        """The number of tokens[: i + 1] for each i."""
        out, prefix = [], self.root(salt)
        for token in tokens:
            prefix = self.extend(prefix, token)
            out.append(prefix)
        return out


class Simulation:
    def __init__(self, config: SchedulerConfig, hash_bytes: Callable[[bytes], bytes] = sha256) -> None:
        self.config = config
        self.scheduler = Scheduler(config, hash_bytes)
        self.prefixes = Prefixes()
        self.memory: dict[int, int] = {}  # slot -> prefix number
        self.outcomes: dict[tuple[int, int], Outcome] = {}  # (request, sample) -> its end
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.steps = 0
        self._entry_chains: dict[Entry, list[int]] = {}
        self._watch_failed_admissions()

    # ---- what a user does

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival: float = 0.0,
        salt: str = "",
        eos: int | None = None,
    ) -> int | None:
        """The request's id, or None if it was refused; checks that the refusal was due and left no trace."""
        number = len(self.requests)
        stops = frozenset() if eos is None else frozenset({eos})
        request = Request(number, tuple(prompt), params, priority, arrival, stops, salt)
        too_long = (
            not 0 < len(prompt) < self.config.max_model_len
            or self._blocks_for(len(prompt)) > self.config.num_blocks
        )
        before = self.fingerprint()
        try:
            self.scheduler.submit(request)
        except RequestRefused:
            expect(too_long, f"request {number} was refused though it fits")
            expect(self.fingerprint() == before, "a refused request left a trace")
            self.requests[number] = request
            self.aborted.add(number)
            return None
        expect(not too_long, f"request {number} can never fit, and was not refused")
        self.requests[number] = request
        self.check()
        return number

    def abort(self, number: int) -> None:
        if self.scheduler.abort(number):
            self.aborted.add(number)
        expect(not self.scheduler.sequences_of(number), "an aborted request is still there")
        self.check()

    def step(self, *, abort_in_flight: int | None = None, fail: random.Random | None = None) -> None:
        """One step; in its midst a request may be aborted, or the step may fail and leave random garbage."""
        self.steps += 1
        scheduler = self.scheduler
        live_before = sorted(scheduler.running + scheduler.waiting, key=rank)
        waiting_before = list(scheduler.waiting)
        plan = scheduler.plan()
        self.check()
        self._check_plan(plan, live_before, waiting_before)
        if fail is not None:
            self._fail(plan, fail)
            if abort_in_flight is not None:
                self.abort(abort_in_flight)
            scheduler.cancel(plan)
            self.check()
            return
        sampled = self._carry_out(plan)
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
        known = {id(s): len(s.tokens) for s in scheduler.running}
        for update in scheduler.commit(plan, sampled):
            sequence = update.sequence
            key = (sequence.request.id, sequence.sample_index)
            expect(key[0] not in self.aborted, f"{key} gained a token after its abort")
            expect(key not in self.outcomes, f"{key} goes on after its end")
            expect(update.finish_reason is sequence.finish_reason, f"{key}: told {update.finish_reason}")
            if update.token is not None:
                expect(sequence.tokens[-1] == update.token, f"{key}: the update's token is not its last")
                expect(
                    len(sequence.tokens) == known.get(id(sequence), len(sequence.request.prompt)) + 1,
                    f"{key}: lost a token",
                )
            if update.finish_reason is not None:
                self.outcomes[key] = (sequence.output, update.finish_reason)
        self._check_forks(plan)
        self._check_accounting()
        self.check()

    def drain(self) -> None:
        """Run until nothing is left, then check that all is free and every output is what it should be."""
        live = self.scheduler.running + self.scheduler.waiting
        longest = self.config.max_model_len
        samples = sum(s.request.params.n for s in live)
        # Every step serves the first in rank, which is never preempted: it ends within the steps that its
        # own tokens take. Then the next one is first.
        bound = self.steps + (samples + 1) * (longest + 2) * (1 + longest // self.config.max_step_tokens) + 10
        while self.scheduler.has_work:
            expect(self.steps < bound, "no progress")
            self.step()
        pool = self.scheduler.pool
        expect(pool.num_free == pool.num_blocks, f"{pool.num_used} blocks leaked")
        for number, request in self.requests.items():
            if number in self.aborted:
                continue
            for sample in range(request.params.n):
                outcome = self.outcomes.get((number, sample))
                if outcome is None:
                    expect(not self._forks(request), f"request {number}, sample {sample} was lost")
                else:
                    expect(
                        outcome == self.alone(request, sample),
                        f"request {number}, sample {sample} gave {outcome}",
                    )

    # ---- what is right

    def alone(self, request: Request, sample: int) -> Outcome:
        """The output of this sample, computed without any scheduler."""
        tokens, prompt = list(request.prompt), len(request.prompt)
        while True:
            if self._blocks_for(len(tokens)) > self.config.num_blocks:
                return tokens[prompt:], FinishReason.ERROR
            digest = self.prefixes.digests[self.prefixes.chain(request.cache_salt, tokens)[-1]]
            tokens.append(draw(digest, request.params.seed or 0, sample, len(tokens)))
            if tokens[-1] in request.eos_token_ids:
                return tokens[prompt:], FinishReason.STOP
            if len(tokens) - prompt == request.params.max_tokens or len(tokens) == self.config.max_model_len:
                return tokens[prompt:], FinishReason.LENGTH

    def _forks(self, request: Request) -> bool:
        return self._blocks_for(len(request.prompt)) <= self.config.num_blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    # ---- the shadow of a step

    def _carry_out(self, plan: StepPlan) -> list[list[int]]:
        size, memory = self.config.block_size, self.memory
        arrays = StepArrays.of(plan)
        content = {
            (destination, offset): memory.get(source * size + offset, GARBAGE)
            for source, destination in arrays.copies.tolist()
            for offset in range(size)
        }
        for (block, offset), prefix in content.items():
            memory[block * size + offset] = prefix
        for slot, prefix in zip(arrays.slots.tolist(), self._written(plan), strict=True):
            memory[slot] = prefix
        sampled = []
        for span, table, length in zip(
            plan.spans, arrays.block_tables.tolist(), arrays.seq_lens.tolist(), strict=True
        ):
            request = span.sequence.request
            wanted = self.prefixes.chain(request.cache_salt, span.sequence.tokens[:length])
            for position, prefix in enumerate(wanted):
                seen = memory.get(table[position // size] * size + position % size, GARBAGE)
                expect(
                    seen == prefix,
                    f"request {request.id} reads a wrong key at position {position} of {length}",
                )
            digest = self.prefixes.digests[wanted[-1]]
            seed = request.params.seed or 0
            sampled.append([draw(digest, seed, sample, length) for sample in span.samples])
        return sampled

    def _fail(self, plan: StepPlan, rng: random.Random) -> None:
        """A step that broke down somewhere: each place that it would have written may hold anything."""
        size = self.config.block_size
        places = plan.slots.tolist() + [d * size + i for _, d in plan.copies for i in range(size)]
        for slot in places:
            if rng.random() < 0.7:
                self.memory[slot] = GARBAGE

    def _written(self, plan: StepPlan) -> list[int]:
        """The prefix number of each token that the plan computes."""
        out = []
        for span in plan.spans:
            chain = self.prefixes.chain(span.sequence.request.cache_salt, span.sequence.tokens[: span.stop])
            out += chain[span.start :]
        return out

    # ---- invariants

    def _check_plan(
        self, plan: StepPlan, live_before: list[Sequence], waiting_before: list[Sequence]
    ) -> None:
        config, pool, size = self.config, self.scheduler.pool, self.config.block_size
        scheduled = [span.sequence for span in plan.spans]
        expect(len({id(s) for s in scheduled}) == len(scheduled), "a sequence was scheduled twice")
        expect(len(scheduled) <= config.max_step_seqs, "more sequences than a step may have")
        expect(
            plan.num_tokens == sum(len(s.tokens) for s in plan.spans) <= config.max_step_tokens,
            "over the budget",
        )
        expect(
            not {id(s) for s in scheduled} & {id(s) for s in plan.preempted},
            "scheduled and preempted at once",
        )
        for victim in plan.preempted:
            expect(victim.state is State.WAITING, "a victim still runs")
            for sequence in scheduled:
                expect(rank(sequence) < rank(victim), "a victim ranks above one that is served")
        alive = [s for s in live_before if s.state is not State.FINISHED]
        if alive:
            expect(alive[0] in scheduled, "the first in rank is not served")
        passed_over = [s for s in alive if s not in scheduled]
        for sequence in scheduled:
            if sequence in waiting_before:
                above = all(rank(sequence) < rank(s) for s in passed_over)
                expect(above, "one was admitted past a higher rank")
        for sequence in live_before:
            if sequence.state is State.FINISHED:
                expect(
                    sequence.finish_reason is FinishReason.ERROR, "plan ended a sequence that had no error"
                )
                expect(
                    self._blocks_for(len(sequence.tokens)) > config.num_blocks,
                    "plan ended a sequence that fits",
                )
        for span in plan.spans:
            self._check_span(span)
        slots = plan.slots.tolist()
        expect(len(set(slots)) == len(slots), "a slot is written twice")
        for block in {slot // size for slot in slots}:
            expect(pool.refcount(block) == 1, f"block {block} is written while it is shared")
            expect(
                not self.scheduler.index.holds(block),
                f"block {block} is written though its prefix is published",
            )
        sources = {source for source, _ in plan.copies}
        destinations = [destination for _, destination in plan.copies]
        expect(len(set(destinations)) == len(destinations), "a block is the destination of two copies")
        expect(not sources & set(destinations), "a block is both source and destination of a copy")

    def _check_span(self, span: Span) -> None:
        sequence = span.sequence
        expect(sequence.state is State.RUNNING, "a sequence was scheduled that does not run")
        expect(len(span.tokens) > 0, "an empty span")
        expect(
            span.start == sequence.num_computed,
            "a span does not start at the first token that is not computed",
        )
        expect(
            list(span.tokens) == sequence.tokens[span.start : span.stop],
            "a span has other tokens than its sequence",
        )
        expect(span.stop <= sequence.table.capacity, "a write beyond the table")
        expect(
            span.block_ids.tolist() == sequence.table.ids[: len(span.block_ids)].tolist(),
            "a span has another table",
        )
        expect(
            bool(span.samples) == (span.stop == len(sequence.tokens)),
            "a draw in mid-prompt, or none at its end",
        )

    def _check_accounting(self) -> None:
        size, running = self.config.block_size, self.scheduler.running
        slots = [slot for s in running for slot in s.table.slots(0, s.num_computed).tolist()]
        blocks = [block for s in running for block in s.table.ids.tolist()]
        now = usage(self.scheduler)
        expect(
            now.filled_slots == len(set(slots)),
            f"accounting: {now.filled_slots} slots, not {len(set(slots))}",
        )
        expect(now.token_states == len(slots), "accounting has other token states")
        expect(now.used_slots == len(set(blocks)) * size, "accounting has other blocks in use")
        cells = pool_map(self.scheduler)
        expect(
            round(sum(c.filled * size for c in cells if c.holders)) == len(set(slots)),
            "the map fills differently",
        )
        expect(sum(len(c.holders) for c in cells) == len(blocks), "the map has other holders")
        expect(
            sum(c.cached for c in cells) == self.scheduler.pool.num_cached, "the map has other cached blocks"
        )
        expect(now.saved_blocks == len(blocks) - len(set(blocks)), "accounting has other blocks shared")

    def _check_forks(self, plan: StepPlan) -> None:
        for span in plan.spans:
            if len(span.samples) > 1:
                tables = [s.table.ids.tolist() for s in self.scheduler.sequences_of(span.sequence.request.id)]
                expect(all(table == tables[0] for table in tables), "tables differ right after a fork")

    def check(self) -> None:
        """What holds between any two calls."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        blocks = range(pool.num_blocks)
        for queue, state in ((scheduler.running, State.RUNNING), (scheduler.waiting, State.WAITING)):
            expect(all(s.state is state for s in queue), f"a sequence in the wrong queue: {state}")
            ranks = [rank(s) for s in queue]
            expect(
                all(a < b for a, b in itertools.pairwise(ranks)),
                f"{state} is out of order, or has a sequence twice",
            )
        queued = {id(s) for s in scheduler.running + scheduler.waiting}
        live = {id(s) for number in self.requests for s in scheduler.sequences_of(number)}
        expect(queued == live, "a live sequence is in no queue, or a dead one is in one")
        expect(
            all(len(s.table) == 0 and s.num_computed == 0 for s in scheduler.waiting),
            "a waiting sequence holds blocks",
        )
        for s in scheduler.running:
            expect(0 <= s.num_computed < len(s.tokens), "a running sequence has nothing to compute")
            expect(s.num_computed <= s.table.capacity, "computed tokens beyond the table")

        held = Counter(block for s in scheduler.running for block in s.table.ids.tolist())
        for block in blocks:
            expect(
                pool.refcount(block) == held[block],
                f"block {block}: {pool.refcount(block)} references, {held[block]} tables",
            )
        free = pool.free_blocks()
        expect(len(set(free)) == len(free) == pool.num_free, "the free list has duplicates")
        expect(set(free).isdisjoint(held), "a block is free and in use")
        expect(set(free) | set(held) == set(blocks), "a block is neither free nor in use")

        size = self.config.block_size
        seen: set[int] = set()
        for entry in scheduler.index.entries():
            expect(
                entry.block not in seen and scheduler.index.holds(entry.block), "the index is not one to one"
            )
            seen.add(entry.block)
            chain = self._entry_chain(entry)[-size:]
            content = [self.memory.get(entry.block * size + offset, GARBAGE) for offset in range(size)]
            expect(content == chain, f"block {entry.block} does not hold the prefix that the index says")
        expect(
            all(scheduler.index.holds(block) == (block in seen) for block in blocks),
            "the index is not one to one",
        )

    def _entry_chain(self, entry: Entry) -> list[int]:
        if entry not in self._entry_chains:
            tokens: list[int] = []
            at = entry
            while at.parent is not None:
                tokens[:0] = at.tokens
                at = at.parent
            salt = next(
                r.cache_salt for r in self.requests.values() if self.scheduler.index.root(r.cache_salt) is at
            )
            self._entry_chains[entry] = self.prefixes.chain(salt, tokens)
        return self._entry_chains[entry]

    def fingerprint(self) -> object:
        """All state that decides what happens next."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return (
            [pool.refcount(block) for block in range(pool.num_blocks)],
            pool.free_blocks(),
            [(entry.key, entry.block) for entry in scheduler.index.entries()],
            [(rank(s), s.num_computed, tuple(s.tokens), s.table.ids.tolist()) for s in scheduler.running],
            [(rank(s), tuple(s.tokens)) for s in scheduler.waiting],
        )

    def _watch_failed_admissions(self) -> None:
        admit = self.scheduler._admit

        def watched(sequence: Sequence, ahead: list[Span]) -> list[Sequence] | None:
            before = self.fingerprint()
            victims = admit(sequence, ahead)
            expect(
                victims is not None or self.fingerprint() == before, "an admission that failed left a trace"
            )
            return victims

        self.scheduler._admit = watched  # type: ignore[method-assign]


def weak_hash(bits: int) -> Callable[[bytes], bytes]:
    """A hash that collides all the time."""

    def hash_bytes(data: bytes) -> bytes:
        return bytes([sha256(data)[0] % (1 << bits)])

    return hash_bytes


def random_config(rng: random.Random) -> SchedulerConfig:
    block_size = rng.choice((1, 2, 3, 7, 16))
    num_blocks = rng.randint(1, max(3, 48 // block_size))
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=rng.randint(4, num_blocks * block_size + 6),
        max_step_tokens=rng.choice((1, 2, 3, 5, 8, 13, 64)),
        max_step_seqs=rng.choice((1, 2, 3, 4, 8)),
        prefix_caching=rng.random() < 0.9,
    )


def random_prompt(rng: random.Random, simulation: Simulation) -> list[int]:
    """Random tokens, often after a piece of what an earlier request had or gave."""
    prompt: list[int] = []
    if simulation.requests and rng.random() < 0.6:
        number = max(0, len(simulation.requests) - rng.randint(1, 4))
        prompt = list(simulation.requests[number].prompt)
        prompt += simulation.outcomes.get((number, 0), ([], None))[0]
        prompt = prompt[: rng.randint(0, len(prompt))]
    most = simulation.config.max_model_len
    return prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(0 if prompt else 1, max(1, most // 2)))]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 12), n=rng.choice((1, 1, 1, 2, 3, 4)), seed=rng.randint(0, 3)
    )


def run_scenario(seed: int) -> Simulation:
    """One random life of a scheduler, decided by `seed` alone."""
    rng = random.Random(seed)
    hash_bytes = rng.choice((sha256, sha256, weak_hash(0), weak_hash(2)))
    simulation = Simulation(random_config(rng), hash_bytes)
    for _ in range(rng.randint(5, 30)):
        action = rng.random()
        known = len(simulation.requests)
        if action < 0.35 or not known:
            simulation.submit(
                random_prompt(rng, simulation),
                random_params(rng),
                priority=rng.randrange(3),
                arrival=float(rng.randrange(3)),
                salt=rng.choice(("", "", "", "other")),
                eos=rng.choice((None, 0)),
            )
        elif action < 0.40 and simulation.scheduler.running:
            # In a hurry, and with what the last in rank has: the prefix is hit in the blocks of the victim.
            last = simulation.scheduler.running[-1]
            tokens = last.tokens[: last.num_computed + 1]
            simulation.submit(
                tokens,
                random_params(rng),
                priority=last.request.priority - 1,
                salt=last.request.cache_salt,
            )
        elif action < 0.45:
            simulation.abort(rng.randrange(known))
        elif action < 0.49:
            simulation.step(abort_in_flight=rng.randrange(known))
        elif action < 0.53:
            simulation.step(fail=rng, abort_in_flight=rng.choice((None, rng.randrange(known))))
        else:
            simulation.step()
    simulation.drain()
    return simulation
