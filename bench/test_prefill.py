"""Prefill of whole prompts over a paged cache."""

from collections.abc import Callable

import pytest

from bench.case import Case


@pytest.mark.suites("prefill")
def test_prefill(case: Case, run: Callable[[Case], None]) -> None:
    run(case)
