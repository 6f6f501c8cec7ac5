"""All pairs of features: each has tests of its own, here they meet."""

from __future__ import annotations

import pytest

from paged_ops.testing.backends import HostOps
from paged_ops.testing.cases import Case, build, select_sequences
from paged_ops.testing.checks import expected, require_same_state
from paged_ops.testing.grids import feature_cases


@pytest.mark.grid(cases=feature_cases)
def test_pairs_of_features(ops: HostOps, case: Case) -> None:
    """Near the oracle, and a sequence alone has the bits that it has among others."""
    inputs = build(case)
    out, lse = inputs.attention(ops)
    expected(case).check(out, lse)
    rows = inputs.rows_of(0)
    require_same_state(select_sequences(inputs, [0]).attention(ops), (out[rows], lse[rows]))
