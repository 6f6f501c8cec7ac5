"""The CPU backend compiled by g++ into a small driver: under sanitizers, and its objects' symbols."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")

# What CMakeLists.txt gives to each.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *AVX2]
ISA_FLAGS = {
    "isa_scalar": [],
    "isa_avx2": AVX2,
    "isa_avx512": AVX512,
    "isa_amx": [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mgfni"],
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compile_object(source: Path, folder: Path, flags: list[str]) -> Path:
    target = folder / (source.stem + ".o")
    isa = [*ISA_FLAGS[source.stem], "-ffp-contract=off"] if source.stem in ISA_FLAGS else []
    command = [
        "g++",
        "-std=c++20",
        *flags,
        *(isa if X86 else []),
        f"-I{CSRC}",
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    return target


def build_driver(folder: Path, sanitizer: str) -> Path:
    flags = [
        "-O1",
        "-w",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize=null,object-size,pointer-overflow",  # they double the time to compile
        "-fno-sanitize-recover=all",
        "-DPAGED_OPS_POISON_SCRATCH",
    ]
    if (
        sanitizer == "thread"
    ):  # races are between tasks: one instruction set shows them, and builds everywhere
        flags.append("-DPAGED_OPS_SCALAR_ONLY")
    sources = [*sorted((CSRC / "cpu").glob("*.cpp")), HERE / "cpu_driver.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: compile_object(source, folder, flags), sources))
    driver = folder / "cpu_driver"
    subprocess.run(
        ["g++", f"-fsanitize={sanitizer}", "-pthread", *map(str, objects), "-o", str(driver)], check=True
    )
    return driver


# Of a sanitizer all tests run on one worker: each worker builds its own driver.
SANITIZERS = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"native {name}"))
    for name in ("address,undefined", "thread")
]


@pytest.fixture(scope="module", params=SANITIZERS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("native"), request.param)


@pytest.mark.parametrize("part", ["pool", "fork", "kernels"])
def test_clean_under_sanitizers(driver: Path, part: str) -> None:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "TSAN_OPTIONS": "die_after_fork=0",
    }
    done = subprocess.run([driver, part], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "printed"),
    [
        ({"PAGED_OPS_CPU_ISA": "scalar", "PAGED_OPS_NUM_THREADS": "3"}, "scalar 3"),
        ({"PAGED_OPS_CPU_ISA": "sse9"}, 'PAGED_OPS_CPU_ISA: is "sse9", wanted one of '),
        ({"PAGED_OPS_NUM_THREADS": "0"}, 'PAGED_OPS_NUM_THREADS: is "0", wanted a number from 1 to 4096'),
        ({"PAGED_OPS_NUM_THREADS": "2x"}, 'PAGED_OPS_NUM_THREADS: is "2x", wanted a number'),
    ],
)
def test_settings_from_the_environment(driver: Path, environment: dict[str, str], printed: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGED_OPS_")}
    done = subprocess.run(
        [driver, "settings"], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(printed)


def test_as_many_threads_as_cpus_allowed(driver: Path) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this system")
    one = min(os.sched_getaffinity(0))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGED_OPS_")}
    done = subprocess.run(
        [driver, "settings"],
        env=inherited,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )
    assert done.stdout.split()[1] == "1"


@pytest.mark.skipif(not X86, reason="other machines have one instruction set")
@pytest.mark.parametrize("name", ["isa_avx2", "isa_avx512", "isa_amx"])
def test_nothing_shared_is_compiled_for_one_instruction_set(name: str, tmp_path: Path) -> None:
    """The linker keeps one of the weak symbols of a name: a shared inline function or template that is
    compiled here too might then run AVX code on a machine without it. Unoptimised, none hides by inlining."""
    target = compile_object(CSRC / "cpu" / f"{name}.cpp", tmp_path, ["-O0", "-w", "-fno-exceptions"])
    listing = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True).stdout
    namespace = f"paged_ops::cpu::{name.removeprefix('isa_')}::"
    weak = [line for line in listing.splitlines() if line[17:18] in "WVu"]
    assert weak, "the kernels themselves are templates: there must be weak symbols"
    assert [line for line in weak if namespace not in line] == []


def test_prefetcher_asks_for_each_line_once(tmp_path: Path) -> None:
    """However steps of a fixed size, of any size and the drain are mixed."""
    program = tmp_path / "prefetcher"
    flags = ["-std=c++20", "-O1", "-fsanitize=address,undefined", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, str(HERE / "prefetcher.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "all lines once\n"), done.stdout + done.stderr


@pytest.mark.skipif(not X86, reason="other machines have no AVX2")
def test_products_prefetch_as_compiled(tmp_path: Path) -> None:
    """No result shows it when a compiler drops the calls of a function that does nothing but prefetch."""
    target = tmp_path / "products.s"
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", *AVX2, f"-I{CSRC}"]
    subprocess.run(["g++", *flags, "-S", str(HERE / "products.cpp"), "-o", str(target)], check=True)
    functions = re.split(r"^(?=_Z\w+:)", target.read_text(), flags=re.MULTILINE)[1:]
    products = [text for text in functions if re.match(r"_Z\w*?(5scoreI|13weigh_columnsI)", text)]
    assert len(products) >= 12
    assert [text.split(":")[0] for text in products if "prefetch" not in text] == []
