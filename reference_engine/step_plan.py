"""Step plan: what one step of the engine computes, as a frozen record and as the arrays that the ops take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference_engine.request import Sequence

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of one sequence to compute in this step."""

    sequence: Sequence
    start: int  # position of the first token
    tokens: tuple[int, ...]
    block_ids: Int32  # [ceil(stop / block_size)]
    samples: tuple[int, ...]  # sample indices to draw after the last token; empty in mid-prompt

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step, to be carried out in the order of the fields, and then committed or cancelled.

    No block is both source and destination of a copy, and no slot is written twice, so that the pairs of
    each list may be carried out in any order.
    """

    swap_out: tuple[tuple[int, int], ...]  # (device block, host block); planned for, empty as yet
    swap_in: tuple[tuple[int, int], ...]  # (host block, device block); planned for, empty as yet
    copies: tuple[tuple[int, int], ...]  # (source block, destination block)
    spans: tuple[Span, ...]
    slots: Int64  # [num_tokens] where each token's key and value go; span after span
    preempted: tuple[Sequence, ...]  # for the record; they hold no blocks any more

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, eq=False)
class StepArrays:
    """A plan as arrays; nothing in it is a Python object per token or sequence."""

    token_ids: Int64  # [num_tokens]
    positions: Int64  # [num_tokens]
    slots: Int64  # [num_tokens]
    block_tables: Int32  # [num_seqs, max_blocks], zeros past a sequence's blocks
    seq_lens: Int32  # [num_seqs] tokens in the cache once this step's are written
    cu_seqlens_q: Int32  # [num_seqs + 1]
    sample_rows: Int64  # [num_sampling_spans] rows of the tokens whose logits are wanted
    copies: Int64  # [num_copies, 2]

    @classmethod
    def of(cls, plan: StepPlan) -> StepArrays:
        spans = plan.spans
        cu_seqlens_q = np.zeros(len(spans) + 1, np.int32)
        np.cumsum([len(span.tokens) for span in spans], out=cu_seqlens_q[1:])
        block_tables = np.zeros((len(spans), max((len(s.block_ids) for s in spans), default=0)), np.int32)
        for row, span in zip(block_tables, spans, strict=True):
            row[: len(span.block_ids)] = span.block_ids
        last_rows = cu_seqlens_q[1:].astype(np.int64) - 1
        return cls(
            token_ids=np.array([token for span in spans for token in span.tokens], np.int64),
            positions=np.array([p for span in spans for p in range(span.start, span.stop)], np.int64),
            slots=plan.slots,
            block_tables=block_tables,
            seq_lens=np.array([span.stop for span in spans], np.int32),
            cu_seqlens_q=cu_seqlens_q,
            sample_rows=last_rows[[bool(span.samples) for span in spans]],
            copies=np.array(plan.copies, np.int64).reshape(-1, 2),
        )
