"""Engine: prompts in, streams of text out; the facade over scheduler, runner and tokenizer."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import paged_ops
from reference_engine.accounting import Accounting, usage
from reference_engine.models.loader import LoadedModel
from reference_engine.request import FinishReason, Request, RequestRefused
from reference_engine.runner import Runner, SequenceFailed
from reference_engine.sampling_params import SamplingParams
from reference_engine.scheduler import Scheduler, SchedulerConfig, Update
from reference_engine.stop_strings import StopStrings

DEFAULT_POOL_NBYTES = 512 << 20


@dataclass
class Completion:
    """One sample of a request, growing until `finish_reason` is set. Times are of time.monotonic()."""

    request_id: int
    sample_index: int
    num_prompt_tokens: int
    arrived_at: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # if asked for in SamplingParams
    finish_reason: FinishReason | None = None
    error: str = ""
    first_token_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True)
class Piece:
    """What a step added to a sample: text that is certain now (possibly none), and perhaps its end."""

    completion: Completion
    text: str

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None


class _Sample:
    """A completion and what turns its tokens into text."""

    def __init__(self, completion: Completion, params: SamplingParams, tokenizer: Any) -> None:
        self.completion = completion
        self.stops = StopStrings(params.stop)
        self.stream = tokenizer.stream() if tokenizer is not None else None

    def push(self, token: int) -> str:
        return self.stops.push(self.stream.push(token)) if self.stream is not None else ""

    def flush(self) -> str:
        if self.stops.found or self.stream is None:
            return ""
        return self.stops.push(self.stream.finish()) + self.stops.finish()


class Engine:
    """Serves many requests at once from one model and one pool of KV blocks.

    Args:
        model: what `load_model` gives.
        num_blocks: blocks of the pool; default: as many as DEFAULT_POOL_NBYTES hold.
        block_size: tokens per block.
        max_model_len: longest sequence, prompt and output; default: the model's own limit.
        max_step_tokens, max_step_seqs: limits of one step. Long prompts are computed in chunks.
        prefix_caching: reuse blocks of earlier prompts and answers that begin with the same tokens.
        ops: `paged_ops`, or anything with the same functions.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_step_tokens: int = 512,
        max_step_seqs: int = 256,
        prefix_caching: bool = True,
        ops: Any = paged_ops,
    ) -> None:
        shape, decoder = model.config, model.decoder
        self.model, self.tokenizer = model, model.tokenizer
        heads = shape.num_layers * 2 * shape.num_kv_heads
        self.nbytes_per_token = heads * shape.head_dim * decoder.dtype.itemsize
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}, wanted at least 1")
        if num_blocks is None:
            num_blocks = max(1, DEFAULT_POOL_NBYTES // (self.nbytes_per_token * block_size))
        limit = shape.max_positions if max_model_len is None else max_model_len
        if limit > shape.max_positions:
            raise ValueError(f"max_model_len: got {limit}, the model has {shape.max_positions} positions")
        pool = paged_ops.allocate_kv_pool(
            num_blocks,
            block_size,
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(num_blocks, block_size, limit, max_step_tokens, max_step_seqs, prefix_caching)
        )
        self.runner = Runner(decoder, pool, ops)
        self.accounting = Accounting()
        self._samples: dict[int, list[_Sample]] = {}  # by request; an entry lives until all its samples end
        self._next_id = 0

    # ---- requests

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Queue a prompt, text or token ids; returns the request's id.

        Raises:
            RequestRefused: it can never be served, with the reason. Other requests are not affected.
        """
        params = params or SamplingParams()
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
            raise RequestRefused("the model has no tokenizer: give token ids, and no stop strings")
        if isinstance(prompt, str):
            assert self.tokenizer is not None
            prompt = self.tokenizer.encode(prompt)
        vocab_size = self.model.config.vocab_size
        for token in prompt:
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise RequestRefused(f"prompt: {token!r} is not a token id")
            if not 0 <= token < vocab_size:
                raise RequestRefused(f"prompt: token id {token} is not in 0..{vocab_size - 1}")
        now = time.monotonic()
        eos = frozenset(self.model.eos_token_ids)
        number, self._next_id = self._next_id, self._next_id + 1
        request = Request(number, tuple(map(int, prompt)), params, priority, now, eos, cache_salt)
        self.scheduler.submit(request)
        self._samples[number] = [
            _Sample(Completion(number, index, len(request.prompt), now), params, self.tokenizer)
            for index in range(params.n)
        ]
        return number

    def abort(self, request_id: int) -> list[Completion]:
        """End a request now; returns its unfinished samples as far as they got, [] if there are none."""
        self.scheduler.abort(request_id)
        samples = self._samples.pop(request_id, [])
        unfinished = [s for s in samples if s.completion.finish_reason is None]
        for sample in unfinished:
            self._end(sample, FinishReason.ABORT)
        return [s.completion for s in unfinished]

    def completions_of(self, request_id: int) -> list[Completion]:
        """The samples of a request that has not ended, which go on growing."""
        return [sample.completion for sample in self._samples[request_id]]

    # ---- running

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Piece]:
        """One step for as many sequences as fit.

        Should it raise, no request is lost: those that the step was computing start over with the next one.
        """
        plan = self.scheduler.plan()
        try:
            sampled = self.runner.run(plan)
            self.accounting.observe(usage(self.scheduler))
            tokens = [[token for token, _ in draws] for draws in sampled]
            logprobs = {
                (span.sequence.request.id, index): logprob
                for span, draws in zip(plan.spans, sampled, strict=True)
                for index, (_, logprob) in zip(span.samples, draws, strict=True)
            }
        except SequenceFailed as failure:
            self.scheduler.cancel(plan)
            self.scheduler.fail(failure.sequence, str(failure))
            return []
        except BaseException:
            self.scheduler.cancel(plan)
            raise
        return [self._take(update, logprobs) for update in self.scheduler.commit(plan, tokens)]

    def stream(self) -> Iterator[Piece]:
        """Pieces of all requests as they come, until none is left; more may be added on the way."""
        while self.has_work:
            for piece in self.step():
                if (
                    piece.completion.finish_reason is not FinishReason.ABORT
                ):  # by the reader of an earlier piece
                    yield piece

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[list[Completion]]:
        """Run prompts to their end; for each, its samples. A refused one gives one, with the error."""
        results: list[list[Completion]] = []
        for prompt in prompts:
            try:
                results.append(self.completions_of(self.add(prompt, params)))
            except RequestRefused as refusal:
                error = Completion(
                    -1, 0, 0, time.monotonic(), finish_reason=FinishReason.ERROR, error=str(refusal)
                )
                results.append([error])
        for _ in self.stream():
            pass
        return results

    # ---- tokens to text

    def _take(self, update: Update, logprobs: dict[tuple[int, int], float]) -> Piece:
        """Add one token to its completion and tell the text that it makes certain."""
        sequence = update.sequence
        request = sequence.request
        sample = self._samples[request.id][sequence.sample_index]
        completion, text, reason = sample.completion, "", update.finish_reason
        if update.token is not None:
            if completion.first_token_at is None:
                completion.first_token_at = time.monotonic()
            completion.token_ids.append(update.token)
            if request.params.logprobs:
                completion.logprobs.append(logprobs[request.id, sequence.sample_index])
            if not request.is_stop_token(update.token):  # which is a mark, not text
                text = sample.push(update.token)
            if sample.stops.found:
                if reason is None:
                    self.scheduler.finish(sequence, FinishReason.STOP)
                reason = FinishReason.STOP
        completion.text += text
        if reason is not None:
            completion.error = sequence.error
            text += self._end(sample, reason)
            if all(s.completion.finish_reason is not None for s in self._samples[request.id]):
                del self._samples[request.id]
        return Piece(completion, text)

    def _end(self, sample: _Sample, reason: FinishReason) -> str:
        rest = sample.flush()
        if sample.stops.found and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP  # the last bytes completed a stop string
        sample.completion.text += rest
        sample.completion.finish_reason = reason
        sample.completion.finished_at = time.monotonic()
        return rest
