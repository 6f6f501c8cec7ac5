"""The host side of the CUDA backend: its pure functions, and that no launch plan changes a bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from emulated_archive import emulated_archive
from toolchain import CSRC, GXX, compile_objects, link

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

FLAGS = ["-Wno-unused-parameter"]
FUNCTIONS = [
    "slots",
    "workspace",
    "parallel",
    "columns",
    "strands",
    "divisor",
    "parallel_grid",
    "work_list",
    "launches",
    "packet_width",
    "head_threads",
    "swap_pieces",
]
DTYPES = ["float32", "float16", "bfloat16"]
# head_dim, value_head_dim, query heads per KV head: each kernel's head dim, with and without a tail.
SHAPES = [(64, 64, 1), (40, 64, 8), (128, 80, 5), (256, 256, 3), (192, 136, 9), (576, 512, 9)]


@pytest.fixture(scope="session")
def driver_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("launch_driver.cpp")
    return compile_objects([source], tmp_path_factory.mktemp("launch"), FLAGS)[0]


@pytest.fixture(scope="session")
def driver(driver_object: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link([driver_object, emulated_archive()], tmp_path_factory.mktemp("driver") / "driver")


def run(driver: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [driver, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )


def check(driver: Path, *arguments: object) -> None:
    result = run(driver, *arguments)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_pure_function(driver: Path, function: str) -> None:
    check(driver, function)


@pytest.mark.parametrize("query_tokens", ["decode", "prefill"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_plan_changes_a_bit(
    driver: Path, dtype: str, shape: tuple[int, int, int], query_tokens: str
) -> None:
    """Chunks shared on chips small and large, or walked by one CTA; tiles narrow and wide; both copies."""
    check(driver, "plans", dtype, *shape, query_tokens, "causal", "plain")


@pytest.mark.parametrize(
    ("query_tokens", "rules", "mask"),
    [
        ("decode", "window", "causal"),
        ("decode", "all", "causal"),
        ("prefill", "all", "causal"),
        ("prefill", "tree", "causal"),
        ("many", "window", "not causal"),
        ("long", "all", "causal"),
    ],
)
@pytest.mark.parametrize("shape", [(40, 64, 8), (256, 256, 3), (264, 320, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_plan_changes_a_bit_under_rules(
    driver: Path, dtype: str, shape: tuple[int, int, int], query_tokens: str, rules: str, mask: str
) -> None:
    """Chunks are counted from the window's begin, which differs from tile to tile of rows."""
    check(driver, "plans", dtype, *shape, query_tokens, mask, rules)


@pytest.mark.parametrize("mask", ["causal", "not causal"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float16", (64, 64, 1)), ("bfloat16", (40, 64, 8)), ("float16", (128, 80, 5))],
    ids=str,
)
def test_no_plan_changes_a_bit_of_many_columns(
    driver: Path, dtype: str, shape: tuple[int, int, int], mask: str
) -> None:
    """Up to 560 columns: whole tiles and ragged ones, whether warps split the keys or the columns."""
    check(driver, "plans", dtype, *shape, "many", mask, "plain")


QUANTISED = [
    "float16/float8_e4m3fn",
    "bfloat16/float8_e5m2",
    "bfloat16/int8",
    "bfloat16/int4",
    "float32/int8",
]


QUANTISED_PROBLEMS = [
    ((64, 48, 1), "decode", "plain"),
    ((128, 80, 5), "many", "plain"),
    ((128, 64, 3), "prefill", "tree"),
    ((256, 208, 9), "prefill", "window"),
    ((304, 272, 3), "decode", "plain"),
]


@pytest.mark.parametrize(
    ("dtypes", "shape", "query_tokens", "rules"),
    [
        (dtypes, *problem)
        for i, dtypes in enumerate(QUANTISED)
        for j, problem in enumerate(QUANTISED_PROBLEMS)
        if (i + j) % 5 in (0, 2)
    ],
    ids=str,
)
def test_no_plan_changes_a_bit_of_quantised_caches(
    driver: Path, dtypes: str, shape: tuple[int, int, int], query_tokens: str, rules: str
) -> None:
    """Scales of values far apart, from token to token."""
    check(driver, "plans", dtypes, *shape, query_tokens, "causal", rules)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_plan_changes_a_bit_of_a_long_sequence(driver: Path, dtype: str) -> None:
    """34 chunks: more than the lanes of the warp that folds them."""
    check(driver, "plans", dtype, 64, 64, 1, "long", "causal", "plain")


@pytest.mark.parametrize("rules", ["plain", "window", "tree"])
@pytest.mark.parametrize(
    "dtype", [*DTYPES, "float16/float8_e4m3fn", "bfloat16/float8_e5m2", "float32/float8_e4m3fn"]
)
def test_one_bad_element_shows_where_it_is_seen(driver: Path, dtype: str, rules: str) -> None:
    """Not whole rows: a look at every second element would pass those."""
    check(driver, "poison", dtype, rules)


# What to change in a file of csrc/kernels, what to compile anew, and which check has to fail then.
FAULTS = [
    (
        "sight.cuh",
        "~lowest_bits(column.first - first_token)",
        "~0u",
        ["attention_f16.cu"],
        ("poison", "float16", "window"),
    ),
    (  # columns that see the same and have others between them are added up twice
        "mma_softmax.cuh",
        "unsigned(n * 8 + t_ * 2 + (e & 1) - first) < unsigned(end - first)",
        "sight.seen(n * 8 + t_ * 2 + (e & 1), first_token) == seen",
        ["attention_f16.cu"],
        ("poison", "float16", "tree"),
    ),
    (  # branches outside the window
        "sight.cuh",
        "if (column.place - places.place(i) >= rules.window)",
        "if (false)",
        ["attention_f16.cu"],
        ("poison", "float16", "tree"),
    ),
    (  # the line of work and the CTAs on it count chunks from different begins
        "work_list.cuh",
        "chunks_origin(Places{a, columns}.first_seen())",
        "0",
        ["attention.cu"],
        ("plans", "float16", 40, 64, 8, "decode", "causal", "window"),
    ),
    (  # a tile that only the first columns see wholly
        "sight.cuh",
        "begin() + token(tile.num_columns - 1)",
        "begin() + token(0)",
        ["attention_f16.cu"],
        ("plans", "float16", 128, 80, 5, "many", "causal", "window"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "sources", "arguments"), FAULTS, ids=lambda x: str(x)[:30]
)
def test_planted_fault_is_seen(
    driver_object: Path,
    tmp_path: Path,
    file: str,
    right: str,
    wrong: str,
    sources: list[str],
    arguments: tuple[object, ...],
) -> None:
    include = tmp_path / "csrc"
    shutil.copytree(CSRC, include)
    text = (CSRC / "kernels" / file).read_text()
    assert text.count(right) == 1
    (include / "kernels" / file).write_text(text.replace(right, wrong))
    changed = compile_objects([include / "launch" / name for name in sources], tmp_path, FLAGS, include)
    faulty = link([driver_object, *changed, emulated_archive()], tmp_path / "driver")
    assert run(faulty, *arguments).returncode != 0
