"""Audits the compiled CUDA kernels: registers, spills, occupancy, bytes in flight, instructions, and a model.

    python tools/audit.py [--archs sm_80,sm_90] [--build-dir build/audit] [--json FILE]

Each file of csrc/launch is compiled to a cubin per chip. How kernels are launched comes from the launch code
itself, run in the emulator (launch_survey.cpp). What a kernel must keep to stands in claims.py, and only
there. Ends with status 1 when a claim does not hold.

Needs a test build (`make build`), nvcc (on PATH, in CUDA_HOME or from NVIDIA's wheels) and g++. Instructions
are counted where there is nvdisasm (the wheel nvidia-cuda-nvdisasm); without it claims about them are listed
as not checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as a script's folder is
import roofline
from claims import (
    ASYNCHRONOUS,
    CLAIMS,
    PLAIN,
    RULED,
    Claim,
    split_columns,
    split_keys,
)
from emulated_archive import emulated_archive

REPOSITORY = Path(__file__).resolve().parents[1]
CSRC = REPOSITORY / "csrc"
KIB = 1024


# Names of instructions (SASS) by what they do.
KINDS = {
    "async copy 16": r"LDGSTS\..*128",
    "matrix load": r"LDSM\.",
    "matrix product": r"HMMA\.16816\.",
    "load 16": r"LDG\..*128",
    "store 16": r"STG\..*128",
    "local memory": r"(LDL|STL)\b",
}
LOOP_HAS = ("async copy 16", "matrix product")


# ---- chips ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """Limits of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").

    needed_in_flight: by Little's law, bandwidth x latency / multiprocessors of the fastest product, at about
    1.1 us under load: an H200's 4.8 TB/s over 132 multiprocessors want 40 KB from each.
    """

    shared_nbytes: int
    max_shared_per_cta: int
    needed_in_flight: int
    max_threads: int = 2048
    max_ctas: int = 32
    registers: int = 65536


CHIPS = {
    "sm_80": Chip(164 * KIB, 163 * KIB, 20 * KIB),  # A100: 2.0 TB/s, 108
    "sm_90": Chip(228 * KIB, 227 * KIB, 40 * KIB),  # H200
    "sm_100": Chip(228 * KIB, 227 * KIB, 60 * KIB),  # B200: 8 TB/s, 148
    "sm_120": Chip(100 * KIB, 99 * KIB, 12 * KIB, max_threads=1536, max_ctas=24),  # 1.8 TB/s, 170
}
SYSTEM_SHARED_PER_CTA = KIB  # what CUDA keeps of each CTA's shared memory for itself


def ctas_per_multiprocessor(chip: Chip, threads: int, registers: int, shared_nbytes: int) -> int:
    """How many CTAs fit. Registers are given out per warp, 256 at a time, to each of 4 schedulers."""
    if threads <= 0 or threads > 1024 or shared_nbytes > chip.max_shared_per_cta:
        return 0
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    warps_of_scheduler = chip.registers // 4 // per_warp
    by_registers = 4 * warps_of_scheduler // warps
    by_shared = chip.shared_nbytes // (shared_nbytes + SYSTEM_SHARED_PER_CTA)
    return min(by_registers, by_shared, chip.max_threads // (warps * 32), chip.max_ctas)


# ---- reading what the tools say ------------------------------------------------------------------


@dataclass
class Kernel:
    symbol: str
    arch: str
    registers: int = 0
    spill_nbytes: int = 0
    stack_nbytes: int = 0
    static_shared: int = 0
    max_threads: int | None = None  # of its launch bounds
    instructions: Counter[str] | None = None


def read_ptxas(report: str, arch: str) -> dict[str, Kernel]:
    """Kernels in what `ptxas -v` prints."""
    kernels: dict[str, Kernel] = {}
    kernel: Kernel | None = None
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = kernels.setdefault(entry[1], Kernel(entry[1], arch))
        elif kernel is None:
            continue
        elif spills := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            kernel.stack_nbytes = int(spills[1])
            kernel.spill_nbytes = int(spills[2]) + int(spills[3])
        elif used := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(used[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                kernel.static_shared = int(shared[1])
    return kernels


def read_launch_bounds(ptx: str) -> dict[str, int]:
    """Threads that each kernel's launch bounds allow."""
    entries = re.finditer(r"\.entry (\w+)\(.*?\)\s*((?:\.\w+ [\d, ]+\s*)*)\{", ptx, re.DOTALL)
    bounds = {}
    for entry in entries:
        if limit := re.search(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?", entry[2]):
            bounds[entry[1]] = int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1)
    return bounds


