"""The drivers use every word of simt.h and every function of ptx.h, and nvcc takes them as g++ does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import DRIVERS
from toolchain import CSRC, find_nvcc, run

pytestmark = pytest.mark.xdist_group("simt")

TWIN_DRIVERS = ["vocabulary", "instructions"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", TWIN_DRIVERS)
def test_compiles_for_a_gpu(tmp_path: Path, name: str, arch: str) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    run([nvcc, "-std=c++17", f"-arch={arch}", "-Werror", "all-warnings", f"-I{CSRC}", "-x", "cu", "-c",
         DRIVERS / f"{name}.cpp", "-o", tmp_path / "driver.o"])  # fmt: skip


def test_drivers_leave_nothing_out() -> None:
    used = "".join((DRIVERS / f"{name}.cpp").read_text() for name in TWIN_DRIVERS)
    vocabulary = (CSRC / "simt" / "emulator" / "vocabulary.h").read_text()
    instructions = (CSRC / "simt" / "ptx.h").read_text()
    twins = instructions[instructions.index("host twins") :]
    words = set(re.findall(r"^(?:inline )?\w+ (__\w+|atomic[A-Z]\w+|rsqrtf)\(", vocabulary, re.MULTILINE))
    functions = set(re.findall(r"^inline [\w ]+?\b(\w+)\(", twins, re.MULTILINE)) - {
        "check_aligned", "check_aligned16", "cp_async", "fragment_row", "fragment_column", "ldmatrix"
    }  # fmt: skip
    assert len(words) >= 30 and len(functions) >= 20
    missing = {word for word in words | functions if not re.search(rf"\b{word}\b", used)}
    assert not missing


def test_every_twin_has_its_instruction() -> None:
    text = (CSRC / "simt" / "ptx.h").read_text()
    cut = text.index("host twins")
    device = set(re.findall(r"__forceinline__ [\w ]+?\b(\w+)(?:<\w+>)?\(", text[:cut]))
    host = set(re.findall(r"^inline [\w ]+?\b(\w+)\(", text[cut:], re.MULTILINE))
    assert device - host == set()


def test_inline_ptx_is_in_one_place() -> None:
    for path in CSRC.rglob("*"):
        if path.suffix in {".h", ".cuh", ".cu"} and path != CSRC / "simt" / "ptx.h":
            assert not re.search(r"\basm\b\s*(volatile)?\s*\(", path.read_text()), path
