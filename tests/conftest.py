"""Options and fixtures of every test: which implementations to run, and the extended grids."""

from __future__ import annotations

import os

import pytest

# Before numpy comes in: threads for the small matrices of the oracle would spin beside those under test.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from paged_ops.testing.backends import HostOps, Target, available_targets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the extended grids")
    parser.addoption(
        "--backend",
        action="append",
        choices=["cpu", "emulated", "cuda"],
        help="test this backend only, and fail if it is missing (may be given several times)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "grid(cases): `case` becomes each of cases(target)")
    wanted = config.getoption("--backend") or []
    missing = set(wanted) - {target.backend for target in available_targets()}
    if missing:
        raise pytest.UsageError(f"--backend {', '.join(sorted(missing))}: not available on this machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="extended grid: run with --slow"))


def selected_targets(config: pytest.Config) -> list[Target]:
    """The implementations that this run tests."""
    wanted = config.getoption("--backend")
    return [target for target in available_targets() if not wanted or target.backend in wanted]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`target` becomes each implementation; with `@pytest.mark.grid(cases=f)`, `case` each of f(target)."""
    if "target" not in metafunc.fixturenames:
        return
    targets = selected_targets(metafunc.config)
    grid = metafunc.definition.get_closest_marker("grid")
    if grid is None:
        metafunc.parametrize("target", targets, ids=str)
        return
    cases_for = grid.kwargs["cases"]
    if metafunc.definition.get_closest_marker("slow") and not metafunc.config.getoption("--slow"):
        cases_for, targets = (lambda target: ["skipped"]), targets[:1]
    pairs = [(target, case) for target in targets for case in cases_for(target)]
    metafunc.parametrize(("target", "case"), pairs, ids=[f"{target}: {case}" for target, case in pairs])


@pytest.fixture
def ops(target: Target) -> HostOps:
    """The public ops on numpy arrays, run by the target."""
    return HostOps(target)
