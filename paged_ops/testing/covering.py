"""Few combinations of many options, such that every pair of options meets in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def covering(axes: dict[str, Sequence[Any]], *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Combinations that hold every pair of values of every two axes: a greedy covering array of strength 2.

    axes: name -> its values. A fault that takes two particular values to show is seen, in about as many cases
    as the product of the two longest axes instead of the product of all.
    """
    rng = np.random.default_rng(seed)
    names = list(axes)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    while missing:
        a, i, b, j = min(missing)
        row = {a: i, b: j}
        for axis in rng.permutation([n for n in range(len(names)) if n not in row]).tolist():
            choices = rng.permutation(len(axes[names[axis]])).tolist()
            row[axis] = max(choices, key=lambda choice: _gain(row, axis, choice, missing))
        missing -= set(_pairs(row))
        yield {name: axes[name][row[index]] for index, name in enumerate(names)}


def _pairs(row: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
    for a, b in itertools.combinations(sorted(row), 2):
        yield a, row[a], b, row[b]


def _gain(row: dict[int, int], axis: int, choice: int, missing: set[tuple[int, int, int, int]]) -> int:
    return sum(
        ((axis, choice, other, value) if axis < other else (other, value, axis, choice)) in missing
        for other, value in row.items()
    )
