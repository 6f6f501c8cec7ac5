"""Accounting: how much of the KV pool holds token state, what sharing saves, what reservation would hold.

A system without paging reserves, for each sequence, room for the longest it may get. The figures here compare
the two for the same sequences at the same moments (PagedAttention, SOSP 2023, section 3.1 and figure 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from reference_engine.scheduler import Scheduler


@dataclass(frozen=True)
class Usage:
    """The pool at one moment. A slot has room for the KV of one token."""

    block_size: int
    num_blocks: int
    used_blocks: int  # held by a running sequence
    filled_slots: int  # in used blocks, with the KV of a token; a shared one counts once
    token_states: int  # computed tokens of all running sequences; a shared one counts for each
    saved_blocks: int  # blocks more if nothing were shared
    reserved_by_context: int  # slots, if each running sequence reserved the model's context
    reserved_by_request: int  # slots, if each reserved its prompt and max_tokens

    @property
    def used_slots(self) -> int:
        return self.used_blocks * self.block_size

    @property
    def saved_slots(self) -> int:
        return self.saved_blocks * self.block_size

    @property
    def wasted_slots(self) -> int:
        """In used blocks, but empty: less than a block per sequence, and what was just handed to a prompt."""
        return self.used_slots - self.filled_slots


def usage(scheduler: Scheduler) -> Usage:
    pool, config = scheduler.pool, scheduler.config
    size = config.block_size
    empty: dict[int, int] = {}  # block -> slots that no token fills yet
    references = token_states = by_request = 0
    for sequence in scheduler.running:
        table, computed = sequence.table, sequence.num_computed
        references += len(table)
        token_states += computed
        by_request += min(
            config.max_model_len, len(sequence.request.prompt) + sequence.request.params.max_tokens
        )
        for number in range(computed // size, len(table)):
            slots = min(size, (number + 1) * size - computed)
            empty[table[number]] = min(slots, empty.get(table[number], size))
    return Usage(
        block_size=size,
        num_blocks=pool.num_blocks,
        used_blocks=pool.num_used,
        filled_slots=pool.num_used * size - sum(empty.values()),
        token_states=token_states,
        saved_blocks=references - pool.num_used,
        reserved_by_context=len(scheduler.running) * config.max_model_len,
        reserved_by_request=by_request,
    )


@dataclass
class Accounting:
    """Usage summed over the steps of a run."""

    steps: int = 0
    used_slots: int = 0
    filled_slots: int = 0
    saved_slots: int = 0
    token_states: int = 0
    reserved_by_context: int = 0
    reserved_by_request: int = 0
    peak_used_blocks: int = 0
    peak_saved_blocks: int = 0
    peak_reserved_by_context: int = 0
    peak_reserved_by_request: int = 0

    def observe(self, now: Usage) -> None:
        self.steps += 1
        for name in (
            "used_slots",
            "filled_slots",
            "saved_slots",
            "token_states",
            "reserved_by_context",
            "reserved_by_request",
        ):
            setattr(self, name, getattr(self, name) + getattr(now, name))
        self.peak_used_blocks = max(self.peak_used_blocks, now.used_blocks)
        self.peak_saved_blocks = max(self.peak_saved_blocks, now.saved_blocks)
        self.peak_reserved_by_context = max(self.peak_reserved_by_context, now.reserved_by_context)
        self.peak_reserved_by_request = max(self.peak_reserved_by_request, now.reserved_by_request)

    @property
    def utilisation(self) -> float:
        """Share of the used KV memory that holds token state, over all steps."""
        return self.filled_slots / self.used_slots if self.used_slots else 1.0

    @property
    def sharing(self) -> float:
        """Share of the blocks that sharing saved, of those needed without it, over all steps."""
        needed = self.used_slots + self.saved_slots
        return self.saved_slots / needed if needed else 0.0

    @property
    def utilisation_by_context(self) -> float:
        """The same, had each sequence reserved the model's context."""
        return self.token_states / self.reserved_by_context if self.reserved_by_context else 1.0

    @property
    def utilisation_by_request(self) -> float:
        """The same, had each sequence reserved its prompt and max_tokens."""
        return self.token_states / self.reserved_by_request if self.reserved_by_request else 1.0
