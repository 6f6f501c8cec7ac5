"""Scheduler: which tokens of which sequences the next step computes, and which blocks they use.

A step is plan() -> (the runner carries the plan out) -> commit(). Everything follows from two rules.

1. Tokens known but not computed are work (request.py). Prefill, chunked prefill, decode and recomputation
   after a preemption are the same thing with different counts.
2. Sequences rank strictly by (priority, arrival, id, sample). plan() goes through them in rank order under a
   budget of tokens; a sequence that lacks blocks may take them only from sequences that rank below it. The
   first in rank is therefore served in every step, which is why no workload can stall the engine.

A sequence is admitted with blocks for all of its known tokens or not at all, so that a prompt once begun
never waits halfway for memory. A preempted one gives back all its blocks and starts over later
(recomputation); blocks of it that are still in the prefix index by then are found again.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from reference_engine.block_pool import BlockPool
from reference_engine.block_table import BlockTable
from reference_engine.prefix_index import PrefixIndex, sha256
from reference_engine.request import FinishReason, Request, RequestRefused, Sequence, State
from reference_engine.step_plan import Span, StepPlan


@dataclass(frozen=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int
    max_model_len: int  # tokens, prompt and output together
    max_step_tokens: int = 512  # the budget of a step
    max_step_seqs: int = 256
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_step_tokens", "max_step_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")


@dataclass
class Counters:
    """Running totals, for reports."""

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # of these, computed before and lost to a preemption
    preemptions: int = 0
    copied_blocks: int = 0
    lookup_tokens: int = 0  # known tokens of admitted sequences
    hit_tokens: int = 0  # of these, found in the prefix index

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


@dataclass(frozen=True, eq=False)
class Update:
    """What commit() tells about a sequence: a new token, or its end, or both."""

    sequence: Sequence
    token: int | None
    finish_reason: FinishReason | None


class Scheduler:
    def __init__(self, config: SchedulerConfig, hash_bytes: Callable[[bytes], bytes] = sha256) -> None:
        self.config = config
        self.index = PrefixIndex(config.block_size, hash_bytes)
        self.pool = BlockPool(config.num_blocks, self.index)
        self.running: list[Sequence] = []  # in rank order, as is `waiting`
        self.waiting: list[Sequence] = []
        self.counters = Counters()
        self._live: dict[int, list[Sequence]] = {}  # the unfinished sequences of each request
        self._in_flight: StepPlan | None = None
        self._ended_early: list[Sequence] = []  # finished outside a commit, to be told by the next one

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._ended_early)

    def sequences_of(self, request_id: int) -> list[Sequence]:
        return list(self._live.get(request_id, ()))

    def submit(self, request: Request) -> None:
        """Queue `request`, or raise RequestRefused if it could never be served."""
        config = self.config
        num_tokens = len(request.prompt)
        if request.id in self._live:
            raise RequestRefused(f"request {request.id}: this id is in use")
        if num_tokens == 0:
            raise RequestRefused(f"request {request.id}: the prompt is empty")
        if num_tokens + 1 > config.max_model_len:
            raise RequestRefused(
                f"request {request.id}: the prompt has {num_tokens} tokens; the model's context of "
                f"{config.max_model_len} leaves room for {config.max_model_len - 1} at most"
            )
        if self._blocks_for(num_tokens) > config.num_blocks:
            raise RequestRefused(f"request {request.id}: {self._needs(num_tokens)}")
        sequence = Sequence(request, 0, list(request.prompt), BlockTable(config.block_size))
        self._live[request.id] = [sequence]
        bisect.insort(self.waiting, sequence, key=_rank)

    def abort(self, request_id: int) -> bool:
        """End a request and all its samples now; False if it is not (or no longer) here.

        Allowed between plan() and commit() too: blocks are only handed out by plan(), so none that the step
        in flight touches is reused before it has completed.
        """
        untold = [s for s in self._ended_early if s.request.id == request_id]
        for sequence in untold:
            self._ended_early.remove(sequence)
        sequences = self.sequences_of(request_id)
        for sequence in sequences:
            self.finish(sequence, FinishReason.ABORT)
        return bool(sequences or untold)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End one sequence and release its blocks."""
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        self._release(sequence)
        sequence.state, sequence.finish_reason, sequence.error = State.FINISHED, reason, error
        siblings = self._live[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request.id]

    # ---- plan

    def plan(self) -> StepPlan:
        """The next step. It must be committed or cancelled before another can be planned."""
        if self._in_flight is not None:
            raise RuntimeError("the last plan was neither committed nor cancelled")
        budget = self.config.max_step_tokens
        spans: list[Span] = []
        copies: list[tuple[int, int]] = []
        preempted: list[Sequence] = []
        running, waiting = deque(self.running), deque(self.waiting)
        while (running or waiting) and budget > 0 and len(spans) < self.config.max_step_seqs:
            is_new = not running or (bool(waiting) and waiting[0].rank < running[0].rank)
            sequence = (waiting if is_new else running).popleft()
            if sequence in preempted:
                continue
            if self._blocks_for(len(sequence.tokens)) > self.config.num_blocks:
                self.fail(sequence, self._needs(len(sequence.tokens)))
                continue
            victims = self._admit(sequence, spans) if is_new else self._grow(sequence, budget, copies)
            if victims is not None:
                preempted += victims
                spans.append(self._span(sequence, budget))
                budget -= len(spans[-1].tokens)
            # Nobody is admitted past one that ranks above it and waits: a new one, a victim, or a running one
            # that found no room. That one keeps what it has: all it lacks is held by those that rank above.
            if preempted or victims is None:
                waiting.clear()
        slots = [span.sequence.table.slots(span.start, span.stop) for span in spans]
        self._in_flight = StepPlan(
            swap_out=(),
            swap_in=(),
            copies=tuple(copies),
            spans=tuple(spans),
            slots=np.concatenate(slots) if slots else np.empty(0, np.int64),
            preempted=tuple(preempted),
        )
        return self._in_flight

    def _span(self, sequence: Sequence, budget: int) -> Span:
        start = sequence.num_computed
        stop = min(len(sequence.tokens), start + budget)
        samples = sequence.samples if stop == len(sequence.tokens) else ()
        block_ids = sequence.table.ids[: self._blocks_for(stop)]
        return Span(sequence, start, tuple(sequence.tokens[start:stop]), block_ids, samples)

    def _admit(self, sequence: Sequence, ahead: Seq[Span]) -> list[Sequence] | None:
        """Blocks for all tokens of a waiting sequence; whom that preempted, or None if it has to wait.

        It waits for room, which includes one free block for each sequence ahead of it in this step, so that
        what is admitted now does not have to go when they next cross a block border. And it waits while one
        of those is computing the very block that it would compute next: a step later that is a prefix hit.
        """
        tokens = sequence.tokens
        # The last token is computed in any case: its logits are what the next one is drawn from.
        max_hits = (len(tokens) - 1) // self.config.block_size if self.config.prefix_caching else 0
        hits = self.index.match(sequence.request.cache_salt, tokens, max_hits)
        if len(hits) < max_hits and any(self._computes_block(s, len(hits), sequence) for s in ahead):
            return None
        kept = {entry.block for entry in hits}
        missing = self._blocks_for(len(tokens)) - len(hits)
        revived = sum(self.pool.refcount(block) == 0 for block in kept)
        victims = self._victims(sequence, missing + revived + len(ahead), kept)
        if victims is None:
            return None
        self.pool.retain(entry.block for entry in hits)  # before the victims go: the hits must outlive them
        for victim in victims:
            self._preempt(victim)
        sequence.table.append([entry.block for entry in hits])
        sequence.table.append(self.pool.allocate(missing))
        sequence.num_computed = len(hits) * self.config.block_size
        sequence.published = hits[-1] if hits else self.index.root(sequence.request.cache_salt)
        sequence.num_published = len(hits)
        sequence.state = State.RUNNING
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)
        self.counters.lookup_tokens += len(tokens)
        self.counters.hit_tokens += sequence.num_computed
        return victims

    def _computes_block(self, span: Span, number: int, sequence: Sequence) -> bool:
        """Whether `span`'s sequence is yet to compute what `sequence` needs in its block `number`."""
        other, stop = span.sequence, (number + 1) * self.config.block_size
        return (
            span.start < stop <= len(other.tokens)
            and other.request.cache_salt == sequence.request.cache_salt
            and other.tokens[:stop] == sequence.tokens[:stop]
        )

    def _grow(self, sequence: Sequence, budget: int, copies: list[tuple[int, int]]) -> list[Sequence] | None:
        """Room for a running sequence to compute up to `budget` tokens; whom that preempted, or None.

        The block that the first of them goes to may be shared with a fork; it is then replaced by a copy.
        """
        table, pool = sequence.table, self.pool
        needed = min(len(sequence.tokens), sequence.num_computed + budget)
        missing = max(0, self._blocks_for(needed) - len(table))
        written = sequence.num_computed // self.config.block_size
        shared = table[written] if written < len(table) and pool.refcount(table[written]) > 1 else None
        victims = self._victims(sequence, missing, (), shared)
        if victims is None:
            return None
        for victim in victims:
            self._preempt(victim)
        table.append(pool.allocate(missing))
        if shared is not None and pool.refcount(shared) > 1:
            (copy,) = pool.allocate(1)
            table.replace(written, copy)
            pool.release([shared])
            copies.append((shared, copy))
        return victims

    def _victims(
        self, sequence: Sequence, needed: int, kept: Collection[int] = (), shared: int | None = None
    ) -> list[Sequence] | None:
        """Sequences, lowest rank first, that must go for `needed` blocks to be free; None if too few can.

        Changes nothing. Blocks in `kept` do not count as freed. A `shared` block costs one more, for its
        copy, unless all others that hold it go.
        """
        pool = self.pool
        free = pool.num_free
        dropped: Counter[int] = Counter()
        victims: list[Sequence] = []

        def enough() -> bool:
            copies = shared is not None and pool.refcount(shared) - dropped[shared] > 1
            return needed + copies <= free

        for victim in reversed(self.running):
            if enough() or victim.rank <= sequence.rank:
                break
            victims.append(victim)
            for block in victim.table.ids.tolist():
                dropped[block] += 1
                if dropped[block] == pool.refcount(block) and block not in kept:
                    free += 1
        return victims if enough() else None

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        sequence.num_preemptions += 1
        self._release(sequence)
        self.running.remove(sequence)
        sequence.state = State.WAITING
        bisect.insort(self.waiting, sequence, key=_rank)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.table.ids.tolist()))
        sequence.table = BlockTable(self.config.block_size)
        sequence.num_computed = sequence.num_published = 0
        sequence.published = None

    def fail(self, sequence: Sequence, error: str) -> None:
        """End one sequence that cannot go on, and nobody else; the next commit tells."""
        self.finish(sequence, FinishReason.ERROR, error)
        self._ended_early.append(sequence)

    # ---- commit

    def commit(self, plan: StepPlan, sampled: Seq[Seq[int]]) -> list[Update]:
        """The step has completed. `sampled` has, for each span, one token for each of its `samples`."""
        self._end(plan)
        self.counters.steps += 1
        self.counters.computed_tokens += plan.num_tokens
        self.counters.copied_blocks += len(plan.copies)
        updates = [Update(sequence, None, sequence.finish_reason) for sequence in self._ended_early]
        self._ended_early.clear()
        for span, tokens in zip(plan.spans, sampled, strict=True):
            sequence = span.sequence
            if sequence.state is not State.RUNNING:
                continue  # aborted while the step was under way
            self.counters.recomputed_tokens += max(0, min(sequence.most_computed, span.stop) - span.start)
            sequence.num_computed = span.stop
            sequence.most_computed = max(sequence.most_computed, span.stop)
            if self.config.prefix_caching:
                self._publish(sequence)
            if span.samples:
                samples = [sequence, *(self._fork(sequence, index) for index in span.samples[1:])]
                updates += [
                    self._append(sample, token) for sample, token in zip(samples, tokens, strict=True)
                ]
        return updates

    def cancel(self, plan: StepPlan) -> None:
        """The step failed: what it wrote is not to be trusted, and its sequences start over. None is lost."""
        self._end(plan)
        for span in plan.spans:
            if span.sequence.state is State.RUNNING:
                self._preempt(span.sequence)

    def _end(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError("this plan is not the one in flight")
        self._in_flight = None

    def _publish(self, sequence: Sequence) -> None:
        """Tell the prefix index of the blocks that are full and computed by now."""
        size = self.config.block_size
        for number in range(sequence.num_published, sequence.num_computed // size):
            tokens = sequence.tokens[number * size : (number + 1) * size]
            assert sequence.published is not None
            sequence.published = self.index.publish(sequence.published, tokens, sequence.table[number])
            sequence.num_published = number + 1

    def _fork(self, sequence: Sequence, sample_index: int) -> Sequence:
        child = sequence.fork(sample_index)
        self.pool.retain(child.table.ids.tolist())
        bisect.insort(self.running, child, key=_rank)
        self._live[child.request.id].append(child)
        return child

    def _append(self, sequence: Sequence, token: int) -> Update:
        sequence.tokens.append(token)
        request = sequence.request
        reason = None
        if request.is_stop_token(token):
            reason = FinishReason.STOP
        elif (
            sequence.num_output == request.params.max_tokens
            or len(sequence.tokens) == self.config.max_model_len
        ):
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(sequence, reason)
        return Update(sequence, token, reason)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _needs(self, num_tokens: int) -> str:
        blocks, size = self._blocks_for(num_tokens), self.config.block_size
        return f"{num_tokens} tokens need {blocks} blocks of {size}; the pool has {self.config.num_blocks}"


def _rank(sequence: Sequence) -> tuple[int, float, int, int]:
    return sequence.rank
