"""The archive of csrc/launch and the emulator that a test build leaves in build/emulated."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "kernels", "launch", "params", "simt")  # of csrc, that it is made of


def emulated_archive() -> Path:
    """What programs that run the launch code are linked with; made anew by a build, never by itself."""
    archive = REPOSITORY / "build" / "emulated" / "libpaged_ops_emulated.a"
    sources = [path for folder in FOLDERS for path in (REPOSITORY / "csrc" / folder).rglob("*.*")]
    if not archive.exists() or archive.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        raise RuntimeError(f"{archive.name} is missing or older than csrc: run `make build`")
    return archive
