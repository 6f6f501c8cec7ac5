"""Copying and swapping whole blocks."""

from collections.abc import Callable

import pytest

from bench.case import Case


@pytest.mark.suites("copy", "swap")
def test_block_moves(case: Case, run: Callable[[Case], None]) -> None:
    run(case)
