"""Runner: carries a step plan out on tensors. Copies before writes, writes before reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import paged_ops
from paged_ops import KVPool
from reference_engine import sampler
from reference_engine.models.decoder import Attend, Decoder
from reference_engine.request import Sequence
from reference_engine.step_plan import StepArrays, StepPlan

Sampled = list[list[tuple[int, float]]]  # for each span, for each of its samples: token, logprob


class SequenceFailed(RuntimeError):
    """One sequence of a step cannot go on; the others can."""

    def __init__(self, sequence: Sequence, message: str) -> None:
        super().__init__(message)
        self.sequence = sequence


class Runner:
    """A decoder and the pool that holds its keys and values.

    `ops` is `paged_ops`, or anything with the same functions.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, ops: Any = paged_ops) -> None:
        self.decoder, self.pool, self.ops = decoder, pool, ops
        self._caches = [(pool.key(layer), pool.value(layer)) for layer in range(pool.num_layers)]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """Compute the plan's tokens; draws the tokens that come after spans with samples."""
        arrays = StepArrays.of(plan)
        if len(arrays.copies):
            self.ops.copy_blocks(self.pool.tensor, self._tensor(arrays.copies))
        if not plan.spans:
            return []
        hidden = self.decoder(
            self._tensor(arrays.token_ids), self._tensor(arrays.positions), self._attention(arrays)
        )
        return self._sample(plan, hidden, arrays.sample_rows)

    def _attention(self, arrays: StepArrays) -> Attend:
        slots, tables = self._tensor(arrays.slots), self._tensor(arrays.block_tables)
        lens, cu_seqlens_q = self._tensor(arrays.seq_lens), self._tensor(arrays.cu_seqlens_q)
        one_token_each = len(arrays.slots) == len(arrays.seq_lens)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key_cache, value_cache = self._caches[layer]
            self.ops.write_kv_cache(key, value, key_cache, value_cache, slots)
            if one_token_each:
                return self.ops.paged_attention_decode(query, key_cache, value_cache, tables, lens)  # type: ignore[no-any-return]
            return self.ops.paged_attention(query, key_cache, value_cache, tables, lens, cu_seqlens_q)  # type: ignore[no-any-return]

        return attend

    def _sample(self, plan: StepPlan, hidden: Tensor, sample_rows: npt.NDArray[np.int64]) -> Sampled:
        sampling = [span for span in plan.spans if span.samples]
        if not sampling:
            return [[] for _ in plan.spans]
        logits = self.decoder.logits(hidden[self._tensor(sample_rows)])
        draws = [(row, span, sample) for row, span in enumerate(sampling) for sample in span.samples]
        if len(draws) > len(sampling):  # the samples of one prompt draw from the same row
            logits = logits[[row for row, _, _ in draws]]
        params = [span.sequence.request.params for _, span, _ in draws]
        keys = [(p.seed or 0, sample, span.stop) for p, (_, span, sample) in zip(params, draws, strict=True)]
        try:
            tokens, logprobs = sampler.sample(logits, params, keys)
        except sampler.UnusableLogits as error:
            raise SequenceFailed(draws[error.row][1].sequence, "the model's logits are not finite") from error
        drawn = iter(zip(tokens, logprobs, strict=True))
        return [[next(drawn) for _ in span.samples] for span in plan.spans]

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.decoder.device)
