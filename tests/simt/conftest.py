"""Fixtures that compile the drivers once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import SWITCHES, Drivers
from toolchain import GXX, find_nvcc


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    """drivers(name, backend) -> Driver."""
    if GXX is None:
        pytest.skip("needs g++")
    return Drivers(tmp_path_factory)


def has_gpu() -> bool:
    return find_nvcc() is not None and any(Path("/dev").glob("nvidia[0-9]*"))


@pytest.fixture(params=[*SWITCHES, *(["cuda"] if has_gpu() else [])])
def backend(request: pytest.FixtureRequest) -> str:
    """Every way to run a kernel; `cuda`, where there is a GPU, holds the twins to what they imitate."""
    return str(request.param)
