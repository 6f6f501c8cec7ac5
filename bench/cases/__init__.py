"""The table of all cases, by suite; `bench.compare` and the pytest-benchmark suites both run these."""

from __future__ import annotations

from bench.case import Case
from bench.cases import blocks, decode, overhead, prefill, write

SUITES: dict[str, tuple[Case, ...]] = {
    "decode": decode.CASES,
    "prefill": prefill.CASES,
    "write": write.CASES,
    "copy": blocks.COPY_CASES,
    "swap": blocks.SWAP_CASES,
    "overhead": overhead.CASES,
}
