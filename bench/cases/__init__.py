"""The table of all cases, by suite; `bench.compare` and the pytest-benchmark suites both run these."""

from __future__ import annotations

from bench.case import Case
from bench.cases import decode

SUITES: dict[str, tuple[Case, ...]] = {
    "decode": decode.CASES,
}