def count_instructions(sass: str) -> dict[str, Counter[str]]:
    """How often each kind of instruction stands in each kernel's code; "loop": all of its main loop's."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            body = bodies.setdefault(section[1], [])
        elif label := re.match(r"(\.L_x_\w+):", line):
            body.append(("", label[1]))
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*)", line):
            body.append((instruction[1], instruction[2]))
    counts = {}
    for symbol, body in bodies.items():
        names = [name for name, _ in body if name]
        counts[symbol] = Counter({"instructions": len(names), "loop": main_loop(body)})
        for kind, pattern in KINDS.items():
            counts[symbol][kind] = sum(bool(re.match(pattern, name)) for name in names)
    return counts


def main_loop(body: Sequence[tuple[str, str]]) -> int:
    """Instructions of the shortest loop that both copies and multiplies matrices, or 0.

    `body`: (name, operands) of an instruction, ("", label) of a label. Blocks that are seldom run stand
    off the straight line and are not counted.
    """
    labels = {operands: i for i, (name, operands) in enumerate(body) if not name}
    sizes = []
    for i, (name, operands) in enumerate(body):
        target = re.search(r"\((\.L_x_\w+)\)", operands)
        if not name.startswith("BRA") or name.startswith("BRA.DIV") or target is None:
            continue
        loop = [other for other, _ in body[labels.get(target[1], i) : i + 1] if other]
        if all(any(re.match(KINDS[kind], other) for other in loop) for kind in LOOP_HAS):
            sizes.append(len(loop))
    return min(sizes, default=0)


@dataclass
class Launches:
    """How the launch code launches a kernel: the shapes seen, and the ring that it fills."""

    shapes: set[tuple[int, int]] = field(default_factory=set)  # (threads, dynamic shared memory)
    ring: int = 0
    in_use: int = 0


def read_survey(lines: Iterable[str], symbols: str) -> dict[str, Launches]:
    """The survey's launches by the kernels' readable names. `symbols`: what `nm` tells of the program."""
    places = {
        int(parts[0], 16): parts[2] for parts in map(str.split, symbols.splitlines()) if len(parts) == 3
    }
    records = [json.loads(line) for line in lines]
    names = demangle(sorted({places[record["kernel"]] for record in records}))
    survey: dict[str, Launches] = {}
    for record in records:
        launches = survey.setdefault(names[places[record["kernel"]]], Launches())
        if "ring" in record:
            launches.ring, launches.in_use = record["ring"], record["in_use"]
        else:
            launches.shapes.add((record["threads"], record["dynamic_shared"]))
    return survey


# ---- judging -------------------------------------------------------------------------------------


@dataclass
class Row:
    """A line of the table, and what is wrong with it."""

    kernel: str
    arch: str
    registers: int
    spill: int
    shared: int  # static and dynamic, of the largest launch
    threads: int
    ctas: int
    waiting: int  # bytes in flight per multiprocessor while all warps wait ...
    computing: int  # ... and while all compute
    instructions: Counter[str] | None
    failures: list[str]
    unchecked: list[str]


def judge(kernel: Kernel, name: str, launches: Launches | None, claims: Sequence[Claim] = CLAIMS) -> Row:
    """Hold a kernel to the claim that its name matches."""
    chip = CHIPS[kernel.arch]
    row = Row(name, kernel.arch, kernel.registers, kernel.spill_nbytes, kernel.static_shared, 0, 0, 0, 0,
              kernel.instructions, [], [])  # fmt: skip
    claim = next((claim for claim in claims if re.search(claim.kernels, name)), None)
    if claim is None:
        row.failures.append("no claim is made about this kernel")
        return row
    if launches is None or not launches.shapes:
        row.failures.append("the survey saw no launch of this kernel")
        return row

    row.threads, dynamic = max(launches.shapes, key=lambda shape: (shape[1], shape[0]))
    row.shared += dynamic
    row.ctas = min(
        ctas_per_multiprocessor(chip, threads, kernel.registers, kernel.static_shared + shared)
        for threads, shared in launches.shapes
    )
    row.waiting = row.ctas * (launches.ring or claim.loads_in_flight * row.threads)
    row.computing = row.waiting - row.ctas * launches.in_use

    if claim.max_spill is not None and kernel.spill_nbytes > claim.max_spill:
        row.failures.append(f"spills {kernel.spill_nbytes} bytes")
    if kernel.max_threads is not None and kernel.max_threads < max(shape[0] for shape in launches.shapes):
        row.failures.append(f"launched with {row.threads} threads, compiled for {kernel.max_threads}")
    if row.ctas < 1:
        row.failures.append("does not fit on a multiprocessor")
    if row.computing < claim.in_flight * chip.needed_in_flight:
        wanted = f"{claim.in_flight} x {chip.needed_in_flight}"
        row.failures.append(f"{row.computing} bytes in flight, wanted {wanted}")
    for kind, least in claim.instructions.items():
        if kernel.instructions is None:
            row.unchecked.append(kind)
        elif kernel.instructions[kind] < least:
            row.failures.append(f"{kernel.instructions[kind]} x {kind}, wanted {least}")
    if claim.max_loop and kernel.instructions is not None:
        loop = kernel.instructions["loop"]
        if not 0 < loop <= claim.max_loop:
            row.failures.append(f"{loop} instructions in the main loop, wanted 1 to {claim.max_loop}")
    return row


def unused_claims(rows: Sequence[Row], claims: Sequence[Claim] = CLAIMS) -> list[str]:
    return [c.kernels for c in claims if not any(re.search(c.kernels, row.kernel) for row in rows)]


# ---- tools ---------------------------------------------------------------------------------------


def find_tool(name: str) -> str | None:
    """A CUDA tool in CUDA_HOME, on PATH, or in the folders of NVIDIA's wheels."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / name).exists():
            return str(Path(home) / "bin" / name)
    if found := shutil.which(name):
        return found
    for folder in sys.path:
        for path in Path(folder).glob(f"nvidia/*/bin/{name}"):
            return str(path)
    system = Path("/usr/local/cuda/bin") / name
    return str(system) if system.exists() else None


