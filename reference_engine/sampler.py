"""Draws each row's next token: greedy, or from a truncated distribution with random numbers keyed by place.

The distribution that a row is drawn from, in float64:

1. p = softmax(logits / temperature).
2. Order tokens by (logit descending, id ascending). This order decides every tie.
3. top_k: the first k tokens.
4. top_p: of those, renormalised, the shortest beginning whose mass reaches top_p; at least one token.
   (Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv:1904.09751.)
5. min_p: of those, the tokens with p of at least min_p times the largest p.
6. The rest, renormalised, laid end to end by id; the token is the one that the number u in [0, 1) falls on.

u comes from a counter-based generator (Philox; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
SC'11) keyed by (seed, sample index) and counted by position. So a token depends on its own row and key alone,
never on the other rows of a batch, on how often something was sampled before, or on preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference_engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]


class SampleKey(NamedTuple):
    """What a token's random number hangs on: the request's seed, which of its samples, and the position."""

    seed: int
    sample_index: int
    position: int


class UnusableLogits(ValueError):
    """A row from which no token can be drawn."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def sample(
    logits: Any, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int, int]]
) -> tuple[list[int], list[float]]:
    """Choose one token per row.

    Args:
        logits: float32 [n, vocab], a torch tensor or an array. -inf excludes a token.
        params: n, one per row.
        keys: n of `SampleKey` or plain tuples like it.

    Returns:
        token ids, n; natural-log probabilities of those tokens under softmax(logits), n: NaN for rows whose
        params do not ask for logprobs.

    Raises:
        ValueError: wrong counts; a row that holds NaN or +inf, or nothing but -inf.
    """
    rows = _rows(logits)
    if not len(params) == len(keys) == len(rows):
        raise ValueError(
            f"params and keys must have one entry per row of logits, {len(rows)}; "
            f"got {len(params)} and {len(keys)}"
        )
    best = rows.argmax(axis=1) if len(rows) else ()  # the first of equals; of NaN too, so one look finds both
    tokens, logprobs = [], []
    for index, (row, param, key, top) in enumerate(zip(rows, params, keys, best, strict=True)):
        if not math.isfinite(row[top]):
            raise UnusableLogits(
                index, f"logits row {index} must have a finite maximum, got {row[top]} at token {top}"
            )
        token = int(top) if param.greedy else _draw(row, param, uniform(*key))
        tokens.append(token)
        logprobs.append(_logprob(row, token) if param.logprobs else math.nan)
    return tokens, logprobs


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The number in [0, 1) of a key, with 53 random bits: the same on every machine."""
    generator = np.random.Philox(key=np.array([seed, sample_index], dtype=np.uint64), counter=position)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def distribution(logits_row: npt.ArrayLike, params: SamplingParams) -> Floats:
    """The probabilities [vocab] that `sample` draws a row from; greedy is one token's certainty."""
    row = np.asarray(logits_row)
    probabilities = np.zeros(len(row), dtype=np.float64)
    if params.greedy:
        probabilities[row.argmax()] = 1.0
    else:
        ids, weights = _candidates(row, params)
        probabilities[ids] = weights / weights.sum()
    return probabilities


def _rows(logits: Any) -> npt.NDArray[np.float32]:
    if hasattr(logits, "cpu"):
        logits = logits.detach().cpu()
    rows = np.asarray(logits)
    if rows.ndim != 2 or rows.dtype != np.float32 or rows.shape[1] == 0:
        raise ValueError(f"logits must be float32 [n, vocab], got {rows.dtype} {list(rows.shape)}")
    return rows


def _draw(row: npt.NDArray[np.float32], params: SamplingParams, u: float) -> int:
    ids, weights = _candidates(row, params)
    ends = np.cumsum(weights)
    # Side "right" passes over tokens of weight 0. As u is at most 1 - 2**-53 and the total at least 1, their
    # product rounds to less than the total, so that there is always a token.
    return int(ids[np.searchsorted(ends, u * ends[-1], side="right")])


def _candidates(row: npt.NDArray[np.float32], params: SamplingParams) -> tuple[npt.NDArray[np.int64], Floats]:
    """Ids ascending, and the weights of the tokens that are left: probabilities up to a common factor."""
    ids = _largest(row, params.top_k) if 0 < params.top_k < len(row) else np.arange(len(row))
    scores = row[ids].astype(np.float64)
    scores -= scores.max()
    with np.errstate(over="ignore"):  # a tiny temperature takes the others to -inf, which is right
        weights = np.exp(scores / params.temperature)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p * weights.max())
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _largest(row: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the k largest; among equals the lower indices."""
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    above = np.flatnonzero(row > threshold)
    level = np.flatnonzero(row == threshold)[: k - len(above)]
    return np.sort(np.concatenate([above, level]))


def _nucleus(weights: Floats, top_p: float) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the shortest beginning of the order whose mass reaches top_p of the whole."""
    total = weights.sum()
    # Sorting a whole vocabulary is what costs. The tokens below this bound have less mass together than what
    # lies beyond top_p, so the beginning ends before them; half of the bound keeps clear of rounding.
    likely = np.flatnonzero(weights >= 0.5 * (1 - top_p) * total / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p * total, side="left")) + 1
    return np.sort(order[:count])


def _logprob(row: npt.NDArray[np.float32], token: int) -> float:
    scores = row.astype(np.float64)
    scores -= scores.max()
    return float(scores[token] - np.log(np.exp(scores).sum()))
