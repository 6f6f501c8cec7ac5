"""What a caller asks for (Request) and each sample of it that the scheduler drives (Sequence)."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field

from reference_engine.block_table import BlockTable
from reference_engine.prefix_index import Entry
from reference_engine.sampling_params import SamplingParams


class State(enum.Enum):
    WAITING = "waiting"  # holds no blocks; new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"
    ERROR = "error"  # see Sequence.error


class RequestRefused(ValueError):
    """The request can never be served as it stands; nothing was queued."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Lower (priority, arrival, id) is served first.

    Requests share cached prefixes only with requests of the same `cache_salt`.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    arrival: float = 0.0
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""

    def is_stop_token(self, token: int) -> bool:
        if token in self.params.stop_token_ids:
            return True
        return token in self.eos_token_ids and not self.params.ignore_eos


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, how many of them have their KV in the pool, and where.

    A single rule drives it: tokens known but not computed are work. A new prompt has many, a decode step
    has one, a preempted sequence has all of them again.
    """

    request: Request
    sample_index: int
    tokens: list[int]
    table: BlockTable
    num_computed: int = 0
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    error: str = ""
    most_computed: int = 0  # the largest num_computed ever: below it, tokens are computed again
    num_preemptions: int = 0
    # Where this sequence's published prefix ends in the prefix index, and how many blocks long it is.
    published: Entry | None = field(default=None, repr=False)
    num_published: int = 0

    @functools.cached_property
    def rank(self) -> tuple[int, float, int, int]:
        """Strict total order of service; a sequence only ever takes blocks from those that rank above it."""
        request = self.request
        return (request.priority, request.arrival, request.id, self.sample_index)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def samples(self) -> tuple[int, ...]:
        """Sample indices drawn when its last token is computed: all of them at the end of the prompt."""
        return (self.sample_index,) if self.num_output else tuple(range(self.request.params.n))

    def fork(self, sample_index: int) -> Sequence:
        """A further sample that goes on from here in the same blocks; the caller retains them."""
        return Sequence(
            self.request,
            sample_index,
            list(self.tokens),
            self.table.fork(),
            self.num_computed,
            self.state,
            most_computed=self.most_computed,
            published=self.published,
            num_published=self.num_published,
        )
