"""Everything that needs a GPU, in one unattended run: ``make gpu-report``.

    python -m bench.gpu_report [--backend cuda|emulated] [--quick] [--out DIR] [--limit SECONDS]

Uses the interpreter it is started with and whatever is installed there; nothing is downloaded. Each part runs
in a process of its own under a time limit, and the report (``gpu-report.json`` and ``gpu-report.md``) is
written again after each, so that a run that is cut off still tells what it found. ``--backend emulated``
exercises the parts that need no GPU on the kernels in the emulator. Ends with status 1 when a part failed,
with 3 and nothing written when there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu_part import Options
from bench.gpu_parts import PARTS, ROOT

EXIT_NO_GPU = 3


def missing_gpu() -> str:
    """Why no GPU can be used here, by the driver's own word; empty if one can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1)"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the NVIDIA driver answers with error {status}"
    return "" if count.value else "the NVIDIA driver finds none"


def run_part(name: str, options: Options, target: Path) -> None:
    """In the part's own process: do it, and write what it found."""
    part = next(part for part in PARTS if part.name == name)
    if name in ("machine", "build", "tests"):
        context: Any = contextlib.nullcontext()
    else:
        from paged_ops.testing.backends import use_backend

        context = use_backend("emulated" if options.backend == "emulated" else "cuda")
    with context:
        target.write_text(json.dumps(part.run(options)))


def supervise(name: str, limit_seconds: float, options: Options, out: Path) -> dict[str, Any]:
    """Run a part in a child process; whatever happens to it is a result."""
    target = out / f"part-{name}.json"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu_report", "--part", name, "--backend", options.backend]
    command += ["--out", str(out)] + ["--quick"] * options.quick
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    begin = time.monotonic()
    log = out / f"part-{name}.log"
    try:
        with log.open("w") as stream:
            child = subprocess.Popen(
                command, stdout=stream, stderr=stream, cwd=ROOT, env=environment, start_new_session=True
            )
            try:
                status = child.wait(limit_seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # what it started ends with it
        if status != 0:
            raise RuntimeError(f"ended with status {status}")
        result: dict[str, Any] = {"status": "ok", "found": json.loads(target.read_text())}
        if result["found"].get("passed") is False:
            result["status"] = "failed"
    except subprocess.TimeoutExpired:
        result = {"status": "timed out", "limit_seconds": limit_seconds, "tail": log.read_text()[-1500:]}
    except (RuntimeError, OSError, ValueError) as error:
        result = {"status": "failed", "error": str(error)[:300], "tail": log.read_text()[-3000:]}
    target.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    result["seconds"] = round(time.monotonic() - begin, 1)
    return result


def markdown(report: dict[str, dict[str, Any]]) -> str:
    """The report for people: a line per part, and a table for each part that has rows."""
    lines = ["# GPU report", ""]
    lines += ["| part | status | seconds |", "| --- | --- | --- |"]
    lines += [f"| {name} | {part['status']} | {part['seconds']} |" for name, part in report.items()]
    for name, part in report.items():
        lines += ["", f"## {name}", ""]
        found = part.get("found", {key: part[key] for key in ("error", "tail") if key in part})
        rows = found.get("rows", []) if isinstance(found, dict) else []
        for key, value in found.items():
            if key == "rows":
                continue
            text = str(value)
            lines += ["```", f"{key}: {text}", "```"] if "\n" in text else [f"- {key}: {text}"]
        if rows:
            lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
            lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: whether it runs, not how fast")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "build" / "gpu-report-out"))
    )
    parser.add_argument("--limit", type=float, default=470, help="seconds for the whole report")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    options = Options(given.backend, given.quick)
    if given.backend == "cuda" and not given.part and (why := missing_gpu()):
        print(f"no GPU to report on: {why}; --backend emulated runs what needs none", file=sys.stderr)
        return EXIT_NO_GPU
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part:
        run_part(given.part, options, given.out / f"part-{given.part}.json")
        return 0
    report: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + given.limit
    for part in PARTS:
        if given.backend not in part.backends:
            continue
        left = end - time.monotonic()
        if left < 5:
            report[part.name] = {"status": "no time left", "seconds": 0}
        else:
            report[part.name] = supervise(part.name, min(part.limit_seconds, left), options, given.out)
        print(f"{part.name}: {report[part.name]['status']} in {report[part.name]['seconds']} s", flush=True)
        (given.out / "gpu-report.json").write_text(json.dumps(report, indent=2))
        (given.out / "gpu-report.md").write_text(markdown(report))
    print(f"written to {given.out / 'gpu-report.md'}")
    return 0 if all(part["status"] == "ok" for part in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
