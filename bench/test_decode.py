"""Decode over shapes, tables and batches, per instruction set."""

from collections.abc import Callable

import pytest

from bench.case import Case


@pytest.mark.suites("decode")
def test_decode(case: Case, run: Callable[[Case], None]) -> None:
    run(case)
