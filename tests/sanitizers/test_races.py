"""ThreadSanitizer over the kernels: it finds nothing in them, and everything that is planted.

Each CUDA thread is a thread to it; only barriers, __syncwarp and fences with atomics order them. So it
finds a missing barrier although the emulator runs the threads of a block in turns.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from pathlib import Path

import pytest
from toolchain import CSRC, GXX, compile_objects, emulator_objects, link

pytestmark = [
    pytest.mark.xdist_group("races"),
    pytest.mark.skipif(GXX is None, reason="needs g++"),
]

HERE = Path(__file__).parent
FLAGS = ["-fsanitize=thread", "-fno-omit-frame-pointer", "-Wno-unused-parameter"]
# Order of fibers, landing of copies, workers: forward, at wait; random, random.
RUNS = [(0, 0, 1), (2, 2, 2)]
# What left_out.cpp stands for: no op of the driver has these types.
LEFT_OUT = re.compile(r"attention_(bf16|f16_f8)")

RACES = [
    "no_syncwarp_before_read",
    "no_syncwarp_before_refill",
    "no_barrier_before_merge",
    "no_fence_before_counter",
    "no_fence_after_counter",
    "blocks_share_a_word",
]
OPS = [
    "decode_f16",
    "decode_f16_many",
    "decode_f16_odd",
    "decode_f16_wide",
    "decode_f16_dims",
    "decode_f16_latent",
    "decode_f32_dims",
    "decode_f32",
    "prefill_f16",
    "prefill_f16_serial",
    "prefill_f16_split",
    "prefill_f16_split_shared",
    "prefill_f16_split_tree",
    "decode_f16_int8",
    "decode_f16_int8_odd",
    "prefill_f16_int8_split",
    "prefill_f32",
    "cache_write",
    "cache_quantise",
    "block_copy",
    "block_swap",
    "gather",
    "graph",
    "merge_states",
    "rope_write",
]
# What a row sees, or how an element is widened, is all that sets these apart from others.
ALIKE = [
    "decode_f16_window",
    "prefill_f16_window",
    "prefill_f16_latent_window",
    "prefill_f16_tree",
    "prefill_f32_tree",
    "decode_f16_int4",
    "decode_f32_int8",
]


class Programs:
    """One object per session, so that each program is built once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019
    def emulator(self) -> list[Path]:
        return emulator_objects(self.folder / "emulator", FLAGS)

    @cache  # noqa: B019
    def planted(self) -> Path:
        objects = compile_objects([HERE / "planted.cpp"], self.folder, FLAGS)
        return link([*objects, *self.emulator()], self.folder / "planted", FLAGS)

    @cache  # noqa: B019
    def ops(self) -> Path:
        """The ops, which leave out the synchronisation whose number $SPARED is."""
        include = self.folder / "csrc"
        shutil.copytree(CSRC, include)
        for file, places in synchronisations().items():
            (include / "kernels" / file).write_text(sparing(file, places))
        spared = self.folder / "spared.cpp"
        spared.write_text(
            '#include <stdlib.h>\nint spared = getenv("SPARED") ? atoi(getenv("SPARED")) : -1;\n'
        )
        launch = [path for path in (include / "launch").glob("*.cu") if not LEFT_OUT.match(path.name)]
        sources = [*sorted(launch), HERE / "left_out.cpp", HERE / "ops_driver.cpp", spared]
        objects = compile_objects(sources, self.folder / "objects", FLAGS, include)
        return link([*objects, *self.emulator()], self.folder / "ops", FLAGS)


# ---- synchronisations that can be left out ---------------------------------------------------------------

