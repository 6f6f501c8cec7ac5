"""Writing new tokens into the cache."""

from collections.abc import Callable

import pytest

from bench.case import Case


@pytest.mark.suites("write")
def test_cache_write(case: Case, run: Callable[[Case], None]) -> None:
    run(case)
