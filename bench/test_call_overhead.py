"""What a call costs, and ops in turn with torch's own."""

from collections.abc import Callable

import pytest

from bench.case import Case


@pytest.mark.suites("overhead")
def test_call_overhead(case: Case, run: Callable[[Case], None]) -> None:
    run(case)