SYNCHRONISATION = re.compile(r"\b(__syncwarp|__syncthreads|__threadfence)\(\);")
# The ops to run without one of a file of csrc/kernels.
AFFECTED = {
    "merge_states.cuh": ["merge_states"],
    "gather.cuh": ["gather"],
    "attention.cuh": ["decode_f16", "prefill_f16_serial", "decode_f16_many"],
    "split_keys.cuh": ["decode_f16", "prefill_f16_serial"],
    "split_columns.cuh": ["prefill_f16_split", "prefill_f16_split_shared", "prefill_f16_split_tree"],
    "split_dims.cuh": ["decode_f16_dims", "decode_f16_latent"],
    "ring_loader.cuh": ["decode_f16_dims"],
    "strand_loader.cuh": ["prefill_f16_split"],
    "work_list.cuh": ["decode_f16_many"],
    "tile_loader.cuh": ["decode_f16", "prefill_f16_serial"],
}


@dataclass(frozen=True)
class Place:
    """A barrier or fence: its number among all, where it is, and what."""

    number: int
    match: re.Match[str]


@cache
def synchronisations() -> dict[str, list[Place]]:
    """Those of the kernels, by file."""
    numbers = count()
    return {
        path.name: places
        for path in sorted((CSRC / "kernels").glob("*.cuh"))
        if (places := [Place(next(numbers), m) for m in SYNCHRONISATION.finditer(path.read_text())])
    }


def sparing(file: str, places: list[Place]) -> str:
    """A file of the kernels in which each synchronisation asks whether it is to be left out."""
    parts, end = ["extern int spared;\n"], 0
    for place in places:
        begin, text = place.match.start(), place.match.string
        parts += [text[end:begin], f"(::spared == {place.number} ? void() : {place.match[1]}());"]
        end = place.match.end()
    return "".join([*parts, text[end:]])


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("thread"))


def num_races(program: Path, name: str, run: tuple[int, int, int], spared: int = -1) -> tuple[int, str]:
    """How many races are reported, and what the program prints."""
    environment = dict(os.environ, TSAN_OPTIONS="exitcode=66 history_size=2", SPARED=str(spared))
    command = [str(program), name, *map(str, run)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    races = result.stderr.count("WARNING: ThreadSanitizer: data race")
    assert result.returncode == (66 if races else 0), result.stderr[-3000:]
    return races, result.stdout.strip()


@pytest.mark.parametrize("run", [(0, 0, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("bug", RACES)
def test_planted_race_is_seen(programs: Programs, bug: str, run: tuple[int, int, int]) -> None:
    assert num_races(programs.planted(), bug, run)[0] > 0


@pytest.mark.parametrize("run", list(product((0, 1, 2), (0, 1, 2), (2,))), ids=str)
def test_clean_kernel_has_no_race(programs: Programs, run: tuple[int, int, int]) -> None:
    assert num_races(programs.planted(), "none", run) == (0, "right")


@pytest.mark.parametrize("op", [*OPS, *(pytest.param(op, marks=pytest.mark.slow) for op in ALIKE)])
def test_op_has_no_race_in_any_order(programs: Programs, op: str) -> None:
    outputs = set()
    for run in RUNS:
        races, output = num_races(programs.ops(), op, run)
        assert races == 0
        outputs.add(output)
    assert len(outputs) == 1, "the result depends on the order in which threads run"


def test_every_op_is_listed(programs: Programs) -> None:
    listed = subprocess.run([str(programs.ops())], capture_output=True, text=True).stdout.split()
    assert sorted(listed) == sorted([*OPS, *ALIKE])


# ---- the real kernels, with one synchronisation taken out -------------------------------------------------


def test_the_ops_are_known_for_every_file_that_synchronises() -> None:
    assert set(synchronisations()) == set(AFFECTED)


def mutations() -> Iterator[object]:
    for file, places in synchronisations().items():
        for i, place in enumerate(places):
            line = place.match.string[: place.match.start()].count("\n") + 1
            marks = [pytest.mark.slow] if i > 0 else []
            yield pytest.param(file, place.number, id=f"{file}:{line} {place.match[1]}", marks=marks)


@pytest.mark.parametrize(("file", "number"), list(mutations()))
def test_no_synchronisation_can_be_spared(programs: Programs, file: str, number: int) -> None:
    runs = product(AFFECTED[file], [(0, 0, 1), (2, 0, 2)])
    assert any(num_races(programs.ops(), op, run, spared=number)[0] for op, run in runs)