def run(command: Sequence[str | Path], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result


def source_hash() -> str:
    """Of everything that a kernel is made of."""
    digest = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *CSRC.rglob("*.cu"), *CSRC.rglob("*.cpp")]):
        digest.update(path.relative_to(CSRC).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update((REPOSITORY / "tools" / "launch_survey.cpp").read_bytes())
    return digest.hexdigest()[:16]


def compile_kernels(nvcc: str, source: Path, arch: str, folder: Path) -> list[Kernel]:
    """The kernels of a launch file, compiled for a chip."""
    work = folder / arch / source.stem
    report, cubin = work / "ptxas.txt", work / f"{source.stem}.cubin"
    if not report.exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        flags = [
            "-std=c++20",
            "-O3",
            f"-arch={arch}",
            f"-I{CSRC}",
            "-Xptxas",
            "-v",
            "--keep",
            "--keep-dir",
            work,
        ]
        report.write_text(run([nvcc, *flags, "-cubin", source, "-o", cubin]).stderr)
    kernels = read_ptxas(report.read_text(), arch)
    for ptx in work.glob("*.ptx"):
        for symbol, limit in read_launch_bounds(ptx.read_text()).items():
            if symbol in kernels:
                kernels[symbol].max_threads = limit
    if kernels and (disassembler := find_tool("nvdisasm")):
        counts = count_instructions(run([disassembler, "-c", cubin]).stdout)
        for symbol, kernel in kernels.items():
            kernel.instructions = counts.get(symbol, Counter())
    return list(kernels.values())


def survey_launches(folder: Path) -> dict[str, Launches]:
    """Build the survey with g++, of what a test build has compiled, and run it."""
    program = folder / "survey"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++20", "-O0", "-w", "-DPAGED_OPS_EMULATED", "-fno-strict-aliasing", f"-I{CSRC}"]
        source = REPOSITORY / "tools" / "launch_survey.cpp"
        run(["g++", *flags, source, emulated_archive(), "-pthread", "-ldl", "-o", program])
    return read_survey(run([program]).stdout.splitlines(), run(["nm", program]).stdout)


def demangle(symbols: Sequence[str]) -> dict[str, str]:
    """Readable names, less namespaces, return type and parameters."""
    text = run(["c++filt", *symbols]).stdout if symbols else ""
    names = {}
    for symbol, name in zip(symbols, text.splitlines(), strict=True):
        name = name.replace("paged_ops::", "").replace("kernels::", "").removeprefix("void ")
        depth, end = 0, len(name)  # the parameters begin at the last parenthesis outside <>
        for i, c in enumerate(name):
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0:
                end = i
        names[symbol] = name[:end]
    return names


# ---- telling -------------------------------------------------------------------------------------


COLUMNS = {"loop": "loop", "LDGSTS": "async copy 16", "LDSM": "matrix load", "HMMA": "matrix product",
           "LDG 16": "load 16", "STG 16": "store 16"}  # fmt: skip


def cells(row: Row) -> list[str]:
    flight = sorted({f"{row.computing / KIB:.0f}", f"{row.waiting / KIB:.0f}"}, key=int)
    counts = ["-" if row.instructions is None else str(row.instructions[kind]) for kind in COLUMNS.values()]
    numbers = [row.registers, row.spill, row.threads, row.shared, row.ctas]
    verdict = "FAIL" if row.failures else "ok"
    return [
        row.kernel,
        row.arch,
        *map(str, numbers),
        " .. ".join(flight) if row.waiting else "",
        *counts,
        verdict,
    ]


def table(rows: Sequence[Row]) -> str:
    """Bytes in flight: while all warps compute .. while all wait, in KB per multiprocessor."""
    header = ["kernel", "chip", "regs", "spill", "threads", "shared", "CTAs", "in flight", *COLUMNS, ""]
    lines = [header, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def pad(i: int, cell: str) -> str:
        return cell.ljust(widths[i]) if i < 2 else cell.rjust(widths[i])

    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(line)) for line in lines)


