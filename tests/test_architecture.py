"""The house rules that a machine can check: imports, includes, first lines, inline assembly, sizes."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paged_ops

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600

# Folders of csrc -> the folders whose headers they may include, besides their own.
INCLUDES: dict[str, set[str]] = {
    "core": set(),
    "params": {"core"},
    "simt": {"core", "params"},
    "kernels": {"core", "params", "simt"},
    "launch": {"core", "params", "simt", "kernels"},
    "cpu": {"core", "params"},
    "bind": {"core", "params", "launch", "cpu"},
}
# Across those lines: the bindings hold the switches of the emulator.
INCLUDES_TOO = {"csrc/bind/emulated.cpp": {"simt/emulator/config.h"}}

# What of reference_engine runs or shows; everything else there is pure.
ENGINE_RUNS = {"models", "runner", "engine", "sampler", "speculative", "parallel", "transfer"}
ENGINE_SHOWS = {"cli", "demo", "demo_view", "talk", "report", "__main__", "__init__"}
FOREIGN_TO_PURE = {"torch", "paged_ops", "transformers", "tokenizers", "safetensors", "gguf", "rich", "cupy"}


def sources(*folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The project's own files in these folders, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = {Path(line) for line in listed.stdout.splitlines()}
    else:  # not a git checkout: an unpacked archive
        paths = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*")}
    return sorted(path for path in paths if path.suffix in suffixes and (ROOT / path).is_file())


CXX = sources("csrc", suffixes=(".h", ".cpp", ".cu", ".cuh", ".inl"))
PYTHON = sources(
    "paged_ops", "reference_engine", "tests", "bench", "examples", "tools", "setup.py", suffixes=(".py",)
)


@functools.cache
def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def under(*parts: str) -> list[Path]:
    return [path for path in CXX + PYTHON if path.parts[: len(parts)] == parts]


def test_the_tree_is_there() -> None:
    """Otherwise every test below passes for want of files."""
    assert {path.parts[1] for path in CXX} == set(INCLUDES)
    assert len(CXX) > 30 and len(PYTHON) > 20


# --- C++ and CUDA -----------------------------------------------------------------------------------------


def included(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text_of(path), re.MULTILINE)


def test_include_directions() -> None:
    wrong = []
    for path in CXX:
        allowed = {path.parts[1]} | INCLUDES[path.parts[1]]
        for name in included(path):
            folder = name.partition("/")[0]
            excused = name in INCLUDES_TOO.get(str(path), ())
            if folder in INCLUDES and folder not in allowed and not excused:
                wrong.append(f"{path} includes {name}")
    assert not wrong


def test_nothing_knows_torch_and_only_bind_knows_python() -> None:
    wrong = []
    for path in CXX:
        for name in included(path):
            if re.match(r"(torch|ATen|c10)/", name):
                wrong.append(f"{path} includes {name}")
            if path.parts[1] != "bind" and re.match(r"(pybind11/|Python\.h)", name):
                wrong.append(f"{path} includes {name}")
    assert not wrong


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def test_inline_assembly_only_where_the_machine_is_spoken_to() -> None:
    """PTX in csrc/simt, beside its host twins; on the CPU its identification and the setting of tiles."""
    wrong = []
    for path in CXX:
        excused = path.parts[1] == "simt" or re.match(r"csrc/cpu/(isa|amx)", str(path))
        assembly = re.search(
            r"\b(asm|__asm|__asm__)\s*(volatile|__volatile__)?\s*\(", without_comments(text_of(path))
        )
        if assembly and not excused:
            wrong.append(f"{path}: {assembly[0]}")
    assert not wrong


def test_headers_are_guarded() -> None:
    headers = [path for path in CXX if path.suffix in (".h", ".cuh")]
    assert not [str(path) for path in headers if "#pragma once" not in text_of(path)]


# --- first lines, sizes, names ----------------------------------------------------------------------------


def test_first_line_says_what_a_file_is_for() -> None:
    wrong = []
    for path in CXX + PYTHON:
        lines = [line for line in text_of(path).splitlines() if not line.startswith("#!")]
        comment = r"// .{15,}" if path in CXX else r'r?""".{15,}'
        if not lines or not re.match(comment, lines[0]):
            wrong.append(f"{path} begins with {lines[:1]}")
    assert not wrong


def test_no_file_outgrows_a_reader() -> None:
    lengths = {str(path): text_of(path).count("\n") for path in CXX + PYTHON}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_no_path_of_one_machine() -> None:
    wrong = []
    for path in CXX + PYTHON:
        found = re.search(r"""["'\s(=](/(?:home|root|Users|mnt|work|tmp)/\w+)""", text_of(path))
        if found:
            wrong.append(f"{path} mentions {found[1]}")
    assert not wrong


