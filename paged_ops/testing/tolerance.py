"""How far a result may be from the oracle's, derived from unit roundoffs, and what to say when it is farther.

With `u` the unit roundoff of the tensors' dtype and `e` that of float32, in which everything is accumulated:

    |out - oracle| <= u |out| + (u' + 2 r) sum_j p_j |v_j|        u' = u for 16-bit dtypes, else 0
    |lse - oracle| <= r + e |lse|

`u |out|` is the final rounding. `u'` allows the probabilities to be rounded to the tensors' dtype on their
way into a matrix unit. `r` is the relative error of one exponential in float32: that of its argument, a dot
product with the logits' error growing with |q| |k|, and that of the summation over n keys, which grows as
sqrt(n):

    r = e (8 + 4 L + sqrt(n)),    L = scale |q| max_j |k_j|

A soft cap, ALiBi and sinks have roundings of their own, of numbers as large as the cap, as slope times n and
as the sink, which add to L.

The bounds are elementwise and contain no term that is there to make a test pass; `headroom` tells how much of
them a result uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_ops import reference, reference_numbers
from paged_ops.testing import arrays
from paged_ops.testing.cases import Inputs

F64 = NDArray[np.float64]

FLOAT32_ROUNDOFF = 2.0**-24


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number, relative error of one rounding to nearest."""
    return {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]


def smallest_step(dtype: str) -> float:
    """What may be lost of any number: the distance between subnormals, below which roundoff is not relative.

    Of float32 it is all of them, for exponentials below 2^-126 are 0.
    """
    return {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype]


@dataclass(frozen=True)
class Expected:
    """The oracle's result and how far an implementation may be from it."""

    out: F64  # [num_tokens, num_heads, head_dim]
    lse: F64  # [num_tokens, num_heads]
    out_bound: F64  # as out
    lse_bound: F64  # as lse

    def complaint(self, out: Any, lse: Any = None) -> str:
        """What is wrong with a result, in one paragraph; empty when all of it is within the bounds."""
        found = _complaint("out", arrays.to_numpy(out), self.out, self.out_bound)
        if lse is not None:
            found = found or _complaint("lse", arrays.to_numpy(lse), self.lse, self.lse_bound)
        return found

    def check(self, out: Any, lse: Any = None) -> None:
        """AssertionError, with the complaint, unless the result is within the bounds."""
        complaint = self.complaint(out, lse)
        assert not complaint, complaint

    def headroom(self, out: Any, lse: Any = None) -> float:
        """The largest error as a fraction of its bound, over the elements that have one."""
        pairs = [(out, self.out, self.out_bound)] + ([] if lse is None else [(lse, self.lse, self.lse_bound)])
        worst = 0.0
        for actual, wanted, bound in pairs:
            finite = np.isfinite(wanted)
            error = np.abs(arrays.to_numpy(actual).astype(np.float64) - np.where(finite, wanted, 0))
            worst = max(worst, float((error / bound)[finite].max(initial=0.0)))
        return worst


def expected_attention(inputs: Inputs) -> Expected:
    """What attention over these (numpy) inputs has to give."""
    case = inputs.case
    out, lse, weight = _attention_and_weight(inputs)
    relative = _exponential_error(inputs)[..., None]
    u = unit_roundoff(case.dtype)
    rounded_probability = u if case.dtype != "float32" else 0.0
    out_bound = u * np.abs(out) + (rounded_probability + 2 * relative) * weight + smallest_step(case.dtype)
    lse_bound = relative[..., 0] + FLOAT32_ROUNDOFF * np.where(np.isfinite(lse), np.abs(lse), 0.0)
    return Expected(out, lse, out_bound, lse_bound)


def expected_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, dtype: str) -> Expected:
    """What merging these (numpy) states has to give."""
    out, lse = reference.merge_attention_states(out_a, lse_a, out_b, lse_b)
    weight, _ = reference.merge_attention_states(np.abs(out_a), lse_a, np.abs(out_b), lse_b)
    finite = [np.where(np.isfinite(x), np.abs(x), 0.0) for x in (lse_a, lse_b, lse)]
    relative = FLOAT32_ROUNDOFF * (8 + 4 * np.maximum.reduce(finite))
    out_bound = unit_roundoff(dtype) * np.abs(out) + 2 * relative[..., None] * weight + smallest_step(dtype)
    return Expected(out, lse, out_bound, relative)


