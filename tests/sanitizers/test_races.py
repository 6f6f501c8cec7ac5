"""ThreadSanitizer over the kernels: it finds nothing in them, and everything that is planted.

Each CUDA thread is a thread to it; only barriers, __syncwarp and fences with atomics order them. So it
finds a missing barrier although the emulator runs the threads of a block in turns.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from toolchain import CSRC, GXX, compile_objects, emulator_objects, link

pytestmark = [
    pytest.mark.xdist_group("sanitizers"),
    pytest.mark.skipif(GXX is None, reason="needs g++"),
]

HERE = Path(__file__).parent
FLAGS = ["-fsanitize=thread", "-fno-omit-frame-pointer", "-Wno-unused-parameter"]
# Order of fibers, landing of copies, workers: forward, reverse, random; at_wait, at_once, random.
RUNS = [(0, 0, 1), (1, 1, 2), (2, 2, 2)]

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
    "decode_bf16_wide",
    "decode_f16_window",
    "decode_f16_dims",
    "decode_f16_latent",
    "prefill_f16_latent_window",
    "decode_f32_dims",
    "decode_f32",
    "prefill_f16",
    "prefill_f16_serial",
    "prefill_f16_split",
    "prefill_f16_split_shared",
    "prefill_f16_window",
    "prefill_f16_tree",
    "prefill_f16_split_tree",
    "decode_f16_e4m3",
    "decode_bf16_int8_odd",
    "decode_bf16_int4",
    "decode_f32_int8",
    "prefill_f16_e4m3_split",
    "prefill_f32",
    "prefill_f32_tree",
    "cache_write",
    "cache_quantise",
    "block_copy",
    "block_swap",
    "gather",
    "graph",
    "merge_states",
    "rope_write",
]


class Programs:
    """One object per session, so that each program is built once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019
    def emulator(self) -> list[Path]:
        return emulator_objects(self.folder / "emulator", FLAGS)

    @cache  # noqa: B019
    def launch(self) -> dict[str, Path]:
        """The objects of csrc/launch and of the driver, by source."""
        sources = [*sorted((CSRC / "launch").glob("*.cu")), HERE / "ops_driver.cpp"]
        objects = compile_objects(sources, self.folder / "launch", FLAGS)
        return {source.name: target for source, target in zip(sources, objects, strict=True)}

    @cache  # noqa: B019
    def planted(self) -> Path:
        objects = compile_objects([HERE / "planted.cpp"], self.folder, FLAGS)
        return link([*objects, *self.emulator()], self.folder / "planted", FLAGS)

    @cache  # noqa: B019
    def ops(self) -> Path:
        return link([*self.launch().values(), *self.emulator()], self.folder / "ops", FLAGS)

    def mutated(self, include: Path, sources: list[str], target: Path) -> Path:
        """The ops with some sources compiled against `include` in place of csrc."""
        objects = dict(self.launch())
        changed = compile_objects([include / "launch" / name for name in sources], target, FLAGS, include)
        objects.update(zip(sources, changed, strict=True))
        return link([*objects.values(), *self.emulator()], target / "ops", FLAGS)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("thread"))


def num_races(program: Path, name: str, run: tuple[int, int, int]) -> tuple[int, str]:
    """How many races are reported, and what the program prints."""
    environment = dict(os.environ, TSAN_OPTIONS="exitcode=66 history_size=2")
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


@pytest.mark.parametrize("op", OPS)
def test_op_has_no_race_in_any_order(programs: Programs, op: str) -> None:
    outputs = set()
    for run in RUNS:
        races, output = num_races(programs.ops(), op, run)
        assert races == 0
        outputs.add(output)
    assert len(outputs) == 1, "the result depends on the order in which threads run"


def test_every_op_is_listed(programs: Programs) -> None:
    listed = subprocess.run([str(programs.ops())], capture_output=True, text=True).stdout.split()
    assert sorted(listed) == sorted(OPS)


# ---- the real kernels, with one synchronisation taken out -------------------------------------------------

SYNCHRONISATION = re.compile(r"\b(__syncwarp|__syncthreads|__threadfence)\(\);")
# What to compile anew and to run when a file of csrc/kernels has changed.
AFFECTED = {
    "merge_states.cuh": (["merge_states.cu"], ["merge_states"]),
    "gather.cuh": (["gather.cu"], ["gather"]),
    "attention.cuh": (["attention_f16.cu"], ["decode_f16", "prefill_f16_serial", "decode_f16_many"]),
    "split_keys.cuh": (["attention_f16.cu"], ["decode_f16", "prefill_f16_serial"]),
    "split_columns.cuh": (
        ["attention_f16.cu"],
        ["prefill_f16_split", "prefill_f16_split_shared", "prefill_f16_split_tree"],
    ),
    "split_dims.cuh": (["attention_wide.cu"], ["decode_f16_dims", "decode_f16_latent"]),
    "ring_loader.cuh": (["attention_wide.cu"], ["decode_f16_dims"]),
    "strand_loader.cuh": (["attention_f16.cu"], ["prefill_f16_split"]),
    "work_list.cuh": (["attention.cu"], ["decode_f16_many"]),
    "tile_loader.cuh": (["attention_f16.cu"], ["decode_f16", "prefill_f16_serial"]),
}


def synchronisations() -> list[tuple[str, int, str]]:
    """(file, position, what) of every barrier and fence in the kernels."""
    return [
        (path.name, match.start(), match[1])
        for path in sorted((CSRC / "kernels").glob("*.cuh"))
        for match in SYNCHRONISATION.finditer(path.read_text())
    ]


def test_a_mutation_is_known_for_every_file_that_synchronises() -> None:
    assert {file for file, _, _ in synchronisations()} == set(AFFECTED)


def mutations() -> list[object]:
    seen: set[str] = set()
    parameters = []
    for file, position, what in synchronisations():
        line = (CSRC / "kernels" / file).read_text()[:position].count("\n") + 1
        marks = [pytest.mark.slow] if file in seen else []
        seen.add(file)
        parameters.append(pytest.param(file, position, id=f"{file}:{line} {what}", marks=marks))
    return parameters


@pytest.mark.parametrize(("file", "position"), mutations())
def test_no_synchronisation_can_be_spared(
    programs: Programs, tmp_path: Path, file: str, position: int
) -> None:
    include = tmp_path / "csrc"
    shutil.copytree(CSRC, include)
    text = (CSRC / "kernels" / file).read_text()
    match = SYNCHRONISATION.match(text, position)
    assert match is not None
    (include / "kernels" / file).write_text(text[:position] + ";" + text[match.end() :])
    sources, ops = AFFECTED[file]
    program = programs.mutated(include, sources, tmp_path / "objects")
    assert any(num_races(program, op, run)[0] for op, run in product(ops, [(0, 0, 1), (2, 0, 2)]))