# --- Python -----------------------------------------------------------------------------------------------


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether on import of this one) of every import; those for type checkers do not count."""
    package = list(path.with_suffix("").parts[:-1])

    def walk(node: ast.AST, at_once: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parents = package[: len(package) - child.level + 1] if child.level else []
                base = ".".join([*parents, *([child.module] if child.module else [])])
                yield base, at_once
                yield from ((f"{base}.{alias.name}", at_once) for alias in child.names)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, at_once and not inside)

    return list(walk(ast.parse(text_of(path)), True))


def top(module: str) -> str:
    return module.partition(".")[0]


def test_paged_ops_knows_no_engine() -> None:
    wrong = [
        f"{p} imports {m}" for p in under("paged_ops") for m, _ in imports(p) if top(m) == "reference_engine"
    ]
    assert not wrong


def test_paged_ops_imports_frameworks_only_where_they_are_used() -> None:
    """Inside functions, or in modules that are nothing without one and that nothing imports by itself."""
    allowed = set(sys.stdlib_module_names) | {"numpy", "paged_ops"}
    wrong = []
    for path in under("paged_ops"):
        also = {"torch"} if path.name == "_torch.py" else set()
        if path.parts[1] == "testing":
            also = {"ml_dtypes"}
        if path.parts[1] == "compat":
            also = {"torch"}
        if path.parts[1] == "integrations":
            also = {"torch", "transformers"}
        wrong += [
            f"{path} imports {m}" for m, at_once in imports(path) if at_once and top(m) not in allowed | also
        ]
    assert not wrong


def test_the_pure_part_of_the_engine_is_pure() -> None:
    """Standard library and NumPy; of its own package, pure modules only."""
    wrong = []
    for path in under("reference_engine"):
        if {path.stem, *path.parts[1:-1]} & (ENGINE_RUNS | ENGINE_SHOWS):
            continue
        for module, _ in imports(path):
            impure = top(module) == "reference_engine" and set(module.split(".")) & (
                ENGINE_RUNS | ENGINE_SHOWS
            )
            if top(module) in FOREIGN_TO_PURE or impure:
                wrong.append(f"{path} imports {module}")
    assert not wrong


@pytest.mark.parametrize("folder", ["compat", "integrations"])
def test_compat_calls_public_ops_only(folder: str) -> None:
    """What engines may use, these use: `paged_ops` itself and the names it exports, and their own folder."""
    own, paths = f"paged_ops.{folder}", under("paged_ops", folder)
    allowed = {"paged_ops"} | {f"paged_ops.{name}" for name in paged_ops.__all__}
    wrong = []
    for path in paths:
        for module, _ in imports(path):
            inside = module == own or module.startswith(f"{own}.")
            if top(module) == "paged_ops" and module not in allowed and not inside:
                wrong.append(f"{path} imports {module}")
        for node in ast.walk(ast.parse(text_of(path))):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if named and node.value.id == "paged_ops" and node.attr not in paged_ops.__all__:
                wrong.append(f"{path} uses paged_ops.{node.attr}")
    assert paths and not wrong


def test_nothing_imports_the_ways_in_by_itself() -> None:
    """Whoever wants compat or an integration imports it: the rest of the package does without."""
    wrong = [
        f"{path} imports {module}"
        for path in under("paged_ops")
        if path.parts[1] not in ("compat", "integrations")
        for module, _ in imports(path)
        if re.match(r"paged_ops\.(compat|integrations)\b", module)
    ]
    assert not wrong


def test_every_package_is_installed() -> None:
    """A folder that pyproject.toml does not list works here and is missing from the wheel."""
    (listed,) = re.findall(
        r"^packages = \[(.*?)\]", text_of(Path("pyproject.toml")), re.MULTILINE | re.DOTALL
    )
    packages = {
        ".".join(path.parent.parts)
        for path in under("paged_ops") + under("reference_engine")
        if path.name == "__init__.py"
    }
    assert set(re.findall(r'"([^"]+)"', listed)) == packages


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_light() -> None:
    for module in ("paged_ops", "paged_ops.reference"):
        heavy = "{'torch', 'cupy', 'jax', 'ml_dtypes', 'transformers'}"
        assert run_python(f"import sys, {module}; print(len({heavy} & set(sys.modules)))") == "0", module


def test_numpy_users_never_load_torch() -> None:
    code = (
        "import sys, numpy as np, paged_ops; "
        "one, cache = np.ones((1, 1, 8), 'f4'), np.ones((1, 1, 1, 8), 'f4'); table = np.zeros((1, 1), 'i4'); "
        "out = paged_ops.paged_attention_decode(one, cache, cache, table, table[0] + 1); "
        "print((out == 1).all(), 'torch' in sys.modules)"
    )
    assert run_python(code) == "True False"