def model(rows: Sequence[Row]) -> str:
    """What the roofline model makes of the kernels: nothing of it is measured."""
    kernels, in_flight = {}, {}
    tile = r"MmaTile<bf16, bf16, (\d+), (\d)>"
    for row in rows:
        keys = re.fullmatch(split_keys(tile, ASYNCHRONOUS, rf"(?:{PLAIN}|{RULED})"), row.kernel)
        columns = re.fullmatch(split_columns(tile, rf"(?:{PLAIN}|{RULED})"), row.kernel)
        if (found := keys or columns) and row.instructions and row.instructions["loop"] and row.ctas:
            warps = 4 if columns else 1
            kernel = roofline.Kernel(
                8 * int(found[2]) * warps, row.ctas, row.waiting // row.ctas, row.instructions["loop"], warps
            )
            ruled = bool(re.search(RULED, row.kernel))
            kernels[row.arch, int(found[1]), kernel.columns, ruled] = kernel
        elif row.waiting:
            in_flight[row.arch, row.kernel] = row.waiting
    tables = (roofline.attention_rows(kernels), roofline.move_rows(in_flight))
    return "\n\n".join(roofline.table(lines) for lines in tables if len(lines) > 1)


def audit(archs: Sequence[str], build_dir: Path, files: str = "") -> list[Row]:
    """The kernels of the files of csrc/launch whose names `files` matches, each on all chips."""
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise SystemExit("audit: needs nvcc on PATH, in CUDA_HOME or from the wheel nvidia-cuda-nvcc")
    folder = build_dir / source_hash()
    for old in build_dir.glob("[0-9a-f]" * 16):  # of sources as they were
        if old != folder:
            shutil.rmtree(old)
    sources = [path for path in sorted((CSRC / "launch").glob("*.cu")) if re.match(files, path.name)]
    with ThreadPoolExecutor(2) as pool:
        survey = pool.submit(survey_launches, folder)
        jobs = [pool.submit(compile_kernels, nvcc, s, arch, folder) for arch in archs for s in sources]
        kernels = [kernel for job in jobs for kernel in job.result()]
        launches = survey.result()
    names = demangle(sorted({kernel.symbol for kernel in kernels}))
    rows = [judge(kernel, names[kernel.symbol], launches.get(names[kernel.symbol])) for kernel in kernels]
    return sorted(rows, key=lambda row: (row.kernel, row.arch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", default="sm_80,sm_90", help="chips, separated by commas")
    parser.add_argument("--build-dir", type=Path, default=REPOSITORY / "build" / "audit")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    arguments = parser.parse_args()
    archs = arguments.archs.split(",")
    for arch in archs:
        if arch not in CHIPS:
            parser.error(f"--archs: {arch} is not one of {', '.join(CHIPS)}")

    rows = audit(archs, arguments.build_dir)
    print(table(rows))
    unchecked = sum(1 for row in rows if row.unchecked)
    failures = [f"{row.kernel} on {row.arch}: {failure}" for row in rows for failure in row.failures]
    failures += [f"no kernel matches the claim about {pattern}" for pattern in unused_claims(rows)]
    if unchecked:
        print(f"\nnot checked for want of nvdisasm: the instructions of {unchecked} kernels")
    if predicted := model(rows):
        print(f"\nmodelled, not measured (tools/roofline.py):\n\n{predicted}")
    print(f"\n{len(rows)} kernels, {len(failures)} claims broken")
    for failure in failures:
        print(f"  {failure}")
    if arguments.json:
        records = [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps({"rows": records, "failures": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