def expected_shared_prefix(inputs: Inputs, num_shared: int) -> Expected:
    """What attention in two parts has to give, over so many first blocks that the tables have in common.

    To the bounds of attention in one part come the rounding of each part's output, `u sum_j p_j |v_j|`, the
    errors `r` of the parts' LSEs, which are their weights, and those of the merge.
    """
    case, whole = inputs.case, expected_attention(inputs)
    _, _, weight = _attention_and_weight(inputs)
    shared_len = num_shared * case.block_size
    tails = inputs.block_tables[:, num_shared:], (inputs.seq_lens - shared_len).astype(np.int32)
    tail = replace(inputs, block_tables=tails[0], seq_lens=tails[1])
    _, tail_lse = tail.attention(reference)
    sizes = [np.where(np.isfinite(x), np.abs(x), 0.0) for x in (whole.lse, tail_lse)]
    # The shared part's LSE lies below the whole's, by as much as would make it count for nothing or less.
    merging = FLOAT32_ROUNDOFF * (8 + 4 * np.maximum.reduce(sizes))
    relative = _exponential_error(inputs) + merging
    return replace(
        whole,
        out_bound=whole.out_bound + (unit_roundoff(case.dtype) + 2 * relative[..., None]) * weight,
        lse_bound=whole.lse_bound + relative,
    )


def rope_bound(rows: Any, positions: Any, cos_sin_cache: Any, dtype: str, *, interleaved: bool) -> F64:
    """How far rotated rows may be from `reference.rope`: the two roundings of a sum in float32, then one.

    `u |out| + 3 e (|x cos| + |y sin|)`, and 0 where nothing is rotated.
    """
    turned = reference.rope(rows, positions, cos_sin_cache, interleaved=interleaved)
    size = np.abs(np.asarray(rows).astype(np.float64))
    # |x| |cos| + |y| |sin| is the sum of the second elements for a table with |cos| and |sin|, and of the
    # first ones for one with |cos| and -|sin|.
    tables = [np.abs(cos_sin_cache) for _ in range(2)]
    half = tables[0].shape[1] // 2
    tables[1][:, half:] *= -1
    sums = [reference.rope(size, positions, table, interleaved=interleaved) for table in tables]
    bound = unit_roundoff(dtype) * np.abs(turned) + 3 * FLOAT32_ROUNDOFF * np.maximum(*sums)
    bound += smallest_step(dtype)
    bound[..., 2 * half :] = 0
    return bound


def _attention_and_weight(inputs: Inputs) -> tuple[F64, F64, F64]:
    """The oracle's out and lse, and sum_j p_j |v_j|: |v| beside v, so that one pass over the keys does."""
    values = reference_numbers.dequantise(reference.plain(inputs.value_cache), inputs.v_scale)
    beside = np.concatenate([values, np.abs(values)], axis=3)
    both, lse = replace(inputs, value_cache=beside, v_scale=None).attention(reference)
    out, weight = np.split(both, 2, axis=2)
    return out, lse, weight


def _exponential_error(inputs: Inputs) -> F64:
    """`r` of the module's docstring for each row: [num_tokens, num_q_heads]."""
    case = inputs.case
    query_norm = np.linalg.norm(inputs.query.astype(np.float64), axis=2)
    error = np.full(query_norm.shape, 8 * FLOAT32_ROUNDOFF)
    bounds = inputs.cu_seqlens_q
    if bounds is None:
        bounds = np.arange(len(inputs.seq_lens) + 1)
    key_cache = reference_numbers.dequantise(reference.plain(inputs.key_cache), inputs.k_scale)
    for seq, seq_len in enumerate(inputs.seq_lens):
        keys = reference.sequence_tokens(key_cache, inputs.block_tables[seq], seq_len)
        key_norm = np.repeat(np.linalg.norm(keys, axis=2).max(axis=0, initial=0.0), case.group)
        rows = slice(bounds[seq], bounds[seq + 1])
        size = abs(case.applied_scale) * query_norm[rows] * key_norm
        size += case.soft_cap or 0.0
        if inputs.alibi_slopes is not None:
            size += np.abs(inputs.alibi_slopes) * seq_len
        if inputs.sinks is not None:
            size += np.where(np.isfinite(inputs.sinks), np.abs(inputs.sinks), 0.0)
        error[rows] += FLOAT32_ROUNDOFF * (4 * size + np.sqrt(seq_len))
    return error


def _complaint(name: str, actual: NDArray[Any], wanted: F64, bound: F64) -> str:
    if actual.shape != wanted.shape:
        return f"{name}: shape is {actual.shape}, wanted {wanted.shape}"
    actual = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(actual - wanted) <= bound) | (actual == wanted))  # NaN is wrong, -inf equals -inf
    if not wrong.any():
        return ""
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isfinite(actual - wanted), np.abs(actual - wanted) / bound, np.inf)
    worst = np.unravel_index(np.argmax(np.where(wrong, excess, -1.0)), wrong.shape)
    rows = np.unique(np.argwhere(wrong)[:, 0])
    nan = int(np.isnan(actual).sum())
    return (
        f"{name}: {int(wrong.sum())} of {wrong.size} elements are wrong ({nan} NaN), rows {_ranges(rows)}; "
        f"the worst at {tuple(map(int, worst))} is {actual[worst]:.7g}, wanted {wanted[worst]:.7g} "
        f"+- {bound[worst]:.2g}"
    )


def _ranges(numbers: NDArray[Any], *, most: int = 6) -> str:
    """Sorted numbers as ranges: 1-3, 7, ..."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts[:most] + ["..."] * (len(texts) > most))
